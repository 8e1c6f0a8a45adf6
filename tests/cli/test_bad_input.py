"""Wrong input: one sentence, advice, the documented exit code, and nothing lost or left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.base.files import exclusive_lock
from autotune.base.layout import StudyFiles
from autotune.base.records import StudySpec
from autotune.cli.main import run
from autotune.study.request import write_request
from autotune.workload.data.photographs import photograph

#: A workload of which tests replace parts.
WORKLOAD = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 8


def model(ctx):
    return nn.Linear(4, 2)


def dataset(ctx):
    return TensorDataset(torch.zeros(64, 4))


def optimizer(ctx, m):
    return torch.optim.SGD(m.parameters(), lr=0.01)


def loss(ctx, m, batch):
    return m(batch[0]).sum()
"""


@dataclass(frozen=True)
class Refused:
    """The error message of a command line."""

    sentence: str
    advice: str
    detail: str


class Terminal:
    """Runs command lines in an empty folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.studies = folder / "studies"
        self._capsys = capsys

    def refuses(self, arguments: Sequence[str], code: int) -> Refused:
        """Run a command line that must end with ``code``, check the form of its error message, and return it."""
        assert run(list(arguments)) == code
        captured = self._capsys.readouterr()
        assert captured.out == ""
        # The last lines of a child's output are evidence, and may include the user's own traceback.
        assert not [line for line in captured.err.splitlines() if "Traceback" in line and not line.startswith("  |")]
        # A search reports its progress before it fails. The error comes last.
        before, mark, said = captured.err.partition("autotune: ")
        assert mark and all(line.startswith("[") for line in before.splitlines())
        message, _, detail = said.partition("\n\n")
        sentence, *advice = message.splitlines()
        assert sentence.endswith((".", "!", "?")) and len(sentence) > 10
        assert len(advice) <= 1 and all(line.startswith("  ") for line in advice)
        assert all(line.startswith("  |") for line in detail.splitlines())
        return Refused(sentence, advice[0].strip() if advice else "", detail)

    def prints(self, *arguments: str) -> str:
        """Run a command line that must succeed, and return what it prints."""
        assert run(list(arguments)) == 0
        return self._capsys.readouterr().out

    def left_nothing(self) -> bool:
        """Whether there is no study."""
        return not self.studies.exists() or os.listdir(self.studies) == []

    def study(self, name: str, **asked: Any) -> StudyFiles:
        """Make an unfinished study."""
        files = StudyFiles(self.studies / name)
        files.folder.mkdir(parents=True)
        common = {"name": name, "mark": name, "created": "2026-01-01T00:00:00+00:00", "budget_s": 1.0}
        write_request(files, StudySpec.model_validate({**common, "model": "resnet18", "data": "synthetic", **asked}))
        return files


@pytest.fixture
def terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.chdir(tmp_path)
    return Terminal(tmp_path, capsys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model resnet5O", "resnet50"),
        ("--model nothing-like-it-at-all", "unknown model"),
        ("--model missing.py", "missing.py"),
        ("--model ./", "folder"),
        ("--model package.module:", "package.module:NAME"),
        ("--set batchsize=8", "batch_size"),
        ("--fix turbo=1", "unknown knob"),
        ("--baseline precison=fp32", "precision"),
        ("--set precision=fp8", "fp32"),
        ("--set precision=fp32,fp8", "fp8"),
        ("--fix compile_mode=on", "max-autotune"),
        ("--baseline optimizer_impl=slow", "for-loop"),
        ("--fix batch_size=0", "at least 1"),
        ("--fix batch_size=-8", "at least 1"),
        (f"--fix batch_size={10**400}", "at most 1073741824"),
        (f"--set num_workers=4,{10**30}", "at most 4096"),
        (f"--seed {2**64}", "at most 9223372036854775807"),
        ("--image-size 100000", "at most 16384"),
        (f"--batch-size {10**30}", "at most 1073741824"),
        (f"--trials {10**30}", "at most"),
        ("--fix batch_size=many", "whole number"),
        ("--fix batch_size=", "NAME=VALUE"),
        ("--set batch_size=", "NAME=VALUE"),
        ("--set batch_size=16,,32", "missing between commas"),
        ("--set batch_size=16,", "missing between commas"),
        ("--set batch_size", "NAME=VALUE"),
        ("--set =16", "NAME=VALUE"),
        ("--set num_workers=1 --set num_workers=2", "twice"),
        ("--set num_workers=1 --fix num_workers=1", "both"),
        ("--fix num_workers=-1", "at least 0"),
        ("--batch-size 8 --baseline batch_size=16", "contradict"),
        ("--arg depth", "NAME=VALUE"),
        ("--arg architecture=resnet34", "two models"),
        ("--budget 10x", "90s, 10m or 1h30m"),
        ("--global-batch 48 --batch-size 32", "not a multiple"),
        ("--global-batch 64 --set batch_size=32,64", "fixes the batch size"),
        ("--global-batch 64 --batch-size 32 --baseline gradient_accumulation=2", "both say what is run today"),
        ("--budget 0s", "above zero"),
        ("--budget=-5m", "90s, 10m or 1h30m"),
        (f"--budget {'9' * 400}", "at most ten thousand years"),
        (f"--memory-limit {'9' * 400}GiB", "more than any machine has"),
        ("--budget soon", "90s, 10m or 1h30m"),
        ("--memory-limit lots", "6GiB"),
        ("--memory-limit 0", "above zero"),
        ("--objective througput", "throughput"),
        ("--objective missing.py", "missing.py"),
        ("--sampler tree", "tpe"),
        ("--device gpu", "cuda:N"),
        ("--device cuda:one", "cuda:N"),
        ("--study ../elsewhere", "letters"),
        ("--study .hidden", "letters"),
        ("--study ../elsewhere --dry-run", "letters"),
        ("--replay nothing.jsonl", "exclude each other"),
    ],
)
def test_a_search_that_cannot_be_understood(terminal: Terminal, options: str, said: str) -> None:
    model = [] if "--model" in options else ["--model", "resnet18"]
    refused = terminal.refuses(["search", *model, *options.split()], 2)
    assert said in f"{refused.sentence} {refused.advice}"
    assert terminal.left_nothing()


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "serch --model resnet18",
        "search --model",
        "search --model resnet18 --turbo",
        "search --model resnet18 --batch-size 0",
        "search --model resnet18 --image-size wide",
        "search --model resnet18 --trials 0",
        "search --model resnet18 --seed x",
        "train --profile p.yaml --steps 2",
    ],
)
def test_command_lines_that_do_not_parse(
    terminal: Terminal, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split()) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "Usage: autotune" in captured.err + captured.out or "Error: " in captured.err
    assert terminal.left_nothing()


@pytest.mark.parametrize("made", ["nothing", "a file"])
def test_a_data_folder_that_is_not_there(terminal: Terminal, made: str) -> None:
    if made == "a file":
        (terminal.folder / "photos").write_text("")
    refused = terminal.refuses(["search", "--model", "resnet18", "--data", "photos"], 4)
    assert "photos" in refused.sentence and "--data" in refused.advice
    assert terminal.left_nothing()


def test_a_studies_folder_that_cannot_be_written(terminal: Terminal) -> None:
    (terminal.folder / "file").write_text("")
    for place in ("file", "file/below"):
        command = ["search", "--model", "resnet18", "--studies-dir", place]
        refused = terminal.refuses(command, 5)
        assert place in refused.sentence and "--studies-dir" in refused.advice
    assert (terminal.folder / "file").read_text() == ""


def test_a_name_that_is_taken_points_to_resume(terminal: Terminal) -> None:
    terminal.study("mine")
    refused = terminal.refuses(["search", "--model", "resnet18", "--study", "mine"], 2)
    assert "exists already" in refused.sentence and "autotune resume mine" in refused.advice


@pytest.mark.parametrize("command", ["resume", "show", "export"])
def test_an_unknown_study(terminal: Terminal, command: str) -> None:
    refused = terminal.refuses([command, "resnet18-1"], 2)
    assert "resnet18-1" in refused.sentence and "no study yet" in refused.advice
    terminal.study("resnet18-2")
    assert "resnet18-2" in terminal.refuses([command, "resnet18-1"], 2).advice


def test_exporting_what_is_not_finished(terminal: Terminal) -> None:
    terminal.study("mine")
    refused = terminal.refuses(["export", "mine", "-o", "profile.yaml"], 2)
    assert "no profile yet" in refused.sentence and "autotune resume mine" in refused.advice
    assert not Path("profile.yaml").exists()


def test_a_study_that_is_running(terminal: Terminal) -> None:
    files = terminal.study("mine")
    with exclusive_lock(files.lock) as free:
        assert free
        refused = terminal.refuses(["resume", "mine"], 2)
    assert "running already" in refused.sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "study.yaml"),
        ("model: [", "study.yaml"),
        ("- 1\n", "study.yaml"),
        ("surprise: 1\n", "study.yaml"),
        ("&a [*a]\n", "study.yaml"),
    ],
)
def test_a_request_that_was_changed_by_hand(terminal: Terminal, text: str, said: str) -> None:
    files = terminal.study("mine")
    files.request.write_text(text)
    assert said in terminal.refuses(["resume", "mine"], 2).sentence
    assert files.request.read_text() == text


def test_a_request_that_is_no_file_is_not_read(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    files = terminal.study("mine")
    files.request.unlink()
    os.mkfifo(files.request)
    assert run(["studies"]) == 0 and "unreadable" in capsys.readouterr().out
    assert "unknown study" in terminal.refuses(["resume", "mine"], 2).sentence


LONG = "x" * 256


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *[([command, LONG], 2) for command in ("resume", "show", "export", "report")],
        (["search", "--model", LONG], 2),
        (["search", "--model", f"{LONG}.py"], 2),
        (["search", "--model", "resnet18", "--objective", f"{LONG}.py"], 2),
        (["search", "--model", "resnet18", "--study", LONG], 2),
        (["search", "--model", "resnet18", "--data", LONG], 4),
        (["search", "--model", "resnet18", "--studies-dir", LONG], 5),
    ],
    ids=lambda value: "-".join(word.replace(LONG, "LONG") for word in value) if isinstance(value, list) else None,
)
def test_a_name_that_is_longer_than_the_file_system_takes(terminal: Terminal, arguments: list[str], code: int) -> None:
    assert LONG in terminal.refuses(arguments, code).sentence


@pytest.mark.parametrize("place", ["--studies-dir", "--model", "--data", "resume"])
def test_a_folder_whose_name_is_not_utf_8(terminal: Terminal, place: str) -> None:
    folder = Path(os.fsdecode(b"st\xe9"))
    terminal.study("mine").folder.rename(folder)
    (folder / "mine.py").touch()
    given = {"--model": str(folder / "mine.py")}.get(place, str(folder))
    asked = ["resume", given] if place == "resume" else ["search", "--model", "resnet18", place, given]
    refused = terminal.refuses(asked, 2)
    assert (
        "st\ufffd" in refused.sentence and "not valid UTF-8" in refused.sentence and "rename" in refused.advice.lower()
    )


def test_a_request_of_a_newer_version(terminal: Terminal) -> None:
    files = terminal.study("mine", model="a_model_of_the_future")
    newer = files.request.read_text().replace('"schema_version": 1', '"schema_version": 2')
    assert '"schema_version": 2' in newer
    files.request.write_text(newer)
    refused = terminal.refuses(["resume", "mine"], 2)
    assert "newer" in f"{refused.sentence} {refused.advice}"


def test_a_damaged_count_of_the_budget_is_kept(terminal: Terminal) -> None:
    files = terminal.study("mine")
    files.spent.write_text("{")
    assert "spent.json" in terminal.refuses(["resume", "mine"], 5).sentence
    assert files.spent.read_text() == "{"


@pytest.mark.parametrize("name", ["outcome.json", "study.yaml", "study.db"])
def test_one_damaged_study_does_not_hide_the_others(
    terminal: Terminal, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.study("whole")
    (terminal.study("broken").folder / name).write_text('{"half": ')
    assert run(["studies", "--json"]) == 0
    listed = {s["study"]: s["state"] for s in json.loads(capsys.readouterr().out)["studies"]}
    assert listed == {"whole": "unfinished", "broken": "unreadable"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema_version: 99\n", "newer"),
        ("schema_version: 1\nsurprise: 1\n", "unknown key surprise"),
        ("schema_version: 1\n", "missing"),
        ("half: [", "YAML"),
        ("", "no profile"),
    ],
)
def test_a_profile_that_is_none(terminal: Terminal, text: str, said: str) -> None:
    Path("p.yaml").write_text(text)
    refused = terminal.refuses(["train", "--profile", "p.yaml"], 2)
    assert said in refused.sentence and "p.yaml" in refused.sentence and refused.advice


def test_a_profile_that_is_not_there(terminal: Terminal) -> None:
    assert "p.yaml" in terminal.refuses(["train", "--profile", "p.yaml"], 2).sentence


class TestDebug:
    def test_shows_the_traceback_and_keeps_the_exit_code(self, tmp_path: Path) -> None:
        command = [sys.executable, "-P", "-m", "autotune", "--debug", "search", "--model", "resnet5O"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert "Traceback (most recent call last)" in done.stderr and "unknown model 'resnet5O'" in done.stderr
        assert done.returncode == 2 and done.stdout == ""


@pytest.mark.usefixtures("searching_here")
class TestWorkloadsThatFail:
    """Each of these tests runs a real probe, and some a real baseline, by one launcher for all of them."""

    def search(self, terminal: Terminal, text: str, code: int = 4, *options: str) -> Refused:
        Path("my_broken_net.py").write_text(text)
        return terminal.refuses(["search", "--model", "my_broken_net.py", "--budget", "20s", *options], code)

    @pytest.mark.slow
    def test_one_that_raises_on_import(self, terminal: Terminal) -> None:
        refused = self.search(terminal, "import torch\n\nhalf = torch.no_such_thing\n")
        assert "no_such_thing" in refused.sentence and "my_broken_net" in refused.sentence
        assert 'my_broken_net.py", line 3' in refused.detail
        # A search that fails before its first trial leaves no study.
        assert terminal.left_nothing()

    def test_one_that_crashes_on_import(self, terminal: Terminal) -> None:
        refused = self.search(terminal, "import os\n\nos.kill(os.getpid(), 11)\n")
        assert "SIGSEGV" in refused.sentence and "Segmentation fault" in refused.detail
        assert terminal.left_nothing() and "stderr.log" not in refused.advice

    def test_one_that_lacks_its_functions(self, terminal: Terminal) -> None:
        refused = self.search(terminal, "def model(ctx): ...\n")
        assert "defines no dataset, optimizer, loss" in refused.sentence and refused.advice

    def test_a_model_that_is_none(self, terminal: Terminal) -> None:
        refused = self.search(terminal, WORKLOAD.replace("return nn.Linear(4, 2)", "return None"))
        assert "model(ctx)" in refused.sentence

    def test_a_loss_that_is_no_tensor_fails_the_baseline(self, terminal: Terminal) -> None:
        text = WORKLOAD.replace("return m(batch[0]).sum()", "print('last words')\n    return 3.0")
        refused = self.search(terminal, text)
        assert "baseline" in refused.sentence and "user_error" in refused.sentence
        assert refused.detail
        # Every command that reads the study reports the failure, until the study is resumed with a repaired file.
        assert terminal.prints("studies").count("failed") == 1
        report = " ".join(terminal.prints("report", "my_broken_net-1").split())
        assert "The search ended with an error, so nothing is promised: The baseline ended as user_error" in report
        Path("my_broken_net.py").write_text(WORKLOAD)
        assert run(["resume", "my_broken_net-1"]) == 6  # changed code is another workload

    def test_an_empty_data_set(self, terminal: Terminal) -> None:
        assert "empty" in self.search(terminal, WORKLOAD.replace("zeros(64, 4)", "zeros(0, 4)")).sentence

    def test_an_empty_data_folder(self, terminal: Terminal) -> None:
        (terminal.folder / "photos").mkdir()
        refused = terminal.refuses(["search", "--model", "resnet18", "--data", "photos", "--image-size", "32"], 4)
        assert "photos" in refused.sentence and refused.advice
        assert terminal.left_nothing()

    @pytest.mark.slow
    @pytest.mark.parametrize("broken", [b"no image at all", None], ids=["garbage", "cut short"])
    def test_a_corrupt_jpeg_among_good_ones_is_named(self, terminal: Terminal, broken: bytes | None) -> None:
        folder = terminal.folder / "photos" / "cats"
        folder.mkdir(parents=True)
        for index in range(7):
            (folder / f"{index}.jpg").write_bytes(photograph(0, index))
        (folder / "bad.jpg").write_bytes(broken or photograph(0, 7)[:20_000])
        # Every batch of eight contains the bad sample.
        options = ["--data", "photos", "--image-size", "32", "--batch-size", "8", "--budget", "20s"]
        refused = terminal.refuses(["search", "--model", "resnet18", *options], 4)
        assert "bad.jpg" in refused.sentence and "cannot be decoded" in refused.sentence

    @pytest.mark.parametrize("data", ["photos", "synthetic"])
    def test_data_that_it_does_not_look_at(self, terminal: Terminal, data: str) -> None:
        (terminal.folder / "photos").mkdir()
        refused = self.search(terminal, WORKLOAD, 2, "--data", data)
        assert refused.sentence.startswith("my_broken_net makes its own data: ")
        assert terminal.left_nothing()

    def test_a_batch_that_has_no_equal_parts(self, terminal: Terminal) -> None:
        refused = self.search(terminal, WORKLOAD, 2, "--global-batch", "48", "--fix", "gradient_accumulation=5")
        assert "gradient_accumulation=5" in refused.sentence and "equal parts" in refused.sentence

    def test_an_argument_that_it_does_not_declare(self, terminal: Terminal) -> None:
        refused = self.search(terminal, WORKLOAD + "ARGS = {'depth': '3'}\n", 2, "--arg", "dept=4")
        assert "dept" in refused.sentence and "depth" in refused.advice
        assert terminal.left_nothing()

    def test_values_that_this_machine_cannot_run(self, terminal: Terminal) -> None:
        refused = self.search(terminal, WORKLOAD, 2, "--device", "cpu", "--set", "precision=fp16")
        assert "fp16" in refused.sentence and "CUDA" in f"{refused.sentence} {refused.advice}"
        assert terminal.left_nothing()
