"""Whether two loaders deliver the same, from digests of what they have delivered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from autotune.base.records import Delivered, DeliveredBatch, DeliveredEpoch, Deliveries, DeliveryPlan

#: Draws that are equal this much more often than beside it would be, by chance, this seldom, are the same draws.
LUCK = 1e-4
#: A batch comes out of a cache if it takes less than this part of its first time, in nearly all cases, and if that was
#: worth keeping.
_CACHED, _NEARLY, _WORTH_S = 0.6, 0.8, 1e-3
#: With fewer samples in common, nothing is said.
LEAST_SAMPLES = 4


@dataclass
class DataComparison:
    """What a comparison has shown.

    Attributes:
        passed: ``None`` if it could not be made. reason: why not, what differs, or in what way it was made if that is
            less than sample by sample, as a clause.
        batches, samples, epochs: that were compared.
    """

    passed: bool | None
    reason: str | None = None
    batches: int = 0
    samples: int = 0
    epochs: int = 0


@dataclass
class _Tally:
    """What was counted.

    Attributes:
        batches, samples: that were compared. wrong, of: by epoch, samples of which something that is the same in each
            draw is another than beside it, and all.
        drawn: samples that differ from draw to draw, of all, and the places in a batch where they do.
    """

    batches: int = 0
    samples: int = 0
    wrong: list[int] = field(default_factory=lambda: [0, 0])
    of: list[int] = field(default_factory=lambda: [0, 0])
    drawn: int = 0
    fixed: bool = False
    places: set[str] = field(default_factory=set)


def plan_beside(own: Deliveries | None) -> DeliveryPlan | None:
    """Return a plan by which as much is noted as in a launch before; ``None`` if that has noted nothing."""
    if own is None or own.lost is not None or not own.sets:
        return None
    # Some are only looked at once, for their means.
    first = max(own.sets, key=lambda one: (sum(1 for e in one.epochs[:2] if e.batches), -own.sets.index(one)))
    drawn = [len(epoch.batches) // (1 if first.iterable else 2) for epoch in first.epochs[:2]]
    if not drawn or not drawn[0]:
        return None
    seen = sum(1 for number in drawn if number)
    return DeliveryPlan(
        least=drawn[0],
        most=drawn[0],
        totals=tuple(one.epochs[0].total if one.epochs else 0 for one in own.sets),
        second=max(drawn[1:], default=0) or 1,
        epochs=seen,
    )


def compare_data(own: Deliveries, other: Deliveries) -> DataComparison:
    """Compare what a loader delivers under two settings, in launches with one seed (see `autotune_agent.deliveries`).

    What is the same each time that a sample is drawn, by the own settings, is to be the same under the others, in each
    epoch. What differs from draw to draw, although the global generators began alike, is drawn from something hidden:
    then the others' draws are to be different as often, from worker to worker and from epoch to epoch.

    Args:
        own: of the settings that are taken to be right. other: of those in question.
    """
    for lost in (own.lost, other.lost):
        if lost is not None:
            return DataComparison(None, f"what is delivered could not be noted: {lost}")
    if not own.sets or not own.sets[0].epochs or not own.sets[0].epochs[0].batches:
        return DataComparison(None, "no batch of a loader of PyTorch's was seen")
    if [s.kind for s in own.sets] != [s.kind for s in other.sets]:
        return DataComparison(None, "the training has other loaders each time")
    found = DataComparison(True)
    how: list[str] = []
    for mine, theirs in zip(own.sets, other.sets, strict=True):
        one = _compare(mine, theirs)
        if not one.passed:
            return one
        found.batches, found.samples = found.batches + one.batches, found.samples + one.samples
        found.epochs = max(found.epochs, one.epochs)
        how += [one.reason] if one.reason else []
    found.reason = "; ".join(dict.fromkeys(how)) or None
    return found


def _compare(own: Delivered, other: Delivered) -> DataComparison:
    workers = other.workers not in (0, own.workers)
    shared = next(why_not_copied(own), None)
    if shared is not None and workers:
        # Whether positions get mixed up is a matter of luck.
        return DataComparison(False, shared)
    if other.opened and other.workers and not other.persist:
        where, what = other.opened[0]
        at = f" ({where})" if where else ""
        return DataComparison(False, f"{what}{at} was opened between epochs, and new workers would share its position")
    epochs = list(zip(own.epochs, other.epochs, strict=False))[:2]
    for number, (mine, theirs) in enumerate(epochs):
        if mine.batches and not theirs.batches and theirs.ended:
            return DataComparison(False, f"its epoch {number + 1} has no batches")
        if mine.ended and theirs.ended and theirs.whole and not mine.whole and len(theirs.batches) < len(mine.batches):
            return DataComparison(False, f"its epoch {number + 1} ends after {len(theirs.batches)} batches")
    same = _same_states(own, other)
    if same is not None:
        return DataComparison(False, same)
    found = _in_turn(epochs) if own.iterable else _by_sample(own, other, epochs)
    if found.passed and sum(1 for e in own.epochs[:2] if e.batches) > sum(1 for _, theirs in epochs if theirs.batches):
        return replace(found, passed=None, reason="its second epoch was not seen")
    if found.passed and workers and own.counts:
        return replace(found, passed=None, reason=f"{own.counts[0]} counts on from sample to sample in each process")
    return found


def _by_sample(own: Delivered, other: Delivered, epochs: list[tuple[DeliveredEpoch, DeliveredEpoch]]) -> DataComparison:
    """Compare what a data set with indices delivers, sample by sample."""
    others = [mine.samples != theirs.samples for e in epochs for mine, theirs in _pairs(*e)]
    if any(others):
        # Asked earlier, by workers, a sampler that learns from the training chooses otherwise.
        return DataComparison(False, f"its sampler chooses others, for {sum(others)} of {len(others)} batches")
    unseen = [
        p for one in (own, other) for e in one.epochs for b in e.batches for p, d in b.digests.items() if "?" in d
    ]
    if unseen or not all(b.digests for e in own.epochs for b in e.batches):
        where = f" ({unseen[0]})" if unseen and unseen[0] else ""
        return DataComparison(None, f"its batches hold something that cannot be looked into{where}")
    if own.used and other.workers and not any(epoch.states for epoch in other.epochs):
        return DataComparison(None, "its workers are not forked, and what they draw at random cannot be compared")
    tally = _Tally()
    for number, (mine, theirs) in enumerate(epochs):
        _count(number, mine, theirs, tally)
    seen = sum(1 for mine, theirs in epochs if mine.batches and theirs.batches)
    counted = (tally.batches, tally.samples, seen)
    if any(tally.wrong):
        return DataComparison(False, _words(tally, own), *counted)
    if tally.drawn:
        passed, reason = _judge_draws(own, other)
        if not passed:
            return DataComparison(passed, reason, *counted)
        if not tally.fixed:
            return DataComparison(None, "the data set draws at random, and hides its generator", *counted)
    if tally.samples < LEAST_SAMPLES:
        return DataComparison(None, "too few samples were delivered", *counted)
    how = None
    if tally.drawn:
        how = f"{_places(tally.places)} drawn by a generator of its own: draws were counted there, not compared"
    return DataComparison(True, how, *counted)


def _pairs(mine: DeliveredEpoch, theirs: DeliveredEpoch) -> Iterator[tuple[DeliveredBatch, DeliveredBatch]]:
    yield from zip(mine.batches, theirs.batches, strict=False)


def _twice(epoch: DeliveredEpoch) -> Iterator[tuple[DeliveredBatch, DeliveredBatch]]:
    """Yield batches that were drawn right after each other."""
    for pair in zip(epoch.batches[::2], epoch.batches[1::2], strict=False):
        if pair[0].samples == pair[1].samples:
            yield pair


def _differing(mine: str | tuple[str, ...] | None, theirs: str | tuple[str, ...] | None, size: int) -> frozenset[int]:
    """Return which samples of a part of a batch differ: all, if it is not told by sample."""
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        return frozenset(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    return frozenset() if mine == theirs else frozenset(range(size))


def _drawn(epoch: DeliveredEpoch) -> list[dict[str, frozenset[int]]]:
    """Return for each batch, by place, the samples that differ although they were drawn right after each other."""
    found: list[dict[str, frozenset[int]]] = []
    for first, second in zip(epoch.batches[::2], epoch.batches[1::2], strict=False):
        rows = {p: _differing(d, second.digests.get(p), first.size) for p, d in first.digests.items()}
        found += [rows, rows]
    # One that was not drawn twice tells nothing.
    return [*found, *({p: frozenset(range(b.size)) for p in b.digests} for b in epoch.batches[len(found) :])]


def _count(number: int, mine: DeliveredEpoch, theirs: DeliveredEpoch, tally: _Tally) -> None:
    for (first, second), drawn in zip(_pairs(mine, theirs), _drawn(mine), strict=False):
        wrong: set[int] = set()
        for place in first.digests.keys() | second.digests.keys():
            size = first.size
            free = drawn.get(place, frozenset())
            wrong |= _differing(first.digests.get(place), second.digests.get(place), size) - free
            tally.fixed |= len(free) < size
            if free and len(mine.batches) > 1:
                tally.places.add(place)
        tally.batches, tally.samples = tally.batches + 1, tally.samples + first.size
        tally.drawn += len(frozenset().union(*drawn.values())) if len(mine.batches) > 1 else 0
        tally.wrong[number] += len(wrong)
        tally.of[number] += first.size


def _words(tally: _Tally, own: Delivered) -> str:
    changed = next((c for epoch in own.epochs[1:] for c in epoch.changed), None)
    if not tally.wrong[0]:
        why = f", in which the script has changed {changed}" if changed else ""
        return f"in its second epoch{why}, {tally.wrong[1]} of {tally.of[1]} samples are others than the script's own"
    return f"{sum(tally.wrong)} of {sum(tally.of)} samples are others than its own loader delivers for the same indices"


def _same_states(own: Delivered, other: Delivered) -> str | None:
    """Return that workers begin with the same random numbers, if they do and those of the own settings do not."""
    for name in own.used:
        if not _repeats(own, name) and _repeats(other, name):
            return f"its workers draw the same numbers from the global generator of {name}"
    return None


def _repeats(one: Delivered, name: str) -> bool:
    seen = [states[name] for epoch in one.epochs[:2] for states in epoch.states if name in states]
    return len(set(seen)) < len(seen)


def _judge_draws(own: Delivered, other: Delivered) -> tuple[bool | None, str | None]:
    """Return whether a hidden generator's draws are no more often the same under other settings, from worker to worker
    and from epoch to epoch; ``None`` if too few were seen to tell; and the reason, a clause."""
    # A tenth of a second to import, which the command line's help does not wait for.
    from scipy.special import bdtrc

    if other.workers > 1 and other.workers % 2:
        # The second of two equal batches then comes to a worker that has drawn for other ones before.
        return None, "it draws from a hidden generator, which an odd number of workers does not let compare"
    drawn = [_drawn(epoch) for epoch in own.epochs[:2]]
    tests = [("from worker to worker", _equal_in_turn), ("in both epochs", _equal_in_epochs)]
    for words, count in tests[: 2 if len(own.epochs) > 1 else 1]:
        (equal, of), (theirs, among) = count(own, drawn), count(other, drawn)
        # The rate of the own ones, by Laplace's rule of succession; the probability of as many or more by chance.
        usual = (equal + 1) / (of + 2)
        if usual**among >= LUCK:
            return None, f"{among} draws of a hidden generator are too few to tell whether they are the same {words}"
        if theirs / among > usual and float(bdtrc(theirs - 1, among, usual)) < LUCK:
            seen = f"{theirs} of {among} random draws are the same {words}"
            return False, f"{seen}, and {equal} of {of} with its own loader"
    return True, None


_Drawn = list[list[dict[str, frozenset[int]]]]


def _equal_in_turn(one: Delivered, drawn: _Drawn) -> tuple[int, int]:
    equal = of = 0
    for epoch, rows in zip(one.epochs, drawn, strict=False):
        for place, (first, second) in enumerate(_twice(epoch)):
            more, among = _equal(first, second, rows[2 * place] if 2 * place < len(rows) else {})
            equal, of = equal + more, of + among
    return equal, of


def _equal_in_epochs(one: Delivered, drawn: _Drawn) -> tuple[int, int]:
    equal = of = 0
    if len(one.epochs) > 1 and drawn:
        for (first, second), rows in zip(_pairs(*one.epochs[:2]), drawn[0], strict=False):
            if first.samples == second.samples:
                more, among = _equal(first, second, rows)
                equal, of = equal + more, of + among
    return equal, of


def _equal(first: DeliveredBatch, second: DeliveredBatch, drawn: dict[str, frozenset[int]]) -> tuple[int, int]:
    """Return of how many samples that are drawn at random the draws are the same in both batches, and how many there
    are."""
    rows = frozenset().union(*drawn.values()) if drawn else frozenset()
    others = [_differing(first.digests.get(p), second.digests.get(p), first.size) & drawn[p] for p in drawn]
    return len(rows - frozenset().union(*others)), len(rows)


def _in_turn(epochs: list[tuple[DeliveredEpoch, DeliveredEpoch]]) -> DataComparison:
    """Compare what a data set without indices delivers, batch after batch."""
    found = DataComparison(True, epochs=len(epochs))
    for number, epoch in enumerate(epochs):
        for place, (mine, theirs) in enumerate(_pairs(*epoch)):
            if mine.digests != theirs.digests:
                return DataComparison(
                    False, f"batch {place + 1} of its epoch {number + 1} is another than its own loader's"
                )
            found.batches, found.samples = found.batches + 1, found.samples + mine.size
    return found if found.batches else DataComparison(None, "no batches were delivered")


def _places(drawn: set[str]) -> str:
    named = ", ".join(sorted(place or "the batch" for place in drawn))
    return f"{named} {'is' if len(drawn) == 1 else 'are'}"


def why_not_copied(one: Delivered) -> Iterator[str]:
    """Yield why copies of a data set in several processes may not deliver what it does, each a clause."""
    for where, what in (*one.stores, *one.moved):
        at = f" ({where})" if where else ""
        if what.startswith(("the open", "the connection")):
            yield f"the data set reads on in {what}{at}, and workers would share its position"
        elif what == "a generator of random numbers":
            yield f"the data set draws from {what} of its own{at}, and each worker would draw the same"
        elif what in ("a stream in memory", "a mapped file"):
            yield f"the data set reads on in {what}{at}, and each worker would go on in a copy"
        elif what == "an iterator":
            yield f"the data set takes the next of {what}{at}, and each worker would take the same"
        else:
            yield f"the data set holds {what}{at}, which must not be used in another process"


def times_read(one: Delivered) -> int:
    """Return how often each sample of an iterated data set comes in an epoch, as far as its first batches tell: as
    often as there are workers, if each of them reads all of it."""
    batches = [batch.digests for epoch in one.epochs[:1] for batch in epoch.batches]
    rounds = [batches[at : at + one.workers] for at in range(0, len(batches), max(1, one.workers))]
    whole = [some for some in rounds if len(some) == one.workers > 1]
    alike = bool(whole) and all(some[0] == other for some in whole for other in some)
    # Sets whose batches are all alike, such as made-up ones, tell nothing.
    return one.workers if one.iterable and alike and len(whole) > 1 and whole[0][0] != whole[1][0] else 1


def first_epoch_more_s(own: Deliveries) -> float | None:
    """Return how many seconds a sample takes longer in the first epoch than in later ones, because a data set keeps
    what it has made in the process that trains, or in workers that persist; ``None`` if it does not."""
    for one in own.sets:
        if is_cached(one) is not None and one.epochs and one.epochs[0].batches:
            samples = one.epochs[0].batches[0].size * max(1, one.workers)
            return (median(one.first_s) - median(one.again_s)) / samples
    return None


def is_cached(own: Delivered) -> float | None:
    """Return what making a batch once more takes of making it first, as the median, where that is nearly always much
    less and the data set was seen to hold more after a batch: it keeps what it has made; ``None`` otherwise.

    Reading a file once more from the page cache saves time as well, and nothing grows then.
    """
    if not own.grown or (own.workers and not own.persist):
        # What workers keep otherwise ends with them, after each epoch.
        return None
    pairs = list(zip(own.first_s, own.again_s, strict=True))
    quick = [again / first for first, again in pairs if again < _CACHED * first]
    if len(pairs) < 3 or len(quick) < _NEARLY * len(pairs) or median(own.first_s) < _WORTH_S:
        return None
    return median(quick)
