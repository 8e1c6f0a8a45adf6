"""The folders that a launch of a script has for itself, and what its words and variables mean in one of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.layout import LaunchFiles
from autotune.records import CommandRef

#: Options of Python by which the current folder is a place to import from.
_IMPORTS = ("-m", "-c")


def prepare(command: CommandRef, files: LaunchFiles) -> tuple[Path, Path | None]:
    """Make the folders that a launch has for itself.

    Returns:
        where it runs, and the folder that it is told to write to, if it is.
    """
    for folder, wanted in ((files.scratch, command.scratch), (files.output, command.output_flag is not None)):
        # An attempt before this one may have been killed.
        shutil.rmtree(folder, ignore_errors=True)
        if wanted:
            folder.mkdir()
    return (
        files.scratch if command.scratch else Path(command.folder),
        None if command.output_flag is None else files.output,
    )


def elsewhere(words: Sequence[str], folder: str) -> list[str]:
    """Return words that mean in any folder what they mean in this one: the files and folders that they name, also after
    ``--option=``, are named in full. A program without a slash is looked for in ``PATH``."""
    return [word if not i and os.sep not in word else _in_full(word, folder) for i, word in enumerate(words)]


def _in_full(word: str, folder: str) -> str:
    before, equals, name = word.partition("=") if word.startswith("-") else ("", "", word)
    path = os.path.join(folder, name)
    return f"{before}{equals}{path}" if name and os.path.exists(path) else word


def importing(env: Mapping[str, str], words: Sequence[str], folder: str) -> dict[str, str]:
    """Return an environment in which Python finds in any folder the modules that it finds in this one."""
    own = [folder] if any(option in words for option in _IMPORTS) else []
    outer = [os.path.join(folder, place) for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    return {**env, "PYTHONPATH": os.pathsep.join([*own, *outer])} if own or outer else dict(env)
