"""What a heat has compared: entrants and their turns."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from autotune.base.records.base import Phase, Record, Side, TrialStatus, Value, without_former
from autotune.base.records.measurement import Surroundings


class Turn(Record):
    """One turn of an entrant: counted steps in a row.

    Attributes:
        seconds: of the counted steps together, on CUDA by the device's clock. samples: in them.
        wait_s: in a script, how long these steps also waited for their loader.
    """

    steps: int
    samples: int
    seconds: float
    wait_s: float | None = None
    around: Surroundings | None = None


class HeatEntrant(Record):
    """What a heat saw of one configuration.

    Attributes:
        status: ``complete``, or ``pruned`` if it dropped out because it was certainly behind; otherwise what it failed
            with. phase, cause, advice, cannot_compile, refuses: of such a failure; see `TrialResult`.
        turns: for each round, ``None`` where it took none.
        ratio, ratio_ci95: its rate on the heat's side relative to the reference's, and the 95 % interval of that;
            ``None`` without a turn in a round of the reference's.
        first_step_s: its very first step, in which its model is compiled.
        peak_bytes: device memory, its own; on a CPU an upper bound, because the process keeps what others have freed.
    """

    config: dict[str, Value]
    status: TrialStatus = TrialStatus.COMPLETE
    phase: Phase | None = None
    cause: str | None = None
    advice: str | None = None
    cannot_compile: bool = False
    refuses: str | None = None
    turns: tuple[Turn | None, ...] = ()
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    first_step_s: float | None = None
    peak_bytes: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, data: Any) -> Any:
        return without_former(data)


class Heat(Record):
    """Several configurations compared within one process. The first entrant is the reference.

    Attributes:
        side: of the training, what was compared.
        noise_sd: standard deviation of the logarithm of one turn's rate, relative to the others of its round.
        switch_s: seconds spent on switching, or on starting and ending loaders. ended: why it ended, in one clause.
    """

    side: Side = "device"
    entrants: tuple[HeatEntrant, ...]
    noise_sd: float
    startup_s: float
    switch_s: float
    measured_s: float
    ended: str

    @property
    def reference(self) -> HeatEntrant:
        """The entrant that ratios are relative to: the first, or the first of those that were left when it failed."""
        return next((e for e in self.entrants if e.ratio is not None), self.entrants[0])


class StudyHeat(Record):
    """A heat of a study.

    Attributes:
        number: counted from 1.
        after: number of trials that had ended when it began.
        wall_s: seconds of its launches together.
    """

    number: int
    after: int
    heat: Heat
    wall_s: float

    @property
    def title(self) -> str:
        """What it is called while it runs."""
        return heat_title(self.number, self.heat.side)


def heat_title(number: int, side: Side) -> str:
    """Return what a heat is called while it runs."""
    return f"heat {number}" if side == "device" else f"heat {number}, of the loader"
