"""The part that compares autotune's figure with that of a plain loop written by hand, at the same settings."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from autotune.base.records import Config, MeasurePlan, Value
from autotune.profile import read
from autotune.space import environment
from autotune.workload.catalog import find_workload
from benchmarks.card.launches import IMAGE_SIZE, SHORT, base_config, figures_of, launcher, possible, run, spec_for
from benchmarks.card.searches import best_profile
from benchmarks.card.stage import NO_TIME, ROOT, Skipped, Stage, tail

#: Seconds of training that a plain loop is timed for, and its steps before.
TIMED_S, WARM_UP = 8.0, 30
SMALL_SIZE, SMALL_BATCH = 64, 8
#: Used if no search has left a profile on this machine.
STATED: dict[str, Value] = {
    "precision": "bf16",
    "memory_format": "channels_last",
    "pin_memory": True,
    "cudnn_benchmark": True,
}


def plain(stage: Stage) -> None:
    """Measure the search's best configuration as a launch and as a plain loop, in alternating order."""
    config = _config(stage)
    size = stage.pick(IMAGE_SIZE, SMALL_SIZE)
    stage.note(configuration=dict(config))
    stage.replaced("ResNet-18 at 64 px")
    model = stage.pick("resnet50", "resnet18")
    rates: dict[str, list[float]] = {"autotune": [], "plain": []}
    last_s = 0.0
    with launcher(stage.waits) as made:
        for number in range(stage.pick(2, 1)):
            for side in ("autotune", "plain") if number % 2 == 0 else ("plain", "autotune"):
                if stage.left_s < 1.2 * last_s + 10:
                    stage.note(ended_early=NO_TIME)
                    break
                before = stage.left_s
                if side == "autotune":
                    spec = spec_for(
                        stage,
                        f"autotune-{number}",
                        dict(config),
                        workload=find_workload(model, {}),
                        image_size=size,
                        plan=stage.pick(MeasurePlan(max_measure_s=TIMED_S, target_halfwidth=0.002), SHORT),
                    )
                    result = run(made, spec)
                    stage.add("launches", figures_of(result))
                    if result.measurement is None:
                        raise RuntimeError(f"{result.status}: {result.cause}")
                    rates[side].append(result.measurement.steady_per_s)
                else:
                    rates[side].append(_plain_rate(stage, model, config, size, rates["autotune"][-1]))
                last_s = before - stage.left_s
                stage.note(samples_per_s=rates)
    if not rates["plain"]:
        raise TimeoutError("there was no time left for the plain loop")
    stage.note(ratio=round(median(rates["autotune"]) / median(rates["plain"]), 4))


def _config(stage: Stage) -> Config:
    try:
        found: Config = read(best_profile(stage)).configuration
        stage.note(from_profile=True)
    except Skipped:
        stage.note(from_profile=False)
        found = {**base_config(stage), **STATED, "num_workers": stage.pick(8, 1)}
    small: dict[str, Any] = stage.pick({}, {"batch_size": SMALL_BATCH, "num_workers": 0, "compile_mode": "off"})
    own = {name: value for name, value in found.items() if not name.startswith("workload.")}
    return possible(stage, {**own, **small})


def _plain_rate(stage: Stage, model: str, config: Config, size: int, expected_per_s: float) -> float:
    """Run the plain loop and return its samples per second."""
    batch = int(config["batch_size"])
    steps = max(3, math.ceil(stage.pick(TIMED_S, 2.0) * expected_per_s / batch))
    arguments = ["synthetic", str(size), str(batch), str(steps), "--model", model]
    arguments += ["--device", "cpu" if stage.uuid is None else "cuda", "--warm-up", str(stage.pick(WARM_UP, 3))]
    arguments += options(config)
    env = {"TORCHINDUCTOR_CACHE_DIR": str(stage.folder / "plain-cache")}
    # The allocator's setting has no option: a plain training sets the variable.
    env |= environment(config)
    if "intra_op_threads" in config:
        env["OMP_NUM_THREADS"] = str(config["intra_op_threads"])
    script = str(ROOT / "benchmarks" / "plain_loop.py")
    ended = stage.python(script, *arguments, limit_s=stage.left_s - 5, env=env)
    if ended.returncode:
        raise RuntimeError(f"the plain loop ended with {ended.returncode}: {tail(ended.stderr)}")
    return float(ended.stdout)


def options(config: Config) -> list[str]:
    """Return the plain loop's options for a configuration."""
    given = {
        "--precision": config.get("precision"),
        "--compile": config.get("compile_mode"),
        "--workers": config.get("num_workers"),
        "--prefetch": config.get("prefetch_factor"),
        "--optimizer": config.get("optimizer_impl"),
    }
    flags = {
        "--channels-last": config.get("memory_format") == "channels_last",
        "--persistent": config.get("persistent_workers"),
        "--pin": config.get("pin_memory"),
        "--cudnn-benchmark": config.get("cudnn_benchmark"),
    }
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return words + [name for name, on in flags.items() if on]
