"""Options as YAML, as JSON and as words, and how an earlier export is recognised where it can have no comment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.knobs.precision import KNOB as PRECISION

#: Knobs that every configuration of a search has.
USUAL = ("batch_size", PRECISION.name, COMPILE.name, WORKERS.name)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return plain data as YAML. Values are written as in JSON, which YAML 1.1 and 1.2 read alike."""
    return "".join(f"{line}\n" for line in _lines(tree, ""))


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"


def as_json(tree: Mapping[str, Any]) -> str:
    """Return plain data as JSON, for people."""
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def as_words(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return words on one line, as a shell reads them, and what is to be said of that.

    ``$(…)`` splits what it is given at spaces, and takes quotes as they are.
    """
    line = shlex.join(words)
    quoted = line != " ".join(words)
    said = 'Some words are quoted: run it as eval "python train.py $(…)", because $(…) alone takes quotes as they are.'
    return f"{line}\n", (said,) * quoted


def is_object_with(text: str, always: Set[str], sometimes: Set[str]) -> bool:
    """Return whether a text is a JSON object with all of some keys, and at most some others."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and always <= found.keys() <= always | sometimes


def are_words_with(text: str, always: Set[str], known: Callable[[str], bool], *, equals: bool = False) -> bool:
    """Return whether a text is one line of options, with all of some names, and no unknown ones.

    Args:
        equals: options are ``NAME=VALUE``. Otherwise they begin with a dash, and values follow.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    names = {w.partition("=")[0] for w in words} if equals else {w for w in words if w.startswith("-")}
    return text.count("\n") <= 1 and always <= names and all(map(known, names - always))
