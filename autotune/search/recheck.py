"""The check of a profile's promise: its configuration and its baseline are launched again in turns."""

from __future__ import annotations

import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from autotune import stats
from autotune.catalog import find_objective
from autotune.clock import timestamp
from autotune.errors import AutotuneError, MachineError, UsageError, WorkloadError
from autotune.knobs import spell
from autotune.layout import StudyFiles
from autotune.profile import Profile
from autotune.records import Config, StudySpec, Trial, TrialResult, TrialStatus
from autotune.scoring import Scorer
from autotune.search.request import check_request, model_of, require_linux
from autotune.search.setup import Environment, run_of, set_up
from autotune.space import key
from autotune.study.history import read_launches
from autotune.verify.comparison import Comparison
from autotune.verify.entrant import Entrant
from autotune.verify.race import Final, Race

#: Number of rounds for a profile that is the baseline itself, for which there is no ratio to measure.
_ALONE = 5


@dataclass(frozen=True)
class Recheck:
    """The result of the check. Rates are in samples per second, intervals at 95 %.

    Attributes:
        launches: number of launches of the profile's configuration.
        baseline: rate of the profile's baseline.
        rate: rate of the profile's configuration.
        speedup: ``(speedup, low, high)`` over the baseline; ``None`` for a profile that is the baseline itself.
        ratio: ``(ratio, low, high)`` of the speedup now over the promised one, or of the rates if there is no speedup.
        differences: rows ``(name, then, now)`` of what is different on this machine.
        failed: why the configuration could not be measured, as a clause; ``None`` if it was measured.
    """

    launches: int
    baseline: stats.Rate | None
    rate: stats.Rate | None
    speedup: tuple[float, float, float] | None
    ratio: tuple[float, float, float] | None
    differences: tuple[tuple[str, str, str], ...]
    failed: str | None = None

    def verdict(self, at_least: float) -> bool | None:
        """Whether at least this fraction of the promise is kept; ``None`` if the launches scatter too much to tell."""
        if self.ratio is None:
            return False
        ratio, _, high = self.ratio
        return False if high < at_least else True if ratio >= at_least else None


def recheck(profile: Profile, spec: StudySpec, env: Environment, folder: Path) -> Recheck:
    """Launch a profile's configuration in turns with its baseline, for at most ``spec.budget_s`` seconds.

    Args:
        spec: the request, from `request_for`.
        folder: the folder for the launches' files.

    Raises:
        UsageError: the configuration cannot run here.
        WorkloadError: the workload, or the baseline, fails.
        MachineError: the machine is too busy to measure, or has no such device.
        InterruptedSearch: a signal was received.
    """
    require_linux()
    ref = check_request(spec)
    scorer = Scorer(find_objective(spec.objective))
    with closing(scorer), run_of(StudyFiles(folder), spec, ref, env) as run:
        setup = set_up(run)
        differences = tuple(profile.fingerprint.differences(setup.fingerprint))
        refused = setup.space.refusal(profile.configuration)
        if refused is not None:
            raise UsageError(f"the profile's configuration cannot run here: {refused}")
        launches = setup.launches()
        final = Final(setup.space, launches, scorer, env.observer, env.stop)
        baseline = _entrant(0, profile.baseline.configuration)
        own = key(profile.configuration) == key(profile.baseline.configuration)
        candidate = baseline if own else _entrant(profile.provenance.trial, profile.configuration)
        race = Race(final, [baseline] if own else [baseline, candidate])
        if own:
            for _ in range(_ALONE):
                if race.round_s([baseline]) <= launches.budget.left_s:
                    race.round([baseline])
        else:
            race.run(spec.budget_s)
        if not baseline.again:
            raise _no_baseline(_last(run.files, baseline))
        return _kept(profile, race.compared(), baseline, candidate, differences, run.files)


def request_for(
    profile: Profile,
    *,
    model: str = "",
    args: dict[str, str] | None = None,
    data: str = "",
    budget_s: float,
    allow_busy: bool = False,
) -> StudySpec:
    """Return the request that measures under the profile's conditions.

    Args:
        model: the model; empty for the profile's own. The same holds for ``args`` and ``data``.

    Raises:
        UsageError: the profile was measured on a folder, and no folder is given; or the profile's model has changed,
            and no model is given.
    """
    then = profile.conditions
    kind = data or then.data
    if kind == "folder":
        raise UsageError("the profile was measured on a folder of yours", advice="name the folder with --data DIR.")
    return StudySpec(
        name="verify",
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model=model_of(profile, model),
        args=args or profile.workload.args,
        # Ignored by a workload that has its own data.
        data="generated" if kind == "none" else kind,
        device=then.device,
        batch_size=int(profile.baseline.configuration["batch_size"]),
        image_size=then.image_size,
        seed=then.seed,
        budget_s=budget_s,
        allow_busy=allow_busy,
        baseline={name: spell(value) for name, value in profile.baseline.configuration.items()},
        narrowed={name: (spell(value),) for name, value in profile.configuration.items()},
    )


def _entrant(number: int, config: Config) -> Entrant:
    """Return an entrant without an earlier measurement. The first round shows how long its launches take."""
    return Entrant(dict(config), Trial(number=number, config=config, result=_nothing(number)))


def _nothing(number: int) -> TrialResult:
    return TrialResult(launch=f"{number:05d}", status=TrialStatus.COMPLETE)


def _kept(
    profile: Profile,
    compared: Comparison,
    baseline: Entrant,
    candidate: Entrant,
    differences: tuple[tuple[str, str, str], ...],
    files: StudyFiles,
) -> Recheck:
    usual = compared.rate(baseline)
    if not candidate.again:
        return Recheck(0, usual, None, None, None, differences, _why_not(_last(files, candidate)))
    rate = compared.rate(candidate)
    if candidate is baseline:
        promised = stats.Rate(profile.gives.samples_per_second, *profile.gives.ci95)
        return Recheck(len(baseline.again), usual, rate, None, stats.speedup(rate, promised), differences)
    found = compared.ratio(candidate, baseline)
    ratio, low, high = (part / profile.gives.speedup for part in found)
    return Recheck(len(candidate.again), usual, rate, found, (ratio, low, high), differences)


def _last(files: StudyFiles, one: Entrant) -> TrialResult | None:
    """Return the last launch of an entrant that did not complete."""
    ended = [r for s, r in read_launches(files) if key(s.config) == key(one.config) and r.cause is not None]
    return ended[-1] if ended else None


def _why_not(result: TrialResult | None) -> str:
    return "there was no time for it" if result is None else f"it ended as {result.status}: {result.cause}"


def _no_baseline(result: TrialResult | None) -> AutotuneError:
    what = f"the baseline could not be measured: {_why_not(result)}"
    if result is not None and result.status is TrialStatus.INTERRUPTED:
        return MachineError(what, advice=result.advice)
    return WorkloadError(what, advice=result.advice if result else None, detail=result.evidence if result else None)
