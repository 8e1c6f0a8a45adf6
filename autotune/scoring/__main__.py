"""``python -P -m autotune.scoring FILE``: reads measurements, one JSON per line; writes scores, one JSON per line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from autotune.records import Measurement


def load(path: Path) -> Callable[[Measurement], float]:
    """Return the ``score`` function of an objective's file.

    Raises:
        ImportError: a module with the name of the file's stem already exists.
    """
    if importlib.util.find_spec(path.stem) is not None:
        raise ImportError(f"the name {path.stem!r} is taken by another module; rename the file")
    sys.path.insert(0, str(path.parent))
    score: Callable[[Measurement], float] = importlib.import_module(path.stem).score
    return score


def main(path: Path) -> None:
    """Answer every line on standard input with one on standard output."""
    # Redirect the objective's own output to stderr, so that it does not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    function: Callable[[Measurement], float] | None = None
    for line in sys.stdin:
        try:
            if function is None:
                function = load(path)
            score = float(function(Measurement.model_validate_json(line)))
            if not math.isfinite(score):
                raise ValueError(f"score() returned {score}")
            answer: dict[str, float | str] = {"score": score}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
