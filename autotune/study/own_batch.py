"""The trial that a search owes its user: the best found, with the batch size that the user trains with."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from autotune.knobs.compile_mode import eager
from autotune.base.records import Config, Trial, Value
from autotune.samplers import Experience
from autotune.space import Space, canonical, key


@dataclass(frozen=True)
class Debt:
    """The configuration that is owed, and the seconds that its trial is expected to take."""

    config: dict[str, Value]
    expected_s: float

    def is_for(self, config: Config) -> bool:
        """Return whether this is the configuration that is owed."""
        return key(config) == key(self.config)


def owed(
    space: Space, best: Trial | None, baseline: Trial | None, tried: Collection[str], experience: Experience
) -> Debt | None:
    """Return the twin of the best configuration that trains as the baseline does, if it has not been tried.

    The twin is eager, because compiling for another batch may take longer than is left, unless only compiled
    configurations are legal.

    Returns:
        ``None`` if the best trains as the baseline does, is not better than it, or has no legal twin that can end.
    """
    if best is None or baseline is None or space.same_training(best.config):
        return None
    if best.score is None or baseline.score is None or best.score <= baseline.score:
        return None
    own = {n: v for n, v in space.baseline.items() if n == "batch_size" or n.startswith("workload.")}
    kept = {n: v for n, v in best.config.items() if n in space.speed_only}
    compiled = canonical({**best.config, **own, **kept})
    legal = (c for c in (eager(compiled), compiled) if space.refusal(c) is None)
    found = next(legal, None)
    if found is None or key(found) in tried or experience.lessons.rule_out(found):
        return None
    expected_s = experience.costs.expected_s(found)
    return None if math.isinf(expected_s) else Debt(found, expected_s)
