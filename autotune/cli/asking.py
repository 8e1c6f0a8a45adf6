"""What the commands that talk to the daemon share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.daemon.rpc.client import Client
from autotune.errors import UsageError
from autotune.layout import find_daemon

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="Folder of the daemon's state.",
        metavar="DIR",
        envvar="AUTOTUNE_STATE_DIR",
        show_envvar=True,
    ),
]


def refuse_group_options(ctx: typer.Context) -> None:
    """Refuse options that stand before a command's own name: they would be dropped.

    Raises:
        UsageError: there is one.
    """
    for name in ctx.params:
        if was_typed(ctx, name):
            option = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} stands before {ctx.invoked_subcommand!r}",
                advice=f"write it behind: autotune {ctx.info_name} {ctx.invoked_subcommand} … {option}.",
            )


def was_typed(ctx: Any, name: str) -> bool:
    """Whether a parameter stands on the command line, and is no default nor from the environment."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def client(state_dir: Path | None) -> Client:
    """Of the daemon with this state folder, or of the user's own."""
    return Client(find_daemon(state_dir))
