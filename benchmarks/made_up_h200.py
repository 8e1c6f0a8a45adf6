"""Whole searches on a made-up H200, in virtual time.

``python -m benchmarks.made_up_h200 SECONDS [--seed N] [--set NAME=VALUE]…`` searches for ``resnet50`` on synthetic
images and prints its launches. A search of ten minutes takes some fifteen seconds. With ``--seeds N`` it searches N
times, and prints for each what was found, as a fraction of the best rate there is.

The seconds, rates and bytes are those that `benchmarks/results/card-nvidia-h200.md` and the probes of the same card
report, put into formulas:

* device: a step takes the longer of its kernels (by precision, memory format, compile mode, batch) and the host's time
  to enqueue them. Batches from pinned memory are copied beside the kernels, others before them.
* loader: a worker takes a fixed time to make an image, and another to put it into new shared memory, by its bytes; so
  does the one thread that receives batches and copies them to pinned memory. In slots, both hardly take any.
* memory: linear in the batch. First steps: compiling, with a cold or a warm cache; libraries; what cuDNN tries.
* noise: launches of equals differ by 0.1 % with pinned memory, and by 5 to 8 % without.

The formulas are not evidence of the card: they show where a search's seconds go, and whether it finds what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from unittest.mock import patch

from autotune import search as searching
from autotune.base.clock import VirtualClock
from autotune.base.files import write_atomic
from autotune.base.observer import Observer
from autotune.base.records import (
    Beat,
    Config,
    HeatPlan,
    Hold,
    LaunchKind,
    Outcome,
    Phase,
    StudySpec,
    TrainCheck,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
    Window,
)
from autotune.child.windows import Block, Timed, Windows
from autotune.knobs.batch_memory import in_slots
from autotune.knobs.compile_mode import compiles, mode_of
from autotune.knobs.num_workers import workers_of
from autotune.launcher.watch import Watch, open_folder
from autotune.machine.gpu import Gpu
from autotune.search import setup
from autotune.search.replay import PARTS, Row, ShownEntrant
from autotune.search.replay.run import replay_heat
from autotune.search.request import Device
from autotune.search.setup import Environment
from autotune.space import device_part, key
from tests.support import make_host, make_probe

IMAGE_BYTES, IMAGES = 3 * 224 * 224 * 4, 1_281_167
CAPACITY_BYTES = 149 * 10**9
GPU = Gpu(
    0,
    "GPU-a",
    "NVIDIA H200",
    "580.159.04",
    mig=False,
    memory_bytes=150_754_820_096,
    memory_used_bytes=0,
    utilization_percent=0,
    power_limit_w=700.0,
    processes=(),
    compute_capability=(9, 0),
)
HOST = make_host(
    cpu_model="Intel(R) Xeon(R) Processor",
    cores=16,
    memory_bytes=126 * 2**30,
    available_bytes=125 * 2**30,
    shm_bytes=2**37,
    shm_free_bytes=2**37,
    open_files=20_000,
)
PROBE = make_probe(
    torch_version="2.11.0+cu130",
    cuda_version="13.0",
    device="cuda:0",
    device_name="NVIDIA H200",
    device_memory_bytes=150_109_880_320,
    device_free_bytes=CAPACITY_BYTES,
    tf32=True,
    cudagraphs=True,
    compiler="triton 3.6.0",
    cores=16,
    multiprocessors=132,
    dataset_samples=IMAGES,
    sample_bytes=IMAGE_BYTES,
    sample_tensors=2,
    wants_data="images",
    images_vary=False,
    own_optimizer_impl="foreach",
    workload_knobs={"floats": ("host", "device")},
    workload_maths={"floats": False},
)
#: Seconds of an image's kernels, by precision: contiguous, and channels_last.
_KERNELS_S = {
    "fp32": (0.470e-3, 0.420e-3),
    "tf32": (0.465e-3, 0.410e-3),
    "bf16": (0.360e-3, 0.162e-3),
    "fp16": (0.360e-3, 0.160e-3),
}
#: What is left of the kernels' time when they are compiled, and of the host's.
_COMPILED = {"off": 1.0, "default": 0.72, "reduce-overhead": 0.71, "max-autotune": 0.69}
_ENQUEUE_S = {"off": 0.017, "default": 0.013, "reduce-overhead": 0.010, "max-autotune": 0.010}
_OPTIMIZER_S = {"for-loop": (4.0e-3, 6.0e-3), "foreach": (1.0e-3, 1.0e-3), "fused": (0.5e-3, 0.3e-3)}
_ACTIVATION_BYTES = {"fp32": 86e6, "tf32": 86e6, "bf16": 45e6, "fp16": 45e6}
#: What scaling the loss adds to a step: it waits for the device.
_SCALER_S = 3e-3


def batch_of(config: Config) -> int:
    """Return the images of a step."""
    return int(config["batch_size"])


def bytes_of(config: Config) -> int:
    """Return the bytes of an image in a batch: of floats, or of what the device makes floats of."""
    return IMAGE_BYTES // (4 if config.get("workload.floats") == "device" else 1)


@dataclass(frozen=True)
class Card:
    """What differs from machine to machine with such a card.

    Attributes:
        pinned_gb_s, pageable_gb_s: copies to the card.
        receiver_per_s: images of floats in new memory that the thread that pins memory can hand on.
        slots_receiver_per_s: if they lie in slots.
        worker_per_s: images that a worker makes. new_memory_s: what it takes besides to put one into new memory.
        alone_per_s: images that a loader without workers makes.
        compile_s: of the first step with the mode ``default`` and a cold cache. tries_s: of one for which cuDNN tries
            its algorithms.
    """

    pinned_gb_s: float = 20.0
    pageable_gb_s: float = 8.0
    receiver_per_s: float = 4300.0
    slots_receiver_per_s: float = 16_000.0
    worker_per_s: float = 20_000.0
    new_memory_s: float = 0.405e-3
    alone_per_s: float = 12000.0
    compile_s: float = 42.0
    tries_s: float = 2.4

    def kernels_s(self, config: Config) -> float:
        """Return the seconds of a step's kernels."""
        channels_last = config.get("memory_format") == "channels_last"
        seconds = 4e-3 + _KERNELS_S[str(config["precision"])][channels_last] * batch_of(config)
        if config.get("cudnn_benchmark"):
            seconds *= 0.97
        return seconds * _COMPILED[mode_of(config)] + _OPTIMIZER_S[str(config["optimizer_impl"])][0]

    def step_s(self, config: Config) -> float:
        """Return the seconds of a step whose batch is on the card."""
        host_s = _ENQUEUE_S[mode_of(config)] + _OPTIMIZER_S[str(config["optimizer_impl"])][1]
        return max(self.kernels_s(config), host_s) + (_SCALER_S if config["precision"] == "fp16" else 0.0)

    def trained_s(self, config: Config) -> float:
        """Return the seconds of a step whose batch is in the host's memory."""
        batch_bytes = batch_of(config) * bytes_of(config)
        if not config.get("pin_memory"):
            return self.step_s(config) + batch_bytes / (self.pageable_gb_s * 1e9)
        return max(self.step_s(config), self.kernels_s(config) + batch_bytes / (self.pinned_gb_s * 1e9))

    def loaded_s(self, config: Config) -> float:
        """Return the seconds in which the loader makes a batch."""
        return batch_of(config) / self.loader_per_s(config)

    def loader_per_s(self, config: Config) -> float:
        """Return the images that the loader makes a second."""
        workers = workers_of(config)
        if not workers:
            return self.alone_per_s
        made = self.of_worker_per_s(config) * min(workers, HOST.cores - 1)
        return min(made, self.received_per_s(config)) if config.get("pin_memory") else made

    def of_worker_per_s(self, config: Config) -> float:
        """Return the images that one worker makes a second."""
        new_s = 0.0 if in_slots(config) else self.new_memory_s * bytes_of(config) / IMAGE_BYTES
        return 1 / (1 / self.worker_per_s + new_s)

    def received_per_s(self, config: Config) -> float:
        """Return the images that the thread that pins memory hands on a second."""
        floats_per_s = self.slots_receiver_per_s if in_slots(config) else self.receiver_per_s
        return floats_per_s * IMAGE_BYTES / bytes_of(config)

    def seconds(self, config: Config) -> tuple[float, float]:
        """Return the seconds of a step of the whole training, and how many of them wait for the loader."""
        trained_s, loaded_s = self.trained_s(config), self.loaded_s(config)
        if not workers_of(config):
            return trained_s + loaded_s, loaded_s
        if not config.get("pin_memory"):
            # The thread that trains gives the memory of received batches back.
            part = 0.0 if in_slots(config) else 1.0 if config["precision"] == "fp16" else 0.15
            trained_s += batch_of(config) * bytes_of(config) / 9e9 * part
        return max(trained_s, loaded_s), max(0.0, loaded_s - trained_s)

    def peak_bytes(self, config: Config) -> int:
        """Return the largest part of the card's memory that a training takes."""
        of_image = _ACTIVATION_BYTES[str(config["precision"])] * (0.93 if compiles(config) else 1.0)
        return int(0.6e9 + batch_of(config) * of_image)

    def per_s(self, config: Config) -> float:
        """Return the images a second of the whole training."""
        return batch_of(config) / self.seconds(config)[0]

    def best_per_s(self) -> float:
        """Return the largest rate that a training on this card can have."""
        values: dict[str, Iterable[Value]] = {
            "precision": _KERNELS_S,
            "compile_mode": _COMPILED,
            "memory_format": ("contiguous", "channels_last"),
            "batch_size": (128, 256, 512, 1024),
            "num_workers": (0, 4, 8, HOST.cores - 1),
            "pin_memory": (False, True),
            "cudnn_benchmark": (False, True),
            "optimizer_impl": _OPTIMIZER_S,
            "batch_memory": ("fresh", "slots"),
            "workload.floats": ("host", "device"),
        }
        configs = (dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values()))
        return max(self.per_s(config) for config in configs if self.peak_bytes(config) < CAPACITY_BYTES)

    def cold_s(self, config: Config) -> float:
        """Return the seconds in which a configuration compiles without a cache."""
        return {"default": self.compile_s, "reduce-overhead": self.compile_s + 2.0}.get(mode_of(config), 240.0)


@dataclass
class CardLauncher:
    """A `Launcher` of launches on the card, in virtual time.

    Attributes:
        log: the launches, in order, with when each began.
    """

    card: Card
    clock: VirtualClock
    seed: int
    log: list[tuple[float, TrialSpec, TrialResult]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"card {self.seed}")
        #: Graphs that the cache has, and kinds of eager steps whose libraries are in the page cache.
        self._compiled: set[str] = set()
        self._read: set[tuple[object, ...]] = set()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        """Run one launch."""
        kinds = {
            LaunchKind.PROBE: self._probe,
            LaunchKind.HEAT: self._heat,
            LaunchKind.TRAIN_CHECK: self._check,
            LaunchKind.HOLD: self._hold,
        }
        files, began_s = open_folder(spec), self.clock.now()
        watch = Watch(spec, self.clock, on_beat, stop)
        if not self.log:
            self.clock.sleep(7.0)  # the template process imports torch
        try:
            result = kinds.get(spec.kind, self._measure)(spec, watch)
        except _Ended as ended:
            result = ended.result
        watch.finish()
        times = {"phase_s": watch.phase_s, "began_s": began_s, "wall_s": self.clock.now() - began_s, "waited_s": 0.12}
        result = result.model_copy(update=times)
        self.clock.sleep(0.12)
        self.log.append((began_s, spec, result))
        write_atomic(files.result, result.model_dump_json())
        return result

    def _go(self, spec: TrialSpec, watch: Watch, *phases: tuple[Phase, float]) -> None:
        """Go through phases of so many seconds."""
        for phase, seconds in phases:
            watch.beat(Beat(phase=phase))
            ends_s = self.clock.now() + seconds
            while self.clock.now() < ends_s:
                self.clock.sleep(min(0.5, ends_s - self.clock.now()))
                self._raise_if_over(spec, watch, phase)

    def _raise_if_over(self, spec: TrialSpec, watch: Watch, phase: Phase) -> None:
        if watch.overdue():
            status = watch.ended or TrialStatus.INTERRUPTED
            raise _Ended(TrialResult(launch=spec.launch, status=status, phase=phase, cause=watch.cause, exit_code=-9))

    def _first_step(self, config: Config, seen: set[tuple[object, ...]] | None = None) -> tuple[float, bool | None]:
        """Return the seconds of a first step, and whether its graph was in the cache.

        Args:
            seen: what a process has run before; ``None``: a launch of its own.
        """
        if compiles(config):
            graph = key(device_part(config))
            warm = graph in self._compiled
            self._compiled.add(graph)
            return self.card.cold_s(config) * (0.25 if warm else 1.0), warm
        tries = bool(config.get("cudnn_benchmark"))
        kind = (config["precision"], config.get("memory_format"), tries)
        shape = (*kind, batch_of(config))
        new = seen is None or shape not in seen
        seconds = (self.card.tries_s if tries else 0.25) if new else 0.05
        if seen is None:
            seconds += 0.6
        else:
            seen.add(shape)
        if kind not in self._read:
            self._read.add(kind)
            seconds += 5.0 if tries else 0.6
        return seconds, None

    def _spread(self, config: Config) -> float:
        """Return by which factor a launch differs from its equals."""
        sd = 0.001 if config.get("pin_memory") else 0.05 if batch_of(config) <= 64 else 0.08
        return math.exp(self._rng.gauss(0, sd))

    def _probe(self, spec: TrialSpec, watch: Watch) -> TrialResult:
        self._go(spec, watch, (Phase.LOAD, 0.2), (Phase.BUILD, 3.5))
        return TrialResult(launch=spec.launch, status=TrialStatus.COMPLETE, exit_code=0, probe=PROBE)

    def _measure(self, spec: TrialSpec, watch: Watch) -> TrialResult:
        """Measure a training, or one of its ceilings."""
        config, card = spec.config, self.card
        trains = spec.kind is not LaunchKind.LOADER_ONLY
        if trains and card.peak_bytes(config) > CAPACITY_BYTES:
            self._go(spec, watch, (Phase.LOAD, 0.2), (Phase.BUILD, 0.4), (Phase.COMPILE, 2.0))
            return TrialResult(
                launch=spec.launch,
                status=TrialStatus.OOM,
                phase=Phase.COMPILE,
                cause="oom",
                exit_code=1,
                peak_bytes=CAPACITY_BYTES,
            )
        batch, workers = batch_of(config), workers_of(config)
        if spec.kind is LaunchKind.MEASURE:
            step_s, wait_s = card.seconds(config)
        elif spec.kind is LaunchKind.DEVICE_ONLY:
            step_s, wait_s = card.step_s(config), 0.0
        else:
            step_s = wait_s = card.loaded_s(config)
        step_s /= self._spread(config)
        compile_s, warm = self._first_step(config) if trains else (0.0, None)
        first_batch_s = batch / (
            card.of_worker_per_s({**config, "batch_memory": "fresh"}) if workers else card.alone_per_s
        )
        startup_s = 0.6 + 0.03 * workers + first_batch_s + (2.5 if trains and compiles(config) else 0.0)
        # Batches that were made during the first step are taken without a measurement.
        queued = workers * int(config.get("prefetch_factor", 2) or 2)
        made = min(queued, int(compile_s * card.of_worker_per_s(config) * workers / batch) + 1) if workers else 0
        handed_per_s = card.received_per_s(config) if config.get("pin_memory") else 20_000
        warmup_s = max(0.25, made * batch / handed_per_s + 3 * step_s)
        phases = (Phase.LOAD, 0.3), (Phase.BUILD, startup_s - 0.3), (Phase.COMPILE, compile_s), (Phase.WARMUP, warmup_s)
        self._go(spec, watch, *phases)
        windows = self._windows(spec, watch, step_s, min(1.0, wait_s / step_s))
        measurement = windows.measured(
            samples=batch,
            epoch_samples=IMAGES,
            turn_s=0.3,
            has_turns=False,
            warmup_steps=math.ceil(warmup_s / step_s),
            warmup_s=warmup_s,
            drained=True,
            unsettled=None,
            batch_size=batch,
            loader_capacity_per_s=card.loader_per_s({**config, "pin_memory": False}),
            startup_s=startup_s,
            compile_s=compile_s,
            compile_cache_warm=warm,
            peak_allocated_bytes=card.peak_bytes(config) if trains else None,
            host_memory_bytes=4 * 2**30,
            losses=(6.9,),
        )
        # A forced turn of the epoch, the end of the process, and the queue's memory given back.
        turn_s = 0.15 + 0.05 * workers + first_batch_s if workers else 0.05
        self.clock.sleep(turn_s + 0.8 + queued * batch * bytes_of(config) / 8e9)
        if windows.slow:
            return TrialResult(
                launch=spec.launch,
                status=TrialStatus.PRUNED,
                phase=Phase.MEASURE,
                cause=f"ran at {measurement.samples_per_s:.4g} samples/s, and is too slow to be the best",
                exit_code=0,
                rate_seen_per_s=measurement.samples_per_s,
                measurement=measurement if len(windows.kept) > 1 else None,
            )
        return TrialResult(
            launch=spec.launch,
            status=TrialStatus.COMPLETE,
            exit_code=0,
            peak_bytes=card.peak_bytes(config),
            measurement=measurement,
        )

    def _windows(self, spec: TrialSpec, watch: Watch, step_s: float, waits: float) -> Windows:
        """Measure windows until they suffice."""
        config, batch = spec.config, batch_of(spec.config)
        watch.beat(Beat(phase=Phase.MEASURE))
        windows, began_s = Windows(spec.plan, HOST.cores), self.clock.now()
        sd = 0.001 if config.get("pin_memory") else 0.03
        steps = max(2, math.ceil(spec.plan.min_window_s / step_s))
        while True:
            seconds = steps * step_s * math.exp(self._rng.gauss(0, sd))
            self.clock.sleep(seconds + step_s + 0.02)
            one_s = seconds / steps
            step = Timed(one_s, waits * one_s, one_s * (1 - waits), self.card.loaded_s(config), 2.0)
            window = Window(steps=steps, samples=steps * batch, seconds=seconds)
            windows.add(Block(window, (step,) * steps, enqueue_s=0.01))
            watch.beat(Beat(phase=Phase.MEASURE, step=1, rate_per_s=batch / one_s))
            self._raise_if_over(spec, watch, Phase.MEASURE)
            if windows.over(self.clock.now() - began_s):
                return windows

    def _heat(self, spec: TrialSpec, watch: Watch) -> TrialResult:
        plan = spec.heat
        assert plan is not None
        seen: set[tuple[object, ...]] = set()
        entrants = tuple(
            self._of_device(config, plan, seen) if plan.side == "device" else self._of_loader(config, plan)
            for config in plan.entrants
        )
        # The card's memory is given back, a step fills the allocator, and what differs is switched.
        mean_s = sum(map(self.card.step_s, plan.entrants)) / len(plan.entrants)
        between_s = 0.15 + 1.5 * mean_s if plan.side == "device" else 1.0
        row = Row(
            number=0,
            began_s=0,
            kind=LaunchKind.HEAT,
            config=entrants[0].config,
            status=TrialStatus.COMPLETE,
            wall_s=1,
            phase_s={},
            startup_s=1.5 + sum({batch_of(config) for config in plan.entrants}) / self.card.alone_per_s,
            side=plan.side,
            entrants=entrants,
            between_s=between_s * sum(len(entrant.turns) for entrant in entrants),
        )
        rng = random.Random(f"{self.seed} {spec.launch}")
        result = replay_heat(spec, plan, row, watch, self.clock, rng, lambda entrant: entrant.first_step_s or 0.0, {})
        self.clock.sleep(1.0)
        return result

    def _of_device(self, config: Config, plan: HeatPlan, seen: set[tuple[object, ...]]) -> ShownEntrant:
        part, step_s = PARTS["device"](config), self.card.step_s(config)
        if self.card.peak_bytes(config) > CAPACITY_BYTES:
            return ShownEntrant(config=part, status=TrialStatus.OOM, cause="oom", first_step_s=2.0)
        first_step_s, _ = self._first_step(config, seen)
        steps = max(1, math.ceil(plan.turn_s / step_s))
        own = math.exp(self._rng.gauss(0, 0.003))
        return ShownEntrant(
            config=part,
            status=TrialStatus.COMPLETE,
            first_step_s=first_step_s + (0.0 if compiles(config) else 3 * step_s),
            peak_bytes=self.card.peak_bytes(config),
            turns=tuple(
                (steps, steps * batch_of(config), steps * step_s * own * math.exp(self._rng.gauss(0, 0.003)))
                for _ in range(40)
            ),
        )

    def _of_loader(self, config: Config, plan: HeatPlan) -> ShownEntrant:
        batch, rate = batch_of(config), self.card.loader_per_s({**config, "pin_memory": False})
        steps = max(1, int(rate * plan.turn_s / batch))
        return ShownEntrant(
            config=PARTS["loader"](config),
            status=TrialStatus.COMPLETE,
            turns=tuple(
                (steps, steps * batch, steps * batch / rate * math.exp(self._rng.gauss(0, 0.03))) for _ in range(8)
            ),
        )

    def _check(self, spec: TrialSpec, watch: Watch) -> TrialResult:
        check = spec.check
        assert check is not None
        first_step_s, _ = self._first_step(spec.config)
        trains_s = first_step_s + check.steps * 0.03 + 0.5
        self._go(spec, watch, (Phase.LOAD, 0.6), (Phase.BUILD, 0.8), (Phase.COMPILE, trains_s))
        self.clock.sleep(0.8)
        losses = tuple(7.0 * (1 + 0.003 * check.seed) * 0.995**step for step in range(check.steps))
        found = TrainCheck(losses=losses, finite=True, changed=1.0)
        return TrialResult(launch=spec.launch, status=TrialStatus.COMPLETE, exit_code=0, check=found)

    def _hold(self, spec: TrialSpec, watch: Watch) -> TrialResult:
        config, plan = spec.config, spec.hold
        assert plan is not None
        first_step_s, _ = self._first_step(config)
        step_s, _ = self.card.seconds(config)
        settled_s = min(plan.max_s, max(plan.min_s, 26 * step_s))
        evaluated_s = (first_step_s + 25.0 if compiles(config) else 1.0) + 3.0
        trained_s = settled_s + plan.sustain_s
        phases = (Phase.LOAD, 0.5), (Phase.BUILD, 1.2), (Phase.COMPILE, first_step_s), (Phase.MEASURE, trained_s)
        self._go(spec, watch, *phases, (Phase.COMPILE, evaluated_s))
        self.clock.sleep(1.5)
        found = Hold(
            steps=50,
            seconds=settled_s,
            settled=True,
            peak_bytes=self.card.peak_bytes(config),
            capacity_bytes=CAPACITY_BYTES,
            alloc_retries=0,
            evaluated="eval",
            sustained_per_s=batch_of(config) / step_s * 0.99,
            sustained_s=plan.sustain_s,
            sm_clock_mhz=1950,
        )
        return TrialResult(launch=spec.launch, status=TrialStatus.COMPLETE, exit_code=0, hold=found)


class _Ended(Exception):
    """A launch is over before its time."""

    def __init__(self, result: TrialResult) -> None:
        super().__init__(result.status)
        self.result = result


@contextlib.contextmanager
def _this_machine() -> Iterator[None]:
    """Have searches see the card and its host as this machine's."""
    devices = (Device("cuda:0", GPU),)
    with contextlib.ExitStack() as patched:
        for module in (searching, setup):
            patched.enter_context(patch.object(module, "resolve_devices", lambda spec: devices))
        patched.enter_context(patch.object(setup, "read_host", lambda: HOST))
        yield


def search(card: Card, budget_s: float, seed: int, folder: Path) -> tuple[CardLauncher, Outcome]:
    """Search on a card; return its launches, and how the search has ended.

    Args:
        folder: of the study.
    """
    clock = VirtualClock()
    launcher = CardLauncher(card, clock, seed)
    env = Environment(Observer(), clock, lambda: None, lambda mark, devices: launcher, lambda *_: None)
    spec = StudySpec(
        name="made-up",
        mark=f"made-up-{seed}",
        created="2026-01-01T00:00:00+00:00",
        model="resnet50",
        data="synthetic",
        budget_s=budget_s,
        seed=seed,
    )
    with _this_machine():
        return launcher, searching.search(spec, folder, env).outcome


def _changes(config: Config, baseline: Config) -> str:
    changed = [f"{name}={value}" for name, value in config.items() if baseline.get(name) != value]
    return ", ".join(changed) or "baseline"


def _told(spec: TrialSpec, result: TrialResult, baseline: Config) -> str:
    if spec.heat is None:
        return _changes(spec.config, baseline)
    compiled = sum(map(compiles, spec.heat.entrants))
    told = f"{len(spec.heat.entrants)} entrants ({compiled} compiled), {spec.heat.side}"
    ranked = [e for e in (() if result.heat is None else result.heat.entrants) if e.ratio]
    if not ranked:
        return told
    best = max(ranked, key=lambda entrant: entrant.ratio or 0.0)
    return f"{told}; best: {_changes(best.config, baseline)}"


def main(words: list[str] | None = None) -> int:
    """Search, and print the launches and the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.made_up_h200")
    parser.add_argument("budget_s", type=float, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="search N times, from this seed on")
    names = ", ".join(one.name for one in fields(Card))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=f"of the card: {names}")
    asked = parser.parse_args(words)
    try:
        card = replace(Card(), **{name: float(value) for name, _, value in (one.partition("=") for one in asked.set)})
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    best_per_s = card.best_per_s() if asked.seeds else 0.0
    for seed in range(asked.seed, asked.seed + asked.seeds):
        with tempfile.TemporaryDirectory() as folder:
            launcher, outcome = search(card, asked.budget_s, seed, Path(folder))
        changes = _changes(outcome.best.config, outcome.baseline.config)
        print(f"seed {seed}: {card.per_s(outcome.best.config) / best_per_s:.2f} of the best: {changes}", flush=True)
    if asked.seeds:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        launcher, outcome = search(card, asked.budget_s, asked.seed, Path(folder))
    baseline, first_s = outcome.baseline.config, launcher.log[0][0]
    for began_s, spec, result in launcher.log:
        rate = f"{result.measurement.samples_per_s:7,.0f}/s" if result.measurement else " " * 9
        print(
            f"{began_s - first_s:6.0f} s +{result.wall_s:5.1f}  {spec.launch:28} {result.status.value:9} {rate}  "
            f"{_told(spec, result, baseline)}"
        )
    best = outcome.best
    print(f"{best.samples_per_second:,.0f} samples/s, {best.speedup:.2f}x: {_changes(best.config, baseline)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
