"""Whether two loaders deliver the same, from digests of what they have delivered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from autotune.records import Delivered, DeliveredBatch, DeliveredEpoch, Deliveries, DeliveryPlan

#: Draws that are equal this much more often than beside it would be, by chance, this seldom, are the same draws.
LUCK = 1e-4
#: A batch comes out of a cache if it takes less than this part of its first time, or less than that where something has
#: grown, in nearly all cases, and if that was worth keeping.
_CACHED, _GROWN, _NEARLY, _WORTH_S = 0.2, 0.6, 0.8, 1e-3
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
        wrong: by epoch, samples that are others than beside it; of: that were compared.
        pairs: draws that should differ, and those that do not: of the reference, and of the candidate.
        drawn: places in a batch that differ from draw to draw.
    """

    batches: int = 0
    samples: int = 0
    wrong: list[int] = field(default_factory=lambda: [0, 0])
    of: list[int] = field(default_factory=lambda: [0, 0])
    drawn: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)


def plan_beside(own: Deliveries | None) -> DeliveryPlan | None:
    """Return a plan by which as much is noted as in a launch before; ``None`` if that has noted nothing."""
    if own is None or own.lost is not None or not own.sets or not own.sets[0].epochs:
        return None
    first = own.sets[0]
    drawn = [len(epoch.batches) // (1 if first.iterable else 2) for epoch in first.epochs]
    if not drawn[0]:
        return None
    seen = sum(1 for number in drawn if number)
    return DeliveryPlan(least=drawn[0], most=drawn[0], second=max(drawn[1:2], default=0) or 1, epochs=min(seen, 2))


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
    shared = next(why_not_copied(own), None)
    if shared is not None and other.workers not in (0, own.workers):
        # Whether positions get mixed up is a matter of luck.
        return DataComparison(False, shared)
    epochs = list(zip(own.epochs, other.epochs, strict=False))
    for number, (mine, theirs) in enumerate(epochs):
        if mine.batches and not theirs.batches and theirs.ended:
            return DataComparison(False, f"its epoch {number + 1} has no batches")
        if mine.ended and theirs.ended and theirs.whole and not mine.whole:
            return DataComparison(False, f"its epoch {number + 1} ends after {len(theirs.batches)} batches")
    same = _same_states(own, other)
    if same is not None:
        return DataComparison(False, same)
    if own.iterable:
        return _in_turn(epochs)
    others = [mine.samples != theirs.samples for e in epochs for mine, theirs in _pairs(*e)]
    if any(others):
        # Asked earlier, by workers, a sampler that learns from the training chooses otherwise.
        return DataComparison(False, f"its sampler chooses other samples, for {sum(others)} of {len(others)} batches")
    tally = _Tally()
    drawn = {place for epoch in own.epochs for place in _drawn(epoch)}
    for number, (mine, theirs) in enumerate(epochs[:2]):
        _count(number, mine, theirs, drawn, tally)
    if any(tally.wrong):
        return DataComparison(False, _words(tally, own), tally.batches, tally.samples, len(epochs))
    if drawn:
        same = _same_draws(own, other, drawn)
        if same is not None:
            return DataComparison(False, same, tally.batches, tally.samples, len(epochs))
        if not tally.fixed:
            return DataComparison(None, "the data set draws at random, and hides its generator")
    if tally.samples < LEAST_SAMPLES:
        return DataComparison(None, "too few samples were delivered")
    how = None
    if drawn:
        how = f"{_places(drawn)} drawn by a generator of its own: as many different draws were seen, not their samples"
    return DataComparison(
        True, how, tally.batches, tally.samples, sum(1 for e in epochs if e[0].batches and e[1].batches)
    )


def _pairs(mine: DeliveredEpoch, theirs: DeliveredEpoch) -> Iterator[tuple[DeliveredBatch, DeliveredBatch]]:
    yield from zip(mine.batches, theirs.batches, strict=False)


def _drawn(epoch: DeliveredEpoch) -> set[str]:
    """Return the places in a batch that differ although the same samples were drawn right after each other."""
    return {
        place
        for first, second in zip(epoch.batches[::2], epoch.batches[1::2], strict=False)
        if first.samples == second.samples
        for place, digest in first.digests.items()
        if second.digests.get(place) != digest
    }


def _count(number: int, mine: DeliveredEpoch, theirs: DeliveredEpoch, drawn: set[str], tally: _Tally) -> None:
    for first, second in _pairs(mine, theirs):
        if first.samples != second.samples:
            continue
        size = first.size
        wrong = 0
        for place in first.digests.keys() | second.digests.keys():
            if place in drawn:
                tally.drawn.add(place)
                continue
            tally.fixed.add(place)
            wrong = max(wrong, _differing(first.digests.get(place), second.digests.get(place), size))
        tally.batches, tally.samples = tally.batches + 1, tally.samples + size
        tally.wrong[number] += wrong
        tally.of[number] += size


def _differing(mine: str | tuple[str, ...] | None, theirs: str | tuple[str, ...] | None, size: int) -> int:
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        return sum(a != b for a, b in zip(mine, theirs, strict=True))
    return 0 if mine == theirs else size


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


def _same_draws(own: Delivered, other: Delivered, drawn: set[str]) -> str | None:
    """Return that the others' draws are the same more often, from worker to worker or from epoch to epoch."""
    # A tenth of a second to import, which the command line's help does not wait for.
    from scipy.special import bdtrc

    for words, count in (("from worker to worker", _equal_in_turn), ("in both epochs", _equal_in_epochs)):
        (equal, of), (theirs, among) = count(own, drawn), count(other, drawn)
        # The rate of the own ones, by Laplace's rule of succession; the probability of as many or more by chance.
        usual = (equal + 1) / (of + 2)
        if among and theirs / among > usual and float(bdtrc(theirs - 1, among, usual)) < LUCK:
            return f"{theirs} of {among} random draws are the same {words}, and {equal} of {of} with its own loader"
    return None


def _equal_in_turn(one: Delivered, drawn: set[str]) -> tuple[int, int]:
    pairs = [
        pair
        for epoch in one.epochs
        for pair in zip(epoch.batches[::2], epoch.batches[1::2], strict=False)
        if pair[0].samples == pair[1].samples
    ]
    return _equal(pairs, drawn)


def _equal_in_epochs(one: Delivered, drawn: set[str]) -> tuple[int, int]:
    if len(one.epochs) < 2:
        return 0, 0
    return _equal([p for p in _pairs(*one.epochs[:2]) if p[0].samples == p[1].samples], drawn)


def _equal(pairs: list[tuple[DeliveredBatch, DeliveredBatch]], drawn: set[str]) -> tuple[int, int]:
    """Return how many samples have the same draws in both batches of pairs, and how many there are."""
    equal = of = 0
    for first, second in pairs:
        size = first.size
        rows = [_differing(first.digests.get(p), second.digests.get(p), size) for p in drawn if p in first.digests]
        equal += size - max(rows, default=size)
        of += size
    return equal, of


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
        elif what == "an iterator":
            yield f"the data set takes the next of {what}{at}, and each worker would take the same"
        else:
            yield f"the data set holds {what}{at}, which must not be used in another process"


def first_epoch_more_s(own: Deliveries) -> float | None:
    """Return how many seconds a sample takes longer in the first epoch than in later ones, because a data set keeps
    what it has made in the process that trains, or in workers that persist; ``None`` if it does not."""
    for one in own.sets:
        if is_cached(one) is not None and one.epochs and one.epochs[0].batches:
            samples = one.epochs[0].batches[0].size * max(1, one.workers)
            return (median(one.first_s) - median(one.again_s)) / samples
    return None


def is_cached(own: Delivered) -> float | None:
    """Return what making a batch once more takes of making it first, as the median, where that is nearly always so
    little that the data set must keep what it has made; ``None`` otherwise.

    Reading a file once more from the page cache saves time as well, but not the decoding: less is enough where the data
    set was seen to hold more after a batch.
    """
    if own.workers and not own.persist:
        # What its workers keep ends with them, after each epoch.
        return None
    pairs = list(zip(own.first_s, own.again_s, strict=True))
    quick = [again / first for first, again in pairs if again < (_GROWN if own.grown else _CACHED) * first]
    if len(pairs) < 3 or len(quick) < _NEARLY * len(pairs) or median(own.first_s) < _WORTH_S:
        return None
    return median(quick)
