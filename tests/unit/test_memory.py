"""Device memory, counted on a card whose allocator is made up."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autotune.child.launch import DeviceMemory, available_on
from autotune.child.loop import Measuring
from autotune.search.setup import Setup
from tests.support import FakeClock, make_probe

GIB = 2**30
CUDA = torch.device("cuda", 0)


class FakeCard:
    """24 GiB, of which a desktop holds 2 and this process's context half a GiB. Its allocator keeps what is freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = 24 * GIB
        self.others = int(2.5 * GIB)
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        for name, answer in {
            "get_device_properties": lambda device: SimpleNamespace(total_memory=self.total),
            "mem_get_info": lambda device: (self.total - self.others - self.reserved, self.total),
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peak_allocated,
            "max_memory_reserved": lambda device: self.peak_reserved,
            "memory_stats": lambda device: {"num_alloc_retries": self.retries},
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def hold(self, size: int, *, for_a_moment: int = 0) -> None:
        """Allocate ``size`` bytes, and for a moment some more."""
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated + for_a_moment)
        self.peak_allocated = max(self.peak_allocated, self.allocated + for_a_moment)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset(self, device: torch.device) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    return FakeCard(monkeypatch)


def test_workspaces_of_the_first_step_do_not_count_as_the_trainings_memory(card: FakeCard) -> None:
    memory = DeviceMemory(CUDA, None)
    card.hold(2 * GIB, for_a_moment=14 * GIB)
    card.retries = 3
    assert (memory.peak_reserved_bytes, memory.alloc_retries, memory.first_step_bytes) == (16 * GIB, 3, None)
    memory.first_step_over()
    card.hold(0, for_a_moment=3 * GIB)
    assert memory.peak_reserved_bytes == memory.peak_bytes == 5 * GIB
    assert memory.alloc_retries == 0
    assert memory.first_step_bytes == 16 * GIB
    card.retries += 1
    assert memory.alloc_retries == 1


def test_a_measurement_counts_from_the_end_of_the_first_step(card: FakeCard) -> None:
    launch: Any = Measuring.__new__(Measuring)
    launch.memory = DeviceMemory(CUDA, None)
    launch.count = lambda batch: 1
    launch.spec = SimpleNamespace(config={})
    launch.beats = SimpleNamespace(
        clock=FakeClock(), began=0.0, enter=lambda phase: None, step=lambda number, loss: None
    )
    launch.around = SimpleNamespace(settle_in=lambda: None)

    def work(batch: object) -> torch.Tensor:
        card.hold(GIB, for_a_moment=9 * GIB)
        return torch.zeros(())

    launch.first_step(SimpleNamespace(batch=None), work)
    assert (launch.memory.first_step_bytes, launch.memory.peak_reserved_bytes) == (10 * GIB, GIB)


@pytest.mark.parametrize(("limit", "capacity"), [(None, 21.5), (6 * GIB, 6), (23 * GIB, 21.5)])
def test_the_capacity_is_what_is_free(card: FakeCard, limit: int | None, capacity: float) -> None:
    assert DeviceMemory(CUDA, limit).capacity_bytes == capacity * GIB


def test_what_the_process_has_reserved_is_available_to_it(card: FakeCard) -> None:
    card.hold(GIB, for_a_moment=GIB)
    assert available_on(CUDA) == 21.5 * GIB


def test_a_cpu_has_no_first_step_of_its_own() -> None:
    memory = DeviceMemory(torch.device("cpu"), None)
    memory.first_step_over()
    assert (memory.first_step_bytes, memory.alloc_retries, memory.peak_reserved_bytes) == (None, None, None)


@pytest.mark.parametrize(("limit", "free", "capacity"), [(None, 22, 22), (None, None, 24), (8, 22, 8), (23, 22, 22)])
def test_a_search_plans_with_the_memory_that_was_free_at_the_probe(
    limit: int | None, free: int | None, capacity: int
) -> None:
    probe = make_probe(
        device="cuda:0", device_memory_bytes=24 * GIB, device_free_bytes=None if free is None else free * GIB
    )
    spec = SimpleNamespace(memory_limit_bytes=None if limit is None else limit * GIB)
    setup = Setup(cast(Any, SimpleNamespace(spec=spec)), *cast(Any, (None, probe, None, None, None, 0.0)))
    assert setup.capacity_bytes == capacity * GIB
