"""The command lines ``autotune search --replay`` and ``--dry-run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.base.records import Config, Value
from autotune.cli.main import run
from tests.support import write_surface

BASELINE: dict[str, Value] = {"precision": "fp32", "batch_size": 32, "num_workers": 0}
KNOBS: dict[str, tuple[Value, ...]] = {
    "precision": ("fp32", "bf16"),
    "batch_size": (16, 32, 64),
    "num_workers": (0, 2),
    "prefetch_factor": (2,),
    "persistent_workers": (True,),
}


def rate(config: Config) -> float:
    return 50 * (1.6 if config["precision"] == "bf16" else 1.0) * (1.3 if config["num_workers"] else 1.0)


@pytest.fixture
def surface(tmp_path: Path) -> str:
    path = tmp_path / "made-up.jsonl"
    write_surface(path, KNOBS, BASELINE, rate, lambda config: 2**28)
    return str(path)


def test_tells_trials_reason_and_what_was_found(surface: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--replay", surface, "--budget", "5m"]) == 0
    out = capsys.readouterr().out
    assert "the baseline" in out and "complete" in out and "virtual time" in out
    assert "launched again" in out and out.index("complete") < out.index("launched again") < out.index("Found")
    assert "Found 10" in out and "precision=bf16" in out and "The fastest that was recorded" in out


def test_json_is_one_object(surface: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--replay", surface, "--budget", "5m", "--sampler", "tpe", "--seed", "3", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1 and found["made"] == "recorded"
    assert found["best"]["speedup_ci95"][0] > 1 and found["best"]["config"]["precision"] == "bf16"
    # The space has the baseline and eleven other configurations.
    assert sum(found["trials"].values()) == 12
    assert found["searched_s"] < found["elapsed_s"] <= 300
    assert found["best"] in found["finalists"] and found["baseline"] in found["finalists"]
    assert found["baseline"]["config"] == BASELINE and found["raced"]


def test_a_part_of_it(surface: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--fix", "precision=fp32", "--set", "batch_size=32,64", "--trials", "3", "--json"]
    assert run(["search", "--replay", surface, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["config"]["precision"] == "fp32" and sum(found["trials"].values()) == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "resnet18"], "--model and --replay exclude each other"),
        (["--batch-size", "8"], "--batch-size and --replay"),
        (["--memory-limit", "1GiB"], "--memory-limit and --replay"),
        (["--dry-run"], "--dry-run and --replay"),
        (["--data", "."], "--data and --replay"),
        (["--fix", "precision=fp16"], "was not recorded"),
        (["--fix", "depth=3"], "no knob 'depth'"),
        (["--sampler", "tree"], "tree"),
        (["--objective", "througput"], "througput"),
    ],
)
def test_what_cannot_be(surface: str, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--replay", surface, *options]) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_no_surface(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.jsonl").write_text("{}\n")
    assert run(["search", "--replay", str(tmp_path / "notes.jsonl")]) == 2
    assert "no surface" in capsys.readouterr().err
    assert run(["search", "--replay", str(tmp_path / "nothing.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_neither_model_nor_surface(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search"]) == 2
    assert "--model" in capsys.readouterr().err
