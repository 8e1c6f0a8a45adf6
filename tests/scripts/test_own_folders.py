"""Where launches of a script write: ``--output-flag`` and ``--scratch``, and what is left behind without them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.base.layout import StudyFiles
from autotune.child.script_folders import elsewhere, importing
from autotune.search import subject
from autotune.search.subject import left_files as left_in

from .conftest import SCRIPTS, Ran, Runner

SCRIPT = (sys.executable, str(SCRIPTS / "flags.py"))

#: What asks for the space of a script launches it.
pytestmark = pytest.mark.usefixtures("searching_here")


def space(run: Runner, *options: str, command: tuple[str, ...]) -> Ran:
    return run.typed("space", "--json", *options, "--", *command)


@pytest.fixture
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file outside of the folder in which scripts run, where they leave something."""
    return tmp_path_factory.mktemp("log") / "log"


def told(log: Path, ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.stderr
    (line,) = log.read_text().splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_a_launch_gets_a_folder_to_write_to_which_is_removed(run: Runner, log: Path) -> None:
    found = told(log, space(run, "--output-flag", "--out", command=(*SCRIPT, "{flags}", "--log", str(log))))
    flag, folder, *rest = found["words"]
    assert flag == "--out" and rest == ["--log", str(log)]
    # The script would have failed without it.
    assert not Path(folder).exists() and os.path.isabs(folder)
    assert found["folder"] == str(run.folder)


@pytest.mark.slow
def test_a_launch_runs_in_a_scratch_folder_of_its_own_which_is_removed(run: Runner, log: Path) -> None:
    (run.folder / "data").mkdir()
    (run.folder / "train.py").write_text((SCRIPTS / "flags.py").read_text())
    found = told(log, space(run, "--scratch", command=(sys.executable, "train.py", "--data=data", "--log", str(log))))
    assert found["words"] == [f"--data={run.folder / 'data'}", "--log", str(log)]
    assert found["folder"] != str(run.folder) and found["there"] == [] and not Path(found["folder"]).exists()


@pytest.mark.slow
def test_modules_of_the_users_folder_are_found(run: Runner, log: Path) -> None:
    (run.folder / "training.py").write_text((SCRIPTS / "flags.py").read_text())
    found = told(log, space(run, "--scratch", command=(sys.executable, "-m", "training", "--log", str(log))))
    assert found["there"] == []


def test_words_mean_elsewhere_what_they_mean_here(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "a b").touch()
    here = str(tmp_path)
    words = ["python", "a b", "--x=a b", "--x", "none", "--y=none", "/a", "python", "{batch_size}", ""]
    full = os.path.join(here, "a b")
    assert elsewhere(words, here) == [
        "python", full, f"--x={full}", "--x", "none", "--y=none", "/a", f"{here}/python", "{batch_size}", "",
    ]  # fmt: skip
    assert elsewhere(["./python"], here) == [f"{here}/./python"]
    assert importing({}, ["python", "t.py"], here) == {}
    # To Python, an empty entry is the current folder.
    found = importing({"PYTHONPATH": "lib:/b:"}, ["python", "-m", "t"], here)
    assert found == {"PYTHONPATH": f"{here}:{here}/lib:/b:{here}"}
    assert importing({"PYTHONPATH": ":/src"}, ["python", "t.py"], here) == {"PYTHONPATH": f"{here}:/src"}
    assert importing({"PYTHONPATH": ""}, ["python", "t.py"], here) == {"PYTHONPATH": ""}


def test_a_module_is_no_folder(tmp_path: Path) -> None:
    """A package that is run by its name lies in a folder of that name."""
    (tmp_path / "train").mkdir()
    here = f"{tmp_path}/train"
    assert elsewhere(["python", "-u", "-m", "train", "train"], str(tmp_path)) == ["python", "-u", "-m", "train", here]
    assert elsewhere(["torchrun", "-m", "train"], str(tmp_path)) == ["torchrun", "-m", "train"]
    launched = ["python", "-m", "torch.distributed.run", "--standalone", "-m", "train"]
    assert elsewhere(launched, str(tmp_path)) == launched
    # It is an option of the script's own.
    assert elsewhere(["mytrain", "-m", "train"], str(tmp_path)) == ["mytrain", "-m", here]
    assert elsewhere(["python", "t.py", "-m", "train"], str(tmp_path)) == ["python", "t.py", "-m", here]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "resnet18", "--scratch"), "--scratch is for training scripts"),
        (("--model", "resnet18", "--output-flag", "--out"), "--output-flag is for training scripts"),
        (("--output-flag", " ", "--", *SCRIPT), "--output-flag has no words"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(run: Runner, words: tuple[str, ...], message: str) -> None:
    ran = run.typed("space", *words)
    assert ran.code == 2 and message in ran.stderr and "Traceback" not in ran.stderr


@pytest.fixture
def study(tmp_path: Path) -> StudyFiles:
    """A study that was begun after some files were written."""
    files = StudyFiles(tmp_path / "found" / "train-1")
    files.folder.mkdir(parents=True)
    (tmp_path / "old.pt").touch()
    files.request.touch()
    os.utime(tmp_path / "old.pt", ns=(0, files.request.stat().st_mtime_ns - 1))
    return files


def write(path: Path, files: StudyFiles, size: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, ns=(0, files.request.stat().st_mtime_ns + 1))


def test_nothing_is_said_where_nothing_was_left(tmp_path: Path, study: StudyFiles) -> None:
    for name in ("found/train-1/log", ".git/index", "studies/x", "__pycache__/a.pyc", "env/pyvenv.cfg", "env/lib/a"):
        write(tmp_path / name, study)
    assert left_in(tmp_path, study) is None


def test_what_is_new_or_changed_is_counted_and_the_largest_named(tmp_path: Path, study: StudyFiles) -> None:
    write(tmp_path / "old.pt", study, 10)
    for i in range(4):
        write(tmp_path / "runs" / f"{i}.pt", study, 100 + i)
    found = left_in(tmp_path, study)
    assert found is not None
    assert (found.number, found.size_bytes) == (5, 416)
    assert found.names == ("runs/3.pt", "runs/2.pt", "runs/1.pt")


def test_a_huge_folder_is_not_looked_through(
    tmp_path: Path, study: StudyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "MOST", 3)
    for i in range(9):
        write(tmp_path / f"a{i}", study)
    found = left_in(tmp_path, study)
    assert found is not None and found.number == 3
