"""The order in which the launches of a study read a data set.

Each launch goes on where the one before has ended, so that it reads samples that no launch has read before, while the
set is large enough. If all read the same ones, or some of the same by chance, the first would bring them into a cache
(the kernel's, a network file system's, a store's) for the next ones, which would look faster than a first epoch is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class SampleOrder(Sampler[int]):
    """Random passes through a data set, one after another, from some place in them on.

    Each iteration draws as many samples as the set has. The next one goes on after the last sample drawn, even if the
    iteration was given up before its end.

    Several ranks divide the passes among them: each draws every ``ranks``-th sample, and an iteration is as much
    shorter.

    Args:
        seed: of the passes; each has a permutation of its own (`torch.randperm`).
        first: number of samples that have been drawn before, by all ranks.
        rank: this one's number.

    Attributes:
        size: number of samples in the set; 0 until `over` tells.
        drawn: number of samples drawn by this object, those that a loader has asked for in advance included.
    """

    def __init__(self, seed: int, first: int = 0, *, rank: int = 0, ranks: int = 1) -> None:
        self.seed = seed
        self.first = first
        self.rank = rank
        self.ranks = ranks
        self.size = 0
        self.drawn = 0
        #: The pass that was drawn from last: its number and its permutation.
        self._pass: tuple[int, list[int]] = (-1, [])

    def over(self, size: int) -> SampleOrder:
        """Return this order, for a set of `size` samples."""
        self.size = size
        return self

    def __len__(self) -> int:
        return self.size // self.ranks

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            number, place = divmod(self.first + self.rank + self.drawn * self.ranks, self.size)
            index = self._permutation(number)[place]
            self.drawn += 1
            yield index

    def _permutation(self, number: int) -> list[int]:
        if self._pass[0] != number or len(self._pass[1]) != self.size:
            # Studies with neighbouring seeds have no pass in common.
            generator = torch.Generator().manual_seed(((self.seed << 20) + number) % 2**63)
            self._pass = number, torch.randperm(self.size, generator=generator).tolist()
        return self._pass[1]
