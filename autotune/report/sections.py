"""The report's sections of figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.base.records import (
    EAGER_FP32,
    Config,
    DataRef,
    Hold,
    KnobPart,
    LedgerRow,
    Outcome,
    Standing,
    StudyHeat,
    TrainVerdict,
    Trial,
    TrialStatus,
    training_s,
)
from autotune.knobs import KNOBS, spell
from autotune.report.document import (
    Column,
    Curves,
    Facts,
    Grid,
    Kind,
    Line,
    Paragraph,
    Part,
    Section,
    facts,
    new_table,
    paragraphs,
)
from autotune.report.material import Material
from autotune.report.sentences import (
    bottleneck_of,
    by_gain,
    check_of,
    full_stop,
    gain_text,
    holds_line,
    is_out,
    label_of,
    ledger_line,
    listed_trials,
    measurement_of,
    standing_of,
    standings,
)
from autotune.space import key, maths_part
from autotune.space.formatting import (
    alone,
    count,
    describe,
    memory_text,
    one_line,
    percent_text,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
)
from autotune.study.history import BETWEEN, total_row

# Finalists, bottlenecks, the gain of each knob, and the ledger of seconds.


def finalists(outcome: Outcome, material: Material) -> Section:
    """Return the table of finalists with their intervals, followed by their configurations, which need more room."""
    ranked = standings(outcome)
    labels = [label_of(s, material.trials) for s in ranked]
    rows = tuple(
        (
            label,
            rate_text(s.samples_per_second, s.ci95),
            *(("1.00×", "-") if s is outcome.baseline else gain_text((s.speedup, *s.speedup_ci95))),
            str(s.launches) if s.verified else "1*",
            memory_text(s.peak_memory_bytes),
            _trains(outcome, s),
            _holds(outcome, s),
        )
        for s, label in zip(ranked, labels, strict=True)
    )
    titles = ("trial", outcome.unit, "speedup", "95 %", "launches", "peak\nmemory")
    columns = (*map(Column, titles), Column("trains", Kind.WORD), Column("holds", Kind.WORD))
    winning = key(outcome.best.config)
    winners = frozenset(i for i, s in enumerate(ranked) if i and key(s.config) == winning)
    configurations = tuple((f"trial {label}", _who(outcome, s)) for s, label in zip(ranked, labels, strict=True))
    derived = [label for label in labels if label.endswith("′")]
    legend = paragraphs(_legend(outcome, ranked, derived))
    return Section("Finalists", (Grid(columns, rows, strong=winners), Facts(configurations), *legend))


def _who(outcome: Outcome, standing: Standing) -> str:
    if standing is outcome.baseline:
        return f"the baseline: {settings(standing.config)}"
    roles = [
        ("likely" if outcome.evidence else "the winner", key(standing.config) == key(outcome.best.config)),
        ("best with your own training", key(standing.config) == key(outcome.best_same_batch.config)),
        ("out", is_out(outcome, standing)),
    ]
    role = ", ".join(name for name, true in roles if true)
    return f"{f'{role}: ' if role else ''}{describe(standing.config, outcome.baseline.config)}"


def _trains(outcome: Outcome, standing: Standing) -> str:
    check = check_of(outcome, standing)
    if standing is outcome.baseline:
        return "-"
    if check is None:
        # Studies without a ledger come from a version that had no checks. Of a script, only what leads is checked.
        return "-" if not outcome.ledger else "same" if _computes_alike(outcome, standing) else "?"
    return {True: "yes", False: "no", None: "?"}[check.passed]


def _computes_alike(outcome: Outcome, standing: Standing) -> bool:
    """Return whether a configuration computes what the baseline does, except for rounding."""
    settings = maths_part(standing.config).items() - outcome.baseline.config.items()
    return not any(name not in KNOBS or KNOBS[name].changes_maths for name, _ in settings)


def _holds(outcome: Outcome, standing: Standing) -> str:
    if is_out(outcome, standing) and outcome.dropped[standing.trial].startswith("did not hold"):
        return "no"
    if outcome.hold is None or standing.trial != outcome.hold.trial:
        return "-"
    return {True: "yes", False: "no", None: "?"}[outcome.hold.passed]


def _legend(outcome: Outcome, ranked: Sequence[Standing], made: Sequence[str]) -> str:
    parts = [f"Intervals are at 95 %. Peak memory is the {outcome.memory_is}'s."]
    if any(not s.verified for s in ranked):
        parts.append("1*: the search's own launch, not launched again.")
    if any(_trains(outcome, s) == "same" for s in ranked):
        parts.append("Trains, same: its steps compute what the baseline's do, so there is nothing to check.")
    if any("?" in (_trains(outcome, s), _holds(outcome, s)) for s in ranked):
        parts.append("?: not checked, see below.")
    parts += [
        f"{label}: trial {label[:-1]} with a knob of no use set back; what is said of training and holding was found "
        f"out about trial {label[:-1]}."
        for label in made
    ]
    return " ".join(parts)


def limits(outcome: Outcome, trials: Sequence[Trial]) -> list[Section]:
    """Return the bottlenecks of the baseline and the finalists, with the two ceilings, as a section."""
    if not outcome.bottlenecks:
        share = outcome.best.loader_wait_fraction
        line = "The ceilings were not measured. " + (
            "What limits it is not known: no loader was seen, or a program tells its own rate and is not looked into."
            if share is None
            else f"The winner waits for its loader {percent_text(share)} of the time."
        )
        return [Section("What limits it", paragraphs(line))]
    rows: list[tuple[str, ...]] = []
    sentences: list[tuple[str, str]] = []
    for b in outcome.bottlenecks:
        # The rate decides which standing it is of, whose interval it then has.
        standing = standing_of(outcome, b)
        label = str(b.trial) if standing is None else label_of(standing, trials)
        ceilings = [b.device_only_per_s, b.loader_only_per_s, *([b.alone_per_s] if outcome.ranks > 1 else [])]
        known = ["not known" if ceiling is None else rate_text(ceiling[0], ceiling[1:]) for ceiling in ceilings]
        rate = rate_text(b.samples_per_s, None if standing is None else standing.ci95)
        rows.append((label, rate, *known, b.limit.value))
        owner = f"trial {label}{' (baseline)' if b.trial == outcome.baseline.trial else ''}"
        sentences.append((owner, full_stop(b.sentence)))
    titles = ["trial", "end to end", "device alone", "loader alone"]
    legend = (
        "Samples per second. The device alone trains on batches that are already there; the loader alone delivers "
        "batches that nobody trains on."
    )
    if outcome.ranks > 1:
        titles.append("no exchange")
        legend += " Without exchange, the device alone trains in ranks that do not average their gradients."
    grid = Grid((*map(Column, titles), Column("verdict", Kind.WORD)), tuple(rows))
    return [Section("What limits it", (grid, Facts(tuple(sentences)), Paragraph(legend)))]


def knobs(outcome: Outcome) -> list[Section]:
    """Return the gain of each knob that the winner changes, as a section."""
    title = "What each knob gave"
    if key(outcome.best.config) == key(outcome.baseline.config):
        return []
    if not outcome.ablation:
        return [Section(title, paragraphs("It was not measured."))]
    rows = tuple(_knob(part, outcome.best.config) for part in by_gain(outcome.ablation))
    change = (Column("knob", Kind.WORD), Column("from → to", Kind.TEXT))
    columns = (*change, Column("gain"), Column("95 %"), Column("remark", Kind.TEXT))
    legend = (
        "Gain: the rate of the winner over that of the winner with this one knob set back to the baseline's value. "
        "Knobs build on each other, so the gains do not multiply to the whole speedup."
    )
    if any(part.in_heat for part in outcome.ablation):
        legend += " In a heat, both trained in turns in one process; what the winner waits for its loader is added."
    return [Section(title, (Grid(columns, rows), Paragraph(legend)))]


def _knob(part: KnobPart, winner: Config) -> tuple[str, ...]:
    change = f"{spell(part.baseline_value)} → {spell(part.value)}"
    together = f"set back together with {', '.join(part.with_it)}" if part.with_it else ""
    if part.gain is None:
        reason = f"not measured: {part.why_not or 'no reason was given'}".rstrip(".")
        return part.knob, change, "-", "-", "; ".join(filter(None, (reason, together)))
    low, high = part.gain[1:]
    effect = "makes it slower" if high < 1 else "not shown to matter" if low <= 1 else ""
    once = "launched once without it" if part.launches == 1 else ""
    if effect and winner.get(part.knob) == part.value:
        remark = "" if part.in_heat else "kept, as without it was no better"
        once = "launched once without it, too little to set it back" if once else remark
    elif effect:
        once = "set back in the winner"
    heat = "in a heat" if part.in_heat else ""
    return part.knob, change, *gain_text(part.gain), "; ".join(filter(None, (heat, effect, once, together)))


def ledger(outcome: Outcome) -> list[Section]:
    """Return how the seconds of all launches were spent, as a section."""
    title = "Where the time went"
    if not outcome.ledger:
        kept = f"of which {seconds_text(outcome.measured_s)} inside kept windows"
        return [Section(title, paragraphs(f"{seconds_text(outcome.elapsed_s)} of searching, {kept}."))]
    total = total_row("in all", outcome.ledger)
    rows = tuple(_ledger_row(row, 0 if total.seconds >= 1000 else 1) for row in (*outcome.ledger, total))
    titles = ("launches", "time", "start", "compile", "warm-up", "kept", "rest", "kept\nshare")
    columns = (Column("purpose", Kind.TEXT), *map(Column, titles))
    waited = f"Waiting for a quiet device took another {seconds_text(outcome.wait_s)}, which the budget does not count."
    elapsed = seconds_text(outcome.elapsed_s)
    beside = f"Trials ran side by side on {outcome.devices} devices: the search itself took {elapsed}."
    spent = (
        ledger_line(outcome.ledger),
        beside if outcome.devices > 1 else None,
        _searching(outcome.ledger),
        waited if outcome.wait_s >= 1 else None,
    )
    legend = "Times in seconds. Start: loading and building. Compile: the first step. Kept: windows that count."
    return [Section(title, (Grid(columns, rows, total=True), *paragraphs(legend, " ".join(filter(None, spent)))))]


def _ledger_row(row: LedgerRow, decimals: int) -> tuple[str, ...]:
    parts_s = (row.seconds, row.start_s, row.compile_s, row.warmup_s, row.kept_s, row.rest_s)
    parts = [f"{s:,.{decimals}f}" if s >= 0.05 else "-" for s in parts_s]
    if row.purpose == BETWEEN:
        return row.purpose, "-", *parts, "-"
    share = percent_text(row.kept_s / row.seconds) if row.seconds > 0 else "-"
    return row.purpose, f"{row.launches:,}", *parts, share


def _searching(rows: Sequence[LedgerRow]) -> str | None:
    row = next((r for r in rows if r.purpose == "searching"), None)
    if row is None or row.seconds <= row.compile_s:
        return None
    share = percent_text(row.kept_s / (row.seconds - row.compile_s))
    return f"Of the trials' time that was not compiling, {share} lay inside kept windows."


# The report's sections on the checks: whether finalists train like eager fp32, and whether the winner's memory holds.

#: Peaks that differ by less than this fraction count as equal.
PEAKS_AGREE = 0.1
_EVALUATIONS = {
    "evaluate": "run, the workload's own",
    "eval": "run, the workload's loss in evaluation mode",
    "train": "run, the workload's loss in training mode without gradients",
}


def trains(outcome: Outcome) -> list[Section]:
    """Return whether the finalists train like eager fp32, with their loss curves, as a section."""
    title = "Does it train?"
    if not outcome.checks:
        if key(outcome.best.config) == key(outcome.baseline.config):
            return []
        same = "Nothing needed a check: every finalist's steps compute what the baseline's do."
        is_same = outcome.ledger and all(_computes_alike(outcome, standing) for standing in outcome.finalists)
        return [Section(title, paragraphs(same if is_same else "It was not checked."))]
    measured = any(check.reference_metric is not None for check in outcome.checks)
    rows = tuple(
        (
            ", ".join(map(str, sorted(check.trials))),
            describe(check.config, outcome.baseline.config),
            {True: "passed", False: "fast but wrong", None: "not checked"}[check.passed],
            _figure(check.distance),
            _figure(check.tolerance),
            *((f"{_figure(check.metric)} ({_figure(check.reference_metric)})",) if measured else ()),
        )
        for check in outcome.checks
    )
    titles = ("distance", "tolerance", *(("metric (reference)",) if measured else ()))
    checked = (Column("trials", Kind.WORD), Column("checked as", Kind.TEXT), Column("result", Kind.WORD))
    columns = (*checked, *map(Column, titles))
    parts: list[Part] = [*paragraphs(_what_checks_compare(outcome)), Grid(columns, rows)]
    parts += facts(*((listed_trials(sorted(c.trials)), full_stop(c.reason)) for c in outcome.checks if c.reason))
    parts += _curves(outcome.checks)
    return [Section(title, tuple(parts))]


def delivers(outcome: Outcome) -> list[Section]:
    """Return whether the winners' loaders deliver the same data as the baseline's, as a section."""
    compared = [verdict for verdict in outcome.data if not verdict.needless]
    if not compared:
        return []
    rows = tuple(
        (
            str(verdict.trial),
            describe(verdict.config, outcome.baseline.config),
            {True: "equal", False: "other data", None: "not compared"}[verdict.passed],
            f"{verdict.batches:,}",
            f"{verdict.samples:,}",
            str(verdict.epochs),
        )
        for verdict in compared
    )
    compares = (Column("trial", Kind.WORD), Column("configuration", Kind.TEXT), Column("data", Kind.WORD))
    columns = (*compares, *map(Column, ("batches", "samples", "epochs")))
    legend = (
        "Digests of what a loader delivers, beside those of the baseline's, for the same samples in the same order: "
        "the first batches of two epochs, each drawn twice, by one worker after the other. The global generators of "
        "random numbers begin each batch alike, so that augmentations are compared as well."
    )
    reasons = facts(*((f"trial {v.trial}", full_stop(v.reason)) for v in compared if v.reason))
    return [Section("Does it load the same?", (*paragraphs(legend), Grid(columns, rows), *reasons))]


def _what_checks_compare(outcome: Outcome) -> str:
    steps = max(len(check.reference) for check in outcome.checks)
    batch = outcome.baseline.config.get("batch_size")
    reference = outcome.checks[0].beside
    if reference != EAGER_FP32:
        losses = f"The losses of {count(steps, 'step')}" if steps else "The losses"
        return (
            f"{losses} at batch {batch}, beside those of {reference}. The distance is the mean difference between the "
            "two; a small part of the loss is accepted, and more where further runs of the script lie further apart."
        )
    clause = f"took the same {count(steps, 'step')}" if steps else "was to take the same steps"
    return (
        f"Each {clause} at batch {batch}, from the same weights over the same batches, as eager fp32. The distance is "
        "the mean difference between the two losses; a small part of the loss is accepted, and more where eager fp32 "
        "under other seeds lies further apart."
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _curves(checks: tuple[TrainVerdict, ...]) -> list[Curves]:
    """Return the losses of each check, grouped with the eager fp32 training that they are compared with."""
    groups: dict[tuple[float, ...], list[TrainVerdict]] = {}
    for check in checks:
        if check.losses:
            groups.setdefault(check.reference, []).append(check)
    return [
        Curves(((members[0].beside, reference), *((listed_trials(sorted(c.trials)), c.losses) for c in members)))
        for reference, members in groups.items()
    ]


def _peak(held_bytes: int, timed_bytes: int | None) -> str:
    """Return the peak of the long training, and the one in the tables if it differs.

    It may differ because queues fill differently, and because on a GPU the reserved memory counts here.
    """
    text = memory_text(held_bytes)
    if not timed_bytes or abs(held_bytes / timed_bytes - 1) < PEAKS_AGREE:
        return text
    return f"{text} in this training, {memory_text(timed_bytes)} at most in the launches that were timed"


def _evaluation(hold: Hold) -> str:
    if hold.evaluated is None:
        return "not run"
    text = _EVALUATIONS.get(hold.evaluated, hold.evaluated)
    if hold.evaluation_per_s is not None:
        text += f"; it computes {rate_text(hold.evaluation_per_s)} samples/s"
    if hold.inference_gain is not None:
        text += f", with torch.inference_mode() {hold.inference_gain:.2f} times as many"
    return text


def holds(outcome: Outcome) -> list[Section]:
    """Return whether the winner stays within the device's memory in a longer training, as a section."""
    title, verdict = "Does it hold?", outcome.hold
    if key(outcome.best.config) == key(outcome.baseline.config) and verdict is None:
        return []
    if verdict is None:
        return [Section(title, paragraphs("It was not checked."))]
    line, hold = holds_line(verdict), verdict.hold
    if hold is None:
        return [Section(title, paragraphs(line))]
    settled = "memory had settled" if hold.settled else "memory was still growing"
    trained = f"{count(hold.steps, 'step')} in {seconds_text(hold.seconds)}"
    free = f"{percent_text(hold.headroom)} of {memory_text(hold.capacity_bytes)} stay free"
    sustained: str | None = None
    first_step: str | None = None
    if verdict.sustained_per_s is not None:
        clock = "" if hold.sm_clock_mhz is None else f", at {hold.sm_clock_mhz:,} MHz"
        rate = f"{rate_text(verdict.sustained_per_s)} {outcome.unit}"
        sustained = f"{rate} over {seconds_text(hold.sustained_s)}{clock}"
    if hold.first_step_bytes is not None and hold.first_step_bytes > hold.peak_bytes:
        first_step = f"{memory_text(hold.first_step_bytes)}, of which later steps need no more than the peak"
    largest = f"{memory_text(hold.largest_bytes)}, trained on" if hold.largest_bytes else "all samples have one shape"
    results = facts(
        ("trained", f"trial {verdict.trial}, {trained}; {settled}"),
        ("peak memory", _peak(hold.peak_bytes, outcome.best.peak_memory_bytes)),
        ("first step", first_step),
        ("headroom", f"{free}; {percent_text(verdict.headroom_wanted)} are wanted"),
        ("alloc retries", None if hold.alloc_retries is None else f"{hold.alloc_retries:,}"),
        ("sustained rate", sustained),
        ("evaluation", _evaluation(hold)),
        ("largest sample", largest),
    )
    return [Section(title, (*paragraphs("Yes." if verdict.passed else line), *results))]


# What a whole training takes: hours and money for the requested epochs or samples, depending on where its files come
# from.


_HOUR_S = 3600.0


@dataclass(frozen=True)
class TrainingLength:
    """The length of the training that the user has in mind.

    Attributes:
        words: the length as text, such as ``90 epochs``.
        samples: read in total. epoch_samples: samples of one epoch; ``None`` if unknown.
    """

    words: str
    samples: int
    epoch_samples: int | None


def whole_training(material: Material) -> TrainingLength | None:
    """Return the training whose length the request states; ``None`` if it states none, or if it is in epochs of unknown
    length."""
    outcome, spec = material.outcome, material.spec
    if outcome is None:
        return None
    epoch_samples = samples_of_epoch(outcome, material.trials)
    if spec.samples is not None and outcome.counts == "samples":
        return TrainingLength(count(spec.samples, "sample"), spec.samples, epoch_samples)
    if spec.epochs is None or epoch_samples is None:
        return None
    return TrainingLength(count(spec.epochs, "epoch"), spec.epochs * epoch_samples, epoch_samples)


def samples_of_epoch(outcome: Outcome, trials: Sequence[Trial]) -> int | None:
    """Return how many samples an epoch has; ``None`` if unknown."""
    measurement = measurement_of(outcome.baseline, trials)
    return None if measurement is None else measurement.epoch_samples or None


def whole_training_s(outcome: Outcome, one: Standing, whole: TrainingLength) -> float:
    """Return the seconds of a whole training, including a first epoch with no files in a cache, if that was measured.

    If it was measured only for other configurations, the fastest of theirs is used, so that two configurations can be
    compared: see `first_epoch_is_borrowed`.
    """
    cold_rates = [b.cold_per_s[0] for b in outcome.bottlenecks if b.cold_per_s is not None]
    return training_s(
        whole.samples,
        epoch_samples=whole.epoch_samples,
        start_s=one.startup_s + one.compile_s,
        per_s=one.samples_per_second,
        cold_per_s=max(cold_rates, default=None) if (cold := _cold_per_s(outcome, one)) is None else cold,
    )


def first_epoch_is_borrowed(outcome: Outcome, one: Standing) -> bool:
    """Return whether a training may take longer than `whole_training_s`, because the first epoch was measured only for
    another configuration."""
    return _cold_per_s(outcome, one) is None and any(b.cold_per_s is not None for b in outcome.bottlenecks)


def _cold_per_s(outcome: Outcome, one: Standing) -> float | None:
    bottleneck = bottleneck_of(outcome, one)
    return None if bottleneck is None or bottleneck.cold_per_s is None else bottleneck.cold_per_s[0]


def saved(outcome: Outcome, one: Standing, material: Material) -> list[tuple[str, str]]:
    """Return what a configuration saves, as rows of a name and a sentence.

    These are the hours of the requested training, or else of an epoch, and the money if the price of an hour is known.
    """
    whole, price = whole_training(material), material.spec.price_per_hour
    if whole is None:
        samples = samples_of_epoch(outcome, material.trials)
        words = f"a million {outcome.counts}" if samples is None else f"an epoch of {samples:,} samples"
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
    # An objective other than the rate may select a slower configuration.
    rows = [("saves" if then_s <= now_s else "takes", f"{time}{less}")]
    if price is not None:
        then, now = (seconds / _HOUR_S * price for seconds in (then_s, now_s))
        words = f"{then_is}{_money(then)} instead of {now_is}{_money(now)}, at {_money(price)} an hour"
        rows.append(("costs", words))
    return rows


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 0.1 else f"{amount:.3g}"


def epochs(outcome: Outcome, material: Material) -> list[Section]:
    """Return how long the training takes with the baseline and with the winners, as a section; empty without
    ``--epochs`` or ``--samples``.

    The first epoch reads files that are in no cache, unless known otherwise; later ones read as the launches did.
    """
    spec, data, whole = material.spec, material.data, whole_training(material)
    if spec.epochs is None and spec.samples is None:
        return []
    if whole is None:
        unknown = "How many samples an epoch has is not known, and so neither is its time."
        return [Section("Epochs", paragraphs(unknown))]
    standings = {key(s.config): s for s in (outcome.baseline, outcome.best_same_batch, outcome.best)}
    apart = data is not None and data.first_epoch_apart
    rows = tuple(_row(outcome, s, whole, material.trials, apart=apart) for s in standings.values())
    titles = ("trial", "first epoch", "a later one", "from a local copy", whole.words)
    reading = facts(
        ("an epoch", None if whole.epoch_samples is None else f"{whole.epoch_samples:,} samples"),
        ("where its files come from", _state(data)),
        ("what the launches read", _read(outcome, data)),
    )
    grid = Grid((*map(Column, titles), Column("configuration", Kind.TEXT)), rows)
    return [Section("Epochs", (grid, *reading))]


def _row(
    outcome: Outcome, one: Standing, whole: TrainingLength, trials: Sequence[Trial], *, apart: bool
) -> tuple[str, ...]:
    bottleneck, samples, cold = bottleneck_of(outcome, one), whole.epoch_samples, _cold_per_s(outcome, one)
    local_per_s = None if bottleneck is None else bottleneck.local_per_s
    missing = "not measured" if apart else "as later ones"
    takes = seconds_text(whole_training_s(outcome, one, whole))
    name = "baseline" if key(one.config) == key(outcome.baseline.config) else f"trial {label_of(one, trials)}"
    return (
        label_of(one, trials),
        "-" if samples is None else missing if cold is None else seconds_text(samples / cold),
        "-" if samples is None else seconds_text(samples / one.samples_per_second),
        "" if local_per_s is None or samples is None else f"about {seconds_text(samples / local_per_s)}",
        f"at least {takes}" if apart and cold is None else takes,
        f"{name}, {rate_text(one.samples_per_second)} {outcome.unit}",
    )


def _state(data: DataRef | None) -> str | None:
    """Return where a training's files come from, which decides which of the figures apply to it."""
    if data is None or data.kind == "synthetic":
        return None
    if data.kind == "generated" and data.store is None:
        return "autotune's own photographs, from the page cache: with your files, --data DIR"
    if data.store is not None:
        cached = data.store.cached
        if cached <= 0:
            return "the slow store, in every epoch: it has no cache"
        if cached >= 1:
            return "the slow store in the first epoch, its cache in all later ones"
        return f"the slow store in the first epoch; later {percent_text(cached)} of the files from its cache"
    if data.page_cache == "warm":
        return "the disk or the network in the first epoch, and the page cache, into which they fit, in all later ones"
    if data.page_cache == "cold":
        return "the disk or the network in every epoch: they do not fit into the page cache"
    return "not known: the workload's own"


def _read(outcome: Outcome, data: DataRef | None) -> str | None:
    read, whole = outcome.samples_read, outcome.dataset_samples
    # Iterable data and the workload's own samplers have an order that autotune does not control; generated photographs
    # stand for a larger set.
    if not read or whole is None or data is None or data.kind == "generated":
        return None
    if read <= whole:
        return f"{read:,} of {whole:,} samples; none was read twice"
    return f"each of {whole:,} samples {read / whole:.1f} times"


# The report's section on heats, for readers who have never heard of them.

WHAT = (
    "In a heat several configurations train in turns, in random order, in one process and with the same weights. "
    "Whatever slows the machine down slows all of them alike, so their ratios are surer than those of separate "
    "launches, and each costs seconds. It shows what the device does, without loading, or what the loader does, "
    "without a training, and where to look; what is promised was measured in launches of its own."
)


def heats(found: Sequence[StudyHeat], baseline: Config | None) -> list[Section]:
    """Return the heats of a search as a section; empty if there were none."""
    if not found:
        return []
    titles = (Column("configuration", Kind.TEXT), Column("rate"), Column("95 %"), Column("turns"))
    columns = (*titles, Column("remark", Kind.TEXT))
    parts: list[Part] = [Paragraph(WHAT)]
    for heat in found:
        parts += [Paragraph(_line(heat)), Grid(columns, _rows(heat, baseline or {}))]
    return [Section("Heats", tuple(parts))]


def heat_table(heat: StudyHeat, baseline: Config) -> RenderableType:
    """Return the table of a heat, fastest first, with a summary line above it."""
    table = new_table("rate", "95 %", "turns", "optimization", "remark", wrap=("optimization", "remark"))
    for configuration, rate, interval, turns, remark in _rows(heat, baseline):
        table.add_row(rate, interval, turns, Text(configuration), Text(remark))
    return Group(Text(), Line(_line(heat)), table)


def _line(heat: StudyHeat) -> str:
    compared = f"{count(len(heat.heat.entrants), 'configuration')} in {seconds_text(heat.wall_s)}"
    return f"Heat {heat.number}: {compared}, {alone(heat.heat.side)}; {one_line(heat.heat.ended)}."


def _rows(heat: StudyHeat, baseline: Config) -> tuple[tuple[str, ...], ...]:
    """Return rows of configuration, rate relative to the reference, its interval, number of turns, and a remark."""
    rows = []
    remarks = {TrialStatus.COMPLETE: "", TrialStatus.PRUNED: "dropped out, certainly behind"}
    for e in sorted(heat.heat.entrants, key=lambda e: -(e.ratio or 0.0)):
        if e is heat.heat.reference and e.ratio:
            gain, remark = ("1.00×", "-"), "the reference"
        else:
            failed = full_stop(f"{e.status}: {one_line(e.cause or '')}").rstrip(".")
            gain, remark = ("-" if e.ratio is None else ratio_text(e.ratio), "-"), remarks.get(e.status, failed)
            if e.ratio is not None and e.ratio_ci95 is not None:
                gain = gain_text((e.ratio, *e.ratio_ci95))
        who = f"the baseline: {settings(e.config)}" if e.config == baseline else describe(e.config, baseline)
        rows.append((who, *gain, str(sum(turn is not None for turn in e.turns)), remark))
    return tuple(rows)
