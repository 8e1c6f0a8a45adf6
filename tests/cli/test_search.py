"""A search from the command line, interactive and scripted: finished, interrupted, and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from .conftest import DEADLINE_S, SEARCH, STATUSES, Finished, Project, new_project, survivors


def test_prints_one_object_and_nothing_else(finished: Finished) -> None:
    assert finished.done.returncode == 0, finished.done.stderr
    assert finished.done.stdout.count("\n") == 1
    found = json.loads(finished.done.stdout)
    assert found["schema_version"] == 1
    assert found["study"] == "my_tiny_net-1" and found["state"] == "done"
    assert Path(found["profile"]) == finished.study / "profile.yaml"
    assert found["baseline"].keys() >= {"config", "samples_per_second", "ci95"}
    for name in ("best", "best_same_batch"):
        figures = found[name]
        assert figures.keys() >= {
            *("config", "samples_per_second", "ci95", "speedup", "speedup_ci95", "peak_memory_bytes"),
        }
        low, high = figures["ci95"]
        assert 0 < low <= figures["samples_per_second"] <= high
        low, high = figures["speedup_ci95"]
        assert 0 < low <= figures["speedup"] <= high
        assert figures["peak_memory_bytes"] > 0
    assert found["baseline"]["config"]["precision"] == "fp32"
    assert found["baseline"]["config"]["batch_size"] == found["best_same_batch"]["config"]["batch_size"] == 32
    assert found["best"]["score"] >= found["best_same_batch"]["score"] >= found["baseline"]["score"]
    assert found["trials"].keys() <= STATUSES and found["trials"]["complete"] >= 1
    assert 0 < found["measured_s"] < found["elapsed_s"] < 120


def test_says_on_stderr_what_it_does_and_draws_nothing(finished: Finished) -> None:
    assert "trial 0" in finished.done.stderr and "cpu" in finished.done.stderr
    assert "\x1b" not in finished.done.stderr and "\r" not in finished.done.stderr


def test_leaves_no_process_and_no_temporary(finished: Finished) -> None:
    assert survivors(finished.study) == []
    assert list(finished.study.rglob(".tmp-*")) == []


def test_leaves_the_files_of_the_contract(finished: Finished) -> None:
    names = {path.name for path in finished.study.iterdir()}
    assert names >= {"study.yaml", "study.db", "trials", "profile.yaml"}
    spec = json.loads((finished.study / "trials" / "00000" / "spec.json").read_text())
    assert spec["config"] == json.loads(finished.done.stdout)["baseline"]["config"]
    assert (finished.study / "trials" / "00000" / "result.json").exists()


def test_a_users_own_package_called_models_stays_theirs(finished: Finished) -> None:
    # The workload asserts this: a failed assertion would have failed the search.
    assert finished.done.returncode == 0
    assert (finished.project.folder / "models" / "__init__.py").read_text() == "OURS = False\n"


def test_optuna_reads_the_study(finished: Finished) -> None:
    study = optuna.load_study(study_name="my_tiny_net-1", storage=f"sqlite:///{finished.study}/study.db")
    assert [t.number for t in study.trials] == list(range(len(study.trials)))
    counted = json.loads(finished.done.stdout)["trials"]
    assert len(study.trials) == sum(counted.values())
    states = [t.state for t in study.trials]
    assert states.count(optuna.trial.TrialState.COMPLETE) == counted["complete"]


def test_sqlite_utils_reads_every_launch(finished: Finished) -> None:
    database = str(finished.study / "study.db")
    command = [sys.executable, "-m", "sqlite_utils", "rows", database, "autotune_launches"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    rows = json.loads(done.stdout)
    counted = json.loads(finished.done.stdout)["trials"]
    assert sum(row["trial"] is not None for row in rows) == sum(counted.values())


# Interrupted


class Running:
    """A search that runs while the test watches it."""

    def __init__(self, project: Project, *arguments: str) -> None:
        self.said = project.folder / "stderr.log"
        with self.said.open("w") as stderr:
            self.process = subprocess.Popen(
                project.command(*arguments), cwd=project.folder, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def until(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.said.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out


@pytest.mark.slow
def test_ctrl_c_keeps_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    project = new_project(tmp_path / "project")
    running = Running(project, *SEARCH, "--study", "mine", "--trials", "2", "--budget", "120s", "--json")
    running.until("trial 1 begins")
    code, out = running.end(signal.SIGINT)
    study = project.folder / "studies" / "mine"
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 130 and "autotune resume mine" in error["advice"]
    assert "autotune resume mine" in running.said.read_text() and "Traceback" not in running.said.read_text()
    assert "\n          The best so far is the baseline, " in running.said.read_text()
    assert survivors(study) == []
    assert project.json("show", "mine")["trials"][0]["status"] == "complete"
    assert project.typed("export", "mine").returncode == 2
    unfinished = project.typed("report", "mine")
    assert unfinished.returncode == 0 and "autotune resume mine" in unfinished.stdout


@pytest.mark.slow
def test_a_polite_kill_before_anything_was_measured(tmp_path: Path) -> None:
    project = new_project(tmp_path / "project")
    running = Running(project, *SEARCH, "--study", "mine", "--budget", "120s")
    running.until("looking at the workload")
    code, out = running.end(signal.SIGTERM)
    assert code == 143 and out == ""
    assert "autotune resume mine" in running.said.read_text()
    assert survivors(project.folder / "studies" / "mine") == []
    (row,) = project.json("studies")["studies"]
    assert (row["study"], row["state"], row["trials"]) == ("mine", "unfinished", 0)
