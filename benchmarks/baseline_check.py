"""Is autotune's baseline a straw man? Compares its rate with that of a plain loop.

    python -m benchmarks.baseline_check [--rounds 5] [--image-size 96] [--batch-size 32]

Each round launches the baseline of ResNet-50 as a search does (a forked child, everything measured) and
`plain_loop.py` in a fresh interpreter, in alternating order. Prints every rate, both medians and their ratio. Run
nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from autotune.base.clock import SystemClock
from autotune.base.records import DataRef, LaunchKind, MeasurePlan, TrialSpec, Value
from autotune.launcher import ProcessLauncher
from autotune.machine.host import read_host
from autotune.workload.catalog import find_workload
from autotune.workload.data.sets import ensure_generated

STEPS = 15


def autotune_rate(launcher: ProcessLauncher, folder: Path, data: DataRef, size: int, batch: int) -> float:
    """Return the samples per second that a measure launch of the baseline reports."""
    config: dict[str, Value] = {
        "precision": "fp32",
        "compile_mode": "off",
        "batch_size": batch,
        "memory_format": "contiguous",
        "num_workers": 0,
        "optimizer_impl": "for-loop",
        "intra_op_threads": read_host().cores,
    }
    spec = TrialSpec(
        kind=LaunchKind.MEASURE,
        launch=folder.name,
        folder=str(folder),
        workload=find_workload("resnet50", {}),
        data=data,
        config=config,
        batch_size=batch,
        image_size=size,
        plan=MeasurePlan(max_measure_s=15.0),
    )
    result = launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)
    if result.measurement is None:
        raise SystemExit(f"the baseline ended as {result.status}: {result.cause}")
    return result.measurement.samples_per_s


def plain_rate(data: DataRef, size: int, batch: int) -> float:
    """Return the samples per second of the plain loop, in a fresh interpreter."""
    script = Path(__file__).with_name("plain_loop.py")
    arguments = [sys.executable, str(script), str(data.path), str(size), str(batch), str(STEPS)]
    return float(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    data = ensure_generated(processes=read_host().cores, on_progress=lambda done, total: None)
    ours: list[float] = []
    plain: list[float] = []
    launcher = ProcessLauncher("baseline-check", SystemClock())
    size, batch = options.image_size, options.batch_size
    print(
        f"ResNet-50, {size} px, batch {batch}, fp32, no workers, {read_host().cores} cores of {read_host().cpu_model}"
    )
    print("round  autotune  plain loop  samples/s")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(options.rounds):
                # Alternate the order, so that neither side always runs on the warmer machine.
                for side in ("autotune", "plain") if number % 2 == 0 else ("plain", "autotune"):
                    if side == "autotune":
                        ours.append(autotune_rate(launcher, Path(folder, f"launch-{number}"), data, size, batch))
                    else:
                        plain.append(plain_rate(data, size, batch))
                print(f"{number + 1:5}  {ours[-1]:8.2f}  {plain[-1]:10.2f}", flush=True)
    finally:
        launcher.close()
    print(f"median {median(ours):8.2f}  {median(plain):10.2f}   autotune / plain = {median(ours) / median(plain):.3f}")


if __name__ == "__main__":
    main()
