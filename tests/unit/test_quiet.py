"""Waiting for an idle machine between two launches, in virtual time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.base.errors import MachineError
from autotune.launcher.quiet import IDLE_BYTES, PATIENCE_S, Quiet, Stopped, cards_of
from autotune.launcher.watch import is_alive
from autotune.machine.gpu import Gpu, NvmlUnavailable
from tests.support import FakeClock, make_spec

MIB = 2**20
UUID = "GPU-11111111-2222-3333-4444-555555555555"
CARD = Gpu(0, UUID, "A card", "580.00", mig=False, memory_bytes=80 * 2**30, memory_used_bytes=400 * MIB)
NO_ANSWER = NvmlUnavailable("there is an NVIDIA driver, and NVML fails with: Unknown Error.", driver_present=True)

Answer = Gpu | NvmlUnavailable | None


def using(mib: int | None, *processes: int) -> Gpu:
    return replace(CARD, memory_used_bytes=None if mib is None else mib * MIB, processes=processes)


class Machine:
    """A card that gives the answers in turn; the last one is repeated."""

    def __init__(self, *answers: Answer, alive: Callable[[int], bool] = lambda pid: False) -> None:
        self.clock = FakeClock()
        self.said: list[str] = []
        self.readings = 0
        self._answers: Iterator[Answer] = iter(answers)
        self._last: Answer = CARD
        self.quiet = Quiet(self.clock, self._cards, self.said.append, alive=alive)

    def answer(self, *answers: Answer) -> None:
        self._answers = iter(answers)

    def _cards(self) -> list[Gpu] | NvmlUnavailable:
        self.readings += 1
        self._last = next(self._answers, self._last)
        if isinstance(self._last, NvmlUnavailable):
            return self._last
        return [replace(CARD, index=1, uuid="GPU-other"), *([self._last] if self._last else [])]

    def wait(self, stop: Callable[[], bool] = lambda: False) -> float:
        return self.quiet.wait([UUID], stop)


def launched(*answers: Answer) -> Machine:
    """A machine after its first launch, before which 400 MiB were in use."""
    machine = Machine(using(400))
    machine.wait()
    machine.answer(*answers)
    machine.readings = 0
    return machine


def test_a_cpu_is_never_waited_for(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.quiet.wait([], lambda: True) == 0.0
    assert machine.readings == 0
    assert cards_of(make_spec(tmp_path / "a", env={"CUDA_VISIBLE_DEVICES": UUID})) == ()


def test_a_launch_uses_only_its_visible_cards(tmp_path: Path) -> None:
    for uuids in ((UUID, "GPU-other"), ("MIG-a",), ("MIG-GPU-a/7/0",)):
        env = {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
        assert cards_of(make_spec(tmp_path / "a", devices=("cuda:0",), env=env)) == uuids
    assert cards_of(make_spec(tmp_path / "a", devices=("cuda:0",))) == ()


def test_an_instance_is_waited_for_and_its_card_is_not() -> None:
    instance = replace(using(60), uuid="MIG-a", profile="1g.18gb")
    machine = Machine()
    machine.quiet = Quiet(machine.clock, lambda: cards, machine.said.append)
    cards = [replace(using(400), mig=True, instances=(instance,))]
    machine.quiet.wait(["MIG-a"], lambda: False)
    cards = [replace(using(90_000), mig=True, instances=(instance,))]
    machine.quiet.wait(["MIG-a"], lambda: False)
    assert machine.said == []


def test_an_idle_card_needs_two_readings() -> None:
    machine = launched(using(400 + IDLE_BYTES // MIB))
    assert machine.wait() < 1.0
    assert machine.readings == 2 and machine.said == []


def test_memory_that_is_released_late_is_waited_for_without_a_message() -> None:
    machine = launched(using(9000), using(9000), using(410))
    assert 0.0 < machine.wait() < 2.0
    assert machine.readings == 4 and machine.said == []


def test_a_single_idle_reading_is_not_enough() -> None:
    machine = launched(using(9000), using(400), using(9000), using(400), using(400))
    machine.wait()
    assert machine.readings == 5


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (using(9000, 4711), "9000 MiB of the GPU A card .* are in use by process 4711, and 400 MiB"),
        (NO_ANSWER, "the driver does not say whether the GPU is idle .*Unknown Error"),
        (None, f"the driver does not list the GPU {UUID}"),
        (using(None), "the driver does not tell how much memory"),
    ],
    ids=["in use", "no answer", "gone", "untold"],
)
class TestQuarantine:
    def test_waiting_is_reported_once(self, answer: Answer, told: str) -> None:
        machine = launched(*[answer] * 50, using(400))
        waited_s = machine.wait()
        assert 20 < waited_s < 60 and machine.clock.now() == pytest.approx(1000.0 + waited_s, abs=1)
        (sentence,) = machine.said
        assert sentence.startswith("waiting, because ") and re.search(told, sentence)
        # The next wait is reported again.
        machine.answer(*[answer] * 50, using(400))
        machine.wait()
        assert len(machine.said) == 2

    def test_waiting_ends_with_the_search(self, answer: Answer, told: str) -> None:
        machine = launched(answer)
        with pytest.raises(Stopped) as caught:
            machine.wait(lambda: machine.clock.now() > 1030)
        assert caught.value.waited_s == pytest.approx(30, abs=2)

    def test_waiting_is_limited(self, answer: Answer, told: str) -> None:
        machine = launched(answer)
        with pytest.raises(MachineError, match=told) as caught:
            machine.wait()
        assert caught.value.exit_code == 5 and caught.value.advice
        assert machine.clock.now() == pytest.approx(1000 + PATIENCE_S, abs=2)
        # Once the card is idle, the search can be resumed.
        machine.answer(using(400))
        assert machine.wait() < 1.0


def test_the_idle_level_drops_when_another_process_leaves() -> None:
    machine = launched(using(100))
    machine.wait()
    machine.answer(*[using(400)] * 10, using(100))
    assert machine.wait() > 1.0


def test_waiting_begins_once_the_driver_has_answered() -> None:
    machine = Machine(*[NO_ANSWER] * 5, using(400))
    assert machine.wait() > 0.0
    assert machine.readings == 7


def test_a_card_without_memory_readings_is_not_waited_for_forever() -> None:
    """If CPU and GPU share memory, the driver does not provide this figure."""
    machine = Machine(using(None))
    assert 5 < machine.wait() < 20
    assert "not waiting for it" in machine.said[-1]
    assert machine.wait() < 1.0


def test_a_process_that_has_not_exited_is_waited_for() -> None:
    clock_at_death = 1030.0
    machine = Machine(alive=lambda pid: pid == 17 and machine.clock.now() < clock_at_death)
    machine.quiet.stuck = [16, 17]
    assert machine.quiet.wait([], lambda: False) == pytest.approx(30.0, abs=2)
    (sentence,) = machine.said
    assert "pid 17" in sentence and "16" not in sentence and "stuck in the kernel" in sentence
    assert machine.quiet.stuck == [] and machine.quiet.wait([], lambda: False) == 0.0


def test_a_process_that_never_exits_ends_the_search() -> None:
    machine = Machine(alive=lambda pid: True)
    machine.quiet.stuck = [17]
    with pytest.raises(MachineError, match="pid 17") as caught:
        machine.quiet.wait([], lambda: False)
    assert "reboot" in str(caught.value.advice)


def test_a_process_is_alive_until_it_ends() -> None:
    assert is_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    # A zombie holds no resources.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid)
    child.wait()
    assert not is_alive(child.pid)
