"""The common style of all tables: figures are right-aligned and never wrap, descriptions wrap."""

from __future__ import annotations

from collections.abc import Collection

from rich.text import Text

from autotune.space.formatting import status_style
from autotune.base.records import TrialStatus
from autotune.report.lines import FittingTable, new_fitting_table

_FIGURES = ("trial", "samples/s", "steps/s", "speedup", "peak\nmemory", "took", "trials", "rate", "95 %", "turns")


def new_table(*columns: str, wrap: Collection[str] = ("optimization",)) -> FittingTable:
    """Return a table in which only the columns in ``wrap`` wrap, and figures are right-aligned."""
    table = new_fitting_table()
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in _FIGURES else "left",
            no_wrap=name not in wrap,
            overflow="fold" if name in wrap else "ellipsis",
        )
    return table


def status_cell(status: TrialStatus) -> Text:
    # By far the longest status: on one line it would take room from the descriptions.
    return Text(status.value.replace("worker_died", "worker_\ndied"), style=status_style(status))
