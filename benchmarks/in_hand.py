"""How soon do real searches have a configuration in hand that is nearly the best anyone found?

    python -m benchmarks.in_hand CASE… [--samplers auto,tpe,gp] [--searches 3] [--budget 6m] [--rounds 12]
                                 [--studies DIR] [--markdown FILE]

CASE is `device` (ResNet-18, the device is the limit), `store` (a small network on a store that delays every read) or
`folklore` (the same in memory: bf16 and larger batches are slower on some machines). Each sampler searches for each of
them several times, in turns, with the same baseline, legality, pruning and launches, until its searching ends; there is
no proof. At any moment the trial with the highest rate is in hand. All configurations that were ever in hand are then
launched in interleaved rounds, which tells what they are worth: one is nearly the best unless it is shown to be slower
than the best by more than 3 %. Run nothing else meanwhile; on two cores each case takes about forty minutes.
"""

from __future__ import annotations

import argparse
import math
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from autotune import stats
from autotune.base.layout import StudyFiles
from autotune.base.records import Config, LaunchKind, TrialStatus
from autotune.space import key
from autotune.study.tables import read_heats, read_trials
from benchmarks.against_grid import told
from benchmarks.designs import Design
from benchmarks.launching import WORKLOADS
from benchmarks.surfaces import Planned, Recorder
from benchmarks.tables import ResultTable

CASES = {
    one.name: one
    for one in (
        Design(name="device", workload="resnet18", data="synthetic", batch_size=16, image_size=64, blocks=()),
        Design(name="store", workload="slow_store", batch_size=16, image_size=64, blocks=()),
        Design(name="folklore", workload="slow_store", args={"wait_ms": "0"}, batch_size=64, image_size=64, blocks=()),
    )
}
#: The configuration in hand is to be within this of the best.
WITHIN = 0.03
#: What the log of a search says when its proof begins.
PROOF = ("eager fp32 for comparison", "checking that", "again, launch", "not checked for how")


@dataclass(frozen=True)
class Held:
    """A configuration that a search had in hand from a moment on.

    Attributes:
        since_s: seconds since the search's first launch.
    """

    since_s: float
    config: Config


def search(case: Design, sampler: str, seed: int, budget: str, folder: Path) -> StudyFiles:
    """Search until the proof begins, and return the study.

    Raises:
        SystemExit: the search failed.
    """
    own = WORKLOADS / f"{case.workload}.py"
    command = [
        *(sys.executable, "-P", "-m", "autotune", "search", "--model", str(own) if own.is_file() else case.workload),
        *(part for name, value in case.args.items() for part in ("--arg", f"{name}={value}")),
        *("--data", case.data, "--batch-size", str(case.batch_size), "--image-size", str(case.image_size)),
        *("--sampler", sampler, "--seed", str(seed), "--budget", budget, "--study", "one"),
        *("--studies-dir", str(folder)),
    ]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        if process.stderr is None:
            raise SystemExit("the search has no log")
        for line in process.stderr:
            lines.append(line)
            if any(mark in line for mark in PROOF):
                process.send_signal(signal.SIGINT)
                break
        process.stderr.read()
    if not any(mark in lines[-1] for mark in PROOF):
        raise SystemExit(f"the search ended before its proof: {''.join(lines[-3:])}")
    return StudyFiles(folder / "one")


def held(files: StudyFiles) -> list[Held]:
    """Return what a search had in hand, in order."""
    with closing(sqlite3.connect(files.database)) as database:
        rows = database.execute("select number, datetime_start, datetime_complete from trials").fetchall()
    times = {number: (datetime.fromisoformat(a), datetime.fromisoformat(b)) for number, a, b in rows if a and b}
    began = min(start for start, _ in times.values())
    found: list[Held] = []
    best = 0.0
    for trial in read_trials(files):
        if trial.result.status is TrialStatus.COMPLETE and (trial.score or 0.0) > best:
            best = trial.score or 0.0
            found.append(Held((times[trial.number][1] - began).total_seconds(), trial.config))
    return found


def searched_s(files: StudyFiles) -> float:
    """Return the seconds from a search's first launch to the end of its last trial."""
    with closing(sqlite3.connect(files.database)) as database:
        rows = database.execute("select min(datetime_start), max(datetime_complete) from trials").fetchone()
    began, ended = (datetime.fromisoformat(text) for text in rows)
    return (ended - began).total_seconds()


def seconds_to(history: Sequence[Held], good: set[str]) -> float:
    """Return the seconds after which a search held nothing but good configurations; infinite if it ended with a bad
    one."""
    found = math.inf
    for one in reversed(history):
        if key(one.config) not in good:
            break
        found = one.since_s
    return found


def compare(case: Design, samplers: Sequence[str], options: argparse.Namespace, folder: Path) -> ResultTable:
    """Search with each sampler in turns, then launch what they had in hand in rounds."""
    histories: dict[tuple[str, int], list[Held]] = {}
    tried: dict[str, list[int]] = {sampler: [] for sampler in samplers}
    lasted: dict[str, list[float]] = {sampler: [] for sampler in samplers}
    for seed in range(options.searches):
        for sampler in samplers:
            files = search(case, sampler, seed, options.budget, folder / f"{case.name}-{sampler}-{seed}")
            histories[sampler, seed] = held(files)
            lasted[sampler].append(searched_s(files))
            compared = sum(len(heat.heat.entrants) - 1 for heat in read_heats(files))
            tried[sampler].append(len(read_trials(files)) + compared)
            print(f"{case.name}, {sampler}, {seed}: {tried[sampler][-1]} configurations", file=sys.stderr)
    field = {key(one.config): one.config for history in histories.values() for one in history}
    recorder = Recorder(case, folder / "unused", folder, allow_busy=False)
    try:
        conditions, space = recorder.conditions()
        rows: dict[str, list[float | None]] = {name: [] for name in field}
        for number in range(options.rounds):
            for i, name in enumerate(list(field) if number % 2 == 0 else list(reversed(field))):
                planned = Planned(LaunchKind.MEASURE, dict(field[name]))
                row = recorder.launch(number * len(field) + i, planned, conditions, time.monotonic())
                rows[name].append(row.rate_per_s)
    finally:
        recorder.launcher.close()
    found = stats.compare_rounds(rows, prior=stats.PRIORS["cpu"])
    best = max(field, key=lambda name: found.rate(name).per_s)
    good = {name for name in field if found.ratio(name, best)[2] >= 1 - WITHIN}
    table = ResultTable(
        f"Seconds until the configuration in hand is within {100 * WITHIN:g} % of the best: {case.name}",
        ("sampler", "seconds", "median", "searched for", "configurations", "at the end, of the best (95 %)"),
    )
    for sampler in samplers:
        own = [histories[sampler, seed] for seed in range(options.searches)]
        seconds = [seconds_to(history, good) for history in own]
        ends = [found.ratio(key(history[-1].config), best) for history in own]
        table.add(
            sampler,
            ", ".join(_seconds(s) for s in seconds),
            _seconds(median(seconds)),
            ", ".join(f"{s:.0f} s" for s in lasted[sampler]),
            ", ".join(map(str, tried[sampler])),
            ", ".join(f"{ratio:.3f} ({low:.3f} to {high:.3f})" for ratio, low, high in ends),
        )
    what = told(field[best], space)
    table.notes.append(
        f"The best of {len(field)} that were in hand is {what}; {len(good)} are not shown to be slower by more than "
        f"{100 * WITHIN:g} %."
    )
    table.notes.append(
        f"Searches with --budget {options.budget}, until their searching ended. {options.rounds} launches of each "
        f"configuration in turns; one launch's noise there is {100 * found.noise.sd:.1f} %."
    )
    return table


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison of each case and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_hand", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=tuple(CASES))
    parser.add_argument("--samplers", default="auto,tpe,gp")
    parser.add_argument("--searches", type=int, default=3)
    parser.add_argument("--budget", default="6m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--studies", type=Path, help="keep the studies in this folder")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotune-in-hand-") as name:
        folder = options.studies or Path(name)
        for case in options.cases:
            table = compare(CASES[case], options.samplers.split(","), options, folder)
            markdown = options.markdown
            table.show(None if markdown is None else markdown.with_stem(f"{markdown.stem}-{case}"))


if __name__ == "__main__":
    main()
