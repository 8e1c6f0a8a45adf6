"""The little that a service says to systemd (sd_notify(3)), and the unit that it is started by."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence


class Supervisor:
    """Whoever started this process and wants to know that it lives; nobody, where the environment names none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET")
        period = environment.get("WATCHDOG_USEC", "")
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        #: Silence for longer than this is taken for death; ``None``: nobody listens for it.
        self.watchdog_s = int(period) / 1e6 if period.isdigit() and mine and self._address else None

    def tell(self, *lines: str) -> None:
        """Say something: ``READY=1``, ``WATCHDOG=1``, ``STATUS=…``. Never raises: nobody may be there any more."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notice:
                notice.settimeout(1.0)
                notice.sendto("\n".join(lines).encode(), address)
        except OSError:
            return


def _escaped(command: Sequence[str]) -> str:
    """For ExecStart, where % begins a specifier and $ a variable (systemd.service(5))."""
    return shlex.join(command).replace("%", "%%").replace("$", "$$")


def unit(command: Sequence[str]) -> str:
    """A systemd user unit that runs ``command``.

    What it holds back needs no privileges, so that it works for every user. Nothing of the file system is hidden and
    writable memory stays executable: trainings write where they want, and compile.
    """
    return f"""\
[Unit]
Description=autotune: finds the fastest way to run trainings, when the machine is quiet
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart={_escaped(command)}
WatchdogSec=60
Restart=on-failure
RestartSec=5
# It ends its searches by itself, with everything measured kept, and they go on at the next start.
KillMode=mixed
TimeoutStopSec=60
# A trial that takes too much memory is ended alone.
OOMPolicy=continue
Nice=5

NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=default.target
"""
