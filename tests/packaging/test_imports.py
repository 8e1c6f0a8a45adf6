"""Imports: the parent process imports neither torch nor user code, and all exported names exist."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import autotune

PACKAGE = Path(autotune.__file__).parent
#: Packages that the parent process does not import: the child's, and the user's training. What `load_profile` returns
#: is made in the parent, and imports torch when a method needs it.
NOT_THE_PARENT, BUT = ("autotune.child", "autotune.training"), "autotune.training.applied"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def modules_of_the_parent() -> list[str]:
    every = pkgutil.walk_packages([str(PACKAGE)], "autotune.")
    names = [m.name for m in every if not m.name.endswith("__main__")]
    return [n for n in names if n == BUT or not n.startswith(NOT_THE_PARENT)]


def test_the_help_text_costs_no_torch() -> None:
    done = python("-X", "importtime", "-m", "autotune", "--help")
    assert done.returncode == 0 and "search" in done.stdout
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.count("|") == 2}
    assert "autotune.cli.main" in imported or "autotune.cli" in imported
    assert {name.split(".")[0] for name in imported} & {"torch", "torchvision", "triton", "scipy", "jinja2"} == set()


def test_no_module_of_the_parent_brings_torch() -> None:
    names = modules_of_the_parent()
    assert len(names) > 40
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    done = python("-c", code, *names)
    assert done.returncode == 0, done.stderr


def test_the_daemon_itself_carries_nothing_that_it_does_not_need() -> None:
    """The daemon runs for weeks beside other people's work, so it must stay small."""
    # sqlite-utils imports numpy if it is installed.
    heavy = "'torch', 'optuna', 'sqlalchemy', 'rich', 'typer', 'jinja2', 'waitress'"
    code = f"import sys, autotune.daemon.service; print([m for m in ({heavy}) if m in sys.modules])"
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ["torch", "optuna", "pydantic", "rich", "typer", "sqlalchemy"]
    code = "import sys, autotune; print([n for n in sys.argv[1:] if n in sys.modules]); dir(autotune)"
    done = python("-c", code, *heavy)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_resolves() -> None:
    code = (
        "import autotune\n"
        "for name in autotune.__all__:\n    assert getattr(autotune, name) is not None, name\n"
        "assert set(autotune.__all__) == set(dir(autotune))\n"
        "from autotune import *\n"
        "load_profile, tune, Applied, Context, Workload, AutotuneError\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = autotune.nothing
