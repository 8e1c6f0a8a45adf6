"""``python -m autotune.daemon.stale_check FOLDER DEVICE``: report which stored profiles are stale.

Prints JSON: for each slot, the conditions that changed and the current configuration in ``--baseline`` form. It must
run under the interpreter that runs the searches, because that interpreter's torch version is compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from autotune.profile.in_force import Store, look_here, rematch_baseline, stale_rows


def main(arguments: list[str]) -> int:
    """Check every slot for this device and record the result in the store."""
    store = Store(Path(arguments[0]))
    on_cpu = arguments[1] == "cpu"
    here = look_here(uuid=None if on_cpu else arguments[1])
    report = {}
    for entry in store.all():
        if entry.profile.conditions.device.startswith("cuda") == on_cpu:
            continue
        rows = stale_rows(entry.profile, here)
        store.note(entry.name, tuple(rows))
        report[entry.name] = {"rows": rows, "baseline": rematch_baseline(entry.profile)}
    print(json.dumps(report))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
