"""The launches of a script: probed, measured, or taken at its word when it reports its own rate."""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from autotune import stats
from autotune.base.errors import WorkloadError
from autotune.base.layout import LaunchFiles
from autotune.base.records import (
    CheckPlan,
    CommandRef,
    DeliveryPlan,
    Measurement,
    Phase,
    Probe,
    TrainCheck,
    TrialSpec,
    Window,
    WorkloadRef,
)
from autotune.child.failure import LEAVES, SKIPS, Slow, Unlike
from autotune.child.launch import Beats
from autotune.child.probe import machine_fields
from autotune.child.script_process import KeptScript, ScriptProcess, commands_pipe, never_inside, too_short, training
from autotune.child.trail import NONE_INSIDE, DeliveryLog, Pauses, SeenLoader, SeenStep, Trail, Trained, refused_by
from autotune.child.windows import Block, SurroundingsReader, Timed, Windows, reason_to_discard
from autotune.knobs import KNOBS, answer_to
from autotune.knobs.batch_size import KNOB as BATCH_SIZE
from autotune.knobs.num_workers import WORKERS
from autotune.knobs.optimizer_impl import KNOB as OPTIMIZER_IMPL
from autotune.knobs.precision import KNOB as PRECISION
from autotune.launcher import script_entry
from autotune.machine.gpu import NvmlUnavailable, gpus, visible
from autotune.machine.host import tree_memory_bytes
from autotune.training.feed import LONGEST_EPOCH_S, MOSTLY_STEADY, NEVER_STEADY

#: Of a script whose epochs are ended early, this many losses are enough: it may end with the last of its epochs.
FEWEST_LOSSES = 8
#: A step counts as waiting for its loader if the wait took more than this fraction of it.
WAITED = 0.05
#: The time limit of a launch is at least this many whole steps.
_FEW = 2
#: An epoch of at most this many steps is measured whole if that takes no longer.
FEW_STEPS = 8


def measure_command(spec: TrialSpec, command: CommandRef, beats: Beats, kept: KeptScript) -> Measurement:
    """Run a command under ``spec.config``, measure its training, and end it.

    Args:
        kept: holds the script to measure, if one is kept.

    Raises:
        Slow: the rate is certainly below the plan's threshold.
        Unlike: the script does not train on its batches as the baseline does.
        Disturbed: other processes kept the machine too busy to measure.
        WorkloadError: the script ended too early, or does not train as far as can be seen.
        Exception: what the script did not catch.
    """
    around = SurroundingsReader.of(spec, beats.clock)
    startup_s = None if kept.script is None else kept.startup_s
    with training(spec, command, beats, kept) as script:
        return _ScriptMeasuring(spec, command, script, around, beats, startup_s).measurement()


def check_command(spec: TrialSpec, command: CommandRef, plan: CheckPlan, beats: Beats) -> TrainCheck:
    """Run a command under ``spec.config`` for the losses of its first steps, and end it.

    A loss that is not finite is a result here, not a failure. Whether tensors change is not checked. What its loaders
    deliver is noted, if the plan says so.

    Raises: as `ScriptProcess.steps`.
    """
    log = DeliveryLog(plan.deliveries, LaunchFiles(Path(spec.folder)))
    script = ScriptProcess(spec, command, beats, losses=plan.steps, seed=plan.seed, deliveries=plan.deliveries)
    trail = script.trail
    try:
        for _ in script.looks():
            # What the reference delivers is already known.
            over = plan.reference or log.is_over()
            if not all(map(math.isfinite, trail.losses)) or (len(trail.losses) >= plan.steps and over):
                break
    except Exception:
        # A script may fail because its epochs are ended early. The one it is compared with got through two of them.
        survived = plan.deliveries is not None and plan.deliveries.epochs > 1
        if survived or not log.has_ended_early or len(trail.losses) < min(plan.steps, FEWEST_LOSSES):
            raise
    finally:
        script.end()
    finite = list(takewhile(math.isfinite, trail.losses))
    enough = min(plan.steps, FEWEST_LOSSES) if log.has_ended_early else plan.steps
    if len(finite) == len(trail.losses) < enough:
        raise too_short(script)
    return TrainCheck(
        losses=tuple(finite), finite=len(finite) == len(trail.losses), changed=1.0, deliveries=log.found()
    )


@dataclass
class _Warm:
    """The warm-up: its number of steps, their total time, and whether the loader's head start was used up.

    Attributes:
        own: those of its steps in which nothing else was observed.
    """

    steps: int = 0
    seconds: float = 0.0
    drained: bool = False
    own: list[SeenStep] = field(default_factory=list)


@dataclass
class _ScriptMeasuring:
    spec: TrialSpec
    command: CommandRef
    script: ScriptProcess
    around: SurroundingsReader
    beats: Beats
    #: The start-up time of a script that an earlier launch has started.
    startup_s: float | None
    _turns_s: list[float] = field(default_factory=list)
    _trained: Trained = field(default_factory=Trained)
    #: Seconds of steps in the middle of an epoch.
    _inside_s: list[float] = field(default_factory=list)
    #: Whether windows are whole epochs.
    _whole: bool = False
    _pauses: Pauses = field(default_factory=Pauses)
    #: Approximate seconds of an epoch; and seconds since the windows began.
    _epoch_s: float = 0.0
    _elapsed_s: float = 0.0
    #: `SeenLoader.made` when the windows began.
    _made_before: tuple[int, float] = (0, 0.0)

    def __post_init__(self) -> None:
        self._windows = Windows(self.spec.plan, self.around.cores)
        sets_batch_size = BATCH_SIZE.name in script_entry.set_by(self.command)
        self._counts_samples = bool(self.command.samples_per_step) or sets_batch_size

    def measurement(self) -> Measurement:
        """Watch the script until its rate is known."""
        steps = self.script.steps()
        first = self._next(steps)
        self.around.settle_in()
        trail = self.script.trail
        first_at = first.ended_at - first.host_s
        forward_at = trail.began_at if trail.began_at is not None else first_at
        startup_s, compile_s = forward_at - self.beats.began, max(0.0, first_at - forward_at)
        if self.startup_s is not None:
            startup_s, compile_s = self.startup_s, first.host_s
            self.beats.enter(Phase.WARMUP)
        warm = self._warm_up(steps, first)
        if self.startup_s is not None:
            # The first step is counted as compilation.
            warm.seconds -= first.seconds
        self.beats.enter(Phase.MEASURE)
        self._made_before = trail.loader.made if trail.loader is not None else (0, 0.0)
        self._windows.whole_epochs = self._whole = self._are_whole(warm, trail.loader)
        self._measure(steps)
        windows = self._windows
        measurement = trail.known(self._found(warm, startup_s, compile_s), self.spec) if len(windows.kept) > 1 else None
        if windows.slow:
            raise Slow(windows.rate.per_s, measurement)
        if measurement is None and windows.discarded:
            raise windows.disturbed(self._elapsed_s)
        if measurement is None:
            raise too_short(self.script) if self.script.has_ended else never_inside(trail)
        return measurement

    def _next(self, steps: Iterator[SeenStep]) -> SeenStep:
        for step in steps:
            return step
        raise too_short(self.script)

    def _warm_up(self, steps: Iterator[SeenStep], step: SeenStep) -> _Warm:
        """Let the script train until its loader's head start is used up, as far as its waits show that."""
        plan, warm, waited = self.spec.plan, _Warm(), 0
        # A script that has trained already is warm, except for the new settings.
        least = plan.warmup_steps if self.startup_s is None else 1
        while True:
            warm.steps += 1
            warm.seconds += step.seconds
            if step.own_s is not None:
                warm.own.append(step)
            if step.whole:
                waited = waited + 1 if step.wait_s > WAITED * step.seconds else 0
            loader = self.script.trail.loader
            warm.drained = loader is None or warm.steps >= loader.ahead or waited >= 2
            if warm.steps >= least and (warm.drained or warm.seconds > plan.max_warmup_s):
                return warm
            step = self._next(steps)

    def _are_whole(self, warm: _Warm, loader: SeenLoader | None) -> bool:
        """Return whether windows are to be whole epochs, with their turns: short epochs have no steady part."""
        batches = None if loader is None else loader.epoch_batches
        if loader is None or batches is None or not warm.own:
            return False
        samples = median(step.samples or 0 for step in warm.own)
        steps: float = batches
        if loader.batch_size and samples:
            steps = max(1.0, batches * loader.batch_size / samples)
        self._epoch_s = steps * median(step.own_s or 0.0 for step in warm.own)
        if steps <= NONE_INSIDE or batches <= NEVER_STEADY * loader.ahead:
            return self._epoch_s <= LONGEST_EPOCH_S
        short = steps <= FEW_STEPS or batches <= MOSTLY_STEADY * loader.ahead
        return short and self._epoch_s <= self.spec.plan.max_measure_s / stats.FEWEST_WINDOWS

    def _measure(self, steps: Iterator[SeenStep]) -> None:
        """Fill windows until there are enough, or the script ends."""
        plan, loader = self.spec.plan, self.script.trail.loader
        self.around.read()
        began: float | None = None
        taken: list[SeenStep] = []
        #: For windows of whole epochs, or from pause to pause: one has begun, and nothing was observed in it that
        #: cannot be separated from its steps.
        inside, longest_s = False, plan.max_measure_s
        for step in steps:
            began = step.ended_at - step.seconds if began is None else began
            self._elapsed_s = step.ended_at - began
            if self._whole and loader is not None and loader.epoch_batches is None:
                # The epoch turned out to be endless.
                self._whole = self._windows.whole_epochs = False
                taken = []
            if step.turned and step.own_s is not None:
                self._turns_s.append(step.own_s)
            closed = False
            if step.whole or (self._whole and step.alone and step.own_s is not None):
                self._trained.add(step)
            if self.script.trail.failed is not None:
                raise Unlike(self.script.trail.failed, LEAVES)
            if self._whole:
                if step.began:
                    # The last epoch is over. Several short epochs make one window.
                    closed = self._seconds(taken) >= plan.min_window_s and self._close(taken)
                    taken, inside = [] if closed else taken, True
                inside = inside and step.own_s is not None
                if inside:
                    taken.append(step)
                else:
                    taken = []
            else:
                paused, restarts = self._paused(step, loader)
                if restarts:
                    taken, inside = [], False
                by_pauses = self._windows.whole_epochs
                if not step.whole:
                    closed = not by_pauses and self._close(taken)
                    taken, inside = [], False
                elif inside or not by_pauses:
                    taken.append(step)
                full = self._seconds(taken) >= plan.min_window_s and (paused or not by_pauses)
                if full and self._close(taken):
                    closed, taken = True, []
                inside = (inside or paused) and not self._whole
            if closed and not self._pauses.may_be:
                self.script.rate_per_s = self._windows.rate_per_s
                if self._windows.over(self._elapsed_s):
                    return
            elif not taken:
                # What went on meanwhile belongs to no window.
                self.around.read()
            if step.whole:
                # A single step does not make a rate, however long it takes.
                longest_s = max(longest_s, _FEW * step.seconds)
            if not taken and self._elapsed_s > 2 * max(longest_s, self._epoch_s if self._whole else 0.0):
                return

    def _paused(self, step: SeenStep, loader: SeenLoader | None) -> tuple[bool, bool]:
        """Return whether there was a pause in a step, and whether windows change from now on: to run from pause to
        pause, or to be whole epochs where each has its own pauses."""
        pauses = self._pauses
        paused = step.whole and pauses.add(step)
        if step.began:
            pauses.turn()
        self._whole = pauses.regular and pauses.across and self._has_epochs(loader)
        if not self._whole and pauses.regular == self._windows.whole_epochs:
            return paused, False
        # Windows that were closed without regard to pauses do not count.
        self._windows = Windows(self.spec.plan, self.around.cores)
        self._windows.whole_epochs = pauses.regular
        return paused, True

    def _has_epochs(self, loader: SeenLoader | None) -> bool:
        """Return whether there is time for as many epochs as windows are needed."""
        has_length = loader is not None and loader.epoch_batches is not None
        return (
            has_length
            and max(self._pauses.period_s, self._epoch_s) <= self.spec.plan.max_measure_s / stats.FEWEST_WINDOWS
        )

    def _seconds(self, taken: list[SeenStep]) -> float:
        return sum(step.own_s or 0.0 for step in taken)

    def _close(self, taken: list[SeenStep]) -> bool:
        """Note a window, if anything was trained on in it."""
        if not any(map(self._samples, taken)):
            return False
        self._inside_s += [step.seconds for step in taken if step.whole]
        around, energy_j = self.around.read()
        window = Window(
            steps=len(taken),
            samples=sum(self._samples(step) for step in taken),
            seconds=self._seconds(taken),
            around=around,
            discarded=reason_to_discard(around, self.around.cores, self.spec.plan.busy_cores),
        )
        times = [(step.own_s or 0.0, min(step.wait_s, step.own_s or 0.0)) for step in taken]
        timed = tuple(Timed(own_s, wait_s, own_s - wait_s, 0.0) for own_s, wait_s in times)
        self._windows.add(Block(window, timed, energy_j=energy_j))
        unlike = self._trained.unlike(self.spec.plan.per_batch)
        if unlike is not None:
            raise Unlike(unlike, SKIPS)
        return True

    def _samples(self, step: SeenStep) -> int:
        """Return the samples of a step: as the user states them, as observed, or those of the batch that the command
        sets; 1 where they are unknown, so that the rate is one of steps."""
        if step.samples is not None and not self.command.samples_per_step:
            self._counts_samples = True
            return step.samples
        return script_entry.samples_in_step(self.command, self.spec.config)

    def _capacity_per_s(self) -> float | None:
        """Return how many samples per second the loader's workers could deliver, from the time that each takes for a
        batch; ``None`` if that was not observed."""
        loader = self.script.trail.loader
        if loader is None or not loader.batch_size:
            return None
        batches, seconds = loader.made[0] - self._made_before[0], loader.made[1] - self._made_before[1]
        workers = max(1, int(loader.arguments[WORKERS] or 0))
        return workers * loader.batch_size * batches / seconds if batches > 0 and seconds > 0 else None

    def _unsettled(self, warm: _Warm) -> str | None:
        if not warm.drained:
            return "the loader's queue was still draining when warm-up ran out of time"
        if self._pauses.may_be:
            return "the script paused between two steps, and it is not known how often it does"
        return None

    def _found(self, warm: _Warm, startup_s: float, compile_s: float) -> Measurement:
        windows, trail = self._windows, self.script.trail
        steps = [step for block in windows.kept for step in block.steps]
        turn_s = None
        if self._turns_s and self._inside_s:
            turn_s = max(0.0, median(self._turns_s) - median(self._inside_s))
        samples = sum(block.window.samples for block in windows.kept) / len(steps)
        loader = trail.loader
        host_bytes = tree_memory_bytes(self.script.pid)
        backwards, updates = self._trained.per_batch or (None, None)
        return windows.measured(
            samples=samples,
            epoch_samples=0 if loader is None else round((loader.epoch_batches or 0) * (loader.batch_size or 0)),
            turn_s=turn_s,
            has_turns=self._whole,
            warmup_steps=warm.steps,
            warmup_s=warm.seconds,
            drained=warm.drained,
            unsettled=self._unsettled(warm),
            batch_size=round(samples),
            counts="samples" if self._counts_samples else "steps",
            loader_capacity_per_s=self._capacity_per_s(),
            startup_s=startup_s,
            compile_s=compile_s,
            even_steps=stats.even_after([step.device_s for step in steps]),
            backwards_per_batch=backwards,
            updates_per_batch=updates,
            peak_allocated_bytes=host_bytes if trail.allocated_bytes is None else trail.allocated_bytes,
            peak_reserved_bytes=trail.reserved_bytes,
            host_memory_bytes=host_bytes,
        )


NOT_INSIDE = "the program is not looked into, and its command does not set it"


def probe_program(spec: TrialSpec, command: CommandRef, beats: Beats) -> Probe:
    """Run a program that the agent does not enter, and whose command sets all that is searched, until it has told its
    rate twice; end it, and return what can be known about it.

    Raises:
        WorkloadError: it ended before that, or what it reported is not a number.
    """
    script = ScriptProcess(spec, command, beats)
    try:
        step = next(islice(script.steps(), 1), None)
    finally:
        script.end()
    if step is None:
        raise too_short(script)
    in_command = script_entry.set_by(command)
    others = [knob for name, knob in KNOBS.items() if name not in in_command]
    outside = {
        knob.name: {answer_to(knob, value): NOT_INSIDE for value in knob.values or (knob.minimum, knob.maximum)}
        for knob in others
    }
    listed = gpus()
    cards = [] if isinstance(listed, NvmlUnavailable) else visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    card = cards[0] if cards and spec.devices[0] != "cpu" else None
    batch = command.samples_per_step or (spec.batch_size if "batch_size" in in_command else 1)
    # What the program can do is written into its command by its author; only facts about the machine are known.
    return Probe(
        torch_version="",
        torchvision_version="",
        python_version=platform.python_version(),
        device=spec.devices[0],
        device_name="cpu" if card is None else card.name,
        device_memory_bytes=None if card is None else card.memory_bytes,
        device_uuid=None if card is None else card.uuid,
        native_bf16=True,
        tf32=True,
        cudagraphs=True,
        compiler="its own",
        worker_start_method=spec.worker_start_method,
        cores=len(os.sched_getaffinity(0)),
        workload_sha256=spec.workload.sha256,
        workload_name=spec.workload.name,
        default_batch_size=batch,
        has_images=True,
        optimizer_impls=("for-loop", "foreach", "fused"),
        own_optimizer_impl="foreach",
        parameters=0,
        own={} if "batch_size" in in_command else {"batch_size": batch},
        outside=outside,
        in_command=tuple(sorted(in_command)),
    )


def probe_command(spec: TrialSpec, command: CommandRef, beats: Beats, kept: KeptScript) -> Probe:
    """Run a command as it stands until the agent has reported everything that it trains with and what can be set from
    outside; end it, or keep it if ``spec.keeps``.

    Raises: as `ScriptProcess.steps`.
    """
    if command.rate is not None:
        return probe_program(spec, command, beats)
    in_command = script_entry.set_by(command)
    # A script that an earlier look has kept.
    kept.end()
    plan, files = DeliveryPlan(), LaunchFiles(Path(spec.folder))
    log = DeliveryLog(plan, files)
    commands = None
    if spec.keeps:
        with contextlib.suppress(OSError):
            # Some file systems have no pipes.
            commands = commands_pipe(files)
    question = script_entry.probe_plan(in_command=in_command)
    # With the seed, a script that draws the order of its samples draws the same one in the launches that it is compared
    # with.
    script = ScriptProcess(spec, command, beats, asked=question, seed=plan.seed, deliveries=plan, commands=commands)
    trail, steps_s = script.trail, list[float]()
    try:
        for _ in script.looks():
            steps_s += [step.seconds for step in script.found if step.whole]
            done = log.is_over() or (trail.own is not None and not log.has_begun)
            if trail.own is not None and done:
                if commands is not None and trail.own["machine"]["ranks"] == 1 and not log.persists:
                    startup_s = max(0.0, (trail.began_at or beats.began) - beats.began)
                    kept.hold(script, spec, startup_s, cut=log.has_ended_early)
                break
    except Exception:
        # A script may fail because its epochs are ended early. What its training had to show has been observed.
        if trail.own is None or not log.has_ended_early:
            raise
    finally:
        if kept.script is None:
            script.end()
            files.commands.unlink(missing_ok=True)
    if trail.own is None or not trail.own["optimizer"]:
        raise too_short(script)
    if trail.loader is None and any(flag.knob == BATCH_SIZE.name for flag in script_entry.flags_of(command.flags)):
        raise WorkloadError(
            "no loader was seen, so nobody would count the samples of other batch sizes",
            advice=f"leave --map {BATCH_SIZE.name} out.",
        )
    probe = probe_of(command, trail, trail.own, in_command, spec.workload, device=spec.devices[0])
    if probe.device != "cpu" and spec.devices[0] == "cpu":
        raise WorkloadError("the script trains on CUDA, and the CPU was asked for", advice="leave --device out.")
    deliveries = log.found()
    outside = {name: dict(answers) for name, answers in probe.outside.items()}
    for name, answer, why in refused_by(deliveries, probe.own or {}) if deliveries is not None else ():
        outside.setdefault(name, {}).setdefault(answer, why)
    step_s = median(steps_s) if steps_s else None
    return probe.model_copy(update={"deliveries": deliveries, "outside": outside, "step_s": step_s})


def probe_of(
    command: CommandRef,
    trail: Trail,
    told: Mapping[str, Any],
    in_command: set[str],
    workload: WorkloadRef,
    *,
    device: str = "cuda:0",
) -> Probe:
    """Return what is known about a script from what it does by itself.

    Args:
        told: facts and answers of the agent, which was given the plan of `script_entry.probe_plan`.
        in_command: knobs that the command sets. workload: how the script is called.
        device: its card, if it trains on one.

    Raises:
        WorkloadError: autotune does not know the device that it trains on.
    """
    card = device
    machine, model, optimizer = told["machine"], told["model"], told["optimizer"]
    device = model.get("device") or optimizer["device"]
    if device not in ("cpu", "cuda"):
        raise WorkloadError(f"the script trains on {device!r}", advice="autotune knows CPUs and CUDA.")
    loader = trail.loader
    facts = {
        **{door: told[door] for door in ("process", "model", "optimizer")},
        "loader": {} if loader is None else loader.arguments,
        "device": device,
    }
    own = {name: value for name, knob in KNOBS.items() if (value := knob.own_outside(facts)) is not None}
    placed = script_entry.places(command.words)
    # Without a loader the samples are unknown, and rates are in steps.
    own.setdefault(BATCH_SIZE.name, command.samples_per_step or 1)
    offers = {"for-loop": True, "foreach": "foreach" in optimizer, "fused": "fused" in optimizer}
    samples = loader.batch_size * loader.batches if loader and loader.batch_size and loader.batches else None
    outside: dict[str, dict[str, str]] = {}
    for name, value, why_not in told["answers"]:
        if why_not is not None:
            outside.setdefault(name, {})[answer_to(KNOBS[name], value)] = why_not
    if PRECISION.name not in in_command:
        PRECISION.not_beside(own, outside)
    return Probe(
        torch_version=trail.torch_version or "",
        cuda_version=trail.cuda,
        device="cpu" if device == "cpu" else card,
        # Launchers of scripts set one thread, and there may be more cores than that.
        cores=max(told["process"]["threads"], torch.get_num_threads()),
        workload_sha256=workload.sha256,
        workload_name=workload.name,
        default_batch_size=int(own["batch_size"]),
        has_images=bool(model.get("images")),
        has_volumes=bool(model.get("volumes")),
        optimizer_impls=tuple(name for name, there in offers.items() if there),
        own_optimizer_impl=str(own[OPTIMIZER_IMPL.name]),
        parameters=model.get("parameters") or optimizer["parameters"],
        dataset_samples=samples,
        # The value of a knob that has a place in the command is just what has been put there.
        own={name: value for name, value in own.items() if name not in placed},
        outside=outside,
        in_command=tuple(sorted(in_command)),
        ranks=machine["ranks"],
        **machine_fields(machine),
    )
