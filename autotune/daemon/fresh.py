"""``python -m autotune.daemon.fresh FOLDER DEVICE``: which profiles hold no longer.

Prints JSON: for each slot the rows of what has changed, and the configuration in force as ``--baseline`` takes it.
Run by the interpreter that the searches are run by: its torch is the one that counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from autotune.profile.store import Store, look_here, rematch_baseline, stale_rows


def main(arguments: list[str]) -> int:
    """Look at every slot, and write down in each what was found.

    Args:
        arguments: the store's folder, and ``cpu`` or the UUID of the card that the searches are run on.
    """
    store = Store(Path(arguments[0]))
    on_cpu = arguments[1] == "cpu"
    here = look_here(uuid=None if on_cpu else arguments[1])
    found = {}
    for kept in store.all():
        if kept.profile.conditions.device.startswith("cuda") == on_cpu:
            continue
        rows = stale_rows(kept.profile, here)
        store.note(kept.name, tuple(rows))
        found[kept.name] = {"rows": rows, "baseline": rematch_baseline(kept.profile)}
    print(json.dumps(found))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
