"""The commands that read a finished study: show, studies, report, export and train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml as pyyaml

from autotune.cli.main import run
from autotune.formatting import rate_text
from autotune.space import key

from .conftest import STATUSES, Finished


def test_show(finished: Finished) -> None:
    found = finished.project.json("show", "my_tiny_net-1")
    outcome = json.loads(finished.done.stdout)
    assert found["study"] == "my_tiny_net-1"
    assert [t["number"] for t in found["trials"]] == list(range(sum(outcome["trials"].values())))
    wanted = {"number", "config", "status", "phase", "cause", "measurement", "phase_seconds"}
    for trial in found["trials"]:
        assert trial.keys() >= wanted and trial["status"] in STATUSES
        if trial["status"] == "complete":
            measurement = trial["measurement"]
            # Every step of the launch is recorded, and the rates follow from the steps.
            assert len(measurement["step_s"]) == sum(w["steps"] for w in measurement["windows"]) > 0
            assert measurement["measured_s"] == pytest.approx(sum(w["seconds"] for w in measurement["windows"]))
            assert {"load", "build", "compile", "warmup", "measure"} <= trial["phase_seconds"].keys()
    assert found["trials"][0]["config"] == outcome["baseline"]["config"]
    assert len({key(t["config"]) for t in found["trials"]}) == len(found["trials"])


def test_show_as_a_table(finished: Finished) -> None:
    done = finished.project.run("show", "my_tiny_net-1")
    assert done.returncode == 0 and "complete" in done.stdout and "\x1b" not in done.stdout


def test_studies(finished: Finished) -> None:
    (row,) = finished.project.json("studies")["studies"]
    assert (row["study"], row["state"]) == ("my_tiny_net-1", "done")
    assert row["speedup"] == json.loads(finished.done.stdout)["best"]["speedup"]
    assert "my_tiny_net-1" in finished.project.run("studies").stdout


def test_export(finished: Finished) -> None:
    project = finished.project
    done = project.run("export", "my_tiny_net-1", "-o", "exported.yaml")
    assert done.returncode == 0 and done.stdout == ""
    exported = (project.folder / "exported.yaml").read_text()
    assert project.run("export", "my_tiny_net-1").stdout == exported
    outcome = json.loads(finished.done.stdout)
    data = pyyaml.safe_load(exported)
    assert data["configuration"] == outcome["best"]["config"]
    assert data["baseline"]["configuration"] == outcome["baseline"]["config"]
    as_json = json.loads(project.run("export", "my_tiny_net-1", "--format", "json").stdout)
    assert as_json["configuration"] == data["configuration"]


def test_report(finished: Finished) -> None:
    done = finished.project.run("report", "my_tiny_net-1")
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    # Into a pipe, all but what is to be copied is a hundred columns wide.
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if "autotune " not in line and "/" not in line)
    best = json.loads(finished.done.stdout)["best"]
    for part in (
        "Verdict",
        "Where the time went",
        rate_text(best["samples_per_second"], best["ci95"]),
        "cpu_model",
    ):
        assert part in done.stdout
    written = finished.project.run("report", "my_tiny_net-1", "-o", "report.md")
    assert (written.returncode, written.stdout, written.stderr) == (0, "", "wrote report.md\n")
    markdown = finished.project.run("report", "my_tiny_net-1", "--format", "markdown").stdout
    assert (finished.project.folder / "report.md").read_text() == markdown
    assert markdown.splitlines()[0].endswith(": study my_tiny_net-1")
    assert markdown.count("\n## ") >= 8


def test_report_as_json_has_the_same_figures(finished: Finished) -> None:
    found = finished.project.json("report", "my_tiny_net-1")
    assert found["state"] == "done" and found["outcome"] == json.loads(finished.done.stdout)
    shown = " ".join(finished.project.run("report", "my_tiny_net-1").stdout.split())
    assert [s["title"] for s in found["sections"] if s["title"] not in shown] == []
    parts = [part for section in found["sections"] for part in section["parts"]]
    tables = [part for part in parts if part["kind"] == "table"]
    assert all(len(row) == len(table["columns"]) for table in tables for row in table["rows"])
    # Whole cells: in the columns of text they may be wrapped.
    cells = {cell for table in tables for row in table["rows"] for cell in row if " " not in cell}
    assert len(cells) > 5 and all(cell in shown for cell in cells)
    assert all(part["text"] in shown for part in parts if part["kind"] == "paragraph")


def test_report_as_plain_text_in_a_file(
    finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.project.folder)
    assert run(["report", "my_tiny_net-1", "--format", "terminal", "-o", "report.txt"]) == 0
    assert capsys.readouterr().out == ""
    text = (finished.project.folder / "report.txt").read_text()
    assert "Verdict ──" in text and "|" not in text.split("Where it holds")[0] and "\x1b" not in text


@pytest.mark.parametrize("command", ["export", "report"])
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--format", "xml"], 2),
        (["-o", "x.toml"], 2),
        (["-o", "r.pdf"], 2),
        (["-o", "no/such/folder/file"], 2),
        (["-o", "."], 5),
    ],
)
def test_writing_to_where_it_cannot_go(
    finished: Finished,
    command: str,
    options: list[str],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(finished.project.folder)
    assert run([command, "my_tiny_net-1", *options]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("autotune: ") and "fault" not in captured.err


def test_an_export_overwrites_nothing_but_an_export(
    finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.project.folder)
    Path("notes.yaml").write_text("mine: true\n")
    Path("empty.yaml").touch()
    database = finished.study / "study.db"
    was = database.read_bytes()
    assert run(["export", "my_tiny_net-1", "-o", str(database)]) == 2 and database.read_bytes() == was
    capsys.readouterr()
    for taken in (Path("notes.yaml"), Path("notes.yaml").absolute(), finished.study / "profile.yaml"):
        before = taken.read_bytes()
        assert run(["export", "my_tiny_net-1", "-o", str(taken)]) == 2
        assert str(taken) in capsys.readouterr().err and taken.read_bytes() == before
    for _ in range(2):
        assert run(["export", "my_tiny_net-1", "-o", "empty.yaml"]) == 0
        assert run(["export", "my_tiny_net-1", "-o", "again.json"]) == 0
    assert json.loads(Path("again.json").read_text())["configuration"]


def test_train(finished: Finished) -> None:
    profile = str(finished.study / "profile.yaml")
    found = finished.project.json("train", "--profile", profile, "--steps", "20")
    promised = json.loads(finished.done.stdout)["best"]["samples_per_second"]
    assert found["steps"] >= 20 and 0 < found["counted_steps"] < found["steps"]
    assert found["promised_samples_per_second"] == pytest.approx(promised, rel=1e-5)
    ratio = found["samples_per_second"] / found["promised_samples_per_second"]
    # On a busy machine there may be no comparison, but then there is a reason.
    assert found["ratio"] == (None if found["incomparable"] else pytest.approx(ratio))
    assert found["samples_per_second"] > 0 and 0 < found["last_loss"] < 10


def test_resuming_what_is_done_changes_nothing(finished: Finished) -> None:
    before = (finished.study / "profile.yaml").read_bytes()
    found = finished.project.json("resume", "my_tiny_net-1")
    assert found == json.loads(finished.done.stdout)
    assert (finished.study / "profile.yaml").read_bytes() == before
