"""One run of one study, from the legal space to the profile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.errors import AutotuneError, InfeasibleError, MachineError, NoVerdictError
from autotune.files import write_atomic
from autotune.formatting import count, describe, unmet_text
from autotune.layout import StudyFiles
from autotune.profile import Profile, read
from autotune.profile import write as write_profile
from autotune.records import Config, Finding, Outcome, Trial
from autotune.requirements import Requirements
from autotune.samplers import cold_compiles
from autotune.scoring import Scorer
from autotune.search.conclusion import conclude, raise_if_nothing_compared
from autotune.search.data import evicted
from autotune.search.outcome import Course, outcome_of, profile_of
from autotune.search.setup import Setup
from autotune.search.warm_start import winners_elsewhere
from autotune.space import key
from autotune.study.adoption import adopt_folders, adopt_heats
from autotune.study.database import open_shared
from autotune.study.history import History
from autotune.study.launches import Launches
from autotune.study.loop import StudyLoop
from autotune.verify import Contest, Final, prove


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        written: the profile as written by this run; ``None`` if the study was already finished, or if there is none.
    """

    files: StudyFiles
    outcome: Outcome
    written: Profile | None = None

    @property
    def profile(self) -> Profile | None:
        """The profile, read from its file if the study was already finished; ``None`` if there is no verdict.

        Raises:
            ProfileError: the file cannot be read.
        """
        if self.outcome.found is Finding.OPEN:
            return None
        return self.written or read(self.files.profile)


def search_and_prove(setup: Setup, scorers: Sequence[Scorer], first: Sequence[Config] = ()) -> SearchResult:
    """Search, prove the result, and write the profile and the outcome.

    Args:
        scorers: one for each objective; the first chooses the winner.
        first: configurations to try before others, in a new study.

    Raises:
        MachineError, NoVerdictError: nothing but the baseline could be measured, because the machine was busy, or
            because there was no time. The study can be resumed, with its whole budget.
        AutotuneError: see `autotune.errors`. Measurements made until then are in the study's folder.
    """
    run, space, scorer = setup.run, setup.space, scorers[0]
    history = _history(setup, first)
    launches = setup.launches()
    if history.was_only_disturbed:
        run.budget.begin_again()
    rate_within, required = scorer.facts.rate_within, run.required
    by_rate = rate_within is not None
    study = _study(setup, history, launches, scorers)
    study.recover()
    # The database lacks the probes, which ran before it existed, and results whose rows a kill prevented.
    launches.running.tables.rebuild()

    def final(searched_s: float) -> Final:
        return Final(
            space,
            launches,
            scorer,
            run.env.observer,
            run.env.stop,
            by_rate=by_rate,
            rate_within=rate_within or 0.0,
            required=required,
            compiled_s=cold_compiles(history.trials, [h.heat for h in history.heats]),
            searched_s=searched_s,
            cores=max(1, setup.host.cores // setup.conditions.ranks),
            epochs=run.spec.epochs,
            deliveries=setup.probe.deliveries,
            # Elsewhere, the files are in other page caches.
            evict=lambda: not run.is_elsewhere and evicted(launches.conditions.data, run.env.clock),
        )

    contest = _contest_so_far(study, final)
    while True:
        stopped = study.run()
        run.env.observer.says(stopped)
        baseline = study.baseline
        if baseline is None:
            raise _no_baseline(stopped, history.trials)
        try:
            raise_if_nothing_compared(space, history.trials, history.heats, stopped, trials_asked=run.spec.trials)
        except (MachineError, NoVerdictError):
            history.reopen()
            run.budget.begin_again()
            raise
        _raise_if_nothing_fits(required, history.trials, space.baseline)
        searched_s = history.ended_at_s
        contest = contest or Contest(final(searched_s), baseline)
        entered = contest.choose(study.ranked, study.noise)
        contest.enter(final(searched_s), entered, history.newest, in_turns=study.in_turns(entered))
        if not contest.is_lost:
            break
        study.rule_out(contest.wrong, contest.loading_otherwise)
        if not study.go_on(entered, searched_s):
            break
        run.env.observer.says("no finalist was shown to be faster, so the search goes on")
    proof = prove(contest, study.noise)
    if proof.baseline_unmet is not None and key(proof.best.config) == key(space.baseline) and not proof.unproven:
        raise _nothing_fits(required, history.trials, space.baseline, proof.dropped)
    measurement = baseline.result.measurement
    course = Course(
        trials=history.trials,
        stopped=stopped,
        elapsed_s=run.budget.spent_s,
        measured_s=launches.measured_s,
        wait_s=run.budget.waited_s,
        epoch_samples=(measurement.epoch_samples or None) if measurement else None,
        samples_read=None if run.spec.command is not None else launches.running.reading.samples,
    )
    conclusion = conclude(space, history.trials, history.heats, proof, by_rate=by_rate)
    outcome = outcome_of(setup, proof, course, conclusion)
    profile = None
    if outcome.profile is not None:
        profile = profile_of(setup, outcome, course)
        write_profile(profile, run.files.profile)
    # The outcome marks the study as finished, so it is written last.
    write_atomic(run.files.outcome, outcome.model_dump_json(indent=1))
    run.budget.save()
    for scratch in (run.files.checks, run.files.caches):
        shutil.rmtree(scratch, ignore_errors=True)
    return SearchResult(run.files, outcome, profile)


def _raise_if_nothing_fits(required: Requirements, trials: Sequence[Trial], baseline: Config) -> None:
    """Raise if no trial meets what is required.

    Raises:
        InfeasibleError: with the nearest one.
    """
    seen = [m for t in trials if (m := t.result.measurement) is not None]
    if required and not any(required.met_by([m]) for m in seen):
        raise _nothing_fits(required, trials, baseline, {})


def _nothing_fits(
    required: Requirements, trials: Sequence[Trial], baseline: Config, dropped: Mapping[int, str]
) -> InfeasibleError:
    measured = [(t, m) for t in trials if (m := t.result.measurement) is not None]
    trial, nearest = min(measured, key=lambda pair: required.excess([pair[1]]))
    who = f"trial {trial.number}, {describe(trial.config, baseline)}"
    why = unmet_text(required, [nearest]) or dropped.get(trial.number, "it is out")
    if required.met_by([nearest]):
        return InfeasibleError(f"nothing that meets {required} is left", advice=f"{who}: {why}.")
    return InfeasibleError(
        f"none of {count(len(measured), 'configuration')} that were measured meets {required}",
        advice=f"the nearest is {who}: {why}. Search longer, require less, or widen the space with --set.",
    )


def _contest_so_far(study: StudyLoop, final: Callable[[float], Final]) -> Contest | None:
    """Return the contest as an earlier run of the study has left it; ``None`` if the search has not been taken up again
    after one. Its launches have been made, so this takes no time."""
    history = study.history
    if not history.contests or study.baseline is None:
        return None
    contest = Contest(final(0.0), study.baseline)
    trials = {trial.number: trial for trial in history.trials}
    for past in history.contests:
        entered = [trials[number] for number in past.trials]
        contest.enter(final(past.searched_s), entered, past.newest, in_turns=study.in_turns(entered, past.newest))
    study.rule_out(contest.wrong, contest.loading_otherwise)
    return contest


def _history(setup: Setup, first: Sequence[Config]) -> History:
    """Return the study's history, bound to this machine and with a plan of the first trials."""
    run = setup.run
    study = None if run.shared is None else open_shared(run.shared, run.spec, run.files)
    history = History(run.files, setup.space, study=study, objectives=len(run.spec.objectives))
    history.bind(setup.fingerprint)
    adopt_folders(run.files, history, setup.space, setup.fingerprint)
    adopt_heats(run.files, history)
    if not history.has_plan:
        first = first or winners_elsewhere(run.files, run.spec, setup.fingerprint, setup.space, run.env.observer.says)
        history.plan(first, setup.capacity_bytes)
    return history


def _study(setup: Setup, history: History, launches: Launches, scorers: Sequence[Scorer]) -> StudyLoop:
    run, spec = setup.run, setup.run.spec
    return StudyLoop(
        setup.space,
        history,
        launches,
        scorers[0],
        run.env.observer,
        further=scorers[1:],
        # Ours has one objective.
        sampler="tpe" if spec.sampler == "auto" and len(scorers) > 1 else spec.sampler,
        seed=spec.seed,
        trials=spec.trials,
        # Pruning compares rates, which do not decide another objective.
        prune=len(scorers) == 1 and scorers[0].facts.rate_within is not None,
        stop=run.env.stop,
        capacity_bytes=history.capacity_bytes,
        required=run.required,
        rate_within=scorers[0].facts.rate_within or 0.0,
        first=history.planned,
        # All ranks would have to be switched at the same step.
        heats=setup.conditions.ranks == 1,
    )


def _no_baseline(stopped: str, trials: Sequence[Trial]) -> AutotuneError:
    """Return the error for a search that ends before its baseline is measured."""
    disturbed = next((t.result for t in reversed(trials) if t.result.transient and t.result.cause), None)
    if disturbed is not None:
        return MachineError(f"{stopped} before the baseline was measured: {disturbed.cause}", advice=disturbed.advice)
    return InfeasibleError(
        f"{stopped} before the baseline was measured", advice="start a new search with a larger --budget."
    )
