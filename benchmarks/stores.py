"""Whether the figures for slow stores hold: launches and searches behind one, and the same without it.

    python -m benchmarks.stores [--rounds 3] [--markdown FILE]
    python -m benchmarks.stores searches [--rounds 3] [--budget 3m] [--markdown FILE]

A network on autotune's generated photographs. Behind each store, the training and its two ceilings are launched as the
proof does; what `without_store` makes of the ceilings is compared with launches of the same training without the
store, in turns. ``searches`` searches the same training three times: behind a slow store, behind one with a cache that
holds a quarter of the files, and over files in memory. What each search says of its baseline and its winner is compared
with fresh launches. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from pathlib import Path
from statistics import median

from autotune.base.clock import SystemClock
from autotune.base.records import DataRef, LaunchKind, Measurement, MeasurePlan, Outcome, SlowStore, TrialSpec, Value
from autotune.launcher import Launcher, ProcessLauncher
from autotune.machine.host import read_host
from autotune.report.sentences import bottleneck_of
from autotune.search.proof.ceilings import sides_of, verdict, without_store
from autotune.workload.catalog import find_workload
from autotune.workload.data.sets import ensure_generated, size_bytes
from benchmarks.launching import measurement_of, plain_config, run
from benchmarks.tables import ResultTable
from benchmarks.trainings import search

SIZE, BATCH = 64, 32
#: Seconds until a file comes, bytes per second of a reader, and loader workers.
CASES: tuple[tuple[float, float, int], ...] = (
    (0.08, 50e6, 0),
    (0.08, 50e6, 2),
    (0.03, 50e6, 4),
    (0.03, 2e6, 8),
)


def stores(rounds: int) -> ResultTable:
    """Launch each case, and compare."""
    columns = ("store", "workers", "behind it", "verdict", "waiting for it", "local: estimated", "measured", "ratio")
    table = ResultTable(f"ResNet-18, {SIZE} px, batch {BATCH}: what a local copy gives, in samples/s", columns)
    data = ensure_generated(processes=read_host().cores, on_progress=lambda done, total: None)
    launcher = ProcessLauncher(uuid.uuid4().hex, SystemClock())
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, (latency_s, bytes_per_s, workers) in enumerate(CASES):
                slow = data.model_copy(update={"store": SlowStore(latency_s=latency_s, bytes_per_s=bytes_per_s)})
                config: dict[str, Value] = {**plain_config(BATCH, read_host().cores), "num_workers": workers}
                if workers:
                    config |= {"prefetch_factor": 2, "persistent_workers": False}
                where = Path(folder, str(number))
                seen: dict[str, list[Measurement]] = {"store": [], "local": []}
                for turn in range(rounds):
                    for side, ref in (("store", slow), ("local", data)):
                        seen[side].append(_launch(launcher, where / f"{side}-{turn}", LaunchKind.MEASURE, ref, config))
                device = _launch(launcher, where / "device", LaunchKind.DEVICE_ONLY, slow, config)
                loader = _launch(launcher, where / "loader", LaunchKind.LOADER_ONLY, slow, config)
                rate, local = (median(m.samples_per_s for m in seen[side]) for side in ("store", "local"))
                limit, _ = verdict(config, rate, 0.0, device, loader)
                sides = sides_of(config, seen["store"], device, loader)
                if sides is None:
                    raise SystemExit("the kernel does not tell how long the loader waits")
                told = without_store(config, sides, read_host().cores, shared=True)
                idle = f"{100 * sides.idle:.0f} %"
                store = f"{1000 * latency_s:.0f} ms, {bytes_per_s / 1e6:.0f} MB/s"
                rates = (f"{told:.1f}", f"{local:.1f}", f"{told / local:.2f}")
                table.add(store, str(workers), f"{rate:.1f}", limit, idle, *rates)
                print(store, workers, rate, limit, idle, *rates, flush=True)
    finally:
        launcher.close()
    return table


#: The options of each search, and the part of the files that its store's cache holds.
SEARCHES: dict[str, tuple[str, ...]] = {
    "80 ms, 50 MB/s": ("--store-latency", "80ms", "--store-bandwidth", "50MB/s"),
    "80 ms, 50 MB/s, and a cache": ("--store-latency", "80ms", "--store-bandwidth", "50MB/s", "--store-cache"),
    "none, files in memory": (),
}
CACHED = 0.25


def searches(rounds: int, budget: str) -> ResultTable:
    """Search behind each store, and launch the winners again."""
    columns = ("store", "configuration", "said", "measured", "ratio", "verdict")
    table = ResultTable(f"ResNet-18, {SIZE} px: what searches say, and fresh launches, in samples/s", columns)
    data = ensure_generated(processes=read_host().cores, on_progress=lambda done, total: None)
    cache_bytes = int(CACHED * size_bytes(Path(str(data.path))))
    launcher = ProcessLauncher(uuid.uuid4().hex, SystemClock())
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, (store, given) in enumerate(SEARCHES.items()):
                words = (*given, f"{cache_bytes}B") if given[-1:] == ("--store-cache",) else given
                told = ("--model", "resnet18", "--image-size", str(SIZE), "--batch-size", str(BATCH), *words)
                outcome = search((*told, "--budget", budget), Path(folder), f"store-{number}")
                if outcome is None:
                    table.add(store, *["no outcome"] * (len(columns) - 1))
                    continue
                for row in _compared(launcher, Path(folder, f"launches-{number}"), outcome, data, store, rounds):
                    table.add(*row)
                    print(*row, sep=" | ", flush=True)
    finally:
        launcher.close()
    return table


def _compared(
    launcher: Launcher, folder: Path, outcome: Outcome, data: DataRef, store: str, rounds: int
) -> list[tuple[str, ...]]:
    """Compare what a search says of its baseline and its winner with launches: as it was searched, in the first epoch,
    and without a store."""
    slow = SlowStore(latency_s=0.08, bytes_per_s=50_000_000)
    behind = (
        None if store.startswith("none") else slow.model_copy(update={"cached": CACHED if "cache" in store else 0.0})
    )
    rows: list[tuple[str, ...]] = []
    for who, one in {"baseline": outcome.baseline, "best": outcome.best}.items():
        found = bottleneck_of(outcome, one)
        if found is None or (who == "best" and one.trial == outcome.baseline.trial):
            continue
        cold = None if found.cold_per_s is None else found.cold_per_s[0]
        said = {"": (one.samples_per_second, behind), ", first epoch": (cold, slow)}
        said[", from a local copy"] = (found.local_per_s, None)
        config = f"{one.config['num_workers']} workers, batch {one.config['batch_size']}"
        for number, (what, (rate, ref)) in enumerate(said.items()):
            if rate is None:
                continue
            where = data.model_copy(update={"store": ref})
            names = [folder / f"{who}-{number}-{turn}" for turn in range(rounds)]
            seen = [_launch(launcher, name, LaunchKind.MEASURE, where, one.config) for name in names]
            measured = median(m.samples_per_s for m in seen)
            figures = (f"{rate:.1f}", f"{measured:.1f}", f"{rate / measured:.2f}")
            rows.append((f"{store}: {who}{what}", config, *figures, "" if what else found.sentence))
    return rows


def _launch(launcher: Launcher, folder: Path, kind: LaunchKind, data: DataRef, config: dict[str, Value]) -> Measurement:
    spec = TrialSpec(
        kind=kind,
        launch=folder.name,
        folder=str(folder),
        workload=find_workload("resnet18", {}),
        data=data,
        config=config,
        batch_size=int(config["batch_size"]),
        image_size=SIZE,
        plan=MeasurePlan(target_halfwidth=0.03, max_measure_s=10.0),
    )
    return measurement_of(run(launcher, spec))


def main() -> None:
    """Make the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="?", choices=("launches", "searches"), default="launches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    found = stores(options.rounds) if options.what == "launches" else searches(options.rounds, options.budget)
    found.show(options.markdown)


if __name__ == "__main__":
    main()
