"""The trial that a search owes its user: the best found, with the batch size that the user trains with."""

from __future__ import annotations

from collections.abc import Collection

from autotune.knobs.compile_mode import eager
from autotune.records import Config, Trial, Value
from autotune.samplers import Experience
from autotune.space import Space, canonical, key


def owed(
    space: Space, best: Trial | None, baseline: Trial | None, tried: Collection[str], experience: Experience
) -> dict[str, Value] | None:
    """Return the twin of the best configuration that trains as the baseline does, if it has not been tried.

    The twin is eager, because compiling for another batch may take longer than is left, unless only compiled
    configurations are legal.

    Returns:
        ``None`` if the best trains as the baseline does, is not better than it, or has no legal twin.
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
    return found


def is_owed(config: Config, debt: Config | None) -> bool:
    """Return whether a configuration is the one that is owed."""
    return debt is not None and key(config) == key(debt)
