"""Makes the data of a search ready: generated photographs, a slow store, the page cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.base.clock import Clock
from autotune.workload.data import sets
from autotune.base.errors import UsageError
from autotune.machine import page_cache
from autotune.machine.host import read_host
from autotune.base.observer import Observer
from autotune.base.records import DataRef, StudySpec

#: Time limit for dropping data from the page cache, in seconds.
EVICT_S = 20.0


def generated(observer: Observer, clock: Clock, raise_if_stopped: Callable[[], None]) -> DataRef:
    """Make the generated data."""

    def progress(done: int, total: int) -> None:
        observer.data_progress(done, total)
        raise_if_stopped()

    return sets.ensure_generated(
        processes=read_host().cores, on_progress=progress, on_warning=observer.says, clock=clock
    )


def behind_store(spec: StudySpec, data: DataRef) -> DataRef:
    """Return the data with the slow store that is to be in front of it, if there is one.

    Raises:
        UsageError: there are no files for it to hold, or there is a cache and no store.
    """
    store = spec.store
    if store is None:
        if spec.store_cache_bytes is not None:
            raise UsageError("--store-cache is in front of no store", advice="--store-latency says how slow it is.")
        return data
    if data.path is None:
        raise UsageError(
            "there are no files for the slow store to hold: this data comes from no folder",
            advice="--data DIR, or a workload that uses the generated photographs.",
        )
    if spec.store_cache_bytes is not None:
        held = min(1.0, spec.store_cache_bytes / max(1, sets.size_bytes(Path(data.path))))
        store = store.model_copy(update={"cached": held})
    return data.model_copy(update={"store": store})


def evicted(data: DataRef, clock: Clock) -> bool:
    """Drop the data's files from the page cache; return whether they are gone."""
    return data.path is not None and page_cache.evict(Path(data.path), limit_s=EVICT_S, clock=clock)


def warmed(data: DataRef, observer: Observer, clock: Clock) -> DataRef:
    """Read the data's files once, so that the first launch does not read slower than the last; return the data with the
    state of the page cache."""
    if data.path is None:
        # Only the workload knows where data of its own comes from.
        return data.model_copy(update={"page_cache": "unknown" if data.kind == "none" else None})
    state = page_cache.warm(Path(data.path), clock=clock)
    if state == "cold":
        observer.says(
            "the data does not fit into the page cache: its files may be read faster by one launch than by another"
        )
    return data.model_copy(update={"page_cache": state})
