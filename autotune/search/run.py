"""One run of one study, from the legal space to the profile."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import optuna

from autotune.base.errors import AutotuneError, InfeasibleError, InterruptedSearch, MachineError, NoVerdictError
from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import Config, Finding, Outcome, Standing, Trial
from autotune.profile import Profile, read
from autotune.profile import write as write_profile
from autotune.report import headline_of
from autotune.samplers import cold_compiles
from autotune.search.outcome import (
    Conclusion,
    Course,
    conclude,
    outcome_of,
    profile_of,
    raise_if_nothing_compared,
)
from autotune.search.proof import ProofContext
from autotune.search.proof.likely import proof_takes_s, with_likely, without_refuted
from autotune.search.proof.winner import MAY_BE_FASTER, Contest, Proof, prove
from autotune.search.setup import Run, Setup, evicted, winners_elsewhere
from autotune.search.study_folders import resume_command, study_argument
from autotune.space import Space, key
from autotune.space.formatting import count, describe, unmet_text
from autotune.space.requirements import Requirements
from autotune.study.budget import VERDICT_LAUNCHES
from autotune.study.database import open_shared, open_study
from autotune.study.history import History, adopt_folders, adopt_heats, read_launch, unknown_knobs
from autotune.study.launches import Launches
from autotune.study.loop import StudyLoop
from autotune.study.request import read_request, write_request
from autotune.workload.scoring import Scorer


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        written: the profile written by this run; ``None`` if the study was already finished, or if there is no profile.
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


def search_and_prove(
    setup: Setup, scorers: Sequence[Scorer], first: Sequence[Config] = (), before: Outcome | None = None
) -> SearchResult:
    """Search, prove the result, and write the profile and the outcome.

    Args:
        scorers: one for each objective; the first chooses the winner.
        first: configurations to try before others, in a new study.
        before: the outcome so far of a study that continues with a longer budget.

    Raises:
        MachineError: nothing but the baseline could be measured, because the machine was busy. The study can be
            resumed with its whole budget.
        NoVerdictError: the same, because there was no time. The study can be resumed with more.
        AutotuneError: see `autotune.base.errors`. Measurements made until then are in the study's folder.
    """
    stored = _opened(setup.run)
    setup = replace(setup, space=setup.space.without(unknown_knobs(setup.run.files, stored)))
    run, space, scorer = setup.run, setup.space, scorers[0]
    history = _history(setup, stored, first)
    _lengthen(run, history, before)
    launches = setup.launches()
    if history.was_only_disturbed:
        run.budget.begin_again()
    rate_within, required = scorer.facts.rate_within, run.required
    by_rate = rate_within is not None
    study = _study(setup, history, launches, scorers)
    study.recover()
    # The database lacks the probes, which ran before it existed, and results whose rows a kill kept from being written.
    launches.running.tables.rebuild()

    def context(searched_s: float) -> ProofContext:
        return ProofContext(
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
            # Workers elsewhere have page caches of their own.
            evict=lambda: not run.is_elsewhere and evicted(launches.conditions.data, run.env.clock),
        )

    contests: list[Contest] = []
    try:
        stopped = _searched(run, space, study, context, contests)
        contest = contests[-1]
        proof = prove(contest, study.noise)
        proof = without_refuted(contest, proof, history.trials, history.heats, study.noise)
        lost = key(proof.best.config) == key(space.baseline) and not proof.unproven
        if proof.baseline_unmet is not None and lost:
            raise _nothing_fits(required, history.trials, space.baseline, proof.dropped)
        conclusion = conclude(space, history.trials, history.heats, proof, by_rate=by_rate)
        if conclusion.finding is Finding.OPEN:
            proof, evidence = with_likely(contest, proof, history.trials, history.heats, study.noise)
            if evidence is None:
                conclusion = conclude(space, history.trials, history.heats, proof, by_rate=by_rate)
            else:
                conclusion = replace(conclusion, finding=Finding.LIKELY, evidence=evidence)
    except InterruptedSearch as interrupted:
        # What was proven before is kept, and a failure to write must not hide that the search was interrupted.
        if before is None or _has_more_to_prove(before):
            with contextlib.suppress(AutotuneError):
                interrupted.so_far = _left_in_hand(setup, study, contests, context)
        raise
    course = _course(setup, study, launches, contest, stopped, proof.best if conclusion.evidence else None)
    outcome = outcome_of(setup, proof, course, conclusion)
    profile = None
    if outcome.profile is not None:
        profile = profile_of(setup, outcome, course)
        write_profile(profile, run.files.profile)
    else:
        # The profile may have been left by an interrupted search (see `_left_in_hand`).
        run.files.profile.unlink(missing_ok=True)
        write_profile(profile_of(setup, outcome, course), run.files.usual)
    # The outcome marks the study as finished, so it is written last.
    write_atomic(run.files.outcome, outcome.model_dump_json(indent=1))
    run.budget.save()
    # A study that can continue needs the saved weights and the compiled code.
    for scratch in (run.files.checks, run.files.caches) if outcome.again is None else ():
        shutil.rmtree(scratch, ignore_errors=True)
    return SearchResult(run.files, outcome, profile)


def _course(
    setup: Setup, study: StudyLoop, launches: Launches, contest: Contest, stopped: str, likely: Standing | None
) -> Course:
    """Return the course of a search.

    Args:
        likely: what is likely to be faster, if nothing is proven.
    """
    run, measurement = setup.run, contest.race.baseline.trial.result.measurement
    return Course(
        trials=study.history.trials,
        stopped=stopped,
        elapsed_s=run.budget.spent_s,
        measured_s=launches.measured_s,
        wait_s=run.budget.waited_s,
        counts=measurement.counts if measurement else "samples",
        epoch_samples=(measurement.epoch_samples or None) if measurement else None,
        samples_read=None if run.subject.words else launches.running.reading.samples,
        more_s=proof_takes_s(contest, study.noise, likely),
    )


def _left_in_hand(
    setup: Setup, study: StudyLoop, contests: Sequence[Contest], context: Callable[[float], ProofContext]
) -> str | None:
    """Write the profile of what is likely to be faster when a search is interrupted; return a sentence about it and its
    file, or ``None`` if nothing is likely."""
    history, baseline = study.history, study.baseline
    if baseline is None:
        return None
    contest = contests[-1] if contests else Contest(context(0.0), baseline)
    first = contest.race.compared().standing(contest.race.baseline)
    nothing = Proof(first, first, first, finalists=(first,))
    stopped = "the search was interrupted"
    proof, evidence = with_likely(contest, nothing, history.trials, history.heats, study.noise, ended=stopped)
    if evidence is None:
        return None
    course = _course(setup, study, contest.race.context.launches, contest, stopped, proof.best)
    outcome = outcome_of(setup, proof, course, Conclusion(Finding.LIKELY, stopped, evidence=evidence))
    write_profile(profile_of(setup, outcome, course), setup.run.files.profile)
    return f"{headline_of(outcome)} Its profile: {setup.run.files.profile}"


def _searched(
    run: Run, space: Space, study: StudyLoop, context: Callable[[float], ProofContext], contests: list[Contest]
) -> str:
    """Search until something has won a contest, or no time is left; return why the search ended.

    Args:
        contests: receives the contest as soon as there is one.

    Raises:
        AutotuneError: as `search_and_prove`.
    """
    history, contest = study.history, _contest_so_far(study, context)
    contests += [] if contest is None else [contest]

    def check(trial: Trial) -> list[Config]:
        if not contests and study.baseline is not None:
            contests.append(Contest(context(0.0), study.baseline))
        return contests[-1].check_early(trial)

    while True:
        stopped = study.run(check if run.subject.words else None)
        run.env.observer.says(stopped)
        baseline = study.baseline
        if baseline is None:
            history.reopen()
            raise _no_baseline(run, stopped, history.trials)
        try:
            raise_if_nothing_compared(space, history.trials, history.heats, stopped, trials_asked=run.spec.trials)
        except MachineError:
            history.reopen()
            run.budget.begin_again()
            raise
        except NoVerdictError as error:
            history.reopen()
            more_s = (VERDICT_LAUNCHES + 1) * baseline.result.alone_s - run.budget.left_s
            error.advice = f"go on with: {resume_command(study_argument(run.files), more_s)}"
            raise
        _raise_if_nothing_fits(run.required, history.trials, space.baseline)
        searched_s = history.ended_at_s
        contest = contests[-1] if contests else Contest(context(searched_s), baseline)
        contests[:] = [contest]
        entered = contest.choose(study.ranked, study.noise)
        contest.race_finalists(context(searched_s), entered, history.newest, as_round=study.counts_as_round(entered))
        if not contest.is_lost:
            return stopped
        study.rule_out(contest.wrong, contest.loading_otherwise)
        if not study.go_on(entered, searched_s):
            return stopped
        run.env.observer.says("no finalist was shown to be faster, so the search goes on")


def _lengthen(run: Run, history: History, before: Outcome | None) -> None:
    """Let a study continue with the budget that it has now.

    Args:
        before: its outcome so far, if it gets more time.
    """
    if read_request(run.files).budget_s != run.spec.budget_s:
        begun = run.files.request.stat()
        write_request(run.files, run.spec)
        # When the study began is told by it.
        os.utime(run.files.request, ns=(begun.st_atime_ns, begun.st_mtime_ns))
    if before is not None:
        if not _has_more_to_prove(before):
            history.reopen()
        if not run.files.checks.is_dir():
            # The weights with which its checks began are gone.
            for launch in run.files.launches.glob("check-*"):
                shutil.rmtree(launch, ignore_errors=True)
        run.files.outcome.unlink(missing_ok=True)


def _has_more_to_prove(outcome: Outcome) -> bool:
    """Return whether something may be faster but is not proven to be."""
    others = [s for s in outcome.finalists if s.trial != outcome.baseline.trial and s.trial not in outcome.dropped]
    open_ = outcome.found is Finding.OPEN and any(s.speedup_ci95[1] > MAY_BE_FASTER for s in others)
    in_doubt = outcome.found is Finding.OPEN and any(check.differs for check in outcome.checks)
    return outcome.found is Finding.LIKELY or open_ or in_doubt


def _raise_if_nothing_fits(required: Requirements, trials: Sequence[Trial], baseline: Config) -> None:
    """Raise if no trial meets what is required.

    Raises:
        InfeasibleError: none does; the error names the nearest one.
    """
    measurements = [m for t in trials if (m := t.result.measurement) is not None]
    if required and not any(required.met_by([m]) for m in measurements):
        raise _nothing_fits(required, trials, baseline, {})


def _nothing_fits(
    required: Requirements, trials: Sequence[Trial], baseline: Config, dropped: Mapping[int, str]
) -> InfeasibleError:
    measured = [(t, m) for t in trials if (m := t.result.measurement) is not None]
    trial, nearest = min(measured, key=lambda pair: required.excess([pair[1]]))
    title = f"trial {trial.number}, {describe(trial.config, baseline)}"
    reason = unmet_text(required, [nearest]) or dropped.get(trial.number, "it is out")
    if required.met_by([nearest]):
        return InfeasibleError(f"nothing that meets {required} is left", advice=f"{title}: {reason}.")
    return InfeasibleError(
        f"none of {count(len(measured), 'configuration')} that were measured meets {required}",
        advice=f"the nearest is {title}: {reason}. Search longer, require less, or widen the space with --set.",
    )


def _contest_so_far(study: StudyLoop, context: Callable[[float], ProofContext]) -> Contest | None:
    """Return the contest as an earlier run of the study left it; ``None`` if the search was not continued after a
    contest. Its launches have already been made, so this takes no time."""
    history = study.history
    if not history.contests or study.baseline is None:
        return None
    contest = Contest(context(0.0), study.baseline)
    trials = {trial.number: trial for trial in history.trials}
    for past in history.contests:
        entered = [trials[number] for number in past.trials]
        contest.race_finalists(
            context(past.searched_s), entered, past.newest, as_round=study.counts_as_round(entered, past.newest)
        )
    study.rule_out(contest.wrong, contest.loading_otherwise)
    return contest


def _opened(run: Run) -> optuna.Study:
    if run.shared is not None:
        return open_shared(run.shared, run.spec, run.files)
    return open_study(run.files, objectives=len(run.spec.objectives))


def _history(setup: Setup, stored: optuna.Study, first: Sequence[Config]) -> History:
    """Return the study's history, bound to this machine and with the first trials planned."""
    run = setup.run
    history = History(run.files, setup.space, study=stored)
    history.bind(setup.fingerprint)
    adopt_folders(run.files, history, setup.space, setup.fingerprint)
    adopt_heats(run.files, history)
    if not history.has_plan:
        first = first or winners_elsewhere(run.files, run.spec, setup.space, run.env.observer.says)
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
        # Autotune's own sampler has one objective.
        sampler="tpe" if spec.sampler == "auto" and len(scorers) > 1 else spec.sampler,
        seed=spec.seed,
        trials=spec.trials,
        # Pruning compares rates, which decide no other objective.
        prune=len(scorers) == 1 and scorers[0].facts.rate_within is not None,
        stop=run.env.stop,
        capacity_bytes=history.capacity_bytes,
        required=run.required,
        rate_within=scorers[0].facts.rate_within or 0.0,
        first=history.planned,
        # All ranks would have to be switched at the same step.
        heats=setup.conditions.ranks == 1,
    )


def _no_baseline(run: Run, stopped: str, trials: Sequence[Trial]) -> AutotuneError:
    """Return the error for a search that ends before its baseline is measured."""
    disturbed = next((t.result for t in reversed(trials) if t.result.transient and t.result.cause), None)
    if disturbed is not None:
        return MachineError(f"{stopped} before the baseline was measured: {disturbed.cause}", advice=disturbed.advice)
    _, probe = read_launch(run.files.launch("probe-1"))
    launch_s = max((result.alone_s for result in (probe, *(t.result for t in trials)) if result is not None), default=0)
    command = resume_command(study_argument(run.files), (VERDICT_LAUNCHES + 1) * launch_s - run.budget.left_s)
    return NoVerdictError(f"{stopped} before the baseline was measured", advice=f"go on with: {command}")
