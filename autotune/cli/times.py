"""Times of day and moments, as the options of `autotune submit` take them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from autotune.base.errors import UsageError
from autotune.base.parsing import duration_s


def moment(text: str, now: datetime) -> float:
    """Convert ``22:00`` (its next occurrence), an ISO 8601 date and time, or ``+2h`` to UNIX seconds.

    Args:
        now: the current time with its time zone, which applies to times without one.

    Raises:
        UsageError: the text is none of these.
    """
    if text.startswith("+"):
        seconds = now.timestamp() + duration_s(text[1:], "--not-before")
    elif re.fullmatch(r"\d{1,2}:\d{2}", text):
        minute = minute_of_day(text, "--not-before")
        today = now.replace(hour=minute // 60, minute=minute % 60, second=0, microsecond=0)
        seconds = (today if today > now else today + timedelta(days=1)).timestamp()
    else:
        try:
            # timestamp() reads a time without a zone in this machine's zone, with the UTC offset at that time.
            seconds = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            raise UsageError(
                f"--not-before {text!r} is no time", advice="write it as 22:00, 2026-11-23T22:00 or +2h."
            ) from None
    try:
        datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--not-before {text!r} is further ahead than the calendar reaches") from None
    return seconds


def window_of(text: str) -> tuple[int, int]:
    """Convert ``22:00-07:00`` to two times of day, in minutes after midnight.

    Raises:
        UsageError: the text is not a window, or the window is empty.
    """
    opens, dash, closes = text.partition("-")
    if not dash:
        raise UsageError(f"--window {text!r} is no window", advice="write it as 22:00-07:00.")
    found = minute_of_day(opens, "--window"), minute_of_day(closes, "--window")
    if found[0] == found[1]:
        raise UsageError(f"--window {text!r} begins when it ends", advice="leave it out to run at any time.")
    return found


def minute_of_day(text: str, option: str) -> int:
    """Convert ``22:00`` to minutes after midnight.

    Raises:
        UsageError: the text is not a time of day.
    """
    found = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*", text)
    if not found or int(found[1]) > 24 or int(found[2]) > 59 or 60 * int(found[1]) + int(found[2]) > 24 * 60:
        raise UsageError(f"{option}: {text!r} is no time of day", advice="write it as 22:00.")
    return (60 * int(found[1]) + int(found[2])) % (24 * 60)
