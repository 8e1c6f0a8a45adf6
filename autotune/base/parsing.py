"""Parsing of option values: durations, sizes, NAME=VALUE pairs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from autotune.base.errors import UsageError
from autotune.base.records import LARGEST

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(f"(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s?)?", re.IGNORECASE | re.ASCII)
_MILLISECONDS = re.compile(f"{_NUMBER}ms", re.IGNORECASE | re.ASCII)
#: A longer duration is a slip, and some clocks cannot count it.
_LONGEST_S = 10_000 * 366 * 86400
_SIZE = re.compile(rf"{_NUMBER}\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB|K|M|G|T)?", re.IGNORECASE | re.ASCII)
_BINARY = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def duration_s(text: str, option: str = "--budget") -> float:
    """Parse a duration such as ``90``, ``90s``, ``1.5m`` or ``1h30m``; return seconds.

    Raises:
        UsageError: the text is not a duration, or the duration is not above zero or exceeds ten thousand years.
    """
    match = _DURATION.fullmatch(text.strip())
    if not text.strip() or match is None:
        raise UsageError(f"{option} {text[:60]!r} is no duration", advice="write it as 90s, 10m or 1h30m.")
    hours, minutes, seconds = (Decimal(part or 0) for part in match.groups())
    total = float(3600 * hours + 60 * minutes + seconds)
    if total <= 0:
        raise UsageError(f"{option} must be above zero, not {text[:60]!r}")
    if total > _LONGEST_S:
        raise UsageError(f"{option} must be at most ten thousand years, not {text[:60]!r}")
    return total


def short_duration_s(text: str, option: str) -> float:
    """Parse a duration that may be in milliseconds, such as ``80ms``, or else as `duration_s` does.

    Raises:
        UsageError: as `duration_s`.
    """
    match = _MILLISECONDS.fullmatch(text.strip())
    if match is None:
        return duration_s(text, option)
    if not Decimal(match[1]):
        raise UsageError(f"{option} must be above zero, not {text[:60]!r}")
    return float(Decimal(match[1]) / 1000)


def price(text: str, option: str) -> float:
    """Parse an amount of money such as ``2.49``, in whatever currency.

    Raises:
        UsageError: the text is not a number, or the number is not above zero or exceeds a million.
    """
    match = re.fullmatch(_NUMBER, text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"{option} {text[:60]!r} is no number", advice="write it as 2.49, in whatever currency.")
    if not 0 < Decimal(match[0]) <= 10**6:
        raise UsageError(f"{option} must be above zero and at most a million, not {text[:60]!r}")
    return float(match[0])


def price_text(amount: float) -> str:
    """Return the text that `price` parses as this amount."""
    # Without an exponent, and with all digits.
    return f"{Decimal(repr(amount)):f}"


def bandwidth_bytes_per_s(text: str, option: str) -> int:
    """Parse a bandwidth such as ``50MB/s``; return bytes per second. The ``/s`` may be left out.

    Raises:
        UsageError: as `size_bytes`.
    """
    return size_bytes(re.sub(r"\s*/\s*s$", "", text.strip(), flags=re.IGNORECASE), option)


def duration_text(seconds: float) -> str:
    """Format a duration so that `duration_s` returns the same float: ``1h30m``, ``10m``, ``90.5s``."""
    if seconds % 60:
        return f"{Decimal(repr(seconds)).normalize():f}s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if minutes else ''}"


def size_bytes(text: str, option: str = "--memory-limit") -> int:
    """Parse a size such as ``6GiB``, ``512M`` (powers of 1024) or ``6GB`` (powers of 1000); return bytes.

    Raises:
        UsageError: the text is not a size, or the size is not above zero, or beyond any machine's.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text[:60]!r} is no size", advice="write it as 6GiB or 512MiB.")
    number, unit = Decimal(match[1]), (match[2] or "").lower()
    decimal = len(unit) == 2 and unit[1] == "b"
    factor = 1000 ** ("kmgt".index(unit[0]) + 1) if decimal else _BINARY[unit[:1]]
    total = int(number * factor)
    if total <= 0:
        raise UsageError(f"{option} must be above zero, not {text[:60]!r}")
    if total > LARGEST:
        raise UsageError(f"{option} is more than any machine has: {text[:60]!r}")
    return total


def pairs(items: Iterable[str], option: str) -> dict[str, str]:
    """Return ``NAME=VALUE`` items as a dictionary.

    Raises:
        UsageError: an item has no ``=``, no name or no value, or a name is given twice.
    """
    result: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"{option} takes NAME=VALUE, not {item!r}")
        if name in result:
            raise UsageError(f"{option} gives {name} twice")
        result[name] = value
    return result


def lists(items: Iterable[str], option: str) -> dict[str, tuple[str, ...]]:
    """Return ``NAME=V1,V2`` items as a dictionary of tuples, without duplicate values.

    Raises:
        UsageError: as in `pairs`, or a value between commas is empty.
    """
    result = {}
    for name, text in pairs(items, option).items():
        values = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        if "" in values:
            raise UsageError(f"{option} {name}={text}: a value is missing between commas")
        result[name] = values
    return result
