"""``killed_at.py STEP daemon run …``: the daemon, killing itself with SIGKILL right after a given step."""

import os
import signal
import sys

from autotune.base.records import Running
from autotune.cli.main import main
from autotune.daemon import queue
from autotune.daemon.queue import Queue
from autotune.daemon.runner import ProcessRunner
from autotune.daemon.scheduler import Scheduler

step = sys.argv.pop(1)


def die_after(owner, name, condition=lambda *args, result: True):
    real = getattr(owner, name)

    def then_die(*args, **options):
        result = real(*args, **options)
        if condition(*args, result=result):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, then_die)


def claim(*args, result):
    return isinstance(result.status, Running) and result.status.child is None


def record_child(*args, result):
    return isinstance(result.status, Running) and result.status.child is not None


if step == "submitted":
    # Committed but not acknowledged.
    die_after(Queue, "submit_all")
elif step == "half-written":
    # Written to the job's folder but not to the database.
    die_after(queue, "write_atomic")
elif step == "claimed":
    die_after(Queue, "move", claim)
elif step == "spawned":
    die_after(ProcessRunner, "start")
elif step == "noted":
    die_after(Queue, "move", record_child)
elif step == "ended":
    # The job has written its end record, and the queue has not recorded it.
    die_after(ProcessRunner, "ended", lambda *_, result: bool(result))
elif step == "settled":
    die_after(Scheduler, "_settle", lambda *args, **options: True)
elif step == "looked":
    die_after(Scheduler, "read_devices", lambda scheduler, result: bool(scheduler.running()))
else:
    sys.exit(f"no step {step}")
main()
