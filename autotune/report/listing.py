"""Tables of a study's trials, of a folder's studies, and of a workload's space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.space.formatting import (
    count,
    counts_text,
    describe,
    ended_text,
    memory_text,
    model_name,
    one_line,
    ratio_text,
    seconds_text,
    settings,
    trial_peak_bytes,
    trial_rate_text,
    unit_of,
)
from autotune.knobs import KNOBS, spell
from autotune.knobs.terms import ONE_RANK
from autotune.base.records import Config, Measurement, Trial, TrialStatus
from autotune.report.lines import Line, pairs
from autotune.report.tables import new_table, status_cell
from autotune.space import Choice, Space

#: Limit of counting the legal configurations, which is done one by one.
COUNT_CAP = 100_000


def space_table(space: Space) -> RenderableType:
    """Return the table of a space: each knob's choices, the refused values and why, then the space's size."""
    table = new_table("knob", "about", "choices", "refused, and why", wrap=("about", "choices", "refused, and why"))
    for name, choices in space.choices.items():
        own = spell(space.baseline.get(name))
        legal = [_choice(c, own) for c in choices if c.refused is None]
        if name in space.baseline and own not in [spell(c.value) for c in choices]:
            legal.append(f"(baseline: {own})")
        table.add_row(Text(one_line(name)), _about(name), Text(one_line(", ".join(legal))), _refusals(choices))
    for name, reason in space.inactive.items():
        if reason == ONE_RANK:
            # Who trains with one rank need not read of the exchange between several.
            continue
        table.add_row(Text(one_line(name)), _about(name), "not here", Text(one_line(reason)), style="dim")
    found = sum(1 for _ in islice(space.grid(), COUNT_CAP + 1))
    size = f"more than {COUNT_CAP:,} configurations" if found > COUNT_CAP else count(found, "configuration")
    notes = "* the baseline's value" + "; (…) tried only beside the best so far" * bool(space.further)
    return Group(table, Text(notes, style="dim"), Line(f"Legal here: {size}."))


def _choice(choice: Choice, own: str) -> str:
    value = spell(choice.value)
    return f"({value})" if choice.further else value + "*" * (value == own)


def _about(name: str) -> str:
    return KNOBS[name].about if name in KNOBS else "the workload's own"


def _refusals(choices: Sequence[Choice]) -> Text:
    by_reason: dict[str, list[str]] = {}
    for choice in choices:
        if choice.refused:
            by_reason.setdefault(choice.refused, []).append(spell(choice.value))
    return Text("\n".join(one_line(f"{', '.join(values)}: {reason}") for reason, values in by_reason.items()))


def trials_table(trials: Sequence[Trial], baseline_config: Config) -> RenderableType:
    """Return the table of a study's trials in the given order, followed by the phase and cause of each failure."""
    table = new_table("trial", "status", "optimization", unit_of(trials), "peak\nmemory", "took")
    for trial in trials:
        result = trial.result
        what = f"baseline: {settings(trial.config)}" if trial.number == 0 else describe(trial.config, baseline_config)
        table.add_row(
            str(trial.number),
            status_cell(result.status),
            Text(what),
            trial_rate_text(trial),
            memory_text(trial_peak_bytes(trial)),
            seconds_text(result.wall_s),
        )
    counts = Counter(trial.result.status.value for trial in trials)
    under = [Text(f"{count(len(trials), 'trial')}{': ' if counts else ''}{counts_text(counts)}.")]
    under.append(Text("Each figure is of one launch, ± from its own windows; launches differ by more.", style="dim"))
    if TrialStatus.PRUNED in counts:
        under.append(Text("~ a rate seen before the trial was stopped for being slow", style="dim"))
    widest = max((len(str(trial.number)) for trial in trials), default=0)
    notes = [(f"{trial.number:>{widest}}", note, False) for trial in trials for note in _trial_notes(trial)]
    return Group(table, *map(Line, under), *([Text()] if notes else []), *pairs(notes))


def _trial_notes(trial: Trial) -> list[str]:
    result, notes = trial.result, []
    if trial.repeats is not None:
        notes.append(f"repeats trial {trial.repeats}")
    if result.status not in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
        notes.append(f"{ended_text(trial)}: {one_line(result.cause or 'no cause was recorded')}")
    if result.unclean_exit:
        notes.append("the process died after it had reported its result")
    return notes + ([] if result.measurement is None else doubts(result.measurement))


def doubts(measurement: Measurement) -> list[str]:
    """Return the reasons to doubt a launch's rate, one clause each: not settled, discarded windows."""
    found = []
    if not measurement.settled:
        found.append(one_line(measurement.unsettled or "it had not settled when it was measured").rstrip("."))
    if measurement.recompiles and measurement.settled:
        found.append(f"compiled again {count(measurement.recompiles, 'time')} before it was measured")
    reasons = Counter(one_line(w.discarded or "no reason was given").rstrip(".") for w in measurement.discarded)
    for reason, windows in reasons.items():
        found.append(f"{count(windows, 'window')} discarded: {reason}")
    return found


@dataclass(frozen=True)
class StudyRow:
    """One row of the table of studies.

    Attributes:
        state: ``done``, ``failed``, ``unfinished``, … as the caller names it.
        trials: the number of trials that have ended.
        best_speedup: the winner's speedup over the baseline; ``None`` if the search is not finished.
        created: ISO 8601.
        path: the study's folder.
    """

    name: str
    model: str
    state: str
    trials: int
    best_speedup: float | None
    created: str
    path: str


def studies_table(rows: Sequence[StudyRow]) -> RenderableType:
    """Return the table of studies, in the given order."""
    if not rows:
        return Text("No studies here yet. Start one: autotune search --model resnet50")
    table = new_table("study", "model", "state", "trials", "speedup", "created", wrap=("model",))
    for row in rows:
        table.add_row(
            Text(one_line(row.name)),
            Text(model_name(row.model)),
            Text(one_line(row.state)),
            f"{row.trials:,}",
            "-" if row.best_speedup is None else ratio_text(row.best_speedup),
            Text(one_line(row.created)[:16].replace("T", " ")),
        )
    # A study's folder has the study's name, so only the parent folders are shown.
    folders = sorted({one_line(str(PurePath(row.path).parent)) for row in rows})
    return Group(table, Line(Text(f"in {', '.join(folders)}", style="dim"), verbatim=True))
