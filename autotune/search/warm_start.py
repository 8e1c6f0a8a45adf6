"""What a search begins with: data in the page cache, winners of others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.base.clock import Clock
from autotune.base.errors import AutotuneError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import DataRef, Outcome, StudySpec, Value
from autotune.machine import page_cache
from autotune.machine.host import read_host
from autotune.space import Space, key
from autotune.study.request import read_request
from autotune.study.tables import read_trials
from autotune.workload.data import sets

# Warm start: the winners of earlier studies are tried first.

#: Maximum number of such configurations. Each costs a trial, and the sampler knows what usually wins without them.
MAX_WARM = 3
#: Maximum number from a forked study, which has measured the same workload.
MAX_FORKED = 5


def best_of(files: StudyFiles) -> list[dict[str, Value]]:
    """Return the best configurations of a study, finished or not, best first and without its baseline.

    Raises:
        MachineError: the study's database cannot be read.
    """
    trials = [t for t in read_trials(files) if t.score is not None]
    if not trials:
        return []
    baseline = key(trials[0].config)
    ranked = sorted((t for t in trials if key(t.config) != baseline), key=lambda t: -(t.score or 0.0))
    return [dict(t.config) for t in ranked[:MAX_FORKED]]


def winners_elsewhere(
    files: StudyFiles, spec: StudySpec, space: Space, say: Callable[[str], None]
) -> list[dict[str, Value]]:
    """Return the winners of earlier studies of the same training in the same folder, on any hardware, as configurations
    of this space. What was only likely to be faster is none. Studies that cannot be read are skipped.

    Args:
        say: called once with a sentence that names the studies.
    """
    found: dict[str, tuple[str, dict[str, Value]]] = {}
    for name, then, outcome in _others(files):
        best = space.completed(outcome.best.config)
        won = outcome.evidence is None and key(outcome.best.config) != key(outcome.baseline.config)
        legal = space.refusal(best) is None and key(best) != key(space.baseline)
        if _is_alike(then, spec) and then.objective == spec.objective and won and legal:
            found.setdefault(key(best), (name, best))
    chosen = list(found.values())[:MAX_WARM]
    if chosen:
        say(f"trying first what won in {', '.join(name for name, _ in chosen)}")
    return [config for _, config in chosen]


def _is_alike(one: StudySpec, other: StudySpec) -> bool:
    """Return whether two studies are of the same training: of scripts, many are called train.py."""
    commands = [None if c is None else (c.folder, *c.words) for c in (one.command, other.command)]
    return one.model == other.model and one.args == other.args and commands[0] == commands[1]


def _others(files: StudyFiles) -> Iterator[tuple[str, StudySpec, Outcome]]:
    """Return the other finished studies in the folder, newest first."""
    found = []
    for request in files.folder.parent.glob("*/study.yaml"):
        other = StudyFiles(request.parent)
        if other.folder == files.folder or not other.outcome.is_file():
            continue
        # A damaged study must not prevent this search.
        with contextlib.suppress(AutotuneError, OSError, ValueError):
            outcome = Outcome.model_validate_json(other.outcome.read_text())
            found.append((other.name, read_request(other), outcome))
    return iter(sorted(found, key=lambda one: one[1].created, reverse=True))


# Makes the data of a search ready: generated photographs, a slow store, the page cache.

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
