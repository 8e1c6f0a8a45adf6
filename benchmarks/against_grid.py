"""Does a five-minute search find what trying a hundred configurations finds?

    python -m benchmarks.against_grid [--searches 3] [--budget 5m] [--rounds 12] [--markdown FILE]

Searches for ResNet-18 alternate with parts of a grid of a hundred of its configurations: a search, a third of the grid,
a search, and so on. Then the winner of each search and the three best of the grid are launched in interleaved rounds,
because the best of a hundred single launches is mostly luck. Run nothing else meanwhile; on two cores it takes about
forty minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune import stats
from autotune.base.parsing import duration_s
from autotune.base.records import Config, LaunchKind, Value
from autotune.knobs import spell
from autotune.space import Space, canonical, key
from autotune.study.launches import LaunchConditions
from benchmarks.designs import GRID
from benchmarks.surfaces import Planned, Recorder
from benchmarks.tables import ResultTable, met

GOAL = 0.97
TOP = 3


def searched(number: int, budget: str, folder: Path, *, allow_busy: bool) -> dict[str, Value]:
    """Run a search through the command line and return its winner.

    Raises:
        SystemExit: the search failed.
    """
    command = [
        *(sys.executable, "-P", "-m", "autotune", "search", "--model", GRID.workload),
        *("--image-size", str(GRID.image_size), "--budget", budget, "--seed", str(number), "--json"),
        *("--studies-dir", str(folder / f"studies-{number}")),
        *(["--allow-busy"] if allow_busy else []),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"search {number} ended with exit code {done.returncode}")
    config: dict[str, Value] = json.loads(done.stdout)["best"]["config"]
    return canonical(config)


def told(config: Config, space: Space) -> str:
    """Describe what differs from the baseline."""
    changed = [f"{n}={spell(v)}" for n, v in config.items() if space.baseline.get(n) != v]
    return " ".join(changed) or "the baseline"


class Grid:
    """Launches of the grid, one part at a time."""

    def __init__(self, recorder: Recorder, conditions: LaunchConditions) -> None:
        self._recorder = recorder
        self._conditions = conditions
        self._number = 0
        self.rates: dict[str, float] = {}
        self.configs: dict[str, dict[str, Value]] = {}

    def launch(self, config: dict[str, Value]) -> float | None:
        """Return the rate of one launch, or ``None`` if it failed."""
        self._number += 1
        planned = Planned(LaunchKind.MEASURE, config)
        row = self._recorder.launch(self._number, planned, self._conditions, time.monotonic())
        return row.rate_per_s

    def part(self, configs: list[dict[str, Value]]) -> None:
        """Launch each of these configurations once."""
        for config in configs:
            rate = self.launch(config)
            if rate is not None:
                self.rates[key(config)] = rate
                self.configs[key(config)] = config

    def best(self, count: int) -> list[dict[str, Value]]:
        """Return the fastest configurations so far."""
        ranked = sorted(self.rates, key=lambda name: -self.rates[name])
        return [self.configs[name] for name in ranked[:count]]


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--searches", type=int, default=3)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--configurations", type=int, default=100, help="fewer only to see that it runs")
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--allow-busy", action="store_true", help="only to see that it runs")
    options = parser.parse_args()
    duration_s(options.budget)
    with tempfile.TemporaryDirectory(prefix="autotune-grid-") as name:
        folder = Path(name)
        recorder = Recorder(GRID, folder / "unused", folder, allow_busy=options.allow_busy)
        try:
            table = compared(recorder, folder, options)
        finally:
            recorder.launcher.close()
    table.show(options.markdown)


def compared(recorder: Recorder, folder: Path, options: argparse.Namespace) -> ResultTable:
    """Alternate searches and grid, then compare their best in interleaved rounds."""
    conditions, space = recorder.conditions()
    grid = Grid(recorder, conditions)
    configurations = GRID.shuffled()[: options.configurations]
    found: list[dict[str, Value]] = []
    for number in range(options.searches):
        found.append(searched(number, options.budget, folder, allow_busy=options.allow_busy))
        print(f"search {number}: {told(found[-1], space)}", file=sys.stderr)
        grid.part(configurations[number :: options.searches])
        print(f"grid: {len(grid.rates)} configurations", file=sys.stderr)
    field = {key(config): config for config in [*found, *grid.best(TOP)]}
    rows: dict[str, list[float | None]] = {one: [] for one in field}
    for number in range(options.rounds):
        for one in list(field) if number % 2 == 0 else list(reversed(field)):
            rows[one].append(grid.launch(field[one]))
    result = stats.compare_rounds(rows, prior=stats.PRIORS["cpu"])
    best = max((key(c) for c in grid.best(TOP)), key=lambda one: result.rate(one).per_s)
    table = ResultTable(
        f"Searches of {options.budget} against a grid of {len(grid.rates)}: {GRID.workload}, {GRID.image_size} px",
        ("", "changed from the baseline", "samples/s", "of the grid's best (95 %)", f"goal {GOAL:g}"),
    )
    for number, config in enumerate(found):
        table.add(f"search {number}", told(config, space), *_cells(result, key(config), best))
    for number, config in enumerate(grid.best(TOP)):
        one = key(config)
        table.add(f"the grid's number {number + 1}", told(config, space), *_cells(result, one, best)[:2], "")
    table.notes.append(
        f"{options.rounds} launches of each in turns. The grid's best is the fastest of its {TOP} in these launches."
    )
    return table


def _cells(result: stats.ComparedRounds[str], one: str, best: str) -> tuple[str, str, str]:
    ratio, low, high = (1.0, 1.0, 1.0) if one == best else result.ratio(one, best)
    return f"{result.rate(one).per_s:.1f}", f"{ratio:.3f} ({low:.3f} to {high:.3f})", met(ratio >= GOAL)


if __name__ == "__main__":
    main()
