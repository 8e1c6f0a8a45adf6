"""The connection of a command to the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.daemon.rpc.client import Client
from autotune.base.layout import find_daemon

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


def client(state_dir: Path | None) -> Client:
    """Return a client of the daemon with this state folder; ``None`` stands for the user's default one."""
    return Client(find_daemon(state_dir))
