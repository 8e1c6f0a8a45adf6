"""The report's sections of figures: finalists, bottlenecks, the gain of each knob, and the ledger of seconds."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.space.formatting import (
    describe,
    memory_text,
    percent_text,
    rate_text,
    seconds_text,
    settings,
)
from autotune.knobs import spell
from autotune.base.records import Bottleneck, Config, KnobPart, LedgerRow, Outcome, Standing, Trial
from autotune.report.document import Column, Facts, Grid, Kind, Paragraph, Section, paragraphs
from autotune.report.material import Material
from autotune.report.sentences import (
    by_gain,
    check_of,
    full_stop,
    gain_text,
    is_out,
    label_of,
    ledger_line,
    standings,
)
from autotune.space import key
from autotune.study.seconds import BETWEEN


def finalists(outcome: Outcome, material: Material) -> Section:
    """Return the table of the finalists with intervals. Their configurations follow the table, where there is room."""
    ranked = standings(outcome)
    labels = [label_of(s, material.trials) for s in ranked]
    rows = []
    for standing, label in zip(ranked, labels, strict=True):
        own = standing is outcome.baseline
        rows.append(
            (
                label,
                rate_text(standing.samples_per_second, standing.ci95),
                *(("1.00×", "-") if own else gain_text((standing.speedup, *standing.speedup_ci95))),
                str(standing.launches) if standing.verified else "1*",
                memory_text(standing.peak_memory_bytes),
                _trains(outcome, standing),
                _holds(outcome, standing),
            )
        )
    titles = ("trial", outcome.unit, "speedup", "95 %", "launches", "peak\nmemory")
    columns = (*map(Column, titles), Column("trains", Kind.WORD), Column("holds", Kind.WORD))
    won = key(outcome.best.config)
    winner = frozenset(i for i, s in enumerate(ranked) if i and key(s.config) == won)
    who = tuple((f"trial {label}", _who(outcome, s)) for s, label in zip(ranked, labels, strict=True))
    made = [label for label in labels if label.endswith("′")]
    return Section(
        "Finalists",
        (
            Grid(columns, tuple(rows), strong=winner),
            Facts(who),
            *paragraphs(_legend(outcome, ranked, made)),
        ),
    )


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
    check = check_of(outcome, standing.trial)
    if standing is outcome.baseline:
        return "-"
    if check is None:
        # Studies without a ledger are from a version that had no checks.
        return "same" if outcome.ledger else "-"
    return {True: "yes", False: "no", None: "?"}[check.passed]


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
        waits = outcome.best.loader_wait_fraction
        line = "The ceilings were not measured. " + (
            "No loader was seen, and a program that tells its own rate is not looked into: what limits it is not known."
            if waits is None
            else f"The winner waits for its loader {percent_text(waits)} of the time."
        )
        return [Section("What limits it", paragraphs(line))]
    rows = tuple(
        (
            _limited(outcome, b, trials),
            _end_to_end(outcome, b),
            _ceiling(b.device_only_per_s),
            _ceiling(b.loader_only_per_s),
            *([_ceiling(b.alone_per_s)] if outcome.ranks > 1 else []),
            b.limit.value,
        )
        for b in outcome.bottlenecks
    )
    titles = ["trial", "end to end", "device alone", "loader alone"]
    sentences = Facts(tuple((_owner(outcome, b, trials), full_stop(b.sentence)) for b in outcome.bottlenecks))
    what = (
        "Samples per second. The device alone trains on batches that are already there; the loader alone delivers "
        "batches that nobody trains on."
    )
    if outcome.ranks > 1:
        titles.append("no exchange")
        what += " Without exchange, the device alone trains in ranks that do not average their gradients."
    grid = Grid((*map(Column, titles), Column("verdict", Kind.WORD)), rows)
    return [Section("What limits it", (grid, sentences, Paragraph(what)))]


def _standing_of(outcome: Outcome, bottleneck: Bottleneck) -> Standing | None:
    """Return the standing that a bottleneck belongs to: a winner without knobs of no use has its trial's number."""
    mine = (s for s in standings(outcome) if s.trial == bottleneck.trial)
    return next((s for s in mine if s.samples_per_second == bottleneck.samples_per_s), None)


def _limited(outcome: Outcome, bottleneck: Bottleneck, trials: Sequence[Trial]) -> str:
    standing = _standing_of(outcome, bottleneck)
    return str(bottleneck.trial) if standing is None else label_of(standing, trials)


def _end_to_end(outcome: Outcome, bottleneck: Bottleneck) -> str:
    """Format an end-to-end rate with the interval of its standing."""
    standing = _standing_of(outcome, bottleneck)
    return rate_text(bottleneck.samples_per_s, standing.ci95 if standing is not None else None)


def _ceiling(rate: tuple[float, float, float] | None) -> str:
    return "not known" if rate is None else rate_text(rate[0], rate[1:])


def _owner(outcome: Outcome, bottleneck: Bottleneck, trials: Sequence[Trial]) -> str:
    baseline = " (baseline)" if bottleneck.trial == outcome.baseline.trial else ""
    return f"trial {_limited(outcome, bottleneck, trials)}{baseline}"


def knobs(outcome: Outcome) -> list[Section]:
    """Return the gain of each changed knob of the winner, as a section."""
    title = "What each knob gave"
    if key(outcome.best.config) == key(outcome.baseline.config):
        return []
    if not outcome.ablation:
        return [Section(title, paragraphs("It was not measured."))]
    rows = tuple(_knob(part, outcome.best.config) for part in by_gain(outcome.ablation))
    columns = (
        Column("knob", Kind.WORD),
        Column("from → to", Kind.TEXT),
        Column("gain"),
        Column("95 %"),
        Column("remark", Kind.TEXT),
    )
    what = (
        "Gain: the rate of the winner over that of the winner with this one knob set back to the baseline's value. "
        "Knobs build on each other, so the gains do not multiply to the whole speedup."
    )
    if any(part.in_heat for part in outcome.ablation):
        what += " In a heat, both trained in turns in one process; what the winner waits for its loader is added."
    return [Section(title, (Grid(columns, rows), Paragraph(what)))]


def _knob(part: KnobPart, winner: Config) -> tuple[str, ...]:
    change = f"{spell(part.baseline_value)} → {spell(part.value)}"
    together = f"set back together with {', '.join(part.with_it)}" if part.with_it else ""
    if part.gain is None:
        why = f"not measured: {part.why_not or 'no reason was given'}".rstrip(".")
        return part.knob, change, "-", "-", "; ".join(filter(None, (why, together)))
    low, high = part.gain[1:]
    within = "makes it slower" if high < 1 else "not shown to matter" if low <= 1 else ""
    once = "launched once without it" if part.launches == 1 else ""
    if within and winner.get(part.knob) == part.value:
        kept = "" if part.in_heat else "kept, as without it was no better"
        once = "launched once without it, too little to set it back" if once else kept
    elif within:
        once = "set back in the winner"
    heat = "in a heat" if part.in_heat else ""
    return part.knob, change, *gain_text(part.gain), "; ".join(filter(None, (heat, within, once, together)))


def ledger(outcome: Outcome) -> list[Section]:
    """Return how the seconds of all launches were spent, as a section."""
    title = "Where the time went"
    if not outcome.ledger:
        inside = seconds_text(outcome.measured_s)
        return [
            Section(
                title,
                paragraphs(f"{seconds_text(outcome.elapsed_s)} of searching, of which {inside} inside kept windows."),
            )
        ]
    total = _total(outcome.ledger)
    rows = tuple(_ledger_row(row, 0 if total.seconds >= 1000 else 1) for row in (*outcome.ledger, total))
    titles = ("launches", "time", "start", "compile", "warm-up", "kept", "rest", "kept\nshare")
    columns = (Column("purpose", Kind.TEXT), *map(Column, titles))
    waited = (
        f"Waiting for a quiet device took another {seconds_text(outcome.wait_s)}, which the budget does not count."
        if outcome.wait_s >= 1
        else None
    )
    took = seconds_text(outcome.elapsed_s)
    beside = f"Trials ran side by side on {outcome.devices} devices: the search itself took {took}."
    together = beside if outcome.devices > 1 else None
    spent = " ".join(filter(None, (ledger_line(outcome.ledger), together, _searching(outcome.ledger), waited)))
    what = "Times in seconds. Start: loading and building. Compile: the first step. Kept: windows that count."
    return [Section(title, (Grid(columns, rows, total=True), *paragraphs(what, spent)))]


def _total(rows: Sequence[LedgerRow]) -> LedgerRow:
    return LedgerRow(
        purpose="in all",
        launches=sum(r.launches for r in rows),
        seconds=sum(r.seconds for r in rows),
        start_s=sum(r.start_s for r in rows),
        compile_s=sum(r.compile_s for r in rows),
        warmup_s=sum(r.warmup_s for r in rows),
        kept_s=sum(r.kept_s for r in rows),
        rest_s=sum(r.rest_s for r in rows),
    )


def _ledger_row(row: LedgerRow, decimals: int) -> tuple[str, ...]:
    parts = (row.seconds, row.start_s, row.compile_s, row.warmup_s, row.kept_s, row.rest_s)
    share = percent_text(row.kept_s / row.seconds) if row.seconds > 0 else "-"
    launches = "-" if row.purpose == BETWEEN else f"{row.launches:,}"
    return (
        row.purpose,
        launches,
        *(f"{s:,.{decimals}f}" if s >= 0.05 else "-" for s in parts),
        "-" if row.purpose == BETWEEN else share,
    )


def _searching(rows: Sequence[LedgerRow]) -> str | None:
    row = next((r for r in rows if r.purpose == "searching"), None)
    if row is None or row.seconds <= row.compile_s:
        return None
    share = percent_text(row.kept_s / (row.seconds - row.compile_s))
    return f"Of the trials' time that was not compiling, {share} lay inside kept windows."
