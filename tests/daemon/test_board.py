"""What a daemon makes of the driver's answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.daemon.devices import CPU, UNCOUNTED, Board, RealDevices, Settings
from autotune.machine.gpu import Gpu, NvmlUnavailable
from tests.support import FakeClock, make_job_request

CARD = Gpu(0, "GPU-a", "NVIDIA H200", "580", mig=False, memory_used_bytes=2**29, utilization_percent=0, processes=())
INSTANCE = replace(CARD, uuid="MIG-b", name="NVIDIA H200 MIG 1g.18gb", profile="1g.18gb", utilization_percent=None)
SPLIT = replace(CARD, mig=True, instances=(INSTANCE,))


class Machine:
    """A daemon's board, and what the driver answers it."""

    def __init__(self, answer) -> None:
        self.answer = answer
        devices = RealDevices(Settings(), cards=lambda: self.answer, host_pids=True)
        self.board = Board(devices, FakeClock(), quiet_s=0.0)
        self.look()

    def look(self) -> dict[str, str]:
        self.board.update(dict)
        return {name: state.label for name, state in self.board.states.items() if name != CPU}

    def takes_the_cpu(self) -> bool:
        """Whether a job that leaves the device to us runs on the CPU."""
        return self.board.fits(CPU, SimpleNamespace(request=make_job_request(), placed=None))


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_an_instance_that_a_scheduler_assigned_is_a_device(monkeypatch):
    """The driver never tells how busy an instance is; who is on it tells enough."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b")
    machine = Machine([SPLIT])
    assert machine.look() == {"MIG-b": "idle"}
    assert not machine.takes_the_cpu()
    machine.answer = [replace(SPLIT, instances=(replace(INSTANCE, processes=(4711,)),))]
    assert machine.look() == {"MIG-b": "busy"}


def test_each_instance_of_a_split_card_is_a_device():
    other = replace(INSTANCE, uuid="MIG-c", processes=(4711,))
    machine = Machine([replace(SPLIT, instances=(INSTANCE, other)), replace(CARD, uuid="GPU-d")])
    assert machine.look() == {"MIG-b": "idle", "MIG-c": "busy", "GPU-d": "idle"}
    named = make_job_request()
    named = named.model_copy(update={"spec": named.spec.model_copy(update={"device": "cuda:MIG-c"})})
    assert [n for n in machine.board.states if machine.board.fits(n, SimpleNamespace(request=named, placed=None))] == [
        "MIG-c"
    ]


def test_a_card_may_be_split_and_made_whole_again_while_a_daemon_runs():
    machine = Machine([CARD])
    machine.answer = [SPLIT]
    assert machine.look() == {"MIG-b": "idle"}
    machine.answer = [CARD]
    assert machine.look() == {"GPU-a": "idle"}


def test_a_split_card_without_an_instance_takes_no_job():
    machine = Machine([replace(SPLIT, instances=())])
    assert machine.look() == {"GPU-a": "busy"}
    assert not machine.board.states["GPU-a"].reading.usable


def test_of_a_card_how_busy_it_is_must_be_known():
    assert Machine([replace(CARD, utilization_percent=None)]).look() == {"GPU-a": "unknown"}


@pytest.mark.parametrize(("cards", "visible"), [([], None), ([CARD], "")])
def test_where_the_driver_shows_no_card_a_job_takes_the_cpu(monkeypatch, cards, visible):
    """Whatever device files there are: a driver without a card, or a daemon that is to leave the cards alone."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = Machine(NvmlUnavailable("Unknown Error", driver_present=True))
    assert machine.look() == {UNCOUNTED: "unknown"}
    assert not machine.takes_the_cpu()
    machine.answer = cards
    assert machine.look() == {}
    assert machine.takes_the_cpu()


def test_cards_that_do_not_answer_any_more_are_still_there():
    machine = Machine([CARD])
    machine.answer = NvmlUnavailable("Unknown Error", driver_present=True)
    assert machine.look() == {"GPU-a": "unknown"}
    assert not machine.takes_the_cpu()
