"""The exception that ended a script, from the traceback that it printed, where its own process could not report it."""

from __future__ import annotations

import builtins
import re
from typing import Any

_BEGINS = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
#: The line of the exception itself.
_ENDS = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
#: How many lines a framework may print after a traceback. If there are more, the script went on after it.
_AFTER = 3
#: How many characters of a last line are shown.
_LONGEST = 200


def last_words(log: str) -> list[list[Any]] | None:
    """Return the exception that the last traceback in a log ends with, as a chain (see `autotune_agent.watching`).

    ``None`` unless the log ends with it, except for a few lines: programs that catch all their exceptions print them,
    and end. What caused it is not included.
    """
    _, marker, text = log.rpartition(_BEGINS)
    if not marker:
        return None
    frames: list[list[Any]] = []
    lines = text.lstrip("\n").splitlines()
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is not None:
            frames.append([frame[1], int(frame[2])])
        if line.startswith(" ") or not line:
            continue
        ends = _ENDS.fullmatch(line)
        after = [other for other in lines[number + 1 :] if other.strip()]
        if ends is None or len(after) > _AFTER:
            return None
        name = ends[1] if "." in ends[1] or not hasattr(builtins, ends[1]) else f"builtins.{ends[1]}"
        return [[name, [], ends[2] or "", {"frames": frames}]]
    return None


def last_line(log: str) -> str | None:
    """Return the last line of a log that has words in it, cut to `_LONGEST`; ``None`` if there is none.

    Option parsers, launchers and Python itself give the reason for ending in one line, without a traceback.
    """
    lines = (" ".join(line.split()) for line in reversed(log.splitlines()))
    last = next((line for line in lines if any(c.isalpha() for c in line) and not line.startswith("autotune: ")), None)
    return last if last is None or len(last) <= _LONGEST else last[:_LONGEST] + " …"
