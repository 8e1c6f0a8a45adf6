"""Batches in slots are the batches of a plain loader, whatever happens to their workers or is done with them."""

from __future__ import annotations

import collections
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from autotune.agent.site.autotune_agent import dataset_state, slots
from autotune.agent.site.autotune_agent.slots import collate_in_slots
from autotune.knobs.batch_memory import KNOB, MOST_SLOTS

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
    alive = {name for name in slots._mapped if os.path.exists(f"/proc/{name.split('-')[0]}")}
    del last, batch
    for _ in loader(data):
        pass
    assert not alive & slots._mapped.keys() and len(slots._mapped) <= WORKERS * slots.MOST


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


def test_what_a_forked_process_was_given_stays_although_the_training_drops_it() -> None:
    """A process that saves a batch, which fork has handed to it."""
    batches = iter(loader(Samples(lambda index: (image(index), index), 400), persistent_workers=True))
    next(batches), next(batches), next(batches)
    batch = next(batches)
    copy, (ended, end) = copied(batch), os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(ended, 1)
        os._exit(0 if same(batch, copy) else 1)
    del batch
    for _ in range(60):
        next(batches)
    os.write(end, b"x")
    assert os.waitpid(child, 0)[1] == 0
    # The worker has made another slot in its place, and the rest goes on.
    assert len(places(batches)) == 36


class Own(dict):  # type: ignore[type-arg]
    """A mapping that changes tensors, and leaves anything else out."""

    def update(self, values: Any) -> None:  # type: ignore[override]
        super().update({name: value + 1 for name, value in values.items() if isinstance(value, torch.Tensor)})


def test_functions_and_mappings_of_the_users_own_see_tensors() -> None:
    data = Samples(lambda index: Own(image=image(index), number=index))
    plain, ours = list(loader(data, default_collate)), list(loader(data))
    assert all(map(same, plain, ours)) and set(ours[5]) == {"image", "number"}

    def wrapped(samples: list[Any]) -> Any:
        batch = collate_in_slots(samples)
        return batch[0] * 2, batch[1]

    data = Samples(lambda index: (image(index), index))
    doubled = [(images * 2, numbers) for images, numbers in loader(data, default_collate)]
    assert all(same(list(one), list(other)) for one, other in zip(doubled, loader(data, wrapped), strict=True))


def test_pytorchs_function_that_was_extended_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the documentation of ``default_collate`` shows."""

    def stacked(samples: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(list(samples)).float() / 255

    data = Samples(lambda index: torch.full((3, 4), index, dtype=torch.uint8))
    monkeypatch.setitem(slots.pytorchs.default_collate_fn_map, torch.Tensor, stacked)
    assert slots.why_not(default_collate) is not None
    assert all(map(same, list(loader(data, default_collate)), loader(data)))


def test_threads_may_have_loaders_of_their_own() -> None:
    data, sums = Samples(lambda index: (image(index), index), 40), []

    def train() -> None:
        for _ in range(6):
            sums.append(sum(int(numbers.sum()) for _, numbers in loader(data)))

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [sum(range(40))] * 18


def test_memory_does_not_outlive_the_loader() -> None:
    """The workers give it back at their end, even if a burst of batches was kept."""
    data = Samples(lambda index: (torch.full((2**18,), float(index)), index), 240)
    before = held_bytes()
    kept = [batch for number, batch in enumerate(loader(data)) if number < 40]
    assert len(kept) == 40 and held_bytes() > before + 32 * 2**20
    del kept
    for _ in loader(data):
        pass
    gc.collect()
    assert held_bytes() < before + 16 * 2**20


def held_bytes() -> int:
    """Bytes of the slots that this process has mapped, as far as they take memory."""
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    links = [name for name in files if os.path.lexists(name) and "memfd:autotune" in os.readlink(name)]
    return sum(512 * os.stat(name).st_blocks for name in links)


def test_without_workers_it_is_pytorchs_own() -> None:
    batches = loader(Samples(everything), num_workers=0, prefetch_factor=None)
    assert all(map(same, list(loader(Samples(everything), default_collate)), batches))


def test_workers_that_are_spawned_have_slots_too() -> None:
    data = Samples(everything)
    plain = list(loader(data, default_collate))
    assert all(map(same, plain, loader(data, multiprocessing_context="spawn")))
    assert slots._mapped


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils.data import DataLoader, Dataset
from autotune_agent.loaders import LoaderDoor

class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(float(index))

def negated(samples):
    return -torch.stack(samples)

door = LoaderDoor([], lambda: True, rescue=lambda error: None)
door.install()
loader = DataLoader(Numbers(), batch_size=4, num_workers=1)
slots = {"batch_memory": "slots", "num_workers": 2}

def epoch(told=None):
    refused = ""
    if told is not None:
        try:
            door.switch(told)
        except RuntimeError as error:
            refused = str(error)
    print([int(batch.sum()) for batch in loader], loader.num_workers, loader.collate_fn.__name__, refused)

epoch(), epoch(slots), epoch({"num_workers": 2}), epoch(slots)
loader.collate_fn = negated
epoch(), epoch({"num_workers": 2}), epoch(slots), epoch({})
"""


def test_a_scripts_own_function_stays_whenever_it_is_set() -> None:
    """It mixes its samples from some epoch on, while others of its loader's arguments are tried."""
    site = str(Path(slots.__file__).parents[1])
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, site]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    plain, mixed, refused = "[6, 22, 38]", "[-6, -22, -38]", "batches are made by a function of its own"
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        f"{plain} 1 default_collate",
        f"{plain} 2 collate_in_slots",
        f"{plain} 2 default_collate",
        f"{plain} 2 collate_in_slots",
        f"{mixed} 2 negated",
        f"{mixed} 2 negated",
        f"{mixed} 2 negated {refused}",
        f"{mixed} 1 negated",
    ]


def test_slots_are_no_state_of_a_data_set() -> None:
    """Or workers with slots would be said to load other data, because a mapped file was opened meanwhile."""
    data = Samples(image)
    before = dataset_state.walk({"dataset": data, "collate_fn": collate_in_slots})
    assert len(list(loader(data))) == 16 and slots._mapped
    after = dataset_state.walk({"dataset": data, "collate_fn": collate_in_slots})
    assert not after.opened_since(before) and not after.changed_since(before)


def test_only_pytorchs_collate_function_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The knob, which is asked without torch, knows the same reasons and the same number of slots."""
    memory, function = (refusal.reason for refusal in KNOB.inactive)
    assert slots.why_not(default_collate) is None and slots.MOST == MOST_SLOTS
    assert slots.why_not(lambda samples: samples) == function
    monkeypatch.delattr(os, "memfd_create")
    assert slots.why_not(default_collate) == memory
