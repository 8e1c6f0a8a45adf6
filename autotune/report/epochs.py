"""What a whole training takes: hours and money for the epochs or samples that were asked about, by where its files come
from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.space.formatting import count, percent_text, rate_text, seconds_text
from autotune.base.records import DataRef, Outcome, Standing, Trial, training_s
from autotune.report.document import Column, Grid, Kind, Section, facts, paragraphs
from autotune.report.material import Material
from autotune.report.sentences import bottleneck_of, label_of, measurement_of
from autotune.space import key

_HOUR_S = 3600.0


@dataclass(frozen=True)
class TrainingLength:
    """The training that the user has in mind.

    Attributes:
        words: how long it is, such as ``90 epochs``.
        samples: that it reads in all. epoch_samples: of one epoch; ``None`` if not known.
    """

    words: str
    samples: int
    epoch_samples: int | None


def whole_training(material: Material) -> TrainingLength | None:
    """Return the training of which the request says how long it is; ``None`` if it does not, or has epochs of a length
    that is not known."""
    outcome, spec = material.outcome, material.spec
    if outcome is None:
        return None
    epoch_samples = samples_of_epoch(outcome, material.trials)
    if spec.samples is not None:
        return TrainingLength(count(spec.samples, "sample"), spec.samples, epoch_samples)
    if spec.epochs is None or epoch_samples is None:
        return None
    return TrainingLength(count(spec.epochs, "epoch"), spec.epochs * epoch_samples, epoch_samples)


def samples_of_epoch(outcome: Outcome, trials: Sequence[Trial]) -> int | None:
    """Return how many samples an epoch has; ``None`` if that is not known."""
    measured = measurement_of(outcome.baseline, trials)
    return None if measured is None else measured.epoch_samples or None


def whole_training_s(outcome: Outcome, one: Standing, whole: TrainingLength) -> float:
    """Return the seconds of a whole training, a first epoch whose files no cache has included, if that was measured.

    Where it was measured of another configuration only, it is taken to be no slower than there, so that two
    configurations can be compared: see `first_epoch_is_borrowed`.
    """
    known = [b.cold_per_s[0] for b in outcome.bottlenecks if b.cold_per_s is not None]
    return training_s(
        whole.samples,
        epoch_samples=whole.epoch_samples,
        start_s=one.startup_s + one.compile_s,
        per_s=one.samples_per_second,
        cold_per_s=max(known, default=None) if (own := _cold_per_s(outcome, one)) is None else own,
    )


def first_epoch_is_borrowed(outcome: Outcome, one: Standing) -> bool:
    """Return whether a training may take longer than `whole_training_s`, because only another configuration's first
    epoch was measured."""
    return _cold_per_s(outcome, one) is None and any(b.cold_per_s is not None for b in outcome.bottlenecks)


def _cold_per_s(outcome: Outcome, one: Standing) -> float | None:
    found = bottleneck_of(outcome, one.trial)
    return None if found is None or found.cold_per_s is None else found.cold_per_s[0]


def saved(outcome: Outcome, one: Standing, material: Material) -> list[tuple[str, str]]:
    """Return what a configuration saves as rows of a name and a sentence.

    That is hours of the training that was asked about, or else of an epoch, and money where an hour's price is known.
    """
    whole, price = whole_training(material), material.spec.price_per_hour
    if whole is None:
        samples = samples_of_epoch(outcome, material.trials)
        words = "a million samples" if samples is None else f"an epoch of {samples:,} samples"
        per = samples or 10**6
        now_s, then_s = per / outcome.baseline.samples_per_second, per / one.samples_per_second
    else:
        words = whole.words
        now_s, then_s = (whole_training_s(outcome, standing, whole) for standing in (outcome.baseline, one))
    takes = "take" if words[:1].isdigit() and not words.startswith("1 ") else "takes"
    then_is, now_is = (
        "at least " if whole is not None and first_epoch_is_borrowed(outcome, standing) else ""
        for standing in (one, outcome.baseline)
    )
    time = f"{words} {takes} {then_is}{seconds_text(then_s)} instead of {now_is}{seconds_text(now_s)}"
    less = f", {seconds_text(now_s - then_s)} less" if now_s - then_s >= 1 else ""
    # An objective other than the rate may choose what is slower.
    found = [("saves" if then_s <= now_s else "takes", f"{time}{less}")]
    if price is not None:
        then, now = (seconds / _HOUR_S * price for seconds in (then_s, now_s))
        words = f"{then_is}{_money(then)} instead of {now_is}{_money(now)}, at {_money(price)} an hour"
        found.append(("costs", words))
    return found


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 0.1 else f"{amount:.3g}"


def epochs(outcome: Outcome, material: Material) -> list[Section]:
    """Return how long the training takes with the baseline and with the winners, as a section; nothing without
    ``--epochs`` or ``--samples``.

    The first epoch reads files that no cache has, unless it is known to be otherwise; the later ones read as the
    launches did.
    """
    spec, data, whole = material.spec, material.data, whole_training(material)
    if spec.epochs is None and spec.samples is None:
        return []
    if whole is None:
        return [
            Section("Epochs", paragraphs("How many samples an epoch has is not known, and so neither is its time."))
        ]
    standings = {key(s.config): s for s in (outcome.baseline, outcome.best_same_batch, outcome.best)}
    apart = data is not None and data.first_epoch_apart
    rows = tuple(_row(outcome, s, whole, material.trials, apart=apart) for s in standings.values())
    titles = ("trial", "first epoch", "a later one", "from a local copy", whole.words)
    return [
        Section(
            "Epochs",
            (
                Grid((*map(Column, titles), Column("configuration", Kind.TEXT)), rows),
                *facts(
                    ("an epoch", None if whole.epoch_samples is None else f"{whole.epoch_samples:,} samples"),
                    ("where its files come from", _state(outcome, data)),
                    ("what the launches read", _read(outcome, data)),
                ),
            ),
        )
    ]


def _row(
    outcome: Outcome, one: Standing, whole: TrainingLength, trials: Sequence[Trial], *, apart: bool
) -> tuple[str, ...]:
    found, samples, cold = bottleneck_of(outcome, one.trial), whole.epoch_samples, _cold_per_s(outcome, one)
    local_per_s = None if found is None else found.local_per_s
    known = "not measured" if apart else "as later ones"
    takes = seconds_text(whole_training_s(outcome, one, whole))
    name = "baseline" if key(one.config) == key(outcome.baseline.config) else f"trial {label_of(one, trials)}"
    return (
        label_of(one, trials),
        "-" if samples is None else known if cold is None else seconds_text(samples / cold),
        "-" if samples is None else seconds_text(samples / one.samples_per_second),
        "" if local_per_s is None or samples is None else f"about {seconds_text(samples / local_per_s)}",
        f"at least {takes}" if apart and cold is None else takes,
        f"{name}, {rate_text(one.samples_per_second)} {outcome.unit}",
    )


def _state(outcome: Outcome, data: DataRef | None) -> str | None:
    """Say which of the figures a training will see."""
    if data is None or data.kind == "synthetic":
        return None
    if data.kind == "generated" and data.store is None:
        return "autotune's own photographs, from the page cache: with your files, --data DIR"
    if data.store is not None:
        held = data.store.cached
        if held <= 0:
            return "the slow store, in every epoch: it has no cache"
        if held >= 1:
            return "the slow store in the first epoch, its cache in all later ones"
        return f"the slow store in the first epoch; later {percent_text(held)} of the files from its cache"
    if data.page_cache == "warm":
        return "the disk or the network in the first epoch, and the page cache, into which they fit, in all later ones"
    if data.page_cache == "cold":
        return "the disk or the network in every epoch: they do not fit into the page cache"
    return "not known: the workload's own"


def _read(outcome: Outcome, data: DataRef | None) -> str | None:
    read, whole = outcome.samples_read, outcome.dataset_samples
    # Data that are iterated, and samplers of the workload's own, have an order that is not ours; generated photographs
    # stand for a larger set.
    if not read or whole is None or data is None or data.kind == "generated":
        return None
    if read <= whole:
        return f"{read:,} of {whole:,} samples; none was read twice"
    return f"each of {whole:,} samples {read / whole:.1f} times"
