"""Batches from workers in new shared memory, and in slots that are used again.

``python -m benchmarks.batch_memory`` prints a table: what two workers deliver of samples that are in memory, both ways
in turns on one core, and how long the training's process is busy with a batch. It first compares 64 batches of each.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from autotune.agent.site.autotune_agent.slots import collate_in_slots
from autotune.machine.host import read_host

WORKERS, PREFETCH, TURNS = 2, 2, 3
TURN_S = 2.0
#: Shape and type of a sample, and samples of a batch.
DATA = [
    ((3, 224, 224), torch.float32, 128),
    ((3, 224, 224), torch.uint8, 128),
    ((3, 96, 96), torch.float32, 32),
    ((1, 28, 28), torch.float32, 64),
    ((16,), torch.float32, 64),
]
WAYS: dict[str, Any] = {"new memory": default_collate, "slots": collate_in_slots}


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples that take no time to make: one image with other labels."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.image = (torch.randn(shape) * 50).to(dtype)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % 1000


def batches(data: Dataset[Any], batch: int, collate: Any) -> Iterator[Any]:
    """Return the batches of a loader, of which each worker has made some."""
    loader = DataLoader(data, batch, num_workers=WORKERS, prefetch_factor=PREFETCH, collate_fn=collate)
    return iter(loader)


def turn(data: Dataset[Any], batch: int, collate: Any) -> tuple[float, float]:
    """Return the samples a second, and the seconds of this process for a batch."""
    made = batches(data, batch, collate)
    for _ in range(4 * WORKERS * PREFETCH):
        next(made)
    count, began, busy = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < TURN_S:
        next(made)
        count += 1
    seconds, busy_s = time.perf_counter() - began, time.process_time() - busy
    made._shutdown_workers()  # type: ignore[attr-defined]
    return count * batch / seconds, busy_s / count


def main() -> int:
    """Print the table."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(
        f"{read_host().cpu_model}, one core, {WORKERS} workers, torch {torch.__version__}; medians of {TURNS} turns\n"
    )
    print("| a sample | batch | MB | new memory | slots | | the process: new memory | slots |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for shape, dtype, batch in DATA:
        data = Samples(shape, dtype)
        ways = [batches(data, batch, collate) for collate in WAYS.values()]
        for _ in range(64):
            one, other = map(next, ways)
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        del ways, one, other
        rows: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(TURNS):
            for way, collate in WAYS.items():
                rows[way].append(turn(data, batch, collate))
        (fresh, fresh_s), (slots, slots_s) = (
            [median(column) for column in zip(*r, strict=True)] for r in rows.values()
        )
        megabytes = batch * data.image.numel() * dtype.itemsize / 1e6
        kind = f"{'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        print(
            f"| {kind} | {batch} | {megabytes:.2g} | {fresh:,.0f}/s | {slots:,.0f}/s | {slots / fresh:.1f}× "
            f"| {1e3 * fresh_s:.2f} ms | {1e3 * slots_s:.2f} ms |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
