"""``train.autotune.yaml``: how a training script is run and what its own flags set, for ``--script``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.base.errors import ProfileError, UnknownNameError, UsageError
from autotune.base.files import read_regular
from autotune.knobs import spell
from autotune.profile import plain_data
from autotune.base.records import LARGEST

KEYS = ("command", "map", "output_flag", "scratch", "rate", "rate_file", "samples_per_step")
#: What keys that hold text look like.
_TEXTS = {
    "output_flag": "--output-dir",
    "rate": "'(?P<rate>[0-9.]+) images/s'",
    "rate_file": "metrics.jsonl",
}
#: How its file's name ends.
ENDING = ".autotune.yaml"
_MOST_BYTES = 2**16
_AGAIN = "write it again with `autotune init -- python train.py …`."


def read_script(path: Path) -> dict[str, Any]:
    """Read a script's file; return what its keys say, ``command`` as words and ``map`` by ``KNOB:VALUE`` or ``KNOB``.

    Raises:
        UsageError: it cannot be read, or has a wrong key or value.
    """
    try:
        text = read_regular(path, _MOST_BYTES, follow=True).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {path}", advice="`autotune init -- python train.py …` writes one."
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", advice="name a script's file.") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", advice=_AGAIN) from None
    try:
        found = plain_data(text, str(path), kind="script's file", again=_AGAIN)
    except ProfileError as error:
        raise UsageError(str(error), advice=error.advice, detail=error.detail) from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no keys", advice=f"it may have {', '.join(KEYS)}.")
    for key, value in found.items():
        if key not in KEYS:
            raise UnknownNameError(f"key in {path}", str(key)[:60], KEYS)
        sentence = _wrong(key, value)
        if sentence is not None:
            raise UsageError(f"{path}: {key} must be {sentence}", advice="correct that line.")
    # A key with nothing behind it says nothing.
    said = {key: value for key, value in found.items() if value is not None}
    if "command" in said:
        said["command"] = _words(said["command"], path)
    if "map" in said:
        said["map"] = {name: spell(words) for name, words in said["map"].items()}
    return said


def _wrong(key: str, value: Any) -> str | None:
    """Return what the value of a key must be, if it is something else."""
    if value is None:
        return None
    texts = isinstance(value, list) and all(isinstance(word, str) for word in value)
    if key == "command":
        return None if value and (isinstance(value, str) or texts) else "text, such as python train.py --epochs 90"
    if key == "map":
        pairs = isinstance(value, dict) and all(isinstance(part, str) for pair in value.items() for part in pair)
        return None if pairs else "a mapping of KNOB:VALUE or KNOB to words, in quotes"
    if key in _TEXTS:
        return None if isinstance(value, str) else f"text, such as {_TEXTS[key]}"
    if key == "scratch":
        return None if isinstance(value, bool) else "true or false"
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST
    return None if whole else "a whole number above 0"


def _words(command: str | list[str], path: Path) -> list[str]:
    if isinstance(command, list):
        return command
    try:
        words = shlex.split(command)
    except ValueError:
        raise UsageError(f"{path}: a quote is not closed in the command", advice="close it.") from None
    if not words:
        raise UsageError(f"{path}: command has no words", advice="write it as in a shell: python train.py.")
    return words


def with_script(typed: Mapping[str, Any], words: Sequence[str], path: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return the options and the words of a command line, completed by a script's file. What is typed wins.

    Args:
        typed: values by option name, as the command line's parser returns them.

    Raises:
        UsageError: see `read_script`; or neither says what to run.
    """
    if path is None:
        return dict(typed), list(words)
    said = read_script(path)
    words = list(words) or said.get("command", [])
    if not words:
        raise UsageError(f"{path} has no command", advice="write one into it, or behind --.")
    found = dict(typed)
    if "map" in found:
        given = list(found["map"] or ())
        knobs = {pair.partition("=")[0].partition(":")[0] for pair in given}
        more = [f"{n}={text}" for n, text in said.get("map", {}).items() if n.partition(":")[0] not in knobs]
        found["map"] = [*more, *given]
    for name in KEYS[2:]:
        if name in found and not found[name] and name in said:
            found[name] = said[name]
    return found, words


def quoted(text: str) -> str:
    """Return text as a quoted scalar, which YAML 1.1 and 1.2 read alike."""
    return json.dumps(text, ensure_ascii=False)
