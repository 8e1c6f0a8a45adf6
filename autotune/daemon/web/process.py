"""Starts the web page's process and restarts it when it exits."""

from __future__ import annotations

import logging
import subprocess
import sys

from autotune.base.clock import Clock
from autotune.base.layout import DaemonFiles
from autotune.daemon.children import Children

log = logging.getLogger(__name__)

#: Delay before a process that exited is restarted.
AGAIN_S = 30.0


class Page:
    """The process that serves the web page. It ends with the daemon, even if the daemon is killed.

    Args:
        web: ``HOST:PORT``; ``None`` disables the page.
    """

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
            with self._files.page_log.open("wb") as said:
                command = [sys.executable, "-P", "-m", "autotune.daemon.web", *where]
                self._process = self._children.start(command, stdin=subprocess.PIPE, stdout=said, stderr=said)
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
