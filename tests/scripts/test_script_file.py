"""``autotune init -- python train.py`` writes what a script's help says, and ``--script`` takes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import AutotuneError, UsageError
from autotune.cli import init
from autotune.cli.help_text import options_in
from autotune.cli.init import write_script_file
from autotune.cli.options import known_flags, read_script, with_script

from .conftest import SCRIPTS, Ran, Runner, written

SCRIPT = (sys.executable, str(SCRIPTS / "flags.py"))
ARGPARSE = """\
usage: train.py [-h] [-j N] [--amp]
                [--out OUT] DIR

positional arguments:
  DIR                   path to dataset

options:
  -h, --help            show this help message and exit
  -j N, --workers N     number of data loading workers
                        (default: 4)
  --test-workers N      for evaluations
  -b N, --batch-size N  mini-batch size
  --amp                 use mixed precision
  --no-compile          do not compile
  --sample-rate N       of sounds
  --pin-memory, --no-pin-memory
  --channels-last
  --dtype {float32,bfloat16}
                        of weights
  --mixed-precision {no,fp16,bf16}
  --fused-adam
  --log-dir LOG_DIR     where logs go
  --output-dir OUT      path to save outputs
"""
CLICK = """\
Usage: train.py [OPTIONS]

Options:
  --num-workers INTEGER           Loader processes.
  --compile / --no-compile        Compile the model.
  --bf16                          Autocast.
  --help                          Show this message and exit.
"""
RICH = """\
╭─ Options ────────────────────────────────────────────────────────╮
│ --num-workers  -j      INTEGER  Loader processes. [default: 4]   │
│ --compile                       Compile it.                      │
╰──────────────────────────────────────────────────────────────────╯
"""


def told(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The lines that are sure, and those that are guesses."""
    flags = known_flags(options_in(text))
    return {f.name: f.words for f in flags if f.sure}, {f.name: f.words for f in flags if not f.sure}


def test_options_in_the_style_of_argparse() -> None:
    sure, guesses = told(ARGPARSE)
    assert sure == {
        "num_workers": "--workers {num_workers}",
        "pin_memory:true": "--pin-memory",
        "pin_memory:false": "--no-pin-memory",
        "memory_format:channels_last": "--channels-last",
        "optimizer_impl:fused": "--fused-adam",
        "precision:fp16": "--mixed-precision fp16",
        "precision:bf16": "--mixed-precision bf16",
        "": "--output-dir",
    }
    assert guesses == {"batch_size": "--batch-size {batch_size}"}
    assert [o.help for o in options_in(ARGPARSE) if "-j" in o.names] == ["number of data loading workers (default: 4)"]


def test_what_is_not_sure_is_a_guess() -> None:
    assert told("options:\n  --amp   use it\n  --ckpt-dir DIR\n  --loader-workers N\n")[1] == {
        "num_workers": "--loader-workers {num_workers}",
        "precision:bf16": "--amp",
        "precision:fp16": "--amp",
        "": "--ckpt-dir",
    }


@pytest.mark.parametrize("text", [CLICK, RICH])
def test_options_in_the_style_of_click(text: str) -> None:
    sure, _ = told(text)
    assert sure["num_workers"] == "--num-workers {num_workers}" and sure["compile_mode:default"] == "--compile"


def autotune(run: Runner, *words: str) -> Ran:
    return run.run([sys.executable, "-P", "-m", "autotune", *words])


@pytest.mark.slow
def test_a_file_is_written_and_taken(run: Runner) -> None:
    ran = autotune(run, "init", "--", *SCRIPT, "--log", "log")
    assert ran.code == 0, ran.stderr
    assert "wrote flags.autotune.yaml" in ran.stdout and "num_workers: --workers {num_workers}" in ran.stdout
    said = read_script(run.folder / "flags.autotune.yaml")
    assert said["command"] == [*SCRIPT, "--log", "log"] and said["map"]["precision:bf16"] == "--amp bfloat16"
    assert said.keys() == {"command", "map"}
    again = autotune(run, "init", "--", *SCRIPT)
    assert again.code == 2 and "exists already" in again.stderr
    space = autotune(run, "space", "--json", "--script", "flags.autotune.yaml")
    assert space.code == 0, space.stderr
    choices = json.loads(space.stdout)["knobs"]["precision"]["choices"]
    assert {c["value"]: c["refused"] for c in choices}["tf32"] == "--map says nothing of it"
    profile = written(run.folder, num_workers=2)
    told = autotune(run, "run", "--profile", str(profile), "--script", "flags.autotune.yaml")
    assert told.seen["words"] == ["--log", "log", "--workers", "2"]


def test_a_script_without_help_has_a_file_of_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, code, lack in (
        ("fails", "raise SystemExit(3)", "ended with exit code 3"),
        ("silent", "pass", "says nothing"),
        ("other", "print('hello')", "tells no option that autotune knows"),
    ):
        write_script_file([sys.executable, "-c", code], Path(f"{name}.yaml"))
        assert lack in capsys.readouterr().out
        assert read_script(Path(f"{name}.yaml")) == {"command": [sys.executable, "-c", code]}
    monkeypatch.setattr(init, "HELP_S", 0.5)
    write_script_file([sys.executable, "-c", "import time; time.sleep(600)"], Path("slow.yaml"))
    assert "did not end within" in capsys.readouterr().out


def test_a_hostile_help_text_stays_in_its_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "print('  --workers N  many\\x85scratch: true # \\u2028command: x')"
    write_script_file([sys.executable, "-c", code], Path("a.yaml"))
    assert read_script(Path("a.yaml")).keys() == {"command", "map"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no keys"),
        ("- a", "holds no keys"),
        ("commands: x", "unknown key"),
        ("command: 3", "command must be text"),
        ("command: ['a', 3]", "command must be text"),
        ("command: 'a \"b'", "a quote is not closed"),
        ("command: ' '", "command has no words"),
        ("map: [a]", "map must be a mapping"),
        ("map: {num_workers: 3}", "map must be a mapping"),
        ("scratch: 'yes'", "scratch must be true or false"),
        ("output_flag: [--out]", "output_flag must be text"),
        ("samples_per_step: 0", "samples_per_step must be a whole number above 0"),
        ("samples_per_step: true", "samples_per_step must be a whole number above 0"),
        ("command: &a x", "an anchor or alias"),
        ("command: [", "is not YAML (line 1)"),
    ],
)
def test_what_a_file_cannot_say_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.autotune.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_script(path)
    assert message in str(raised.value) and raised.value.advice
    assert "\n" not in str(raised.value)


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match="there is no file"):
        read_script(tmp_path / "none.yaml")


def test_what_is_typed_wins(tmp_path: Path) -> None:
    path = tmp_path / "train.autotune.yaml"
    path.write_text(
        "command: python train.py\noutput_flag: --out\nscratch: true\nsamples_per_step: 8\n"
        'map:\n  "precision:bf16": --amp\n  num_workers: -j {num_workers}\n'
    )
    nothing: dict[str, Any] = {"map": None, "output_flag": None, "scratch": False, "samples_per_step": None}
    found, words = with_script(nothing, [], path)
    assert words == ["python", "train.py"]
    assert found == {
        "map": ["precision:bf16=--amp", "num_workers=-j {num_workers}"],
        "output_flag": "--out",
        "scratch": True,
        "samples_per_step": 8,
    }
    typed = {**nothing, "map": ["precision:fp16=--half"], "output_flag": "-o"}
    found, words = with_script(typed, ["python", "other.py"], path)
    assert words == ["python", "other.py"] and found["output_flag"] == "-o"
    assert found["map"] == ["num_workers=-j {num_workers}", "precision:fp16=--half"]
    path.write_text("scratch: true\n")
    with pytest.raises(UsageError, match="has no command"):
        with_script(nothing, [], path)
