"""A loader whose first epoch begins before it is iterated. Imports torch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


class StartedLoader(DataLoader[Any]):
    """A DataLoader whose workers begin with the first epoch as soon as it is made.

    They are forked before the process holds a model, as in a trial. The first ``iter`` returns the
    epoch that has begun, each later one a new epoch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._begun: _BaseDataLoaderIter | None = None
        super().__init__(*args, **kwargs)
        # Without workers, there is nothing to begin with.
        if self.num_workers > 0:
            self._begun = super().__iter__()

    def check_worker_number_rationality(self) -> None:
        """Say nothing of more workers than cores: their number was measured."""

    def __iter__(self) -> _BaseDataLoaderIter:
        begun, self._begun = self._begun, None
        return super().__iter__() if begun is None else begun
