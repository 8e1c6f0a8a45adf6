"""``run_specs.py MARK SPEC.json…``: runs launches in order on a launcher of its own.

Prints JSON lines: each beat; each result, with the names of the files in /dev/shm after it.
"""

import json
import os
import sys
from pathlib import Path

from autotune.base.clock import SystemClock
from autotune.base.records import TrialSpec
from autotune.launcher import ProcessLauncher


def say_beat(beat):
    print(json.dumps({"beat": beat.model_dump(mode="json")}), flush=True)


launcher = ProcessLauncher(sys.argv[1], SystemClock())
for path in sys.argv[2:]:
    spec = TrialSpec.model_validate_json(Path(path).read_text())
    result = launcher.run(spec, on_beat=say_beat, stop=lambda: False)
    print(json.dumps({"result": result.model_dump(mode="json"), "shm": os.listdir("/dev/shm")}), flush=True)
launcher.close()
