"""Searches in virtual time with a budget of a few launches, where something faster is to be had."""

import io
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.errors import AutotuneError
from autotune.base.records import (
    Beat,
    CommandRef,
    Config,
    HeatPlan,
    LaunchKind,
    Outcome,
    Phase,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Turn,
    Value,
)
from autotune.knobs.compile_mode import compiles
from autotune.launcher.watch import Watch
from autotune.report.panel import PlainLines
from autotune.search import Environment, search
from autotune.stats import racing
from tests.support import Play, ScriptedLauncher, make_measurement, make_probe

from .world import World

#: Of a launch, the part before it measures; seconds between the turns of a heat, and those of an eager first step.
START, SWITCH_S, FIRST_S = 0.6, 0.05, 0.3
#: On shared cores, turns vary by this much, and each so often one is slower by a third.
TURN_SD, OUTLIERS, OUTLIER = 0.04, 0.03, 1.33


@dataclass(frozen=True)
class Case:
    """One search: how much launches vary and take, how many fit, whether the loader is the limit, whether freed
    memory can be kept, and whether anything is faster at all."""

    seed: int
    noise: float
    launch_s: float
    launches: float = 8.0
    script: bool = True
    starved: bool = False
    malloc: bool = False
    gains: bool = True

    @property
    def budget_s(self) -> float:
        return self.launches * self.launch_s


class Training:
    """A made-up training that can be made faster by 15 % or more, or by nothing, drawn from a case.

    Attributes:
        effects: of values on the logarithm of the device's rate. load_per_s: samples that one process loads.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        for attempt in range(100):
            rng = self.rng = random.Random(f"{case.seed} {attempt}")
            self.effects: dict[tuple[str, Value], float] = {
                ("precision", "bf16"): rng.choice((-0.3, 0.0, 0.15, 0.3, 0.8)),
                ("memory_format", "channels_last"): rng.choice((-0.1, 0.0, 0.15, 0.3)),
                ("optimizer_impl", "foreach"): rng.choice((0.0, 0.03)),
                ("optimizer_impl", "fused"): rng.choice((0.0, 0.05, 0.2)),
                ("batch_size", 64): rng.choice((-0.05, 0.0, 0.1)),
                ("batch_size", 128): rng.choice((-0.1, 0.0, 0.15)),
                ("compile_mode", "default"): rng.choice((-0.5, 0.0, 0.2)),
            }
            if case.malloc:
                self.effects["malloc", "keep"] = rng.choice((0.0, 0.1, 0.3))
            # What a heat tells of a configuration may be a little beside the truth.
            self.beside = {name: rng.gauss(0, 0.01) for name in self.effects}
            self.load_per_s = 120.0 if case.starved else rng.choice((3000.0, 20_000.0))
            if not case.gains:
                self.effects, self.load_per_s = {}, 1e7
            if self.best >= 1.15 or not case.gains:
                return
        raise AssertionError("no training")

    @property
    def best(self) -> float:
        """The largest ratio to be had without compiling, at the batch size that it has."""
        gains = [
            max((0.0, *(effect for (name, _), effect in self.effects.items() if name == knob)))
            for knob in ("precision", "memory_format", "optimizer_impl", "malloc")
        ]
        best = self.device_per_s({}) * math.exp(sum(gains))
        loads = self.load_per_s * 4
        return min(best, loads) / self.rate({})

    def device_per_s(self, config: Config, *, in_heat: bool = False) -> float:
        found = sum(self.effects.get(one, 0.0) + in_heat * self.beside.get(one, 0.0) for one in config.items())
        if in_heat and config.get("malloc") == "default" and config["precision"] == "bf16":
            # As seen where several trainings of which one freed much memory were in one process.
            found += 0.3
        return 300 * math.exp(found)

    def capacity(self, config: Config) -> float:
        workers = int(config.get("num_workers", 0))
        return self.load_per_s * max(1.0, min(workers, 4) * 0.95)

    def rate(self, config: Config) -> float:
        """Return the true rate in samples per second."""
        device, loads = self.device_per_s(config), self.capacity(config)
        return min(device, loads) if int(config.get("num_workers", 0)) else 1 / (1 / device + 1 / loads)

    def play(self, spec: TrialSpec) -> Play:
        """Return what a launch does."""
        case = self.case
        wall_s = case.launch_s + (2 * case.launch_s if compiles(spec.config) and spec.launch.isdigit() else 0.0)
        if spec.kind is LaunchKind.TRAIN_CHECK:
            return Play(wall_s=START * wall_s)
        noise = math.exp(self.rng.gauss(0, case.noise))
        device, loads, rate = self.device_per_s(spec.config), self.capacity(spec.config), self.rate(spec.config)
        sides = {
            "device_per_s": device * noise,
            "loader_capacity_per_s": loads * noise,
            "loader_wait_fraction": max(0.01, 1 - rate / device),
            "startup_s": START * case.launch_s,
        }
        measured = make_measurement(rate * noise, batch_size=spec.batch_size, **sides)
        return Play(rate_per_s=rate * noise, wall_s=wall_s, measurement=measured)


class Launcher(ScriptedLauncher):
    """Plays launches, and heats turn by turn."""

    def __init__(self, training: Training, world: World, probe: Mapping[str, Any]) -> None:
        super().__init__(training.play, world.clock, probe=make_probe(**probe))
        self.training = training

    def _take_turns(self, plan: HeatPlan, watch: Watch, error: BaseException | None) -> TrialResult:
        began = self._clock.now()
        self._clock.sleep(START * self.training.case.launch_s)
        turns = _Turns(self.training, plan, watch, self._clock)
        heat = racing.Rounds(plan, turns, self._clock, self.training.rng).run(began)
        assert heat is not None
        return TrialResult(launch=watch.spec.launch, status=TrialStatus.COMPLETE, exit_code=0, heat=heat)


class _Turns:
    switch_s = 0.0
    prior = racing.PRIORS["cpu"]

    def __init__(self, training: Training, plan: HeatPlan, watch: Watch, clock: Any) -> None:
        self._training, self._plan, self._watch, self._clock = training, plan, watch, clock

    def take(self, entrant: racing.Contender) -> Turn:
        training, plan, rng = self._training, self._plan, self._training.rng
        batch = int(entrant.config["batch_size"])
        self._clock.sleep(SWITCH_S)
        if not entrant.turns and plan.side == "device":
            entrant.first_step_s = 2 * training.case.launch_s if compiles(entrant.config) else FIRST_S
            self._clock.sleep(entrant.first_step_s)
        entrant.peak_bytes = 2**28
        per_s = (
            training.device_per_s(entrant.config, in_heat=True)
            if plan.side == "device"
            else training.capacity(entrant.config)
        )
        step_s = batch / per_s * math.exp(rng.gauss(0, TURN_SD)) * (OUTLIER if rng.random() < OUTLIERS else 1.0)
        steps = max(1, math.ceil(plan.turn_s / step_s))
        self._watch.beat(Beat(phase=Phase.MEASURE, turn=entrant.number, step=len(entrant.turns) + 1, rate_per_s=per_s))
        self._clock.sleep(steps * step_s)
        return Turn(steps=steps, samples=steps * batch, seconds=steps * step_s)

    def leave(self, entrant: racing.Contender) -> None: ...


@dataclass(frozen=True)
class Answer:
    """How a search ended, after how many virtual seconds, with everything it said."""

    case: Case
    training: Training
    elapsed_s: float
    log: str
    outcome: Outcome | None = None
    error: str | None = None

    @property
    def true_ratio(self) -> float:
        """What the winner gives in truth."""
        assert self.outcome is not None
        return self.training.rate(self.outcome.best.config) / self.training.rate(self.outcome.baseline.config)


def answer(case: Case, folder: Path, training: Training | None = None) -> Answer:
    """Search, by default for how the case's own training is fastest."""
    training, world, lines = training or Training(case), World(folder), io.StringIO()
    folder.mkdir(parents=True, exist_ok=True)

    def launcher(mark: str, *_: object) -> ScriptedLauncher:
        made = Launcher(training, world, {"malloc": "default" if case.malloc else None})
        world.launchers.append(made)
        return made

    changes: dict[str, Any] = {"budget_s": case.budget_s, "seed": case.seed}
    if case.script:
        (folder / "train.py").touch()
        changes["command"] = CommandRef(words=(sys.executable, "train.py"), folder=str(folder))
        changes |= {"model": "train", "data": "generated"}
    env = Environment(PlainLines(lines), world.clock, lambda: None, launcher, lambda *_: None)
    outcome, error, began = None, None, world.clock.now()
    try:
        outcome = search(world.spec(**changes), folder, env).outcome
    except AutotuneError as failed:
        error = f"{type(failed).__name__}: {failed}"
    return Answer(case, training, world.clock.now() - began, lines.getvalue(), outcome, error)
