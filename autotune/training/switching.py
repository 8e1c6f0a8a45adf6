"""Switches one training, while it goes on, between configurations: what a running process can change, nothing else.

It owns no loop: whoever trains calls `Switch.to` between two steps. All configurations share the model's weights and
the optimizer's state, so that they need little more memory than the largest of them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune.base.errors import AutotuneError
from autotune.knobs import KNOBS, Knob
from autotune.base.records import Config, Value
from autotune.space import settings

if TYPE_CHECKING:
    import torch
    from torch import nn


#: The process as it was found, by knob.
Found = Sequence[tuple[Knob, object]]


def fixed(config: Config) -> dict[str, Value]:
    """Return the part of a configuration that no running training can be switched to: it is applied at the start."""
    return {name: value for name, value in config.items() if name not in KNOBS or not KNOBS[name].switchable}


def as_found() -> Found:
    """Return how the process is before anything is switched: as the training's own code has left it."""
    return [(knob, knob.read_process()) for knob in KNOBS.values() if knob.switchable]


class Switch:
    """Switches a model and its optimizer between configurations.

    Call every method from the thread that trains. `restore` leaves the process as it was before the first `to`; the
    model and the optimizer stay as they are.

    Args:
        model: on its device; its parameters are those that the optimizer updates.
        before: what `as_found` returned when nothing but what is `fixed` had been applied to the process.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, before: Found) -> None:
        self.model = model
        self.optimizer = optimizer
        self._before = before

    def to(self, config: Config) -> None:
        """Switch to a configuration. Between steps only: there must be no gradients.

        Raises:
            AutotuneError: something is not as the configuration demands.
        """
        self.restore()
        switched = [(knob, value) for knob, value in settings(config) if knob.switchable]
        for knob, value in switched:
            knob.apply_process(value)
            knob.switch_model(self.model, self.optimizer, value)
        wrong = [knob.name for knob, value in switched if not knob.is_in_force(self.model, self.optimizer, value)]
        if wrong:
            raise AutotuneError(f"{', '.join(wrong)} could not be switched")

    def restore(self) -> None:
        """Undo what was applied to the process."""
        for knob, before in self._before:
            knob.restore_process(before)
