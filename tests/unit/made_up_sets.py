"""Made-up data sets that hold state of all kinds, anywhere: does the comparison of data pass only what is the same?

``python made_up_sets.py FIRST COUNT [plain]`` prints one JSON object for each case: what it was, whether workers
deliver the same by construction (``safe``), and what the comparison says (``passed``, ``why``). ``plain``: only data
sets without any state.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

from autotune import stats
from autotune.base.records import deliveries_of
from autotune.child.trail import refused_by
from autotune.launcher import script_entry

sys.path.append(str(script_entry.FOLDER))
from autotune_agent.deliveries import Noting

# Of more workers than cores.
warnings.simplefilter("ignore", UserWarning)

LENGTH = 48
FOLDER = Path(tempfile.mkdtemp())
FILE = FOLDER / "numbers.bin"
FILE.write_bytes(b"".join(i.to_bytes(4, "little") + bytes(60) for i in range(LENGTH + 1)))


def opened(buffering: int = 0) -> Any:
    return open(FILE, "rb", buffering=buffering)


def read_at(file: Any, i: int) -> int:
    file.seek(64 * i)
    return int.from_bytes(file.read(4), "little")


def numbers(step: int) -> Any:
    n = 0
    while True:
        yield n
        n += step


class Lazy:
    """Opens its file in the process that reads it."""

    file: Any = None

    def __call__(self, i: int) -> float:
        if self.file is None:
            self.file = opened()
        return read_at(self.file, i)


class LazyRandom:
    """Makes its generator in the process that draws."""

    rng: Any = None

    def __init__(self, fixed: bool) -> None:
        self.fixed = fixed

    def __call__(self, i: int) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng(0 if self.fixed else torch.initial_seed())
        return self.rng.random()


class Counter:
    n = 0

    def __call__(self, i: int) -> float:
        self.n += 1
        return self.n


class Cache:
    def __init__(self) -> None:
        self.kept: dict[int, float] = {}

    def __call__(self, i: int) -> float:
        return self.kept.setdefault(i, i * 2.0)


class Late:
    """Tells apart only what comes after what is compared."""

    made = 0

    def __call__(self, i: int) -> float:
        self.made += 1
        return i if self.made < 10_000 else -i


class Seldom(LazyRandom):
    """Draws for few of its samples."""

    def __call__(self, i: int) -> float:
        return super().__call__(i) if i % 7 == 0 else i


class Epoch:
    """What it returns depends on an attribute that the training sets."""

    epoch = 0

    def __call__(self, i: int) -> float:
        return i + 1000 * self.epoch


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, i: int) -> float:
        return self.inner(i)


class Holder:
    def __init__(self, inner: Any) -> None:
        self.deep = inner

    def __call__(self, i: int) -> float:
        held = self.deep
        inner = held["x"] if isinstance(held, dict) else held[-1] if isinstance(held, list) else held
        return inner(i)


class Numbers(Dataset):
    def __init__(self, value: Any) -> None:
        self.value = value

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(float(self.value(i))), i % 10


class Wrapper(Dataset):
    def __init__(self, inner: Any) -> None:
        self.wrapped = inner

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, i: int) -> Any:
        found = self.wrapped[i]
        value, label = found.values() if isinstance(found, dict) else found
        return {"value": value * 2, "label": label}


def _mapped() -> Any:
    with open(FILE, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return lambda i: int.from_bytes(held.read(2), "little") + np.random.default_rng().random()


def _descriptor() -> Any:
    number = os.open(FILE, os.O_RDONLY)

    def value(i: int) -> int:
        os.lseek(number, 64 * i, os.SEEK_SET)
        return int.from_bytes(os.read(number, 4), "little")

    return value


def _pread() -> Any:
    number = os.open(FILE, os.O_RDONLY)
    return lambda i: int.from_bytes(os.pread(number, 4, 64 * i), "little")


def _of(make: Any, use: Any) -> Any:
    def built() -> Any:
        held = make()
        return lambda i: use(held, i)

    return built


def _fixed_seed(_: int) -> None:
    np.random.seed(7)


#: By name: what makes the function of an index, and with which settings workers deliver the same.
ALWAYS, NEVER, ANEW = "always", "never", "anew"
STATELESS = {
    "plain": (lambda: lambda i: 3 * i + 1, ALWAYS),
    "torch": (lambda: lambda i: i + float(torch.rand(())), ALWAYS),
    "random": (lambda: lambda i: i + random.random(), ALWAYS),
    "numpy": (lambda: lambda i: i + np.random.random(), ALWAYS),
    "index": (lambda: lambda i: np.random.default_rng(i).random(), ALWAYS),
    "pread": (_pread, ALWAYS),
    "lazy": (Lazy, ALWAYS),
}
KINDS = {
    **STATELESS,
    "cache": (Cache, ALWAYS),
    "lazy, by worker": (functools.partial(LazyRandom, False), ALWAYS),
    "lazy, fixed": (functools.partial(LazyRandom, True), NEVER),
    "file": (_of(opened, read_at), NEVER),
    "buffered": (_of(functools.partial(opened, 128), read_at), NEVER),
    "descriptor": (_descriptor, NEVER),
    "generator": (_of(lambda: numbers(2), lambda held, i: next(held)), NEVER),
    "iterator": (_of(lambda: iter(range(10**6)), lambda held, i: next(held)), NEVER),
    "zip": (_of(lambda: zip(range(10**6), range(10**6), strict=False), lambda held, i: next(held)[0]), NEVER),
    "own random": (_of(lambda: random.Random(3), lambda held, i: held.random()), NEVER),
    "own numpy": (_of(lambda: np.random.default_rng(3), lambda held, i: held.random()), NEVER),
    "own torch": (_of(lambda: torch.Generator(), lambda held, i: float(torch.rand((), generator=held))), NEVER),
    "counter": (Counter, NEVER),
    "late": (Late, NEVER),
    "seldom": (functools.partial(Seldom, True), NEVER),
    "mapped": (_mapped, NEVER),
    "epoch": (Epoch, ANEW),
    "worker": (lambda: lambda i: i + (get_worker_info().id if get_worker_info() else 0), NEVER),
    "seeded": (lambda: lambda i: np.random.random(), NEVER),
}


def wrapped(value: Any, chance: random.Random) -> Any:
    """Put a function somewhere deep into a data set."""
    for _ in range(chance.randrange(4)):
        ways = [Slotted, Holder, lambda v: Holder({"x": v}), lambda v: Holder([1, v]), lambda v: lambda i: v(i)]
        ways.append(lambda v: functools.partial(lambda f, i: f(i), v))
        value = chance.choice(ways)(value)
    data: Any = Numbers(value)
    for _ in range(chance.randrange(3)):
        data = chance.choice([Wrapper, lambda d: Subset(d, range(len(d))), lambda d: ConcatDataset([d])])(data)
    return data


def deliver(seed: int, name: str, settings: dict[str, Any], batches: int | None) -> Any:
    """Train for two epochs, as far as the loader is concerned; return what it delivers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    value = KINDS[name][0]()
    path = FOLDER / "deliveries.jsonl"
    path.unlink(missing_ok=True)
    limits = [4, 6] if batches is None else [batches, batches]
    plan = {"path": str(path), "seed": 0, "batches": limits, "limit_s": 9.0, "second": 3, "epochs": 2}
    noting = Noting(plan, lambda: True)
    noting.install()
    try:
        init = _fixed_seed if name == "seeded" else None
        loader = DataLoader(wrapped(value, random.Random(seed)), 4, shuffle=True, worker_init_fn=init, **settings)
        for epoch in range(2):
            if name == "epoch":
                value.epoch = epoch
            for _ in loader:
                pass
    finally:
        noting.remove()
    return deliveries_of([json.loads(line) for line in path.read_text().splitlines()])


def case(seed: int, kinds: list[str]) -> dict[str, Any]:
    chance = random.Random(seed)
    name = kinds[seed % len(kinds)]
    settings = {
        "num_workers": chance.choice([2, 2, 4] if name == "lazy, by worker" else [2, 2, 3, 4]),
        "prefetch_factor": chance.choice([1, 2, 4]),
        "persistent_workers": chance.random() < 0.5,
    }
    safe = KINDS[name][1] == ALWAYS or (KINDS[name][1] == ANEW and not settings["persistent_workers"])
    own = deliver(seed, name, {}, None)
    refused = {knob: why for knob, _, why in refused_by(own, {})}
    if not settings["persistent_workers"]:
        refused.pop("persistent_workers", None)
    drawn = len(own.sets[0].epochs[0].batches) // 2
    found = stats.compare_data(own, deliver(seed, name, settings, drawn))
    return {
        "seed": seed,
        "kind": name,
        **settings,
        "safe": safe,
        "passed": found.passed is True and not refused,
        "compared": found.passed,
        "why": next(iter(refused.values()), found.reason),
    }


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    among = list(STATELESS) if "plain" in sys.argv else list(KINDS)
    for number in range(first, first + count):
        print(json.dumps(case(number, among)), flush=True)
