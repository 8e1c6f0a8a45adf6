"""What the sampler concludes from the trials and heats so far."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.base.records import Config, Prediction, Value
from autotune.samplers.auto.features import Array
from autotune.samplers.auto.heats import Draft

#: Gains below this are reported as none.
NOTHING = 5e-4
UNMET = "no trial that is left is likely to meet what is required"


@dataclass(frozen=True)
class Proposal:
    """A configuration to try next, and its expected result."""

    config: dict[str, Value]
    predicted: Prediction


@dataclass(frozen=True)
class Look:
    """The conclusions from the trials so far.

    Attributes:
        left_to_gain: expected gain of the most promising trial, relative to the best so far.
        ranking: numbers of the complete trials, most promising first.
        reason_to_end: one sentence, if the search should end.
        heat: the heat to run before any trial, if that is worth more.
    """

    proposal: Proposal | None
    left_to_gain: float
    ranking: tuple[int, ...]
    reason_to_end: str | None = None
    heat: Draft | None = None


@dataclass(frozen=True)
class Outlook:
    """The prospects of all offered configurations.

    Attributes:
        gain: expected gain, ``(N,)``. worth: gain per second; negative if closed. left: see `Look.left_to_gain`.
        top: the configuration of that gain. local: only neighbours of the best count.
    """

    gain: Array
    worth: Array
    left: float
    top: Config | None
    local: bool

    @property
    def why(self) -> str:
        return "near the best" if self.local else "expected gain"


def why_end(left: float, noise_sd: float, *, beyond: bool) -> str:
    """Explain why a search ends by itself."""
    if beyond:
        return "nothing more that would pay is known to fit into memory"
    if left < NOTHING:
        return "no trial that is left is expected to gain anything"
    told = f"the most promising trial left is expected to gain {100 * left:.2g} %"
    return f"{told}, and launches of equals are taken to differ by {100 * noise_sd:.2g} %"
