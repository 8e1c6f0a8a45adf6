"""What a search finds for training scripts as they stand, what watching one costs, and whether its training runs as
fast as the same one in a workload file.

    python -m benchmarks.scripts table [NAME…] [--budget 4m]
    python -m benchmarks.scripts cost [--rounds 10]
    python -m benchmarks.scripts same [--rounds 8] [--image-size 96] [--batch-size 32]
    python -m benchmarks.scripts live [NAME…] [--rounds 2] [--minutes 10]
    python -m benchmarks.scripts reach [--budget 4m] [--rounds 8]
    python -m benchmarks.scripts promise [--budget 4m] [--rounds 3]

``table`` tunes each of the scripts in this folder: loops written by hand, and those of accelerate, Hugging Face,
Lightning and timm (``pip install -e .[scripts]``). ``cost`` runs a script whose step is as good as nothing, with the
agent that watches and without it, in turns, and tells the microseconds that it adds to a step. ``same`` launches
ResNet-18 as `plain_loop.py`, which knows nothing of autotune, and as the workload file of the same training, in turns,
as a search does, at several settings. ``live`` runs scripts of about as many minutes (on two cores) as they stand and
with ``autotune run --live``, in turns, and tells the seconds to the same number of steps. ``reach`` searches over the
plain loop and over the workload file of the same training, and launches both winners in turns. ``promise`` trains the
plain loop with what its search has found, and compares the rate with the promised one. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

from autotune import stats
from autotune.base.clock import SystemClock
from autotune.base.records import CommandRef, DataRef, LaunchKind, MeasurePlan, TrialSpec, Value
from autotune.launcher import Launcher, ProcessLauncher, script_entry
from autotune.machine.host import read_host
from autotune.stats import PRIORS
from autotune.workload.catalog import find_workload
from autotune.workload.data.sets import ensure_generated
from benchmarks.launching import measurement_of, plain_config, run
from benchmarks.scripts.promises import promise, reach
from benchmarks.tables import ResultTable

#: A step that is as good as nothing, so that what is added to it shows.
_EMPTY = """
import time, torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader([torch.zeros(1)] * 12000, batch_size=2)
for number, batch in enumerate(loader):
    if number == 1000:
        began = time.monotonic()
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print((time.monotonic() - began) / 5000 * 1e6)
"""
_FOLDER = Path(__file__).parent
_LOOP = _FOLDER.parent / "plain_loop.py"
#: The commands of the scripts in this folder that do not run as ``python train_NAME.py``.
_LAUNCHED = {"ranks": ("torchrun", "--nproc-per-node=2"), "accelerate": ("accelerate", "launch")}
#: Of which rates are compared, besides PyTorch's defaults.
SETTINGS: tuple[dict[str, Value], ...] = (
    {},
    {"memory_format": "channels_last", "optimizer_impl": "fused"},
    {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False},
    {"precision": "bf16", "memory_format": "channels_last"},
)


def scripts() -> list[str]:
    """Return the names of the scripts in this folder."""
    return sorted(path.stem.removeprefix("train_") for path in _FOLDER.glob("train_*.py"))


def command(name: str) -> list[str]:
    """Return the command of a script in this folder."""
    launcher = _LAUNCHED.get(name)
    script = str(_FOLDER / f"train_{name}.py")
    if launcher is None:
        return [sys.executable, script]
    return [str(Path(sys.executable).with_name(launcher[0])), *launcher[1:], script]


def tuned(names: Sequence[str], budget: str) -> ResultTable:
    """Tune scripts, each with a search of its own."""
    columns = ("script", "baseline, samples/s", "best, samples/s", "speedup (95 %)", "with", "could be set", "refused")
    table = ResultTable(f"Training scripts as they stand, {budget} each", columns)
    autotune = [sys.executable, "-P", "-m", "autotune"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            asked = _json([*autotune, "space", "--json", "--", *command(name)], folder)
            options = ["--json", "--no-input", "--budget", budget]
            ran = _json([*autotune, "search", *options, "--", *command(name)], folder)
            print(json.dumps({"script": name, "space": asked, "search": ran}), flush=True)
            table.add(name, *_figures(ran), *_settable(asked))
    return table


def _json(words: Sequence[str], folder: str) -> dict[str, Any]:
    done = subprocess.run(words, cwd=folder, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if not done.stdout:
        return {"failed": f"exit code {done.returncode}: {done.stderr.strip()[-1000:]}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _figures(ran: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if "baseline" not in ran:
        return "-", "-", str(ran.get("failed", "no result")), "-"
    baseline, best = ran["baseline"], ran["best"]
    differs = {n: v for n, v in best["config"].items() if baseline["config"].get(n) != v}
    low, high = best["speedup_ci95"]
    return (
        f"{baseline['samples_per_second']:.3g}",
        f"{best['samples_per_second']:.3g}",
        f"{best['speedup']:.2f}× ({low:.2f} to {high:.2f})",
        " ".join(f"{n}={v}" for n, v in differs.items()) or "the script as it stands",
    )


def _settable(asked: Mapping[str, Any]) -> tuple[str, str]:
    """Return the knobs of which more than one value could be set, and why others could not."""
    if "knobs" not in asked:
        return "-", str(asked.get("failed", "no answer"))
    settable = []
    why: dict[str, list[str]] = {}
    for name, knob in asked["knobs"].items():
        legal = [c["value"] for c in knob["choices"] if c["refused"] is None]
        if len(legal) > 1:
            settable.append(f"{name} ({', '.join(map(str, legal))})")
        for choice in knob["choices"]:
            if choice["refused"] is not None:
                why.setdefault(choice["refused"], []).append(f"{name}={choice['value']}")
    for name, reason in asked["inactive"].items():
        why.setdefault(reason, []).append(name)
    return "; ".join(settable) or "-", "; ".join(f"{', '.join(what)}: {reason}" for reason, what in why.items()) or "-"


def cost(rounds: int) -> ResultTable:
    """Time the empty step with and without the agent."""
    added: list[float] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            found: dict[bool, float] = {}
            for watched in (False, True) if number % 2 else (True, False):
                found[watched] = _empty_us(Path(folder, f"trail-{number}") if watched else None)
            added.append(found[True] - found[False])
            plain.append(found[False])
    table = ResultTable(
        "What watching adds to a step", ("step without, µs", "added, µs", "less than 0.5 % of steps from")
    )
    error = stdev(added) / len(added) ** 0.5
    table.add(
        f"{median(plain):.0f}", f"{median(added):.1f} ± {2 * error:.1f}", f"{median(added) / 0.005 / 1000:.1f} ms"
    )
    return table


def _empty_us(trail: Path | None) -> float:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if trail is not None:
        env = script_entry.agent_environment(env, {"title": "", "settings": [], "watch": str(trail)}, {})
    done = subprocess.run([sys.executable, "-c", _EMPTY], env=env, check=True, capture_output=True, text=True)
    return float(done.stdout)


def same(rounds: int, size: int, batch: int) -> ResultTable:
    """Launch script and workload in turns."""
    data = ensure_generated(processes=read_host().cores, on_progress=lambda done, total: None)
    columns = ("settings", "workload file, samples/s", "script, samples/s", "script / workload (95 %)")
    table = ResultTable(
        f"ResNet-18, {size} px, batch {batch}: a script and a workload file of the same training", columns
    )
    launcher = ProcessLauncher("benchmark-scripts", SystemClock())
    try:
        with tempfile.TemporaryDirectory() as folder:
            for settings in SETTINGS:
                rows: dict[str, list[float]] = {"workload": [], "script": []}
                for number in range(rounds):
                    for side in sorted(rows, reverse=bool(number % 2)):
                        where = Path(folder, f"{len(table.rows)}-{number}-{side}")
                        rows[side].append(_rate(launcher, where, side, data, size, batch, settings))
                compared = stats.compare_rounds(rows, prior=PRIORS["cpu"])
                ratio, low, high = compared.ratio("script", "workload")
                said = " ".join(f"{name}={value}" for name, value in settings.items()) or "PyTorch's defaults"
                between = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
                table.add(said, f"{median(rows['workload']):.1f}", f"{median(rows['script']):.1f}", between)
                print(json.dumps({"settings": settings, **rows}), flush=True)
    finally:
        launcher.close()
    return table


def _rate(
    launcher: Launcher, folder: Path, side: str, data: DataRef, size: int, batch: int, settings: Mapping[str, Value]
) -> float:
    words = [sys.executable, str(_LOOP), str(data.path), str(size), str(batch), "100000", "--model", "resnet18"]
    spec = TrialSpec(
        kind=LaunchKind.MEASURE,
        launch=folder.name,
        folder=str(folder),
        workload=find_workload("resnet18", {}),
        command=CommandRef(words=tuple(words), folder=str(folder.parent)) if side == "script" else None,
        data=data,
        config={**plain_config(batch, read_host().cores), **settings},
        batch_size=batch,
        image_size=size,
        plan=MeasurePlan(target_halfwidth=0.01, max_measure_s=15.0),
    )
    return measurement_of(run(launcher, spec)).steady_per_s


#: For ``live``: a script, its options for a minute on two cores of 2023, and whether it is also tried with another
#: precision.
LIVE: dict[str, tuple[str, str, float, str, bool]] = {
    "plain": ("plain", "--epochs", 2.9, "", True),
    "starved": ("plain", "--epochs", 1.4, "--latency 8", False),
    "trainer": ("trainer", "--steps", 1100, "", False),
}


def live(names: Sequence[str], rounds: int, minutes: float, backwards: bool) -> ResultTable:
    """Run scripts to their end, as they stand and tuned while they train; every other round in the other order."""
    autotune = [sys.executable, "-P", "-m", "autotune", "run", "--live", "--expect", f"{minutes:g}m"]
    columns = ("script", "run", "seconds", "of as it stands", "last line", "says")
    table = ResultTable(f"Trainings of about {minutes:g} minutes, to the end", columns)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            script, flag, per_minute, more, lower = LIVE[name]
            words = [*command(script), flag, str(max(1, round(minutes * per_minute))), *more.split()]
            ways: dict[str, list[str]] = {"as it stands": words, "--live": [*autotune, "--", *words]}
            if lower:
                ways["--live --allow precision"] = [*autotune, "--allow", "precision", "--", *words]
            for number in range(backwards, rounds + backwards):
                took: dict[str, tuple[float, str, str]] = {}
                for way in sorted(ways, key=list(ways).index, reverse=bool(number % 2)):
                    began = SystemClock().now()
                    done = subprocess.run(ways[way], cwd=folder, check=True, capture_output=True, text=True)
                    seconds = SystemClock().now() - began
                    said = [line for line in done.stderr.splitlines() if line.startswith("autotune: ")]
                    says = "; ".join(line.partition("; ")[0].removeprefix("autotune: ") for line in said) or "-"
                    took[way] = (seconds, done.stdout.strip().splitlines()[-1], says)
                    print(json.dumps({"script": name, "way": way, "seconds": seconds, "out": done.stdout}), flush=True)
                for way, (seconds, last, says) in took.items():
                    table.add(name, way, f"{seconds:.1f}", f"{seconds / took['as it stands'][0]:.3f}", last, says)
            for report in sorted(Path(folder).glob("studies/*/report.md")):
                print(report.read_text(), flush=True)
    return table


def main() -> None:
    """Make one of the tables, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["table", "cost", "same", "live", "reach", "promise"])
    known = [*scripts(), "starved"]
    parser.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME", help=", ".join(known))
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--backwards", action="store_true", help="live: begin with the other order")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_intermixed_args()
    match options.what:
        case "table":
            found = tuned(options.names or scripts(), options.budget)
        case "cost":
            found = cost(options.rounds)
        case "live":
            found = live(options.names or list(LIVE), options.rounds, options.minutes, options.backwards)
        case "reach":
            found = reach(options.budget, options.rounds)
        case "promise":
            found = promise(options.budget, options.rounds)
        case _:
            found = same(options.rounds, options.image_size, options.batch_size)
    found.show(options.markdown)


if __name__ == "__main__":
    main()
