"""What a whole training takes: hours for the epochs that were asked about, by where its files come from."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.formatting import count, percent_text, rate_text, seconds_text
from autotune.records import DataRef, Outcome, Standing, Trial
from autotune.report.document import Column, Grid, Kind, Section, facts, paragraphs
from autotune.report.sentences import bottleneck_of, label_of, measurement_of
from autotune.space import key


def epochs(outcome: Outcome, data: DataRef | None, trials: Sequence[Trial]) -> list[Section]:
    """Return how long epochs take with the baseline and with the winners, as a section; nothing without ``--epochs``.

    The first epoch reads files that no cache has, unless it is known to be otherwise; the later ones read as the
    launches did.
    """
    if outcome.epochs is None:
        return []
    measured = measurement_of(outcome.baseline, trials)
    samples = None if measured is None else measured.epoch_samples or None
    if samples is None:
        return [
            Section("Epochs", paragraphs("How many samples an epoch has is not known, and so neither is its time."))
        ]
    standings = {key(s.config): s for s in (outcome.baseline, outcome.best_same_batch, outcome.best)}
    rows = tuple(
        _row(outcome, s, samples, trials, apart=data is not None and data.first_epoch_apart) for s in standings.values()
    )
    titles = ("trial", "first epoch", "a later one", "from a local copy", count(outcome.epochs, "epoch"))
    return [
        Section(
            "Epochs",
            (
                Grid((*map(Column, titles), Column("configuration", Kind.TEXT)), rows),
                *facts(
                    ("an epoch", f"{samples:,} samples"),
                    ("where its files come from", _state(outcome, data)),
                    ("what the launches read", _read(outcome, data)),
                ),
            ),
        )
    ]


def _row(outcome: Outcome, one: Standing, samples: int, trials: Sequence[Trial], *, apart: bool) -> tuple[str, ...]:
    found = bottleneck_of(outcome, one.trial)
    later = samples / one.samples_per_second
    first = None if found is None or found.cold_per_s is None else samples / found.cold_per_s[0]
    local = None if found is None or found.local_per_s is None else samples / found.local_per_s
    assert outcome.epochs is not None
    whole = seconds_text((later if first is None else first) + (outcome.epochs - 1) * later)
    name = "baseline" if key(one.config) == key(outcome.baseline.config) else f"trial {label_of(one, trials)}"
    return (
        label_of(one, trials),
        seconds_text(first) if first is not None else "not measured" if apart else "as later ones",
        seconds_text(later),
        "" if local is None else f"about {seconds_text(local)}",
        f"at least {whole}" if apart and first is None else whole,
        f"{name}, {rate_text(one.samples_per_second)} samples/s",
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
