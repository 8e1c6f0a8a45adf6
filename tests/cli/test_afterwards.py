"""The commands that read a finished study: show, studies, report, export and train."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml

from autotune.cli.main import run
from autotune.cli.show import FIGURES
from autotune.space import key
from autotune.space.formatting import rate_text

from .conftest import STATUSES, Finished

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


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
    done = finished.project.typed("show", "my_tiny_net-1")
    assert done.returncode == 0 and "complete" in done.stdout and "\x1b" not in done.stdout


def test_studies(finished: Finished) -> None:
    (row,) = finished.project.json("studies")["studies"]
    assert (row["study"], row["state"]) == ("my_tiny_net-1", "done")
    assert row["speedup"] == json.loads(finished.done.stdout)["best"]["speedup"]
    assert "my_tiny_net-1" in finished.project.typed("studies").stdout


def test_export(finished: Finished) -> None:
    project = finished.project
    done = project.typed("export", "my_tiny_net-1", "-o", "exported.yaml")
    assert done.returncode == 0 and done.stdout == ""
    exported = (project.folder / "exported.yaml").read_text()
    assert project.typed("export", "my_tiny_net-1").stdout == exported
    outcome = json.loads(finished.done.stdout)
    data = pyyaml.safe_load(exported)
    assert data["configuration"] == outcome["best"]["config"]
    assert data["baseline"]["configuration"] == outcome["baseline"]["config"]
    as_json = json.loads(project.typed("export", "my_tiny_net-1", "--format", "json").stdout)
    assert as_json["configuration"] == data["configuration"]


def test_report(finished: Finished) -> None:
    done = finished.project.run("report", "my_tiny_net-1", "--full")
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
    written = finished.project.typed("report", "my_tiny_net-1", "-o", "report.md")
    assert (written.returncode, written.stdout, written.stderr) == (0, "", "wrote report.md\n")
    markdown = finished.project.typed("report", "my_tiny_net-1", "--format", "markdown").stdout
    assert (finished.project.folder / "report.md").read_text() == markdown
    assert markdown.splitlines()[0].endswith(": study my_tiny_net-1")
    assert markdown.count("\n## ") >= 8


def test_report_as_json_has_the_same_figures(finished: Finished) -> None:
    found = finished.project.json("report", "my_tiny_net-1")
    assert found["state"] == "done" and found["outcome"] == json.loads(finished.done.stdout)
    shown = " ".join(finished.project.typed("report", "my_tiny_net-1", "--full").stdout.split())
    assert [s["title"] for s in found["sections"] if s["title"] not in shown] == []
    parts = [part for section in found["sections"] for part in section["parts"]]
    tables = [part for part in parts if part["kind"] == "table"]
    assert all(len(row) == len(table["columns"]) for table in tables for row in table["rows"])
    # Whole cells: in the columns of text they may be wrapped.
    cells = {cell for table in tables for row in table["rows"] for cell in row if " " not in cell}
    assert len(cells) > 5 and all(cell in shown for cell in cells)
    assert all(part["text"] in shown for part in parts if part["kind"] == "paragraph")


def test_the_answer_comes_first_and_fits_on_a_screen(finished: Finished) -> None:
    done = finished.project.typed("report", "my_tiny_net-1")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "" and len(lines) <= 24, done.stdout
    answer = finished.project.json("report", "my_tiny_net-1")["answer"]
    assert " ".join(done.stdout.split()).startswith(f"{lines[0]} {answer['headline']}") and "faster (" in lines[2]
    assert lines[-2].split() == answer["shell"][0].split() and lines[-1] == "  autotune report my_tiny_net-1 --full"
    request = finished.project.typed("report", "my_tiny_net-1", "--format", "pr").stdout
    assert request.startswith("# my_tiny_net on ") and f"**{answer['headline']}**" in request
    assert "\n## " not in request and request.count("```sh") == 1


def test_another_training_than_the_search_was_told_of(finished: Finished) -> None:
    project = finished.project
    assert project.json("report", "my_tiny_net-1")["training"] is None
    asked = project.json("report", "my_tiny_net-1", "--samples", "5000000", "--price-per-hour", "2.5")
    assert (asked["training"]["samples"], asked["training"]["price_per_hour"]) == (5_000_000, 2.5)
    assert asked["training"]["best_s"] < asked["training"]["baseline_s"]
    rows = {row["name"]: row["text"] for row in asked["answer"]["rows"]}
    assert rows["saves"].startswith("5,000,000 samples take ") and rows["costs"].endswith(", at 2.50 an hour")
    shown = project.typed("report", "my_tiny_net-1", "--epochs", "7").stdout
    assert "saves" in shown and "7 epochs take " in shown, shown
    both = project.typed("report", "my_tiny_net-1", "--epochs", "7", "--samples", "9")
    assert both.returncode == 2 and "both say how long the training is" in both.stderr


def test_what_is_to_be_pasted_trains(finished: Finished) -> None:
    lines = finished.project.json("report", "my_tiny_net-1")["answer"]["python"]
    assert len(lines) == 3
    before = """
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset
        dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    """
    after = ["for batch in loader:", "    print(float(step(batch)))"]
    script = "\n".join([*textwrap.dedent(before).splitlines(), *lines, *after])
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=finished.project.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0 and float(done.stdout.split()[0]) > 0, done.stderr


def test_without_a_name_the_newest_study_is_meant(finished: Finished) -> None:
    newest = max(
        (finished.project.folder / "studies").glob("*/study.yaml"), key=lambda f: f.stat().st_mtime
    ).parent.name
    for command in ("show", "report"):
        done = finished.project.typed(command)
        assert done.returncode == 0 and done.stderr.splitlines()[0] == f"the newest study: {newest}"
        assert done.stdout == finished.project.typed(command, newest).stdout
    nowhere = finished.project.typed("show", "--studies-dir", "none-here")
    assert nowhere.returncode == 2 and "holds no study yet" in nowhere.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("resume", "my_tiny_net-1", "--budget", "1s"), "already, with what has been used of it"),
        (("resume", "my_tiny_net-1", "--budget", "+0s"), "must be above zero"),
        (("resume", "my_tiny_net-1", "--fork", "--budget", "+5m"), "lengthens a study"),
        (("run", "--trial", "0", "--live", "--", "python", "a.py"), "one of --profile, --trial and --live is needed"),
        (("run", "--trial", "99", "--study", "my_tiny_net-1", "--", "python", "a.py"), "has no trial 99"),
    ],
)
def test_what_a_study_cannot_do_is_said(finished: Finished, typed: tuple[str, ...], said: str) -> None:
    done = finished.project.typed(*typed)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    # Nothing of it is lost.
    assert finished.project.json("report", "my_tiny_net-1")["state"] == "done"


def test_trials_as_csv(finished: Finished) -> None:
    done = finished.project.typed("show", "my_tiny_net-1", "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    trials = finished.project.json("show", "my_tiny_net-1")["trials"]
    assert [int(row["trial"]) for row in rows] == [trial["number"] for trial in trials]
    assert done.stdout.splitlines()[0].startswith(",".join(FIGURES))
    for row, trial in zip(rows, trials, strict=True):
        assert row["status"] == trial["status"] and float(row["wall_s"]) == trial["wall_s"]
        assert float(row["samples_per_s"]) == trial["measurement"]["samples_per_s"]
        assert row["batch_size"] == str(trial["config"]["batch_size"]) and row["workload.pause"] in ("true", "false")
    assert finished.project.typed("show", "my_tiny_net-1", "--csv", "--json").returncode == 2
    described = (DOCS / "json.md").read_text()
    assert all(f"`{column}`" in described for column in FIGURES)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "nothing-here"], 2, "unknown study 'nothing-here'"),
        (["report", "my_tiny_net-1", "--nonsense"], 2, "No such option: --nonsense"),
        (["search", "--model", "resnet50", "--budget", "never"], 2, "--budget"),
        (["jobs", "show", "1"], 7, "daemon"),
    ],
)
def test_an_error_is_an_object_too(
    finished: Finished,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(finished.project.folder)
    assert run([*arguments, "--json"]) == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.out.count("\n") == 1 and found["schema_version"] == 1 and list(found) == ["schema_version", "error"]
    assert message in found["error"]["message"] and found["error"]["exit_code"] == code
    assert captured.err, "people are told as ever"
    # Without --json nothing is on stdout.
    assert run(arguments) == code and capsys.readouterr().out == ""


def _same_names(example: Any, real: Any, where: str) -> None:
    """Check that each name of an example is one of the real object's, with a value of the same kind."""
    if isinstance(example, dict):
        assert isinstance(real, dict), where
        for name, value in example.items():
            assert name in real, f"{where}.{name}"
            _same_names(value, real[name], f"{where}.{name}")
    elif isinstance(example, list):
        assert isinstance(real, list), where
        # Some element has these names: lists of parts are mixed.
        if example and isinstance(example[0], dict):
            told = {name: example[0][name] for name in ("kind", "title") if name in example[0]}
            fitting = [one for one in real if told.items() <= one.items()]
            assert fitting, where
            _same_names(example[0], fitting[0], where)
    elif example is not None and real is not None:
        assert isinstance(real, bool) == isinstance(example, bool), where
        assert isinstance(real, str) == isinstance(example, str), where


def test_the_examples_of_the_documentation_are_what_is_printed(
    finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.project.folder)
    text = (DOCS / "json.md").read_text()
    examples = {
        name: json.loads(body) for name, body in re.findall(r'```json title="(\w+)"\n(.*?)```', text, re.DOTALL)
    }
    assert set(examples) == {"error", "report", "show"}
    asked = {
        "error": ["show", "nothing-here"],
        "report": ["report", "my_tiny_net-1", "--samples", "1000000", "--price-per-hour", "2.5"],
        "show": ["show", "my_tiny_net-1"],
    }
    for name, example in examples.items():
        run([*asked[name], "--json"])
        real = json.loads(capsys.readouterr().out)
        assert set(example) == set(real), name
        _same_names(example, real, name)


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
    done = finished.project.run("train", "--profile", profile, "--steps", "20", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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
