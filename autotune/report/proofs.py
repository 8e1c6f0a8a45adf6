"""The report's sections on the checks: do the finalists train like eager fp32, and does the winner's memory hold."""

from __future__ import annotations

from autotune.space.formatting import count, describe, memory_text, percent_text, rate_text, seconds_text
from autotune.base.records import EAGER_FP32, Hold, HoldVerdict, Outcome, TrainVerdict
from autotune.report.document import Column, Curves, Facts, Grid, Kind, Part, Section, facts, paragraphs
from autotune.report.sentences import full_stop, holds_line, listed_trials
from autotune.space import key

#: Peaks that differ by less than this fraction count as the same.
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
        return [Section(title, paragraphs(same if outcome.ledger else "It was not checked."))]
    measured = any(check.reference_metric is not None for check in outcome.checks)
    rows = tuple(
        (
            ", ".join(map(str, sorted(check.trials))),
            describe(check.config, outcome.baseline.config),
            {True: "passed", False: "fast but wrong", None: "not checked"}[check.passed],
            _figure(check.distance),
            _figure(check.tolerance),
            *((_metrics(check),) if measured else ()),
        )
        for check in outcome.checks
    )
    columns = (
        Column("trials", Kind.WORD),
        Column("checked as", Kind.TEXT),
        Column("result", Kind.WORD),
        Column("distance"),
        Column("tolerance"),
        *((Column("metric (reference)"),) if measured else ()),
    )
    parts: list[Part] = [*paragraphs(_what(outcome)), Grid(columns, rows)]
    parts += facts(*((listed_trials(sorted(c.trials)), full_stop(c.reason)) for c in outcome.checks if c.reason))
    parts += _curves(outcome.checks)
    return [Section(title, tuple(parts))]


def delivers(outcome: Outcome) -> list[Section]:
    """Return whether the winners' loaders deliver what the baseline's does, as a section."""
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
    columns = (
        Column("trial", Kind.WORD),
        Column("configuration", Kind.TEXT),
        Column("data", Kind.WORD),
        Column("batches"),
        Column("samples"),
        Column("epochs"),
    )
    how = (
        "Digests of what a loader delivers, beside those of the baseline's, for the same samples in the same order: "
        "the first batches of two epochs, each drawn twice, by one worker after the other. The global generators of "
        "random numbers begin each batch alike, so that augmentations are compared as well."
    )
    reasons = facts(*((f"trial {v.trial}", full_stop(v.reason)) for v in compared if v.reason))
    return [Section("Does it load the same?", (*paragraphs(how), Grid(columns, rows), *reasons))]


def _what(outcome: Outcome) -> str:
    steps = max(len(check.reference) for check in outcome.checks)
    batch = outcome.baseline.config.get("batch_size")
    beside = outcome.checks[0].beside
    if beside != EAGER_FP32:
        took = f"The losses of {count(steps, 'step')}" if steps else "The losses"
        return (
            f"{took} at batch {batch}, beside those of {beside}. The distance is the mean difference between the two; "
            "the tolerance comes from three runs of the script."
        )
    same = f"took the same {count(steps, 'step')}" if steps else "was to take the same steps"
    return (
        f"Each {same} at batch {batch}, from the same weights over the same batches, as eager fp32. The distance is "
        f"the mean difference between the two losses; the tolerance comes from eager fp32 under other seeds."
    )


def _metrics(check: TrainVerdict) -> str:
    return f"{_figure(check.metric)} ({_figure(check.reference_metric)})"


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
    """Return the peak of the long training, and the one in the tables if that differs: queues fill differently, and
    what counts on a GPU here is what is reserved."""
    text = memory_text(held_bytes)
    if not timed_bytes or abs(held_bytes / timed_bytes - 1) < PEAKS_AGREE:
        return text
    return f"{text} in this training, {memory_text(timed_bytes)} at most in the launches that were timed"


def _sustained(verdict: HoldVerdict, unit: str) -> list[tuple[str, str]]:
    hold = verdict.hold
    if hold is None or verdict.sustained_per_s is None:
        return []
    at = "" if hold.sm_clock_mhz is None else f", at {hold.sm_clock_mhz:,} MHz"
    return [
        ("sustained rate", f"{rate_text(verdict.sustained_per_s)} {unit} over {seconds_text(hold.sustained_s)}{at}")
    ]


def _first_step(hold: Hold) -> list[tuple[str, str]]:
    """Return the first step's memory if it was larger than the training's."""
    if hold.first_step_bytes is None or hold.first_step_bytes <= hold.peak_bytes:
        return []
    return [("first step", f"{memory_text(hold.first_step_bytes)}, of which later steps need no more than the peak")]


def _evaluation(hold: Hold) -> str:
    if hold.evaluated is None:
        return "not run"
    found = _EVALUATIONS.get(hold.evaluated, hold.evaluated)
    if hold.evaluation_per_s is not None:
        found += f"; it computes {rate_text(hold.evaluation_per_s)} samples/s"
    if hold.inference_gain is not None:
        found += f", with torch.inference_mode() {hold.inference_gain:.2f} times as many"
    return found


def holds(outcome: Outcome) -> list[Section]:
    """Return whether the winner stays within the device's memory during a longer training, as a section."""
    title, verdict = "Does it hold?", outcome.hold
    if key(outcome.best.config) == key(outcome.baseline.config) and verdict is None:
        return []
    if verdict is None:
        return [Section(title, paragraphs("It was not checked."))]
    line, hold = holds_line(verdict), verdict.hold
    if hold is None:
        return [Section(title, paragraphs(line))]
    settled = "memory had settled" if hold.settled else "memory was still growing"
    free = f"{percent_text(hold.headroom)} of {memory_text(hold.capacity_bytes)} stay free"
    found = Facts(
        (
            (
                "trained",
                f"trial {verdict.trial}, {count(hold.steps, 'step')} in {seconds_text(hold.seconds)}; {settled}",
            ),
            ("peak memory", _peak(hold.peak_bytes, outcome.best.peak_memory_bytes)),
            *_first_step(hold),
            ("headroom", f"{free}; {percent_text(verdict.headroom_wanted)} are wanted"),
            *([("alloc retries", f"{hold.alloc_retries:,}")] if hold.alloc_retries is not None else []),
            *_sustained(verdict, outcome.unit),
            ("evaluation", _evaluation(hold)),
            (
                "largest sample",
                f"{memory_text(hold.largest_bytes)}, trained on"
                if hold.largest_bytes
                else "all samples have one shape",
            ),
        )
    )
    return [Section(title, (*paragraphs("Yes." if verdict.passed else line), found))]
