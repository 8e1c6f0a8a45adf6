"""Scores measurements with an objective that runs in its own process.

An objective may be a user's file, and the parent runs no user code. One small child process (standard library and
`autotune.base.records`, no torch) takes measurements and returns scores, so a finished study can be scored again
without a launch.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.errors import MachineError, UnscoredError, UsageError
from autotune.base.layout import STORAGE_URL
from autotune.base.records import ATTEMPTS, Goal, Measurement

#: An objective is a formula; one that takes longer than this hangs. Ctrl-C is not handled during the wait.
SCORE_S = 20.0


@dataclass(frozen=True)
class ObjectiveFacts:
    """What an objective's file declares about itself.

    Attributes:
        unit: the unit of its scores; empty if it declares none. figure: the figure shown to people instead of a score.
        rate_within: only configurations whose rate is within this fraction of the fastest one's compete, so that a
            search looks for the highest rate first; ``None`` if all do.
        needs: names in `autotune.base.records.NEEDS` of what must be stated about the training.
    """

    unit: str = ""
    figure: str | None = None
    rate_within: float | None = None
    needs: tuple[str, ...] = ()


class Scorer:
    """One objective, loaded in its child process at the first request.

    Args:
        path: the objective's file, with a function ``score(measurement)`` or ``score(measurement, goal)`` that returns
            a number; higher is better.
        env: environment variables for the child in addition to this process's, such as a study's mark.
        goal: the goal of the training.
    """

    def __init__(self, path: Path, env: Mapping[str, str] | None = None, goal: Goal | None = None) -> None:
        self._path = path
        self._goal = goal or Goal()
        self._facts: ObjectiveFacts | None = None
        self._env = {**{n: v for n, v in os.environ.items() if n != STORAGE_URL}, **(env or {})}
        self._child: subprocess.Popen[bytes] | None = None
        #: Scores by hash of the request, because a measurement with its steps is large.
        self._known: dict[bytes, float] = {}

    def score(self, measurement: Measurement) -> float:
        """Return a measurement's score, a finite number. Repeated requests are answered from a cache.

        A child that exits without an answer is started again, for `ATTEMPTS` attempts in all.

        Raises:
            UnscoredError: the objective lacks a figure of this launch, or something that must be stated.
            UsageError: the objective raised, returned anything else, timed out, or ended its process.
            MachineError: something else killed its process.
        """
        request = (
            f'{{"measurement": {measurement.model_dump_json()}, "goal": {self._goal.model_dump_json()}}}\n'.encode()
        )
        key = hashlib.sha256(request).digest()
        if key not in self._known:
            self._known[key] = float(self._answer(request)["score"])
        return self._known[key]

    def known(self, measurement: Measurement) -> float | None:
        """Return a measurement's score; ``None`` if the objective lacks a figure of this launch, as when a counter
        failed to answer once. Otherwise raises as `score` does."""
        try:
            return self.score(measurement)
        except UnscoredError:
            return None

    @property
    def facts(self) -> ObjectiveFacts:
        """What the objective's file declares about itself. Raises as `score` does."""
        if self._facts is None:
            facts = self._answer(b"{}\n")
            self._facts = ObjectiveFacts(facts["unit"], facts["figure"], facts["rate_within"], tuple(facts["needs"]))
        return self._facts

    def check(self) -> None:
        """Check that everything the objective needs to know about the training is stated.

        Raises:
            UsageError: something is not stated. Also raises as `score` does.
        """
        missing = self._goal.lacks(self.facts.needs)
        if missing is not None:
            raise UsageError(f"objective {self._path.stem}: {missing}")

    def _answer(self, asked: bytes) -> dict[str, Any]:
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
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended without an answer"}
        if "error" in answer:
            self.close()
            advice = "an objective defines score(measurement) and returns a finite number, higher is better."
            message = f"objective {self._path.name}: {answer['error']}"
            raise UnscoredError(message) if answer.get("refused") else UsageError(message, advice=advice)
        return answer

    def _ask(self, asked: bytes) -> tuple[bytes, int | None]:
        """Return the child's answer, or an empty one and the exit code if it ended; the next call starts a new child.

        Raises:
            UsageError: the child timed out.
        """
        if self._child is None:
            # The child inherits stderr, so that an objective's author sees what it prints.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.workload.scoring", str(self._path)],
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
