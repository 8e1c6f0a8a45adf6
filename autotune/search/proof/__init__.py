"""Proves the winner by new launches: every step between the end of the search and the profile.

`winner` runs the steps in order; each raises `InterruptedSearch` if a signal asks the search to end. Within each
module, judging is kept apart from launching.

| question | launched by | judged by |
|---|---|---|
| does it train like eager fp32? | `train_check` | `train_check` |
| does its loader deliver the baseline's data? | `train_check` | `train_check` |
| how fast is it, launched in turns with the baseline? | `race` | `race` |
| which configuration wins? | | `winner` |
| does it stay within device memory? | `ceilings` | `ceilings` |
| what limits it? | `ceilings` | `ceilings` |
| how much does each of its knobs gain? | `ceilings` | `ceilings` |
| what is likely, if nothing is proven? | | `likely` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autotune.base.errors import InterruptedSearch
from autotune.base.observer import Observer
from autotune.base.records import EAGER_FP32, Deliveries
from autotune.space import Space
from autotune.space.requirements import ANYTHING, Requirements
from autotune.study.budget import SEARCH_SHARE
from autotune.study.launches import Launches
from autotune.workload.scoring import Scorer


@dataclass(frozen=True)
class ProofContext:
    """Everything that the steps of the proof share.

    Attributes:
        by_rate: the search is for the rate itself, so the intervals of rates determine the winner.
        rate_within: the objective chooses among configurations whose rate is within this fraction of the fastest; at 0
            the fastest wins. Only with `by_rate`.
        required: what the winner must meet.
        stop: returns the number of the signal that asks the search to end, or ``None``.
        compiled_s: compile time with a cold cache in seconds, by graph, as observed by the search.
        searched_s: seconds of the budget that the search has spent.
        cores: number of cores that a training may use.
        epochs: number of epochs of the training, if the search is asked about them.
        deliveries: what a script's own loader delivered in its probe; ``None`` if that was not noted.
        evict: drops the data's files from the page cache, and returns whether they are gone.
    """

    space: Space
    launches: Launches
    scorer: Scorer
    observer: Observer
    stop: Callable[[], int | None]
    by_rate: bool = True
    rate_within: float = 0.0
    required: Requirements = ANYTHING
    compiled_s: Mapping[str, float] = field(default_factory=dict)
    searched_s: float = 0.0
    cores: int = 1
    epochs: int | None = None
    deliveries: Deliveries | None = None
    evict: Callable[[], bool] = lambda: False

    @property
    def budget_s(self) -> float:
        """The budget that the shares of the proof's steps refer to. It is less than the user's if the search has taken
        more than its usual part, so that each step gets less."""
        limit_s = self.launches.budget.limit_s
        return min(limit_s, (limit_s - self.searched_s) / (1 - SEARCH_SHARE))

    @property
    def by_command(self) -> bool:
        """Whether the training is a user's script, which can be started and watched but not taken apart further."""
        return self.launches.conditions.command is not None

    @property
    def sees_inside(self) -> bool:
        """Whether more than the rate of a training can be observed: its losses, and its waits for the loader."""
        command = self.launches.conditions.command
        return command is None or command.rate is None

    @property
    def beside(self) -> str:
        """Name of what the finalists' losses are compared with."""
        return "the script as it stands" if self.by_command else EAGER_FP32

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.launches.conditions.device.partition(":")[0]

    def raise_if_stopped(self) -> None:
        """Raise `InterruptedSearch` if a signal has asked the search to end."""
        number = self.stop()
        if number is not None:
            raise InterruptedSearch(number)
