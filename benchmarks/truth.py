"""What a surface says of each configuration once its noise is taken out.

Launches of equals differ, the machine drifts, and the largest of many noisy means is larger than any true rate. So the
logarithm of the rate is taken to be a smooth function of the configuration, plus a slow drift, plus noise. The function
is a Gaussian process (Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, ch. 2 and 5) in which two
configurations are alike by a factor for each knob in which they differ (and for each step between two values of a
numeric one); factor and scale are those that make the recording most likely, the noise is what repeats show. It shares
nothing with the models that search.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autotune import stats
from autotune.records import Config
from autotune.replay import Surface
from autotune.stats import Rate

Array = NDArray[np.float64]

#: Seconds over which the machine's drift is averaged: some ten launches of the baseline, and all others between.
DRIFT_S = 600.0
_ALIKE = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_SCALES = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Truth:
    """Rates without noise.

    Attributes:
        log_rate: by key, of each configuration that can be trained.
        best: the key of the largest.
        noise_sd: of one launch. se: of a configuration's mean over its recorded launches (the median configuration's).
    """

    log_rate: Mapping[str, float]
    best: str
    noise_sd: float
    se: float

    def regret(self, name: str) -> float:
        """How far a configuration is below the best, as a fraction of the best; all of it where it can't be relied
        on."""
        if name not in self.log_rate:
            return 1.0
        return -math.expm1(self.log_rate[name] - self.log_rate[self.best])


def truth_of(surface: Surface) -> Truth:
    """Smooth a surface.

    A configuration of which any launch failed can't be relied on: it is no candidate for the best.
    """
    rows = [r for r in surface.rows if r.kind == "measure" and r.rate_per_s is not None]
    names = [json.dumps(r.config, sort_keys=True, separators=(",", ":")) for r in rows]
    good = sorted({n for n in names if all(r.rate_per_s for r in surface.launches[n])})
    index = {name: i for i, name in enumerate(good)}
    kept = [(r, index[n]) for r, n in zip(rows, names, strict=True) if n in index]
    logs = np.array([math.log(r.rate_per_s or 1.0) for r, _ in kept])
    which = np.array([i for _, i in kept])
    times = np.array([r.began_s for r, _ in kept])
    drift = np.zeros(len(kept))
    for _ in range(5):
        means = np.array([(logs - drift)[which == i].mean() for i in range(len(good))])
        drift = _smoothed(times, logs - means[which])
    clean = logs - drift
    groups = [[Rate(math.exp(x), 0.0, 0.0) for x in clean[which == i]] for i in range(len(good))]
    noise = stats.launch_noise(groups, prior=stats.PRIORS["cpu"])
    counts = np.array([(which == i).sum() for i in range(len(good))], dtype=np.float64)
    means = np.array([clean[which == i].mean() for i in range(len(good))])
    configs = [surface.launches[name][0].config for name in good]
    smooth = _process(_steps(configs), means, noise.sd**2 / counts)
    best = max(range(len(good)), key=lambda i: smooth[i])
    rates = {name: float(smooth[i]) for name, i in index.items()}
    return Truth(rates, good[best], noise.sd, noise.sd / math.sqrt(float(np.median(counts))))


def _smoothed(times: Array, left: Array) -> Array:
    weights = np.exp(-0.5 * ((times[:, None] - times) / DRIFT_S) ** 2)
    found: Array = weights @ left / weights.sum(axis=1)
    return found


def _steps(configs: Sequence[Config]) -> Array:
    """In how many knobs two configurations differ, and by how many values in numeric ones; shape ``(N, N)``."""
    names = sorted({name for c in configs for name in c})
    found = np.zeros((len(configs), len(configs)))
    for name in names:
        values = [c.get(name) for c in configs]
        numbers = [int(v) for v in values if isinstance(v, int) and not isinstance(v, bool)]
        if len(numbers) == sum(v is not None for v in values):
            order = {v: i for i, v in enumerate(sorted(set(numbers)))}
            # A knob that is inactive is as far from its smallest value as that is from the next.
            place = np.array([-1.0 if v is None else float(order[int(v)]) for v in values])
            found += np.abs(place[:, None] - place)
        else:
            kinds = np.array([repr(v) for v in values])
            found += kinds[:, None] != kinds
    return found


def _process(steps: Array, means: Array, variances: Array) -> Array:
    """The expected values of a Gaussian process at its own points."""
    centre = float(np.average(means, weights=1 / (variances + means.var())))
    left = means - centre
    best: tuple[float, Array] | None = None
    for alike, scale in product(_ALIKE, _SCALES):
        kernel = scale * means.var() * alike**steps
        root = np.linalg.cholesky(kernel + np.diag(variances))
        solved = np.linalg.solve(root, left)
        likely = float(-0.5 * solved @ solved - np.log(np.diag(root)).sum())
        if best is None or likely > best[0]:
            best = (likely, kernel @ np.linalg.solve(root.T, solved))
    assert best is not None
    return centre + best[1]
