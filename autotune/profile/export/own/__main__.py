"""``python -P -m autotune.profile.export.own SOURCE``: reads a profile as JSON, writes ``{"text": …}`` or ``{"error":
…}``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(source: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function of a file or of a module.

    Raises:
        ImportError: a module with the name of the file's stem already exists.
    """
    module, _, function = source.partition(":")
    if source.endswith(".py"):
        path = Path(source).absolute()
        if importlib.util.find_spec(path.stem) is not None:
            raise ImportError(f"the name {path.stem!r} is taken by another module; rename the file")
        sys.path.insert(0, str(path.parent))
        module, function = path.stem, "export"
    else:
        sys.path.insert(0, os.getcwd())
    loaded: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), function)
    return loaded


def main(source: str) -> None:
    """Write the answer as one line on stdout."""
    # Redirect what the function prints to stderr, so that it does not mix with the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        text = load(source)(json.load(sys.stdin))
        if not isinstance(text, str):
            raise TypeError(f"it returned {type(text).__name__}, not text")
        text.encode()
        answer = {"text": text}
    except (Exception, SystemExit) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
