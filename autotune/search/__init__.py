"""One search from request to profile: probe, data, space, study, proof, profile.

The command line, the daemon's jobs and `autotune.tune` call this module. It prints nothing; progress goes to an
`Observer`.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from autotune.base.clock import timestamp
from autotune.base.errors import AutotuneError, InterruptedSearch, MachineError, UsageError, WorkloadError
from autotune.base.files import exclusive_lock, sweep_temporaries
from autotune.base.layout import StudyFiles
from autotune.base.parsing import duration_text
from autotune.base.records import Config, Finding, Outcome, StudySpec, WorkloadRef
from autotune.launcher import STUDY_MARK, end_survivors
from autotune.machine.gpu import kept_open
from autotune.report import best_so_far_line
from autotune.search.devices import resolve_devices
from autotune.search.dry_run import DryRun, dry_run_of
from autotune.search.request import check_request, require_linux
from autotune.search.run import SearchResult, search_and_prove
from autotune.search.setup import Environment, Setup, best_of, first_headline, run_of, set_up
from autotune.search.study_folders import NEWEST, check_study_name, find_study, new_folder, require_utf8, study_argument
from autotune.search.subject import left_sentence
from autotune.space import Space
from autotune.study.budget import refuse_reserved
from autotune.study.database import name_taken, open_study, open_to_read
from autotune.study.loop import note_failure
from autotune.study.request import process_mark, read_request, write_request
from autotune.study.tables import read_trials
from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer

__all__ = [
    "NEWEST",
    "DryRun",
    "Environment",
    "SearchResult",
    "find_study",
    "fork",
    "load_outcome",
    "make_space",
    "new_study",
    "preview",
    "resume",
    "search",
]


@kept_open()
def search(spec: StudySpec, studies: Path, env: Environment, *, first: Sequence[Config] = ()) -> SearchResult:
    """Make a new study and search. If ``spec.name`` is empty, the study gets a new numbered name.

    Args:
        first: configurations to try before others, if they are legal here. If empty, the winners of earlier studies in
            the folder are tried first (see `autotune.search.setup`).

    Raises:
        AutotuneError: see `autotune.base.errors`. Measurements made until then are in the study's folder; there is no
            folder if the request or the workload failed before the first measurement.
    """
    require_linux()
    ref = check_request(spec)
    if spec.on is None:
        resolve_devices(spec)
    taken = set() if spec.storage is None else open_to_read(spec.storage).names()
    if spec.storage is not None and spec.name in taken and not (studies / spec.name).exists():
        raise name_taken(spec.name, spec.storage)
    files, spec = new_study(spec, ref, studies, taken)
    try:
        return _run(files, spec, ref, env, first)
    except (UsageError, WorkloadError) as error:
        # The search failed during setup and measured nothing, so there is nothing to resume. If the lock is not free,
        # the study belongs to another search that started at the same moment.
        with exclusive_lock(files.lock) as free:
            if free and not files.database.exists() and not files.conditions.exists():
                shutil.rmtree(files.folder, ignore_errors=True)
                if str(files.folder) in (error.advice or ""):
                    error.advice = None  # it names a log that has just been removed; the error holds its last lines
        raise


def new_study(
    spec: StudySpec, ref: WorkloadRef, studies: Path, taken: Collection[str] = ()
) -> tuple[StudyFiles, StudySpec]:
    """Make the folder of a new study, which holds only its request; return it, and the request with the study's name.

    `resume` starts the search, on this machine or on another one that sees the folder.

    Args:
        taken: names that a numbered study must not get.

    Raises:
        UsageError: the name is taken, reserved for a job of the daemon, or invalid.
        MachineError: the folder cannot be made.
    """
    files = new_folder(spec, ref, studies, taken)
    spec = spec.model_copy(update={"name": files.name})
    write_request(files, spec)
    try:
        # A job of the daemon may have reserved the folder since it was checked.
        refuse_reserved(files, spec.mark)
    except UsageError:
        files.request.unlink()
        raise
    files.reservation.unlink(missing_ok=True)
    return files, spec


def resume(files: StudyFiles, env: Environment, budget: Callable[[float], float] | None = None) -> SearchResult:
    """Continue a study. A finished one is left unchanged, unless it gets more time: then its proof continues, and so
    does its search if there was a verdict or nothing to prove.

    Args:
        budget: returns the budget from now on, in seconds, given the budget so far; ``None`` keeps it.

    Raises:
        ResumeRefusedError: the machine or the space has changed.
        AutotuneError: see `autotune.base.errors`.
    """
    require_linux()
    require_utf8(files.folder)
    if files.database.exists():
        # Raises for a database that is damaged or not autotune's, before the probe's row is written to it.
        open_study(files, objectives=len(read_request(files).objectives))
    # The folder may have been renamed since the request was written.
    spec = read_request(files).model_copy(update={"name": files.name})
    longer = None if budget is None else spec.model_copy(update={"budget_s": budget(spec.budget_s)})
    if longer is not None and longer.budget_s <= spec.budget_s:
        raise UsageError(
            f"the budget of {files.name} is {duration_text(spec.budget_s)} already, with what has been used of it",
            advice="--budget +5m adds five minutes.",
        )
    return _run(files, spec, check_request(spec), env, longer=longer)


def fork(files: StudyFiles, env: Environment) -> SearchResult:
    """Repeat a study's request in a new study beside it, which first tries the best configurations of the old one.

    This is for studies that cannot be resumed because the machine or the space has changed.

    Raises:
        UsageError: the study has measured nothing but its baseline.
        AutotuneError: as in `search`.
    """
    spec = read_request(files)
    first = best_of(files)
    if not first:
        raise UsageError(
            f"{files.name} measured nothing but its baseline, so there is nothing to start from",
            advice="start anew with `autotune search`.",
        )
    fresh = spec.model_copy(update={"name": "", "mark": uuid.uuid4().hex, "created": timestamp()})
    return search(fresh, files.folder.parent, env, first=first)


def _run(
    files: StudyFiles,
    spec: StudySpec,
    ref: WorkloadRef,
    env: Environment,
    first: Sequence[Config] = (),
    longer: StudySpec | None = None,
) -> SearchResult:
    with exclusive_lock(files.lock) as free:
        if not free:
            raise UsageError(f"study {files.name!r} is running already", advice="wait for it, or end it.")
        outcome = load_outcome(files)
        before, spec = outcome, longer or spec
        # A removed profile is made again.
        if longer is None and outcome is not None and (outcome.found is Finding.OPEN or files.profile.exists()):
            if not files.report.is_file():
                _leave_page(files, outcome, env)
            env.observer.says(f"{files.name} is finished; nothing was launched")
            return SearchResult(files, outcome)
        sweep_temporaries(files.folder)
        files.failure.unlink(missing_ok=True)
        mark = process_mark(files, spec)
        end_survivors(mark, env.clock)
        scorers = [Scorer(find_objective(name), {STUDY_MARK: mark}, spec.goal) for name in spec.objectives]
        try:
            with contextlib.ExitStack() as ends, run_of(files, spec, ref, env) as run:
                for scorer in scorers:
                    ends.callback(scorer.close)
                    scorer.check()
                    if len(scorers) > 1 and scorer.facts.rate_within:
                        raise UsageError(
                            "an objective that chooses among the fastest stands alone",
                            advice="search by it, or by the others; --pareto shows a front of what was measured.",
                        )
                env.observer.begins(spec, first_headline(run))
                if spec.storage is not None:
                    env.observer.says(f"the study is stored in {spec.storage}")
                try:
                    result = search_and_prove(set_up(run), scorers, first, None if longer is None else before)
                except AutotuneError:
                    left = left_sentence(files, spec)
                    if left is not None:
                        env.observer.says(left)
                    raise
                _leave_page(files, result.outcome, env)
                return result
        except InterruptedSearch as interrupted:
            interrupted.study = study_argument(files)
            interrupted.advice = f"everything measured is kept; go on with: autotune resume {interrupted.study}"
            interrupted.so_far = interrupted.so_far or _best_so_far(files, spec)
            raise
        except AutotuneError as error:
            note_failure(files, error)
            raise


def _best_so_far(files: StudyFiles, spec: StudySpec) -> str | None:
    # A failure to read must not hide that the search was interrupted.
    with contextlib.suppress(AutotuneError):
        return best_so_far_line(read_trials(files), spec)
    return None


def _leave_page(files: StudyFiles, outcome: Outcome, env: Environment) -> None:
    trouble = env.page(files, outcome, study_argument(files))
    if trouble is not None:
        env.observer.says(f"the search is done, but {trouble}")


def load_outcome(files: StudyFiles) -> Outcome | None:
    """Return the outcome of a study, with the current path of the study's folder; ``None`` if it is not finished.

    Raises:
        MachineError: the outcome exists but cannot be read.
    """
    try:
        outcome = Outcome.model_validate_json(files.outcome.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{files.outcome} cannot be read",
            advice="remove it: `autotune resume` writes it again from what was measured.",
        ) from error
    # Study folders get renamed, moved and copied.
    folder = files.folder.absolute()
    profile = None if outcome.profile is None else str(StudyFiles(folder).profile)
    return outcome.model_copy(update={"folder": str(folder), "profile": profile})


def make_space(spec: StudySpec, env: Environment, folder: Path) -> Space:
    """Return the legal space of a request on this machine. Runs one probe and makes no study.

    Args:
        folder: a temporary folder for the probe's files.
    """
    return _probed_setup(spec, env, folder).space


def preview(spec: StudySpec, env: Environment, folder: Path, count: int = 8) -> DryRun:
    """Return what a search would do. Runs one probe and makes no study.

    Args:
        folder: a temporary folder for the probe's files.
        count: number of trials to predict.

    Raises:
        UsageError: also for a name that `search` would refuse.
    """
    check_study_name(spec.name)
    return dry_run_of(_probed_setup(spec, env, folder), count)


def _probed_setup(spec: StudySpec, env: Environment, folder: Path) -> Setup:
    with run_of(
        StudyFiles(folder), spec.model_copy(update={"storage": None, "workers": None}), check_request(spec), env
    ) as run:
        return set_up(run, measuring=False)
