"""The report's section on heats, for readers who never heard of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.space.formatting import alone, count, describe, one_line, ratio_text, seconds_text, settings
from autotune.base.records import Config, HeatEntrant, StudyHeat, TrialStatus
from autotune.report.document import Column, Grid, Kind, Paragraph, Part, Section
from autotune.report.lines import Line
from autotune.report.sentences import full_stop, gain_text
from autotune.report.tables import new_table

WHAT = (
    "In a heat several configurations train in turns, in random order, in one process and with the same weights. "
    "Whatever slows the machine down slows all of them alike, so their ratios are surer than those of separate "
    "launches, and each costs seconds. It shows what the device does, without loading, or what the loader does, "
    "without a training, and where to look; what is promised was measured in launches of its own."
)


def heats(found: Sequence[StudyHeat], baseline: Config | None) -> list[Section]:
    """Return the heats of a search as a section; none if there were no heats."""
    if not found:
        return []
    parts: list[Part] = [Paragraph(WHAT)]
    for heat in found:
        parts += _heat(heat, baseline or {})
    return [Section("Heats", tuple(parts))]


def heat_table(heat: StudyHeat, baseline: Config) -> RenderableType:
    """Return the table of a heat, the fastest first, with a line above it."""
    table = new_table("rate", "95 %", "turns", "optimization", "remark", wrap=("optimization", "remark"))
    for what, rate, interval, turns, remark in _rows(heat, baseline):
        table.add_row(rate, interval, turns, Text(what), Text(remark))
    return Group(Text(), Line(_line(heat)), table)


def _line(heat: StudyHeat) -> str:
    compared = f"{count(len(heat.heat.entrants), 'configuration')} in {seconds_text(heat.wall_s)}"
    return f"Heat {heat.number}: {compared}, {alone(heat.heat.side)}; {one_line(heat.heat.ended)}."


def _heat(heat: StudyHeat, baseline: Config) -> list[Part]:
    titles = (Column("configuration", Kind.TEXT), Column("rate"), Column("95 %"), Column("turns"))
    return [Paragraph(_line(heat)), Grid((*titles, Column("remark", Kind.TEXT)), _rows(heat, baseline))]


def _rows(heat: StudyHeat, baseline: Config) -> tuple[tuple[str, ...], ...]:
    """Return configuration, rate relative to the reference, its interval, number of turns, and a remark."""
    entrants = heat.heat.entrants
    reference = heat.heat.reference
    return tuple(
        (
            _what(e.config, baseline),
            *(("1.00×", "-") if e is reference and e.ratio else _gain(e)),
            str(sum(turn is not None for turn in e.turns)),
            "the reference" if e is reference and e.ratio else _remark(e),
        )
        for e in sorted(entrants, key=lambda e: -(e.ratio or 0.0))
    )


def _what(config: Config, baseline: Config) -> str:
    return f"the baseline: {settings(config)}" if config == baseline else describe(config, baseline)


def _gain(entrant: HeatEntrant) -> tuple[str, str]:
    if entrant.ratio is None:
        return "-", "-"
    if entrant.ratio_ci95 is None:
        return ratio_text(entrant.ratio), "-"
    return gain_text((entrant.ratio, *entrant.ratio_ci95))


def _remark(entrant: HeatEntrant) -> str:
    if entrant.status is TrialStatus.COMPLETE:
        return ""
    if entrant.status is TrialStatus.PRUNED:
        return "dropped out, certainly behind"
    return full_stop(f"{entrant.status}: {one_line(entrant.cause or '')}").rstrip(".")
