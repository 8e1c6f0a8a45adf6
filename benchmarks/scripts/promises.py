"""Whether a script's search finds what its workload's finds, and whether the script then runs at the promised rate."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autotune import stats
from autotune.base.clock import SystemClock
from autotune.base.records import CommandRef, DataRef, LaunchKind, MeasurePlan, TrialSpec, Value
from autotune.launcher import ProcessLauncher
from autotune.profile import read
from autotune.stats import PRIORS
from autotune.workload.catalog import find_workload
from benchmarks.launching import WORKLOADS, measurement_of, run
from benchmarks.tables import ResultTable

_AUTOTUNE = (sys.executable, "-P", "-m", "autotune")
#: A training as a script and as a workload file.
_SCRIPT, _WORKLOAD = Path(__file__).with_name("train_plain.py"), WORKLOADS / "cropped_images.py"
#: Batches of an epoch of that script, and epochs whose rate is compared with the promise, after the first.
_BATCHES, _EPOCHS = 128, 4


def reach(budget: str, rounds: int) -> ResultTable:
    """Search over a script and over the workload file of the same training; launch both winners, as the script, in
    turns."""
    columns = ("winner of", "with", "samples/s", "script's / workload's (95 %)")
    table = ResultTable(f"ResNet-18 as a script and as a workload file, searched for {budget} each", columns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            "the script": _best(folder, budget, ["--", sys.executable, str(_SCRIPT)]),
            "the workload": _best(folder, budget, ["--model", str(_WORKLOAD), "--keep-batch-size"]),
        }
        rows: dict[str, list[float]] = {side: [] for side in found}
        if found["the script"] == found["the workload"]:
            compared = "the same"
        else:
            rows = _in_turns(folder, found, rounds)
            ratio, low, high = stats.compare_rounds(rows, prior=PRIORS["cpu"]).ratio("the script", "the workload")
            compared = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    print(json.dumps({"found": found, "rates": rows}), flush=True)
    for side, config in found.items():
        rate = f"{median(rows[side]):.1f}" if rows[side] else "-"
        table.add(side, _words(config), rate, compared)
    return table


def _best(folder: Path, budget: str, asked: Sequence[str]) -> dict[str, Value]:
    found = _searched(folder, budget, asked)
    best: dict[str, Value] = found["best"]["config"]
    return best


def _searched(folder: Path, budget: str, asked: Sequence[str]) -> dict[str, Any]:
    words = [*_AUTOTUNE, "search", "--json", "--no-input", "--budget", budget, *asked]
    done = subprocess.run(words, cwd=folder, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    print(done.stdout or done.stderr, flush=True)
    if not done.stdout:
        raise SystemExit(f"the search ended with exit code {done.returncode}: {done.stderr.strip()[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _words(config: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _in_turns(folder: Path, sides: Mapping[str, dict[str, Value]], rounds: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {side: [] for side in sides}
    launcher = ProcessLauncher("benchmark-promises", SystemClock())
    try:
        for number in range(rounds):
            for side in sorted(sides, reverse=bool(number % 2)):
                where = folder / f"{number}-{side.split()[-1]}"
                spec = TrialSpec(
                    kind=LaunchKind.MEASURE,
                    launch=where.name,
                    folder=str(where),
                    workload=find_workload("resnet18", {}),
                    command=CommandRef(words=(sys.executable, str(_SCRIPT)), folder=str(folder)),
                    data=DataRef(kind="none"),
                    config=sides[side],
                    batch_size=32,
                    image_size=None,
                    plan=MeasurePlan(target_halfwidth=0.01, max_measure_s=15.0),
                )
                rates[side].append(measurement_of(run(launcher, spec)).steady_per_s)
    finally:
        launcher.close()
    return rates


def promise(budget: str, rounds: int) -> ResultTable:
    """Search over a script, and train with the profile; compare the rate over 512 steps with the promised one."""
    table = ResultTable(
        f"`autotune run --profile` over {_BATCHES * _EPOCHS} steps, after a search of {budget}",
        ("run", "samples/s", "of the promise", "lines on stderr"),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = _searched(folder, budget, ["--", sys.executable, str(_SCRIPT)])
        if found["profile"] is None:
            raise SystemExit(f"the search gave no profile: {found['because']}")
        path = folder / found["profile"]
        promised = read(path).gives.samples_per_second
        script = [sys.executable, str(_SCRIPT), "--epochs", str(1 + _EPOCHS)]
        ways = {"as it stands": script, "with the profile": [*_AUTOTUNE, "run", "--profile", str(path), "--", *script]}
        for number in range(rounds):
            for way in sorted(ways, reverse=not number % 2):
                rate, said = _trained(ways[way], folder)
                print(json.dumps({"way": way, "rate": rate, "promised": promised, "says": said}), flush=True)
                of = f"{rate / promised:.3f}" if way == "with the profile" else "-"
                table.add(way, f"{rate:.1f}", of, str(len(said.splitlines())))
    table.notes.append(f"Promised: {promised:.1f} samples/s, {_words(found['best']['config'])}.")
    return table


def _trained(words: Sequence[str], folder: Path) -> tuple[float, str]:
    """Run the script to its end; return its rate after the first epoch, as its own lines tell, and its stderr."""
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None and script.stderr is not None
        ends = [time.monotonic() for _ in script.stdout]
        said = script.stderr.read()
    if script.returncode or len(ends) != 1 + _EPOCHS:
        raise SystemExit(f"the script ended with exit code {script.returncode}: {said[-1000:]}")
    return 32 * _BATCHES * _EPOCHS / (ends[-1] - ends[0]), said
