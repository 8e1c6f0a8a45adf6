"""Takes trials and heats that only their folders know of back into a study's database."""

from __future__ import annotations

import contextlib
import math

import optuna
from optuna.trial import TrialState

from autotune.base.errors import ResumeRefusedError
from autotune.base.layout import StudyFiles
from autotune.base.records import Fingerprint, HeatPlan, StudyHeat, TrialResult, TrialSpec, TrialStatus
from autotune.samplers.translate import distributions
from autotune.space import Space
from autotune.study.database import writing
from autotune.study.heats import run_heat
from autotune.study.history import History
from autotune.study.launch_files import read_launch


def adopt_folders(files: StudyFiles, history: History, space: Space, now: Fingerprint) -> None:
    """Mark the trials that the database lacks as running; `History.recover` then reads their results.

    The database has been moved away, or replaced by an older copy. New trials would get the numbers of these, and
    overwrite their folders.

    Args:
        now: this machine, workload and data.

    Raises:
        ResumeRefusedError: a trial was measured with another workload, or on other data.
        MachineError: the database cannot be written.
    """
    study = history.optuna
    known = study.get_trials(deepcopy=False)
    offered = distributions(space)
    numbers = [int(f.name) for f in files.trials.glob("*") if f.name.isdecimal()]
    with writing(files):
        for frozen in known:
            # A trial that waits has not been launched, and only a launch makes a folder.
            if frozen.state is TrialState.WAITING and files.trial(frozen.number).folder.exists():
                study._storage.set_trial_state_values(frozen._trial_id, TrialState.RUNNING)
        for number in range(len(known), max(numbers, default=-1) + 1):
            spec, _ = read_launch(files.trial(number))
            if spec is not None:
                _refuse_others(files, spec, now)
            config = {n: v for n, v in spec.config.items() if n in offered and v in offered[n].choices} if spec else {}
            study.add_trial(
                optuna.create_trial(
                    state=TrialState.RUNNING,
                    params=config,
                    distributions={n: offered[n] for n in config},
                    user_attrs={"repeats": spec.repeats if spec else None},
                )
            )


def adopt_heats(files: StudyFiles, history: History) -> None:
    """Store the heats that the database lacks and that have ended, as their folders show."""
    known = {heat.number for heat in history.heats}
    names = [f.name.removeprefix("heat-").removesuffix("-1") for f in files.launches.glob("heat-*-1")]
    lacking = sorted({int(n) for n in names if n.isdecimal()} - known)
    trials = [int(f.name) for f in files.trials.glob("*") if lacking and f.name.isdecimal()]
    results = [read_launch(files.trial(number))[1] for number in trials]
    trials_s = [result.began_s for result in results if result is not None and result.began_s is not None]
    for number in lacking:
        spec, _ = read_launch(files.launch(f"heat-{number}-1"))
        wall_s, began_s = 0.0, math.inf

        def stored(attempt: int, plan: HeatPlan, number: int = number) -> TrialResult:
            nonlocal wall_s, began_s
            spec, result = read_launch(files.launch(f"heat-{number}-{attempt}"))
            if result is None or result.status is TrialStatus.INTERRUPTED or spec is None or spec.heat != plan:
                raise _UnfinishedError
            wall_s += result.wall_s
            began_s = min(began_s, math.inf if result.began_s is None else result.began_s)
            return result

        if spec is not None and spec.heat is not None:
            with contextlib.suppress(_UnfinishedError):
                found = run_heat(stored, spec.heat)
                after = sum(trial_s < began_s for trial_s in trials_s)
                history.record_heat(StudyHeat(number=number, after=after, heat=found, wall_s=wall_s))


class _UnfinishedError(Exception):
    """A launch of a heat has no result."""


def _refuse_others(files: StudyFiles, spec: TrialSpec, now: Fingerprint) -> None:
    # The rest of the fingerprint is in `conditions.json`, which older studies lack.
    then = {"workload_sha256": spec.workload.sha256, "data_identity": spec.data.identity}
    rows = [(name, was, str(now.values[name])) for name, was in then.items() if was != now.values.get(name, was)]
    if rows:
        raise ResumeRefusedError(
            f"{spec.launch} of study {files.name!r} was measured under other conditions",
            rows,
            advice="restore the conditions, or start a new study with `autotune search`.",
        )
