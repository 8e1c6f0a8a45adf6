"""Draws the picture in docs/search.md: the sampler's predictions after its first trials on a recorded surface.

python -m benchmarks.picture benchmarks/recorded/mobilenet-slow-store.jsonl docs/search.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.base.records import LaunchKind, Trial, Value
from autotune.samplers.auto.posterior import observation
from autotune.samplers.auto.rates import Fitted, RateModel
from autotune.search.replay import Surface
from autotune.search.replay.run import replay
from autotune.space import canonical, device_part, key, loader_part
from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer
from benchmarks.curves import drawing
from benchmarks.standins import open_surface

#: Number of trials the sampler has seen, and the launch noise it assumes.
TRIALS, NOISE_SD = 5, 0.05
DRAWS = 400


def trials_of(surface: Surface) -> list[Trial]:
    """Return the first trials of a search."""
    scorer = Scorer(find_objective("throughput"))
    try:
        return [step.trial for step in replay(surface, scorer, budget_s=600, trials=TRIALS).steps]
    finally:
        scorer.close()


def fitted(surface: Surface, trials: Sequence[Trial]) -> tuple[RateModel, Fitted]:
    """Fit the sampler's model to the trials."""
    model = RateModel(surface.space)
    for trial in trials:
        seen = observation(trial)
        if seen is not None:
            model.add(seen)
    return model, model.fit(NOISE_SD)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("surface", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    surface, _ = open_surface(options.surface)
    trials = trials_of(surface)
    model, known = fitted(surface, trials)
    best = max((t for t in trials if t.score), key=lambda t: t.score or 0.0).config
    workers = [int(v) for v in surface.space.legal("num_workers")]
    with drawing(options.picture, 1, width=7.2) as (axis,):
        for precision, colour in (("fp32", "tab:blue"), ("bf16", "tab:orange")):
            line = [_with(surface, best, precision, count) for count in workers]
            _draw(axis, model, known, line, workers, colour, precision)
            _dots(axis, surface, line, workers, colour)
        _ceilings(axis, surface, [_with(surface, best, str(best["precision"]), count) for count in workers], workers)
        places = [workers.index(int(t.config["num_workers"])) for t in trials]
        rates = [t.rate_per_s or np.nan for t in trials]
        axis.plot(places, rates, "o", ms=13, mfc="none", mec="black", mew=1.2, label=f"the {len(trials)} trials")
        axis.set(yscale="log", xlabel="num_workers", ylabel="samples per second")
        axis.set_xticks(range(len(workers)), [str(w) for w in workers])
        ticks = [30, 60, 125, 250, 500, 1000]
        axis.set_yticks(ticks, [str(t) for t in ticks], minor=False)
        axis.set_yticks([], minor=True)
        axis.grid(alpha=0.3, which="both", lw=0.4)
        axis.legend(fontsize=8)


def _with(surface: Surface, best: Mapping[str, Value], precision: str, workers: int) -> dict[str, Value]:
    """Return the best configuration with another precision and number of workers."""
    complete = {n: surface.space.legal(n)[0] for n in surface.space.choices} | dict(best)
    return canonical({**complete, "precision": precision, "num_workers": workers})


def _draw(
    axis: Any, model: RateModel, known: Fitted, line: list[dict[str, Value]], workers: list[int], colour: str, name: str
) -> None:
    rng = np.random.default_rng(0)
    drawn = np.exp(known.drawn(DRAWS, rng)(model.pool(line)))
    low, middle, high = np.quantile(drawn, (0.1, 0.5, 0.9), axis=1)
    places = range(len(workers))
    axis.plot(places, middle, color=colour, lw=1.6, label=f"{name}, as expected after {len(known.seen)} trials")
    axis.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)


def _dots(axis: Any, surface: Surface, line: list[dict[str, Value]], workers: list[int], colour: str) -> None:
    for place, config in enumerate(line):
        for row in surface.launches.get(key(config), ()):
            axis.plot(place, row.rate_per_s or np.nan, ".", color=colour, ms=7)


def _ceilings(axis: Any, surface: Surface, line: list[dict[str, Value]], workers: list[int]) -> None:
    """Draw the measured rate of each side alone."""
    for kind, part, style, name in (
        (LaunchKind.DEVICE_ONLY, device_part, "--", "the device alone"),
        (LaunchKind.LOADER_ONLY, loader_part, ":", "the loader alone"),
    ):
        rows = [surface.ceilings.get((kind, key(part(config))), ()) for config in line]
        rates = [some[0].rate_per_s if some else np.nan for some in rows]
        axis.plot(range(len(workers)), rates, style, color="0.4", lw=1.2, label=name)


if __name__ == "__main__":
    main()
