"""``python -m autotune.child.check_workload FD``: import a workload, and report whether it is valid.

Reads a `WorkloadRef` as JSON from stdin, and writes ``{}`` or ``{"message", "advice", "detail", "exit_code"}`` as JSON
to the file at descriptor FD. Calls none of the workload's functions, so nothing is built and no card is used.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from autotune.base.errors import AutotuneError, WorkloadError
from autotune.base.records import WorkloadRef
from autotune.workload.contract import args_of, load

#: Of a long message or traceback, only this many last characters are reported.
CHARS = 4000


def check(ref: WorkloadRef) -> dict[str, Any]:
    """Import a workload; return the parts of the error if it is not valid, else an empty dict."""
    try:
        args_of(load(ref), ref)
    except AutotuneError as error:
        return {"message": str(error), "advice": error.advice, "exit_code": error.exit_code}
    except (Exception, SystemExit) as error:
        what = traceback.format_exception_only(error)[-1].strip()[-CHARS:]
        return {
            "message": f"{ref.name} cannot be imported: {what}",
            "detail": "".join(traceback.format_exception(error))[-CHARS:],
            "exit_code": WorkloadError.exit_code,
        }
    return {}


if __name__ == "__main__":
    found = check(WorkloadRef.model_validate_json(sys.stdin.read()))
    os.write(int(sys.argv[1]), json.dumps(found).encode())
    # A thread or process that the workload has started must not keep this one from ending.
    os._exit(0)
