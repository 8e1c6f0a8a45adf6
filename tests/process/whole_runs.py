"""``whole_runs.py``: `autotune train` in a process of its own for each line read, forked from this one so that torch is
imported once. Each may kill itself with SIGKILL, or get another signal, at a given moment; of several ranks, one does.

A line is ``{"words": […], "moment": NAME, "count": N, "signal": NUMBER, "rank": N, "leader": BOOL, "env": {…}}`` in
JSON; one is printed for each. A signal of 0 raises an exception. The leader of the ranks may get it in place of the
rank, which then waits until it is told of it, before a step.
"""

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import time

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401  (several ranks import both)

from autotune.cli import main
from autotune.training.whole_training import checkpoints, course

#: What is called at each moment, and whether the signal comes before it or after it.
MOMENTS = {
    "step": (course.TrainingCourse, "_take", False),
    "middle of a write": (checkpoints._Hashing, "write", True),
    "written beside it": (checkpoints, "write_atomic", True),
    "written": (checkpoints, "create_atomic", True),
    "evaluation": (course.Evaluation, "_of", False),
    "between epochs": (checkpoints.EpochHistory, "write", True),
}


def strike(moment, count, number, rank, leader):
    owner, name, after = MOMENTS[moment]
    real = getattr(owner, name)
    left = count

    def wrapped(*args, **options):
        nonlocal left
        left -= os.environ.get("RANK", "0") == str(rank)
        struck = left == 0
        if struck:
            left = -1
        if struck and not after:
            hit(args[0])
        result = real(*args, **options)
        if struck and after:
            hit(args[0])
        return result

    def hit(training):
        if not number:
            raise ValueError("the labels are wrong")
        os.kill(os.getppid() if leader else os.getpid(), number)
        deadline = time.monotonic() + 30
        while leader and training._around.stop() is None and time.monotonic() < deadline:
            time.sleep(0.01)

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
        number = run.get("signal", signal.SIGKILL)
        strike(run["moment"], run["count"], number, run.get("rank", 0), run.get("leader", False))
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
