"""The times of a window's steps: by the device's clock on CUDA, by the host's on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from autotune.child.windows import Timed


class Event(Protocol):
    """A CUDA event that has been recorded."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to a later one, by the device's clock."""
        ...


@dataclass(frozen=True)
class Taken:
    """One step of an open window.

    Attributes:
        wait_s, made_s: see `Delivery`. host_s: host time of the step without the wait.
        events: recorded before and after the step; ``None`` on a CPU.
    """

    loss: torch.Tensor | None
    wait_s: float
    made_s: float
    host_s: float
    samples: int
    events: tuple[Event, Event] | None = None


def timed(taken: Sequence[Taken], value: Callable[[torch.Tensor], float]) -> tuple[Timed, ...]:
    """Return the times of a window's steps. All events must have happened.

    Args:
        value: converts a loss to a number.
    """
    steps: list[Timed] = []
    previous: Event | None = None
    for t in taken:
        device_s, wait_s = t.host_s, t.wait_s
        step_s = device_s + wait_s
        if t.events is not None:
            start, end = t.events
            device_s = start.elapsed_time(end) / 1e3
            step_s = device_s + wait_s
            if previous is not None:
                # The host runs ahead of a GPU, so a step lasts from the end of the previous step to its own end.
                step_s = previous.elapsed_time(end) / 1e3
                # A GPU that still has queued work while the host waits is not idle.
                wait_s = min(wait_s, max(0.0, previous.elapsed_time(start) / 1e3))
            previous = end
        loss = None if t.loss is None else value(t.loss)
        steps.append(Timed(step_s, wait_s, device_s, t.made_s, loss))
    return tuple(steps)


def after_the_first_s(taken: Sequence[Taken]) -> float | None:
    """Return the seconds from the end of a window's first step to the end of its last, by the device's clock.

    A window begins with nothing queued on the device, so its first step waits for the host, as no step of a plain loop
    does: counted, it would make the rate too low, by 0.2 to 1 % for windows of half a second. ``None`` on a CPU, and
    for a window of one step.
    """
    if len(taken) < 2 or taken[0].events is None or taken[-1].events is None:
        return None
    return taken[0].events[1].elapsed_time(taken[-1].events[1]) / 1e3


@dataclass(frozen=True)
class StepEnd:
    """The end of one step of a training that goes on.

    Attributes:
        event: recorded after the step. turned: the step's batch was the first of an epoch.
    """

    event: Event
    samples: int
    turned: bool


def rate_between(ends: Sequence[StepEnd]) -> float | None:
    """Return the samples per second of steps in a row, without the turns of epochs; ``None`` if there are too few.

    All events must have happened. The first step only tells where the time begins.
    """
    counted = [(before, after) for before, after in pairwise(ends) if not after.turned]
    seconds = sum(before.event.elapsed_time(after.event) for before, after in counted) / 1e3
    return sum(after.samples for _, after in counted) / seconds if seconds > 0 else None
