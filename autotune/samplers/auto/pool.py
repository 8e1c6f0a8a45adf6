"""Configurations with their features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.base.records import Config
from autotune.samplers.auto.features import Array


@dataclass(frozen=True)
class Pool:
    """Configurations with their features, computed once.

    Attributes:
        device, loader, whole: rows for each model, ``(N, F)``. workers, batches: ``(N,)``. parts, loaders:
            keys of the device's and of the loader's parts.
    """

    configs: list[Config]
    device: Array
    loader: Array
    whole: Array
    workers: Array
    batches: Array
    parts: list[str]
    loaders: list[str]

    @classmethod
    def joined(cls, pools: Sequence[Pool]) -> Pool:
        """Concatenate pools."""
        return cls(
            [c for p in pools for c in p.configs],
            np.vstack([p.device for p in pools]),
            np.vstack([p.loader for p in pools]),
            np.vstack([p.whole for p in pools]),
            np.concatenate([p.workers for p in pools]),
            np.concatenate([p.batches for p in pools]),
            [part for p in pools for part in p.parts],
            [part for p in pools for part in p.loaders],
        )

    def __len__(self) -> int:
        return len(self.configs)

    def __getitem__(self, some: slice | NDArray[np.int64]) -> Pool:
        """Return a subset of the pool."""
        arrays = (self.device, self.loader, self.whole, self.workers, self.batches)
        chosen = range(len(self))[some] if isinstance(some, slice) else some
        configs = [self.configs[i] for i in chosen]
        parts, loaders = ([keys[i] for i in chosen] for keys in (self.parts, self.loaders))
        device, loader, whole, workers, batches = (values[some] for values in arrays)
        return Pool(configs, device, loader, whole, workers, batches, parts, loaders)
