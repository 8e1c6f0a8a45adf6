"""``autotune export``: write the profile of a finished study, for autotune or for the tool that trains with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.base.errors import UnknownNameError, UsageError
from autotune.base.files import read_regular
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.parsing import pairs
from autotune.cli import completion
from autotune.cli.options import Map, Output, StudiesDir
from autotune.cli.output import print_rich, write_output
from autotune.profile import MAX_BYTES
from autotune.profile.export import FORMATS, Format
from autotune.profile.export.own import OwnFormat
from autotune.report.document import new_table
from autotune.search import find_study, load_outcome
from autotune.search.ranking import profile_from

_ENDINGS = {ending: name for name, made in FORMATS.items() for ending in made.endings}
_DEFAULT = next(iter(FORMATS))


def export(
    study: Annotated[
        str | None,
        typer.Argument(help="Name or folder of a study.", metavar="STUDY", autocompletion=completion.studies),
    ] = None,
    output: Output = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME|FILE.py|package.module:NAME",
            help="See --list, or a function of your own.  [default: by the file's ending, else yaml]",
            autocompletion=completion.formats,
        ),
    ] = None,
    map_: Map = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is no export.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the formats, and how each is used.")] = False,
    trial: Annotated[
        int | None, typer.Option("--trial", help="Another trial than the winner; see `autotune rank`.", min=0)
    ] = None,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
) -> None:
    """Write the profile of a finished study, for autotune or for the tool that trains with it."""
    if list_:
        table = new_table("format", "for", "use", wrap=("for",))
        for name, exporter in FORMATS.items():
            table.add_row(name, exporter.about, exporter.usage)
        print_rich(table)
        return
    if study is None:
        raise UsageError("which study?", advice="`autotune studies` lists them, `autotune export --list` the formats.")
    chosen = _chosen(format_, output)
    if map_ and not chosen.takes_maps:
        takes = " and ".join(name for name, exporter in FORMATS.items() if exporter.takes_maps)
        raise UsageError(f"--map says nothing to {chosen.name}", advice=f"it is for the formats {takes}.")
    files = find_study(study, studies_dir)
    exported = chosen.export(profile_from(files, load_outcome(files), trial), pairs(map_ or [], "--map"))
    text = exported.text if exported.text.endswith("\n") else exported.text + "\n"
    if output is not None:
        _check_replaceable(output, force=force)
    write_output(output, text)
    for note in exported.notes:
        typer.echo(note, err=True)


def _chosen(typed: str | None, output: Path | None) -> Format:
    """Return the format that is typed, or else the only one that the file's ending can mean."""
    if typed is not None:
        if typed in FORMATS:
            return FORMATS[typed]
        if ":" in typed or typed.endswith(".py"):
            return OwnFormat(typed)
        raise UnknownNameError("format", typed, FORMATS)
    name = "" if output is None else output.name.lower()
    chosen = next((FORMATS[format_name] for ending, format_name in _ENDINGS.items() if name.endswith(ending)), None)
    if chosen is None and output is not None and output.suffix:
        raise UsageError(
            f"{output.name} may be any format",
            advice=f"choose with --format ({', '.join(FORMATS)}), or end it in {' or '.join(_ENDINGS)}.",
        )
    return chosen or FORMATS[_DEFAULT]


def _check_replaceable(output: Path, *, force: bool) -> None:
    """Refuse to overwrite anything but an earlier export: a mistyped name may be that of a script."""
    if not output.is_file():
        return
    parents = {*output.absolute().parents, *output.resolve().parents}
    if any(StudyFiles(folder).request.exists() for folder in parents):
        raise UsageError(f"{output} belongs to a study", advice="export to another folder.")
    if force or output.stat().st_size == 0:
        return
    try:
        text = read_regular(output, MAX_BYTES, follow=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        text = None
    if text is None or not any(exporter.is_earlier(text) for exporter in FORMATS.values()):
        raise UsageError(
            f"{output} exists and is no export of autotune", advice="name another file, or overwrite it with --force."
        )
