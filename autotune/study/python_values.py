"""How values of options are given in Python, and their conversion to what the command line's parser returns."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.parsing import duration_text, price_text
from autotune.knobs import spell


@dataclass(frozen=True)
class PythonKind:
    """One kind of value.

    Attributes:
        words: the values it accepts, for the documentation and for errors.
        parsed: converts a value to what the command line's parser returns. The second argument is the option's flag,
            for error messages. Raises `UsageError`.
    """

    words: str
    parsed: Callable[[Any, str], Any]


def _text(value: Any, flag: str) -> str:
    if not isinstance(value, str):
        raise _not(flag, TEXT, value)
    return value


def _path_text(value: Any, flag: str) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise _not(flag, FILE, value)
    return path


def _whole(value: Any, flag: str) -> int:
    try:
        # Accepts whole numbers of other libraries, too, but no fractions.
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise _not(flag, WHOLE, value)


def _flag(value: Any, flag: str) -> bool:
    if not isinstance(value, bool):
        raise _not(flag, FLAG, value)
    return value


def _duration(value: Any, flag: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _not(flag, DURATION, value)
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{flag} must be a number of seconds above zero, not {value!r}")
    return duration_text(value)


def _size(value: Any, flag: str) -> str:
    return value if isinstance(value, str) else f"{_whole(value, flag)}B"


def _price(value: Any, flag: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _not(flag, PRICE, value)
    return price_text(value)


def _texts(value: Any, flag: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise _not(flag, TEXTS, value)
    return list(texts)


def _pairs(value: Any, flag: str) -> list[str]:
    return [f"{name}={_spelled(item, name, flag)}" for name, item in _items(value, flag, PAIRS)]


def _lists(value: Any, flag: str) -> list[str]:
    texts = []
    for name, values in _items(value, flag, LISTS):
        items = values if isinstance(values, Iterable) and not isinstance(values, str | Mapping) else [values]
        texts.append(f"{name}={','.join(_spelled(item, name, flag) for item in items)}")
    return texts


def _items(value: Any, flag: str, kind: PythonKind) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _not(flag, kind, value)
    return value.items()


def _spelled(value: Any, name: str, flag: str) -> str:
    if not isinstance(value, bool | int | float | str):
        raise UsageError(f"{flag} takes text, a number, True or False for {name}, not {value!r}")
    return spell(value)


def _not(flag: str, kind: PythonKind, value: Any) -> UsageError:
    text = repr(value)
    return UsageError(f"{flag} takes {kind.words}, not {text if len(text) <= 60 else type(value).__name__}")


TEXT = PythonKind("text", _text)
FILE = PythonKind("text or a path", _path_text)
PATH = PythonKind("text or a path", lambda value, flag: Path(_path_text(value, flag)))
WHOLE = PythonKind("a whole number", _whole)
FLAG = PythonKind("True or False", _flag)
DURATION = PythonKind('seconds, or text as in "10m"', _duration)
SIZE = PythonKind('bytes, or text as in "6GiB"', _size)
TEXTS = PythonKind("text, or a list of texts", _texts)
PRICE = PythonKind("a number above zero", _price)
PAIRS = PythonKind("a dictionary of values by name", _pairs)
LISTS = PythonKind("a dictionary of lists of values by name", _lists)
