"""Matplotlib's SVG as an element of a page, in the page's own colours and font."""

from __future__ import annotations

import re

from autotune.space.formatting import one_line

#: Number of colours in the style sheet: ``--c0``, ``--c1``, …
COLOURS = 6
#: Colours that stand for the page's own until the picture is in the page, where they are light or dark.
_PAGE = {
    **{f"#0a000{i}": f"--{name}" for i, name in enumerate(("text", "faint", "line", "strong"), 1)},
    **{f"#0a001{i}": f"--c{i}" for i in range(COLOURS)},
}
_OF = {variable: colour for colour, variable in _PAGE.items()}
TEXT, FAINT, LINE, STRONG = (_OF[f"--{name}"] for name in ("text", "faint", "line", "strong"))


def colour_of(index: int) -> str:
    """Return what stands for a colour of the page."""
    return _OF[f"--c{index % COLOURS}"]


def inline(svg: str, about: str) -> str:
    """Return an SVG file as an element of a page: no prologue, style sheet, description or unused names.

    Args:
        about: its alternative text.
    """
    svg = svg[svg.index("<svg") :]
    for extra in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(extra, "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", " ", svg)
    used = set(re.findall(r"(?:url\(|href=\")#([\w-]+)", svg))
    # Only in tags: whatever a text says, it stays.
    svg = re.sub(r"<[^<>]+>", lambda tag: _for_the_page(tag[0], used), svg)
    box = re.search(r'viewBox="[^"]+"', svg)
    head = f'<svg class="plot" role="img" aria-label="{_attribute(about)}" {box[0] if box else ""}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)


def _for_the_page(tag: str, used: set[str]) -> str:
    """Give a tag the page's colours and font, and no name that nothing refers to."""
    tag = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", tag)
    for colour, variable in _PAGE.items():
        tag = tag.replace(colour, f"var({variable})")
    # The font by whose widths it was laid out is wider than those of most systems, so nothing runs out of its place.
    return re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", tag)


def _attribute(text: str) -> str:
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
