"""The commands and their help texts, and the commands that need no search: ``doctor`` and ``space``."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import typer

from autotune.cli import main
from autotune.cli.help_text import COMMAND_PANELS, OPTION_PANELS
from autotune.cli.main import run

from .conftest import Project

#: Commands of the public contract.
CONTRACT = {
    *("search", "resume", "export", "show", "report", "storage", "studies", "space"),
    *("verify", "train", "run", "doctor", "init", "daemon", "submit", "jobs", "profiles", "rank"),
}


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    run(["--version"])
    group: Any = typer.main.get_command(main.app)
    return dict(group.commands)


def test_every_command_is_one_of_the_contract(commands: dict[str, Any]) -> None:
    assert commands.keys() <= CONTRACT
    assert commands.keys() >= {
        *("search", "resume", "export", "show", "report", "studies", "space", "train", "doctor"),
        *("daemon", "submit", "jobs", "profiles", "rank"),
    }


def test_every_command_and_option_says_what_it_is_for(
    commands: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for name, command in commands.items():
        first_line = inspect.cleandoc(str(command.help)).splitlines()[0]
        assert run([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert first_line[:40] in text and "Usage: autotune " + name in text
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name} has no help"


def test_help_lists_each_thing_once_in_its_panel(commands: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    listed = [name for names in COMMAND_PANELS.values() for name in names]
    assert sorted(listed) == sorted(commands)
    options = {parameter.name for parameter in commands["search"].params}
    named = [name for names in OPTION_PANELS.values() for name in names]
    assert len(named) == len(set(named)) and options >= set(named)
    capsys.readouterr()
    assert run(["search", "--help"]) == 0
    text = capsys.readouterr().out
    for one in commands["search"].params:
        if one.param_type_name == "option":
            assert len(re.findall(rf"^  {one.opts[-1]}(?![\w-])", text, re.MULTILINE)) == 1, one.opts
    assert text.index("--model ") < text.index("--arg ") < text.index("--json ")
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for name in commands:
        assert re.search(rf"^  {name} +\w[^.]{{15,}}\.$", text, re.MULTILINE), name
    assert "Exit codes" in text


def test_the_options_of_a_search_are_those_of_the_contract(commands: dict[str, Any]) -> None:
    options = {option for parameter in commands["search"].params for option in parameter.opts}
    assert options >= {
        *("--model", "--arg", "--data", "--study", "--studies-dir", "--budget", "--trials", "--objective"),
        *("--device", "--batch-size", "--image-size", "--baseline", "--set", "--fix", "--memory-limit"),
        *("--sampler", "--seed", "--json", "--no-input"),
    }


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("autotune 0.")


def test_doctor_tells_what_this_machine_can_do(project: Project) -> None:
    done = project.run("doctor")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("cores", "/dev/shm", "torch"))


@pytest.mark.usefixtures("searching_here")
def test_the_space_of_a_users_own_workload(project: Project) -> None:
    arguments = ["space", "--model", "my_tiny_net.py", "--device", "cpu", "--set", "batch_size=16,32"]
    found = project.json(*arguments)
    legal = {name: [c["value"] for c in knob["choices"] if not c["refused"]] for name, knob in found["knobs"].items()}
    assert legal["batch_size"] == [16, 32] and "fp32" in legal["precision"] and "fp16" not in legal["precision"]
    assert "pin_memory" in found["inactive"] and found["baseline"]["batch_size"] == 32
    refused = [c for knob in found["knobs"].values() for c in knob["choices"] if c["refused"] is not None]
    assert found["knobs"]["batch_size"]["changes_maths"] and not found["knobs"]["num_workers"]["changes_maths"]
    assert refused and all(isinstance(c["refused"], str) and c["refused"] for c in refused)
