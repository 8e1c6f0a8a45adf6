"""The report as Markdown: a parser reads the document's text back from it, and no text has become markup."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from autotune.report import to_markdown, to_text
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
    Section,
    escape,
)

#: GitHub's tables and strike-through beside CommonMark.
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
NASTY = [
    "a | b",
    "`rm -rf`",
    "**bold** and __init__ and _x_",
    "<script>alert(1)</script>",
    "[text](http://example.org)",
    "![image](x.png)",
    "~~gone~~ ~14.2",
    "&lt; &#64;",
    "back\\slash \\| \\`",
    "# no heading",
    "1. no list",
    "2) no list",
    "- no list",
    "+ no list",
    "> no quotation",
    "---",
    "===",
    "$x$ costs $y$",
    "www.example.org",
    "snake_case_name",
    "worker \x1b[31mred\x1b[0m\r\nnext line\u2028and another\u202e",
    "```",
    "    four spaces",
    "[x]: http://example.org",
    "é × ± → ′",
]


def one(*parts: Part) -> str:
    return to_markdown(Document("title", (Section("section", parts),)))


def plain(tokens: list[Token]) -> str:
    """The words of inline tokens; fails where there is anything but words and our own emphasis."""
    text = ""
    for token in tokens:
        for child in token.children or []:
            assert child.type in {"text", "text_special", "strong_open", "strong_close"}, (child.type, child.content)
            text += child.content
    return text


def shown(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


@pytest.mark.parametrize("text", NASTY)
def test_a_text_is_shown_as_it_is_wherever_it_stands(text: str) -> None:
    document = Document(
        text,
        (
            Section(
                text, (Paragraph(text), Facts(((text, text),)), Grid((Column(text), Column("b")), ((text, text),)))
            ),
            Section("curves", (Curves(((text, (1.0, 2.0)),)),)),
        ),
    )
    tokens = PARSER.parse(to_markdown(document))
    words = shown(text)
    kinds = [t.type for t in tokens]
    assert (
        kinds.count("table_open") == 1 and kinds.count("bullet_list_open") == 2 and kinds.count("list_item_open") == 2
    )
    assert not {"code_block", "fence", "html_block", "blockquote_open", "hr", "ordered_list_open"} & set(kinds)
    inline = [plain([t]) for t in tokens if t.type == "inline"]
    assert inline == [words, words, words, f"{words}: {words}", words, "b", words, words, "curves", f"{words}: 1, 2"]


def test_nothing_from_outside_becomes_a_link_by_itself() -> None:
    linking = MarkdownIt("commonmark").enable("table")
    for text in ("see http://example.org/x", "see https://example.org"):
        assert escape(text).replace("\\", "", 1) == text
        assert re.search(r"https?://", escape(text)) is None
        assert plain([t for t in linking.parse(escape(text)) if t.type == "inline"]) == text
    assert "www." not in escape("see www.example.org")


def test_a_grid_is_a_table_with_figures_to_the_right() -> None:
    columns = (Column("what", Kind.WORD), Column("kept\nshare"))
    text = one(
        Grid(columns, (("a", "1 %"), ("", "")), total=False), Grid(columns, (("a", "1 %"), ("", "2 %")), total=True)
    )
    lines = text.splitlines()
    assert lines[4:8] == ["| what | kept share |", "| :-- | --: |", "| a | 1 % |", "|  |  |"]
    assert lines[-1] == "|  | **2 %** |"


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        Grid((Column("a"), Column("b")), (("1",),))


def test_two_lists_in_a_row_stay_two() -> None:
    text = one(Facts((("a", "b"),)), Facts((("c", "d"),)), Curves((("e", (0.5, 1 / 3)), ("f", ()))))
    tokens = PARSER.parse(text)
    assert [t.type for t in tokens].count("bullet_list_open") == 3
    # Tight ones: loose lists have a paragraph in each item.
    assert all(t.hidden for t in tokens if t.type == "paragraph_open")
    assert text.endswith("- e: 0.5, 0.3333\n- f: no step\n")


def test_commands_can_be_copied_as_they_are() -> None:
    line = "autotune train --profile 'my `x` ``` $HOME | profile.yaml'"
    (fence,) = [t for t in PARSER.parse(one(Commands((line, "second")))) if t.type == "fence"]
    assert fence.content == f"{line}\nsecond\n"


def test_the_same_document_as_plain_text_has_no_escape_sequences() -> None:
    document = Document("t", (Section("s", (Paragraph("[red]x[/red] \x1b[31m", strong=True),)),))
    assert to_text(document).splitlines()[-1] == "[red]x[/red] [31m"
    assert "\x1b" not in to_text(document)
