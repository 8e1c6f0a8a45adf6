#!/usr/bin/env python3
"""Replaces a job's Python interpreter: runs the job, and kills it and the daemon once at a given moment."""

import os
import sys

if "JOB_INSIDE" not in os.environ:
    os.environ["JOB_INSIDE"] = "1"
    os.execv(os.environ["REAL_PYTHON"], [os.environ["REAL_PYTHON"], "-P", __file__, *sys.argv[1:]])

import signal
from pathlib import Path

from autotune import search
from autotune.daemon import job

once = Path(os.environ["KILLED_ONCE"])


def die_before(owner, name, matches=lambda *args: True):
    real = getattr(owner, name)

    def die(*args):
        if matches(*args) and not once.exists():
            once.touch()
            os.kill(int(os.environ["DAEMON"]), signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)
        return real(*args)

    setattr(owner, name, die)


if os.environ["KILLED_AT"] == "before-the-profile":
    die_before(search, "write_profile")
elif os.environ["KILLED_AT"] == "before-the-outcome":
    die_before(search, "write_atomic", lambda path, content: path.name == "outcome.json")
else:
    die_before(job, "write_end")
sys.exit(job.main(sys.argv[4:] if sys.argv[1] == "-P" else sys.argv[1:]))
