"""Progress of a search in a notebook: the panel of a terminal as HTML, in one output that is updated in place."""

from __future__ import annotations

import io
import sys
from html import escape
from typing import Any

from rich.panel import Panel
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from autotune.report.panel import LivePanel, PanelConsole
from autotune.base.clock import Clock
from autotune.space.formatting import one_line

#: Columns of the panel: what fits beside the prompt of a cell.
_WIDTH = 100
_PAGE = '<pre style="white-space: pre-wrap; line-height: 1.2">{code}</pre>'
#: Black, red, green, yellow, blue, magenta, cyan and white, to be read on a light and on a dark page.
_COLOURS = TerminalTheme(
    (255, 255, 255),
    (0, 0, 0),
    [
        *((96, 96, 96), (215, 80, 70), (40, 150, 70), (170, 125, 0)),
        *((60, 130, 220), (160, 100, 220), (20, 140, 150), (128, 128, 128)),
    ],
)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookPanel(LivePanel):
    """Shows one output that is updated in place. When the search ends, its sentences stay.

    Needs IPython, and none of its widgets. A front end that shows no HTML shows the same as text.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, _console())
        self._said: list[str] = []
        self._output: Any = None

    def says(self, sentence: str) -> None:
        self._said.append(one_line(sentence))
        self._show(None)

    def ends(self) -> None:
        super().ends()
        self._show(None)

    def _show(self, panel: Panel | None) -> None:
        from IPython.display import display

        with self._without_errors():
            content = {"text/plain": self._plain(panel), "text/html": self._html(panel)}
            if self._output is None:
                self._output = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
            else:
                self._output.update(content, raw=True)

    def _html(self, panel: Panel | None) -> str:
        said = "".join(f"<div>{escape(sentence)}</div>" for sentence in self._said)
        if panel is None:
            return said
        page = _console()
        page.print(panel)
        return said + page.export_html(theme=_COLOURS, inline_styles=True, code_format=_PAGE)

    def _plain(self, panel: Panel | None) -> str:
        lines = list(self._said)
        if panel is not None and isinstance(panel.renderable, Text):
            lines.append(panel.renderable.plain)
        return "\n".join(lines)


def _console() -> PanelConsole:
    # By itself, rich would show in the notebook whatever is printed.
    return PanelConsole(file=io.StringIO(), width=_WIDTH, record=True, force_terminal=True, force_jupyter=False)
