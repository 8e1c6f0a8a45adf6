"""`autotune export`: the formats, formats of the user's own, and what is overwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli.main import run
from autotune.launcher.watch import is_alive
from autotune.profile.export import FORMATS, own

from ..process.alive import wait_until  # noqa: TID252
from .conftest import Finished

STUDY = "my_tiny_net-1"
Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def export(finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Export:
    """Runs the command in the project; returns exit code, stdout and stderr."""
    monkeypatch.chdir(finished.project.folder)

    def exporting(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return (run(["export", *words]), *capsys.readouterr())

    return exporting


def test_the_list_says_what_each_format_is_for(export: Export) -> None:
    code, out, _ = export("--list")
    shown = " ".join(out.split())
    assert code == 0 and all(f" {name} " in f" {shown} " for name in FORMATS)
    assert "accelerate launch --config_file FILE train.py" in shown


def test_every_format_of_a_real_study(export: Export, finished: Finished) -> None:
    best = json.loads(finished.done.stdout)["best"]["config"]
    for name in FORMATS:
        code, out, err = export(STUDY, "--format", name)
        if "bf16" in best.values() and name == "torchvision":
            assert code == 2 and out == "" and "no bf16" in err
            continue
        assert code == 0 and out.endswith("\n") and not re.search(r"\bfault", err)
        assert "workload.pause" in out + err or "AUTOTUNE_WORKLOAD_PAUSE" in out or "--no-workload-pause" in out


def test_a_profile_holds_the_learning_rate(export: Export) -> None:
    found = json.loads(export(STUDY, "--format", "json")[1])
    assert found["gives"]["learning_rate"] == found["baseline"]["learning_rate"] == 0.01


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--list"),
        (["nowhere"], "nowhere"),
        ([STUDY, "--format", "accelerat"], "did you mean accelerate"),
        ([STUDY, "--map", "batch_size=-b {batch_size}"], "it is for the formats args and hydra"),
        ([STUDY, "--format", "args", "--map", "batch=-b"], "unknown knob 'batch'"),
        ([STUDY, "--format", "args", "--map", "batch_size=-b"], "no place for its value"),
        ([STUDY, "-o", "flags.txt"], "choose with --format"),
        ([STUDY, "--format", "nowhere.py"], "there is no file nowhere.py"),
        ([STUDY, "--format", "not a module:f"], "write it as FILE.py or package.module:NAME"),
    ],
)
def test_what_is_refused(export: Export, words: list[str], said: str) -> None:
    code, out, err = export(*words)
    assert code == 2 and out == "" and said.lower() in " ".join(err.split()).lower()


def test_maps_are_words_of_a_script(export: Export) -> None:
    code, out, err = export(STUDY, "--format", "args", "--map", "batch_size=-b {batch_size}")
    assert code == 0 and out.startswith("-b ") and "num_workers=0 has no words" in err


def test_endings_choose_the_format(export: Export) -> None:
    for file, begins in (
        ("fast.py", "# autotune export: python"),
        (".env", "export "),
        ("p.json", "{"),
        ("p", "# auto"),
    ):
        assert export(STUDY, "-o", file)[0] == 0
        assert Path(file).read_text().startswith(begins)
        # An earlier export is overwritten, whatever its format.
        assert export(STUDY, "--format", "lightning", "-o", file)[0] == 0
        Path(file).unlink()


def test_force_overwrites_anything_but_files_of_a_study(export: Export, finished: Finished) -> None:
    mine = Path("train_mine.py")
    mine.write_text("import torch\n")
    code, _, err = export(STUDY, "-o", str(mine))
    assert code == 2 and "--force" in err and mine.read_text() == "import torch\n"
    assert export(STUDY, "-o", str(mine), "--force")[0] == 0
    assert mine.read_text().startswith("# autotune export: python")
    mine.unlink()
    spec = next(finished.study.glob("trials/*/spec.json"))
    before = spec.read_bytes()
    link = Path("link.yaml")
    link.symlink_to(finished.study / "profile.yaml")
    for file in (spec, finished.study / "profile.yaml", link):
        code, _, err = export(STUDY, "--format", "yaml", "-o", str(file), "--force")
        assert code == 2 and "belongs to a study" in err
    link.unlink()
    assert spec.read_bytes() == before


GOOD = "def export(profile):\n    print('aside')\n    return f\"batch={profile['configuration']['batch_size']}\"\n"


def test_a_format_of_ones_own(export: Export) -> None:
    Path("ours_format.py").write_text(GOOD)
    Path("own_formats").mkdir(exist_ok=True)
    Path("own_formats/__init__.py").touch()
    Path("own_formats/made.py").write_text(GOOD.replace("export(", "mine("))
    batch = json.loads(export(STUDY, "--format", "json")[1])["configuration"]["batch_size"]
    for source in ("ours_format.py", "own_formats.made:mine"):
        code, out, _ = export(STUDY, "--format", source)
        assert (code, out) == (0, f"batch={batch}\n")
    assert export(STUDY, "--format", "ours_format.py", "-o", "made.txt")[0] == 0
    assert Path("made.txt").read_text() == f"batch={batch}\n"
    # What such a format has written is not known again.
    assert export(STUDY, "--format", "ours_format.py", "-o", "made.txt")[0] == 2
    assert export(STUDY, "--format", "ours_format.py", "-o", "made.txt", "--force")[0] == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def export(profile):\n    return profile['nothing']\n", "KeyError: 'nothing'"),
        ("def export(profile):\n    return 3\n", "it returned int, not text"),
        ("def export(profile):\n    return '\\ud800'\n", "UnicodeEncodeError"),
        ("def export(profile):\n    raise SystemExit(3)\n", "SystemExit: 3"),
        ("import os\ndef export(profile):\n    os._exit(0)\n", "ended without an answer"),
        ("def other(profile):\n    return ''\n", "has no attribute 'export'"),
        ("def export(profile:\n", "SyntaxError"),
    ],
)
def test_a_format_of_ones_own_that_fails(export: Export, source: str, said: str) -> None:
    Path("failing_format.py").write_text(source)
    code, out, err = export(STUDY, "--format", "failing_format.py", "-o", "never.txt")
    assert code == 2 and out == "" and said in err and "export(profile: dict) -> str" in err
    assert not Path("never.txt").exists()


def test_a_format_of_ones_own_that_hangs_is_ended_with_all_that_it_started(
    export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "EXPORT_S", 2.0)
    Path("hanging_format.py").write_text(
        "import subprocess, time\ndef export(profile):\n    sleeping = subprocess.Popen(['sleep', '1000'])\n"
        "    open('pid', 'w').write(str(sleeping.pid))\n    time.sleep(1000)\n"
    )
    code, out, err = export(STUDY, "--format", "hanging_format.py")
    assert code == 2 and out == "" and "gave no text within 2 s" in err
    pid = int(Path("pid").read_text())
    wait_until(lambda: not is_alive(pid))
