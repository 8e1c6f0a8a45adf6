"""The times of a window's steps, on a device with a clock and a queue of its own."""

from dataclasses import dataclass

import pytest
import torch

from autotune.child.loop import Taken, after_the_first_s, timed

#: The device takes `STEP_S` for a step. The host, which begins with the device idle, takes `HOST_S` to enqueue one.
STEP_S = 0.05
HOST_S = 0.01


@dataclass(frozen=True)
class FakeEvent:
    """A CUDA event that happened at a moment."""

    at_s: float

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * (end.at_s - self.at_s)


def window(steps: int, *, waits_s: dict[int, float] | None = None) -> tuple[list[Taken], float]:
    """Return the steps of a window that begins at 0, and the time at which the host sees its end.

    The device can begin a step when the host has enqueued all of it and the step before is finished.
    """
    host_s = device_s = 0.0
    taken = []
    for number in range(steps):
        wait_s = (waits_s or {}).get(number, 0.0)
        host_s += wait_s
        start_s = max(host_s, device_s)
        host_s += HOST_S
        device_s = max(host_s, device_s) + STEP_S
        loss = torch.tensor(float(number))
        taken.append(Taken(loss, wait_s, 0.02, HOST_S, 8, (FakeEvent(start_s), FakeEvent(device_s))))
    return taken, device_s + 0.001


def test_a_window_is_timed_from_the_end_of_its_first_step() -> None:
    taken, ended_s = window(10)
    assert ended_s == pytest.approx(HOST_S + 10 * STEP_S + 0.001)
    assert after_the_first_s(taken) == pytest.approx(9 * STEP_S)
    steps = timed(taken)
    assert sum(step.step_s for step in steps[1:]) == pytest.approx(9 * STEP_S)
    assert [step.loss for step in steps] == list(range(10))
    assert steps[0].device_s == pytest.approx(HOST_S + STEP_S)
    assert all(step.wait_s == 0 for step in steps)


def test_a_wait_for_the_loader_counts_if_the_device_was_idle_meanwhile() -> None:
    taken, _ = window(4, waits_s={1: 0.03, 3: 0.5})
    steps = timed(taken)
    assert steps[1].wait_s == 0, "the device still had work"
    assert steps[3].wait_s == pytest.approx(0.56 - 0.16)
    assert after_the_first_s(taken) == pytest.approx(sum(step.step_s for step in steps[1:]))


def test_waits_for_what_was_made_are_for_the_hand_over() -> None:
    waits = ((0.1, 0.1), (0.2, 0.0), (0.0, 0.05), (0.1, None))
    taken = [Taken(None, wait_s, 0.02, 0.3, 8, handed_s=handed_s) for wait_s, handed_s in waits]
    assert [step.handed_s for step in timed(taken)] == [0.1, 0.0, 0.0, None]


def test_one_step_and_steps_on_a_cpu_are_timed_by_the_host() -> None:
    assert after_the_first_s(window(1)[0]) is None
    on_cpu = [Taken(None, 0.1, 0.02, 0.3, 8)] * 3
    assert after_the_first_s(on_cpu) is None
    assert [(s.step_s, s.device_s, s.wait_s, s.loss) for s in timed(on_cpu)] == [(0.4, 0.3, 0.1, None)] * 3
