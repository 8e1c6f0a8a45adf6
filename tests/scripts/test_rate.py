"""``--rate``: a program that is not PyTorch's tells its own rate, and flags of its own are all that is searched."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.base.layout import LaunchFiles
from autotune.base.records import LaunchKind, Phase, PhaseLimits, TrialResult, TrialStatus, Value
from autotune.profile import read

from .conftest import PLAN, SCRIPTS, Runner

PROGRAM = (sys.executable, str(SCRIPTS / "telling.py"))
IMAGES = r"(?P<rate>[0-9.,]+) images/s"
FLAGS = {"num_workers": "--workers {num_workers}"}
MAP = ("--map", "num_workers=--workers {num_workers}")
TODAY = ("--baseline", "num_workers=0")


@pytest.fixture
def told(command_launch: Any) -> Any:
    """``told(words, …)``: how a launch of a program ended that tells its rate."""

    def run(
        *words: str,
        rate: str = IMAGES,
        file: str | None = None,
        output_flag: str | None = None,
        samples_per_step: int | None = None,
        limits: PhaseLimits | None = None,
        kind: LaunchKind = LaunchKind.MEASURE,
        **config: Value,
    ) -> TrialResult:
        said = {"flags": FLAGS, "rate": rate, "rate_file": file, "output_flag": output_flag}
        said["samples_per_step"] = samples_per_step
        config = {"batch_size": 8, "num_workers": 0, **config}
        return command_launch(
            (*PROGRAM, *words), config, said=said, plan=PLAN, kind=kind, limits=limits or PhaseLimits()
        )

    return run


@pytest.mark.parametrize(
    ("words", "rate", "more"),
    [
        ((), IMAGES, {}),
        (("--as", "bar"), IMAGES, {}),
        (("--as", "seconds"), r"took (?P<seconds>\S+) s", {"samples_per_step": 8}),
        (("--as", "file"), r'"images_per_second": (?P<rate>[0-9.e+-]+)', {"file": "metrics.jsonl"}),
        (
            ("--as", "file"),
            r'"images_per_second": (?P<rate>[0-9.e+-]+)',
            {"file": "metrics.jsonl", "output_flag": "--out"},
        ),
    ],
    ids=["lines", "progress bar", "seconds of a step", "file", "file in a folder of its own"],
)
def test_the_rate_is_what_the_program_tells(told: Any, words: tuple[str, ...], rate: str, more: dict[str, Any]) -> None:
    result = told(*words, rate=rate, **more)
    assert result.status is TrialStatus.COMPLETE, result.cause
    found = result.measurement
    # 8 samples in 40 ms, and sleeping takes a little longer than asked for.
    assert 80 < found.steady_per_s < 201
    assert found.losses == () and found.loader_wait_fraction is None
    assert result.phase_s.keys() == {p.value for p in (Phase.COMPILE, Phase.WARMUP, Phase.MEASURE)}


def test_its_own_flags_set_what_is_tried(told: Any) -> None:
    one, three = (told(num_workers=workers).measurement.steady_per_s for workers in (0, 2))
    assert three > 2 * one


@pytest.mark.parametrize("anew", [(), ("--anew",)], ids=["written on", "written anew"])
def test_what_an_earlier_run_left_in_the_file_is_not_read(told: Any, tmp_path: Path, anew: tuple[str, ...]) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"images_per_second": 1000000.0}\n' * 1000)
    result = told("--as", "file", *anew, rate=r'"images_per_second": (?P<rate>[0-9.e+-]+)', file=file.name)
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert 80 < result.measurement.steady_per_s < 201


def test_a_probe_knows_the_command_and_the_machine(told: Any) -> None:
    probe = told(kind=LaunchKind.PROBE).probe
    assert probe.in_command == ("num_workers",) and probe.torch_version == ""
    assert probe.outside["precision"].keys() == {"fp32", "tf32", "bf16", "fp16"}


@pytest.mark.parametrize(
    ("words", "rate", "cause"),
    [
        (("--as", "words"), r"(?P<rate>\S+) images/s", "--rate found 'fast' in 'step 0: fast images/s', which is no"),
        (("--as", "nothing", "--lines", "3"), IMAGES, "the program ended, and nothing that it wrote matches --rate"),
        (("--lines", "3"), IMAGES, "the program ended after it had told its rate 3 time(s), too few"),
        (("--step", "x"), IMAGES, "the script ended with exit code 2"),
    ],
)
def test_what_tells_no_rate_is_one_sentence(told: Any, words: tuple[str, ...], rate: str, cause: str) -> None:
    result = told(*words, rate=rate)
    assert result.status is TrialStatus.USER_ERROR and result.cause.startswith(cause), result.cause


@pytest.mark.slow
def test_a_program_that_tells_nothing_ends_at_a_limit(told: Any, tmp_path: Path) -> None:
    result = told("--as", "nothing", limits=PhaseLimits(compile_s=4.0))
    assert (result.status, result.phase) == (TrialStatus.TIMEOUT, Phase.COMPILE)
    assert result.cause == "the program told no rate within 4 s that --rate matches"
    assert "starting" in LaunchFiles(tmp_path / "launch").stdout.read_text(), "Python does not keep what it prints"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", IMAGES, "--model", "resnet18"), "--rate is for training scripts"),
        (("--rate-file", "x", *MAP, *TODAY, "--", *PROGRAM), "--rate-file says where, and nothing says what"),
        (("--rate", "(", *MAP, *TODAY, "--", *PROGRAM), "is no regular expression"),
        (("--rate", "x", *MAP, *TODAY, "--", *PROGRAM), "has not just one group called rate or seconds"),
        (("--rate", "(?P<rate>x)(?P<seconds>y)", *MAP, *TODAY, "--", *PROGRAM), "has not just one group"),
        (("--rate", IMAGES, "--samples-per-step", "8", *MAP, *TODAY, "--", *PROGRAM), "contradict each other"),
        (("--rate", IMAGES, "--", *PROGRAM), "nothing says how to set a knob of it"),
        (("--rate", IMAGES, *MAP, "--", *PROGRAM), "nothing says what num_workers is today"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(run: Runner, words: tuple[str, ...], message: str) -> None:
    ran = run.typed("space", *words)
    assert ran.code == 2 and message in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.usefixtures("searching_here")
def test_a_program_is_tuned_by_its_own_flags(run: Runner) -> None:
    faster = ("--map", "precision:bf16=--workers 3")
    # It ends as soon as the ratio is known, after about 40 s. On a busy machine, launches are repeated.
    options = ["--rate", IMAGES, *faster, "--baseline", "precision=fp32", "--budget", "180s"]
    ran = run.typed("search", "--json", "--allow-busy", *options, "--", *PROGRAM)
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["best"]["config"] == {"batch_size": 1, "precision": "bf16"}, ran.stderr
    assert found["best"]["speedup"] > 2
    # A trial that something disturbed is repeated under another number.
    assert re.search(r"trial \d+: not checked for how it trains: the losses of a program are not seen", ran.stderr)
    profile = run.folder / "studies" / "telling-1" / "profile.yaml"
    assert read(profile).configuration["precision"] == "bf16"
    # The profile is applied as any script's is.
    applied = [sys.executable, "-P", "-m", "autotune", "run", "--profile", str(profile), *faster]
    done = run.run([*applied, "--", *PROGRAM, "--lines", "1"])
    assert done.code == 0 and "starting 5" in done.stdout, done.stderr
    words = ["verify", "--profile", str(profile), "--rate", IMAGES, *faster, "--budget", "14s", "--allow-busy"]
    kept = run.typed(*words, "--", *PROGRAM)
    assert kept.code in (0, 8), kept.stderr
