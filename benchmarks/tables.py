"""The result table of a benchmark: in the terminal, and as Markdown for `benchmarks/results/`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from autotune.machine.gpu import gpus
from autotune.machine.host import read_host

#: Table width when the output is not a terminal.
FILE_WIDTH = 140


@dataclass
class ResultTable:
    """Rows of text under a title, followed by notes on how to read them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row.

        Raises:
            ValueError: the number of cells differs from the number of columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns: {cells}")
        self.rows.append(cells)

    def show(self, markdown: Path | None) -> None:
        """Print the table, and also write it to a file if one is given."""
        console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        table = Table(title=self.title, title_justify="left", caption_justify="left")
        for name in self.columns:
            table.add_column(name)
        for row in self.rows:
            table.add_row(*row)
        console.print(table, markup=False)
        for line in (*self.notes, machine()):
            console.print(line, markup=False, highlight=False)
        if markdown is not None:
            markdown.write_text(self.as_markdown())

    def as_markdown(self) -> str:
        """Return the table as Markdown, with the machine's description."""
        lines = [f"# {self.title}", "", machine(), ""]
        lines += [_line(self.columns), _line(["---"] * len(self.columns)), *map(_line, self.rows)]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine() -> str:
    """Return one line with the machine, the versions and the date."""
    host = read_host()
    cards = gpus()
    names = ", ".join(card.name for card in cards) if isinstance(cards, list) and cards else "no GPU"
    return (
        f"Machine: {host.cores} cores of {host.cpu_model}, {host.memory_bytes / 2**30:.0f} GiB, {names}; "
        f"torch {version('torch')}, torchvision {version('torchvision')}, Python {platform.python_version()}; "
        f"{datetime.now(UTC):%Y-%m-%d}."
    )


def in_memory() -> Path | None:
    """Return a folder in memory, whose files are never written to disk, if there is one."""
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK) else None


def met(holds: bool | None) -> str:
    """Return whether a goal was met, as text; ``None`` if there is no goal."""
    return "" if holds is None else "met" if holds else "NOT MET"


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Return the median with the smallest and the largest value."""
    return f"{form(median(values))} ({form(min(values))} to {form(max(values))})"


def seconds(value: float) -> str:
    """Format a duration with a suitable unit."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
