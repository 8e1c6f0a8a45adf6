"""One search from request to profile: probe, data, space, study, proof, profile.

The command line, the daemon's jobs and `autotune.tune` call this module. It prints nothing; progress goes to an
`Observer`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution

from autotune.base.clock import timestamp
from autotune.base.errors import (
    AutotuneError,
    InfeasibleError,
    InterruptedSearch,
    MachineError,
    NoVerdictError,
    UsageError,
    WorkloadError,
)
from autotune.base.files import exclusive_lock, sweep_temporaries, write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.parsing import duration_text
from autotune.base.records import Config, Finding, Outcome, StudySpec, Trial, WorkloadRef
from autotune.launcher import STUDY_MARK, end_survivors
from autotune.machine.gpu import kept_open
from autotune.profile import Profile, read
from autotune.profile import write as write_profile
from autotune.report import best_so_far_line, headline_of
from autotune.samplers import AutoSampler, Experience, Proposal, cold_compiles
from autotune.samplers.sampler import distributions
from autotune.search.outcome import Conclusion, Course, conclude, outcome_of, profile_of, raise_if_nothing_compared
from autotune.search.proof import ProofContext
from autotune.search.proof.likely import with_likely, without_refuted
from autotune.search.proof.winner import MAY_BE_FASTER, Contest, Proof, prove
from autotune.search.request import check_request, require_linux, resolve_devices
from autotune.search.setup import (
    Environment,
    Setup,
    best_of,
    evicted,
    first_headline,
    run_of,
    set_up,
    winners_elsewhere,
)
from autotune.search.study_folders import (
    NEWEST,
    check_study_name,
    find_study,
    new_folder,
    require_utf8,
    resume_command,
    study_argument,
)
from autotune.search.subject import left_sentence
from autotune.space import Space, canonical, key
from autotune.space.formatting import count, describe, unmet_text
from autotune.stats import PRIORS
from autotune.study.budget import SEARCH_SHARE, VERDICT_LAUNCHES, refuse_reserved
from autotune.study.database import name_taken, open_shared, open_study, open_to_read
from autotune.study.history import History, adopt_folders, adopt_heats, read_launch, unknown_knobs
from autotune.study.loop import StudyLoop, note_failure
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
    """Make the folder of a new study, which holds only its request; return it, and the request with the study's name. A
    numbered one gets no name that is taken.

    `resume` starts the search, on this machine or on another one that sees the folder.

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
                    result = _Search(set_up(run), scorers, first, None if longer is None else before).result()
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
            if interrupted.so_far is None:
                # A failure to read must not hide that the search was interrupted.
                with contextlib.suppress(AutotuneError):
                    interrupted.so_far = best_so_far_line(read_trials(files), spec)
            raise
        except AutotuneError as error:
            note_failure(files, error)
            raise


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


class _Search:
    """One run of one study, from the legal space to the profile.

    Args:
        scorers: one for each objective; the first chooses the winner.
        first: configurations to try before others, in a new study.
        before: the outcome so far of a study that continues with a longer budget.
    """

    def __init__(
        self, setup: Setup, scorers: Sequence[Scorer], first: Sequence[Config], before: Outcome | None
    ) -> None:
        run, spec = setup.run, setup.run.spec
        if run.shared is None:
            stored = open_study(run.files, objectives=len(scorers))
        else:
            stored = open_shared(run.shared, spec, run.files)
        self._setup = setup = replace(setup, space=setup.space.without(unknown_knobs(run.files, stored)))
        self._run, self._space, self._scorer, self._before = run, setup.space, scorers[0], before
        self._history = history = History(run.files, setup.space, study=stored)
        history.bind(setup.fingerprint)
        adopt_folders(run.files, history, setup.space, setup.fingerprint)
        adopt_heats(run.files, history)
        if not history.has_plan:
            first = first or winners_elsewhere(run.files, spec, setup.space, run.env.observer.says)
            history.plan(first, setup.capacity_bytes)
        self._lengthen()
        self._launches = setup.run.launches(setup.conditions)
        if history.was_only_disturbed:
            run.budget.begin_again()
        self._rate_within = scorers[0].facts.rate_within
        self._study = StudyLoop(
            setup.space,
            history,
            self._launches,
            scorers[0],
            run.env.observer,
            further=scorers[1:],
            # Autotune's own sampler has one objective.
            sampler="tpe" if spec.sampler == "auto" and len(scorers) > 1 else spec.sampler,
            seed=spec.seed,
            trials=spec.trials,
            # Pruning compares rates, which decide no other objective.
            prune=len(scorers) == 1 and self._rate_within is not None,
            stop=run.env.stop,
            capacity_bytes=history.capacity_bytes,
            required=run.required,
            rate_within=self._rate_within or 0.0,
            first=history.planned,
            # All ranks would have to be switched at the same step.
            heats=setup.conditions.ranks == 1,
        )
        self._study.recover()
        # The database lacks the probes, which ran before it existed, and results whose rows a kill kept from being
        # written.
        self._launches.running.tables.rebuild()
        self._entered: Contest | None = None

    def _lengthen(self) -> None:
        """Let a study continue with the budget that it has now."""
        files, spec, before = self._run.files, self._run.spec, self._before
        begun_s = read_request(files).budget_s
        if begun_s != spec.budget_s:
            begun = files.request.stat()
            write_request(files, spec)
            # When the study began is told by it.
            os.utime(files.request, ns=(begun.st_atime_ns, begun.st_mtime_ns))
        if before is not None:
            if not _has_more_to_prove(before):
                self._history.reopen()
            if not files.checks.is_dir():
                # The weights with which its checks began are gone.
                for launch in files.launches.glob("check-*"):
                    shutil.rmtree(launch, ignore_errors=True)
            files.outcome.unlink(missing_ok=True)
        elif begun_s < spec.budget_s and self._run.required and not self._any_fits:
            # It ended with an error that advises to search longer.
            self._history.reopen()

    def result(self) -> SearchResult:
        """Search, prove the result, and write the profile and the outcome.

        Raises:
            MachineError: nothing but the baseline could be measured, because the machine was busy. The study can be
                resumed with its whole budget.
            NoVerdictError: the same, because there was no time. The study can be resumed with more.
            AutotuneError: see `autotune.base.errors`. Measurements made until then are in the study's folder.
        """
        setup, study, files, history = self._setup, self._study, self._run.files, self._history
        try:
            stopped = self._searched()
            contest = self._contest
            proof = without_refuted(contest, prove(contest, study.noise), history.trials, history.heats, study.noise)
            lost = key(proof.best.config) == key(self._space.baseline) and not proof.unproven
            if proof.baseline_unmet is not None and lost:
                raise self._nothing_fits(proof.dropped)
            conclusion = self._conclusion(proof)
            if conclusion.finding is Finding.OPEN:
                proof, evidence = with_likely(contest, proof, history.trials, history.heats, study.noise)
                if evidence is None:
                    conclusion = self._conclusion(proof)
                else:
                    conclusion = replace(conclusion, finding=Finding.LIKELY, evidence=evidence)
        except InterruptedSearch as interrupted:
            # What was proven before is kept, and a failure to write must not hide that the search was interrupted.
            if self._before is None or _has_more_to_prove(self._before):
                with contextlib.suppress(AutotuneError):
                    interrupted.so_far = self._left_in_hand()
            raise
        course = Course(study, contest, stopped)
        outcome = outcome_of(setup, proof, course, conclusion)
        profile = None
        if outcome.profile is not None:
            profile = profile_of(setup, outcome, course)
            write_profile(profile, files.profile)
        else:
            # The profile may have been left by an interrupted search (see `_left_in_hand`).
            files.profile.unlink(missing_ok=True)
            write_profile(profile_of(setup, outcome, course), files.usual)
        # The outcome marks the study as finished, so it is written last.
        write_atomic(files.outcome, outcome.model_dump_json(indent=1))
        self._run.budget.save()
        # A study that can continue needs the saved weights and the compiled code.
        for scratch in (files.checks, files.caches) if outcome.again is None else ():
            shutil.rmtree(scratch, ignore_errors=True)
        return SearchResult(files, outcome, profile)

    def _conclusion(self, proof: Proof) -> Conclusion:
        by_rate = self._rate_within is not None
        return conclude(self._space, self._history.trials, self._history.heats, proof, by_rate=by_rate)

    def _left_in_hand(self) -> str | None:
        """Write the profile of what is likely to be faster when a search is interrupted; return a sentence about it and
        its file, or ``None`` if nothing is likely."""
        history, study, path = self._history, self._study, self._run.files.profile
        if study.baseline is None:
            return None
        contest = self._contest
        first = contest.race.compared().standing(contest.race.baseline)
        nothing = Proof(first, first, first, finalists=(first,))
        stopped = "the search was interrupted"
        proof, evidence = with_likely(contest, nothing, history.trials, history.heats, study.noise, ended=stopped)
        if evidence is None:
            return None
        course = Course(study, contest, stopped)
        outcome = outcome_of(self._setup, proof, course, Conclusion(Finding.LIKELY, stopped, evidence=evidence))
        write_profile(profile_of(self._setup, outcome, course), path)
        return f"{headline_of(outcome)} Its profile: {path}"

    def _context(self, searched_s: float) -> ProofContext:
        run, setup, launches, history = self._run, self._setup, self._launches, self._history
        return ProofContext(
            self._space,
            launches,
            self._scorer,
            run.env.observer,
            run.env.stop,
            by_rate=self._rate_within is not None,
            rate_within=self._rate_within or 0.0,
            required=run.required,
            compiled_s=cold_compiles(history.trials, [h.heat for h in history.heats]),
            searched_s=searched_s,
            cores=max(1, setup.host.cores // setup.conditions.ranks),
            epochs=run.spec.epochs,
            deliveries=setup.probe.deliveries,
            # Workers elsewhere have page caches of their own.
            evict=lambda: run.away is None and evicted(launches.conditions.data, run.env.clock),
        )

    @property
    def _contest(self) -> Contest:
        """The contest of a search that has measured its baseline."""
        if self._entered is None:
            assert self._study.baseline is not None
            self._entered = Contest(self._context(0.0), self._study.baseline)
        return self._entered

    def _race(self, entered: Sequence[Trial], searched_s: float, newest: int | None = None) -> None:
        study, last = self._study, self._history.newest if newest is None else newest
        as_round = study.counts_as_round(entered, newest)
        self._contest.race_finalists(self._context(searched_s), entered, last, as_round=as_round)

    def _check_early(self, trial: Trial) -> list[Config]:
        return self._contest.check_early(trial)

    def _searched(self) -> str:
        """Search until something has won a contest, or no time is left; return why the search ended."""
        run, study, history = self._run, self._study, self._history
        if history.contests and study.baseline is not None:
            # The contest as an earlier run left it. Its launches have already been made, so this takes no time.
            trials = {trial.number: trial for trial in history.trials}
            for past in history.contests:
                self._race([trials[number] for number in past.trials], past.searched_s, past.newest)
            study.rule_out(self._contest.wrong, self._contest.loading_otherwise)
        while True:
            stopped = study.run(self._check_early if run.subject.words else None)
            run.env.observer.says(stopped)
            if study.baseline is None:
                history.reopen()
                raise self._no_baseline(stopped)
            try:
                raise_if_nothing_compared(
                    self._space, history.trials, history.heats, stopped, trials_asked=run.spec.trials
                )
            except MachineError:
                history.reopen()
                run.budget.begin_again()
                raise
            except NoVerdictError as error:
                history.reopen()
                error.advice = self._go_on_with(study.baseline.result.alone_s)
                raise
            if run.required and not self._any_fits:
                raise self._nothing_fits({})
            searched_s, contest = history.ended_at_s, self._contest
            entered = contest.choose(study.ranked, study.noise)
            self._race(entered, searched_s)
            if not contest.is_lost:
                return stopped
            study.rule_out(contest.wrong, contest.loading_otherwise)
            if not study.go_on(entered, searched_s):
                return stopped
            run.env.observer.says("no finalist was shown to be faster, so the search goes on")

    @property
    def _any_fits(self) -> bool:
        """Whether any launch of the search meets what is required."""
        measurements = [m for t in self._history.trials if (m := t.result.measurement) is not None]
        return any(self._run.required.met_by([m]) for m in measurements)

    def _nothing_fits(self, dropped: Mapping[int, str]) -> InfeasibleError:
        required = self._run.required
        measured = [(t, m) for t in self._history.trials if (m := t.result.measurement) is not None]
        trial, nearest = min(measured, key=lambda pair: required.excess([pair[1]]))
        title = f"trial {trial.number}, {describe(trial.config, self._space.baseline)}"
        reason = unmet_text(required, [nearest]) or dropped.get(trial.number, "it is out")
        if required.met_by([nearest]):
            return InfeasibleError(f"nothing that meets {required} is left", advice=f"{title}: {reason}.")
        return InfeasibleError(
            f"none of {count(len(measured), 'configuration')} that were measured meets {required}",
            advice=f"the nearest is {title}: {reason}. Search longer, require less, or widen the space with --set.",
        )

    def _no_baseline(self, stopped: str) -> AutotuneError:
        """Return the error for a search that ends before its baseline is measured."""
        results, message = [t.result for t in self._history.trials], f"{stopped} before the baseline was measured"
        disturbed = next((r for r in reversed(results) if r.transient and r.cause), None)
        if disturbed is not None:
            return MachineError(f"{message}: {disturbed.cause}", advice=disturbed.advice)
        _, probe = read_launch(self._run.files.launch("probe-1"))
        launch_s = max((result.alone_s for result in (probe, *results) if result is not None), default=0.0)
        return NoVerdictError(message, advice=self._go_on_with(launch_s))

    def _go_on_with(self, launch_s: float) -> str:
        """Return the advice to go on, for a verdict with launches of about this many seconds."""
        more_s = (VERDICT_LAUNCHES + 1) * launch_s - self._run.budget.left_s
        return f"go on with: {resume_command(study_argument(self._run.files), more_s)}"


def _has_more_to_prove(outcome: Outcome) -> bool:
    """Return whether something may be faster but is not proven to be."""
    others = [s for s in outcome.finalists if s.trial != outcome.baseline.trial and s.trial not in outcome.dropped]
    is_open = any(s.speedup_ci95[1] > MAY_BE_FASTER for s in others) or any(c.differs for c in outcome.checks)
    return outcome.found is Finding.LIKELY or (outcome.found is Finding.OPEN and is_open)


# What a search would do, without measuring anything.

#: Assumed time for start-up, first batch and warm-up of a small training, which a probe does not measure.
START_S = 3.0
#: The size of a space with more configurations than this is estimated, not counted.
COUNT_UP_TO = 20_000
_DRAWS = 20_000
#: Number of trials that are predicted.
_PREDICTED = 8


@dataclass(frozen=True)
class DryRun:
    """The expected course of a search.

    Attributes:
        size: number of legal configurations.
        exact: the size is counted, not estimated.
        first: the trials after the baseline, if every trial gives the expected result; empty for a random sampler.
        trial_s: approximate duration of a trial without compilation, in seconds.
        search_s: maximum duration of the search, without the proof, in seconds.
    """

    space: Space
    size: int
    exact: bool
    first: tuple[Proposal, ...]
    trial_s: float
    search_s: float


def make_space(spec: StudySpec, env: Environment, folder: Path) -> Space:
    """Return the legal space of a request on this machine. Runs one probe in a temporary folder; makes no study."""
    return _probed_setup(spec, env, folder).space


def preview(spec: StudySpec, env: Environment, folder: Path) -> DryRun:
    """Return the expected course of a search. Runs one probe in a temporary folder; makes no study.

    Raises:
        UsageError: also for a name that `search` would refuse.
    """
    check_study_name(spec.name)
    setup = _probed_setup(spec, env, folder)
    size, exact = size_of(setup.space)
    launches = setup.run.launches(setup.conditions)
    trial_s = START_S + launches.plan.max_measure_s / 2
    first = _first_trials(setup, launches.limits.compile_s, trial_s) if spec.sampler == "auto" else ()
    return DryRun(setup.space, size, exact, first, trial_s, SEARCH_SHARE * spec.budget_s)


def _probed_setup(spec: StudySpec, env: Environment, folder: Path) -> Setup:
    with run_of(
        StudyFiles(folder), spec.model_copy(update={"storage": None, "workers": None}), check_request(spec), env
    ) as run:
        return set_up(run, measuring=False)


def size_of(space: Space) -> tuple[int, bool]:
    """Return the number of legal configurations, and whether it was counted.

    The size of a large space is estimated from the legal share of randomly drawn combinations.
    """
    counted = sum(1 for _ in islice(space.grid(), COUNT_UP_TO + 1))
    if counted <= COUNT_UP_TO:
        return counted, True
    choices = {name: space.rungs(name) for name in space.choices}
    whole = prod(len(values) for values in choices.values())
    rng = random.Random(0)
    weight = 0.0
    for _ in range(_DRAWS):
        combination = {n: rng.choice(values) for n, values in choices.items()}
        config = canonical(combination)
        if space.combination_refusal(config) is None:
            # A configuration with inactive knobs is drawn once for each of their values.
            weight += 1 / prod(len(choices[n]) for n in combination if n not in config)
    return round(whole * weight / _DRAWS), False


def _first_trials(setup: Setup, compile_limit_s: float, trial_s: float) -> tuple[Proposal, ...]:
    """Ask the sampler for trials, and report to it for each the result that it expected."""
    space, spec = setup.space, setup.run.spec
    search_s = SEARCH_SHARE * spec.budget_s
    sampler = AutoSampler(
        space,
        seed=spec.seed,
        left_s=lambda: search_s,
        limit_s=search_s,
        capacity_bytes=setup.capacity_bytes,
        noise_sd=lambda: PRIORS[setup.probe.device.partition(":")[0]].sd,
        experience=Experience(
            trial_s,
            compile_limit_s=compile_limit_s,
            must_compile=space.must_compile,
            sample_bytes=space.sample_bytes,
        ),
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    all_distributions: dict[str, BaseDistribution] = dict(distributions(space))

    def tell(config: Config, rate: float) -> None:
        chosen = {n: all_distributions[n] for n in config}
        study.add_trial(optuna.trial.create_trial(params=dict(config), distributions=chosen, value=rate))

    # Only ratios of rates matter.
    tell(space.baseline, 1.0)
    proposals: list[Proposal] = []
    while len(proposals) < min(_PREDICTED, spec.trials - 1 if spec.trials else _PREDICTED):
        proposal = sampler.look(study).proposal
        if proposal is None:
            break
        proposals.append(proposal)
        tell(proposal.config, proposal.predicted.rate_per_s)
    return tuple(proposals)
