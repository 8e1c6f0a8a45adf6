"""Whether the estimate for a local copy holds: launches behind a slow store, and the same ones without it.

    python -m benchmarks.stores [--rounds 3] [--markdown FILE]

A network on autotune's generated photographs. Behind each store, the training and its two ceilings are launched as the
proof does; what `without_store` makes of the ceilings is compared with launches of the same training without the
store, in turns. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from pathlib import Path
from statistics import median

from autotune.catalog import find_workload
from autotune.clock import SystemClock
from autotune.data.sets import ensure_generated
from autotune.launcher import Launcher, ProcessLauncher
from autotune.machine.host import read_host
from autotune.records import DataRef, LaunchKind, Measurement, MeasurePlan, SlowStore, TrialSpec, Value
from autotune.verify.ceilings import verdict, without_store
from benchmarks.launching import measurement_of, plain_config, run
from benchmarks.tables import ResultTable

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
                told = without_store(config, device, loader, read_host().cores, shared=True)
                idle = f"{100 * (loader.loader_idle_fraction or 0):.0f} %"
                store = f"{1000 * latency_s:.0f} ms, {bytes_per_s / 1e6:.0f} MB/s"
                rates = (f"{told:.1f}", f"{local:.1f}", f"{told / local:.2f}")
                table.add(store, str(workers), f"{rate:.1f}", limit, idle, *rates)
                print(store, workers, rate, limit, idle, *rates, flush=True)
    finally:
        launcher.close()
    return table


def _launch(launcher: Launcher, folder: Path, kind: LaunchKind, data: DataRef, config: dict[str, Value]) -> Measurement:
    spec = TrialSpec(
        kind=kind,
        launch=folder.name,
        folder=str(folder),
        workload=find_workload("resnet18", {}),
        data=data,
        config=config,
        batch_size=BATCH,
        image_size=SIZE,
        plan=MeasurePlan(target_halfwidth=0.03, max_measure_s=10.0),
    )
    return measurement_of(run(launcher, spec))


def main() -> None:
    """Make the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    stores(options.rounds).show(options.markdown)


if __name__ == "__main__":
    main()
