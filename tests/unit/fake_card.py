"""A CUDA device in virtual time."""

from __future__ import annotations

import time

import pytest
import torch


class FakeCard:
    """A CUDA device that takes 20 ms for a step, behind a host that takes 1 ms to enqueue one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy_until_s = 0.0
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = max(time.monotonic(), card.busy_until_s)

            def synchronize(self) -> None:
                time.sleep(max(0.0, self.at_s - time.monotonic()))

            def elapsed_time(self, end: Event) -> float:
                assert time.monotonic() >= end.at_s, "the event has not happened yet"
                return 1e3 * (end.at_s - self.at_s)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def work(self, batch: object) -> FakeLoss:
        time.sleep(0.001)
        self.busy_until_s = max(time.monotonic(), self.busy_until_s) + 0.02
        return FakeLoss(self.busy_until_s)

    def synchronize(self) -> None:
        float(FakeLoss(self.busy_until_s))


class FakeLoss:
    """A loss that is known when its step is over. Reading it waits for that, and takes half a millisecond."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def __float__(self) -> float:
        time.sleep(max(0.0, self._at_s - time.monotonic()) + 0.0005)
        return 1.0
