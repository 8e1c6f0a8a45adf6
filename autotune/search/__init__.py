"""The whole way of one search: probe, data, space, study, verification, profile.

The CLI, and whoever calls `tune`, come through here. Nothing is printed; an `Observer` is told.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.catalog import find_objective
from autotune.clock import timestamp
from autotune.errors import AutotuneError, InterruptedSearch, MachineError, UsageError
from autotune.files import exclusive_lock, sweep_temporaries
from autotune.launcher import STUDY_MARK, end_survivors
from autotune.layout import DEFAULT_STUDIES, StudyFiles
from autotune.machine.host import read_host
from autotune.observer import Observer
from autotune.profile import Profile, read
from autotune.records import Config, Outcome, Probe, StudySpec, WorkloadRef
from autotune.report import leave_page
from autotune.scoring import Scorer
from autotune.search.dry_run import Beforehand, look_beforehand
from autotune.search.request import (
    as_typed,
    check_request,
    find_study,
    new_folder,
    request_for_space,
    require_linux,
)
from autotune.search.run import Environment, Search, capacity_of
from autotune.search.warm_start import best_of
from autotune.space import Space, build_space
from autotune.study.failure import note_failure
from autotune.study.launches import Launches
from autotune.study.request import read_request, write_request

__all__ = [
    "Beforehand",
    "Environment",
    "beforehand",
    "find_study",
    "fork",
    "load_outcome",
    "make_space",
    "resume",
    "search",
    "tune",
]

DEFAULT_BUDGET_S = 600.0


def tune(
    model: str,
    *,
    data: str = "generated",
    args: Mapping[str, str] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    studies_dir: str | os.PathLike[str] = DEFAULT_STUDIES,
    study: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    image_size: int | None = None,
    observer: Observer | None = None,
) -> Profile:
    """Search for the fastest way to train ``model`` on this machine and return its profile.

    Call it from the main thread. Everything else that the command line offers is in `StudySpec` and `search`.

    Args:
        model: a catalog name, a torchvision classification model, a file, or ``package.module:NAME``.
        data: ``generated``, ``synthetic``, or a folder.
        budget_s: seconds the search may run.

    Raises:
        AutotuneError: see `autotune.errors`.
    """
    spec = StudySpec(
        name=study or "",
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model=model,
        args=dict(args or {}),
        data=data,
        budget_s=budget_s,
        device=device,
        batch_size=batch_size,
        image_size=image_size,
    )
    files = search(spec, Path(studies_dir), Environment.real(observer))
    return read(files.profile)


def search(spec: StudySpec, studies: Path, env: Environment, *, first: Sequence[Config] = ()) -> StudyFiles:
    """Make a new study and search. With an empty ``spec.name`` it gets a fresh numbered one.

    Args:
        first: configurations to try before others, as far as they are legal here. With none, those that won in earlier
            studies of the folder stand in (`autotune.search.warm_start`).

    Raises:
        AutotuneError: see `autotune.errors`. What was measured until then is in the study's folder.
    """
    require_linux()
    ref = check_request(spec)
    files = new_folder(spec, ref, studies)
    spec = spec.model_copy(update={"name": files.name})
    write_request(files, spec)
    try:
        _run(files, spec, ref, env, first)
    except UsageError:
        # What was asked cannot be carried out, and nothing was measured: there is nothing to go on with. Where the
        # lock is not free, the study is another search's that began in the same moment.
        with exclusive_lock(files.lock) as free:
            if free and not files.database.exists():
                shutil.rmtree(files.folder, ignore_errors=True)
        raise
    return files


def resume(files: StudyFiles, env: Environment) -> None:
    """Go on with a study where it stands; a finished one is left as it is.

    Raises:
        ResumeRefusedError: the machine or the space is another now.
        AutotuneError: see `autotune.errors`.
    """
    require_linux()
    spec = read_request(files)
    _run(files, spec, check_request(spec), env)


def fork(files: StudyFiles, env: Environment) -> StudyFiles:
    """Ask for the same again in a new study beside this one, which tries first what was best here: for a study that
    can't be resumed, because the machine or the space is another now.

    Raises:
        UsageError: nothing was measured in it.
        AutotuneError: as `search` does.
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


def _run(files: StudyFiles, spec: StudySpec, ref: WorkloadRef, env: Environment, first: Sequence[Config] = ()) -> None:
    with exclusive_lock(files.lock) as free:
        if not free:
            raise UsageError(f"study {files.name!r} is running already", advice="wait for it, or end it.")
        if files.outcome.exists() and files.profile.exists():
            if not files.report.is_file():
                _leave_page(files, env)
            env.observer.says(f"{files.name} is finished; nothing was launched")
            return
        sweep_temporaries(files.folder)
        files.failure.unlink(missing_ok=True)
        end_survivors(spec.mark, env.clock)
        launcher = env.launcher(spec.mark)
        scorer = Scorer(find_objective(spec.objective), {STUDY_MARK: spec.mark})
        try:
            Search(files, spec, ref, env, launcher, scorer).run(first)
            _leave_page(files, env)
        except InterruptedSearch as interrupted:
            interrupted.advice = f"everything measured is kept; go on with: autotune resume {as_typed(files)}"
            raise
        except AutotuneError as error:
            note_failure(files, error)
            raise
        finally:
            launcher.close()
            scorer.close()
            env.observer.ends()


def _leave_page(files: StudyFiles, env: Environment) -> None:
    outcome = load_outcome(files)
    trouble = leave_page(files, outcome, typed=as_typed(files)) if outcome is not None else None
    if trouble is not None:
        env.observer.says(f"the search is done, but {trouble}")


def load_outcome(files: StudyFiles) -> Outcome | None:
    """The outcome of a finished study, or ``None`` if it is not finished.

    Raises:
        MachineError: it is there, and damaged.
    """
    try:
        return Outcome.model_validate_json(files.outcome.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{files.outcome} cannot be read",
            advice="remove it: `autotune resume` writes it again from what was measured.",
        ) from error


def make_space(spec: StudySpec, env: Environment, folder: Path) -> Space:
    """The legal space for a request on this machine, without a study: one probe, nothing kept.

    Args:
        folder: a temporary folder for the probe's files.
    """
    return _probed(spec, env, folder)[0]


def beforehand(spec: StudySpec, env: Environment, folder: Path, count: int = 8) -> Beforehand:
    """What a search would do first, from one probe and nothing else.

    Args:
        folder: a temporary folder for the probe's files. count: of trials to look ahead.
    """
    space, probe, launches = _probed(spec, env, folder)
    return look_beforehand(space, spec, probe.device, capacity_of(spec, probe, read_host()), launches.plan, count)


def _probed(spec: StudySpec, env: Environment, folder: Path) -> tuple[Space, Probe, Launches]:
    ref = check_request(spec)
    launcher = env.launcher(spec.mark)
    scorer = Scorer(find_objective(spec.objective))
    try:
        search_ = Search(StudyFiles(folder), spec, ref, env, launcher, scorer)
        conditions, probe = search_.probe(search_.first_conditions()[0])
        space = build_space(probe, read_host(), request_for_space(spec, probe.workload_knobs))
        return space, probe, search_.launches(conditions)
    finally:
        launcher.close()
        env.observer.ends()
