"""Predicts the duration of a trial from those of earlier trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from autotune.knobs.compile_mode import GUESS_S, mode_of
from autotune.base.records import Config, Heat, HeatEntrant, Phase, Trial, TrialResult, TrialStatus
from autotune.space import device_part, key

#: A graph that the study has compiled before comes from inductor's cache and takes this fraction of the time.
WARM_COMPILE = 0.3
#: Prior for the number of steps a trial needs even if each is slow: the first, the warm-up and the minimum windows.
STEPS, STEPS_SD = 4.0, 4.0


class CostModel:
    """Predicts the seconds of a trial.

    A trial takes a fixed time (start-up, and windows as long as the plan says) plus a number of steps: a line in the
    step time, fitted by least squares with a prior that keeps the number of steps near `STEPS`. Compile seconds are
    separate: the largest seen per mode with a cold cache, and a fraction of that if the same graph was compiled before.
    A trial that ran out of time while it compiled is a lower bound.

    Args:
        usual_s: duration of a trial without compiling, before one has been observed.
        compile_limit_s: time limit of compiling; what is expected to take longer never ends.
        must_compile: every mode on offer compiles. Then one is tried at least once, however long it is guessed to take.

    Attributes:
        startup_s: the shortest time from the start of a trial to its first step; 0 before there was one.
    """

    def __init__(self, usual_s: float = 0.0, *, compile_limit_s: float = math.inf, must_compile: bool = False) -> None:
        self.startup_s = 0.0
        self._usual_s = usual_s
        self._compile_limit_s = compile_limit_s
        self._must_compile = must_compile
        #: Seconds after which compiling in a mode was ended by a time limit.
        self._at_least_s: dict[str, float] = {}
        self._plain: list[tuple[float, float]] = []
        self._compile_s: dict[str, float] = {}
        self._compiled: set[str] = set()
        self._line: tuple[float, float] | None = None

    def learn(self, config: Config, result: TrialResult) -> None:
        """Record the duration of a complete trial, the compile time of any trial that got past compiling, and the time
        in which one did not."""
        mode, compile_s = mode_of(config), result.phase_s.get(Phase.COMPILE, 0.0)
        if mode != "off" and result.status is TrialStatus.TIMEOUT and result.phase is Phase.COMPILE:
            self._at_least_s[mode] = max(compile_s, self._at_least_s.get(mode, 0.0))
        if mode != "off" and result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
            if graph(config) not in self._compiled:
                self._compile_s[mode] = max(compile_s, self._compile_s.get(mode, 0.0))
            self._compiled.add(graph(config))
        measurement = result.measurement
        if result.status is not TrialStatus.COMPLETE or measurement is None:
            return
        self.startup_s = min(self.startup_s or math.inf, measurement.startup_s)
        step_s = int(config["batch_size"]) / measurement.samples_per_s
        wall_s = result.wall_s if mode == "off" else max(0.0, result.wall_s - compile_s)
        self._plain.append((wall_s, step_s))
        self._line = None

    def learn_entrant(self, entrant: HeatEntrant) -> None:
        """Record the compile time of an entrant of a heat: its first step."""
        mode = mode_of(entrant.config)
        if mode != "off" and any(entrant.turns) and entrant.first_step_s is not None:
            self._compile_s[mode] = max(entrant.first_step_s, self._compile_s.get(mode, 0.0))
            self._compiled.add(graph(entrant.config))

    def expected_s(self, config: Config, rate_per_s: float | None = None) -> float:
        """Return the approximate duration of a trial; infinite if its compilation would exceed its limit.

        Args:
            rate_per_s: the rate it is expected to run at; ``None`` for the step time of the median trial.
        """
        fixed_s, steps = self.line
        step_s = self.usual_step_s if rate_per_s is None else int(config["batch_size"]) / rate_per_s
        return fixed_s + steps * step_s + self.compile_s(mode_of(config), graph(config))

    def compile_s(self, mode: str, name: str) -> float:
        """Return the expected compile time; infinite if it would exceed its limit.

        Args:
            name: the `graph`.
        """
        if mode == "off":
            return 0.0
        # Once something has compiled in this mode, one that did not end in time says little about the others.
        least_s = self._compile_s[mode] if mode in self._compile_s else self._at_least_s.get(mode, 0.0)
        guess_s = 0.0 if mode in self._compile_s else GUESS_S.get(mode, max(GUESS_S.values()))
        cold_s = max(least_s, guess_s)
        if name in self._compiled:
            return WARM_COMPILE * cold_s
        return math.inf if (least_s if self._must_compile else cold_s) >= self._compile_limit_s else cold_s

    def has_compiled(self, mode: str) -> bool:
        """Return whether compile times in the mode are known from a compilation, and not only guessed."""
        return mode == "off" or mode in self._compile_s

    @property
    def usual_step_s(self) -> float:
        """Step time of the median trial."""
        return median([step_s for _, step_s in self._plain] or [0.0])

    @property
    def line(self) -> tuple[float, float]:
        """Fixed seconds of a trial, and the number of steps it takes in addition."""
        if not self._plain:
            return self._usual_s, 0.0
        if self._line is None:
            self._line = _line(self._plain)
        return self._line


def graph(config: Config) -> str:
    """Return the part of a configuration that inductor's cache depends on."""
    return key(device_part(config))


def cold_compiles(trials: Sequence[Trial], heats: Sequence[Heat]) -> dict[str, float]:
    """Return the longest first step, in seconds, of each `graph` that was compiled: that with a cold cache.

    A later launch of the same graph meets a warm one, even if it is the first with its configuration.
    """
    seen = [(t.config, t.result.measurement.compile_s) for t in trials if t.result.measurement is not None]
    seen += [(e.config, e.first_step_s or 0.0) for heat in heats for e in heat.entrants if any(e.turns)]
    found: dict[str, float] = {}
    for config, seconds in seen:
        if mode_of(config) != "off":
            found[graph(config)] = max(seconds, found.get(graph(config), 0.0))
    return found


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return fixed seconds and steps. Outliers (disturbed trials) affect the fixed part only through its median."""
    steps_seen = [step_s for _, step_s in points]
    centre = sum(steps_seen) / len(points)
    walls = sum(w for w, _ in points) / len(points)
    # A ridge penalty towards STEPS, scaled to trials that scatter by a second.
    ridge = 1 / STEPS_SD**2
    across = sum((s - centre) ** 2 for s in steps_seen) + ridge
    slope = (sum((s - centre) * (w - walls) for w, s in points) + ridge * STEPS) / across
    slope = max(0.0, slope)
    return max(0.0, median(w - slope * s for w, s in points)), slope
