"""How many seconds a trial will take, from what the trials so far took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from autotune.knobs.compile_mode import GUESS_S, mode_of
from autotune.records import Config, Phase, TrialResult, TrialStatus
from autotune.space import device_part, key

#: A graph that the study has compiled before comes from inductor's cache, in this part of the time.
WARM_COMPILE = 0.3
#: Steps that a trial needs even where each takes long: the first, the warm-up and the least windows.
STEPS, STEPS_SD = 4.0, 4.0


class CostModel:
    """Seconds of trials.

    A trial takes a fixed time (start-up, and windows as long as the plan says), and where steps are slow some steps on
    top: a line in the time of a step, fitted by least squares that hold the number of steps near `STEPS`. Compile
    seconds are apart: per mode the largest seen with a cold cache, and far less where the same graph was compiled
    before.

    Args:
        usual_s: of a trial without compiling, before one was seen.
    """

    def __init__(self, usual_s: float = 0.0) -> None:
        self._usual_s = usual_s
        self._plain: list[tuple[float, float]] = []
        self._compile_s: dict[str, float] = {}
        self._compiled: set[str] = set()
        self._line: tuple[float, float] | None = None

    def learn(self, config: Config, result: TrialResult) -> None:
        """Enter how long a trial took: the whole of a complete one, and the compiling of each that got past it."""
        mode, compile_s = mode_of(config), result.phase_s.get(Phase.COMPILE, 0.0)
        if mode != "off" and result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
            if graph(config) not in self._compiled:
                self._compile_s[mode] = max(compile_s, self._compile_s.get(mode, 0.0))
            self._compiled.add(graph(config))
        measurement = result.measurement
        if result.status is not TrialStatus.COMPLETE or measurement is None:
            return
        step_s = int(config["batch_size"]) / measurement.samples_per_s
        wall_s = result.wall_s if mode == "off" else max(0.0, result.wall_s - compile_s)
        self._plain.append((wall_s, step_s))
        self._line = None

    def expected_s(self, config: Config, rate_per_s: float | None = None) -> float:
        """About how long a trial will take.

        Args:
            rate_per_s: what it is expected to run at; ``None``: as the median trial.
        """
        fixed_s, steps = self.line
        step_s = self.usual_step_s if rate_per_s is None else int(config["batch_size"]) / rate_per_s
        return fixed_s + steps * step_s + self.compile_s(mode_of(config), graph(config))

    def compile_s(self, mode: str, name: str) -> float:
        """What compiling takes.

        Args:
            name: of the `graph`.
        """
        if mode == "off":
            return 0.0
        cold_s = self._compile_s.get(mode, GUESS_S.get(mode, max(GUESS_S.values())))
        return WARM_COMPILE * cold_s if name in self._compiled else cold_s

    @property
    def usual_step_s(self) -> float:
        """A step of the median trial."""
        return median([step_s for _, step_s in self._plain] or [0.0])

    @property
    def line(self) -> tuple[float, float]:
        """Fixed seconds of a trial, and how many steps it takes on top."""
        if not self._plain:
            return self._usual_s, 0.0
        if self._line is None:
            self._line = _line(self._plain)
        return self._line


def graph(config: Config) -> str:
    """What inductor's cache is keyed by, as far as knobs matter."""
    return key(device_part(config))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fixed seconds and steps. Outliers (a trial that was disturbed) pull at the fixed part by its median only."""
    steps_seen = [step_s for _, step_s in points]
    centre = sum(steps_seen) / len(points)
    walls = sum(w for w, _ in points) / len(points)
    # A ridge towards STEPS, worth as much as trials that scatter by a second.
    ridge = 1 / STEPS_SD**2
    across = sum((s - centre) ** 2 for s in steps_seen) + ridge
    slope = (sum((s - centre) * (w - walls) for w, s in points) + ridge * STEPS) / across
    slope = max(0.0, slope)
    return max(0.0, median(w - slope * s for w, s in points)), slope
