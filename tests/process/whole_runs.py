"""``whole_runs.py``: `autotune train` in a process of its own for each line read, forked from this one so that torch is
imported once. Each may kill itself with SIGKILL, or get another signal, at a given moment.

A line is ``{"words": […], "moment": NAME, "count": N, "signal": NUMBER, "env": {…}}`` in JSON; one is printed for each.
"""

import contextlib
import io
import json
import os
import signal
import sys
import tempfile

import torch
import torch._dynamo  # noqa: F401  (every optimizer imports it)

from autotune.cli import main
from autotune.whole_training import checkpoints, course, evaluation, history

#: What is called at each moment, and whether the signal comes before it or after it.
MOMENTS = {
    "step": (course.TrainingCourse, "_take", False),
    "middle of a write": (checkpoints._Hashing, "write", True),
    "written": (checkpoints, "create_atomic", True),
    "evaluation": (evaluation.Evaluation, "_of", False),
    "between epochs": (history.EpochHistory, "write", True),
}


def strike(moment, count, number):
    owner, name, after = MOMENTS[moment]
    real = getattr(owner, name)
    left = count

    def wrapped(*args, **options):
        nonlocal left
        left -= 1
        if left == 0 and not after:
            os.kill(os.getpid(), number)
        result = real(*args, **options)
        if left == 0 and after:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, wrapped)


def in_child(run, out, err):
    os.environ.update(run.get("env", {}))
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(1, "w")),
        io.TextIOWrapper(io.FileIO(2, "w"), line_buffering=True),
    )
    if run.get("moment"):
        strike(run["moment"], run["count"], run.get("signal", signal.SIGKILL))
    code = main.run(run["words"])
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


main._register()
# A process with threads is not forked.
assert len(os.listdir("/proc/self/task")) == 1
for line in sys.stdin:
    run = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            in_child(run, out, err)
        _, status = os.waitpid(child, 0)
        told = {}
        for name, stream in (("stdout", out), ("stderr", err)):
            stream.seek(0)
            told[name] = stream.read().decode()
    print(json.dumps({"code": os.waitstatus_to_exitcode(status), **told}), flush=True)
