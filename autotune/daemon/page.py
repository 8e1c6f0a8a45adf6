"""The page's process, and where it listens."""

from __future__ import annotations

import ipaddress
import logging
import subprocess
import sys

from autotune.base.clock import Clock
from autotune.base.errors import UsageError
from autotune.base.layout import DaemonFiles
from autotune.daemon.claims import Children

log = logging.getLogger(__name__)

#: Delay before a process that exited is restarted.
AGAIN_S = 30.0


class Page:
    """The process that serves the web page. It ends with the daemon, even if the daemon is killed."""

    def __init__(self, files: DaemonFiles, web: str | None, clock: Clock, children: Children) -> None:
        self._files = files
        self._web = web
        self._clock = clock
        self._children = children
        self._process: subprocess.Popen[bytes] | None = None
        self._again_at = 0.0

    def step(self) -> None:
        """Start the process if it is not running. Never raises."""
        if self._web is None or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            log.warning(
                "the page's process has ended with %s; what it said is in %s",
                self._process.returncode,
                self._files.page_log,
            )
            self.close()
            self._again_at = self._clock.now() + AGAIN_S
        if self._clock.now() < self._again_at:
            return
        where = [str(self._files.state), str(self._files.runtime), self._web]
        try:
            with self._files.page_log.open("wb") as output:
                command = [sys.executable, "-P", "-m", "autotune.daemon.web", *where]
                self._process = self._children.start(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
        except OSError as error:
            log.warning("the page cannot be started: %s", error)
            self._again_at = self._clock.now() + AGAIN_S

    def status(self) -> str | None:
        """Return the page's address, or why it is not served; ``None`` if the page is disabled."""
        if self._web is None:
            return None
        try:
            lines = self._files.page_log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else f"not yet at {self._web}"

    def close(self) -> None:
        """Stop the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


# The address of the web page, and whether it needs a token.

#: Environment variable with the token that clients on other machines must send.
TOKEN = "AUTOTUNE_WEB_TOKEN"


def address_of(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, where the host may be an IPv6 address in brackets.

    Raises:
        UsageError: the text is not an address.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--web {text!r} is no address", advice="write it as 127.0.0.1:8080.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(web: str, token: str | None) -> None:
    """Require a token for an address that other machines can reach.

    Raises:
        UsageError: the address is invalid, needs a token and has none, or the token cannot be sent in a header.
    """
    if not is_loopback(address_of(web)[0]) and not token:
        raise UsageError(f"{web} can be reached from elsewhere", advice=f"set {TOKEN} to a long secret.")
    if token is not None and (token != token.strip() or not all(map(str.isprintable, token))):
        raise UsageError(
            f"{TOKEN} has a line break or another character in it that no header can carry",
            advice="leave out what stands around the secret, such as the end of the line of a file.",
        )
