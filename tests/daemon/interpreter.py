#!/usr/bin/env python3
"""Replaces a job's Python interpreter with a process whose behaviour is set by the job's environment.

Uses only the standard library.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

*_, folder, device, mark, _ = sys.argv


def leave(code, message=None):
    text = {"schema_version": 1, "mark": mark, "exit_code": code, "message": message, "advice": None}
    (Path(folder) / "end.json").write_text(json.dumps(text))
    sys.exit(code)


def well():
    leave(0)


def badly():
    leave(4, "no such data")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_an_orphan():
    # PR_SET_CHILD_SUBREAPER, which the product's own jobs set too: orphans stay descendants of this process.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    pid_file = Path(folder) / "orphan"
    script = f"setsid env -i /bin/sleep 300 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}"
    os.system(f"sh -c '{script}'")
    leave(0)


def waits():
    signal.signal(signal.SIGTERM, lambda *_: leave(143, "interrupted"))
    (Path(folder) / "ready").touch()
    while True:
        time.sleep(60)


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The child has its own session, so killing the parent's session does not end it.
    if os.fork() == 0:
        os.setsid()
    (Path(folder) / "ready").touch()
    while True:
        time.sleep(60)


def waits_the_first_time():
    first = Path(folder) / "first"
    if first.exists():
        well()
    first.touch()
    waits()


globals()[os.environ["BEHAVIOUR"]]()
