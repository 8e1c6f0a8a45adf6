"""``autotune resume``: continue a study, or fork it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from autotune.base.errors import UsageError
from autotune.base.layout import DEFAULT_STUDIES
from autotune.base.parsing import duration_s
from autotune.cli.options import Json, NoInput, StudiesDir, Study, study_of
from autotune.cli.output import end_search, environment, stop_signals
from autotune.search import NEWEST
from autotune.search import fork as fork_study
from autotune.search import resume as resume_study


def resume(
    study: Study = NEWEST,
    studies_dir: StudiesDir = DEFAULT_STUDIES,
    fork: Annotated[
        bool, typer.Option("--fork", help="Start a new study that first tries what was best in this one.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Its budget from now on, or with a + how much more it gets.", metavar="DURATION"),
    ] = None,
    as_json: Json = False,
    no_input: NoInput = False,
) -> None:
    """Go on with a study where it stands; with more time, a finished one as well."""
    files = study_of(study, studies_dir)
    if fork and budget is not None:
        raise UsageError("--budget lengthens a study, and --fork begins another", advice="leave one of them out.")
    longer = None if budget is None else _longer(budget)
    with stop_signals() as stop:
        result = fork_study(files, environment(stop)) if fork else resume_study(files, environment(stop), longer)
    end_search(result, as_json=as_json)


def _longer(typed: str) -> Callable[[float], float]:
    """Return a function from a budget in seconds to the new one."""
    more_s = duration_s(typed.removeprefix("+"))
    return (lambda before_s: before_s + more_s) if typed.startswith("+") else (lambda before_s: more_s)
