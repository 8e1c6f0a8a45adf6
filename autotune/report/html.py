"""A report as one self-contained HTML page: no script, nothing loaded from elsewhere, light and dark, and printable.

All text is escaped: a cause, a path or a model's name is shown literally and never becomes markup.
"""

from __future__ import annotations

import contextlib
import math
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.space.formatting import count, one_line
from autotune.report.document import Curves, Document, Picture
from autotune.report.drawing import DASHES, Drawing, Key, draw
from autotune.report.inline_svg import COLOURS
from autotune.report.plots import Axis, Chart, Panel, Series

if TYPE_CHECKING:
    from jinja2 import Template


def to_html(document: Document) -> str:
    """Return the report as a complete HTML page that ends with a line break."""
    return _template().render(document=document)


@cache
def _template() -> Template:
    # Imported only when a page is rendered: most commands render none.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        # Text from outside is reduced to one line. Output of a macro is markup and stays as it is.
        finalize=lambda value: value if isinstance(value, Markup) else one_line(str(value)),
        trim_blocks=True,
        keep_trailing_newline=True,
        # A daemon that serves pages for weeks keeps the templates that match its code.
        auto_reload=False,
    )
    pages.filters["kind"] = lambda part: type(part).__name__
    # Pictures that follow each other stand beside each other.
    pages.filters["groupby_pictures"] = lambda parts: [
        (drawn, list(some)) for drawn, some in groupby(parts, key=lambda part: isinstance(part, Picture))
    ]
    pages.globals["drawn"] = lambda part: _drawn(part, Markup)
    return pages.get_template("report.html")


def _drawn(part: Picture | Curves, markup: type[str]) -> Drawing:
    """Draw a picture. Where that fails, the page has its table, or the ends of its curves, and no picture."""
    picture = _picture_of(part) if isinstance(part, Curves) else part
    drawing = Drawing("")
    if not isinstance(part, Curves) or any(math.isfinite(value) for _, values in part.rows for value in values):
        with contextlib.suppress(Exception):
            drawing = draw(picture.plot, picture.title, picture.about)
    legend = _ends(part) if isinstance(part, Curves) else drawing.legend
    return Drawing(markup(drawing.svg), legend)


def _picture_of(curves: Curves) -> Picture:
    steps = max((len(values) for _, values in curves.rows), default=0)
    known = [value for _, values in curves.rows for value in values if math.isfinite(value)]
    names = ", ".join(one_line(name) for name, _ in curves.rows)
    ends = f", from {min(known):.3g} to {max(known):.3g}" if known else ""
    series = tuple(
        Series(name, "line", tuple(enumerate(values, 1)), i) for i, (name, values) in enumerate(curves.rows) if values
    )
    chart = Chart(Axis("step"), (Panel(Axis("loss"), series),))
    return Picture(f"Losses: {names}", f"Loss at steps 1 to {steps}{ends}: {names}", chart)


def _ends(curves: Curves) -> tuple[Key, ...]:
    """Return the legend of curves: with the first and the last value of each, and where it ended."""
    steps = max((len(values) for _, values in curves.rows), default=0)
    legend = []
    for i, (name, values) in enumerate(curves.rows):
        ends = f"{values[0]:.3g} → {values[-1]:.3g}" if values else "no step"
        early = f", ended after {count(len(values), 'step')}" if 0 < len(values) < steps else ""
        dashes = " ".join(f"{2 * dash:g}" for dash in DASHES[i % len(DASHES)])
        legend.append(Key(f"{one_line(name)}: {ends}{early}", "line", i % COLOURS, dashes))
    return tuple(legend)
