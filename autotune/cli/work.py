"""``autotune work``: run launches of a study whose search runs on another machine."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from autotune.base.clock import SystemClock
from autotune.cli.output import stop_signals
from autotune.cli.storage import Storage, address_of
from autotune.launcher.workplace import folder_of_worker
from autotune.study.database import SharedDatabase
from autotune.study.storage_url import with_credentials


def command(
    study: Annotated[str, typer.Argument(help="Name of a study in the database.", metavar="STUDY")],
    storage: Storage = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Of this machine.  [default: as the study asks]", metavar="DEVICE")
    ] = None,
) -> None:
    """Work on a study whose search runs on another, equal machine, until it is done."""
    # Imported on first use, because it imports SQLAlchemy.
    from autotune.cluster.database_workers import work

    with (
        contextlib.closing(SharedDatabase(with_credentials(address_of(storage)), make=False, keep=True)) as database,
        folder_of_worker() as folder,
        stop_signals() as stop,
    ):
        work(database, study, device, folder, SystemClock(), says=_say, stop=stop)


def _say(sentence: str) -> None:
    typer.echo(f"autotune: {sentence}", err=True)
