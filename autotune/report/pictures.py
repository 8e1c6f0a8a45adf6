"""The pictures of a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.base.records import Config, Finding, Outcome, Side, Standing, TrialStatus
from autotune.knobs import KNOBS
from autotune.knobs.batch_size import KNOB as BATCH
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.report.document import Column, Grid, Kind, Picture, Section
from autotune.report.drawing import (
    Axis,
    Chart,
    Factor,
    IntervalRow,
    Intervals,
    Level,
    Panel,
    Series,
    Span,
    Stacks,
    Waterfall,
)
from autotune.report.material import Material
from autotune.report.sentences import (
    bottleneck_of,
    by_gain,
    gain_words,
    is_out,
    label_of,
    ledger_line,
    standing_of,
    standings,
)
from autotune.space import key
from autotune.space.formatting import (
    count,
    counts_text,
    describe,
    listed,
    memory_text,
    percent_text,
    phrase,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
    trial_peak_bytes,
    unit_of,
)

# Pictures of the trials: rate against batch size and against workers, and the course of the search.

#: The knee is the smallest batch with at least this fraction of the best rate; number of batch sizes needed to see one.
KNEE, TO_SEE_IT = 0.95, 3
#: Ratio of the largest to the smallest value above which an axis is logarithmic.
WIDE = 20.0
#: A limit is drawn if it is at most this many times the largest peak; otherwise it would flatten the picture.
NEAR = 3.0
#: Number of labels that fit on an axis.
TICKS = 8
_GIB = 2**30
_MEMORY = (TrialStatus.OOM, TrialStatus.HOST_OOM)
#: The loader's knobs that mean nothing without workers.
_LOADER = (WORKERS.name, *(name for name, knob in KNOBS.items() if knob.needs == WORKERS.name))


@dataclass(frozen=True)
class _Seen:
    """A rate that was measured at one value of a knob.

    Attributes:
        rest: the configuration without that knob, and the heat; equal for rates that differ in nothing else.
    """

    x: int
    per_s: float
    rest: str
    peak_bytes: int | None = None


def rate_by_batch(material: Material) -> Picture | None:
    """Show rates and peak memory against the batch size, with the memory limit and the knee of the rate.

    Lines join configurations that differ only in batch size, and only these show a knee: otherwise another knob might
    be its cause. ``None`` if fewer than two batch sizes were measured.
    """
    trials, device = _in_trials(material, (BATCH.name,)), _in_heats(material, "device", (BATCH.name,))
    unit = unit_of(material.trials)
    sizes = sorted({point.x for point in (*trials, *device)})
    if len(sizes) < 2:
        return None
    oom = sorted(
        {int(t.config[BATCH.name]) for t in material.trials if t.result.status in _MEMORY and BATCH.name in t.config}
    )
    rates = [*_series("trials, end to end", "dots", trials, 1), *_series("heats, the device alone", "rings", device, 2)]
    rates += [Series("out of memory", "crosses", tuple((x, 0.0) for x in oom), 2)] if oom else []
    panels = [Panel(Axis(unit, log=_wide([s.per_s for s in (*trials, *device)])), tuple(rates))]
    peaks = [(point.x, point.peak_bytes / _GIB) for point in trials if point.peak_bytes]
    limit, limit_name = _limit(material)
    note = ""
    if peaks:
        is_near = limit is not None and limit / _GIB <= NEAR * max(y for _, y in peaks)
        levels = (Level(limit_name, (limit / _GIB, None, None), 2),) if limit is not None and is_near else ()
        note = (
            f"{memory_text(limit)} is {limit_name}, far above these peaks" if limit is not None and not is_near else ""
        )
        panels.append(Panel(Axis("peak, GiB"), (Series("", "dots", tuple(peaks), 1),), levels))
    knee = _knee(trials) or _knee(device)
    ticks = tuple(float(x) for x in sorted({*sizes, *oom}))
    chart = Chart(
        Axis("batch size (samples)", _thinned(ticks), log=True),
        tuple(panels),
        here=None if knee is None else float(knee),
        here_is=f"knee: from batch {knee} on, at least {percent_text(KNEE)} of the best rate" if knee else "",
        note=note,
    )
    best, alone = _best(trials, sizes), _best(device, sizes)
    peak = {x: max((s.peak_bytes or 0 for s in trials if s.x == x), default=0) for x in sizes}
    rows = [(f"{x:,}", _rate(best[x]), _rate(alone[x]), memory_text(peak[x] or None)) for x in sizes]
    rows += [(f"{x:,}", "out of memory", "", "") for x in oom if x not in sizes]
    titles = ("batch", f"best trial,\n{unit}", f"device alone,\n{unit}", "peak\nmemory")
    about = f"Rates at batch {listed([str(x) for x in sizes])}: {_told(best, alone)} {unit}."
    about += f" {limit_name[:1].upper()}{limit_name[1:]}: {memory_text(limit)}." if limit is not None else ""
    about += f" The knee is at batch {knee}." if knee is not None else ""
    about += f" Out of memory at batch {listed([str(x) for x in oom])}." if oom else ""
    return Picture("Rate and memory by batch size", about, chart, Grid(tuple(map(Column, titles)), tuple(rows)))


def rate_by_workers(material: Material) -> Picture | None:
    """Show rates against the number of loader workers, with the device's ceiling if it was measured.

    ``None`` if fewer than two numbers of workers were measured.
    """
    trials, loader = _in_trials(material, _LOADER), _in_heats(material, "loader", _LOADER)
    outcome = material.outcome
    ceiling = None
    if outcome is not None:
        for bottleneck in outcome.bottlenecks:
            standing = standing_of(outcome, bottleneck)
            config = {} if standing is None else standing.config
            if bottleneck.loader_only_per_s is not None and WORKERS.name in config:
                x = int(config[WORKERS.name])
                loader.append(_Seen(x, bottleneck.loader_only_per_s[0], f"ceiling {bottleneck.trial}"))
        winner = bottleneck_of(outcome, outcome.best)
        ceiling = None if winner is None else winner.device_only_per_s
    unit = unit_of(material.trials)
    numbers = sorted({point.x for point in (*trials, *loader)})
    if len(numbers) < 2:
        return None
    rates = [*_series("trials, end to end", "dots", trials, 1), *_series("the loader alone", "rings", loader, 3)]
    levels = (Level("the device alone, with the winner's settings (95 %)", ceiling, 2),) if ceiling else ()
    all_rates = [s.per_s for s in (*trials, *loader)] + ([ceiling[0]] if ceiling else [])
    chart = Chart(
        Axis("loader workers (processes)", _thinned(tuple(map(float, numbers)))),
        (Panel(Axis(unit, log=_wide(all_rates)), tuple(rates), levels),),
    )
    best, alone = _best(trials, numbers), _best(loader, numbers)
    rows = tuple((str(x), _rate(best[x]), _rate(alone[x])) for x in numbers)
    titles = ("workers", f"best trial,\n{unit}", f"loader alone,\n{unit}")
    about = f"Rates with {listed([str(x) for x in numbers])} workers: {_told(best, alone)} {unit}."
    about += f" The device alone: {rate_text(ceiling[0], ceiling[1:])} {unit}." if ceiling else ""
    return Picture("Rate by loader workers", about, chart, Grid(tuple(map(Column, titles)), rows))


def course(material: Material) -> Picture | None:
    """Show the course of the search: each trial, the best so far, heats, and failures.

    The seconds are those of trials and heats, one after the other, without the proof. ``None`` if fewer than two trials
    have ended, or none was measured.
    """
    if len(material.trials) < 2:
        return None
    # With an objective that only chooses among the fastest, the search itself goes by the rate.
    complete = [t for t in material.trials if t.result.status is TrialStatus.COMPLETE]
    throughput = all(t.score is None or t.score == t.rate_per_s for t in complete)
    at_s, best = 0.0, -math.inf
    fit = {t.number for t in complete if material.required.allow(t)}
    spans: list[Span] = []
    measured: list[tuple[float, float]] = []
    pruned: list[tuple[float, float]] = []
    failed: list[tuple[float, float]] = []
    best_so_far: list[tuple[float, float]] = []
    rows: list[tuple[str, ...]] = []
    for i in range(len(material.trials) + 1):
        for heat in (h for h in material.heats if min(h.after, len(material.trials)) == i):
            spans.append(Span(at_s, at_s + heat.wall_s))
            at_s += heat.wall_s
        if i == len(material.trials):
            break
        trial = material.trials[i]
        at_s += trial.result.wall_s
        status, value = trial.result.status, trial.rate_per_s if throughput else trial.score
        if status is TrialStatus.COMPLETE and value is not None:
            measured.append((at_s, value))
            if trial.score is not None and trial.number in fit and trial.score > best:
                best = trial.score
                best_so_far.append((at_s, value))
                configuration = "the baseline" if i == 0 else describe(trial.config, material.trials[0].config)
                rows.append((seconds_text(at_s), str(trial.number), _rate(value), configuration))
        elif status is TrialStatus.PRUNED and value is not None:
            pruned.append((at_s, value))
        elif status not in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
            failed.append((at_s, 0.0))
    if not measured:
        return None
    unit = unit_of(material.trials) if throughput else material.spec.objectives[0]
    statuses = (t.result.status for t in material.trials)
    failures = Counter(s.value for s in statuses if s not in (TrialStatus.COMPLETE, TrialStatus.PRUNED))
    series = [
        Series("the best in hand", "steps", (*best_so_far, (at_s, best_so_far[-1][1])), 1) if best_so_far else None,
        Series("a trial", "dots", tuple(measured), 0),
        Series("stopped early, slow", "triangles", tuple(pruned), 5) if pruned else None,
        Series(f"failed: {counts_text(failures)}", "crosses", tuple(failed), 2) if failed else None,
    ]
    values = [value for _, value in (*measured, *pruned)]
    chart = Chart(
        Axis("seconds in trials and heats"),
        (Panel(Axis(unit, log=_wide(values)), tuple(s for s in series if s is not None)),),
        zero=True,
        spans=tuple(spans),
        spans_are="a heat",
    )
    heats = f", {count(len(material.heats), 'heat')}" if material.heats else ""
    about = (
        f"{count(len(material.trials), 'trial')}{heats} in {seconds_text(at_s)}; "
        f"the best in hand rose {count(max(0, len(best_so_far) - 1), 'time')}"
        f"{f', from {_rate(best_so_far[0][1])} to {_rate(best_so_far[-1][1])} {unit}' if best_so_far else ''}."
    )
    columns = (Column("after"), Column("trial"), Column(unit), Column("the best in hand", Kind.TEXT))
    return Picture("The search as it went", about, chart, Grid(columns, tuple(rows)))


def _in_trials(material: Material, names: Sequence[str]) -> list[_Seen]:
    """Return the rates and peaks of complete trials at the values of a knob, the first of these; the others mean
    nothing without it."""
    return [
        _Seen(int(t.config[names[0]]), t.rate_per_s, _without(t.config, *names), trial_peak_bytes(t))
        for t in material.trials
        if names[0] in t.config and t.result.status is TrialStatus.COMPLETE and t.rate_per_s
    ]


def _in_heats(material: Material, side: Side, names: Sequence[str]) -> list[_Seen]:
    """Return the rates that the heats of a side measured at the values of a knob; see `_in_trials`."""
    seen = []
    for heat in (h for h in material.heats if h.heat.side == side):
        for entrant in heat.heat.entrants:
            turns = [turn for turn in entrant.turns if turn is not None]
            seconds = sum(turn.seconds for turn in turns)
            if names[0] in entrant.config and seconds > 0:
                rest = f"heat {heat.number} {_without(entrant.config, *names)}"
                seen.append(_Seen(int(entrant.config[names[0]]), sum(turn.samples for turn in turns) / seconds, rest))
    return seen


def _without(config: Config, *names: str) -> str:
    return key({name: value for name, value in config.items() if name not in names})


def _groups(seen: Sequence[_Seen]) -> list[dict[int, float]]:
    """Return rates by value, one group for those that differ in nothing else, if it has at least two values."""
    groups: dict[str, dict[int, float]] = {}
    for point in seen:
        rates = groups.setdefault(point.rest, {})
        rates[point.x] = max(point.per_s, rates.get(point.x, 0.0))
    return [dict(sorted(rates.items())) for rates in groups.values() if len(rates) > 1]


def _series(name: str, mark: str, seen: Sequence[_Seen], colour: int) -> list[Series]:
    """Return the points, and lines that join those that differ in nothing else."""
    if not seen:
        return []
    points = Series(name, mark, tuple((s.x, s.per_s) for s in seen), colour)  # type: ignore[arg-type]
    return [points, *(Series("", "line", tuple(rates.items()), colour) for rates in _groups(seen))]


def _knee(seen: Sequence[_Seen]) -> int | None:
    groups = [rates for rates in _groups(seen) if len(rates) >= TO_SEE_IT]
    if not groups:
        return None
    rates = max(groups, key=lambda one: (len(one), max(one.values())))
    knee = next(x for x, per_s in rates.items() if per_s >= KNEE * max(rates.values()))
    # The rate still rises up to the largest batch, so no knee is visible.
    return None if knee == max(rates) else knee


def _limit(material: Material) -> tuple[int | None, str]:
    """Return the memory that a training may use, and a name for that limit."""
    hold = material.outcome.hold if material.outcome else None
    if material.spec.memory_limit_bytes is not None:
        return material.spec.memory_limit_bytes, "the memory limit"
    if hold is not None and hold.hold is not None:
        return hold.hold.capacity_bytes, "the memory that was free"
    probe = material.probe
    return (
        (None, "") if probe is None else (probe.device_free_bytes or probe.device_memory_bytes, "the device's memory")
    )


def _wide(values: Iterable[float]) -> bool:
    numbers = list(values)
    positive = [value for value in numbers if value > 0]
    return bool(positive) and min(numbers) >= 0 and max(positive) > WIDE * min(positive)


def _thinned(ticks: tuple[float, ...]) -> tuple[float, ...]:
    """Drop every other tick, but never the last, until they fit on a phone."""
    while len(ticks) > TICKS:
        ticks = tuple(reversed(ticks[::-1][::2]))
    return ticks


def _best(seen: Sequence[_Seen], xs: Sequence[int]) -> dict[int, float | None]:
    return {x: max((point.per_s for point in seen if point.x == x), default=None) for x in xs}


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else rate_text(per_s)


def _told(best: Mapping[int, float | None], alone: Mapping[int, float | None]) -> str:
    """List the rates of the trials, or those measured alone where there was no trial."""
    return f"{listed([rate_text(best[x] or alone[x] or 0.0) for x in best])}"


# The report's pictures, each only if a study's figures have something to show in that form.
#
# The losses beside eager fp32 are drawn with the report of the training check (`autotune.report.sections`).

#: A rest of the speedup that is closer to 1 than this ratio is not worth showing.
REST = 1.01


def pictures(material: Material) -> list[Section]:
    """Return the pictures of a study as a section; empty if there are none."""
    outcome = material.outcome
    candidates = [
        *([waterfall(outcome), intervals(outcome, material)] if outcome else []),
        rate_by_batch(material),
        rate_by_workers(material),
        course(material),
        stacks(outcome) if outcome else None,
    ]
    drawn = tuple(picture for picture in candidates if picture is not None)
    return [Section("At a glance", drawn)] if drawn else []


def waterfall(outcome: Outcome) -> Picture | None:
    """Show what each knob gave, from the baseline to the winner.

    A knob's gain is the winner's rate over the rate without it, so the gains need not multiply to the whole speedup:
    what remains is a bar of its own, the rest. ``None`` if no gain was measured, or nothing was shown to be faster.
    """
    best, baseline = outcome.best, outcome.baseline
    measured = [part for part in by_gain(outcome.ablation) if part.gain and best.config.get(part.knob) == part.value]
    if not measured or best.speedup_ci95[0] <= 1 or outcome.found is not Finding.FASTER:
        return None
    factors = []
    for p in measured:
        if p.gain is not None:
            before = "none" if p.baseline_value is None else phrase(p.knob, p.baseline_value)
            factors.append(Factor(f"{phrase(p.knob, p.value)} instead of {before}: {gain_words(p.gain)}", p.gain))
    rest = best.speedup
    for factor in factors:
        rest /= factor.factor[0]
    not_measured = [p.knob for p in outcome.ablation if not p.gain and best.config.get(p.knob) == p.value]
    if max(rest, 1 / rest) > REST:
        missing = f"{listed(not_measured)} not measured apart; " if not_measured else ""
        name = f"the rest ({missing}what they give only together): {ratio_text(rest)}"
        factors.append(Factor(name, (rest, None, None), rest=True))
    whole = gain_words((best.speedup, *best.speedup_ci95))
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


def intervals(outcome: Outcome, material: Material) -> Picture | None:
    """Show the finalists' rates with their intervals; ``None`` if there is only the baseline."""
    ranked = standings(outcome)
    if len(ranked) < 2:
        return None
    rows = tuple(_row(outcome, standing, material) for standing in ranked)
    rates = (f"{row.name}: {rate_text(s.samples_per_second, s.ci95)}" for row, s in zip(rows, ranked, strict=True))
    return Picture(
        "The finalists",
        f"Rates in {outcome.counts} per second with their 95 % intervals. {'; '.join(rates)}.",
        Intervals(f"{outcome.unit} (95 %)", rows),
    )


def _row(outcome: Outcome, standing: Standing, material: Material) -> IntervalRow:
    baseline, is_winner = outcome.baseline, key(standing.config) == key(outcome.best.config)
    if standing is baseline:
        name = f"baseline: {settings(standing.config)}"
    else:
        dropped = is_out(outcome, standing)
        role = "out, " if dropped else "" if standing.verified else "launched once, "
        name = f"{role}trial {label_of(standing, material.trials)}: {describe(standing.config, baseline.config)}"
    faint = is_out(outcome, standing) or not standing.verified
    rate = (standing.samples_per_second, *standing.ci95)
    return IntervalRow(name, rate, strong=is_winner and standing is not baseline, faint=faint)


def stacks(outcome: Outcome) -> Picture | None:
    """Show how the seconds of the launches were spent; ``None`` for studies of versions without a ledger."""
    if not outcome.ledger:
        return None
    parts = ("starting", "compiling, first step", "warming up", "kept windows", "the rest")
    rows = tuple(
        (f"{r.purpose}, {seconds_text(r.seconds)}", (r.start_s, r.compile_s, r.warmup_s, r.kept_s, r.rest_s))
        for r in outcome.ledger
        if r.seconds >= 0.05
    )
    return Picture("Where the seconds went", ledger_line(outcome.ledger) or "", Stacks("seconds", parts, rows))
