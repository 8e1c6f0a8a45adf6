"""Estimates the noise-free rate of each configuration of a surface.

Launches of equals differ, the machine drifts, and the largest of many noisy means exceeds any true rate. The logarithm
of the rate is therefore modelled as a smooth function of the configuration, plus a slow drift, plus noise. The function
is a Gaussian process (Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, ch. 2 and 5) in which the
correlation of two configurations has a factor for each knob in which they differ (and for each step between two values
of a numeric knob). Factor and scale maximize the likelihood; the noise is estimated from repeats.

The process is of the difference from what device and loader give together: their times add without workers, and the
slower one sets the pace with them. Heats tell the rates of both much more precisely than launches do; where there are
none, those of launches of either side alone are taken. That the slower side sets the pace is all that this has in
common with the sampler's models.
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
from autotune.base.records import Config, LaunchKind, Side
from autotune.knobs.num_workers import workers_of
from autotune.search.replay import PARTS, Surface
from autotune.space import device_part, key, loader_part
from autotune.stats import Rate

Array = NDArray[np.float64]

#: Window in seconds for averaging the machine's drift: about ten launches of the baseline, and all others in between.
DRIFT_S = 600.0
_ALIKE = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_SCALES = (0.02, 0.1, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Truth:
    """Noise-free rates.

    Attributes:
        log_rate: by key, for each configuration that can be trained.
        best: key of the fastest configuration.
        noise_sd: of one launch. se: standard error of a configuration's rate relative to the best one's, by the process
            (median over configurations).
    """

    log_rate: Mapping[str, float]
    best: str
    noise_sd: float
    se: float

    def regret(self, name: str) -> float:
        """Return how far a configuration is below the best, as a fraction of the best; 1 if it is unreliable."""
        if name not in self.log_rate:
            return 1.0
        return -math.expm1(self.log_rate[name] - self.log_rate[self.best])


def truth_of(surface: Surface) -> Truth:
    """Smooth a surface.

    A configuration with a failed launch is unreliable and excluded as a candidate for the best.
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
    device, loader = _side(surface, "device", configs), _side(surface, "loader", configs)
    expected = _together(device.log_rate, loader.log_rate, configs)
    of_heats = device.covariance + loader.covariance
    smooth, errors = _process(_steps(configs), means - expected, noise.sd**2 / counts, of_heats)
    smooth = smooth + expected
    best = int(np.argmax(smooth))
    rates = {name: float(smooth[i]) for name, i in index.items()}
    apart = np.sqrt(np.maximum(0.0, np.diag(errors) + errors[best, best] - 2 * errors[best]))
    return Truth(rates, good[best], noise.sd, float(np.median(apart)))


@dataclass(frozen=True)
class _Side:
    """What is known of one side of each configuration.

    Attributes:
        log_rate: natural logarithms of the rates, ``(N,)``; infinite where nothing was recorded.
        covariance: of their errors, as far as heats tell, ``(N, N)``.
    """

    log_rate: Array
    covariance: Array


def _side(surface: Surface, side: Side, configs: Sequence[Config]) -> _Side:
    part, alone = {
        "device": (device_part, LaunchKind.DEVICE_ONLY),
        "loader": (loader_part, LaunchKind.LOADER_ONLY),
    }[side]
    found = np.full(len(configs), math.inf)
    for i, config in enumerate(configs):
        launched = [r.rate_per_s for r in surface.ceilings.get((alone, key(part(config))), ()) if r.rate_per_s]
        if launched:
            found[i] = float(np.mean(np.log(launched)))
    covariance = np.zeros((len(configs), len(configs)))
    names = [key(PARTS[side](config)) for config in configs]
    for row in surface.heats.get(side, ()):
        rates = {n: [None if t is None else t[1] / t[2] for t in e.turns] for n, e in row.shown.items()}
        compared = stats.compare_rounds(
            {n: some for n, some in rates.items() if any(some)}, prior=stats.PRIORS["cpu"], robust=True
        )
        effects = compared.fit.effects
        # The level of a heat: of its day, which launches tell better.
        level = float(np.median([math.log(r) - effects[n] for n, some in rates.items() for r in some if r]))
        here = [i for i, name in enumerate(names) if name in effects]
        for i in here:
            found[i] = level + effects[names[i]]
            for j in here:
                covariance[i, j] = compared.noise.sd**2 * compared.fit.inverse[names[i], names[j]]
    return _Side(found, covariance)


def _together(device: Array, loader: Array, configs: Sequence[Config]) -> Array:
    """Return the logarithmic rates that two sides give together, ``(N,)``; zeros if a device's rate is not known."""
    if np.isinf(device).any():
        return np.zeros(len(configs))
    workers = np.array([workers_of(config) for config in configs])
    found: Array = np.where(workers > 0, np.minimum(device, loader), device - np.log1p(np.exp(device - loader)))
    return found


def _smoothed(times: Array, left: Array) -> Array:
    weights = np.exp(-0.5 * ((times[:, None] - times) / DRIFT_S) ** 2)
    found: Array = weights @ left / weights.sum(axis=1)
    return found


def _steps(configs: Sequence[Config]) -> Array:
    """Count the knobs in which two configurations differ, by value steps for numeric ones; shape ``(N, N)``."""
    names = sorted({name for c in configs for name in c})
    found = np.zeros((len(configs), len(configs)))
    for name in names:
        values = [c.get(name) for c in configs]
        numbers = [int(v) for v in values if isinstance(v, int) and not isinstance(v, bool)]
        if len(numbers) == sum(v is not None for v in values):
            order = {v: i for i, v in enumerate(sorted(set(numbers)))}
            # An inactive knob is one step below its smallest value.
            place = np.array([-1.0 if v is None else float(order[int(v)]) for v in values])
            found += np.abs(place[:, None] - place)
        else:
            kinds = np.array([repr(v) for v in values])
            found += kinds[:, None] != kinds
    return found


def _process(steps: Array, means: Array, variances: Array, covariance: Array) -> tuple[Array, Array]:
    """Return the expected values of a Gaussian process at its own points, and the covariance of their errors.

    Args:
        covariance: of what is to be found besides, whatever the process is, ``(N, N)``.
    """
    centre = float(np.average(means, weights=1 / (variances + means.var())))
    left = means - centre
    best: tuple[float, Array, Array] | None = None
    for alike, scale in product(_ALIKE, _SCALES):
        kernel = scale * means.var() * alike**steps
        root = np.linalg.cholesky(kernel + np.diag(variances))
        solved = np.linalg.solve(root, left)
        likely = float(-0.5 * solved @ solved - np.log(np.diag(root)).sum())
        if best is None or likely > best[0]:
            known = np.linalg.solve(root, kernel)
            best = (likely, kernel @ np.linalg.solve(root.T, solved), kernel - known.T @ known)
    assert best is not None
    return centre + best[1], best[2]
