"""Batches in slots are the batches of a plain loader, whatever happens to their workers or is done with them."""

from __future__ import annotations

import collections
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from autotune.agent.site.autotune_agent import slots
from autotune.agent.site.autotune_agent.slots import collate_in_slots

Point = collections.namedtuple("Point", "x y")
WORKERS, PREFETCH = 2, 2


class Samples(Dataset[Any]):
    """``count`` samples, each made of its index by a function."""

    def __init__(self, make: Callable[[int], Any], count: int = 64) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def image(index: int) -> torch.Tensor:
    return torch.arange(3 * 8 * 8, dtype=torch.float32).view(3, 8, 8) + index


def everything(index: int) -> dict[str, Any]:
    """A sample with something of all that PyTorch stacks, and of what it does not."""
    return {
        "image": image(index),
        "bytes": torch.full((5,), index % 256, dtype=torch.uint8),
        "half": torch.full((2, 2), index, dtype=torch.bfloat16),
        "numpy": np.full((3, 2), index, dtype=np.int16),
        "scalars": (np.float64(index), np.int32(index), float(index), index, index % 2 == 0),
        "point": Point(torch.tensor(index), torch.tensor(float(index))),
        "nothing": torch.zeros(0, 4),
        "name": f"sample {index}",
        "complex": torch.full((2,), complex(index, 1)),
        "transposed": image(index).permute(1, 2, 0),
    }


def loader(data: Dataset[Any], collate: Any = collate_in_slots, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    shuffle = {} if isinstance(data, IterableDataset) else {"shuffle": True}
    given = {"batch_size": 4, "num_workers": WORKERS, "prefetch_factor": PREFETCH, **shuffle, **options}
    return DataLoader(data, collate_fn=collate, generator=generator, **given)


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal in structure, types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.stride() == other.stride() and one.is_contiguous()
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def copied(batch: Any) -> Any:
    """A batch whose tensors are copies."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return {name: copied(part) for name, part in batch.items()}
    if hasattr(batch, "_fields"):
        return type(batch)(*map(copied, batch))
    return type(batch)(map(copied, batch)) if isinstance(batch, list | tuple) else batch


def places(batches: Iterator[Any]) -> list[int]:
    """The address of each batch's images, of which no batch is kept."""
    return [batch[0].data_ptr() for batch in batches]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_two_epochs_have_the_batches_of_a_plain_loader(*, drop_last: bool, persistent: bool) -> None:
    options = {"drop_last": drop_last, "persistent_workers": persistent}
    data = Samples(everything, 62)
    plain, ours = loader(data, default_collate, **options), loader(data, **options)
    for _ in range(2):
        # As many batches are compared as come: the last one of 62 samples is short.
        pairs = [same(one, other) for one, other in zip(plain, ours, strict=True)]
        assert len(pairs) == 15 + (not drop_last) and all(pairs)


def test_slots_are_used_again() -> None:
    data = Samples(lambda index: (image(index), index), 400)
    fresh = len(set(places(iter(loader(data, persistent_workers=True)))))
    # A slot for each batch in a queue, one in the training, one that a loop still holds when it asks for the next; and
    # each worker's first batch is in new memory.
    assert fresh <= WORKERS * (PREFETCH + 3)


def test_batches_that_are_kept_stay_as_they_were() -> None:
    data = Samples(lambda index: (image(index), index), 400)
    kept, copies = [], []
    for number, batch in enumerate(loader(data)):
        # Some are kept whole, some through a view of a part, and most are not.
        if number % 3 == 0:
            kept.append(batch[0] if number % 2 else batch[0][1:, 2].numpy())
            copies.append(batch[0].clone() if number % 2 else batch[0][1:, 2].clone().numpy())
    assert len(kept) == 34
    for one, copy in zip(kept, copies, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(copy))


def test_more_batches_are_kept_than_there_are_slots() -> None:
    data = Samples(lambda index: (image(index), index), 400)
    plain, ours = list(loader(data, default_collate)), list(loader(data))
    assert len(ours) == 100 and all(map(same, plain, ours))


def test_a_batch_outlives_its_worker_and_the_slots_of_the_dead_are_forgotten() -> None:
    data = Samples(lambda index: (image(index), index))
    last = None
    for _ in range(3):
        for batch in loader(data):
            last = batch
        assert last is not None
        copy = copied(last)
        gc.collect()
        assert same(last, copy)
    alive = {name for name in slots._lent_by if os.path.exists(f"/proc/{name.split('-')[0]}")}
    del last, batch
    for _ in loader(data):
        pass
    assert not alive & slots._lent_by.keys() and len(slots._lent_by) <= WORKERS * slots._MOST


def test_a_killed_worker_is_an_error_as_ever_and_the_next_epoch_is_whole() -> None:
    data = Samples(lambda index: (image(index), index), 4000)
    ours = loader(data)
    batches: Any = iter(ours)
    for _ in range(10):
        next(batches)
    os.kill(batches._workers[1].pid, signal.SIGKILL)
    # PyTorch says so by itself, or a batch that was being sent does.
    with pytest.raises((RuntimeError, ConnectionError, EOFError)):
        list(batches)
    del batches
    assert sum(len(labels) for _, labels in ours) == 4000


def failing(index: int) -> Any:
    if index == 40:
        raise ValueError("sample 40 is broken")
    return image(index), index


def test_an_exception_in_a_worker_is_raised_as_ever() -> None:
    batches, seen = iter(loader(Samples(failing), shuffle=False)), 0
    for _ in range(10):
        seen += len(next(batches)[0])
    with pytest.raises(ValueError, match="sample 40 is broken"):
        next(batches)
    assert seen == 40
    # The workers go on with what comes after it.
    assert sum(len(images) for images, _ in batches) == 20


def growing(index: int) -> tuple[torch.Tensor, int]:
    """Samples of 0 to 31 are smaller than the others, in batches of four in order."""
    return torch.full((3, 8 if index < 32 else 12), float(index)), index


def test_a_shape_may_change_in_the_middle() -> None:
    plain = list(loader(Samples(growing), default_collate, shuffle=False))
    assert all(map(same, plain, loader(Samples(growing), shuffle=False)))


def test_samples_that_cannot_be_stacked_are_pytorchs_error() -> None:
    data = Samples(lambda index: torch.zeros(3 + (index == 50)))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(loader(data, shuffle=False))


class Checked(dict):  # type: ignore[type-arg]
    """A mapping that takes nothing but tensors for values."""

    def __setitem__(self, name: str, value: Any) -> None:
        assert isinstance(value, torch.Tensor)
        super().__setitem__(name, value)

    def update(self, values: Any) -> None:  # type: ignore[override]
        for name, value in values.items():
            self[name] = value


def test_a_mapping_that_looks_at_its_values_gets_tensors() -> None:
    data = Samples(lambda index: Checked({"image": image(index)}))
    plain, ours = list(loader(data, default_collate)), list(loader(data))
    assert all(type(batch) is Checked for batch in ours) and all(map(same, plain, ours))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(image(index), index) for index in range(40)])


def test_a_stream_has_its_batches() -> None:
    assert all(map(same, list(loader(Stream(), default_collate)), loader(Stream())))


def test_what_a_forked_process_drops_the_training_still_has() -> None:
    """A process that is forked while a batch is lent, such as a worker of another loader, may drop its copy of it."""
    batches = iter(loader(Samples(lambda index: (image(index), index), 400), persistent_workers=True))
    next(batches), next(batches), next(batches)
    held = [next(batches)[0]]
    copy = held[0].clone()
    child = os.fork()
    if not child:
        held.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(40):
        next(batches)
        time.sleep(0.001)
    assert torch.equal(held[0], copy)


def test_without_workers_it_is_pytorchs_own() -> None:
    batches = loader(Samples(everything), num_workers=0, prefetch_factor=None)
    assert all(map(same, list(loader(Samples(everything), default_collate)), batches))


def test_workers_that_are_spawned_have_slots_too() -> None:
    data = Samples(everything)
    plain = list(loader(data, default_collate))
    assert all(map(same, plain, loader(data, multiprocessing_context="spawn")))
    assert any(slots._lent_by)


def test_only_pytorchs_collate_function_has_slots() -> None:
    assert slots.why_not(default_collate) is None
    assert slots.why_not(lambda samples: samples) == "batches are made by a function of its own"
