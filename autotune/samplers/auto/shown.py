"""What heats have shown of single configurations, beside what the models make of it.

A linear model with effects of pairs says what most configurations do, and none of them exactly. A configuration that
took turns with others need not be predicted: its ratios to them are known. So the models are corrected by their own
errors at the entrants, as far as those were precise (the residual part of a Gaussian process whose covariance is a
linear one and a nugget: Rasmussen & Williams, Gaussian Processes, 2006, 2.7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.samplers.auto.features import Array

#: By how much a configuration's rate differs from the sum of its effects, in natural logarithms. In seven heats of 8 to
#: 20 configurations (ResNet-18, 64 px, two cores) the fast ones, predicted from the others, differed by 0.11 (rms).
LACK_SD = 0.1


@dataclass(frozen=True)
class Shown:
    """One heat, as one model sees it.

    Attributes:
        parts: keys of the entrants' parts on the heat's side. rows: their features, ``(N, F)``. seen: logarithms of
            their ratios to any one of them, ``(N,)``. sds: standard deviations of those, ``(N,)``.
    """

    parts: tuple[str, ...]
    rows: Array
    seen: Array
    sds: Array

    def errors(self, effects: Array) -> Array:
        """Return by how much the entrants are faster than the model says, in each draw of its effects ``(F, S)``, in
        natural logarithms, ``(N, S)``.

        Only differences were observed. One entrant that the model is quite wrong about is not to move all others.
        """
        left = self.seen[:, None] - self.rows @ effects
        found: Array = left - np.median(left, axis=0)
        return found


def corrections(heats: Sequence[Shown], effects: Array, parts: Sequence[str]) -> Array | float:
    """Return what to add to the model's logarithmic rates of configurations, ``(len(parts), S)``; 0 without heats.

    Args:
        effects: draws of the model's effects, ``(F, S)``. parts: keys of the configurations' parts.
    """
    if not heats:
        return 0.0
    known: dict[str, tuple[Array, float]] = {}
    for heat in heats:
        errors = heat.errors(effects)
        for part, error, sd in zip(heat.parts, errors, heat.sds, strict=True):
            total, precision = known.get(part, (np.zeros_like(error), 0.0))
            known[part] = total + error / sd**2, precision + 1 / sd**2
    found = np.zeros((len(parts), effects.shape[1]))
    for i, part in enumerate(parts):
        if part in known:
            total, precision = known[part]
            found[i] = total / (precision + 1 / LACK_SD**2)
    return found
