"""A report as one self-contained HTML page: no script, nothing loaded from elsewhere, light and dark, and printable.

All text is escaped: a cause, a path or a model's name is shown literally and never becomes markup.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.formatting import one_line
from autotune.report.chart import chart_of
from autotune.report.document import Document

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
    pages.globals["chart_of"] = chart_of
    return pages.get_template("report.html")
