"""The service notification protocol of systemd (sd_notify(3)), and the daemon's unit file."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence


class SystemdNotifier:
    """Sends status messages to systemd; does nothing if the environment has no ``NOTIFY_SOCKET``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET")
        period = environment.get("WATCHDOG_USEC", "")
        for_this_process = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        #: systemd restarts the service after this many seconds without ``WATCHDOG=1``; ``None``: no watchdog is set.
        self.watchdog_s = int(period) / 1e6 if period.isdigit() and for_this_process and self._address else None

    def notify(self, *lines: str) -> None:
        """Send messages such as ``READY=1`` or ``WATCHDOG=1``. Never raises, since systemd may have gone away."""
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
    """Quote a command for ExecStart, where % begins a specifier and $ a variable (systemd.service(5))."""
    return shlex.join(command).replace("%", "%%").replace("$", "$$")


def unit(command: Sequence[str]) -> str:
    """Return a systemd user unit that runs ``command``.

    The unit's sandboxing needs no privileges, so it works for every user. The whole file system stays visible and
    memory may be both writable and executable, because trainings write to any folder and compile code.
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
