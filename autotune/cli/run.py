"""``autotune run``: train with a profile by a command of the user's, whose script stays as it is."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.streams import flush_streams
from autotune.entering import deaf, entered, filled, places, plan
from autotune.errors import UsageError
from autotune.machine.host import read_host
from autotune.profile import read
from autotune.space import too_large

#: All that follows the first word of the command is the command's own.
TAKES_COMMAND = {"allow_interspersed_args": False}


def command(
    words: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="What to run, such as python train.py --epochs 90.")
    ],
    profile: Annotated[Path, typer.Option("--profile", help="A profile.yaml.", metavar="FILE")],
) -> None:
    """Run a training script with a profile, the script untouched.

    The command takes this one's place: its output, its exit code and its signals are its own. One line on stderr says
    what is set, after six steps. {batch_size} and the like in the command are replaced by the profile's values.
    """
    config = read(profile).configuration
    excess = too_large(config, read_host())
    if excess is not None:
        raise UsageError(f"the profile cannot be applied here: {excess}", advice="search on this machine.")
    ignores = deaf(words)
    if ignores is not None:
        raise UsageError(
            f"with {ignores}, Python ignores PYTHONPATH, by which the profile is applied",
            advice=f"leave {ignores} out.",
        )
    told = plan(config, profile.name, in_command=places(words))
    _become(filled(words, config), entered(os.environ, told, config))


def _become(words: list[str], env: dict[str, str]) -> None:
    """Replace this process.

    Raises:
        UsageError: the program cannot be run.
    """
    flush_streams()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and what is ignored stays ignored.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, env)
    except FileNotFoundError:
        raise UsageError(f"there is no program {words[0]!r}", advice="it is looked for as in a shell.") from None
    except OSError as error:
        raise UsageError(f"{words[0]!r} cannot be run: {error.strerror}") from None
