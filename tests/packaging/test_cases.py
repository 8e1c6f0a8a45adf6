"""The case pages: each is short, has commands that autotune takes, and is listed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import autotune
from autotune.cli import main

PAGES = sorted((Path(autotune.__file__).parent.parent / "docs" / "cases").glob("[a-z]*.md"))
INDEX = Path(autotune.__file__).parent.parent / "docs" / "cases.md"


def test_there_is_a_page_for_each_case_and_all_are_listed() -> None:
    assert len(PAGES) == 5
    assert all(f"cases/{page.name}" in INDEX.read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_ones_that_autotune_takes(page: Path) -> None:
    text = page.read_text()
    commands = re.findall(r"^\$ .*\b(autotune (?:search|report|space) .+)$", text, re.MULTILINE)
    assert commands
    # Commands are registered when the program runs.
    main.run(["--version"])
    group: Any = typer.main.get_command(main.app)
    for command in commands:
        _, name, *words = shlex.split(command)
        with group.commands[name].make_context(name, words):
            pass
    assert len(text.splitlines()) <= 60, "half a screen of reading"
