"""Completion in the shell, asked as bash and zsh ask for it: through the environment of the command."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.main import run

MODEL = 'KNOBS = {"checkpointing": (False, True)}\nraise SystemExit("completion must not run this")\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "own.py").write_text(MODEL)
    for studies, name in (("studies", "mine-1"), ("studies", "other-1"), ("elsewhere", "mine-7")):
        (tmp_path / studies / name).mkdir(parents=True)
        (tmp_path / studies / name / "study.yaml").write_text("")
    (tmp_path / "studies" / "mine-no-study").mkdir()
    return tmp_path


def in_bash(*words: str) -> list[str]:
    """What bash gets; ``words`` as it splits them, the last one being completed."""
    entered = "\n".join(word for word in ("autotune", *words) if word)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("_AUTOTUNE_COMPLETE", "complete_bash")
        patch.setenv("COMP_WORDS", entered)
        patch.setenv("COMP_CWORD", str(len(words)))
        run([])
    return printed.getvalue().split()


def test_studies(folder: Path) -> None:
    for command in ("show", "resume", "report", "export"):
        assert in_bash(command, "m") == ["mine-1"]
    assert in_bash("show", "") == ["mine-1", "other-1"]
    assert in_bash("show", "--studies-dir", "elsewhere", "m") == ["mine-7"]


def test_formats(folder: Path) -> None:
    assert in_bash("export", "mine-1", "--format", "li") == ["lightning"]
    assert "mine.py" in in_bash("export", "mine-1", "--format", "m")


def test_models(folder: Path) -> None:
    assert in_bash("search", "--model", "mi") == ["mine.py"]
    assert in_bash("search", "--model", "nets/") == ["nets/own.py"]
    assert in_bash("space", "--model", "resnet1") == ["resnet101", "resnet152", "resnet18"]
    assert {"resnet50", "mine.py", "nets/"} <= set(in_bash("search", "--model", ""))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["--fix", "pre"], ["precision=", "prefetch_factor="]),
        (["--fix", "prec"], ["precision=bf16", "precision=fp16", "precision=fp32", "precision=tf32"]),
        (["--baseline", "precision", "=", "f"], ["fp16", "fp32"]),
        (["--set", "precision", "="], ["bf16", "fp16", "fp32", "tf32"]),
        (["--set", "precision", "=", "bf16,f"], ["bf16,fp16", "bf16,fp32"]),
        (["--fix", "workload.checkpointing", "="], ["false", "true"]),
        (["--fix", "work"], ["workload.checkpointing=false", "workload.checkpointing=true"]),
    ],
)
def test_knobs_and_their_values(folder: Path, typed: list[str], offered: list[str]) -> None:
    assert sorted(in_bash("search", "--model", "mine.py", *typed)) == offered


@pytest.mark.parametrize(
    ("env", "offered"),
    [
        (
            {
                "_AUTOTUNE_COMPLETE": "complete_bash",
                "COMP_WORDS": "autotune\nsearch\n--fix\nprecision\n=\nb",
                "COMP_CWORD": "5",
            },
            "bf16",
        ),
        # zsh leaves words whole.
        (
            {
                "_AUTOTUNE_COMPLETE": "complete_zsh",
                "_TYPER_COMPLETE_ARGS": "autotune search --model mine.py --fix precision=b",
            },
            '"precision=bf16"',
        ),
    ],
)
def test_a_shell_gets_its_answer_without_torch(folder: Path, env: dict[str, str], offered: str) -> None:
    command = [sys.executable, "-X", "importtime", "-P", "-m", "autotune"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **env})
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded and not loaded & {"torch", "torchvision", "scipy"}
    assert offered in done.stdout


def test_other_commands_print_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("autotune ")
