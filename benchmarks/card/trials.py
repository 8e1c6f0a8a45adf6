"""Parts that consist of single launches: the matrix, the fixed cost, max-autotune."""

from __future__ import annotations

import time
from statistics import median

from autotune.base.records import MeasurePlan, PhaseLimits, Value
from benchmarks.card.launches import SHORT, base_config, figures_of, launcher, run, spec_for
from benchmarks.card.stage import NO_TIME, Stage
from benchmarks.spawning import Forked, fixed_s, spawned

#: A trial of the matrix begins only if there is this much time, in seconds.
ONE_TRIAL_S = 15.0
#: What is usually fast on a card.
FAST: dict[str, Value] = {
    "precision": "bf16",
    "memory_format": "channels_last",
    "pin_memory": True,
    "cudnn_benchmark": True,
    "num_workers": 8,
}
#: What is changed in `base_config`. Those with the same allocator follow each other, because a change of it may cost
#: the launcher a new template.
MATRIX: dict[str, dict[str, Value]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "fp16 fused": {"precision": "fp16", "optimizer_impl": "fused"},
    "bf16 channels_last pinned benchmark 8 workers": FAST,
    "the same, again": FAST,
    "the same, reduce-overhead": {**FAST, "compile_mode": "reduce-overhead"},
    "the same, expandable segments": {**FAST, "alloc_conf": "expandable_segments"},
}
#: Far less than ResNet-50 needs at this batch.
LIMIT_BYTES = 3 * 2**30


def matrix(stage: Stage) -> None:
    """Make one launch of each configuration, then one that runs out of memory under a limit, and one after it."""
    stage.note(base=base_config(stage))
    with launcher(stage.waits) as made:
        for name, changes in MATRIX.items():
            if stage.left_s < ONE_TRIAL_S:
                stage.add("trials", {"trial": name, "status": NO_TIME})
                continue
            config = {**base_config(stage), **changes}
            config["num_workers"] = stage.pick(config["num_workers"], min(2, int(config["num_workers"])))
            began = time.monotonic()
            result = run(made, spec_for(stage, name.replace(" ", "-").replace(",", ""), config))
            # What the launch does not count itself: a new template, the way to the quiet card.
            between_s = time.monotonic() - began - result.wall_s - result.waited_s
            stage.add("trials", {"trial": name, **figures_of(result), "between_s": round(between_s, 2)})
        config = {**base_config(stage), "batch_size": 256}
        for name, limit in (("out of memory under a limit", stage.pick(LIMIT_BYTES, 2**24)), ("after that", None)):
            result = run(made, spec_for(stage, name.replace(" ", "-"), config, memory_limit_bytes=limit))
            stage.add("trials", {"trial": name, **figures_of(result), "limit_bytes": limit})


def fixed(stage: Stage) -> None:
    """Measure the seconds of a launch that are neither first step, warm-up nor measuring, forked and spawned."""
    config = {**base_config(stage), "num_workers": 0, "batch_size": stage.pick(32, 4)}
    plan = MeasurePlan(min_windows=3, min_window_s=0.3, max_measure_s=1.5, max_warmup_s=2.0)
    with launcher(stage.waits) as made:
        forked = Forked(made)
        began = time.monotonic()
        forked(spec_for(stage, "first", config, plan=plan))
        stage.note(first_launch_s=round(time.monotonic() - began, 2))
        found: dict[str, list[float]] = {"forked": [], "spawned": []}
        for number in range(stage.pick(4, 2)):
            for name, launch in (("forked", forked), ("spawned", spawned)):
                if stage.left_s < ONE_TRIAL_S:
                    break
                result, wall_s = launch(spec_for(stage, f"{name}-{number}", config, plan=plan))
                found[name].append(round(fixed_s(result, wall_s), 3))
                startup_s = result.measurement.startup_s if result.measurement else None
                stage.add(
                    "launches", {"how": name, "fixed_s": found[name][-1], "wall_s": wall_s, "startup_s": startup_s}
                )
    stage.note(**{f"{name}_s": median(values) for name, values in found.items() if values})


def max_autotune(stage: Stage) -> None:
    """Compile with max-autotune, cache cold and then warm; then with the default mode, if there is time."""
    fast: dict[str, Value] = {**base_config(stage), **FAST, "num_workers": stage.pick(8, 1)}
    rows: tuple[tuple[str, Value], ...] = (("cold", "max-autotune"), ("warm", "max-autotune"), ("cold", "default"))
    stage.note(base={**fast, "compile_mode": "max-autotune"})
    with launcher(stage.waits) as made:
        for cache, mode in rows:
            if stage.left_s < 2 * ONE_TRIAL_S:
                stage.add("launches", {"mode": mode, "cache": cache, "status": NO_TIME})
                continue
            patience = stage.left_s - ONE_TRIAL_S
            spec = spec_for(
                stage,
                f"{mode}-{cache}",
                {**fast, "compile_mode": mode},
                cache_folder=str(stage.folder / f"cache-{mode}"),
                # The autotuning of a kernel may be silent for long.
                limits=PhaseLimits(compile_s=patience, silence_s=patience, total_s=patience),
                plan=stage.pick(MeasurePlan(max_measure_s=5.0, max_warmup_s=8.0), SHORT),
            )
            stage.add("launches", {"mode": mode, "cache": cache, **figures_of(run(made, spec))})
