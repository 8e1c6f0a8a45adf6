"""Scores measurements with an objective that runs in its own process.

An objective may be a user's file, and the parent runs no user code. One small child process (standard library and
`autotune.base.records`, no torch) takes measurements and returns scores, so a finished study can be scored again
without a launch. It is ``python -P -m autotune.workload.scoring FILE``, and answers each line of JSON with one: a line
``{"measurement", "goal"}`` with ``{"score"}``, an empty object with the fields of `ObjectiveFacts`; either with
``{"error", "refused"}`` if the objective fails, or refuses the request with `NotScored`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.base import records
from autotune.base.errors import MachineError, UnscoredError, UsageError
from autotune.base.layout import STORAGE_URL
from autotune.base.records import ATTEMPTS, FIGURES, NEEDS, Goal, Measurement, NotScored

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
            declared = self._answer(b"{}\n")
            self._facts = ObjectiveFacts(**{**declared, "needs": tuple(declared["needs"])})
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


# In the child.


def load(path: Path) -> ModuleType:
    """Import a file of the user's, in a child: an objective, or a format of `autotune export`.

    Raises:
        ImportError: a module with the name of the file's stem already exists.
    """
    if importlib.util.find_spec(path.stem) is not None:
        raise ImportError(f"the name {path.stem!r} is taken by another module; rename the file")
    # Older objectives import it by this name.
    sys.modules["autotune.records"] = records
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def score(objective: ModuleType, measurement: Measurement, goal: Goal) -> float:
    """Return the objective's score. A function with one parameter without a default takes the measurement alone.

    Raises:
        ValueError: the score is not a finite number.
    """
    # Parameters with a default are the objective's own.
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(objective.score).parameters.values() if p.kind in positional]
    takes_goal = len([p for p in parameters if p.default is p.empty]) > 1
    value = float(objective.score(measurement, goal) if takes_goal else objective.score(measurement))
    if not math.isfinite(value):
        raise ValueError(f"score() returned {value}")
    return value


def about(objective: ModuleType) -> ObjectiveFacts:
    """Return what the objective's file declares about itself.

    Raises:
        ValueError: a constant has the wrong type.
    """
    unit, within = getattr(objective, "UNIT", ""), getattr(objective, "RATE_WITHIN", None)
    figure = getattr(objective, "FIGURE", None)
    needs = getattr(objective, "NEEDS", ())
    if not isinstance(unit, str):
        raise ValueError(f"UNIT must be text, not {unit!r}")
    if within is not None and not (type(within) in (int, float) and 0 <= within < 1):
        raise ValueError(f"RATE_WITHIN must be a number from 0.0 to 1.0, not {within!r}")
    if not isinstance(needs, tuple) or not set(needs) <= set(NEEDS):
        raise ValueError(f"NEEDS must be a tuple of {', '.join(NEEDS)}, not {needs!r}")
    if figure is not None and figure not in FIGURES:
        raise ValueError(f"FIGURE must be one of {', '.join(FIGURES)}, not {figure!r}")
    return ObjectiveFacts(unit, figure, within, needs)


def _main(path: Path) -> None:
    """Answer every line on standard input with one on standard output."""
    # Redirect the objective's own output to stderr, so that it does not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    objective: ModuleType | None = None
    for line in sys.stdin:
        try:
            objective = objective or load(path)
            request = json.loads(line)
            answer = (
                {"score": score(objective, Measurement(**request["measurement"]), Goal(**request["goal"]))}
                if request
                else asdict(about(objective))
            )
        except Exception as error:
            refused = isinstance(error, NotScored)
            answer = {"error": str(error) if refused else f"{type(error).__name__}: {error}", "refused": refused}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
