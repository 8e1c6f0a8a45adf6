"""README and the pages in `docs/`: their commands are ones that autotune takes, their code compiles, their links lead
somewhere, and what has to be complete is."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import autotune
from autotune.base.errors import INTERRUPTED, KINDS
from autotune.base.records import TrialStatus
from autotune.cli import main
from autotune.cli.main import WRONGLY_TYPED
from autotune.cli.matrix import read_matrix
from autotune.training.applied import Applied

ROOT = Path(autotune.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
#: Written by programs; references are as long as what they list.
GENERATED = {"knobs.md", "exports.md"}
#: Two screens; a case takes half of one.
MOST_LINES, MOST_OF_A_CASE = 130, 60
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Options before the command, such as --install-completion, would act when they are parsed.
_INLINE = re.compile(r"`(autotune [a-z][^`]*)`")
#: A sentence may name a command without all that it needs, and an ellipsis stands for it.
_INCOMPLETE = re.compile("Missing |requires an argument")
_LINK = re.compile(r"\]\(([^()\s#]*)(#[^()\s]*)?\)")


def in_blocks(text: str) -> Iterator[str]:
    """Yield the command lines of autotune in a page's blocks."""
    for language, block in _FENCE.findall(text):
        if language == "python":
            continue
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            # A user may be called autotune, too: sudo -iu autotune.
            found = re.search(r"(?:^|(?<!-iu)[\s/(])(autotune [a-z].*)", line)
            if found:
                yield found[1]


def words_of(command: str) -> list[str]:
    """Return a command's words as a shell splits them, without ellipses, comments and what comes after it."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";&|)")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in lexer:
        if set(word) <= set(";&|)"):
            break
        if word != "…":
            words.append("17" if word == "ID" else word)
    return words


def take(command: Any, words: list[str], parent: Any = None) -> None:
    """Let the command line parse some words, subcommands included; nothing is run."""
    with command.make_context(words[0], words[1:], parent=parent) as context:
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if hasattr(command, "commands") and rest:
            sub = command.get_command(context, rest[0])
            assert sub is not None, f"{words[0]} has no command {rest[0]}"
            take(sub, rest, context)


@functools.cache
def program() -> Any:
    # Commands are registered when the program runs.
    main.run(["--version"])
    return typer.main.get_command(main.app)


def test_the_commands_of_a_page_are_ones_that_autotune_takes() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text()
        inline = [command.replace("\n", " ") for command in _INLINE.findall(_FENCE.sub("", text))]
        for command in (*in_blocks(text), *inline):
            try:
                take(program(), words_of(command))
            except (WRONGLY_TYPED, AssertionError) as error:
                if not ((command in inline or "…" in command) and _INCOMPLETE.search(str(error))):
                    wrong.append(f"{page.name}: {command}: {error!r}")
    assert wrong == []


def test_commands_would_be_found_wrong() -> None:
    for command in ("autotune search --modle x", "autotune jobs shwo 17", "autotune sarch"):
        with pytest.raises((WRONGLY_TYPED, AssertionError)):
            take(program(), words_of(command))
    page = "```\n$ autotune search --model x \\\n    --seed 3 | tee log  # so\n.venv/bin/autotune doctor\n```"
    assert [words_of(c) for c in in_blocks(page)] == [
        ["autotune", "search", "--model", "x", "--seed", "3"],
        ["autotune", "doctor"],
    ]


def test_the_matrix_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = [block for language, block in _FENCE.findall((DOCS / "cluster.md").read_text()) if language == "yaml"]
    (tmp_path / "matrix.yaml").write_text(text)
    options = {word for name in ("submit", "search") for one in program().commands[name].params for word in one.opts}
    assert len(read_matrix(tmp_path / "matrix.yaml", options, ("--arg",)).cells) == 12


def test_the_code_of_a_page_compiles_and_names_what_there_is() -> None:
    for page in PAGES:
        for language, block in _FENCE.findall(page.read_text()):
            # What the site's Markdown does not know as a block, it shows as text.
            assert re.fullmatch(r'\w*( title="\w+")?', language), f"{page.name}: {language}"
            if language == "python":
                assert _names_what_there_is_not(ast.parse(block)) == [], page.name


def _names_what_there_is_not(tree: ast.AST) -> list[str]:
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autotune":
            module = importlib.import_module(node.module or "")
            wrong += [ast.unparse(node)] if not all(hasattr(module, alias.name) for alias in node.names) else []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name, attribute = node.value.id, node.attr
            known = name != "profile" or hasattr(Applied, attribute) or attribute in Applied.__annotations__
            wrong += (
                [ast.unparse(node)] if not known or (name == "autotune" and not hasattr(autotune, attribute)) else []
            )
    return wrong


def test_the_links_of_a_page_lead_somewhere() -> None:
    nowhere = []
    for page in PAGES:
        for target, anchor in _LINK.findall(_FENCE.sub("", page.read_text())):
            if ":" in target:
                continue
            found = page.parent / target if target else page
            if not found.exists() or (anchor and found.suffix == ".md" and anchor[1:] not in anchors(found)):
                nowhere.append(f"{page.name}: {target}{anchor}")
    assert nowhere == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings; building the site checks them as it gives them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_each_page_is_in_the_navigation_and_at_most_two_screens() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in sorted(DOCS.rglob("*.md")):
        name = str(page.relative_to(DOCS))
        assert re.search(rf"[ :]{re.escape(name)}$", navigation, re.MULTILINE), name
        most = MOST_OF_A_CASE if name.startswith("cases/") else MOST_LINES
        assert len(page.read_text().splitlines()) <= most or name in GENERATED, name
        assert not name.startswith("cases/") or name in (DOCS / "cases.md").read_text(), name


def test_every_status_and_every_exit_code_is_explained() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [str(status) for status in TrialStatus]
    rows = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    codes = {int(code) for row in rows for code in row.split(",")}
    assert codes == {0, 1} | {kind.exit_code for kind in KINDS} | INTERRUPTED


def test_every_knob_says_when_it_helps_and_hurts_and_who_says_so() -> None:
    sections = re.split(r"^## ", (DOCS / "knobs.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) >= 15
    for section in sections:
        for word in ("Helps:", "Hurts:", "Source:", "| values |"):
            assert word in section, (section.split("\n")[0], word)
