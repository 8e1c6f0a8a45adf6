"""Does the 95 % interval hold 95 % of the time? Compares real launches of one configuration with each other.

    python -m benchmarks.coverage record FILE [--pairs 100]
    python -m benchmarks.coverage report FILE [--markdown FILE]
    python -m benchmarks.coverage simulate FILE [--pairs 10000] [--markdown FILE]

`record` makes 200 short launches of `workloads/small_conv.py`, each in a forked child, and appends each to FILE as it
ends; a second call continues an interrupted recording. It takes about ten minutes; run nothing else meanwhile. The
other commands only compute: all launches have the same true rate, so an interval of a ratio that excludes 1 is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median

from autotune import stats
from autotune.base.clock import SystemClock
from autotune.launcher import ProcessLauncher
from autotune.machine.host import read_host
from autotune.study.launches import BUSY_FRACTION, plan_for
from benchmarks.noise_model import Noise, fit, simulate
from benchmarks.recording import RecordedLaunch, read, record
from benchmarks.tables import ResultTable, met

#: Goals: percentage of intervals that contain 1, for 100 recorded pairs and for thousands of simulated ones.
RECORDED_GOAL, SIMULATED_GOAL = (90.0, 99.0), (94.0, 96.0)
#: Number of other pairs from which a pair's launch noise is estimated.
OTHERS = 10
#: A block of interleaved launches, as in a verification.
CONTENDERS, ROUNDS = 3, 4
#: Number of pairs simulated together; each learns its noise from the others.
PAIRS_AT_ONCE = 100
COLUMNS = ("interval of the ratio of two equals", "holds 1", "", "goal", "", "half-width, median")


@dataclass
class Count:
    """Counts intervals and those that contain 1, and collects half-widths."""

    held: int = 0
    halfwidths: list[float] = field(default_factory=list)

    def add(self, ratio: tuple[float, float, float]) -> None:
        centre, low, high = ratio
        self.held += low <= 1 <= high
        self.halfwidths.append((high - low) / 2 / centre)

    @property
    def of(self) -> int:
        return len(self.halfwidths)

    def row(self, name: str, goal: tuple[float, float] | None) -> tuple[str, ...]:
        """Return a row of `COLUMNS`."""
        if not self.of:
            return (name, "none", "", "", "", "")
        per_cent = 100 * self.held / self.of
        told = "" if goal is None else f"{goal[0]:g} to {goal[1]:g} %"
        holds = met(None if goal is None else goal[0] <= per_cent <= goal[1])
        return (
            name,
            f"{self.held} of {self.of}",
            f"{per_cent:.1f} %",
            told,
            holds,
            f"± {100 * median(self.halfwidths):.2f} %",
        )


@dataclass
class Counts:
    """Counts for the three ways to compare equal launches."""

    learnt: Count = field(default_factory=Count)
    windows: Count = field(default_factory=Count)
    rounds: Count = field(default_factory=Count)

    def add(self, rates: Sequence[stats.Rate]) -> None:
        """Add all comparisons that consecutive launches allow.

        Args:
            rates: with the intervals of their own windows, in chronological order; two make a pair.
        """
        pairs = list(zip(rates[::2], rates[1::2], strict=False))
        for i, (a, b) in enumerate(pairs):
            noise = learnt_from(pairs, i)
            self.learnt.add(stats.speedup(stats.mean_rate([a], noise), stats.mean_rate([b], noise)))
            self.windows.add(stats.speedup(a, b))
        size = CONTENDERS * ROUNDS
        for start in range(0, len(rates) - size + 1, size):
            rows = in_turns([r.per_s for r in rates[start : start + size]])
            compared = stats.compare_rounds(rows, prior=stats.PRIORS["cpu"])
            for first, second in combinations(range(CONTENDERS), 2):
                self.rounds.add(compared.ratio(first, second))

    def rows(self, goal: tuple[float, float]) -> Iterable[tuple[str, ...]]:
        yield self.learnt.row(f"pairs, launch noise learnt from {OTHERS} others", goal)
        yield self.windows.row("the same pairs, from their own windows alone", None)
        yield self.rounds.row(f"{CONTENDERS} contenders in {ROUNDS} rounds, each with each", None)


def learnt_from(pairs: Sequence[tuple[stats.Rate, stats.Rate]], own: int) -> stats.LaunchNoise:
    """Estimate the launch noise as a study does, from repeats around the same time: the next ten pairs, wrapping around
    at the end. The pair itself is excluded."""
    others = [pairs[(own + i) % len(pairs)] for i in range(1, min(OTHERS, len(pairs) - 1) + 1)]
    return stats.launch_noise(others, prior=stats.PRIORS["cpu"])


def in_turns(rates: Sequence[float]) -> dict[int, list[float | None]]:
    """Deal consecutive launches to contenders as a verification does: forward, backward, forward."""
    rows: dict[int, list[float | None]] = {i: [] for i in range(CONTENDERS)}
    for round_ in range(ROUNDS):
        launched = rates[round_ * CONTENDERS : (round_ + 1) * CONTENDERS]
        for i, rate in enumerate(launched if round_ % 2 == 0 else reversed(launched)):
            rows[i].append(rate)
    return rows


def report(launches: Sequence[RecordedLaunch], told: str) -> ResultTable:
    """Evaluate a recording."""
    counts = Counts()
    counts.add([one.rate for one in launches])
    table = ResultTable("Coverage of the 95 % interval, real launches", COLUMNS)
    table.rows += counts.rows(RECORDED_GOAL)
    pairs = [(a.rate, b.rate) for a, b in zip(launches[::2], launches[1::2], strict=False)]
    noise = stats.launch_noise(pairs, prior=stats.PRIORS["cpu"])
    own = [one.relative_se for one in launches if one.relative_se is not None]
    kept_s = median(sum(seconds for _, _, seconds in one.windows) for one in launches)
    table.notes += [
        f"{len(launches)} launches, {told}; medians: {median(len(one.windows) for one in launches):.0f} windows kept, "
        f"{kept_s:.1f} s, {median(one.wall_s for one in launches):.1f} s in all. "
        f"{sum(one.discarded for one in launches)} windows were discarded; "
        f"{sum(not one.settled for one in launches)} launches never settled.",
        f"The two of a pair differ by {100 * noise.sd:.2f} % (one standard deviation of one launch); their own windows "
        f"say {100 * median(own) if own else 0:.2f} % (median).",
        "The comparisons within a block of contenders share launches, so that they are not independent.",
    ]
    return table


def simulated(launches: Sequence[RecordedLaunch], pairs: int, seed: int) -> ResultTable:
    """Evaluate thousands of pairs simulated with the recording's noise, through the same code."""
    noise = fit(launches)
    table = ResultTable("Coverage of the 95 % interval, simulated with recorded noise", COLUMNS)
    for tails in (False, True):
        counts = Counts()
        rng = random.Random(seed)
        while counts.learnt.of < pairs:
            count = min(PAIRS_AT_ONCE, pairs - counts.learnt.of)
            counts.add(simulate(noise, 2 * count, rng, recorded_tails=tails))
        shape = "the recording's own tails" if tails else "normal"
        for name, *cells in counts.rows(SIMULATED_GOAL):
            # The goal applies to the fitted noise; the recorded tails show how much depends on the normal distribution.
            kept = cells if not tails else [*cells[:2], "", "", cells[4]]
            table.add(f"{name} ({shape})", *kept)
    table.notes.append(_told(noise))
    return table


def _told(noise: Noise) -> str:
    return (
        f"Noise: launches differ by {100 * noise.between_sd:.2f} % beyond what their windows explain, and drift by "
        f"{100 * noise.drift_sd:.3f} % from one to the next (nugget and slope of the variogram at lags 1 to 10). "
        f"Windows differ by {100 * noise.window_sd:.2f} % with a lag-1 correlation of {noise.correlation:.2f} "
        f"(moments, exact for short series); {median(noise.windows):.0f} of them a launch (drawn as recorded)."
    )


def main() -> None:
    """Record, report or simulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("do", choices=("record", "report", "simulate"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--pairs", type=int, default=None, help="100 to record, 10000 to simulate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--allow-busy",
        action="store_true",
        help="record windows too in which others used the cores: to see that it runs, on a machine that is not quiet",
    )
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    if options.do == "record":
        # A search's own plan, but with shorter windows: the minimum of five takes 1.5 s instead of 2.5.
        busy_cores = None if options.allow_busy else BUSY_FRACTION * read_host().cores
        plan = plan_for(60.0, busy_cores).model_copy(update={"min_window_s": 0.3})
        launcher = ProcessLauncher(uuid.uuid4().hex, SystemClock())
        try:
            with tempfile.TemporaryDirectory(prefix="autotune-coverage-") as folder:
                count = 2 * (options.pairs or 100)
                record(options.file, count, launcher, Path(folder), plan, lambda line: print(line, file=sys.stderr))
        finally:
            launcher.close()
        return
    heading, launches = read(options.file)
    table = (
        report(launches, f"plan of {heading.plan.max_measure_s:g} s at most")
        if options.do == "report"
        else simulated(launches, options.pairs or 10_000, options.seed)
    )
    table.notes.append(f"Recorded on: {heading.machine.removeprefix('Machine: ')}.")
    table.show(options.markdown)


if __name__ == "__main__":
    main()
