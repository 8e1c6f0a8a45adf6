"""``run_in_order.py MARK SPEC.json…``: run launches on a launcher of one's own; a line of JSON after each."""

import json
import os
import sys
from pathlib import Path

from autotune.clock import SystemClock
from autotune.launcher import ProcessLauncher
from autotune.records import TrialSpec

launcher = ProcessLauncher(sys.argv[1], SystemClock())
for path in sys.argv[2:]:
    spec = TrialSpec.model_validate_json(Path(path).read_text())
    result = launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)
    print(json.dumps({"result": result.model_dump(mode="json"), "shm": os.listdir("/dev/shm")}), flush=True)
launcher.close()
