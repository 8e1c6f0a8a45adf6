"""``autotune resume``: continue a study, or fork it."""

from __future__ import annotations

from typing import Annotated

import typer

from autotune.cli.options import Json, NoInput, StudiesDir, Study, study_of
from autotune.cli.running import end_search, environment, stop_signals
from autotune.layout import DEFAULT_STUDIES
from autotune.search import NEWEST
from autotune.search import fork as fork_study
from autotune.search import resume as resume_study


def resume(
    study: Study = NEWEST,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
    fork: Annotated[
        bool, typer.Option("--fork", help="Start a new study that first tries what was best in this one.")
    ] = False,
    as_json: Json = False,
    no_input: NoInput = False,
) -> None:
    """Go on with a study where it stands."""
    files = study_of(study, studies_dir)
    with stop_signals() as stop:
        found = (fork_study if fork else resume_study)(files, environment(stop))
    end_search(found, as_json=as_json)
