"""The formats of ``autotune report``, and the page that every finished search writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from autotune.base.layout import StudyFiles
from autotune.cli.main import run
from autotune.report import full_report

from .conftest import Finished

#: The start of a report in each format. The title begins with the workload, here the stem of a file.
BEGINS = {
    "json": '{"schema_version": 1, ',
    "html": "<!doctype html>\n",
    "markdown": "# my_tiny_net on ",
    "terminal": "my_tiny_net",
}


@pytest.fixture
def study(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyFiles:
    """A finished study below the current folder, which the test may change."""
    assert finished.done.returncode == 0, finished.done.stderr
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "studies" / "my_tiny_net-1"
    shutil.copytree(finished.study, copy)
    # The outcome has the profile's path in the folder in which the search ran.
    outcome = copy / "outcome.json"
    outcome.write_text(outcome.read_text().replace(str(finished.study), str(copy)))
    return StudyFiles(copy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["-o", "x.html"], "html"),
        (["-o", "x.HTM"], "html"),
        (["-o", "x.md"], "markdown"),
        (["-o", "x.txt"], "terminal"),
        (["-o", "x"], "markdown"),
        (["-o", "x.json"], "json"),
        (["-o", "x.html", "--format", "markdown"], "markdown"),
        (["-o", "x.md", "--format", "html"], "html"),
        (["-o", "x.html", "--format", "terminal"], "terminal"),
    ],
)
def test_a_file_s_ending_chooses_the_form_unless_it_is_named(
    study: StudyFiles, options: list[str], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", study.name, *options]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"wrote {options[1]}\n")
    assert Path(options[1]).read_text().startswith(BEGINS[form])


@pytest.mark.parametrize("form", [None, *BEGINS])
def test_without_a_file_it_goes_to_stdout(
    study: StudyFiles, form: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", study.name, *(["--format", form] if form else [])]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith(BEGINS[form or "terminal"])


def test_a_form_that_there_is_not(study: StudyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", study.name, "--format", "pdf", "-o", "x.html"]) == 2
    assert "unknown format 'pdf'" in capsys.readouterr().err and not Path("x.html").exists()


def test_a_search_leaves_its_report(finished: Finished) -> None:
    report = StudyFiles(finished.study).report
    assert report == finished.study / "report.html"
    done = finished.project.typed("report", "my_tiny_net-1", "--format", "html")
    assert report.read_text() == done.stdout


def test_resume_writes_a_report_that_is_missing_and_no_other(
    study: StudyFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = study.report.read_text()
    study.report.write_text("mine")
    assert run(["resume", study.name]) == 0
    assert study.report.read_text() == "mine"
    study.report.unlink()
    assert run(["resume", study.name]) == 0
    assert study.report.read_text() == kept
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("Profile: studies/my_tiny_net-1/profile.yaml")
    assert lines[place + 1] == "Report: studies/my_tiny_net-1/report.html"


def test_a_report_that_cannot_be_written_spoils_nothing(study: StudyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    profile = study.profile.read_bytes()
    study.report.unlink()
    study.report.mkdir()
    assert run(["resume", study.name]) == 0
    captured = capsys.readouterr()
    assert "the search is done, but the report could not be written: cannot write " in captured.err
    assert "Profile: studies/my_tiny_net-1/profile.yaml" in captured.out and "Report:" not in captured.out
    assert study.profile.read_bytes() == profile


def test_nor_does_one_that_cannot_be_told(
    study: StudyFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(full_report, "to_html", fails)
    study.report.unlink()
    assert run(["resume", study.name, "--json"]) == 0
    captured = capsys.readouterr()
    assert "could not be written: ZeroDivisionError" in captured.err and captured.out.startswith("{")
    assert not study.report.exists()
