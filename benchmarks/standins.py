"""Surfaces generated from formulas, for machines that cannot be recorded here. Never mix them with recorded ones.

A large GPU training a convolutional network, about 10⁵ configurations, with one of three loaders: ``standin:decoding``
(photographs, sixteen cores), ``standin:far-store`` (slow reads), ``standin:in-memory``. Rates are in samples per
second, times per sample in seconds:

* device: ``work = 1 / (900 · precision · format · compile · cudnn · b / (b + 12))``; a step takes the longer of
  ``b · work`` and the host's time to enqueue it; without pinned memory another 25 µs per sample.
* loader: a fixed rate per worker, less if there are more workers than cores; 3 % less with a prefetch of 2.
* both: with workers they overlap and the slower side sets the rate, smoothed (p-norm, p = 10); without, times add.
* epochs of 100,000 samples end with 0.1 s per worker that has to be restarted.
* memory: ``1.2 GB + b · activations``, 80 GB in total.
* noise: launches of equals differ by 0.3 %, windows of one launch by 0.5 %.

The formulas have the form that the sampler assumes (factors, a slower side, memory linear in the batch). They show how
it scales, not how well its assumptions hold.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

from autotune.base.records import Config, MeasurePlan, TrialStatus, Value
from autotune.samplers.auto.memory import HEADROOM
from autotune.search.replay import Heading, Row, Surface, read_surface
from autotune.space import Choice, Space, canonical, key
from benchmarks.truth import Truth, truth_of

PREFIX = "standin:"
CAPACITY_BYTES = 80 * 10**9
NOISE_SD, WINDOW_SD = 0.003, 0.005
REPEATS = 3
_CORES = 16
_PRECISION = {"fp32": 1.0, "tf32": 1.35, "bf16": 1.9, "fp16": 1.85}
_LAST = {"fp32": 0.9, "tf32": 1.15, "bf16": 1.45, "fp16": 1.45}
_COMPILED = {"off": 1.0, "default": 1.12, "reduce-overhead": 1.14, "max-autotune": 1.2}
_COMPILE_S = {"off": 1.0, "default": 45.0, "reduce-overhead": 55.0, "max-autotune": 240.0}
_HOST_S = {"off": 9e-3, "default": 4e-3, "reduce-overhead": 1e-3, "max-autotune": 1e-3}
_OPTIMIZER_S = {"for-loop": 6e-3, "foreach": 1e-3, "fused": 0.0}
_ACTIVATIONS = {"fp32": 150e6, "tf32": 150e6, "bf16": 85e6, "fp16": 85e6}
#: Samples per second of one worker, and whether a worker needs a core.
_LOADERS = {"decoding": (320.0, True), "far-store": (60.0, False), "in-memory": (6000.0, True)}
_KNOBS: dict[str, tuple[Value, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "compile_mode": ("off", "default", "reduce-overhead", "max-autotune"),
    "batch_size": (32, 64, 128, 256, 512, 1024),
    "memory_format": ("contiguous", "channels_last"),
    "num_workers": (0, 1, 2, 4, 8, 16, 32, 64),
    "prefetch_factor": (2, 4, 8),
    "pin_memory": (False, True),
    "persistent_workers": (False, True),
    "cudnn_benchmark": (False, True),
    "optimizer_impl": ("for-loop", "foreach", "fused"),
    "alloc_conf": ("default", "expandable_segments"),
}
_BASELINE: dict[str, Value] = {
    "precision": "fp32",
    "compile_mode": "off",
    "batch_size": 64,
    "memory_format": "contiguous",
    "num_workers": 0,
    "pin_memory": False,
    "cudnn_benchmark": False,
    "optimizer_impl": "foreach",
    "alloc_conf": "default",
}


def device_per_s(config: Config) -> float:
    """Return the rate of the device alone."""
    batch, precision, mode = int(config["batch_size"]), str(config["precision"]), str(config["compile_mode"])
    last = config["memory_format"] == "channels_last"
    speed = 900 * _PRECISION[precision] * _COMPILED[mode] * batch / (batch + 12)
    speed *= _LAST[precision] if last else 1.0
    speed *= (1.03 if last else 1.08) if config["cudnn_benchmark"] else 1.0
    host_s = _HOST_S[mode] + _OPTIMIZER_S[str(config["optimizer_impl"])]
    copy_s = 0.0 if config["pin_memory"] else 25e-6
    return 1 / (max(1 / speed, host_s / batch) + copy_s)


def loader_per_s(loader: str, config: Config) -> float:
    """Return the rate of the loader alone."""
    each, busy = _LOADERS[loader]
    workers = max(1, int(config["num_workers"]))
    working = min(workers, _CORES) if busy else workers
    return each * working * (0.97 if config.get("prefetch_factor") == 2 else 1.0)


def rate_per_s(loader: str, config: Config) -> float:
    """Return the end-to-end rate."""
    device, loading = device_per_s(config), loader_per_s(loader, config)
    workers = int(config["num_workers"])
    steady = (device**-10 + loading**-10) ** -0.1 if workers else 1 / (1 / device + 1 / loading)
    turn_s = 0.0 if config.get("persistent_workers") else 0.1 * workers
    return 100_000 / (100_000 / steady + turn_s)


def peak_bytes(config: Config) -> int:
    """Return the peak device memory."""
    each = _ACTIVATIONS[str(config["precision"])] * (0.9 if config["compile_mode"] != "off" else 1.0)
    return int(1.2e9 + int(config["batch_size"]) * each)


class _Launches(Mapping[str, tuple[Row, ...]]):
    """Launches by key, generated on access."""

    def __init__(self, loader: str, space: Space) -> None:
        self._loader = loader
        self._space = space

    def __getitem__(self, name: str) -> tuple[Row, ...]:
        config: dict[str, Value] = json.loads(name)
        if self._space.refusal(config) is not None:
            raise KeyError(name)
        rng = random.Random(f"{self._loader} {name}")
        return tuple(_row(self._loader, config, rng, warm=bool(n)) for n in range(REPEATS))

    def __iter__(self) -> Iterator[str]:
        return (key(config) for config in self._space.grid())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class StandIn(Surface):
    """A surface generated from formulas."""

    @property
    def loader(self) -> str:
        return self.heading.name.removeprefix(PREFIX)

    @cached_property
    def space(self) -> Space:
        choices = {name: tuple(Choice(v) for v in values) for name, values in self.heading.knobs.items()}
        return Space(choices=choices, inactive={}, baseline=self.heading.baseline)

    @cached_property
    def launches(self) -> Mapping[str, tuple[Row, ...]]:
        return _Launches(self.loader, self.space)

    @cached_property
    def compile_seconds(self) -> Mapping[tuple[str, bool], tuple[float, ...]]:
        return _CompileSeconds()


class _CompileSeconds(dict[tuple[str, bool], tuple[float, ...]]):
    """Compile seconds by graph and whether the cache is warm, generated on access."""

    def get(self, name: tuple[str, bool], default: object = ()) -> tuple[float, ...]:
        graph, warm = name
        cold_s = _COMPILE_S[json.loads(graph)["compile_mode"]]
        return (0.2 * cold_s if warm else cold_s,)


def _row(loader: str, config: dict[str, Value], rng: random.Random, *, warm: bool) -> Row:
    peak = peak_bytes(config)
    if peak > CAPACITY_BYTES:
        return Row(
            number=0, began_s=0.0, config=config, status=TrialStatus.OOM, phase="compile", cause="out of memory",
            wall_s=7.0, phase_s={"load": 3.0, "build": 2.0, "compile": 1.5}, peak_bytes=CAPACITY_BYTES,
        )  # fmt: skip
    rate = rate_per_s(loader, config) * math.exp(rng.gauss(0, NOISE_SD))
    batch = int(config["batch_size"])
    steps = max(1, round(0.6 * rate / batch))
    windows = tuple(
        (steps, steps * batch, round(steps * batch / rate * math.exp(rng.gauss(0, WINDOW_SD)), 6)) for _ in range(8)
    )
    measured_s = sum(s for _, _, s in windows)
    compiled = config["compile_mode"] != "off"
    compile_s = _COMPILE_S[str(config["compile_mode"])] * (0.2 if compiled and warm else 1.0)
    warmup_s = max(1.0, 4 * batch / rate)
    phases = {"load": 3.0, "build": 2.0, "compile": compile_s, "warmup": warmup_s, "measure": measured_s + 0.3}
    device, loading = device_per_s(config), loader_per_s(loader, config)
    spread = 2.365 * WINDOW_SD / math.sqrt(8)
    return Row(
        number=0, began_s=0.0, config=config, status=TrialStatus.COMPLETE, phase="measure",
        wall_s=sum(phases.values()) + 0.5, phase_s=phases, cache_warm=warm if compiled else None,
        rate_per_s=rate, low_per_s=rate * (1 - spread), high_per_s=rate * (1 + spread),
        relative_se=WINDOW_SD / math.sqrt(8), degrees=7.0, steady_per_s=rate, loader_per_s=loading,
        device_per_s=device * math.exp(rng.gauss(0, NOISE_SD)), wait_fraction=max(0.0, 1 - rate / device),
        peak_bytes=peak, startup_s=5.0, compile_s=compile_s, warmup_s=warmup_s, measured_s=measured_s,
        epoch_samples=100_000, settled=True, windows=windows,
    )  # fmt: skip


def _standin(name: str) -> tuple[Surface, Truth]:
    loader = name.removeprefix(PREFIX)
    if loader not in _LOADERS:
        raise SystemExit(f"{name} is none of {', '.join(PREFIX + known for known in _LOADERS)}")
    heading = Heading(
        name=name,
        made="generated",
        machine="none: generated from the formulas in benchmarks/standins.py",
        workload=f"a convolutional network on a large GPU, loader {loader}",
        device="cuda:0",
        batch_size=int(_BASELINE["batch_size"]),
        memory_bytes=CAPACITY_BYTES,
        plan=MeasurePlan(),
        knobs=_KNOBS,
        baseline=canonical(_BASELINE),
    )
    surface = StandIn(heading, ())
    rates = {
        key(config): math.log(rate_per_s(loader, config))
        for config in surface.space.grid()
        # A configuration that leaves less is never recommended.
        if peak_bytes(config) <= (1 - HEADROOM) * CAPACITY_BYTES
    }
    best = max(rates, key=lambda one: rates[one])
    return surface, Truth(rates, best, NOISE_SD, 0.0)


@lru_cache(maxsize=8)
def open_surface(path: Path) -> tuple[Surface, Truth]:
    """Open a surface together with its noise-free rates; cached per process.

    Args:
        path: a recorded surface, or ``standin:NAME``.
    """
    if str(path).startswith(PREFIX):
        return _standin(str(path))
    surface = read_surface(path)
    return surface, truth_of(surface)
