"""An environment for whole searches in virtual time: a studies folder, a clock, and launches with known rates."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import Measurement, Outcome, StudySpec, TrialSpec, Value
from autotune.search import Environment, load_outcome
from tests.support import FakeClock, Play, ScriptedLauncher, make_measurement, make_probe

FACTORS: dict[tuple[str, Value], float] = {
    ("precision", "bf16"): 1.6,
    ("memory_format", "channels_last"): 1.25,
    ("optimizer_impl", "fused"): 1.02,
    ("batch_size", 64): 1.1,
    ("batch_size", 128): 1.15,
    ("intra_op_threads", 1): 0.3,
    ("intra_op_threads", 2): 0.6,
    ("num_workers", 2): 1.1,
    ("num_workers", 4): 1.2,
}
#: Only the precision can be chosen.
FIXED = {
    "compile_mode": "off",
    "memory_format": "contiguous",
    "optimizer_impl": "for-loop",
    "batch_size": "32",
    "intra_op_threads": "4",
    "num_workers": "0",
}


def rate(spec: TrialSpec) -> float:
    """A surface with a known best: the product of factors, each at its largest."""
    found = 30.0
    for setting in spec.config.items():
        found *= FACTORS.get(setting, 1.0)
    return found


def plain(spec: TrialSpec) -> Play:
    compiled = spec.config["compile_mode"] != "off"
    cold = compiled and not spec.launch.startswith(("verify", "narrow"))
    per_s = rate(spec) * (1.05 if compiled else 1.0)
    return Play(rate_per_s=per_s, wall_s=80.0 if cold else 15.0, measurement=_fed(spec, per_s))


def _fed(spec: TrialSpec, per_s: float) -> Measurement:
    """What workers add to the rate was waiting before."""
    workers = int(spec.config.get("num_workers", 0))
    waits = 1 - FACTORS.get(("num_workers", workers), 1.0) / FACTORS["num_workers", 4]
    capacity = per_s if workers and waits else per_s / (waits or 0.5)
    sides = {"device_per_s": per_s / (1 - waits), "loader_capacity_per_s": capacity, "loader_wait_fraction": waits}
    return make_measurement(per_s, batch_size=spec.batch_size, **sides)


class World:
    """A studies folder, a clock, and the launchers of each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.launchers: list[ScriptedLauncher] = []
        self.signal: int | None = None
        # A resume kills processes with its mark, so test suites that run in parallel need different marks.
        self.mark = uuid4().hex

    def env(
        self, script: Callable[[TrialSpec], Play], raise_at: dict[int, BaseException] | None = None, **probe: object
    ):
        def launcher(mark: str, *_: object) -> ScriptedLauncher:
            made = ScriptedLauncher(script, self.clock, probe=make_probe(**probe), raise_at=raise_at)
            self.launchers.append(made)
            return made

        return Environment(Observer(), self.clock, lambda: self.signal, launcher, lambda *_: None)

    def spec(self, **changes: object) -> StudySpec:
        fields: dict[str, object] = {"name": "s", "mark": self.mark, "created": "2026-01-01T00:00:00+00:00"}
        return StudySpec.model_validate({**fields, "model": "resnet18", "data": "synthetic", **changes})

    @property
    def files(self) -> StudyFiles:
        return StudyFiles(self.folder / "s")

    @property
    def outcome(self) -> Outcome:
        found = load_outcome(self.files)
        assert found is not None
        return found
