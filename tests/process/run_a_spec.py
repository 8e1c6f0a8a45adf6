"""``run_a_spec.py MARK SPEC.json…``: run launches on a launcher of one's own; beats and results are lines of JSON."""

import json
import sys
from pathlib import Path

from autotune.clock import SystemClock
from autotune.launcher import ProcessLauncher
from autotune.records import TrialSpec


def say(name, record):
    print(json.dumps({name: record.model_dump(mode="json")}), flush=True)


launcher = ProcessLauncher(sys.argv[1], SystemClock())
for path in sys.argv[2:]:
    spec = TrialSpec.model_validate_json(Path(path).read_text())
    say("result", launcher.run(spec, on_beat=lambda beat: say("beat", beat), stop=lambda: False))
launcher.close()
