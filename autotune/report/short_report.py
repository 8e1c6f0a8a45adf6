"""The report for a glance: the answer, baseline beside winner, and what to type next; a screen of a terminal at most.

In Markdown it is what a pull request that takes the profile says.
"""

from __future__ import annotations

import shlex

from autotune.space.formatting import memory_text, rate_text
from autotune.base.records import Finding, Outcome, Standing
from autotune.report.answer import StudyAnswer, answer_of
from autotune.report.document import Column, Commands, Document, Facts, Grid, Kind, Paragraph, Part, Section, paragraphs
from autotune.report.epochs import whole_training
from autotune.report.full_report import title_of
from autotune.report.material import Material
from autotune.report.sentences import gain_text, label_of
from autotune.report.terminal import FILE_WIDTH, to_text
from autotune.space import key

#: Lines of a terminal, of which few have less.
LINES = 24
#: Rows of an answer in the order in which they give way where there is no room for them, after all others: nobody
#: should paste a command without having read what it changes.
GIVES_WAY = ("limit now", "costs", "saves", "how", "checked", "changes")
#: The same where the reader has asked what a training of his own takes and costs.
GIVES_WAY_ASKED = ("limit now", "how", "checked", "costs", "saves", "changes")


def short_report_on(material: Material, *, lines: int | None = LINES, width: int = FILE_WIDTH) -> Document:
    """Return the short report of a study, finished or not. What there is no room for is in `report_on`.

    Args:
        lines: that it may take on a terminal; ``None`` where that does not matter. width: of the terminal in columns.
    """
    answer = answer_of(material)
    rows = list(answer.rows)
    order = GIVES_WAY if whole_training(material) is None else GIVES_WAY_ASKED
    document = _document(material, answer, rows)
    while lines is not None and rows and len(to_text(document, width).splitlines()) > lines:
        rows.remove(min(reversed(rows), key=lambda row: order.index(row[0]) if row[0] in order else -1))
        document = _document(material, answer, rows)
    return document


def _document(material: Material, answer: StudyAnswer, rows: list[tuple[str, str]]) -> Document:
    outcome = material.outcome
    parts: list[Part] = [Paragraph(answer.headline, strong=True), *paragraphs(*answer.more)]
    parts += [_grid(outcome, material)] if outcome is not None else []
    parts += [Facts(tuple(rows))] if rows else []
    parts.append(Commands((*answer.shell, f"autotune report {shlex.quote(material.typed)} --full")))
    return Document(title_of(material), (Section("", tuple(parts)),))


def _grid(outcome: Outcome, material: Material) -> Grid:
    standings: dict[str, Standing] = {}
    for standing in (outcome.baseline, outcome.best, outcome.best_same_batch):
        standings.setdefault(key(standing.config), standing)
    rows = tuple(_row(outcome, standing, material) for standing in standings.values())
    columns = (Column("", Kind.WORD), *map(Column, (outcome.unit, "speedup", "95 %", "peak memory", "launches")))
    return Grid(columns, rows)


def _row(outcome: Outcome, standing: Standing, material: Material) -> tuple[str, ...]:
    own = standing is outcome.baseline
    won = key(standing.config) == key(outcome.best.config) and outcome.found in (Finding.FASTER, Finding.LIKELY)
    trial = f"trial {label_of(standing, material.trials)}"
    winner = "likely" if outcome.evidence else "winner"
    name = "baseline" if own else f"{winner}, {trial}" if won else trial
    return (
        name,
        rate_text(standing.samples_per_second, standing.ci95),
        *(("1.00×", "-") if own else gain_text((standing.speedup, *standing.speedup_ci95))),
        memory_text(standing.peak_memory_bytes),
        str(standing.launches) if standing.verified else "1, not in turns",
    )
