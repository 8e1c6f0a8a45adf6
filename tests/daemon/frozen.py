"""``frozen.py daemon run …``: the daemon, with a scheduler that hangs once the file FREEZE exists."""

import os
import threading
from pathlib import Path

from autotune.cli.main import main
from autotune.daemon.scheduler import Scheduler

freeze = Path(os.environ["FREEZE"])
real = Scheduler.read_devices


def read_devices(self):
    if freeze.exists():
        freeze.with_suffix(".frozen").touch()
        threading.Event().wait()
    real(self)


Scheduler.read_devices = read_devices
main()
