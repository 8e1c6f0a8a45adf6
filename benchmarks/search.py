"""How fast does each sampler find a good configuration? Replays real searches on recorded surfaces.

    python -m benchmarks.search SURFACE… [--samplers auto,tpe,…] [--seeds 50] [--budget 20m] [--markdown FILE] [--plot
    FILE]

Every sampler works under the same conditions: the baseline as trial 0, only legal and new configurations, the same
pruning, measurement and budget, and the recorded launches, shuffled by the seed. Regret is the gap between the
configuration the search would choose at a given time and the surface's best, as a fraction of the best, using the
smoothed rates of `benchmarks.truth`. If the recording cannot resolve a threshold, twice the standard error of a
configuration's rate relative to the best one's replaces it. Seconds are those that the search would have taken on the
recorded machine.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

from autotune.base.errors import AutotuneError
from autotune.base.parsing import duration_s
from autotune.base.records import Phase, TrialStatus
from autotune.samplers import SAMPLERS
from autotune.search.replay import Row, Surface
from autotune.search.replay.run import Replayed, replay
from autotune.space import device_part, key
from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer
from benchmarks.curves import plot
from benchmarks.standins import open_surface
from benchmarks.tables import ResultTable
from benchmarks.truth import Truth

SAMPLERS_COMPARED = ("auto", "tpe", "tpe-multivariate", "gp", "random")
#: Optuna's GP takes seconds per proposal.
MOST_SEEDS = {"gp": 20}
THRESHOLDS = (0.05, 0.02, 0.01)
#: Goal: how many times faster auto is than the best of the other samplers.
SPEEDUP_GOAL = 5.0


@dataclass(frozen=True)
class Run:
    """One replayed search.

    Attributes:
        curve: ``(seconds, regret)`` whenever the current best configuration changed. Regret is infinite before the
            first.
        end: regret of the final winner, after the race. searched_s: until the search ended by itself or ran out of
            budget.
        ooms, trials: counts. compared: configurations in heats. memory: predicted over measured peak of the winner, if
            known.
        proposal_s: real time of the search's own work, per trial.
    """

    curve: tuple[tuple[float, float], ...]
    end: float
    searched_s: float
    by_itself: bool
    ooms: int
    trials: int
    compared: int
    memory: float | None
    proposal_s: float

    def reached_s(self, regret: float) -> float:
        """Return when the regret fell to this level for good; infinity if never."""
        since = math.inf
        for at, r in self.curve:
            since = min(since, at) if r <= regret else math.inf
        return since

    def regret_at(self, at_s: float) -> float:
        found = [r for at, r in self.curve if at <= at_s]
        return found[-1] if found else math.inf


def one(path: Path, sampler: str, budget_s: float, seed: int) -> Run:
    """Replay one search."""
    surface, truth = open_surface(path)
    scorer = throughput_scorer()
    began = time.perf_counter()
    found = replay(surface, scorer, budget_s=budget_s, sampler=sampler, seed=seed)
    took_s = time.perf_counter() - began
    return judged(surface, truth, found, took_s)


_SCORERS: list[Scorer] = []


def throughput_scorer() -> Scorer:
    """One scorer per process; its child ends with it."""
    if not _SCORERS:
        _SCORERS.append(Scorer(find_objective("throughput")))
    return _SCORERS[0]


def judged(surface: Surface, truth: Truth, found: Replayed, took_s: float) -> Run:
    """Evaluate a replayed search."""
    configs = {s.trial.number: key(s.trial.config) for s in found.steps}
    curve: list[tuple[float, float]] = []
    for step in found.steps:
        if step.believed is not None:
            regret = truth.regret(configs[step.believed])
            if not curve or curve[-1][1] != regret:
                curve.append((step.ended_s, regret))
    winner = key(found.best.config)
    statuses = [s.trial.result.status for s in found.steps]
    return Run(
        curve=tuple(curve),
        end=truth.regret(winner),
        searched_s=found.searched_s,
        by_itself="budget" not in found.stopped,
        ooms=sum(s in (TrialStatus.OOM, TrialStatus.HOST_OOM) for s in statuses),
        trials=len(statuses),
        compared=sum(len(heat.heat.entrants) - 1 for heat in found.heats),
        memory=_memory(found, winner),
        proposal_s=took_s / max(1, len(statuses)),
    )


def _memory(found: Replayed, winner: str) -> float | None:
    step = next(s for s in found.steps if key(s.trial.config) == winner)
    told = step.trial.predicted.peak_bytes if step.trial.predicted else None
    measurement = step.trial.result.measurement
    if told is None or measurement is None or not measurement.peak_bytes:
        return None
    return told / measurement.peak_bytes


def peak_sd(surface: Surface) -> float:
    """Return the pooled standard deviation of the log peak memory of launches of the same configuration."""
    complete = [[r for r in rows if r.status is TrialStatus.COMPLETE] for rows in surface.launches.values()]
    groups = [[math.log(r.peak_bytes) for r in rows if r.peak_bytes] for rows in complete]
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return 0.0
    squares = sum((x - fmean(group)) ** 2 for group in repeated for x in group)
    return math.sqrt(squares / sum(len(group) - 1 for group in repeated))


def soonest_s(surface: Surface, truth: Truth, regret: float) -> float:
    """Return a lower bound on the seconds to this regret: the baseline's trial, and the shortest trial that reaches it.
    It stands for a sampler that knows the answer and only has to measure it."""

    def trial_s(name: str) -> float:
        return fmean(row.wall_s - _compile_s(row) + _cold_s(surface, row) for row in surface.launches[name])

    good = [name for name in truth.log_rate if truth.regret(name) <= regret]
    own = key(surface.space.baseline)
    return trial_s(own) + (0.0 if own in good else min(trial_s(name) for name in good))


def _compile_s(row: Row) -> float:
    return row.phase_s.get(Phase.COMPILE, 0.0)


def _cold_s(surface: Surface, row: Row) -> float:
    """Return the compile time with a cold cache, with which every replayed search starts."""
    cold = surface.compile_seconds.get((key(device_part(row.config)), False), ())
    return median(cold) if cold and row.config.get("compile_mode", "off") != "off" else _compile_s(row)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that is at least as large as this fraction of all values."""
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1 if part else 0)]


def thresholds(truth: Truth) -> list[float]:
    """Return the thresholds, each at least twice the standard error of a configuration's rate."""
    return [max(t, 2 * truth.se) for t in THRESHOLDS]


COLUMNS = (
    "sampler",
    "seconds to 5 %",
    "to 2 %",
    "to 1 %",
    "regret at the end: median",
    "p90",
    "worst",
    "searched",
    "trials",
    "compared in heats",
    "OOMs a search",
    "searches with one",
    "peak memory off by",
)


def table(surface: Surface, truth: Truth, runs: dict[str, list[Run]], budget_s: float) -> ResultTable:
    """Return the results for one surface."""
    h = surface.heading
    found = ResultTable(f"{h.name}: {h.workload} ({h.made}; {len(truth.log_rate)} configurations that train)", COLUMNS)
    levels = thresholds(truth)
    for sampler, some in runs.items():
        reached = [median(r.reached_s(level) for r in some) for level in levels]
        ends = [r.end for r in some]
        off = [abs(r.memory - 1) for r in some if r.memory is not None]
        found.add(
            f"{sampler} ({len(some)} seeds)",
            *(_seconds(s) for s in reached),
            *(f"{100 * max(0.0, quantile(ends, q)):.2f} %" for q in (0.5, 0.9, 1.0)),
            f"{median(r.searched_s for r in some):.0f} s",
            f"{median(r.trials for r in some):.0f}",
            f"{median(r.compared for r in some):.0f}",
            f"{sum(r.ooms for r in some) / len(some):.2f}",
            f"{100 * sum(r.ooms > 0 for r in some) / len(some):.0f} %",
            f"{100 * median(off):.1f} % (worst {100 * max(off):.1f} %)" if off else "",
        )
    told = ", ".join(f"{100 * t:g} % → {100 * level:.2g} %" for t, level in zip(THRESHOLDS, levels, strict=True))
    found.notes.append(
        f"Launches of equals differ by {100 * truth.noise_sd:.2g} %; a configuration's rate is known to "
        f"{100 * truth.se:.2g} % (1 se), so that the thresholds are {told}. Budget {budget_s / 60:g} minutes, of which "
        f"searching may use 40 %. Medians over seeds. Seconds end with the search; the race comes after them. "
        + (f"Peaks of equals differ by {100 * peak_sd(surface):.2g} %." if surface.heading.made == "recorded" else "")
    )
    found.notes.append(_compared(runs, levels[1], soonest_s(surface, truth, levels[1])))
    return found


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f} s"


def _compared(runs: dict[str, list[Run]], level: float, least_s: float) -> str:
    """Describe how many times faster auto is than the best of the others, and the upper bound for any sampler."""
    others = {n: median(r.reached_s(level) for r in some) for n, some in runs.items() if n not in ("auto", "random")}
    if "auto" not in runs or not others:
        return "No comparison: only one sampler."
    own = median(r.reached_s(level) for r in runs["auto"])
    best = min(others, key=lambda n: others[n])
    if math.isinf(own):
        return f"To {100 * level:.2g} % regret auto never got (goal {SPEEDUP_GOAL:g}×: NOT MET)."
    ratio = others[best] / own
    told = "they did not get there" if math.isinf(ratio) else f"{ratio:.1f}×"
    found = (
        f"To {100 * level:.2g} % regret auto needs {_seconds(own)}, the best of the others ({best}) "
        f"{_seconds(others[best])}: {told} (goal {SPEEDUP_GOAL:g}×: {'met' if ratio >= SPEEDUP_GOAL else 'NOT MET'})."
    )
    if math.isinf(ratio):
        return found
    return (
        f"{found} The baseline's trial and the shortest one that gets there take {_seconds(least_s)} together: who "
        f"knew the answer would be there {others[best] / least_s:.1f}× sooner than {best}."
    )


def run_all(
    path: Path, samplers: Sequence[str], seeds: int, budget_s: float, say: Callable[[str], None]
) -> dict[str, list[Run]]:
    """Run every sampler's searches on one surface."""
    found = {}
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for sampler in samplers:
            began = time.perf_counter()
            count = min(seeds, MOST_SEEDS.get(sampler, seeds))
            found[sampler] = list(pool.map(partial(one, path, sampler, budget_s), range(count)))
            per_trial = median(r.proposal_s for r in found[sampler])
            say(
                f"{path.stem}: {sampler}, {count} searches in {time.perf_counter() - began:.0f} s, "
                f"{1e3 * per_trial:.0f} ms of real time a trial"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare samplers on surfaces."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("surfaces", type=Path, nargs="+", metavar="SURFACE")
    parser.add_argument("--samplers", default=",".join(SAMPLERS_COMPARED), help=f"of {', '.join(SAMPLERS)}")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--budget", type=duration_s, default=1200.0)
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="an SVG with a panel for each surface")
    options = parser.parse_args(arguments)
    samplers = options.samplers.split(",")
    panels, texts = [], []
    for path in options.surfaces:
        try:
            surface, truth = open_surface(path)
            runs = run_all(path, samplers, options.seeds, options.budget, lambda s: print(s, file=sys.stderr))
        except AutotuneError as error:
            raise SystemExit(str(error)) from error
        shown = table(surface, truth, runs, options.budget)
        shown.show(None)
        texts.append(shown.as_markdown())
        panels.append((surface.heading.name, runs))
    if options.markdown is not None:
        options.markdown.write_text("\n".join(texts))
    if options.plot is not None:
        plot(options.plot, panels)


if __name__ == "__main__":
    main()
