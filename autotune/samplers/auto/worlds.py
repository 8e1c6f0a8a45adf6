"""Rates that the models hold possible: of two sides together, and in draws of the effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.samplers.auto.features import Array
from autotune.samplers.auto.pool import Pool
from autotune.samplers.auto.shown import Shown, corrections

#: Exponent of the smooth minimum of two rates. Because step times vary, a training does not reach the smaller rate when
#: the two are similar: with this exponent it stays 8 % below.
SHARPNESS = 8.0


def combined(log_device: Array, log_loader: Array, workers: Array) -> Array:
    """Return the logarithm of the rate that two sides give together; shapes ``(N, …)``, workers ``(N,)``."""
    gap = log_loader - log_device
    overlapping = workers > 0
    # With workers, loading and computing overlap; without them their times add.
    lost = np.empty_like(gap)
    lost[overlapping] = _softplus(-SHARPNESS * gap[overlapping]) / SHARPNESS
    lost[~overlapping] = _softplus(-gap[~overlapping])
    found: Array = log_device - lost
    return found


def _softplus(values: Array) -> Array:
    """Compute ``log(1 + exp(x))`` without overflow."""
    found: Array = np.maximum(values, 0.0) + np.log1p(np.exp(-np.abs(values)))
    return found


@dataclass(frozen=True)
class Worlds:
    """Draws of the effects. Each draw assigns a rate to every configuration, so rates within one draw can be compared.

    No training is faster than its device alone, whatever a model says of it.

    Attributes:
        whole: of the plain model, ``(F, P)``. device, loader: of the two sides, ``(F, S + P)``. rest: without and with
            workers, ``(2, S + P)``. in_whole, on_device, on_loader: what heats have shown.
    """

    whole: Array
    device: Array | None = None
    loader: Array | None = None
    rest: Array | None = None
    in_whole: Sequence[Shown] = ()
    on_device: Sequence[Shown] = ()
    on_loader: Sequence[Shown] = ()

    def log_rates(self, pool: Pool, own: Array | None = None) -> Array:
        """Return the logarithmic rate of each configuration in each draw, ``(N, S + P)``.

        Args:
            own: what no sum of effects says of each configuration, ``(N, S + P)``.
        """
        plain: Array = pool.whole @ self.whole + corrections(self.in_whole, self.whole, pool.parts)
        if own is not None:
            plain += own[:, own.shape[1] - plain.shape[1] :]
        if self.device is None or self.loader is None or self.rest is None:
            return plain
        device = pool.device @ self.device + corrections(self.on_device, self.device, pool.parts)
        if own is not None:
            device += own
        loader = pool.loader @ self.loader + corrections(self.on_loader, self.loader, pool.loaders)
        found = combined(device, loader, pool.workers) + self.rest[(pool.workers > 0).astype(int)]
        # Without workers the times of both sides add up to that of the training, whatever else is true.
        overlapping = pool.workers > 0
        found[overlapping, found.shape[1] - plain.shape[1] :] = plain[overlapping]
        capped: Array = np.minimum(found, device)
        return capped
