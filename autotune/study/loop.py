"""The loop of a search: ask, launch, record, tell."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from autotune.errors import InterruptedSearch, WorkloadError
from autotune.observer import Observer
from autotune.records import Config, Trial, TrialResult, TrialStatus
from autotune.scoring import Scorer
from autotune.search.sampler import LegalSampler, make_sampler
from autotune.search.start import designed
from autotune.space import Space, canonical, key
from autotune.study.history import History
from autotune.study.launches import Launches

#: The part of the budget that searching may use; the rest belongs to verifying what it found.
SEARCH_SHARE = 0.75
#: What launching baseline and best again is expected to take, over what their trials took.
ROUND_MARGIN = 1.2
#: Below this fraction of the best's rate a trial is not worth finishing.
PRUNE_FRACTION = 0.5
#: What a compile is expected to cost before one was seen.
COMPILE_GUESS_S = 60.0
#: A trial that takes this many times what was expected is ended.
PATIENCE = 3.0
#: No trial is given less than this, however little of the search's time is left.
_LEAST_TRIAL_S = 20.0


class Study:
    """One search, from its first trial or from where an earlier run left it.

    Args:
        stop: the number of the signal that asks the search to end, or ``None``.
        trials: end after this many finished trials; ``None`` leaves it to the budget.
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
    ) -> None:
        self.space = space
        self.history = history
        self._launches = launches
        self._scorer = scorer
        self._observer = observer
        self._limit = trials
        self._prune = prune
        # Who asks for chance gets chance.
        self._designed = sampler != "random"
        self._stop = stop
        # Mixed with what exists, so that a resumed search goes on instead of repeating its first proposals.
        mixed = seed * 1_000_003 + len(history.optuna.get_trials(deepcopy=False))
        self._sampler = LegalSampler(make_sampler(sampler, mixed), space, self._acceptable, seed=mixed)
        history.optuna.sampler = self._sampler

    @property
    def baseline(self) -> Trial | None:
        """The baseline's complete trial: trial 0, or the one that repeated it after an interruption."""
        return next((t for t in self.complete if key(t.config) == key(self.space.baseline)), None)

    @property
    def complete(self) -> list[Trial]:
        """Trials with a score, the best first."""
        found = [t for t in self.history.trials if t.result.status is TrialStatus.COMPLETE and t.score is not None]
        return sorted(found, key=lambda t: -(t.score or 0.0))

    def recover(self) -> None:
        """Settle what an earlier run left running, and queue it again where it has no result."""
        for trial in self.history.trials:
            self._observer.trial_ends(trial)
        for trial in self.history.recover():
            self._record(trial)
        self.history.repeat_interrupted()

    def run(self) -> str:
        """Search until there is a reason to end, and return it, one sentence.

        Raises:
            WorkloadError: the baseline failed.
            InterruptedSearch: a signal came; everything finished is on disk.
        """
        self._check_baseline()
        plan = [dict(self.space.baseline), *(designed(self.space) if self._designed else [])]
        while True:
            reason = self._reason_to_end()
            if reason is not None:
                return reason
            if not self.history.waiting:
                config = next((c for c in plan if self._may_try(c)), None)
                if config is not None:
                    self.history.enqueue(config)
                elif not self._sampler.look_ahead():
                    return "everything legal that fits into the time left has been tried"
            self._one_trial()
            self._check_baseline()

    def _may_try(self, config: Config) -> bool:
        # The baseline is tried whatever --set and the budget say: without it nothing can be compared.
        is_baseline = key(config) == key(self.space.baseline)
        return key(config) not in self._tried() if is_baseline else self._acceptable(config)

    def _one_trial(self) -> None:
        number, config, repeats = self.history.ask()
        best = self.complete[0] if self.complete else None
        threshold = PRUNE_FRACTION * (best.rate_per_s or 0.0) if best and self._prune else 0.0
        result = self._launches.trial(
            number, config, repeats=repeats, prune_below_per_s=threshold, limit_s=self._limit_s(config)
        )
        self._record(Trial(number=number, config=config, result=result, repeats=repeats))
        signal_number = self._stop()
        if signal_number is not None:
            raise InterruptedSearch(signal_number)

    def _record(self, trial: Trial) -> None:
        measurement = trial.result.measurement
        if trial.result.status is TrialStatus.COMPLETE and measurement is not None:
            trial = trial.model_copy(update={"score": self._scorer.score(measurement)})
        self._observer.trial_ends(self.history.record(trial))

    def _check_baseline(self) -> None:
        """The baseline is what the user runs today; if that fails, no search can help."""
        failed = [
            t.result
            for t in self.history.trials
            if key(t.config) == key(self.space.baseline)
            and t.result.status not in (TrialStatus.COMPLETE, TrialStatus.INTERRUPTED)
        ]
        # One that was killed from outside is tried again on a resume.
        if failed and self.baseline is None and not self.history.waiting:
            raise baseline_failed(failed[-1])

    def _tried(self) -> set[str]:
        return {key(t.config) for t in self.history.trials if t.result.status is not TrialStatus.INTERRUPTED}

    def _acceptable(self, config: Config) -> bool:
        """Whether a configuration is legal, new, not dominated by an OOM, and likely to end in time."""
        found = canonical(config)
        return (
            key(found) not in self._tried()
            and self.space.refusal(found) is None
            and not self.space.dominated(found, self._out_of_memory(TrialStatus.OOM))
            and not self.space.dominated(found, self._out_of_memory(TrialStatus.HOST_OOM), host=True)
            and self._expected_s(found) <= self._search_left_s()
        )

    def _out_of_memory(self, status: TrialStatus) -> list[Config]:
        return [t.config for t in self.history.trials if t.result.status is status]

    def _search_left_s(self) -> float:
        """Seconds that searching may still use: what verifying one round will need is kept back."""
        budget = self._launches.budget
        racing = [t for t in (self.baseline, *self.complete[:1]) if t is not None]
        round_s = ROUND_MARGIN * sum(t.result.wall_s for t in racing)
        kept = min(max((1 - SEARCH_SHARE) * budget.limit_s, round_s), budget.limit_s / 2)
        return budget.limit_s - kept - budget.spent_s

    def _expected_s(self, config: Config) -> float:
        """About how long a trial takes: a common one, and the compile where there is one."""
        finished = [t for t in self.complete if not _compiled(t)]
        if not finished:
            return 0.0
        usual_s = median(t.result.wall_s for t in finished)
        if config.get("compile_mode", "off") == "off":
            return usual_s
        seen = [t.result.phase_s.get("compile", 0.0) for t in self.complete if _compiled(t)]
        return usual_s + max(seen, default=COMPILE_GUESS_S)

    def _limit_s(self, config: Config) -> float | None:
        """How long a trial may take at the most: far more than expected, and no more than searching has left.

        The baseline may take what it takes: without it there is nothing.
        """
        if not self.complete:
            return None
        patience_s = max(PATIENCE * self._expected_s(config), self._launches.budget.limit_s / 4)
        return max(_LEAST_TRIAL_S, min(patience_s, self._search_left_s()))

    def _reason_to_end(self) -> str | None:
        finished = [t for t in self.history.trials if t.result.status is not TrialStatus.INTERRUPTED]
        if self._limit is not None and len(finished) >= self._limit:
            return f"{len(finished)} trials were asked for"
        if self.baseline is None:
            over = self._launches.budget.left_s <= 0
            return "the budget is spent" if over else None
        if self._expected_s(self.space.baseline) > self._search_left_s():
            return "the budget's part for searching is spent"
        return None


def _compiled(trial: Trial) -> bool:
    return trial.config.get("compile_mode", "off") != "off" and trial.result.status is TrialStatus.COMPLETE


def baseline_failed(result: TrialResult) -> WorkloadError:
    """The error for a baseline that ended badly, with the child's last lines."""
    return WorkloadError(
        f"the baseline ended as {result.status} in phase {result.phase or 'load'}: {result.cause}",
        advice=result.advice,
        detail=result.evidence,
    )
