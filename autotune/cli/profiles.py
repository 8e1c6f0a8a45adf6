"""``autotune profiles``: the profile in force for each training on each kind of hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autotune.base.errors import UsageError
from autotune.base.layout import find_daemon
from autotune.base.records import SCHEMA_VERSION, Fingerprint
from autotune.cli.daemon import StateDir
from autotune.cli.matrix import ENDINGS, Asked, Cell, cells_of
from autotune.cli.options import Json, refuse_group_options
from autotune.cli.output import plain_table, print_json, print_rich
from autotune.profile import dump, in_force
from autotune.profile.in_force import Exchanged, Row, Slot, Store, look_here
from autotune.report.document import Line
from autotune.report.listing import ANY_BATCH, GridCell, GridTable, ProfileGrid, gain_text, grid_of, stale_text
from autotune.space.formatting import count, model_name, rate_text


class TakesMatrix(TyperGroup):
    """The group of commands, whose first word may be a matrix instead of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            word for parameter in self.params if not getattr(parameter, "is_flag", False) for word in parameter.opts
        }
        values = {i + 1 for i, word in enumerate(args) if word in takes_value}
        words = [i for i, word in enumerate(args) if not word.startswith("-") and i not in values]
        # The group itself reports any other word.
        has_matrix = words and args[words[0]] not in self.commands and args[words[0]].endswith(ENDINGS)
        start = words[0] if has_matrix else len(args)
        return super().parse_args(ctx, [*args[:start], *(["--matrix"] if has_matrix else []), *args[start:]])


app = typer.Typer(invoke_without_command=True, cls=TakesMatrix, subcommand_metavar="[MATRIX.yaml | COMMAND [ARGS]…]")


@app.callback()
def profiles(
    ctx: typer.Context,
    matrix: Annotated[
        Path | None,
        typer.Option("--matrix", help="Show the cells of this file. --matrix may be left out.", metavar="MATRIX.yaml"),
    ] = None,
    every: Annotated[bool, typer.Option("--list", help="List the profiles by name, one a line.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Show the profiles in force as a grid of trainings and hardware: tuned, stale or missing."""
    if ctx.invoked_subcommand is not None:
        refuse_group_options(ctx)
        return
    if every and matrix is not None:
        raise UsageError("--list is of all profiles, whatever a matrix asks for", advice=f"leave out {matrix}.")
    here, slots = look_here(), Store(find_daemon(state_dir).profiles).all()
    grid = grid_of(slots, here) if matrix is None else _grid_of(matrix, ctx.parent, slots, here)
    if as_json:
        rows = [_as_json(slot, slot.stale(here)) for slot in slots]
        print_json({"schema_version": SCHEMA_VERSION, "profiles": rows, "cells": _cells_json(grid)})
        return
    if matrix is None and not slots:
        typer.echo("no profile yet; `autotune search --model NAME` makes one.")
    elif every:
        _list(slots, here)
    else:
        print_rich(GridTable(grid))
        print_rich(Line(f"\n{grid.counts()}. {_more(grid, matrix, len(slots))}"))


def _grid_of(path: Path, root: Any, kept: Sequence[Slot], here: Fingerprint) -> ProfileGrid:
    """Return a matrix as a grid with its targets as columns."""
    matrix, requested = cells_of(path, root)
    # A cell that requests the same as an earlier one is left out.
    by_study: dict[str, Asked] = {}
    rows: dict[tuple[int, int | None], Cell] = {}
    for entry in requested:
        by_study.setdefault(entry.study, entry)
    for entry in by_study.values():
        rows.setdefault((entry.cell.number, entry.cell.batch), entry.cell)
    numbers = {row: r for r, row in enumerate(rows)}
    cells = {}
    for entry in by_study.values():
        slot, stale = entry.profile_of(kept, here) or (None, [])
        r, c = numbers[entry.cell.number, entry.cell.batch], matrix.targets.index(entry.cell.target)
        cells[r, c] = GridCell(slot, tuple(stale))
    titles = Counter(map(_title, rows.values()))
    return ProfileGrid(
        [_title(entry, apart=titles[_title(entry)] > 1) for entry in rows.values()], matrix.targets, cells
    )


def _title(cell: Cell, *, apart: bool = False) -> tuple[str, str, str]:
    batch = ANY_BATCH if cell.batch is None else str(cell.batch)
    return model_name(cell.model), batch, ", ".join(filter(None, (cell.more, cell.further if apart else "")))


def _more(grid: ProfileGrid, matrix: Path | None, kept: int) -> str:
    if matrix is None:
        return "`autotune profiles --list` has their names, and `autotune profiles show NAME` one of them."
    shown = len({cell.kept.name for cell in grid.cells.values() if cell.kept is not None})
    others = f"; {count(kept - shown, 'profile')} of other trainings or hardware" if kept > shown else ""
    # Options typed for `submit` are part of its request, and are not known here.
    return f"`autotune submit {matrix} --dry-run` says what it would queue{others}."


def _cells_json(grid: ProfileGrid) -> list[dict[str, Any]]:
    return [
        {
            "model": grid.rows[r][0],
            "batch_size": None if grid.rows[r][1] == ANY_BATCH else int(grid.rows[r][1]),
            "with": grid.rows[r][2],
            "hardware": grid.columns[c],
            "state": cell.state,
            "profile": None if cell.kept is None else cell.kept.name,
            "speedup": None if cell.kept is None else cell.kept.profile.gives.speedup,
        }
        for (r, c), cell in grid.cells.items()
    ]


def _list(kept: Sequence[Slot], here: Fingerprint) -> None:
    table = plain_table("profile", "speedup", "rate", "device", "measured", wrap=("device",))
    for slot in kept:
        gives, profile = slot.profile.gives, slot.profile
        table.add_row(
            slot.name,
            gain_text(profile),
            f"{rate_text(gives.samples_per_second, gives.ci95)} {profile.unit}",
            profile.conditions.device_name,
            profile.provenance.created[:10],
        )
    print_rich(table)
    for slot in kept:
        rows = slot.stale(here)
        if rows:
            typer.echo(f"{slot.name} is {stale_text(rows)}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="As `autotune profiles` lists it.", metavar="PROFILE")],
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Print a profile, and what became of those that came before and after it."""
    slot = Store(find_daemon(state_dir).profiles).one(name)
    rows = slot.stale(look_here())
    if as_json:
        print_json(_as_json(slot, rows) | {"history": [entry.model_dump() for entry in slot.state.entries]})
        return
    typer.echo(dump(slot.profile), nl=False)
    typer.echo(f"\n# {slot.path}")
    for entry in slot.state.entries:
        typer.echo(f"# {entry.file}, {entry.came[:10]}: {'in force, ' if entry.replaced else ''}{entry.verdict}")
    if rows:
        typer.echo(f"# {stale_text(rows)}")


Url = Annotated[str, typer.Argument(help="A folder, or s3://bucket/folder and the like.", metavar="URL")]


@app.command()
def push(url: Url, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Copy the profiles in force to a folder or an object store that other machines reach."""
    _print_exchanged(in_force.push(Store(find_daemon(state_dir).profiles), url), as_json=as_json)


@app.command()
def pull(url: Url, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Take over profiles from there; `load_profile(model=…)` picks the one of the machine it runs on."""
    notices: list[str] = []
    exchanged = in_force.pull(Store(find_daemon(state_dir).profiles), url, look_here(), notices.append)
    for sentence in notices:
        typer.echo(f"warning: {sentence}", err=True)
    _print_exchanged(exchanged, as_json=as_json)


def _print_exchanged(found: list[Exchanged], *, as_json: bool) -> None:
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "profiles": [asdict(entry) for entry in found]})
        return
    for entry in found:
        typer.echo(f"{entry.slot}: {entry.verdict}")
    if not found:
        typer.echo("no profile yet; `autotune search --model NAME` makes one.")


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
        "batch_size": profile.configuration["batch_size"],
        "keeps_batch_size": profile.conditions.keeps_batch_size,
        "measured": profile.provenance.created,
        "stale": [{"what": what, "then": then, "now": now} for what, then, now in rows],
    }
