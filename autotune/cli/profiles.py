"""``autotune profiles``: the profile in force for each training on each machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Column

from autotune.cli.daemon_client import StateDir
from autotune.cli.options import Json, refuse_group_options
from autotune.cli.output import print_json, print_rich
from autotune.formatting import interval_text, rate_text, ratio_text
from autotune.layout import find_daemon
from autotune.profile import dump
from autotune.profile.store import Row, Slot, Store, look_here, stale_rows
from autotune.records import SCHEMA_VERSION
from autotune.report.lines import FittingTable

app = typer.Typer(invoke_without_command=True)


@app.callback()
def profiles(ctx: typer.Context, state_dir: StateDir = None, as_json: Json = False) -> None:
    """List the profiles in force, and whether they still hold here."""
    if ctx.invoked_subcommand is not None:
        refuse_group_options(ctx)
        return
    here = look_here()
    found = [(kept, stale_rows(kept.profile, here)) for kept in Store(find_daemon(state_dir).profiles).all()]
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "profiles": [_as_json(kept, rows) for kept, rows in found]})
        return
    if not found:
        typer.echo("no profile yet; `autotune search --model NAME` makes one.")
        return
    table = FittingTable(
        Column("profile", no_wrap=True),
        Column("speedup", no_wrap=True),
        Column("samples/s", no_wrap=True),
        Column("device", overflow="fold"),
        Column("measured", no_wrap=True),
        box=None,
        pad_edge=False,
    )
    for kept, _ in found:
        gives, profile = kept.profile.gives, kept.profile
        table.add_row(
            kept.name,
            f"{ratio_text(gives.speedup, gives.speedup_ci95)} ({interval_text(gives.speedup_ci95)})",
            rate_text(gives.samples_per_second, gives.ci95),
            profile.conditions.device_name,
            profile.provenance.created[:10],
        )
    print_rich(table)
    for kept, rows in found:
        if rows:
            typer.echo(f"{kept.name} is {_stale(rows)}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="As `autotune profiles` lists it.", metavar="PROFILE")],
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Print a profile, and what became of those that came before and after it."""
    kept = Store(find_daemon(state_dir).profiles).one(name)
    rows = stale_rows(kept.profile, look_here())
    if as_json:
        print_json(_as_json(kept, rows) | {"history": [entry.model_dump() for entry in kept.state.entries]})
        return
    typer.echo(dump(kept.profile), nl=False)
    typer.echo(f"\n# {kept.path}")
    for entry in kept.state.entries:
        typer.echo(f"# {entry.file}, {entry.came[:10]}: {'in force, ' if entry.replaced else ''}{entry.verdict}")
    if rows:
        typer.echo(f"# {_stale(rows)}")


def _as_json(kept: Slot, rows: list[Row]) -> dict[str, Any]:
    profile = kept.profile
    return {
        "name": kept.name,
        "path": str(kept.path),
        "model": profile.workload.model,
        "speedup": profile.gives.speedup,
        "speedup_ci95": profile.gives.speedup_ci95,
        "samples_per_second": profile.gives.samples_per_second,
        "ci95": profile.gives.ci95,
        "device": profile.conditions.device_name,
        "measured": profile.provenance.created,
        "stale": [{"what": what, "then": then, "now": now} for what, then, now in rows],
    }


def _stale(rows: list[Row]) -> str:
    return "stale: " + "; ".join(f"{what} was {then}, is {now}" for what, then, now in rows) if rows else ""
