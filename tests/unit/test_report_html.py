"""The report as an HTML page: a parser reads the document's text back from it, and no text has become markup."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from autotune.report import to_html
from autotune.report.document import Column, Commands, Curves, Document, Facts, Grid, Kind, Paragraph, Part, Section

#: Elements that HTML never closes.
VOID = {"br", "meta"}
NASTY = [
    "<script>alert(1)</script>",
    "</style></title></main><b>x",
    '" onload="x" \'y\'',
    "a & b &lt; &#60;",
    "<!-- -->",
    "worker \x1b[31mred\x1b[0m\r\nnext line\x00\u2028and another\u202e",
    "lone \ud800 surrogate",
]


class Page(HTMLParser):
    """A page as it is read: its elements, and the words of each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        opened, words = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        self.words.append((tag, "".join(words)))

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1][1].append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def all(self, tag: str) -> list[str]:
        """The words directly in each element of a kind."""
        return [words for found, words in self.words if found == tag]

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == tag]


def page(*parts: Part) -> Page:
    return Page(to_html(Document("title", (Section("section", parts),))))


def shown(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def everything(text: str) -> Document:
    """A document with ``text`` in every place that takes one."""
    parts: tuple[Part, ...] = (
        Paragraph(text),
        Paragraph(text, strong=True),
        Facts(((text, text),)),
        Grid(
            (Column(text.replace("\n", " "), Kind.TEXT), Column("b")),
            ((text, text), (text, text)),
            total=True,
            strong=frozenset({0}),
        ),
        Curves(((text, (1.0, 2.0)), (text, ()))),
        Commands((text, text)),
    )
    return Document(text, (Section(text, parts),))


@pytest.mark.parametrize("text", NASTY)
def test_a_text_is_shown_as_it_is_wherever_it_stands(text: str) -> None:
    found, words = Page(to_html(everything(text))), shown(text)
    for tag in ("title", "h1", "h2", "p", "strong", "dt", "dd"):
        assert words in found.all(tag), tag
    assert found.all("th") == [words, "b"] and found.all("td") == [words] * 4
    assert found.all("li") == [f"{words}: 1 → 2", f"{words}: no step"]
    assert found.all("code") == [f"{words}\n{words}"]
    (chart,) = [a for a in found.attributes("svg") if a.get("role") == "img"]
    assert chart["aria-label"] == f"Loss at steps 1 to 2, from 1 to 2: {words}, {words}"
    # No text has added an element or an attribute.
    plain = Page(to_html(everything("plain")))
    assert [(t, a.keys()) for t, a in found.elements] == [(t, a.keys()) for t, a in plain.elements]


@pytest.mark.parametrize("text", NASTY)
def test_no_control_character_is_left_and_the_page_can_be_written(text: str) -> None:
    written = to_html(everything(text)).encode().decode()
    assert all(c.isprintable() or c == "\n" for c in written)


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs() -> None:
    text = to_html(everything("plain"))
    for outside in ("http", "src=", "href", "@import", "url(", "<script", "<link", "<iframe", "//"):
        assert outside not in text
    assert not re.search(r"\son\w+=", text)


def test_the_page_says_what_it_is() -> None:
    text = to_html(Document("resnet50 on a card", (Section("Verdict", (Paragraph("x"),)),)))
    found = Page(text)
    assert text.startswith("<!doctype html>\n") and text.endswith("</html>\n")
    assert found.attributes("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in found.attributes("meta")
    assert "viewport" in [a.get("name") for a in found.attributes("meta")]
    assert found.all("title") == found.all("h1") == ["resnet50 on a card"] and found.all("h2") == ["Verdict"]
    assert "@media screen and (prefers-color-scheme: dark)" in text and "@media print" in text


def test_every_colour_that_is_used_is_known_in_both_schemes() -> None:
    text = to_html(Document("t", (Section("s", (Curves(tuple((f"{i}", (1.0, 2.0)) for i in range(20))),)),)))
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    for scheme in (light, dark):
        assert set(re.findall(r"var\((--\w+)\)", text)) == set(re.findall(r"(--\w+):", scheme))


def test_a_grid_is_a_table_in_a_box_of_its_own_with_figures_to_the_right() -> None:
    columns = (Column("what", Kind.WORD), Column("about", Kind.TEXT), Column("kept\nshare"))
    rows = (("a", "b", "1 %"), ("c", "d", "2 %"), ("in all", "", "3 %"))
    text = to_html(Document("t", (Section("s", (Grid(columns, rows, total=True, strong=frozenset({1})),)),)))
    found = Page(text)
    assert '<div class="scroll">\n<table>\n<thead>' in text and 'class="figure">kept<br>share</th>' in text
    assert found.attributes("th") == [{"scope": "col", "class": kind} for kind in ("word", "text", "figure")]
    assert [a["class"] for a in found.attributes("td")] == ["word", "text", "figure"] * 3
    assert found.attributes("tr") == [{}, {}, {"class": "strong"}, {"class": "total"}]
    assert re.search(r"\.figure \{[^}]*text-align: right", text) and "tabular-nums" in text


def chart_of(*rows: tuple[str, tuple[float, ...]]) -> tuple[Page, list[list[tuple[float, float]]]]:
    """The page, and the points of every curve in the chart."""
    found = page(Curves(rows))
    lines = [a for a in found.attributes("polyline") if a["class"] == "curve"]
    return found, [[tuple(map(float, p.split(","))) for p in (a["points"] or "").split()] for a in lines]  # type: ignore[misc]


def test_all_curves_are_on_one_scale() -> None:
    found, (first, second) = chart_of(("eager fp32", (2.0, 1.5, 1.0)), ("trial 4", (2.0, 1.0, 1.0)))
    assert first[0] == second[0] and first[2] == second[2] and first[1] != second[1]
    assert first[0][1] < first[1][1] < first[2][1], "down is up in SVG"
    assert first[0][0] < first[1][0] < first[2][0]
    assert found.all("text") == ["2", "loss", "1", "1", "3", "step"]
    assert found.all("li") == ["eager fp32: 2 → 1", "trial 4: 2 → 1"]


def test_curves_can_be_told_apart_without_colour_and_the_legend_shows_how() -> None:
    found, _ = chart_of(*((f"trial {i}", (float(i), 0.0)) for i in range(8)))
    looks = [a.get("stroke-dasharray") for a in found.attributes("polyline") if a["class"] == "curve"]
    assert looks[0] is None and len(set(looks)) == 8
    assert [a.get("stroke-dasharray") for a in found.attributes("line")] == looks


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((2.301, 2.304), ["2.31", "2.3"]),
        ((0.00012345, 0.5), ["0.5", "0"]),
        ((6.9078, 6.8123), ["6.91", "6.81"]),
        ((1234.5, 1111.1), ["1.24e+03", "1.11e+03"]),
        ((-1.0, 1.0), ["1", "-1"]),
        ((1.0, 1.0), ["1.01", "0.99"]),
        ((0.0, 0.0), ["1", "-1"]),
        ((5e-324, 0.0), ["1", "-1"]),
        ((1e-7, 2e-7), ["2e-07", "1e-07"]),
    ],
)
def test_the_scale_ends_at_figures_of_three_digits(values: tuple[float, ...], ends: list[str]) -> None:
    found, ((a, b),) = chart_of(("x", values))
    labels = found.all("text")
    assert [labels[0], labels[2]] == ends
    assert all(8 <= y <= 156 for _, y in (a, b))


def test_what_is_no_finite_number_interrupts_a_curve() -> None:
    found, lines = chart_of(("x", (3.0, 2.0, math.nan, 1.0, 0.5)), ("y", (3.0, 2.5, math.inf)), ("z", (1e300, 1.0)))
    assert [len(points) for points in lines] == [2, 2, 2, 1]
    assert "nan" not in str(lines) and "inf" not in str(lines)
    # What breaks off ends in a dot, and so does what has no neighbour.
    assert len(found.attributes("circle")) == 3
    assert found.all("li") == ["x: 3 → 0.5", "y: 3 → inf, ended after 3 steps", "z: 1e+300 → 1, ended after 2 steps"]


@pytest.mark.parametrize("rows", [(), (("x", ()),), (("x", (math.nan,)), ("y", (math.inf, -math.inf)))])
def test_without_a_number_there_is_no_chart_but_a_legend(rows: tuple[tuple[str, tuple[float, ...]], ...]) -> None:
    found, lines = chart_of(*rows)
    assert lines == [] and "img" not in [a.get("role") for a in found.attributes("svg")]
    assert len(found.all("li")) == len(rows)


def test_a_single_step_is_a_dot() -> None:
    found, _ = chart_of(("x", (0.7,)), ("y", ()))
    (dot,) = found.attributes("circle")
    assert 48 < float(dot["cx"] or 0) < 352 and 8 < float(dot["cy"] or 0) < 156
    assert found.all("text") == ["0.701", "loss", "0.699", "step 1"]
    assert found.all("li") == ["x: 0.7 → 0.7", "y: no step"]
