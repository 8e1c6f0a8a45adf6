"""What heats are worth: how many configurations a minute, how precise their ratios are, and whether they are biased.

    python -m benchmarks.heats [--model resnet18] [--image-size 96] [--equals 12] [--alone 20] [--order 5]
                               [--turns FILE] [--markdown FILE]

*Speed*: a heat of 20 configurations (precision × format × batch size × optimizer) as in a search of ten minutes,
everything included, and how precise it was. *Equals*: heats
of eight entrants that are the same configuration, at most forty seconds each; their ratios are 1 in truth. *Alone*:
twenty configurations, each launched alone on resident batches before and after a heat of them all. *Order*: eight
configurations, twelve long launches of each in turns, and whether single heats put those that differ by 3 % or more in
the same order. `--turns` keeps the seconds of every turn of the heats of equals, as JSON lines. Run nothing else
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

from autotune import stats
from autotune.base.clock import SystemClock
from autotune.base.records import (
    Config,
    DataRef,
    Heat,
    HeatPlan,
    LaunchKind,
    MeasurePlan,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
)
from autotune.launcher import ProcessLauncher
from autotune.machine.host import read_host
from autotune.study.launches import heat_plan_for
from autotune.workload.catalog import find_workload
from benchmarks.launching import measurement_of, plain_config, run
from benchmarks.tables import ResultTable

BATCH_SIZE = 32
#: What a heat of a search of ten minutes ends by: another round is to be worth as much per second as the last trials,
#: which bring half a per cent in eight seconds.
SEARCH_S, WORTH_PER_S = 600.0, 0.005 / 8
#: No heat of equals ends before its time is up: what is left of 40 s after its start.
NEVER, EQUALS_S = 1e-9, 36.0
#: Configurations that differ by less are not expected to be put in order, and the launches that tell.
APART, LONG_LAUNCHES = 0.03, 12


class Bench:
    """Launches of one workload on synthetic data.

    Args:
        model: of the catalog.
    """

    def __init__(self, launcher: ProcessLauncher, folder: Path, model: str, image_size: int) -> None:
        self._launcher = launcher
        self._folder = folder
        self._workload = find_workload(model, {})
        self._image_size = image_size
        self._number = 0

    def launch(
        self,
        kind: LaunchKind,
        config: Config,
        *,
        plan: MeasurePlan | None = None,
        heat: HeatPlan | None = None,
    ) -> TrialResult:
        """Run one launch."""
        self._number += 1
        name = f"{self._number:04d}"
        spec = TrialSpec(
            kind=kind,
            launch=name,
            folder=str(self._folder / name),
            workload=self._workload,
            data=DataRef(kind="synthetic"),
            config=dict(config),
            seed=self._number,
            batch_size=int(config["batch_size"]),
            image_size=self._image_size,
            plan=plan or MeasurePlan(),
            heat=heat,
        )
        return run(self._launcher, spec)

    def heat(self, plan: HeatPlan) -> tuple[Heat, float]:
        """Run a heat; return it and its wall seconds.

        Raises:
            SystemExit: it did not end well.
        """
        began = time.monotonic()
        result = self.launch(LaunchKind.HEAT, plan.entrants[0], heat=plan)
        if result.heat is None:
            raise SystemExit(f"the heat ended as {result.status}: {result.cause}")
        return result.heat, time.monotonic() - began

    def alone(self, config: Config) -> float:
        """Return the samples per second of a launch without a loader."""
        plan = MeasurePlan(max_measure_s=5.0, target_halfwidth=0.005)
        return measurement_of(self.launch(LaunchKind.DEVICE_ONLY, config, plan=plan)).samples_per_s


def configurations() -> list[dict[str, Value]]:
    """Return 20 configurations that one training can be switched between; the first is PyTorch's default."""
    base = {**plain_config(BATCH_SIZE, read_host().cores), "optimizer_impl": "foreach"}
    found = [
        {**base, "precision": p, "memory_format": f, "batch_size": b}
        for p in ("fp32", "bf16")
        for f in ("contiguous", "channels_last")
        for b in (BATCH_SIZE // 2, BATCH_SIZE, 2 * BATCH_SIZE, 4 * BATCH_SIZE)
    ]
    best: dict[str, Value] = {**base, "precision": "bf16", "memory_format": "channels_last"}
    found += [{**best, "batch_size": b, "optimizer_impl": o} for b in (32, 64) for o in ("for-loop", "fused")]
    return sorted(found, key=lambda config: config != base)


def speed(bench: Bench, table: ResultTable) -> None:
    """Compare all configurations in one heat."""
    entrants = configurations()
    plan = heat_plan_for(SEARCH_S, entrants, "cpu").model_copy(update={"least_per_s": WORTH_PER_S})
    found, wall_s = bench.heat(plan)
    turns = sum(turn is not None for e in found.entrants for turn in e.turns)
    wide = [
        (e.ratio_ci95[1] - e.ratio_ci95[0]) / 2 / e.ratio
        for e in found.entrants[1:]
        if e.status is TrialStatus.COMPLETE and e.ratio is not None and e.ratio_ci95 is not None
    ]
    told = f"; ratios of the {len(wide)} that did not drop out ± {100 * fmean(wide):.1f} %" if wide else ""
    table.add(
        "configurations compared per minute",
        "≥ 20",
        f"{60 * len(entrants) / wall_s:.0f} ({len(entrants)} in {wall_s:.1f} s, {turns} turns, {found.ended}{told})",
    )


def equals(bench: Bench, table: ResultTable, repeats: int, turns: Path | None) -> None:
    """Compare a configuration with itself, and append the seconds of the turns to a file."""
    same = (configurations()[-1],) * 8
    logs: list[float] = []
    inside = 0
    walls, noises = [], []
    for _ in range(repeats):
        found, wall_s = bench.heat(HeatPlan(entrants=same, max_s=EQUALS_S, settled=NEVER))
        walls.append(wall_s)
        noises.append(found.noise_sd)
        rows = {
            i: [None if t is None else t.samples / t.seconds for t in e.turns] for i, e in enumerate(found.entrants)
        }
        if turns is not None:
            seconds = [[None if t is None else round(t.seconds, 6) for t in e.turns] for e in found.entrants]
            with turns.open("a") as out:
                out.write(json.dumps(seconds) + "\n")
        compared = stats.compare_rounds(rows, prior=stats.PRIORS["cpu"], robust=True)
        # Pairs that share nobody are independent of each other.
        for one in range(0, len(same), 2):
            ratio, low, high = compared.ratio(one, one + 1)
            logs.append(math.log(ratio))
            inside += low <= 1 <= high
    pairs = f"over {len(logs)} pairs; noise of a turn {100 * min(noises):.1f} to {100 * max(noises):.1f} %"
    table.add("equals: spread of the ratio (1 sd)", "≤ 1.5 %", f"{100 * stdev(logs):.2f} % {pairs}")
    table.add("equals: coverage of its 95 % interval", "92–98 %", f"{100 * inside / len(logs):.1f} %")
    table.add("equals: seconds of a heat of eight", "≤ 40 s", f"{fmean(walls):.1f} s (most: {max(walls):.1f} s)")


def alone(bench: Bench, table: ResultTable, count: int) -> None:
    """Compare the rates in a heat with those of launches alone."""
    entrants = tuple(configurations()[:count])
    before = [bench.alone(config) for config in entrants]
    found, _ = bench.heat(HeatPlan(entrants=entrants))
    after = [bench.alone(config) for config in entrants]
    logs = []
    for entrant, first, second in zip(found.entrants, before, after, strict=True):
        turns = [turn for turn in entrant.turns if turn is not None]
        if turns:
            own = fmean(math.log(turn.samples / turn.seconds) for turn in turns)
            logs.append(own - fmean((math.log(first), math.log(second))))
    error = stdev(logs) / math.sqrt(len(logs))
    bias = f"{100 * fmean(logs):+.2f} ± {100 * error:.2f} % (1 se) over {len(logs)} configurations"
    table.add("rate in a heat against alone, mean", "within 1 %", bias)


def order(bench: Bench, table: ResultTable, heats: int) -> None:
    """Compare the order in single heats with that of long launches in turns."""
    every = [c for c in configurations() if c["batch_size"] in (BATCH_SIZE, 2 * BATCH_SIZE)]
    entrants = tuple(every[:8])
    rows: dict[int, list[float | None]] = {i: [] for i in range(len(entrants))}
    for number in range(LONG_LAUNCHES):
        for i in list(rows) if number % 2 == 0 else list(reversed(rows)):
            rows[i].append(bench.alone(entrants[i]))
    truth = stats.compare_rounds(rows, prior=stats.PRIORS["cpu"])
    right = pairs = 0
    for _ in range(heats):
        found, _ = bench.heat(HeatPlan(entrants=entrants))
        for i, j in combinations(rows, 2):
            expected = math.log(truth.ratio(i, j)[0])
            a, b = found.entrants[i].ratio, found.entrants[j].ratio
            if abs(expected) >= math.log1p(APART) and a is not None and b is not None:
                pairs += 1
                right += (a > b) == (expected > 0)
    share = f"{100 * right / max(1, pairs):.1f} % ({right} of {pairs} pairs, {heats} heats)"
    table.add(f"order: pairs that differ by ≥ {100 * APART:g} % in {LONG_LAUNCHES} long launches each", "≥ 95 %", share)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heats", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--equals", type=int, default=12, help="heats of equals; 0 leaves them out")
    parser.add_argument("--alone", type=int, default=20, help="configurations launched alone; 0 leaves them out")
    parser.add_argument("--order", type=int, default=5, help="heats whose order is looked at; 0 leaves them out")
    parser.add_argument("--turns", type=Path, help="file to append the turns of heats of equals to")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    table = ResultTable(f"Heats of {options.model} at {options.image_size} px", ("figure", "goal", "seen"))
    launcher = ProcessLauncher("benchmark-heats", SystemClock())
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(launcher, Path(folder), options.model, options.image_size)
            # The first launch of a template waits for the import of torch.
            bench.launch(LaunchKind.PROBE, configurations()[0])
            speed(bench, table)
            if options.equals:
                equals(bench, table, options.equals, options.turns)
            if options.alone:
                alone(bench, table, options.alone)
            if options.order:
                order(bench, table, options.order)
    finally:
        launcher.close()
    table.show(options.markdown)


if __name__ == "__main__":
    main()
