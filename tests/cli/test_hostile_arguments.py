"""Hostile arguments: every command refuses them in a sentence, without a traceback, a fault of its own, or a hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.base.errors import MachineError
from autotune.cli.main import run
from autotune.cli.output import write_output

LONG, HUGE, FOREIGN = "x" * 5000, "9" * 400, "\udcff"
#: Files that a command may be pointed at: their names, and their content.
FILES = {
    "binary.py": b"\x00\xff\xfe",
    "binary.yaml": b"\x00\xff",
    "deep.yaml": b"jobs: " + b"[" * 5000,
    "date.yaml": b"jobs:\n- budget: 2026-13-01\n",
    "lines.jsonl": b"[" * 200_000 + b"\n",
}
COMMANDS = [
    *(
        [command, name]
        for command in ("resume", "export", "show", "report")
        for name in ("", LONG, FOREIGN, "pipe", "\n")
    ),
    *([command, "s", "--studies-dir", LONG] for command in ("resume", "export", "show", "report")),
    ["studies", "--studies-dir", LONG],
    ["profiles", "--state-dir", LONG],
    ["profiles", "show", FOREIGN],
    ["jobs", "--state-dir", LONG],
    *(
        [c, "--profile", p]
        for c in ("train", "verify")
        for p in ("", ".", "pipe", "zero", "binary.yaml", LONG, FOREIGN)
    ),
    *(["search", "--replay", p] for p in ("", ".", "pipe", "zero", "binary.yaml", "lines.jsonl", LONG, FOREIGN)),
    *(
        ["submit", p]
        for p in ("", ".", "pipe", "zero", "binary.yaml", "deep.yaml", "date.yaml", LONG, FOREIGN, f"{LONG}.yaml")
    ),
    *(
        ["submit", "--model", "resnet18", *options]
        for options in (
            ["--max-hours", "nan"],
            ["--max-hours", "inf"],
            ["--max-hours", "1e308"],
            ["--priority", HUGE],
            ["--not-before", "0001-01-01"],
            ["--not-before", f"+{HUGE}h"],
            ["--host-memory", HUGE],
            ["--gpu", FOREIGN],
        )
    ),
    *(
        ["search", "--model", "resnet18", "--data", "synthetic", "--dry-run", *options]
        for options in (
            ["--model", ""],
            ["--model", "pipe.py"],
            ["--model", "zero.py"],
            ["--model", LONG],
            ["--model", FOREIGN],
            ["--objective", "pipe.py"],
            ["--objective", LONG],
            ["--data", LONG],
            ["--data", FOREIGN],
            ["--device", f"cuda:{HUGE}"],
            ["--fix", f"{FOREIGN}=1"],
            ["--fix", f"batch_size={HUGE}"],
            ["--sampler", ""],
            ["--study", LONG * 2 + "/"],
        )
    ),
]


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda c: " ".join(w[:12] for w in c).encode(errors="replace").decode()
)
def test_a_hostile_argument_is_refused_in_a_sentence(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    for name in ("pipe", "pipe.py"):
        os.mkfifo(name)
    for name in ("zero", "zero.py"):
        os.symlink("/dev/zero", name)
    code = run(command)
    said = capfd.readouterr().err
    assert code in (2, 4, 5, 7), said
    assert "Traceback" not in said and "fault" not in said
    assert said.startswith(("autotune: ", "Usage: "))


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("full", "stdout"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    with pytest.raises(MachineError, match="No space left"):
        write_output(tmp_path / "full", "text")
    write_output(tmp_path / "stdout", "text")
    assert capfd.readouterr().out == "text"
    assert (tmp_path / "full").is_symlink() and (tmp_path / "stdout").is_symlink()
