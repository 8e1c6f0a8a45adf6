"""The report's pictures, each only where the figures of a study say something in this form.

The losses beside eager fp32 are drawn where the training check is reported (`autotune.report.proofs`).
"""

from __future__ import annotations

from autotune.space.formatting import (
    describe,
    interval_text,
    listed,
    phrase,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
)
from autotune.base.records import Finding, Outcome, Standing, Value
from autotune.report.document import Picture, Section
from autotune.report.material import Material
from autotune.report.plots import Factor, IntervalRow, Intervals, Stacks, Waterfall
from autotune.report.sentences import by_gain, gain_text, is_out, label_of, ledger_line, standings
from autotune.report.spread import course, rate_by_batch, rate_by_workers
from autotune.space import key

#: A rest of the speedup that is closer to 1 than this ratio says nothing.
REST = 1.01


def pictures(material: Material) -> list[Section]:
    """Return the pictures of a study as a section; nothing if there are none."""
    outcome = material.outcome
    found = [
        *([waterfall(outcome), intervals(outcome, material)] if outcome else []),
        rate_by_batch(material),
        rate_by_workers(material),
        course(material),
        stacks(outcome) if outcome else None,
    ]
    shown = tuple(picture for picture in found if picture is not None)
    return [Section("At a glance", shown)] if shown else []


def waterfall(outcome: Outcome) -> Picture | None:
    """Show what each knob gave, from the baseline to the winner.

    A knob's gain is the winner's rate over that without it, so the gains need not multiply to the whole: what is left
    is a bar of its own, the rest. ``None`` if no gain was measured, or if nothing was shown to be faster.
    """
    best, baseline = outcome.best, outcome.baseline
    gained = [part for part in by_gain(outcome.ablation) if part.gain and best.config.get(part.knob) == part.value]
    if not gained or best.speedup_ci95[0] <= 1 or outcome.found is not Finding.FASTER:
        return None
    factors = [
        Factor(f"{phrase(p.knob, p.value)} instead of {_phrase(p.knob, p.baseline_value)}: {_gain(p.gain)}", p.gain)
        for p in gained
        if p.gain is not None
    ]
    rest = best.speedup
    for factor in factors:
        rest /= factor.factor[0]
    unknown = [p.knob for p in outcome.ablation if not p.gain and best.config.get(p.knob) == p.value]
    if max(rest, 1 / rest) > REST:
        apart = f"{listed(unknown)} not measured apart; " if unknown else ""
        name = f"the rest ({apart}what they give only together): {ratio_text(rest)}"
        factors.append(Factor(name, (rest, None, None), rest=True))
    whole = f"{ratio_text(best.speedup, best.speedup_ci95)} ({interval_text(best.speedup_ci95).replace(' to ', '–')})"
    begin, end = (rate_text(standing.samples_per_second) for standing in (baseline, best))
    steps = "; ".join(factor.name for factor in factors)
    unit = outcome.unit
    about = f"From the baseline, {begin} {unit}, to the winner, {end} {unit}: {steps}. In all {whole}."
    plot = Waterfall(
        "rate relative to the baseline's (×, logarithmic; 95 %)",
        f"the baseline, {begin} {unit}",
        tuple(factors),
        f"the winner, {end} {unit}: {whole}",
        (best.speedup, *best.speedup_ci95),
    )
    return Picture("What each knob gave", about, plot)


def _phrase(name: str, value: Value | None) -> str:
    return "none" if value is None else phrase(name, value)


def _gain(gain: tuple[float, float, float] | None) -> str:
    if gain is None:
        return ""
    ratio, between = gain_text(gain)
    return f"{ratio} ({between})"


def intervals(outcome: Outcome, material: Material) -> Picture | None:
    """Show the finalists' rates with their intervals; ``None`` if there is only the baseline."""
    ranked = standings(outcome)
    if len(ranked) < 2:
        return None
    rows = tuple(_row(outcome, standing, material) for standing in ranked)
    told = (f"{row.name}: {rate_text(s.samples_per_second, s.ci95)}" for row, s in zip(rows, ranked, strict=True))
    return Picture(
        "The finalists",
        f"Rates in {outcome.counts} per second with their 95 % intervals. {'; '.join(told)}.",
        Intervals(f"{outcome.unit} (95 %)", rows),
    )


def _row(outcome: Outcome, standing: Standing, material: Material) -> IntervalRow:
    baseline, won = outcome.baseline, key(standing.config) == key(outcome.best.config)
    if standing is baseline:
        name = f"baseline: {settings(standing.config)}"
    else:
        out = is_out(outcome, standing)
        role = "out, " if out else "" if standing.verified else "launched once, "
        name = f"{role}trial {label_of(standing, material.trials)}: {describe(standing.config, baseline.config)}"
    faint = is_out(outcome, standing) or not standing.verified
    at = (standing.samples_per_second, *standing.ci95)
    return IntervalRow(name, at, strong=won and standing is not baseline, faint=faint)


def stacks(outcome: Outcome) -> Picture | None:
    """Show how the seconds of the launches were spent; ``None`` for studies of versions that kept no ledger."""
    if not outcome.ledger:
        return None
    parts = ("starting", "compiling, first step", "warming up", "kept windows", "the rest")
    rows = tuple(
        (f"{r.purpose}, {seconds_text(r.seconds)}", (r.start_s, r.compile_s, r.warmup_s, r.kept_s, r.rest_s))
        for r in outcome.ledger
        if r.seconds >= 0.05
    )
    return Picture("Where the seconds went", ledger_line(outcome.ledger) or "", Stacks("seconds", parts, rows))
