"""The search loop: ask for a configuration, launch it, record the trial, update the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune import stats
from autotune.errors import InterruptedSearch
from autotune.knobs.compile_mode import closed_because
from autotune.observer import Observer
from autotune.records import Config, StudyHeat, Trial, TrialStatus, heat_title
from autotune.samplers import AutoSampler, Experience, LegalSampler, Searcher, make_sampler
from autotune.scoring import Scorer
from autotune.space import Space, canonical, key
from autotune.study.baseline import baseline_failed, is_verdict
from autotune.study.budget import ALONE_SHARE, SEARCH_SHARE
from autotune.study.history import History
from autotune.study.launches import Launches
from autotune.study.own_batch import Debt, owed
from autotune.study.pruning import rate_to_beat
from autotune.study.search_time import SearchTime
from autotune.study.starving import waits_as_long

#: A trial that takes this many times the expected duration is stopped.
PATIENCE = 3.0
#: No rate is too low.
_ANY = 0.0, None
#: Every trial gets at least this time, however little is left for searching.
_LEAST_TRIAL_S = 20.0


class Study:
    """One search, started from its first trial or continued from an earlier run.

    Args:
        stop: returns the number of the signal that asks the search to end, or ``None``.
        trials: end after this number of finished trials; ``None`` for no limit except the budget.
        prune: the objective is the rate itself, so slow trials can be stopped early.
        capacity_bytes: device memory that a training may use; ``None`` if unknown.
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
        sampler: str,
        seed: int,
        trials: int | None,
        prune: bool,
        stop: Callable[[], int | None],
        capacity_bytes: int | None = None,
        first: Sequence[Config] = (),
        heats: bool = False,
    ) -> None:
        self.space = space
        self.history = history
        self._launches = launches
        self._scorer = scorer
        self._observer = observer
        self._limit = trials
        self._prune = prune
        self._first = [dict(space.baseline), *(space.completed(config) for config in first)]
        self._experience = Experience(compile_limit_s=launches.limits.compile_s, must_compile=space.must_compile)
        self._baseline: Trial | None = None
        self._complete: list[Trial] = []
        #: Rates of each configuration's complete trials.
        self._launched: dict[str, list[stats.Rate]] = {}
        #: The best configuration with the user's own batch size, if it is still to be tried.
        self._debt: Debt | None = None
        for trial in history.trials:
            self._learn(trial)
        for heat in history.heats:
            self._experience.learn_heat(heat)
        self._stop = stop
        self._time = SearchTime(launches.budget, history, self._ends)
        self._sampler: Searcher
        if sampler == "auto":
            self._sampler = AutoSampler(
                space,
                seed=seed,
                acceptable=self._acceptable,
                left_s=lambda: self._time.left_s,
                limit_s=SEARCH_SHARE * launches.budget.limit_s,
                capacity_bytes=capacity_bytes,
                noise_sd=lambda: self.noise.sd,
                splits=prune,
                experience=self._experience,
                # Heats tell rates, which decide no other objective.
                turn_s=launches.turn_s if heats and prune else None,
            )
        else:
            # The seed depends on the number of trials so far, so that a resumed search does not repeat its proposals.
            # NumPy's generators, which Optuna uses, take 32 bits.
            mixed = (seed * 1_000_003 + len(history.optuna.get_trials(deepcopy=False))) % 2**32
            self._sampler = LegalSampler(make_sampler(sampler, mixed), space, self._offered, seed=mixed)
        history.optuna.sampler = self._sampler

    @property
    def baseline(self) -> Trial | None:
        """The baseline's complete trial: trial 0, or the one that repeated it."""
        return self._baseline

    @property
    def complete(self) -> list[Trial]:
        """Trials with a score, best first."""
        return list(self._complete)

    @property
    def ranked(self) -> list[Trial]:
        """Complete trials, most promising first: by the sampler's estimate if it has one, else by score."""
        order = {number: i for i, number in enumerate(self._sampler.ranking(self.history.optuna))}
        return sorted(self.complete, key=lambda t: order.get(t.number, len(order)))

    @property
    def noise(self) -> stats.LaunchNoise:
        """Variation between launches of equal configurations, from repeated launches, or else the usual value."""
        on_cpu = self._launches.conditions.device == "cpu"
        repeated = [rates for rates in self._launched.values() if len(rates) > 1]
        return stats.launch_noise(repeated, prior=stats.PRIORS["cpu" if on_cpu else "cuda"])

    def recover(self) -> None:
        """Record the trials that an earlier run left running."""
        for trial in self.history.trials:
            self._observer.trial_ends(trial)
        for heat in self.history.heats:
            self._observer.heat_ends(heat)
        for trial in self.history.recover():
            self._record(trial)

    def run(self) -> str:
        """Search until there is a reason to end; return the reason, one sentence.

        The reason is stored, because after the proof a resumed study would find another one: the proof uses time, too.

        Raises:
            WorkloadError: the baseline failed.
            MachineError: the baseline cannot be measured, because others keep the machine busy.
            InterruptedSearch: a signal came; everything finished is on disk.
        """
        self._check_baseline()
        ended = self.history.ended
        if ended is not None:
            return ended
        while True:
            reason = self._reason_to_end()
            if reason is None and not self.history.waiting and not self._queue():
                if self._one_heat():
                    continue
                reason = self._sampler.reason_to_end(self.history.optuna)
            if reason is not None and not self._queue_owed():
                self.history.end(reason, self._launches.budget.spent_s)
                return reason
            self._one_trial()
            self._check_baseline()

    def _queue(self) -> bool:
        """Enqueue what precedes the sampler's proposals: trials to repeat, the baseline, the given configurations."""
        for trial in self.history.unfinished:
            if self._may_try(trial.config):
                self.history.enqueue(trial.config, repeats=trial.number)
                return True
        for config in self._first:
            given = key(config) != key(self.space.baseline)
            if given and (waits_as_long(config, self.baseline) or not self._sampler.fits(self.history.optuna, config)):
                continue
            if self._may_try(config):
                self.history.enqueue(config)
                return True
        # The last of a given number of trials.
        return self._limit is not None and len(self.history.tried) == self._limit - 1 and self._queue_owed()

    def _queue_owed(self) -> bool:
        """Enqueue the best configuration with the user's own batch size, if it has not been tried.

        It may take time from the proof, which would have nothing but the baseline to compare at that batch size.
        """
        budget = self._launches.budget
        over = self._limit is not None and len(self.history.tried) >= self._limit
        if self._debt is None or over or self._debt.expected_s > ALONE_SHARE * budget.limit_s - budget.spent_s:
            return False
        self.history.enqueue(self._debt.config)
        return True

    def _may_try(self, config: Config) -> bool:
        # The baseline is always tried, regardless of --set and the budget: every comparison needs it.
        is_baseline = key(config) == key(self.space.baseline)
        return key(config) not in self.history.tried if is_baseline else self._acceptable(config)

    def _one_heat(self) -> bool:
        """Compare configurations in a heat if the sampler asks for it; return whether there was one.

        Raises:
            InterruptedSearch: a signal came; the heat is run again on a resume.
        """
        asked = self._sampler.heat(self.history.optuna) if self.baseline is not None else None
        if asked is None:
            return False
        number = max((heat.number for heat in self.history.heats), default=0) + 1
        after = len(self.history.trials)
        heat, wall_s = self._launches.heat(
            f"heat-{number}",
            heat_title(number, asked.side),
            asked.entrants,
            side=asked.side,
            least_per_s=asked.least_per_s,
            expected_s=asked.seconds,
            limit_s=self._time.left_s,
        )
        signal_number = self._stop()
        if signal_number is not None:
            raise InterruptedSearch(signal_number)
        knew = self._experience.lessons.cannot_compile
        found = self.history.record_heat(StudyHeat(number=number, after=after, heat=heat, wall_s=wall_s))
        self._experience.learn_heat(found)
        self._observer.heat_ends(found)
        cannot = next((e for e in found.heat.entrants if e.cannot_compile), None)
        if cannot is not None and not knew:
            self._observer.says(closed_because(cannot))
        return True

    def _one_trial(self) -> None:
        number, config, repeats = self.history.ask()
        # Pruning compares rates, which do not decide another objective.
        below_per_s, clock_mhz = rate_to_beat(self.space, self._complete, config, self.noise) if self._prune else _ANY
        result = self._launches.trial(
            number,
            config,
            repeats=repeats,
            prune_below_per_s=below_per_s,
            prune_clock_mhz=clock_mhz,
            limit_s=self._limit_s(config),
        )
        self._record(Trial(number=number, config=config, result=result, repeats=repeats))
        signal_number = self._stop()
        if signal_number is not None:
            raise InterruptedSearch(signal_number)

    def _record(self, trial: Trial) -> None:
        measurement = trial.result.measurement
        if trial.result.status is TrialStatus.COMPLETE and measurement is not None:
            trial = trial.model_copy(update={"score": self._scorer.score(measurement)})
        remembered = self.history.record(trial)
        closes = trial.result.cannot_compile and not self._experience.lessons.cannot_compile
        self._learn(remembered)
        self._observer.trial_ends(remembered)
        if closes:
            self._observer.says(closed_because(trial.result))

    def _learn(self, trial: Trial) -> None:
        # A trial killed while the sampler was suggesting has no configuration.
        if not trial.config:
            return
        self._experience.learn(trial)
        self._compare(trial)
        self._look_for_owed()

    def _look_for_owed(self) -> None:
        """Find the best configuration with the user's own batch size, if it is still to be tried."""
        best = next(iter(self._complete), None)
        self._debt = owed(self.space, best, self.baseline, self.history.tried, self._experience)

    def _compare(self, trial: Trial) -> None:
        """Enter a trial among the complete ones, if it is complete."""
        measurement = trial.result.measurement
        if trial.result.status is not TrialStatus.COMPLETE or trial.score is None:
            return
        self._complete.append(trial)
        self._complete.sort(key=lambda t: -(t.score or 0.0))
        if self._baseline is None and key(trial.config) == key(self.space.baseline):
            self._baseline = trial
        if measurement is not None:
            rate = stats.Rate(measurement.samples_per_s, *measurement.ci95_per_s)
            self._launched.setdefault(key(trial.config), []).append(rate)

    def rule_out(self, wrong: Sequence[Config]) -> None:
        """Rule out all that compute as these configurations do, because they do not train like eager fp32."""
        lessons = self._experience.lessons
        for config in wrong:
            lessons.learn_wrong(config)
        self._complete = [trial for trial in self._complete if not lessons.is_wrong(trial.config)]
        self._look_for_owed()

    def go_on(self, entered: Sequence[Trial], searched_s: float) -> bool:
        """Let the search go on after a contest that nothing has won (see `SearchTime`); return whether it does."""
        over = self._limit is not None and len(self.history.tried) >= self._limit
        return not over and self._time.go_on(entered, searched_s)

    def _check_baseline(self) -> None:
        """Raise if the baseline failed: it is what the user runs today, and without it no search can help."""
        if self.baseline is not None or key(self.space.baseline) not in self.history.tried:
            return
        ended = [t.result for t in self.history.trials if key(t.config) == key(self.space.baseline)]
        raise baseline_failed(next(r for r in reversed(ended) if is_verdict(r)), self.space.baseline)

    def _acceptable(self, config: Config) -> bool:
        """Return whether a configuration is legal, new, not ruled out by a failure, and likely to finish in time."""
        found = canonical(config)
        return (
            key(found) not in self.history.tried
            and self.space.refusal(found) is None
            and not self._experience.lessons.rule_out(found)
            and self._experience.costs.expected_s(found) <= self._left_for_s(found)
        )

    def _offered(self, config: Config) -> bool:
        """Return whether one of Optuna's samplers may propose a configuration: some values wait until the best
        is beside them."""
        best = self._complete[0].config if self._complete else self.space.baseline
        for name, values in self.space.further.items():
            value = config.get(name)
            if value in values and value not in self.space.beside(name, best.get(name)):
                return False
        return self._acceptable(config)

    def _left_for_s(self, config: Config) -> float:
        """Return the seconds that a configuration may take, of those left for searching.

        The one that is owed may take time from the proof, too.
        """
        debt, budget = self._debt, self._launches.budget
        if debt is not None and debt.is_for(config):
            return ALONE_SHARE * budget.limit_s - budget.spent_s
        return self._time.left_s - (0.0 if debt is None else debt.expected_s)

    def _ends(self) -> list[Trial]:
        """Return the baseline's trial, and the best one of several."""
        best = self._complete[:1] if len(self._complete) > 1 else []
        return [trial for trial in (self.baseline, *best) if trial is not None]

    def _limit_s(self, config: Config) -> float | None:
        """Return the time limit of a trial: a multiple of the expected duration, capped by the time left for searching.

        The baseline has no limit, because every comparison needs it.
        """
        if not self.complete:
            return None
        patience_s = max(PATIENCE * self._experience.costs.expected_s(config), self._launches.budget.limit_s / 4)
        return max(_LEAST_TRIAL_S, min(patience_s, self._left_for_s(config)))

    def _reason_to_end(self) -> str | None:
        tried = len(self.history.tried)
        if self._limit is not None and tried >= self._limit:
            return f"{tried} trials were asked for" if tried > 1 else "one trial was asked for"
        if self.baseline is None:
            over = self._launches.budget.left_s <= 0
            return "the budget is spent" if over else None
        if self._experience.costs.expected_s(self.space.baseline) > self._time.left_s:
            return f"no more trials fit into the {100 * self._time.share:.0f} % of the budget that searching may take"
        return None
