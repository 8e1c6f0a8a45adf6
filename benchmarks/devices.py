"""What several devices give a search.

    python -m benchmarks.devices replayed SURFACE… [--devices 1,2,4] [--seeds 20] [--budget 20m] [--sampler auto]
    python -m benchmarks.devices real [--cores 0,1] [--trials 16] [--budget 30m] [--rounds 3]

Before the kind, `--markdown FILE` names a file for the table.

`replayed` searches recorded surfaces in virtual time, in which launches on several devices do not disturb each other.
The answer is in hand when the regret of the configuration that the search would choose has fallen to 2 % for good, or
to what the recording can resolve (`benchmarks.search`).

`real` searches on single cores, in turns: one alone, and all of them in one search. All make the same number of trials.
Seconds are those from the first launch of the search to the end of the last one, without the proof, which always runs
alone and is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from autotune.base.errors import AutotuneError
from autotune.base.parsing import duration_s
from autotune.machine.cpu_load import parse_cores
from autotune.samplers import SAMPLERS
from autotune.search.replay.run import replay
from benchmarks.search import Run, judged, thresholds, throughput_scorer
from benchmarks.standins import open_surface
from benchmarks.tables import ResultTable, met, spread

#: Goals: the seconds of four devices to the answer, and those of two single cores, as parts of one's.
FOUR_GOAL, TWO_GOAL = 1 / 3, 0.6
#: Exit code of a search that SIGINT has ended.
INTERRUPTED = 130
_WORKLOAD = Path(__file__).parent / "workloads" / "small_conv.py"


def one(path: Path, budget_s: float, sampler: str, case: tuple[int, int]) -> Run:
    """Replay one search.

    Args:
        case: number of devices, and seed.
    """
    devices, seed = case
    surface, truth = open_surface(path)
    found = replay(surface, throughput_scorer(), budget_s=budget_s, sampler=sampler, seed=seed, devices=devices)
    return judged(surface, truth, found, 0.0)


def replayed(paths: Sequence[Path], counts: Sequence[int], seeds: int, budget_s: float, sampler: str) -> ResultTable:
    """Replay searches with different numbers of devices."""
    columns = ("surface", "devices", "seconds to the answer", "of one device's", "goal", "regret at the end", "trials")
    found = ResultTable(f"Searches on several devices, replayed, with --sampler {sampler}", columns)
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for path in paths:
            _, truth = open_surface(path)
            level = thresholds(truth)[1]
            cases = list(product(counts, range(seeds)))
            runs = dict(zip(cases, pool.map(partial(one, path, budget_s, sampler), cases), strict=True))
            alone_s = median(runs[counts[0], seed].reached_s(level) for seed in range(seeds))
            for count in counts:
                some = [runs[count, seed] for seed in range(seeds)]
                seconds = median(r.reached_s(level) for r in some)
                part = seconds / alone_s if math.isfinite(seconds) else math.inf
                goal = part <= FOUR_GOAL if count == 4 and counts[0] == 1 else None
                found.add(
                    path.stem,
                    str(count),
                    "never" if math.isinf(seconds) else f"{seconds:.0f} s",
                    "" if math.isinf(part) else f"{part:.2f}",
                    met(goal),
                    f"{100 * max(0.0, median(r.end for r in some)):.2f} %",
                    f"{median(r.trials for r in some):.0f}",
                )
    found.notes.append(
        f"Medians over {seeds} seeds; budget {budget_s / 60:g} minutes. Each search begins with the baseline's trial, "
        f"which runs alone. Goal: four devices have the answer in a third of the seconds of one."
    )
    return found


def searched(folder: Path, devices: str, trials: int, options: Sequence[str]) -> float:
    """Search until so many trials are made at most, and end before the proof; return the seconds of searching.

    Raises:
        SystemExit: the search failed.
    """
    command = [sys.executable, "-m", "autotune", "search", "--model", str(_WORKLOAD), "--devices", devices]
    words = [*command, "--study", "s", "--trials", str(trials), "--fix", "compile_mode=off", *options]
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            # The first launch after searching, whatever has ended it.
            if "for comparison" in line or "again, launch" in line:
                process.send_signal(signal.SIGINT)
    if process.returncode != INTERRUPTED:
        raise SystemExit(f"the search on {devices} ended with exit code {process.returncode}")
    with contextlib.closing(sqlite3.connect(folder / "studies" / "s" / "study.db")) as connection:
        (seconds,) = connection.execute(
            "select max(began_s + wall_s) - min(began_s) from autotune_launches "
            "where trial is not null or launch glob 'heat-*'"
        ).fetchone()
    return float(seconds)


def real(cores: Sequence[int], trials: int, rounds: int, options: Sequence[str]) -> ResultTable:
    """Search on one core and on several, in turns."""
    found = ResultTable(f"Searches of {trials} trials on single cores", ("devices", "searching", "of one", "goal"))
    cases = [f"cpu:{cores[0]}", ",".join(f"cpu:{core}" for core in cores)]
    seen: dict[str, list[float]] = {case: [] for case in cases}
    for turn in range(rounds):
        for case in cases if turn % 2 == 0 else reversed(cases):
            with tempfile.TemporaryDirectory() as folder:
                seen[case].append(searched(Path(folder), case, trials, options))
            print(f"{case}: {seen[case][-1]:.0f} s", file=sys.stderr)
    for case in cases:
        part = median(seen[case]) / median(seen[cases[0]])
        goal = part <= TWO_GOAL if case == cases[1] and len(cores) == 2 else None
        found.add(case, spread(seen[case], lambda s: f"{s:.0f} s"), f"{part:.2f}", met(goal))
    found.notes.append(f"Goal for two cores: {TWO_GOAL:g} of the seconds of one. {rounds} rounds, in turns.")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Show what several devices give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, default=None)
    kinds = parser.add_subparsers(dest="kind", required=True)
    virtual = kinds.add_parser("replayed")
    virtual.add_argument("surfaces", type=Path, nargs="+", metavar="SURFACE")
    virtual.add_argument("--devices", default="1,2,4")
    virtual.add_argument("--seeds", type=int, default=20)
    virtual.add_argument("--budget", type=duration_s, default=1200.0)
    virtual.add_argument("--sampler", default="auto", help=f"of {', '.join(SAMPLERS)}")
    here = kinds.add_parser("real")
    here.add_argument("--cores", type=parse_cores, default=(0, 1))
    here.add_argument("--trials", type=int, default=16)
    here.add_argument("--budget", default="30m", help="large enough for that number of trials on one core")
    here.add_argument("--rounds", type=int, default=3)
    here.add_argument("--allow-busy", action="store_true", help="only to see whether this runs")
    options = parser.parse_args(arguments)
    try:
        if options.kind == "replayed":
            counts = [int(part) for part in options.devices.split(",")]
            found = replayed(options.surfaces, counts, options.seeds, options.budget, options.sampler)
        else:
            more = ["--budget", options.budget, *(["--allow-busy"] if options.allow_busy else [])]
            found = real(options.cores, options.trials, options.rounds, more)
    except AutotuneError as error:
        raise SystemExit(str(error)) from error
    found.show(options.markdown)


if __name__ == "__main__":
    main()
