"""``autotune export``: write the profile of a finished study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import StudiesDir, Study
from autotune.cli.output import format_of, print_bytes, write_output
from autotune.errors import ProfileError, UsageError
from autotune.layout import DEFAULT_STUDIES, StudyFiles
from autotune.profile import export as export_profile
from autotune.profile import read
from autotune.records import Finding
from autotune.search import find_study, load_outcome

_ENDINGS = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def export(
    study: Study,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="yaml or json.  [default: json for a .json file, else yaml]")
    ] = None,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
) -> None:
    """Write the profile of a finished study."""
    chosen = format_of(format_, output, _ENDINGS, "yaml")
    files = find_study(study, studies_dir)
    outcome = load_outcome(files)
    if outcome is not None and outcome.found is Finding.OPEN:
        raise UsageError(
            f"{files.name} has no profile, because there is no verdict: {outcome.because}", advice=outcome.advice
        )
    if not files.profile.exists():
        raise UsageError(f"{files.name} has no profile yet", advice=f"finish it with: autotune resume {study}")
    text = export_profile(read(files.profile), chosen)
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        print_bytes(text)
    else:
        _check_replaceable(output)
        write_output(output, text)


def _check_replaceable(output: Path) -> None:
    """Refuse to overwrite anything but another exported profile: a mistyped name may be that of a script.

    Raises:
        UsageError: there is something else under this name, or the profile of a study.
    """
    if not output.is_file() or output.stat().st_size == 0:
        return
    if StudyFiles(output.absolute().parent).request.exists():
        raise UsageError(f"{output} belongs to a study", advice="export to another folder.")
    try:
        read(output)
    except ProfileError as error:
        raise UsageError(f"{output} exists and is no profile", advice="name another file, or remove it.") from error
