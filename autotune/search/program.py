"""Looks for the program and the file that a command names, before anything is started."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from autotune.launcher.entering import places, python_file, refuse_deaf
from autotune.base.errors import UsageError
from autotune.base.records import CommandRef


def require_program(command: CommandRef) -> None:
    """Refuse a command that cannot be started, or whose script the agent could not enter.

    Raises:
        UsageError: its program or the file that its Python runs does not exist, or its Python would ignore the agent.
    """
    if command.rate is None:
        refuse_deaf(command.words)
    folder, program = Path(command.folder), command.words[0]
    path = folder / program
    # Like `subprocess`: what has a slash in it is no name to be looked for.
    found = shutil.which(path if "/" in program else program)
    if found is None and not places([program]):
        if "/" in program and path.exists():
            raise UsageError(f"{program!r} is no program that may be run", advice="is it a file, and executable?")
        raise UsageError(
            f"there is no program {program!r}",
            advice="put python before it." if program.endswith(".py") else "it is looked for as in a shell.",
        )
    script = python_file(command.words)
    if script is not None and not places([script]) and not os.path.exists(folder / script):
        raise UsageError(f"there is no file {folder / script}", advice="commands run in this folder.")
