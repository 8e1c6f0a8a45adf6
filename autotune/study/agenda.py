"""What a search may still try, in what time, and what it tries before the sampler's proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.base.records import Config, Heat, StudyHeat, TrialStatus
from autotune.samplers import Experience
from autotune.space import Space, canonical, is_loaders, key, loads_as
from autotune.study.budget import ALONE_SHARE, Budget
from autotune.study.complete import CompleteTrials, is_device_bound
from autotune.study.history import History
from autotune.study.own_batch import Debt, owed
from autotune.study.search_time import SearchTime
from autotune.study.starving import waits_as_long

#: A trial that takes this many times the expected duration is stopped.
PATIENCE = 3.0
#: With fewer times the rate, another loader is not faster.
LOADS_FASTER = 1.05
#: Every trial gets at least this time, however little is left for searching.
_LEAST_TRIAL_S = 20.0


class Agenda:
    """Decides which configurations may be tried, and enqueues those that are not the sampler's choice.

    Args:
        first: configurations to try before the sampler's proposals, the baseline among them.
        trials: no more than this number of trials are finished; ``None`` for no limit except the budget.
        adopts: see `SearchTime`.
    """

    def __init__(
        self,
        space: Space,
        history: History,
        complete: CompleteTrials,
        experience: Experience,
        budget: Budget,
        *,
        first: Sequence[Config],
        trials: int | None,
        adopts: bool = False,
    ) -> None:
        self._space = space
        self._history = history
        self._complete = complete
        self._experience = experience
        self._budget = budget
        self._first = first
        self._trials = trials
        #: The best configuration with the user's own batch size, if it is still to be tried.
        self._debt: Debt | None = None
        self.time = SearchTime(budget, history, complete, adopts=adopts)

    @property
    def has_all_trials(self) -> bool:
        """Whether as many trials are finished as were asked for."""
        return self._trials is not None and len(self._history.tried) >= self._trials

    def look_for_owed(self) -> None:
        """Find the best configuration with the user's own batch size, if it is still to be tried."""
        found = self._complete
        self._debt = owed(self._space, found.best, found.baseline, self._history.tried, self._experience)

    def acceptable(self, config: Config) -> bool:
        """Return whether a configuration is legal, new, not ruled out by a failure, and likely to finish in time."""
        found = canonical(config)
        return (
            key(found) not in self._history.tried
            and self._space.refusal(found) is None
            and not self._experience.lessons.rule_out(found)
            and self._experience.costs.expected_s(found) <= self._left_for_s(found)
            and self.has_time_for(found)
        )

    def has_time_for(self, config: Config) -> bool:
        """Return whether there is time for what a configuration needs beside its trial. In a short budget there is none
        for another trial, which is owed where it changes what is trained; nor for comparing what its loader delivers,
        where the device is the limit, or no other loader has been seen to be faster. Unless there are no others to try.
        """
        if not self.time.is_short:
            return True
        bound = self._keeps_loader
        others = (n for n in self._space.choices if n != "batch_size" and not n.startswith("workload."))
        if not any(len(self._space.legal(name)) > 1 for name in others if not (bound and is_loaders(name))):
            return True
        return self._space.same_training(config) and (not bound or loads_as(config, self._space.baseline))

    @property
    def _keeps_loader(self) -> bool:
        """Whether other settings of the loader are not worth a launch: the device is the limit, or a heat has shown no
        other number of workers to load faster."""
        if is_device_bound(self._space, self._complete.ordered):
            return True
        return any(map(self._shows_own_loader_best, self._history.heats))

    def _shows_own_loader_best(self, heat: StudyHeat) -> bool:
        reference, *others = heat.heat.entrants
        own = loads_as(reference.config, self._space.baseline)
        ratios = [entrant.ratio for entrant in others if entrant.ratio is not None]
        return heat.heat.side == "loader" and own and bool(ratios) and max(ratios) < LOADS_FASTER

    def offered(self, config: Config) -> bool:
        """Return whether one of Optuna's samplers may propose a configuration: some values wait until the best
        is beside them."""
        best = self._complete.best
        beside = self._space.baseline if best is None else best.config
        for name, values in self._space.further.items():
            value = config.get(name)
            if value in values and value not in self._space.beside(name, beside.get(name)):
                return False
        return self.acceptable(config)

    def limit_s(self, config: Config) -> float | None:
        """Return the time limit of a trial: a multiple of the expected duration, capped by the time left for searching.

        The baseline has no limit, because every comparison needs it.
        """
        if not self._complete.ordered:
            return None
        patience_s = max(PATIENCE * self._experience.costs.expected_s(config), self._budget.limit_s / 4)
        return max(_LEAST_TRIAL_S, min(patience_s, self._left_for_s(config)))

    def enqueue(self, fits: Callable[[Config], bool]) -> bool:
        """Enqueue what precedes the sampler's proposals: a trial to repeat, the baseline, one of the given
        configurations; return whether there is any.

        Args:
            fits: tells whether a configuration is known to fit into memory.
        """
        for trial in self._history.unfinished:
            if self._may_try(trial.config):
                self._history.enqueue(trial.config, repeats=trial.number)
                return True
        for config in self._first:
            given = key(config) != key(self._space.baseline)
            if given and (waits_as_long(config, self._complete.baseline) or not fits(config)):
                continue
            if self._may_try(config):
                self._history.enqueue(dict(config))
                return True
        is_last = self._trials is not None and len(self._history.tried) == self._trials - 1
        return is_last and self.enqueue_owed()

    def enqueue_owed(self) -> bool:
        """Enqueue the best configuration with the user's own batch size, if it has not been tried; return whether it
        has been enqueued.

        It may take time from the proof, which would have nothing but the baseline to compare at that batch size.
        """
        if self._debt is None or self.has_all_trials or self._debt.expected_s > self._left_alone_s:
            return False
        if key(self._debt.config) in self._history.tried:
            return False  # it runs on another device
        self._history.enqueue(self._debt.config)
        return True

    def enqueue_leader(self, heat: Heat) -> None:
        """Enqueue the fastest of a heat at the settings that it had there, if its loader is to stay and the budget is
        short: a trial of its own is what a proof begins with."""
        if heat.side != "device" or not self._keeps_loader or not self.time.is_short:
            return
        ahead = [e for e in heat.entrants if e.status is TrialStatus.COMPLETE and e.ratio_ci95 and e.ratio_ci95[0] > 1]
        ahead = [e for e in ahead if self._space.same_training(e.config)] or ahead
        leader = max(ahead, key=lambda e: e.ratio or 0.0, default=None)
        if leader is not None and self._may_try(leader.config):
            self._history.enqueue(dict(canonical(leader.config)))

    def _may_try(self, config: Config) -> bool:
        # The baseline is always tried, regardless of --set and the budget: every comparison needs it.
        is_baseline = key(config) == key(self._space.baseline)
        return key(config) not in self._history.tried if is_baseline else self.acceptable(config)

    @property
    def _left_alone_s(self) -> float:
        """Seconds left for the configuration that is owed, which may take time from the proof."""
        return ALONE_SHARE * self._budget.limit_s - self._budget.spent_s

    def _left_for_s(self, config: Config) -> float:
        """Return the seconds that a configuration may take, of those left for searching."""
        if self._debt is None:
            return self.time.left_s
        return self._left_alone_s if self._debt.is_for(config) else self.time.left_s - self._debt.expected_s
