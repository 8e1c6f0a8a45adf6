"""What a loader has delivered, so that it can be compared with what another has, or the same under other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.base.records.base import Record, Value

_LISTS = ("used", "moved", "stores", "opened", "counts", "grown")


class DeliveredBatch(Record):
    """One batch.

    Attributes:
        samples: what the sampler has chosen: indices, or digests of what else stands for a sample; ``None`` if the data
            set is iterated and nothing tells.
        digests: by place in the batch, as in ``[0]`` or ``['image']``: of all of it, or of each sample.
    """

    samples: tuple[int | str, ...] | None
    digests: dict[str, str | tuple[str, ...]]

    @property
    def size(self) -> int:
        """Number of samples, as far as that is known."""
        rows = [len(found) for found in self.digests.values() if isinstance(found, tuple)]
        return len(self.samples) if self.samples is not None else max(rows, default=1)


class DeliveredEpoch(Record):
    """The batches of an epoch, which ends after some of them.

    Attributes:
        changed: what of its data set the script has changed since the epoch before, such as ``dataset.difficulty``.
        ended: the loader was asked for more, and had none. whole: by itself. total: batches, with those not noted.
        states: digests of the global generators of random numbers with which each worker began, by name.
    """

    changed: tuple[str, ...] = ()
    batches: tuple[DeliveredBatch, ...] = ()
    ended: bool = False
    whole: bool = False
    total: int = 0
    states: tuple[dict[str, str], ...] = ()


class Delivered(Record):
    """What the loaders of one data set have delivered in a training.

    Attributes:
        kind: class of the data set. iterable: it has no indices. workers: of its loader. persist: these do.
        used: the global generators that it draws from.
        moved: what it goes on with from one sample to the next, each ``(where, what)``: ``("dataset.file",
            "the open file 'records.bin'")``; where is empty if only the process was seen to have it open.
        opened: what was opened between its epochs in the process that trains, likewise.
        counts: plain values that differ after a batch.
        stores: what else it holds open that no other process may use, likewise. grown: where it held more after a
            batch.
        first_s, again_s: seconds of making each batch, and of making it once more right after it in the same process.
    """

    kind: str
    iterable: bool
    workers: int = 0
    persist: bool = False
    epochs: tuple[DeliveredEpoch, ...] = ()
    used: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    stores: tuple[tuple[str, str], ...] = ()
    opened: tuple[tuple[str, str], ...] = ()
    counts: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    first_s: tuple[float, ...] = ()
    again_s: tuple[float, ...] = ()


class Deliveries(Record):
    """What all loaders of a training have delivered.

    Attributes:
        sets: by data set, in the order in which they were first iterated over.
        done: as many epochs were seen as were asked for. lost: why not all was noted, if that is so.
    """

    sets: tuple[Delivered, ...] = ()
    done: bool = False
    lost: str | None = None


class DataVerdict(Record):
    """Whether a configuration's loader delivers what that of the baseline does.

    Attributes:
        trial: of the configuration. passed: ``None`` if it was not compared, or could not be.
        reason: why not; or in what way it was compared, if that is less than sample by sample.
        batches, samples, epochs: that were compared. needless: the loader is set as the baseline's.
    """

    trial: int
    config: dict[str, Value]
    passed: bool | None
    reason: str | None = None
    batches: int = 0
    samples: int = 0
    epochs: int = 0
    needless: bool = False


def deliveries_of(events: Sequence[Mapping[str, Any]]) -> Deliveries:
    """Return what the agent has noted; see `autotune_agent.deliveries` for its events."""
    sets: dict[int, dict[str, Any]] = {}
    epochs: dict[int, list[dict[str, Any]]] = {}
    done, lost = False, None
    made: dict[tuple[int, int], tuple[Any, float]] = {}
    seen: set[str] = set()
    for event in events:
        kind = event["e"]
        if kind != "loader" and "l" in event and event["l"] not in sets:
            # Of a process that has outlived another launch.
            continue
        if kind == "loader":
            sets[event["l"]] = {
                **{name: event[name] for name in ("kind", "iterable", "workers", "persist")},
                **{name: {} for name in _LISTS},
                **{name: [] for name in ("first_s", "again_s")},
            }
            epochs[event["l"]] = []
        elif kind == "epoch":
            epochs[event["l"]].append({"changed": tuple(event["changed"]), "batches": [], "states": []})
        elif kind == "batch":
            found = DeliveredBatch(
                samples=None if event["i"] is None else tuple(event["i"]),
                digests={p: tuple(d) if isinstance(d, list) else d for p, d in event["d"].items()},
            )
            epochs[event["l"]][event["n"]]["batches"].append(found)
        elif kind == "end":
            epochs[event["l"]][event["n"]].update(ended=True, whole=event["whole"], total=event["batches"])
        elif kind == "made":
            sets[event["l"]]["used"].update(dict.fromkeys(event["used"]))
            before = made.get((event["l"], event["pid"]))
            if before is not None and before[0] == event["i"]:
                sets[event["l"]]["first_s"].append(before[1])
                sets[event["l"]]["again_s"].append(event["s"])
            # What was made in an epoch before is no first time.
            is_new = str(event["i"]) not in seen
            seen.add(str(event["i"]))
            made[event["l"], event["pid"]] = (event["i"] if is_new else None, event["s"])
        elif kind == "peek":
            epochs[event["l"]].pop()
        elif kind in ("grown", "counts"):
            sets[event["l"]][kind].update(dict.fromkeys(event["what"]))
        elif kind in ("moved", "stores", "opened"):
            sets[event["l"]][kind].update(dict.fromkeys((where, what) for where, what in event["what"]))
        elif kind == "done":
            done = True
        elif kind == "lost":
            lost = str(event["why"])
    # A worker that goes on to its next epoch has got further since.
    starts = {(event["l"], event["pid"]): event for event in reversed(events) if event["e"] == "fetch"}
    for event in starts.values():
        of = epochs.get(event["l"], [])
        if event["w"] is not None and event["n"] < len(of):
            of[event["n"]]["states"].append(event["states"])
    for facts in sets.values():
        facts.update({name: tuple(facts[name]) for name in _LISTS})
    return Deliveries(
        sets=tuple(
            Delivered(**facts, epochs=tuple(DeliveredEpoch(**epoch) for epoch in epochs[number]))
            for number, facts in sets.items()
        ),
        done=done,
        lost=lost,
    )
