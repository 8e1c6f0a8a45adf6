"""Scores measurements with an objective that runs in its own process.

An objective may be the user's file, and the parent runs no user code. One small child process (standard library and
`autotune.records`, no torch) takes measurements and returns scores, so a finished study can be scored again without a
launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import MachineError, UsageError
from autotune.records import ATTEMPTS, Measurement

#: An objective is a formula; one that takes longer than this is stuck. Ctrl-C is not handled during the wait.
SCORE_S = 20.0


class Scorer:
    """One objective, loaded in its child process at the first score.

    Args:
        path: the objective's file, with a function ``score(measurement) -> float``; higher is better.
        env: variables for the child on top of ours, such as a study's mark.
    """

    def __init__(self, path: Path, env: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._env = {**os.environ, **(env or {})}
        self._child: subprocess.Popen[bytes] | None = None
        #: Scores by hash of the request, because a measurement with its steps is long.
        self._known: dict[bytes, float] = {}

    def score(self, measurement: Measurement) -> float:
        """Return the objective of a measurement, a finite number. Repeated requests are answered from a cache.

        A child that ends without an answer is started again, `ATTEMPTS` times in all.

        Raises:
            UsageError: the objective raised, returned anything else, timed out, or ended its process.
            MachineError: something else killed its process.
        """
        asked = measurement.model_dump_json().encode() + b"\n"
        name = hashlib.sha256(asked).digest()
        if name in self._known:
            return self._known[name]
        line, ended = b"", None
        for _ in range(ATTEMPTS):
            line, ended = self._ask(asked)
            if line:
                break
        if ended == -signal.SIGKILL:
            raise MachineError(
                f"the process that scores with {self._path.name} was killed {ATTEMPTS} times",
                advice="see what ends it (the kernel's log names what its memory killer ended), then resume.",
            )
        answer = json.loads(line) if line else {"error": "its process ended without an answer"}
        if "error" in answer:
            self.close()
            raise UsageError(
                f"objective {self._path.name}: {answer['error']}",
                advice="an objective defines score(measurement) and returns a finite number, higher is better.",
            )
        self._known[name] = float(answer["score"])
        return self._known[name]

    def _ask(self, asked: bytes) -> tuple[bytes, int | None]:
        """Return the child's answer, or an empty one and the exit code if it ended; the next call starts a new one.

        Raises:
            UsageError: the child timed out.
        """
        if self._child is None:
            # The child inherits stderr, so that what an objective prints is shown to its author.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.scoring", str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
                env=self._env,
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(asked)
            self._child.stdin.flush()
            ready, _, _ = select.select([self._child.stdout], [], [], SCORE_S)
            if not ready:
                self._child.kill()
                self.close()
                raise UsageError(f"objective {self._path.name} gave no answer within {SCORE_S:.0f} s")
            line = self._child.stdout.readline()
        if line.endswith(b"\n"):
            return line, None
        child = self._child
        self.close()
        return b"", child.returncode

    def close(self) -> None:
        """End the child. May be called twice."""
        if self._child is None:
            return
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.stdout.close()
        try:
            self._child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None
