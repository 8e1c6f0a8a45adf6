"""Chooses a configuration, from what each on offer is worth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autotune.base.records import Config, Value
from autotune.samplers.auto.features import Array, Bools
from autotune.samplers.auto.posterior import Knowledge
from autotune.space import AT_ONCE, canonical, samples_at_once, simplicity

#: A simpler configuration is tried instead if it is worth at least this part of the most worthwhile one.
_AS_WORTHY = 0.9
#: Of configurations that are not known to fit, this many of the most worthwhile are considered.
_RISKS = 32


class Chooser:
    """Chooses among the configurations on offer. Each choice comes with a few words on why.

    Args:
        acceptable: see `AutoSampler`.
    """

    def __init__(self, known: Knowledge, acceptable: Callable[[Config], bool]) -> None:
        self._known = known
        self._space = known.space
        self._acceptable = acceptable

    def first(self, worth: Array, gain: Array, least: float, fits: Bools, why: str) -> tuple[Config, str] | None:
        """Return the most worthwhile configuration that may be tried, or one that must be tried before it.

        Of several that are about as worthwhile the simplest is returned.

        Args:
            worth: gain per second; negative if closed, ``(N,)``. gain: ``(N,)``. least: gains that differ by less
                are as good.
        """
        configs = self._known.offers.pool.configs
        for i in np.argsort(-worth, kind="stable"):
            if worth[i] < 0:
                break
            if not fits[i]:
                stone = self._stepping_stone(configs[i]) if self._known.memory.may_fit(configs[i]) else None
                if stone is not None:
                    return stone, "to learn how memory grows with the batch"
            elif self.allowed(i):
                as_good = fits & (worth >= _AS_WORTHY * worth[i]) & (gain >= gain[i] - least)
                order = sorted(
                    np.flatnonzero(as_good), key=lambda j: simplicity(configs[j], self._space.baseline, None)
                )
                return configs[next((j for j in order if self.allowed(int(j))), i)], why
        return None

    def risk(self, worth: Array, centre: Config) -> tuple[Config, str] | None:
        """Return a configuration to try if none certainly fits: the best at a smaller batch, which shows how memory
        grows, or one that is expected to fit. Without it, a training near the memory limit would have none to try."""
        if not (worth > 0).any():
            return None
        stone = self._stepping_stone(centre)
        if stone is not None:
            return stone, "to learn how memory grows with the batch"
        configs = self._known.offers.pool.configs
        for i in np.argsort(-worth, kind="stable")[:_RISKS]:
            if worth[i] > 0 and self.allowed(i) and self._known.memory.may_fit(configs[i]):
                return configs[i], "expected to fit, but not sure to"
        return None

    def at_own_batch(self, config: Config) -> tuple[Config, str] | None:
        """Return the best configuration with the user's own batch and workload knobs, if it has not been tried."""
        own = {n: v for n, v in self._space.baseline.items() if n == "batch_size" or n.startswith("workload.")}
        found = canonical({**config, **own})
        return (found, "the best at your own batch") if self._may_try(found) else None

    def anything(self) -> dict[str, Value]:
        """Return any configuration that may be tried, for when none is known to be worthwhile."""
        configs = [self._known.offers.pool.configs[i] for i in np.flatnonzero(self._known.offers.open)]
        return dict(next((c for c in configs if self._may_try(c)), self._space.baseline))

    def allowed(self, index: int) -> bool:
        """Return whether one of the offers may be tried now."""
        return self._acceptable(self._known.offers.pool.configs[index])

    def _may_try(self, config: Config) -> bool:
        return self._known.may_try(config) and self._acceptable(config)

    def _stepping_stone(self, config: Config) -> Config | None:
        """Return the same configuration at a smaller batch, or with the batch in more parts, for predicting its memory;
        ``None`` if there is none.

        If no batch of this combination has been observed, this is the largest that certainly fits. One batch does not
        determine a line, so the next smaller one follows.
        """
        if "batch_size" not in self._space.choices or "batch_size" not in config:
            return None
        if len(self._known.memory.batches(config)) > 1:
            return None
        others = [canonical({**config, n: v}) for n in AT_ONCE if n in config for v in self._space.rungs(n)]
        smaller = [found for found in others if samples_at_once(found) < samples_at_once(config)]
        ranked = sorted(smaller, key=samples_at_once, reverse=True)
        return next((found for found in ranked if self._may_try(found)), None)
