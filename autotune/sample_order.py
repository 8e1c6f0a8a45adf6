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

    Args:
        seed: of the passes; each has a permutation of its own (`torch.randperm`).
        first: number of samples that have been drawn before.

    Attributes:
        size: number of samples in the set; 0 until `over` tells.
        drawn: number of samples drawn by this object, those that a loader has asked for in advance included.
    """

    def __init__(self, seed: int, first: int = 0) -> None:
        self.seed = seed
        self.first = first
        self.size = 0
        self.drawn = 0

    def over(self, size: int) -> SampleOrder:
        """Return this order, for a set of `size` samples."""
        self.size = size
        return self

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        left = self.size
        while left:
            number, begin = divmod(self.first + self.drawn, self.size)
            some = self._permutation(number)[begin : begin + left].tolist()
            left -= len(some)
            for index in some:
                self.drawn += 1
                yield index

    def _permutation(self, number: int) -> torch.Tensor:
        # Studies with neighbouring seeds have no pass in common.
        generator = torch.Generator().manual_seed(((self.seed << 20) + number) % 2**63)
        return torch.randperm(self.size, generator=generator)
