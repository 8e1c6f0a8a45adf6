"""The report as an HTML page: a parser reads the document's text back from it, and no text has become markup."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser

import pytest

from autotune.report import to_html
from autotune.report.document import (
    Column,
    Commands,
    Curves,
    Document,
    Facts,
    Grid,
    Kind,
    Paragraph,
    Part,
    Picture,
    Section,
)
from autotune.report.drawing import Axis, Chart, Factor, IntervalRow, Intervals, Panel, Series, Stacks, Waterfall

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
    '训练 id="x" #0a0001 font: 3px x; <!-- ',
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


def chart(text: str) -> Chart:
    series = (Series(text, "dots", ((1.0, 2.0), (2.0, 3.0))), Series(text, "crosses", ((2.0, 0.0),), 2))
    return Chart(Axis("batch size (samples)", (1.0, 2.0), log=True), (Panel(Axis("samples/s"), series),))


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
        Picture(text, text, chart(text), Grid((Column(text.replace("\n", " ")), Column("b")), ((text, text),))),
        Commands((text, text)),
    )
    return Document(text, (Section(text, parts),))


@pytest.mark.parametrize("text", NASTY)
def test_a_text_is_shown_as_it_is_wherever_it_stands(text: str) -> None:
    found, words = Page(to_html(everything(text))), shown(text)
    for tag in ("title", "h1", "h2", "p", "strong", "dt", "dd"):
        assert words in found.all(tag), tag
    assert found.all("th") == [words, "b"] * 2 and found.all("td") == [words] * 6
    assert found.all("li") == [f"{words}: 1 → 2", f"{words}: no step", words, words]
    assert found.all("figcaption") == [words] and found.all("summary") == ["The figures"]
    assert found.all("code") == [f"{words}\n{words}"]
    chart, drawn = [a for a in found.attributes("svg") if a.get("role") == "img"]
    assert chart["aria-label"] == f"Loss at steps 1 to 2, from 1 to 2: {words}, {words}"
    assert drawn["aria-label"] == words
    # No text has added an element or an attribute.
    plain = Page(to_html(everything("plain")))
    assert [(t, a.keys()) for t, a in found.elements] == [(t, a.keys()) for t, a in plain.elements]


@pytest.mark.parametrize("text", NASTY)
def test_no_control_character_is_left_and_the_page_can_be_written(text: str) -> None:
    written = to_html(everything(text)).encode().decode()
    assert all(c.isprintable() or c == "\n" for c in written)


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs() -> None:
    text = to_html(everything("plain"))
    for outside in ("http", "src=", "@import", "<script", "<link", "<iframe", "//"):
        assert outside not in text
    # Pictures name parts of themselves.
    assert not re.search(r"""(href=["']|url\()(?!#)""", text)
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


PLOTS = {
    "chart": chart("a"),
    "waterfall": Waterfall(
        "rate (×)",
        "baseline",
        (Factor("bf16", (1.5, 1.4, 1.6)), Factor("rest", (0.9, None, None), rest=True)),
        "winner",
        (1.35, 1.2, 1.5),
    ),
    "intervals": Intervals(
        "samples/s", (IntervalRow("a", (1.0, 0.9, 1.1)), IntervalRow("b", (2.0, None, None), faint=True))
    ),
    "stacks": Stacks("seconds", ("start", "kept"), (("searching", (1.0, 2.0)), ("proof", (0.0, 3.0)))),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_is_drawn_with_its_units_and_always_with_the_same_bytes(name: str) -> None:
    picture = Picture("a picture", "what it shows", PLOTS[name])
    first, again = (to_html(Document("t", (Section("s", (picture,)),))) for _ in range(2))
    assert first == again and len(first) < 60_000
    found = Page(first)
    (drawn,) = [a for a in found.attributes("svg") if a.get("role") == "img"]
    assert drawn["aria-label"] == "what it shows" and (drawn.get("viewbox") or "").startswith("0 0 360 ")
    units = {"chart": "samples/s", "waterfall": "rate (×)", "intervals": "samples/s", "stacks": "seconds"}
    assert units[name] in found.all("text"), "text is text"
    # Nothing has a colour that does not follow the page's scheme.
    svg = first[first.index('<svg class="plot"') :]
    assert not re.search(r"(fill|stroke): (#|rgb|black|white)", svg)


def test_a_picture_that_cannot_be_drawn_leaves_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = Page(to_html(everything("plain")))
    assert "img" not in [a.get("role") for a in found.attributes("svg")]
    assert found.all("td") == ["plain"] * 6 and "plain: 1 → 2" in found.all("li")


@pytest.mark.parametrize("text", NASTY)
def test_a_name_in_a_picture_is_shown_as_it_is(text: str) -> None:
    plot = Intervals("samples/s", (IntervalRow(text, (1.0, 0.9, 1.1)), IntervalRow(text, (2.0, 1.9, 2.1), strong=True)))
    found = page(Picture("t", "about", plot))
    assert found.all("text").count(shown(text)) == 2


def test_a_notebooks_own_settings_of_matplotlib_stay() -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 33.0, "svg.fonttype": "path"}):
        text = to_html(everything("plain"))
        assert matplotlib.rcParams["font.size"] == 33.0 and matplotlib.rcParams["svg.fonttype"] == "path"
    assert text == to_html(everything("plain"))


def legend(*rows: tuple[str, tuple[float, ...]]) -> Page:
    return page(Curves(rows))


def test_curves_can_be_told_apart_without_colour_and_the_legend_shows_how() -> None:
    found = legend(*((f"trial {i}", (float(i), 0.0)) for i in range(8)))
    looks = [a.get("stroke-dasharray") for a in found.attributes("line")]
    assert looks[0] is None and len(set(looks)) == 8
    assert {"loss", "step"} <= set(found.all("text"))


def test_what_is_no_finite_number_interrupts_a_curve() -> None:
    found = legend(("x", (3.0, 2.0, math.nan, 1.0, 0.5)), ("y", (3.0, 2.5, math.inf)), ("z", (1e300, 1.0)))
    paths = " ".join(a.get("d") or "" for a in found.attributes("path"))
    assert "nan" not in paths and "inf" not in paths
    assert found.all("li") == ["x: 3 → 0.5", "y: 3 → inf, ended after 3 steps", "z: 1e+300 → 1, ended after 2 steps"]


@pytest.mark.parametrize("rows", [(), (("x", ()),), (("x", (math.nan,)), ("y", (math.inf, -math.inf)))])
def test_without_a_number_there_is_no_chart_but_a_legend(rows: tuple[tuple[str, tuple[float, ...]], ...]) -> None:
    found = legend(*rows)
    assert "img" not in [a.get("role") for a in found.attributes("svg")]
    assert len(found.all("li")) == len(rows)


def test_a_single_step_is_a_dot() -> None:
    found = legend(("x", (0.7,)), ("y", ()))
    assert found.attributes("use") and found.all("li") == ["x: 0.7 → 0.7", "y: no step"]
