"""The process of one part: ``python -m benchmarks.card.inside`` with a JSON object as argument (see `command.run`).

How the part ended is written to ``end.json``. If that is missing, the process was killed.
"""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomic
from benchmarks.card.parts import BY_NAME
from benchmarks.card.stage import NO_TIME, TAIL, Skipped, Stage


def _out_of_time(number: int, frame: Any) -> None:
    raise TimeoutError("out of time")


def main() -> None:
    """Run the part."""
    asked = json.loads(sys.argv[1])
    work = Path(asked["work"])
    signal.signal(signal.SIGTERM, _out_of_time)
    stage = Stage(
        work=work,
        out=Path(asked["out"]),
        stem=asked["stem"],
        rehearsal=asked["rehearsal"],
        left_s=asked["left_s"],
        uuid=asked["uuid"],
    )
    module, _, function = BY_NAME[asked["part"]].function.partition(".")

    def run() -> None:
        getattr(importlib.import_module(f"benchmarks.card.{module}"), function)(stage)
        if NO_TIME in json.dumps(stage.figures, default=str):
            # What is there is kept, and the part is due again.
            raise TimeoutError("rows are missing, for which no time was left")

    end = ended(run)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    shutil.rmtree(stage.folder, ignore_errors=True)
    write_atomic(work / "end.json", json.dumps(end))


def ended(run: Callable[[], None]) -> dict[str, str | None]:
    """Run a part; return how it ended: ``status``, and ``reason`` if not ``ok``."""
    try:
        run()
    except Skipped as skipped:
        return {"status": "skipped", "reason": str(skipped)}
    except TimeoutError as error:
        return {"status": "failed", "reason": str(error)}
    except BaseException:
        # Also an exit or Ctrl-C: whatever ended it belongs into its result.
        return {"status": "failed", "reason": "".join(traceback.format_exc().splitlines(keepends=True)[-TAIL:])}
    return {"status": "ok", "reason": None}


if __name__ == "__main__":
    main()
