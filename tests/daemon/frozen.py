"""``frozen.py daemon run …``: the daemon, whose scheduler stands still as soon as the file FREEZE is there."""

import os
import threading
from pathlib import Path

from autotune.cli.main import main
from autotune.daemon.scheduler import Scheduler

freeze = Path(os.environ["FREEZE"])
real = Scheduler.look


def look(self):
    if freeze.exists():
        freeze.with_suffix(".frozen").touch()
        threading.Event().wait()
    real(self)


Scheduler.look = look
main()
