"""Whether two loaders deliver the same, from digests of what they have delivered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from autotune.base.records import Delivered, DeliveredBatch, DeliveredEpoch, Deliveries, DeliveryPlan

#: Random draws count as the same if the probability that as many of them are equal by chance is less than this.
LUCK = 1e-4
#: Batches come out of a cache if nearly all take less than this fraction of their first time, and if that was long
#: enough to be worth keeping.
_CACHED, _NEARLY, _WORTH_S = 0.6, 0.8, 1e-3
#: With fewer samples in common there is no verdict.
LEAST_SAMPLES = 4


@dataclass
class DataComparison:
    """The result of a comparison.

    Attributes:
        passed: ``None`` if no comparison was possible. reason: why not, what differs, or how it was compared if that is
            less than sample by sample, as a clause.
        batches, samples, epochs: how many were compared.
    """

    passed: bool | None
    reason: str | None = None
    batches: int = 0
    samples: int = 0
    epochs: int = 0


@dataclass
class _Tally:
    """The counts of a comparison.

    Attributes:
        batches, samples: how many were compared. wrong, of: by epoch, the samples in which something differs although
            it is the same in each draw, and all samples.
        drawn: samples that differ from draw to draw. fixed: whether anything does not. places: where in a batch they
            differ.
    """

    batches: int = 0
    samples: int = 0
    wrong: list[int] = field(default_factory=lambda: [0, 0])
    of: list[int] = field(default_factory=lambda: [0, 0])
    drawn: int = 0
    fixed: bool = False
    places: set[str] = field(default_factory=set)


def plan_beside(own: Deliveries | None) -> DeliveryPlan | None:
    """Return a plan for noting as much as an earlier launch did; ``None`` if that launch noted nothing."""
    if own is None or own.lost is not None or not own.sets:
        return None
    # Some data sets are only looked at once, for their means.
    fullest = max(
        own.sets,
        key=lambda delivered: (sum(1 for epoch in delivered.epochs[:2] if epoch.batches), -own.sets.index(delivered)),
    )
    counts = [len(epoch.batches) // (1 if fullest.iterable else 2) for epoch in fullest.epochs[:2]]
    if not counts or not counts[0]:
        return None
    epochs = sum(1 for count in counts if count)
    return DeliveryPlan(
        least=counts[0],
        most=counts[0],
        totals=tuple(delivered.epochs[0].total if delivered.epochs else 0 for delivered in own.sets),
        second=max(counts[1:], default=0) or 1,
        epochs=epochs,
    )


def compare_data(own: Deliveries, other: Deliveries) -> DataComparison:
    """Compare what the loaders deliver under two settings, in launches with the same seed (see
    `autotune_agent.deliveries`).

    Whatever is the same each time a sample is drawn under the script's own settings must be the same under the others,
    in each epoch. Whatever differs from draw to draw, although the global generators started from the same state, comes
    from a hidden generator: then the draws under the other settings must differ as often, from worker to worker and
    from epoch to epoch.

    Args:
        own: under the settings that are taken to be right. other: under those in question.
    """
    for lost in (own.lost, other.lost):
        if lost is not None:
            return DataComparison(None, f"what is delivered could not be noted: {lost}")
    if not own.sets or not own.sets[0].epochs or not own.sets[0].epochs[0].batches:
        return DataComparison(None, "no batch of a loader of PyTorch's was seen")
    if [s.kind for s in own.sets] != [s.kind for s in other.sets]:
        return DataComparison(None, "the training has other loaders each time")
    results: list[DataComparison] = []
    for own_set, other_set in zip(own.sets, other.sets, strict=True):
        results.append(_compare(own_set, other_set))
        if not results[-1].passed:
            return results[-1]
    reasons = dict.fromkeys(result.reason for result in results if result.reason)
    batches, samples = (sum(getattr(result, name) for result in results) for name in ("batches", "samples"))
    return DataComparison(True, "; ".join(reasons) or None, batches, samples, max(r.epochs for r in results))


def _compare(own: Delivered, other: Delivered) -> DataComparison:
    workers_differ = other.workers not in (0, own.workers)
    reason = next(why_not_copied(own), None)
    if reason is not None and workers_differ:
        # Whether the shared positions get mixed up is a matter of luck.
        return DataComparison(False, reason)
    if other.opened and other.workers and not other.persist:
        where, what = other.opened[0]
        at = f" ({where})" if where else ""
        return DataComparison(False, f"{what}{at} was opened between epochs, and new workers would share its position")
    epochs = list(zip(own.epochs, other.epochs, strict=False))[:2]
    for number, (own_epoch, other_epoch) in enumerate(epochs):
        if own_epoch.batches and not other_epoch.batches and other_epoch.ended:
            return DataComparison(False, f"its epoch {number + 1} has no batches")
        if (
            own_epoch.ended
            and other_epoch.ended
            and other_epoch.whole
            and not own_epoch.whole
            and len(other_epoch.batches) < len(own_epoch.batches)
        ):
            return DataComparison(False, f"its epoch {number + 1} ends after {len(other_epoch.batches)} batches")
    same_states = _same_states(own, other)
    if same_states is not None:
        return DataComparison(False, same_states)
    comparison = _in_turn(epochs) if own.iterable else _by_sample(own, other, epochs)
    if comparison.passed and sum(1 for e in own.epochs[:2] if e.batches) > sum(
        1 for _, other_epoch in epochs if other_epoch.batches
    ):
        return replace(comparison, passed=None, reason="its second epoch was not seen")
    if comparison.passed and workers_differ and own.counts:
        return replace(
            comparison, passed=None, reason=f"{own.counts[0]} counts on from sample to sample in each process"
        )
    return comparison


def _by_sample(own: Delivered, other: Delivered, epochs: list[tuple[DeliveredEpoch, DeliveredEpoch]]) -> DataComparison:
    """Compare what a data set with indices delivers, sample by sample."""
    differ = [first.samples != second.samples for e in epochs for first, second in _pairs(*e)]
    if any(differ):
        # Workers ask the sampler earlier, and one that learns from the training then chooses differently.
        return DataComparison(False, f"its sampler chooses others, for {sum(differ)} of {len(differ)} batches")
    opaque = [
        p
        for delivered in (own, other)
        for e in delivered.epochs
        for b in e.batches
        for p, d in b.digests.items()
        if "?" in d
    ]
    if opaque or not all(b.digests for e in own.epochs for b in e.batches):
        where = f" ({opaque[0]})" if opaque and opaque[0] else ""
        return DataComparison(None, f"its batches hold something that cannot be looked into{where}")
    if own.used and other.workers and not any(epoch.states for epoch in other.epochs):
        return DataComparison(None, "its workers are not forked, and what they draw at random cannot be compared")
    tally = _Tally()
    for number, (first, second) in enumerate(epochs):
        _count(number, first, second, tally)
    epochs_seen = sum(1 for first, second in epochs if first.batches and second.batches)
    counts = (tally.batches, tally.samples, epochs_seen)
    if any(tally.wrong):
        return DataComparison(False, _words(tally, own), *counts)
    if tally.drawn:
        passed, reason = _judge_draws(own, other)
        if not passed:
            return DataComparison(passed, reason, *counts)
        if not tally.fixed:
            return DataComparison(None, "the data set draws at random, and hides its generator", *counts)
    if tally.samples < LEAST_SAMPLES:
        return DataComparison(None, "too few samples were delivered", *counts)
    how = None
    if tally.drawn:
        names = ", ".join(sorted(place or "the batch" for place in tally.places))
        are = "is" if len(tally.places) == 1 else "are"
        how = f"{names} {are} drawn by a generator of its own: draws were counted there, not compared"
    return DataComparison(True, how, *counts)


def _pairs(mine: DeliveredEpoch, theirs: DeliveredEpoch) -> Iterator[tuple[DeliveredBatch, DeliveredBatch]]:
    return zip(mine.batches, theirs.batches, strict=False)


def _differing(mine: str | tuple[str, ...] | None, theirs: str | tuple[str, ...] | None, size: int) -> frozenset[int]:
    """Return which samples differ in one part of a batch: all of them, if the digests differ and are not by sample."""
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        return frozenset(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    return frozenset() if mine == theirs else frozenset(range(size))


def _drawn(epoch: DeliveredEpoch) -> list[dict[str, frozenset[int]]]:
    """Return for each batch, by place, the samples that differ although they were drawn twice in a row."""
    rows_by_batch: list[dict[str, frozenset[int]]] = []
    for first, second in zip(epoch.batches[::2], epoch.batches[1::2], strict=False):
        rows = {p: _differing(d, second.digests.get(p), first.size) for p, d in first.digests.items()}
        rows_by_batch += [rows, rows]
    # A batch that was not drawn twice shows nothing.
    return [
        *rows_by_batch,
        *({p: frozenset(range(b.size)) for p in b.digests} for b in epoch.batches[len(rows_by_batch) :]),
    ]


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
    """Return a clause saying that workers start with the same random numbers, if they do and those under the script's
    own settings do not."""
    for name in own.used:
        if not _repeats(own, name) and _repeats(other, name):
            return f"its workers draw the same numbers from the global generator of {name}"
    return None


def _repeats(one: Delivered, name: str) -> bool:
    digests = [by_name[name] for epoch in one.epochs[:2] for by_name in epoch.states if name in by_name]
    return len(set(digests)) < len(digests)


def _judge_draws(own: Delivered, other: Delivered) -> tuple[bool | None, str | None]:
    """Return whether a hidden generator's draws are the same no more often under the other settings, from worker to
    worker and from epoch to epoch (``None`` if there are too few to tell); and the reason, a clause."""
    # A tenth of a second to import, which the command line's help does not wait for.
    from scipy.special import bdtrc

    if other.workers > 1 and other.workers % 2:
        # The second of two equal batches then goes to a worker that has already drawn for other batches.
        return None, "it draws from a hidden generator, which an odd number of workers does not let compare"
    drawn = [_drawn(epoch) for epoch in own.epochs[:2]]
    tests = [("from worker to worker", _drawn_in_turn), ("in both epochs", _drawn_in_epochs)]
    for words, draws in tests[: 2 if len(own.epochs) > 1 else 1]:
        (equal, of), (other_equal, other_of) = _equal(draws(own, drawn)), _equal(draws(other, drawn))
        # The rate under the script's own settings, by Laplace's rule of succession; and the probability of as many or
        # more by chance.
        usual = (equal + 1) / (of + 2)
        if usual**other_of >= LUCK:
            return None, f"{other_of} draws of a hidden generator are too few to tell whether they are the same {words}"
        if other_equal / other_of > usual and float(bdtrc(other_equal - 1, other_of, usual)) < LUCK:
            text = f"{other_equal} of {other_of} random draws are the same {words}"
            return False, f"{text}, and {equal} of {of} with its own loader"
    return True, None


_Drawn = list[list[dict[str, frozenset[int]]]]
#: Two batches, and by place the samples of the first that are drawn at random.
_Draws = Iterator[tuple[DeliveredBatch, DeliveredBatch, dict[str, frozenset[int]]]]


def _drawn_in_turn(one: Delivered, drawn: _Drawn) -> _Draws:
    """Yield the batches that were drawn one right after the other."""
    for epoch, rows in zip(one.epochs, drawn, strict=False):
        yield from zip(epoch.batches[::2], epoch.batches[1::2], rows[::2], strict=False)


def _drawn_in_epochs(one: Delivered, drawn: _Drawn) -> _Draws:
    """Yield the batches that have the same place in both epochs."""
    if len(one.epochs) > 1 and drawn:
        yield from zip(one.epochs[0].batches, one.epochs[1].batches, drawn[0], strict=False)


def _equal(draws: _Draws) -> tuple[int, int]:
    """Return for how many of the randomly drawn samples the draws are the same in both batches, and how many such
    samples there are, of batches that were drawn from the same samples."""
    equal = of = 0
    for first, second, drawn in draws:
        if first.samples == second.samples:
            rows = frozenset().union(*drawn.values())
            others = [_differing(first.digests.get(p), second.digests.get(p), first.size) & drawn[p] for p in drawn]
            equal, of = equal + len(rows - frozenset().union(*others)), of + len(rows)
    return equal, of


def _in_turn(epochs: list[tuple[DeliveredEpoch, DeliveredEpoch]]) -> DataComparison:
    """Compare what a data set without indices delivers, batch after batch."""
    comparison = DataComparison(True, epochs=len(epochs))
    for number, epoch in enumerate(epochs):
        for place, (first, second) in enumerate(_pairs(*epoch)):
            if first.digests != second.digests:
                return DataComparison(
                    False, f"batch {place + 1} of its epoch {number + 1} is another than its own loader's"
                )
            comparison.batches, comparison.samples = comparison.batches + 1, comparison.samples + first.size
    return comparison if comparison.batches else DataComparison(None, "no batches were delivered")


def why_not_copied(one: Delivered) -> Iterator[str]:
    """Yield reasons why copies of a data set in several processes may not deliver what the original does, each a
    clause."""
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
    """Return how often each sample of an iterable data set comes in an epoch, as far as its first batches show: as
    often as there are workers, if each of them reads the whole set."""
    batches = [batch.digests for epoch in one.epochs[:1] for batch in epoch.batches]
    rounds = [batches[at : at + one.workers] for at in range(0, len(batches), max(1, one.workers))]
    complete = [group for group in rounds if len(group) == one.workers > 1]
    alike = bool(complete) and all(group[0] == other for group in complete for other in group)
    # Data sets whose batches are all alike, such as synthetic ones, show nothing.
    return one.workers if one.iterable and alike and len(complete) > 1 and complete[0][0] != complete[1][0] else 1


def first_epoch_more_s(own: Deliveries) -> float | None:
    """Return how many seconds longer a sample takes in the first epoch than in later ones, because a data set caches
    its samples in the training process or in persistent workers; ``None`` if none does."""
    for delivered in own.sets:
        if is_cached(delivered) is not None and delivered.epochs and delivered.epochs[0].batches:
            samples = delivered.epochs[0].batches[0].size * max(1, delivered.workers)
            return (median(delivered.first_s) - median(delivered.again_s)) / samples
    return None


def is_cached(own: Delivered) -> float | None:
    """Return the median ratio of the time to make a batch again to the time to make it first, if that is nearly always
    much less than 1 and the data set was seen to grow with a batch, so that it caches what it makes; ``None``
    otherwise.

    Reading a file again from the page cache saves time as well, but then nothing grows.
    """
    if not own.grown or (own.workers and not own.persist):
        # Otherwise what workers cache is lost when they end, after each epoch.
        return None
    pairs = list(zip(own.first_s, own.again_s, strict=True))
    quick = [again / first for first, again in pairs if again < _CACHED * first]
    if len(pairs) < 3 or len(quick) < _NEARLY * len(pairs) or median(own.first_s) < _WORTH_S:
        return None
    return median(quick)
