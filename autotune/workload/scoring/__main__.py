"""``python -P -m autotune.workload.scoring FILE``: reads lines of JSON; writes one line of JSON for each.

A line ``{"measurement", "goal"}`` is answered by ``{"score"}``, an empty object by what the objective declares about
itself, ``{"unit", "figure", "rate_within", "needs"}``; either by ``{"error", "refused"}`` if the objective fails, or
refuses the request with `NotScored`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.base import records
from autotune.base.records import FIGURES, NEEDS, Goal, Measurement, NotScored


def load(path: Path) -> ModuleType:
    """Import an objective's file.

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


def about(objective: ModuleType) -> dict[str, Any]:
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
    return {"unit": unit, "figure": figure, "rate_within": within, "needs": needs}


def main(path: Path) -> None:
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
                else about(objective)
            )
        except Exception as error:
            refused = isinstance(error, NotScored)
            answer = {"error": str(error) if refused else f"{type(error).__name__}: {error}", "refused": refused}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
