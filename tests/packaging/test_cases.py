"""The case pages: each is half a screen, has one command that autotune takes, and is listed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import autotune
from autotune.cli import main

PAGES = sorted((Path(autotune.__file__).parent.parent / "docs" / "cases").glob("[a-z]*.md"))
INDEX = Path(autotune.__file__).parent.parent / "docs" / "cases.md"


def test_there_is_a_page_for_each_case_and_all_are_listed() -> None:
    assert len(PAGES) == 5
    assert all(f"cases/{page.name}" in INDEX.read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_command_of_a_page_is_one_that_autotune_takes(page: Path) -> None:
    text = page.read_text()
    (command,) = re.findall(r"^\$ (autotune .+(?:\\\n.+)*)$", text, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    import typer

    group = typer.main.get_command(main.app)
    with group.commands[words[0]].make_context(words[0], words[1:]):  # type: ignore[attr-defined]
        pass
    assert len(text.splitlines()) <= 60, "half a screen of reading"
