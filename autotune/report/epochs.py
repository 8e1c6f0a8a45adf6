"""What a whole training takes: hours for the epochs that were asked about, by where its files come from."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.formatting import count, percent_text, rate_text
from autotune.records import DataRef, Outcome, Standing, Trial
from autotune.report.document import Column, Grid, Kind, Section, facts, paragraphs
from autotune.report.sentences import bottleneck_of, label_of
from autotune.space import key

_HOUR_S, _DAY_HOURS = 3600.0, 48.0


def epochs(outcome: Outcome, data: DataRef | None, trials: Sequence[Trial]) -> list[Section]:
    """Return how long epochs take with the baseline and with the winners, as a section; nothing without ``--epochs``.

    The first epoch reads files that no cache has, unless it is known to be otherwise; the later ones read as the
    launches did.
    """
    samples = _epoch_samples(outcome, trials)
    if outcome.epochs is None:
        return []
    if samples is None:
        return [
            Section("Epochs", paragraphs("How many samples an epoch has is not known, and so neither is its time."))
        ]
    standings = {key(s.config): s for s in (outcome.baseline, outcome.best_same_batch, outcome.best)}
    rows = tuple(_row(outcome, s, samples, trials, apart=_reads_apart(data)) for s in standings.values())
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


def _reads_apart(data: DataRef | None) -> bool:
    """Whether the first epoch reads from elsewhere than the later ones."""
    if data is None or data.store is not None:
        return data is not None and data.store is not None and data.store.cached > 0
    return data.kind == "folder" and data.page_cache == "warm"


def _row(outcome: Outcome, one: Standing, samples: int, trials: Sequence[Trial], *, apart: bool) -> tuple[str, ...]:
    found = bottleneck_of(outcome, one.trial)
    later = samples / one.samples_per_second
    first = None if found is None or found.cold_per_s is None else samples / found.cold_per_s[0]
    local = None if found is None or found.local_per_s is None else samples / found.local_per_s
    assert outcome.epochs is not None
    whole = _span((later if first is None else first) + (outcome.epochs - 1) * later)
    name = "baseline" if key(one.config) == key(outcome.baseline.config) else f"trial {label_of(one, trials)}"
    return (
        label_of(one, trials),
        _span(first) if first is not None else "not measured" if apart else "as later ones",
        _span(later),
        "" if local is None else f"about {_span(local)}",
        f"at least {whole}" if apart and first is None else whole,
        f"{name}, {rate_text(one.samples_per_second)} samples/s",
    )


def _span(seconds: float) -> str:
    hours = seconds / _HOUR_S
    if hours >= _DAY_HOURS:
        return f"{hours / 24:.1f} days"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def _epoch_samples(outcome: Outcome, trials: Sequence[Trial]) -> int | None:
    found = (t.result.measurement for t in trials if t.number == outcome.baseline.trial)
    return next((m.epoch_samples or None for m in found if m is not None), None)


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
