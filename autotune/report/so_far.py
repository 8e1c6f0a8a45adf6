"""The best of a search that is not finished, of which nothing is proven yet."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.base.records import StudySpec, Trial
from autotune.report.document import Column, Grid, Kind, Section
from autotune.report.material import Material
from autotune.space import key
from autotune.space.formatting import describe, memory_text, settings, trial_peak_bytes, trial_rate_text, unit_of
from autotune.space.requirements import Requirements

#: How many are listed.
SO_FAR = 5


def by_merit(trials: Sequence[Trial], required: Requirements) -> list[Trial]:
    """Return the trials that have a score, best first; those that do not meet what is required come last."""
    return sorted((t for t in trials if t.score is not None), key=lambda t: (not required.allow(t), -(t.score or 0.0)))


def best_so_far_line(trials: Sequence[Trial], spec: StudySpec) -> str | None:
    """Return the best trial of an unfinished search beside its baseline; ``None`` if nothing was measured yet.

    There is no ratio, because the two were not launched in turns.
    """
    required = Requirements.parsed(spec.require, spec.goal)
    scored = by_merit(trials, required)
    if not scored:
        return None
    base, best = trials[0].config, scored[0]
    if not required.allow(best):
        return f"Nothing that was measured so far meets {required}. Nothing is proven yet."
    own = next((t for t in scored if key(t.config) == key(base)), None)
    unit = unit_of(trials)
    beside = "" if own is None else f"; the baseline ran at {trial_rate_text(own)}"
    if best is own:
        return f"The best so far is the baseline, {trial_rate_text(own)} {unit}. Nothing is proven yet."
    what = f"trial {best.number}, {describe(best.config, base)}: {trial_rate_text(best)} {unit} in one launch"
    return f"The best so far is {what}{beside}. Nothing is proven yet."


def best_so_far(material: Material) -> list[Section]:
    """Return the best trials of an unfinished study, as a section."""
    scored = by_merit(material.trials, material.required)
    if not scored:
        return []
    baseline = material.trials[0]
    shown = scored[:SO_FAR] if baseline.score is None or baseline in scored[:SO_FAR] else [*scored[:SO_FAR], baseline]
    rows = []
    for trial in shown:
        is_base = key(trial.config) == key(baseline.config)
        rows.append(
            (
                str(trial.number),
                f"baseline: {settings(trial.config)}" if is_base else describe(trial.config, baseline.config),
                trial_rate_text(trial),
                memory_text(trial_peak_bytes(trial)),
            )
        )
    columns = (
        Column("trial"),
        Column("configuration", Kind.TEXT),
        Column(unit_of(material.trials)),
        Column("peak\nmemory"),
    )
    return [Section("The best so far", (Grid(columns, tuple(rows)),))]
