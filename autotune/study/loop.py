"""The loop of a study."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

from autotune import stats
from autotune.base.errors import AutotuneError, InterruptedSearch, MachineError, UnscoredError, WorkloadError
from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import (
    ATTEMPTS,
    Config,
    Failure,
    Heat,
    LaunchKind,
    Measurement,
    Phase,
    Side,
    StudyHeat,
    Trial,
    TrialResult,
    TrialStatus,
    heat_title,
)
from autotune.knobs.compile_mode import closed_because, phase_clause
from autotune.samplers import AutoSampler, Experience, LegalSampler, Searcher, make_sampler
from autotune.space import AT_ONCE, Space, key, loads_as
from autotune.space.formatting import phrase
from autotune.space.requirements import ANYTHING, Requirements
from autotune.study.agenda import MATHS_PAYS, PROMISING, Agenda, CompleteTrials, waits_for_the_disk
from autotune.study.budget import SEARCH_SHARE, lack
from autotune.study.history import History, dealt
from autotune.study.launches import Launches, Launching, once
from autotune.workload.scoring import Scorer


def rate_to_beat(
    space: Space, complete: Sequence[Trial], config: Config, noise: stats.LaunchNoise
) -> tuple[float, float | None]:
    """Return the rate in samples/s below which a trial can be stopped early (0 if none is known) and the card's clock
    at which that rate was observed, if known.

    Two launches of equal configurations differ by less than ``2 √2 sd`` in 19 of 20 cases (the difference of two
    independent launches has √2 times the standard deviation of one), so a trial that is slower than the best by more
    than that is really slower. Configurations with the user's own batch size are reported separately, so they are
    compared with the best of their own kind. The baseline is never stopped: every comparison needs it, also if it is
    measured late.
    """
    if key(config) == key(space.baseline):
        return 0.0, None
    same_training = space.same_training(config)
    rivals = [t for t in complete if not same_training or space.same_training(t.config)]
    fastest = max(rivals, key=lambda t: t.rate_per_s or 0.0, default=None)
    if fastest is None:
        return 0.0, None
    margin = 2 * 2**0.5 * noise.sd
    measurement = fastest.result.measurement
    return (fastest.rate_per_s or 0.0) * max(0.0, 1 - margin), measurement.sm_clock_mhz if measurement else None


# The search loop: ask for a configuration, launch it, record the trial, update the sampler.
#
# With several devices, the most valuable launch is begun on each device as it becomes free, and recorded as it ends.

#: Launches are in turns if, with what comes between them, they take at most this many times as long as by themselves,
#: and if none but the last waits for its loader for more than this fraction of the time.
_TURNS, _WAITS = 5.0, 0.1
#: In the last comparison, the least number of steps of each configuration: the first step, and three turns. And how
#: much slower one may have been that is compared although nothing was faster.
_LAST_STEPS, _REACH = 4, 0.1
#: No rate is too low.
_ANY = 0.0, None


class StudyLoop:
    """One search, started from its first trial or continued from an earlier run.

    Args:
        further: scorers of further objectives, which Optuna's samplers also consider.
        stop: returns the number of the signal that asks the search to end, or ``None``.
        trials: end after this number of finished trials; ``None`` for no limit except the budget.
        prune: the search is for the rate itself, so slow trials can be stopped early.
        capacity_bytes: device memory that a training may use; ``None`` if unknown.
        rate_within: the objective chooses among those whose rate is within this fraction of the fastest one's.
        required: what the winner must meet. Others are tried less often, and none of them is the best.
        first: configurations to try before the sampler's proposals, such as winners on other machines.
        heats: compare configurations in heats where the sampler asks for it.
    """

    def __init__(
        self,
        space: Space,
        history: History,
        launches: Launches,
        scorer: Scorer,
        observer: Observer,
        *,
        further: Sequence[Scorer] = (),
        sampler: str,
        seed: int,
        trials: int | None,
        prune: bool,
        stop: Callable[[], int | None],
        capacity_bytes: int | None = None,
        required: Requirements = ANYTHING,
        rate_within: float = 0.0,
        first: Sequence[Config] = (),
        heats: bool = False,
    ) -> None:
        self.space = space
        self.history = history
        self._launches = launches
        self._observer = observer
        self._prune = prune
        self._required = required
        self._experience = Experience(
            compile_limit_s=launches.limits.compile_s,
            must_compile=space.must_compile,
            sample_bytes=space.sample_bytes,
        )
        on_cpu = launches.conditions.device == "cpu"
        self._complete = CompleteTrials(space.baseline, required, stats.PRIORS["cpu" if on_cpu else "cuda"])
        self._scorer, self._further = scorer, further
        #: Whether more than the rate decides.
        self._chooses = bool(required) or rate_within > 0
        self._running = launches.running
        self._agenda = Agenda(
            space,
            history,
            self._complete,
            self._experience,
            launches.budget,
            first=[dict(space.baseline), *(space.completed(config) for config in first)],
            trials=trials,
            adopts=self._adopts and not launches.follow,
            follow=lambda: launches.follow,
        )
        #: Least seconds of a turn in the sampler's heats, by side.
        self._turn_s = dict(launches.turn_s)
        for trial in history.trials:
            self._learn(trial)
        for heat in history.heats:
            self._experience.learn_heat(heat)
        self._experience.costs.follows = self._follows
        self._stop = stop
        #: Number of running heats.
        self._heats = 0
        self._was_last = False
        self._said_alone = False
        #: Checks how a trial trains; returns what trains wrongly. And the changes of maths that have been checked.
        self._check: Callable[[Trial], Sequence[Config]] | None = None
        self._checked: set[str] = set()
        self._sampler: Searcher
        if sampler == "auto":
            self._sampler = AutoSampler(
                space,
                seed=seed,
                acceptable=self._agenda.acceptable,
                left_s=lambda: self._agenda.left_s,
                limit_s=SEARCH_SHARE * launches.budget.limit_s,
                capacity_bytes=capacity_bytes,
                noise_sd=lambda: self.noise.sd,
                splits=prune,
                experience=self._experience,
                excess=(lambda measurement: required.excess([measurement])) if required else None,
                judge=(lambda measurement: scorer.known(measurement) or 0.0) if rate_within else None,
                within=rate_within,
                # Heats show rates, which decide no other objective.
                turn_s=self._turn_s if heats and prune else None,
                enters=self._agenda.has_time_for,
                as_launched=self._follows,
            )
        else:
            # The seed depends on the number of trials so far, so that a resumed search does not repeat its proposals.
            # NumPy's generators, which Optuna uses, take 32 bits.
            mixed = (seed * 1_000_003 + len(history.optuna.get_trials(deepcopy=False))) % 2**32
            self._sampler = LegalSampler(make_sampler(sampler, mixed), space, self._agenda.offered, seed=mixed)
        history.optuna.sampler = self._sampler

    @property
    def baseline(self) -> Trial | None:
        """The baseline's complete trial: trial 0, or the one that repeated it."""
        return self._complete.baseline

    @property
    def complete(self) -> list[Trial]:
        return list(self._complete.ordered)

    @property
    def ranked(self) -> list[Trial]:
        """Complete trials, most promising first: by the sampler's estimate if there is one, else by score."""
        order = {number: i for i, number in enumerate(self._sampler.ranking(self.history.optuna))}
        return sorted(self.complete, key=lambda t: order.get(t.number, len(order)))

    @property
    def noise(self) -> stats.LaunchNoise:
        return self._complete.noise

    def recover(self) -> None:
        """Record the trials that an earlier run left running."""
        for trial in self.history.trials:
            self._observer.trial_ends(trial)
        for heat in self.history.heats:
            self._observer.heat_ends(heat)
        for trial in self.history.recover():
            self._record(trial)

    def run(self, check: Callable[[Trial], Sequence[Config]] | None = None) -> str:
        """Search until there is a reason to end; return the reason, one sentence.

        The reason is stored because a study resumed after the proof would find another one: the proof also takes time.

        Args:
            check: checks how a trial trains, and returns the configurations that are shown to train wrongly.

        Raises:
            WorkloadError: the baseline failed.
            MachineError: the baseline cannot be measured because other processes keep the machine busy.
            InterruptedSearch: a signal arrived; everything finished is on disk.
        """
        self._check_baseline()
        self._check = check
        earlier_reason = self.history.ended
        if earlier_reason is not None:
            return earlier_reason
        try:
            reason = self._search()
        except BaseException:
            self._running.abandon()
            raise
        self.history.end(reason, self._launches.budget.spent_s)
        return reason

    def _search(self) -> str:
        while True:
            self._check_leader()
            # Something that ends may change why nothing more is begun.
            reason = None
            while reason is None and self._room:
                reason = self._begin()
            if reason is not None and not self._running.number:
                return reason
            self._running.end()
            signal_number = self._stop()
            if signal_number is not None:
                # Everything running is to be on disk.
                while self._running.number:
                    self._running.end()
                raise InterruptedSearch(signal_number)
            self._check_baseline()

    def _check_leader(self) -> None:
        """Check how the best so far trains if it computes something else than the baseline and is much faster: if it is
        wrong, others that compute like it would be tried in vain. The proof needs this check as well."""
        best, baseline = self._complete.best, self.baseline
        if self._check is None or best is None or baseline is None or self._running.number or self._launches.follow:
            return
        changed = self.space.changed_maths(best.config)
        pays = (best.rate_per_s or 0.0) >= MATHS_PAYS * (baseline.rate_per_s or math.inf)
        if changed and pays and key(changed) not in self._checked:
            self._checked.add(key(changed))
            began_s = self._launches.budget.spent_s
            self.rule_out(self._check(best))
            self._agenda.checked_s += self._launches.budget.spent_s - began_s

    def _begin(self) -> str | None:
        """Begin what is most valuable now, or return why nothing is begun."""
        reason = self._reason_to_end()
        # Winners of other studies are tried after the first heat, which reveals more in the same time.
        if reason is None and not self.history.heats and not self.history.waiting and self._begin_heat():
            return None
        fits = partial(self._sampler.fits, self.history.optuna)
        if reason is None and not self.history.waiting and not self._agenda.enqueue(fits):
            if self._begin_heat():
                return None
            reason = self._sampler.reason_to_end(self.history.optuna)
        if reason is not None and not self._agenda.enqueue_owed():
            return None if self._begin_last_heat() else reason
        self._begin_trial()
        return None

    @property
    def _room(self) -> int:
        """Number of devices on which something may begin.

        The baseline's trial runs alone, because all others are compared with it; so do trials that wait for files.
        """
        running = self._running
        return running.free if running.devices > 1 and self._may_share() else int(not running.number)

    def _may_share(self) -> bool:
        """Return whether trials may run side by side."""
        if self.baseline is None:
            return False
        must_run_alone = any(waits_for_the_disk(trial) for trial in self._complete.ends)
        if must_run_alone and not self._said_alone:
            self._said_alone = True
            self._observer.says("the training waits for files that may come from a disk, so trials run one at a time")
        return not must_run_alone

    def _begin_heat(self) -> bool:
        """Compare configurations in a heat if the sampler asks for one; return whether one has begun.

        Its entrants are dealt out to the free devices. There is one such heat at a time.
        """
        proposal = self._sampler.heat(self.history.optuna) if self.baseline is not None and not self._heats else None
        if proposal is None:
            return False
        first = max((heat.number for heat in self.history.heats), default=0) + 1
        after = len(self.history.trials)
        for number, entrants in enumerate(dealt(proposal.entrants, self._room), first):
            launching = self._launches.heat_launches(
                f"heat-{number}",
                entrants,
                side=proposal.side,
                # In a short budget, a heat is the cheapest evidence available.
                least_per_s=0.0 if self._agenda.is_short else proposal.least_per_s,
                follows=self._follows(entrants[0]),
                expected_s=proposal.seconds,
                limit_s=self._agenda.left_s,
            )
            self._run_heat(number, after, proposal.side, launching)
        return True

    def _run_heat(self, number: int, after: int, side: Side, launching: Launching[tuple[Heat, float]]) -> None:
        self._heats += 1
        self._running.begin(heat_title(number, side), launching, partial(self._heat_ended, number, after))

    def _begin_last_heat(self) -> bool:
        """If there is no time for launches of both, compare the best so far with the baseline in turns within the
        script that is already training; if that hardly gains anything, all that may be as fast, which can show that
        none is faster. Return whether that has begun."""
        baseline = self.baseline
        left_s = self._launches.budget.left_s
        if baseline is None or self._was_last or self._launches.even_steps is None or self._agenda.fits_proof:
            return False
        own_per_s = baseline.rate_per_s or math.inf
        # A configuration that was tried again counts once, as its best.
        own = key(self.space.baseline)
        distinct = {key(t.config): t for t in reversed(self._complete.ordered)}
        others = [t for t in self._complete.ordered if distinct[key(t.config)] is t and key(t.config) != own]
        others = [t for t in others if self._follows(t.config)]
        if others and (others[0].rate_per_s or 0.0) < own_per_s * (1 + PROMISING):
            others = [t for t in others if (t.rate_per_s or 0.0) > own_per_s * (1 - _REACH)]
        else:
            others = others[:1]
        step_s = {t.number: int(t.config["batch_size"]) / (t.rate_per_s or math.inf) for t in (baseline, *others)}
        while others and _LAST_STEPS * sum(step_s[t.number] for t in (baseline, *others)) > left_s:
            others.pop()
        if not others:
            return False
        self._was_last = True
        number = max((heat.number for heat in self.history.heats), default=0) + 1
        entrants = (self.space.baseline, *(t.config for t in others))
        launching = self._launches.heat_launches(
            f"heat-{number}", entrants, limit_s=left_s, follows=True, all_rounds=True
        )
        self._run_heat(number, len(self.history.trials), "device", launching)
        return True

    def _heat_ended(self, number: int, after: int, shown: tuple[Heat, float]) -> None:
        self._heats -= 1
        if self._stop() is not None:
            return  # a resume runs it again
        heat, wall_s = shown
        knew_already, refused = self._experience.lessons.cannot_compile, set(self._experience.lessons.refused)
        stored = self.history.record_heat(StudyHeat(number=number, after=after, heat=heat, wall_s=wall_s))
        self._experience.learn_heat(stored)
        self._observer.heat_ends(stored)
        self._agenda.enqueue_leader(stored.heat)
        if self._agenda.is_short and self._agenda.keeps_loader:
            self._turn_s.pop("loader", None)
        uncompilable = next((e for e in stored.heat.entrants if e.cannot_compile), None)
        if uncompilable is not None and not knew_already:
            self._observer.says(closed_because(uncompilable))
        for name, value, _ in self._experience.lessons.refused - refused:
            entrant = next(e for e in stored.heat.entrants if e.refuses == name and e.config[name] == value)
            self._observer.says(_no_more_because(name, entrant.config, entrant.cause))

    def _begin_trial(self) -> None:
        number, config, repeats = self.history.ask()
        # Pruning compares rates, which do not decide another objective.
        rivals = self._complete.fitting
        # If the search's own launches are to count as a round of the proof, none is cut short.
        whole = (self._adopts or self._launches.follow) and self._agenda.is_short
        below_per_s, clock_mhz = (
            rate_to_beat(self.space, rivals, config, self.noise) if self._prune and not whole else _ANY
        )
        pruning = {"prune_below_per_s": below_per_s, "prune_clock_mhz": clock_mhz, "per_batch": self._per_batch(config)}
        spec = self._launches.spec(
            LaunchKind.MEASURE,
            self._launches.files.trial(number),
            config,
            self._agenda.limit_s(config),
            number=number,
            repeats=repeats,
            plan=self._launches.plan.model_copy(update=pruning),
            follows=self._follows(config),
        )

        def ended(result: TrialResult) -> None:
            self._record(Trial(number=number, config=config, result=result, repeats=repeats))

        self._running.begin(f"trial {number}", once(spec), ended)

    def _per_batch(self, config: Config) -> tuple[float, float] | None:
        """Return the baseline's backward passes and updates per batch, as far as a configuration must match them."""
        measurement = None if self.baseline is None else self.baseline.result.measurement
        per_batch = None if measurement is None else measurement.per_batch
        if per_batch is None or all(config.get(name) == self.space.baseline.get(name) for name in AT_ONCE):
            return per_batch
        # A script may then form a larger step from several batches, or from fewer.
        return per_batch[0], 0.0

    def _record(self, trial: Trial) -> None:
        measurement = trial.result.measurement
        if trial.result.status is TrialStatus.COMPLETE and measurement is not None:
            trial = self._scored(trial, measurement)
        stored = self.history.record(trial, 0.0 if measurement is None else self._required.excess([measurement]))
        lessons, first = self._experience.lessons, self.baseline is None
        closes = trial.result.cannot_compile and not lessons.cannot_compile
        refused = trial.result.refuses
        refusals = {(name, value) for name, value, _ in lessons.refused}
        is_new = refused is not None and (refused, trial.config[refused]) not in refusals
        self._learn(stored)
        self._observer.trial_ends(stored)
        if first and self.baseline is not None and measurement is not None:
            check_s = measurement.startup_s if self._launches.conditions.command is not None else 0.0
            budget = self._launches.budget
            shortage = lack(budget.limit_s, budget.spent_s, trial.result.alone_s, check_s)
            if shortage is not None:
                self._observer.says(shortage)
        if closes:
            self._observer.says(closed_because(trial.result))
        if refused is not None and is_new:
            self._observer.says(_no_more_because(refused, trial.config, trial.result.cause))

    def _scored(self, trial: Trial, measurement: Measurement) -> Trial:
        """Return a trial with its scores; without if its launch lacks a figure that an objective needs, as when a
        counter once did not answer.

        Raises:
            UnscoredError: it is the baseline.
        """
        try:
            score = measurement.samples_per_s if self._prune else self._scorer.score(measurement)
            further = tuple(other.score(measurement) for other in self._further)
        except UnscoredError as error:
            if key(trial.config) == key(self.space.baseline):
                raise
            self._observer.says(f"trial {trial.number} has no score: {error}")
            return trial
        return trial.model_copy(update={"score": score, "further": further})

    def _learn(self, trial: Trial) -> None:
        # A trial killed while the sampler was suggesting has no configuration.
        if not trial.config:
            return
        self._experience.learn(trial)
        self._complete.enter(trial)
        if "device" in self._turn_s and self.baseline is not None and self.baseline.result.measurement is not None:
            self._even_out(self.baseline.result.measurement)
        self._agenda.look_for_owed()

    def _even_out(self, baseline: Measurement) -> None:
        """Make turns in heats long enough that each has its share of rollouts, evaluations and the like."""
        if baseline.even_steps is None:
            del self._turn_s["device"]
            self._launches.even_steps = None
            self._observer.says("its steps take such different times that no turns were fair, so there are no heats")
            return
        if baseline.even_steps > 1:
            self._launches.even_steps = baseline.even_steps
            self._turn_s["device"] = max(self._turn_s["device"], baseline.even_steps * baseline.mean_step_s)

    @property
    def _adopts(self) -> bool:
        """Whether the search's own launches may count as a round of the proof: those of scripts, which take longest, if
        they run one at a time and are compared by their rates alone."""
        one_at_a_time = self._launches.conditions.command is not None and self._running.devices == 1
        return one_at_a_time and self._prune and not self._chooses

    def _follows(self, config: Config) -> bool:
        """Return whether a configuration can be measured in a script that is already training and can be switched to
        it."""
        baseline = self.space.baseline
        return (
            self._launches.follow
            and self._prune
            and not self._chooses
            and loads_as(config, baseline)
            and self.space.why_apart(baseline, config) is None
        )

    def counts_as_round(self, entered: Sequence[Trial], newest: int | None = None) -> bool:
        """Return whether the search's launches of the baseline and of the trials that are to race are as good as a
        round of the race: there are no others, so none was selected by them; they came one after the other; and no
        later one found files in the page cache that an earlier one had read.

        Args:
            newest: number of the last trial that counts; ``None`` if all do.
        """
        baseline = self.baseline
        if baseline is None or not self._adopts or not entered:
            return False
        earlier = {t.number: t for t in self.history.trials if newest is None or t.number <= newest}
        others = {t.number for t in self.complete if t.number in earlier} - {baseline.number}
        # A pruned trial may only have been less lucky.
        pruned = any(t.result.status is TrialStatus.PRUNED for t in earlier.values())
        if pruned or others != {trial.number for trial in entered}:
            return False
        trials = [baseline, *entered]
        if any(t.result.within is not None for t in trials):
            return False
        spans = [(began, began + t.result.wall_s) for t in trials if (began := t.result.began_s) is not None]
        measurements = [m for t in trials if (m := t.result.measurement) is not None]
        if len(spans) < len(trials) or len(measurements) < len(trials):
            return False
        # Had its files been in the page cache, one that hardly waits would have been hardly faster. What the last one
        # waits for does not matter.
        last = spans.index(max(spans))
        if any((m.loader_wait_fraction or 0.0) > _WAITS for m in (*measurements[:last], *measurements[last + 1 :])):
            return False
        took_s = max(ended for _, ended in spans) - min(began for began, _ in spans)
        alone_s = sum(t.result.wall_s for t in trials)
        # These times are by the machine's clock, which restarts with the machine.
        return alone_s / 2 <= took_s <= _TURNS * alone_s

    def rule_out(self, wrong: Sequence[Config], loading_otherwise: Sequence[Config] = ()) -> None:
        """Rule out all configurations that compute like those that do not train like eager fp32, and all that load like
        those whose loader delivers other samples than the baseline's."""
        lessons = self._experience.lessons
        for config in wrong:
            lessons.learn_wrong(config, self.space.changed_maths(config))
        for config in loading_otherwise:
            lessons.learn_other_data(config, self.space.baseline)
        self._complete.leave_out(lessons.is_wrong)
        self._agenda.look_for_owed()

    def go_on(self, entered: Sequence[Trial], searched_s: float) -> bool:
        """Let the search go on after a contest that no trial has won (see `Agenda`); return whether it does."""
        return self._agenda.go_on(entered, searched_s)

    def _check_baseline(self) -> None:
        """Raise if the baseline failed: it is what the user runs today, and without it no search can help."""
        baseline = self.space.baseline
        if self.baseline is not None or key(baseline) not in self.history.tried:
            return
        results = [t.result for t in reversed(self.history.trials) if key(t.config) == key(baseline)]
        # The last that ended by itself, as opposed to being killed or interrupted.
        result = next(r for r in results if r.status is not TrialStatus.INTERRUPTED or r.transient)
        if result.status is TrialStatus.INTERRUPTED:
            raise MachineError(
                f"the machine is too busy to measure: {result.cause}",
                advice=f"{result.advice or ''} `autotune resume` launches the baseline again.".strip(),
            )
        again = f", {ATTEMPTS} times in a row" if result.transient else ""
        where = phase_clause(result.phase or Phase.LOAD, baseline)
        raise WorkloadError(
            f"the baseline ended as {result.status} in {where}{again}: {result.cause}",
            advice=result.advice,
            detail=result.evidence,
        )

    def _reason_to_end(self) -> str | None:
        if self._agenda.has_all_trials:
            tried = len(self.history.tried)
            return f"{tried} trials were asked for" if tried > 1 else "one trial was asked for"
        if self.baseline is None:
            is_spent = self._launches.budget.left_s <= 0
            return "the budget is spent" if is_spent else None
        if self._experience.costs.expected_s(self.space.baseline) > self._agenda.left_s:
            if self._agenda.is_whole or self._agenda.is_over:
                proof = "what is left of the budget is for the proof"
                return proof if len(self.complete) > 1 else "no other launch fits into what is left of the budget"
            share = f"{100 * self._agenda.share:.0f} %"
            return f"no more trials fit into the {share} of the budget that searching may take"
        return None


def _no_more_because(name: str, config: Config, cause: str | None) -> str:
    """Return a sentence saying that a value is no longer tried in this search, after a launch in which it was
    refused."""
    return f"{phrase(name, config[name])} is tried no more in this search: {cause}."


# ``failure.json``: the error that ended a search without an outcome, kept until the study is resumed.


def note_failure(files: StudyFiles, error: AutotuneError) -> None:
    """Write the error to the study's folder. On a full disk, nothing is written: the error itself is enough."""
    failure = Failure(message=str(error), advice=error.advice, exit_code=error.exit_code)
    with contextlib.suppress(MachineError):
        write_atomic(files.failure, failure.model_dump_json(indent=1))


def read_failure(files: StudyFiles) -> Failure | None:
    """Return the error that ended the last run; ``None`` if there is none, or the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return Failure.model_validate_json(files.failure.read_text())
    return None
