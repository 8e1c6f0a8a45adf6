"""The command line as a person and a script use it: one real search, and what can be done with what it leaves."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import typer
import yaml as pyyaml

from autotune.cli import main
from autotune.cli.main import run
from autotune.launcher import STUDY_MARK
from autotune.space import key
from autotune.study.request import read_request
from autotune.tuning import find_study
from autotune.wording import rate_text

WORKLOAD = '''\
"""A user's own workload: a small network on random vectors."""

import torch
from torch import nn
from torch.utils.data import Dataset

BATCH_SIZE = 32


class Vectors(Dataset):
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(1024, 256, generator=generator)
        self.labels = torch.randint(0, 10, (1024,), generator=generator)

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return self.inputs[index % 1024], self.labels[index % 1024]


def model(ctx):
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def dataset(ctx):
    return Vectors(ctx.seed)


def optimizer(ctx, m):
    return torch.optim.SGD(m.parameters(), lr=0.01)


def loss(ctx, m, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(m(inputs), labels)
'''
#: Commands of the public contract.
CONTRACT = {
    *("search", "resume", "export", "show", "report", "studies", "space"),
    *("verify", "train", "doctor", "daemon", "submit", "jobs"),
}
STATUSES = {
    *("complete", "pruned", "oom", "host_oom", "shm_exhausted", "loader_worker_died", "crashed"),
    *("killed", "timeout", "hang", "compile_failed", "diverged", "user_error", "interrupted"),
}
SEARCH = [
    "search",
    "--model",
    "my_tiny_net.py",
    "--device",
    "cpu",
    "--fix",
    "compile_mode=off",
    "--set",
    "num_workers=0",
    # What these tests are about does not change with what else runs on the machine.
    "--allow-busy",
]
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Project:
    """A user's own project: it has a package called ``models``, as ours has a folder of that name."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "autotune", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """The one object that a command prints."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        found = json.loads(done.stdout)
        assert found["schema_version"] == 1
        assert isinstance(found, dict)
        return found


def new_project(folder: Path) -> Project:
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "__init__.py").write_text("OURS = False\n")
    (folder / "my_tiny_net.py").write_text(WORKLOAD + "\n\nimport models\n\nassert models.OURS is False\n")
    return Project(folder)


def survivors(study: Path) -> list[int]:
    """Processes that carry the study's mark."""
    mark = read_request(find_study(str(study), study.parent)).mark
    wanted = f"{STUDY_MARK}={mark}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment:
            found.append(int(name))
    return found


@dataclass(frozen=True)
class Finished:
    project: Project
    done: subprocess.CompletedProcess[str]

    @property
    def study(self) -> Path:
        return self.project.folder / "studies" / "my_tiny_net-1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A search that ran to its end, in a subprocess, under an editable install."""
    project = new_project(tmp_path_factory.mktemp("user") / "project")
    return Finished(project, project.run(*SEARCH, "--trials", "2", "--budget", "20s", "--json", "--no-input"))


class TestSearch:
    def test_prints_one_object_and_nothing_else(self, finished: Finished) -> None:
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
        assert 0 < found["measured_s"] < found["elapsed_s"] < 60

    def test_says_on_stderr_what_it_does_and_draws_nothing(self, finished: Finished) -> None:
        assert "trial 0" in finished.done.stderr and "cpu" in finished.done.stderr
        assert "\x1b" not in finished.done.stderr and "\r" not in finished.done.stderr

    def test_leaves_no_process_and_no_temporary(self, finished: Finished) -> None:
        assert survivors(finished.study) == []
        assert list(finished.study.rglob(".tmp-*")) == []

    def test_leaves_the_files_of_the_contract(self, finished: Finished) -> None:
        names = {path.name for path in finished.study.iterdir()}
        assert names >= {"study.yaml", "study.db", "trials", "profile.yaml"}
        spec = json.loads((finished.study / "trials" / "00000" / "spec.json").read_text())
        assert spec["config"] == json.loads(finished.done.stdout)["baseline"]["config"]
        assert (finished.study / "trials" / "00000" / "result.json").exists()

    def test_a_users_own_package_called_models_stays_theirs(self, finished: Finished) -> None:
        # The workload asserts it; a failed assertion would have failed the search.
        assert finished.done.returncode == 0
        assert (finished.project.folder / "models" / "__init__.py").read_text() == "OURS = False\n"

    def test_optuna_reads_the_study(self, finished: Finished) -> None:
        study = optuna.load_study(study_name="my_tiny_net-1", storage=f"sqlite:///{finished.study}/study.db")
        assert [t.number for t in study.trials] == list(range(len(study.trials)))
        counted = json.loads(finished.done.stdout)["trials"]
        assert len(study.trials) == sum(counted.values())
        states = [t.state for t in study.trials]
        assert states.count(optuna.trial.TrialState.COMPLETE) == counted["complete"]

    def test_sqlite_utils_reads_every_launch(self, finished: Finished) -> None:
        database = str(finished.study / "study.db")
        command = [sys.executable, "-m", "sqlite_utils", "rows", database, "autotune_launches"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
        rows = json.loads(done.stdout)
        counted = json.loads(finished.done.stdout)["trials"]
        assert sum(row["trial"] is not None for row in rows) == sum(counted.values())


class TestAfterwards:
    def test_show(self, finished: Finished) -> None:
        found = finished.project.json("show", "my_tiny_net-1")
        outcome = json.loads(finished.done.stdout)
        assert found["study"] == "my_tiny_net-1"
        assert [t["number"] for t in found["trials"]] == list(range(sum(outcome["trials"].values())))
        wanted = {"number", "config", "status", "phase", "cause", "measurement", "phase_seconds"}
        for trial in found["trials"]:
            assert trial.keys() >= wanted and trial["status"] in STATUSES
            if trial["status"] == "complete":
                measurement = trial["measurement"]
                # Every step of the launch is kept, and the figures follow from them.
                assert len(measurement["step_s"]) == sum(w["steps"] for w in measurement["windows"]) > 0
                assert measurement["measured_s"] == pytest.approx(sum(w["seconds"] for w in measurement["windows"]))
                assert {"load", "build", "compile", "warmup", "measure"} <= trial["phase_seconds"].keys()
        assert found["trials"][0]["config"] == outcome["baseline"]["config"]
        assert len({key(t["config"]) for t in found["trials"]}) == len(found["trials"])

    def test_show_as_a_table(self, finished: Finished) -> None:
        done = finished.project.run("show", "my_tiny_net-1")
        assert done.returncode == 0 and "complete" in done.stdout and "\x1b" not in done.stdout

    def test_studies(self, finished: Finished) -> None:
        (row,) = finished.project.json("studies")["studies"]
        assert (row["study"], row["state"]) == ("my_tiny_net-1", "done")
        assert row["speedup"] == json.loads(finished.done.stdout)["best"]["speedup"]
        assert "my_tiny_net-1" in finished.project.run("studies").stdout

    def test_export(self, finished: Finished) -> None:
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

    @pytest.mark.parametrize("options", [["--format", "xml"], ["-o", "no/such/folder/p.yaml"], ["-o", "."]])
    def test_export_to_where_it_cannot_go(
        self,
        finished: Finished,
        options: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(finished.project.folder)
        assert run(["export", "my_tiny_net-1", *options]) in (2, 5)
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("autotune: ") and "fault" not in captured.err

    def test_report(self, finished: Finished) -> None:
        done = finished.project.run("report", "my_tiny_net-1")
        assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
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

    def test_report_as_plain_text_in_a_file(
        self, finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(finished.project.folder)
        assert run(["report", "my_tiny_net-1", "--format", "terminal", "-o", "report.txt"]) == 0
        assert capsys.readouterr().out == ""
        text = (finished.project.folder / "report.txt").read_text()
        assert "Verdict ──" in text and "|" not in text.split("Where it holds")[0] and "\x1b" not in text

    @pytest.mark.parametrize("options", [["--format", "html"], ["-o", "no/such/folder/r.md"], ["-o", "."]])
    def test_report_to_where_it_cannot_go(
        self,
        finished: Finished,
        options: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(finished.project.folder)
        assert run(["report", "my_tiny_net-1", *options]) in (2, 5)
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("autotune: ") and "fault" not in captured.err

    def test_train(self, finished: Finished) -> None:
        profile = str(finished.study / "profile.yaml")
        found = finished.project.json("train", "--profile", profile, "--steps", "20")
        promised = json.loads(finished.done.stdout)["best"]["samples_per_second"]
        assert found["steps"] == 20 and 0 < found["counted_steps"] < 20
        assert found["promised_samples_per_second"] == pytest.approx(promised, rel=1e-5)
        assert found["ratio"] == pytest.approx(found["samples_per_second"] / found["promised_samples_per_second"])
        assert found["samples_per_second"] > 0 and 0 < found["last_loss"] < 10

    def test_resuming_what_is_done_changes_nothing(self, finished: Finished) -> None:
        before = (finished.study / "profile.yaml").read_bytes()
        found = finished.project.json("resume", "my_tiny_net-1")
        assert found == json.loads(finished.done.stdout)
        assert (finished.study / "profile.yaml").read_bytes() == before


class Running:
    """A search that runs while the test looks on."""

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


class TestInterruption:
    def test_ctrl_c_keeps_everything_and_resume_goes_on(self, tmp_path: Path) -> None:
        project = new_project(tmp_path / "project")
        running = Running(project, *SEARCH, "--study", "mine", "--trials", "2", "--budget", "40s", "--json")
        running.until("trial 1 begins")
        code, out = running.end(signal.SIGINT)
        study = project.folder / "studies" / "mine"
        assert code == 130 and out == ""
        assert "autotune resume mine" in running.said.read_text() and "Traceback" not in running.said.read_text()
        assert survivors(study) == []
        before = project.json("show", "mine")["trials"]
        assert before[0]["status"] == "complete"
        assert project.run("export", "mine").returncode == 2
        unfinished = project.run("report", "mine")
        assert unfinished.returncode == 0 and "autotune resume mine" in unfinished.stdout
        spent_s = json.loads((study / "spent.json").read_text())["spent_s"]

        found = project.json("resume", "mine")
        assert found["state"] == "done" and found["elapsed_s"] > spent_s
        after = project.json("show", "mine")["trials"]
        # Nothing lost, nothing measured again, nothing counted twice.
        assert after[: len(before)] == before
        assert [t["number"] for t in after] == list(range(len(after)))
        complete = [key(t["config"]) for t in after if t["status"] == "complete"]
        assert len(set(complete)) == len(complete)
        assert survivors(study) == []

    def test_a_polite_kill_before_anything_was_measured(self, tmp_path: Path) -> None:
        project = new_project(tmp_path / "project")
        running = Running(project, *SEARCH, "--study", "mine", "--budget", "20s")
        running.until("looking at the workload")
        code, out = running.end(signal.SIGTERM)
        assert code == 143 and out == ""
        assert "autotune resume mine" in running.said.read_text()
        assert survivors(project.folder / "studies" / "mine") == []
        (row,) = project.json("studies")["studies"]
        assert (row["study"], row["state"], row["trials"]) == ("mine", "unfinished", 0)


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    run(["--version"])
    group: Any = typer.main.get_command(main.app)
    return dict(group.commands)


class TestHelp:
    def test_every_command_is_one_of_the_contract(self, commands: dict[str, Any]) -> None:
        assert commands.keys() <= CONTRACT
        assert commands.keys() >= {
            "search",
            "resume",
            "export",
            "show",
            "report",
            "studies",
            "space",
            "train",
            "doctor",
        }

    def test_every_command_and_option_says_what_it_is_for(
        self, commands: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        for name, command in commands.items():
            first_line = inspect.cleandoc(str(command.callback.__doc__)).splitlines()[0]
            assert run([name, "--help"]) == 0
            text = capsys.readouterr().out
            assert first_line[:40] in text and "Usage: autotune " + name in text
            for parameter in command.params:
                assert parameter.help, f"{name} {parameter.name} has no help"

    def test_the_list_names_every_command_with_its_sentence(
        self, commands: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        assert run(["--help"]) == 0
        text = capsys.readouterr().out
        for name, command in commands.items():
            assert (
                name in text and inspect.cleandoc(str(command.callback.__doc__)).split(".", maxsplit=1)[0][:30] in text
            )
        assert "Exit codes" in text

    def test_the_options_of_a_search_are_those_of_the_contract(self, commands: dict[str, Any]) -> None:
        options = {option for parameter in commands["search"].params for option in parameter.opts}
        assert options >= {
            *("--model", "--arg", "--data", "--study", "--studies-dir", "--budget", "--trials", "--objective"),
            *("--device", "--batch-size", "--image-size", "--baseline", "--set", "--fix", "--memory-limit"),
            *("--sampler", "--seed", "--json", "--no-input"),
        }

    def test_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["--version"]) == 0
        assert capsys.readouterr().out.startswith("autotune 0.")


def test_doctor_tells_what_this_machine_can_do(finished: Finished) -> None:
    done = finished.project.run("doctor")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("cores", "/dev/shm", "torch"))


def test_the_space_of_a_users_own_workload(finished: Finished) -> None:
    arguments = ["space", "--model", "my_tiny_net.py", "--device", "cpu", "--set", "batch_size=16,32"]
    found = finished.project.json(*arguments)
    legal = {name: [c["value"] for c in knob["choices"] if not c["refused"]] for name, knob in found["knobs"].items()}
    assert legal["batch_size"] == [16, 32] and "fp32" in legal["precision"] and "fp16" not in legal["precision"]
    assert "pin_memory" in found["inactive"] and found["baseline"]["batch_size"] == 32
    refused = [c for knob in found["knobs"].values() for c in knob["choices"] if c["refused"] is not None]
    assert found["knobs"]["batch_size"]["changes_maths"] and not found["knobs"]["num_workers"]["changes_maths"]
    assert refused and all(isinstance(c["refused"], str) and c["refused"] for c in refused)
