"""Version 0.1.0's studies and queue, from before its modules were renamed, open, show, resume and report.

``studies/`` and ``state/`` are original files, with shortened lists of per-step values, and ``/old`` for their folder.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from autotune.base.layout import STATE_DIR

from ..cli.conftest import typed_here  # noqa: TID252

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def answer(*words: str, folder: Path) -> str:
    done = typed_here(folder, words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The old files in a temporary folder, with paths adapted to it."""
    for name in ("studies", "state"):
        shutil.copytree(HERE / name, tmp_path / name)
    shutil.copy(HERE / "tiny.py", tmp_path)
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "160")
    for path in (tmp_path / "studies").rglob("*"):
        if path.suffix in (".yaml", ".json"):
            path.write_text(path.read_text().replace("/old/", f"{tmp_path}/"))
    return tmp_path


SEARCH = (
    *("search", "--model", "tiny.py", "--allow-busy", "--fix", "compile_mode=off", "--fix", "precision=fp32"),
    *("--baseline", "intra_op_threads=1", "--fix", "intra_op_threads=1", "--set", "num_workers=0,1"),
    *("--set", "batch_size=8,16", "--set", "optimizer_impl=for-loop,foreach"),
)


def attributes(study: Path) -> dict[str, str]:
    with closing(sqlite3.connect(study / "study.db")) as connection:
        return dict(connection.execute("select key, value_json from study_user_attributes"))


@pytest.fixture
def made_here(folder: Path, searching_here: None) -> Path:
    """The stopped study, with the fingerprint of this machine in place of the original one."""
    typed_here(folder, (*SEARCH, "--study", "new", "--trials", "1", "--budget", "6s"))
    now, then = attributes(folder / "studies" / "new"), attributes(folder / "studies" / "stopped")
    knobs_now, knobs_then = (json.loads(each["autotune_space"]) for each in (now, then))
    # Knobs of newer versions, which the study goes on without.
    assert knobs_now.pop("malloc") == ["default", "keep"] and knobs_now.pop("batch_memory") == ["fresh", "slots"]
    knobs_now["baseline"].remove("malloc=default")
    assert knobs_now == knobs_then
    # A smaller budget, most of it unspent: the test is about going on.
    request = folder / "studies" / "stopped" / "study.yaml"
    request.write_text(request.read_text().replace('"budget_s": 90.0', '"budget_s": 50.0'))
    (folder / "studies" / "stopped" / "spent.json").write_text('{"spent_s": 4.5}')
    with closing(sqlite3.connect(folder / "studies" / "stopped" / "study.db")) as connection:
        update = "update study_user_attributes set value_json = ? where key = 'autotune_fingerprint'"
        connection.execute(update, (now["autotune_fingerprint"],))
        connection.commit()
    return folder


def test_an_old_study_is_shown_reported_and_exported(folder: Path) -> None:
    shown = json.loads(answer("show", "finished", "--json", folder=folder))
    outcome = json.loads((folder / "studies" / "finished" / "outcome.json").read_text())
    assert len(shown["trials"]) == sum(outcome["trials"].values()) and shown["trials"][0]["status"] == "complete"
    assert shown["trials"][0]["measurement"]["step_s"], "the folder of the trial has the single steps"
    assert "## Verdict" in answer("report", "finished", "--format", "markdown", folder=folder)
    exported = json.loads(answer("export", "finished", "--format", "json", folder=folder))
    assert exported["configuration"] == outcome["best"]["config"]
    listed = json.loads(answer("studies", "--json", folder=folder))["studies"]
    assert {row["study"]: row["state"] for row in listed} == {"finished": "done", "stopped": "unfinished"}
    # There is nothing left to do, and nothing is launched.
    assert json.loads(answer("resume", "finished", "--json", folder=folder))["best"] == outcome["best"]


@pytest.mark.timeout(400)
def test_an_old_study_is_resumed_where_it_stood(made_here: Path) -> None:
    before = json.loads(answer("show", "stopped", "--json", folder=made_here))["trials"]
    assert [trial["status"] for trial in before] == ["complete", "interrupted"]
    # A budget this small need not suffice for a verdict.
    done = typed_here(made_here, ("resume", "stopped", "--json"))
    assert done.returncode in (0, 8), done.stderr
    outcome = json.loads(done.stdout)
    after = json.loads(answer("show", "stopped", "--json", folder=made_here))["trials"]
    assert after[:2] == before and len(after) > 2
    # The interrupted trial is repeated, and the baseline is not.
    assert after[2]["repeats"] == 1 and after[2]["config"] == before[1]["config"]
    assert not any({"malloc", "batch_memory"} & trial["config"].keys() for trial in after)
    assert outcome["state"] == "done" and outcome["baseline"]["config"] == before[0]["config"]
    assert (made_here / "studies" / "stopped" / "profile.yaml").is_file() == (outcome["finding"] != "open")


@pytest.fixture
def daemon(folder: Path) -> Iterator[Path]:
    # In a process of its own: a daemon is nobody's child.
    command = [sys.executable, "-P", "-m", "autotune", "daemon"]
    subprocess.run([*command, "start"], cwd=folder, check=True, capture_output=True, timeout=240)
    yield folder
    subprocess.run([*command, "stop"], cwd=folder, check=True, capture_output=True, timeout=240)


def test_an_old_queue_is_opened(daemon: Path) -> None:
    def states() -> dict[str, str]:
        return {row["study"]: row["state"] for row in json.loads(answer("jobs", "--json", folder=daemon))["jobs"]}

    assert states() == {"later": "queued", "held": "paused", "unwanted": "cancelled"}
    request = json.loads(answer("jobs", "show", "1", "--json", folder=daemon))
    assert request["request"]["priority"] == 3 and request["request"]["spec"]["fixed"]["precision"] == "fp32"
    answer("jobs", "cancel", "2", folder=daemon)
    assert states()["held"] == "cancelled"
    number = json.loads(
        answer("submit", "--model", "tiny.py", "--not-before", "+1000h", "--study", "another", "--json", folder=daemon)
    )["jobs"][0]["id"]
    assert number == 4 and states()["another"] == "queued"
