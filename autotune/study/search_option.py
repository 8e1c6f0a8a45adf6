"""What an option of a search is: how its values are written on a command line and in Python, and what they fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.base.errors import UsageError
from autotune.base.parsing import (
    bandwidth_bytes_per_s,
    duration_s,
    duration_text,
    lists,
    pairs,
    price,
    price_text,
    short_duration_s,
    size_bytes,
)
from autotune.base.records import LARGEST
from autotune.study import python_values as python
from autotune.study.storage_url import typed_address


def _same(typed: Any, _flag: str) -> Any:
    return typed


def _plain(value: Any) -> list[str]:
    return [str(value)]


@dataclass(frozen=True)
class Spelling:
    """How values of one kind are written on a command line.

    Attributes:
        kind: type to which the command line's parser converts a word.
        many: the option may be repeated.
        read: converts the parsed value (a list for an option that may be repeated). The second argument is the option's
            flag, for error messages. Raises `UsageError`.
        write: converts a value to words, each to be preceded by the flag, from which `read` returns the same value.
        python: how the same values are given in Python.
    """

    kind: type = str
    many: bool = False
    read: Callable[[Any, str], Any] = _same
    write: Callable[[Any], list[str]] = _plain
    python: python.PythonKind = python.TEXT


def _file_or_name(text: str, _flag: str) -> str:
    return str(Path(text).expanduser().absolute()) if text.endswith(".py") else text


def _files_or_names(text: str, flag: str) -> str:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) < len(parts):
        raise UsageError(f"{flag} {text[:60]!r} names nothing, or one thing twice, between its commas")
    return ",".join(_file_or_name(part, flag) for part in parts)


def _folder_or_kind(text: str, _flag: str) -> str:
    return text if text in ("generated", "synthetic") else str(Path(text).expanduser().absolute())


TEXT = Spelling()
STORAGE = Spelling(read=typed_address)
WHOLE = Spelling(kind=int, python=python.WHOLE)
FLAG = Spelling(kind=bool, python=python.FLAG)
PATH = Spelling(kind=Path, python=python.PATH)
FILE = Spelling(read=_file_or_name, python=python.FILE)
FILES = Spelling(read=_files_or_names, python=python.FILE)
FOLDER = Spelling(read=_folder_or_kind, python=python.FILE)
DURATION = Spelling(read=duration_s, write=lambda seconds: [duration_text(seconds)], python=python.DURATION)
SHORT = Spelling(read=short_duration_s, write=lambda seconds: [duration_text(seconds)], python=python.DURATION)
BANDWIDTH = Spelling(read=bandwidth_bytes_per_s, write=lambda size: [f"{size}B/s"], python=python.SIZE)
SIZE = Spelling(read=size_bytes, write=lambda size: [f"{size}B"], python=python.SIZE)
TEXTS = Spelling(many=True, read=lambda typed, _flag: tuple(typed), write=list, python=python.TEXTS)
PRICE = Spelling(read=price, write=lambda amount: [price_text(amount)], python=python.PRICE)
PAIRS = Spelling(
    many=True, read=pairs, write=lambda found: [f"{n}={value}" for n, value in found.items()], python=python.PAIRS
)
LISTS = Spelling(
    many=True,
    read=lists,
    write=lambda found: [f"{n}={','.join(values)}" for n, values in found.items()],
    python=python.LISTS,
)


@dataclass(frozen=True)
class SearchOption:
    """One option of ``autotune search`` and of ``autotune submit``.

    Attributes:
        name: without the leading dashes, and with underscores instead of inner dashes.
        field: field of `StudySpec`; ``None`` for an option of the call rather than of the study.
        default: parsed value if the option is not given; equivalent to the field's own default.
        minimum, maximum: smallest and largest value of a whole number.
        space: ``autotune space`` takes the option, too.
        recorded: fixed by a recorded surface, so the option conflicts with ``--replay``.
        written: whether the command line of a request includes the option.
        keyword: name of the argument of `autotune.tune`; empty if it is the option's own, ``None`` if there is none.
    """

    name: str
    spelling: Spelling
    help: str
    field: str | None = None
    default: Any = None
    metavar: str | None = None
    minimum: int | None = None
    maximum: int = LARGEST
    space: bool = False
    recorded: bool = False
    written: Literal["unless default", "always", "never"] = "unless default"
    keyword: str | None = ""

    @property
    def flag(self) -> str:
        """The option as typed."""
        return f"--{self.name.replace('_', '-')}"

    def value(self, parsed: Any) -> Any:
        """Convert a parsed value to the value of the request's field.

        Raises:
            UsageError: the value is invalid.
        """
        if self.spelling.many:
            return self.spelling.read(list(parsed or ()), self.flag)
        if self.spelling is WHOLE and parsed is not None and parsed > self.maximum:
            raise UsageError(f"{self.flag} must be at most {self.maximum}, not {str(parsed)[:30]}")
        return None if parsed is None else self.spelling.read(parsed, self.flag)

    @property
    def argument(self) -> str | None:
        """The name of the argument of `autotune.tune`; ``None`` for an option of the command line only."""
        return self.name if self.keyword == "" else self.keyword

    def parsed(self, given: Any) -> Any:
        """Convert a value given in Python to what the command line's parser would have returned.

        Raises:
            UsageError: the value has the wrong type, or is below the minimum.
        """
        parsed = self.spelling.python.parsed(given, self.flag)
        if self.minimum is not None and parsed < self.minimum:
            raise UsageError(f"{self.flag} must be at least {self.minimum}, not {parsed}")
        return parsed

    def words(self, value: Any) -> list[str]:
        """Return the command line words for a value."""
        if self.written == "never" or (self.written != "always" and value == self.value(self.default)):
            return []
        if self.spelling is FLAG:
            return [self.flag]
        return [word for text in self.spelling.write(value) for word in (self.flag, text)]

    def asked(self, parsed: Any) -> bool:
        """Return whether a parsed value differs from the default."""
        return parsed != self.default and parsed not in ((), [])
