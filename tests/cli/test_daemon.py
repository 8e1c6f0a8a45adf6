"""The commands ``daemon``, ``submit`` and ``jobs`` as typed, with one real daemon for all tests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import UsageError
from autotune.base.layout import DaemonFiles
from autotune.base.records import Cancelled, Done, Job, JobState
from autotune.cli.jobs import exit_code_of, minute_of_day, moment, window_of
from autotune.cli.main import run
from autotune.daemon.client import Client
from tests.support import make_job_request

from ..daemon.conftest import SURFACE  # noqa: TID252
from ..process.alive import wait_until  # noqa: TID252
from .conftest import PLAIN, WORKLOAD, typed_here

#: More than any integer of SQLite.
HUGE = str(10**20)


class Typing:
    """Runs command lines in a project's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"

    @property
    def environment(self) -> dict[str, str]:
        return {"AUTOTUNE_STATE_DIR": str(self.state), "COLUMNS": "120"}

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run a command and return its stdout, or its stderr if the expected exit code is not 0."""
        return self._printed(typed_here(self.folder, words, self.environment), code)

    def apart(self, *words: str, code: int = 0) -> str:
        """The same in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "autotune", *words],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return self._printed(done, code)

    def _printed(self, done: subprocess.CompletedProcess[str], code: int) -> str:
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def json(self, *words: str) -> dict[str, Any]:
        found = json.loads(self(*words, "--json"))
        assert isinstance(found, dict)
        return found

    @property
    def client(self) -> Client:
        return Client(DaemonFiles(self.state, self.state / "run"))


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typing]:
    found = Typing(tmp_path_factory.mktemp("project"))
    (found.folder / "tiny.py").write_text(WORKLOAD)
    (found.folder / "wrong.yaml").write_text("jobs: [{model: tiny.py}, {model: tiny.py, bugdet: 5m}]")
    assert "no daemon runs" in found.apart("jobs", code=7)
    said = found.apart("daemon", "start", "--quiet-for", "0s", "--idle-cores", "1000")
    assert said.startswith("the daemon runs, process ")
    yield found
    assert found.apart("daemon", "stop") == "the daemon has ended\n"


@pytest.mark.slow
def test_status(typed: Typing) -> None:
    found = typed.json("daemon", "status")
    assert found["state"] == "running" and found["pid"] > 0 and found["schema_version"] == 1
    assert "running, process" in typed("daemon", "status")
    assert "a daemon runs already" in typed("daemon", "start", code=2)
    assert "a daemon runs already" in typed.apart("daemon", "run", code=2)
    assert "the daemon runs" in typed("daemon", "logs")


@pytest.mark.slow
def test_a_job_from_the_first_word_to_the_last(typed: Typing) -> None:
    words = ["submit", "--replay", str(SURFACE), "--budget", "60s", "--seed", "3", "--on-done", "touch told", "--json"]
    (job,) = json.loads(typed.apart(*words))["jobs"]
    assert job == {"id": job["id"], "study": "replay-resnet18-jpeg-1", "state": "queued"}
    number = str(job["id"])
    assert "is done: " in typed.apart("jobs", "wait", number, "--timeout", "60s")
    found = typed.json("jobs", "show", number)
    assert found["status"]["state"] == "done" and "the baseline" in found["status"]["found"]
    assert found["request"]["spec"]["budget_s"] == 60 and found["request"]["spec"]["seed"] == 3
    text = typed("jobs", "show", number)
    assert "the baseline" in text and "touch told" in text
    rows = typed.json("jobs")["jobs"]
    assert {"id": job["id"], "study": job["study"], "state": "done"}.items() <= next(
        row for row in rows if row["id"] == job["id"]
    ).items()
    assert "replay-resnet18-jpeg-1" in typed("jobs")
    wait_until((typed.folder / "told").exists)
    for what in ("cancel", "pause", "resume", "retry"):
        assert f"job {number} is done" in typed("jobs", what, number, code=2)
    assert f"job {number} is done" in typed("jobs", "attach", number)
    assert typed("jobs", "log", number) == ""


@pytest.mark.slow
def test_what_waits_says_why_and_does_what_it_is_told(typed: Typing) -> None:
    (job,) = typed.json("submit", "--model", "tiny.py", "--device", "cpu", "--not-before", "+2h", "--study", "mine")[
        "jobs"
    ]
    number = str(job["id"])
    assert "has not come" in typed("jobs", "show", number) and typed.json("jobs", "show", number)["waits"]
    # The name is taken for every way of submitting a job.
    assert "is that of job" in typed("submit", "--model", "tiny.py", "--device", "cpu", "--study", "mine", code=2)
    refused = typed("search", "--model", "tiny.py", "--device", "cpu", "--study", "mine", code=2)
    assert f"study 'mine' is kept for job {number} of the daemon" in refused
    assert "is queued after 1s" in typed("jobs", "wait", number, "--timeout", "1s", code=124)
    assert typed("jobs", "pause", number) == f"job {number} is paused: somebody paused it\n"
    assert typed("jobs", "resume", number) == f"job {number} is queued\n"
    assert typed("jobs", "cancel", number) == f"job {number} is cancelled\n"
    typed("jobs", "wait", number, code=130)
    assert typed("jobs", "retry", number) == f"job {number} is queued\n"
    (typed.folder / "tiny.py").write_text(WORKLOAD + "\n# changed\n")
    typed("jobs", "cancel", number)
    assert "have changed since it was submitted" in typed("jobs", "retry", number, code=2)


def test_a_script_is_a_job_as_well(typed: Typing) -> None:
    script = typed.folder / "train.py"
    script.write_text("import torch\n")
    words = [sys.executable, "train.py", "--budget", "of its own"]
    options = ["--json", "--budget", "50s", "--device", "cpu", "--not-before", "+2h"]
    (job,) = json.loads(typed("submit", *options, "--", *words))["jobs"]
    number, request = str(job["id"]), typed.client.job(job["id"]).request
    assert job["study"] == "train-1" and request.spec.budget_s == 50
    assert request.spec.command is not None and list(request.spec.command.words) == words
    typed("jobs", "cancel", number)
    script.write_text("import torch  # changed\n")
    assert "have changed since it was submitted" in typed("jobs", "retry", number, code=2)


def test_a_file_of_jobs(typed: Typing) -> None:
    (typed.folder / "night.yaml").write_text(
        f"""
defaults: {{replay: {SURFACE}, budget: 30s, not-before: '+5h'}}
jobs:
  - {{seed: 1, priority: 3}}
  - {{seed: 2, set: {{precision: bf16, num_workers: [0, 2]}}}}
"""
    )
    cells = typed.json("submit", "night.yaml", "--priority", "1", "--trials", "7")["cells"]
    jobs = [typed.client.job(int(cell["job"])) for cell in cells]
    assert [(j.request.priority, j.request.spec.seed, j.request.spec.trials) for j in jobs] == [(3, 1, 7), (1, 2, 7)]
    assert jobs[1].request.spec.narrowed == {"precision": ("bf16",), "num_workers": ("0", "2")}
    assert all(j.request.not_before is not None for j in jobs)
    assert len({j.request.spec.name for j in jobs}) == 2


def test_a_matrix_is_queued_once_however_often_it_is_submitted(
    typed: Typing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(typed.folder)
    monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(typed.state))
    (typed.folder / "matrix.yaml").write_text(
        "models: [resnet18, {model: mobilenet_v3_small, budget: 5m}]\n"
        "targets: {here: {device: cpu, not-before: +5h}}\nbatches: [8, 16]\n"
    )

    def submit(*words: str) -> list[dict[str, Any]]:
        assert run(["submit", *words, "matrix.yaml", "--json", "--budget", "3m"]) == 0
        cells = json.loads(capsys.readouterr().out)["cells"]
        assert [(c["model"], c["batch_size"]) for c in cells] == [
            *(("resnet18", 8), ("resnet18", 16), ("mobilenet_v3_small", 8), ("mobilenet_v3_small", 16)),
        ]
        return list(cells)

    before = len(typed.client.rows())
    assert not any(cell["left_out"] for cell in submit("--dry-run")) and len(typed.client.rows()) == before
    first = submit()
    requests = [typed.client.job(int(cell["job"])).request.spec for cell in first]
    assert [(s.budget_s, s.batch_size, s.keep_batch_size) for s in requests] == [
        *((180, 8, True), (180, 16, True), (300, 8, True), (300, 16, True)),
    ]
    assert all(cell["left_out"] and cell["job"] == old["job"] for cell, old in zip(submit(), first, strict=True))
    typed.client.cancel(int(first[0]["job"]))
    again = submit("--priority", "1")
    assert [cell["left_out"] for cell in again] == [False, True, True, True]
    assert again[0]["study"] == f"{first[0]['study']}-2"
    assert run(["submit", "matrix.yaml", "--budget", "3m"]) == 0
    assert "0 jobs submitted; 4 cells left out." in capsys.readouterr().out
    assert run(["profiles", "matrix.yaml"]) == 0
    assert "4 missing. `autotune submit matrix.yaml --dry-run` says" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["submit"], "--model says what to train"),
        (["submit", "--model", "resnet5"], "unknown model 'resnet5'"),
        (["submit", "--", sys.executable, "nowhere.py"], "there is no file"),
        (["submit", "--model", "tiny.py", "--", sys.executable, "tiny.py"], "both --model and a command"),
        (["submit", "--model", "tiny.py", "--budget", "soon"], "is no duration"),
        (["submit", "--model", "tiny.py", "--bugdet", "5m"], "No such option"),
        (["submit", "--model", "tiny.py", "--study", "a b"], "cannot name a study"),
        (["submit", "--model", "tiny.py", "--window", "22"], "is no window"),
        (["submit", "--model", "tiny.py", "--window", "22:00-22:00"], "begins when it ends"),
        (["submit", "--model", "tiny.py", "--not-before", "soon"], "is no time"),
        (["submit", "--model", "tiny.py", "--max-hours", "0"], "must be above zero"),
        (["submit", "--model", "tiny.py", "--on-reboot", "cry"], "resume or pause"),
        (["submit", "--model", "resnet18", "--max-hours", "nan"], "must be above zero"),
        (["submit", "--model", "resnet18", "--not-before", f"+{HUGE}h"], "at most ten thousand years"),
        (["submit", "--model", "resnet18", "--not-before", "9" * 5000], "is no time"),
        (["submit", "--model", "resnet18", "--priority", HUGE], "Invalid value for '--priority'"),
        (["submit", "--model", "resnet18", "--host-memory", f"{HUGE}GiB"], "more than any machine has"),
        (["submit", "--model", "resnet18", "--after", HUGE], f"unknown job '{HUGE}'"),
        (["submit", "--model", "resnet18", "--after", "999"], "unknown job '999'"),
        (["submit", "--model", "tiny.py", "--env", "NO_SUCH_VARIABLE"], "no such variable"),
        (["submit", "--model", "tiny.py", "--env", "PGPASSWORD=x"], "would be stored with the job"),
        (["submit", "--model", "tiny.py", "--device", "cuda:1"], "another card"),
        (["submit", "--model", "tiny.py", "--dry-run"], "submits nothing"),
        (["submit", "--replay", str(SURFACE), "--batch-size", "64"], "exclude each other"),
        (["submit", "--model", "tiny.py", "--again"], "--again is for a file"),
        (["submit", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["submit", "wrong.yaml"], "wrong.yaml, line 1: unknown option 'bugdet'"),
        (["submit", "--model", "tiny.py", "--device", "cpu", "--gpu", "h200"], "contradict each other"),
        (["submit", "--model", "tiny.py", "--on-done", "ftp://x"], "neither a command nor"),
        (["daemon", "install", "--web", "0.0.0.0:80"], "from elsewhere"),
        (["daemon", "install", "--metrics-file", "m.prom"], "is not absolute"),
        (["jobs", "--json", "show", "1"], "--json stands before 'show'"),
        (["jobs", "show", "999"], "unknown job '999'"),
        *((["jobs", what, HUGE], f"unknown job '{HUGE}'") for what in ("show", "cancel", "retry", "wait", "log")),
        (["daemon", "logs", "-n", HUGE], "Invalid value for '--lines'"),
        (["daemon", "start", "--quiet-fro", "5s"], "No such option"),
        (["profiles", "show", "nothing"], "unknown profile"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    typed: Typing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(typed.folder)
    monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(typed.state))
    before = len(typed.client.rows())
    assert run(words) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert len(typed.client.rows()) == before


class TestTimes:
    NOW = datetime(2026, 11, 22, 21, 30, tzinfo=timezone(timedelta(hours=1)))

    def test_moments(self) -> None:
        assert moment("22:00", self.NOW) == datetime(2026, 11, 22, 21, 0, tzinfo=UTC).timestamp()
        assert moment("07:00", self.NOW) == datetime(2026, 11, 23, 6, 0, tzinfo=UTC).timestamp()
        assert moment("+2h", self.NOW) == self.NOW.timestamp() + 7200
        assert moment("2026-11-23T22:00+01:00", self.NOW) == datetime(2026, 11, 23, 21, 0, tzinfo=UTC).timestamp()

    def test_a_time_without_a_zone_has_the_offset_of_its_own_day(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        try:
            assert moment("2026-07-01T12:00", self.NOW) == datetime(2026, 7, 1, 10, 0, tzinfo=UTC).timestamp()
            # In the night before, clocks are set back.
            before = datetime(2026, 10, 24, 23, 0).astimezone()
            assert moment("22:00", before) == datetime(2026, 10, 25, 21, 0, tzinfo=UTC).timestamp()
        finally:
            monkeypatch.undo()
            time.tzset()

    def test_windows(self) -> None:
        assert window_of("22:00-07:30") == (22 * 60, 7 * 60 + 30)
        assert window_of("8:00 - 24:00") == (8 * 60, 0)
        for wrong in ("25:00", "22:60", "22", "", "a:b"):
            with pytest.raises(UsageError, match="no time of day"):
                minute_of_day(wrong, "--window")


def test_a_unit_for_systemd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "units"
    metrics = ["--metrics-file", "/tmp/%h $X.prom"]
    where = ["--unit-dir", str(place), "--state-dir", str(tmp_path)]
    assert run(["daemon", "install", *where, "--web", "127.0.0.1:8080", *metrics]) == 0
    text = (place / "autotune.service").read_text()
    for line in ("Type=notify", "OOMPolicy=continue", "Restart=on-failure", "WatchdogSec=60", "NoNewPrivileges=yes"):
        assert line in text
    command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert command.endswith(
        f"daemon run --state-dir {tmp_path} --metrics-file '/tmp/%%h $$X.prom' --web 127.0.0.1:8080"
    )
    assert "systemctl --user" in capsys.readouterr().out
    verifier = "/usr/bin/systemd-analyze"
    if os.path.exists(verifier):
        done = subprocess.run(
            [verifier, "verify", "--user", place / "autotune.service"], capture_output=True, text=True, check=False
        )
        assert "autotune.service" not in done.stderr, done.stderr


class TestWhatIsPrinted:
    @pytest.mark.slow
    def test_a_job_says_why_it_waits_and_what_to_type_next(self, typed: Typing) -> None:
        name = "a-study-with-a-name-that-is-longer-than-a-narrow-terminal-is-wide"
        said = typed("submit", "--model", "resnet18", "--study", name, "--not-before", "+2h", "--on-done", "true")
        number = said.split(":")[0].removeprefix("job ")
        why = "the time before which it is not to run has not come"
        assert said.startswith(f"job {number}: {name}; it waits: {why}\n") and f"autotune jobs show {number}" in said
        row = next(row for row in typed.json("jobs")["jobs"] if row["id"] == int(number))
        assert row["waits"] == why
        # A pipe has no width, and the narrowest terminal loses nothing either.
        (line,) = [line for line in typed("jobs").splitlines() if name in line]
        assert why in line
        folder = str(typed.folder / "studies" / name)
        assert folder in typed("jobs", "show", number).splitlines()[3]
        narrow = on_a_terminal(typed, 60, "jobs")
        assert name in narrow and why in narrow
        assert folder in on_a_terminal(typed, 60, "jobs", "show", number)
        typed("jobs", "cancel", number)

    def test_the_help_lists_what_a_command_takes_from_another(self, capsys: pytest.CaptureFixture[str]) -> None:
        for words, there in (
            (["submit"], ("--window", "--allow-busy", "--batch-size")),
            (["daemon", "start"], ("--state-dir", "--quiet-for", "--web")),
            (["daemon", "install"], ("--unit-dir", "--idle-cores")),
        ):
            assert run([*words, "--help"]) == 0
            said = capsys.readouterr().out
            assert all(said.count(f"  {option} ") == 1 for option in there), said

    @pytest.mark.parametrize("words", [["jobs"], ["jobs", "--json"], ["profiles"], ["--version"]])
    def test_a_closed_pipe_is_no_fault(self, typed: Typing, words: list[str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "autotune", *words],
            env={**os.environ, "AUTOTUNE_STATE_DIR": str(typed.state)},
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


def on_a_terminal(typed: Typing, columns: int, *words: str) -> str:
    """Run a command on a terminal of so many columns, and return what it printed there."""
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    environment = {**os.environ, "AUTOTUNE_STATE_DIR": str(typed.state), "NO_COLOR": "1", "TERM": "dumb"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-P", "-m", "autotune", *words]
    process = subprocess.Popen(command, env=environment, stdin=follower, stdout=follower, stderr=subprocess.DEVNULL)
    os.close(follower)
    found = b""
    # The read fails once the process has closed its side.
    with contextlib.suppress(OSError):
        while part := os.read(leader, 2**16):
            found += part
    os.close(leader)
    assert process.wait(timeout=60) == 0
    return found.decode()


@pytest.mark.slow
def test_a_running_job_is_watched_and_left_alone(typed: Typing) -> None:
    (job,) = typed.json(
        *("submit", "--model", "tiny.py", "--device", "cpu", "--fix", "compile_mode=off", "--set", "num_workers=0"),
        *("--baseline", "intra_op_threads=1", "--fix", "intra_op_threads=1"),
        *("--fix", "workload.pause=false", "--keep-batch-size", *PLAIN),
        *("--budget", "60s", "--trials", "2", "--allow-busy"),
    )["jobs"]
    client = typed.client
    wait_until(lambda: client.job(job["id"]).state is JobState.RUNNING)
    watching = subprocess.run(
        [sys.executable, "-P", "-m", "autotune", "jobs", "attach", str(job["id"]), "--state-dir", str(typed.state)],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert watching.returncode == 0, watching.stderr
    assert "trial 0" in watching.stderr and f"job {job['id']} is done" in watching.stdout
    # Whether two trials beside other tests prove a winner is the machine's business; if they do, it is in force.
    status = client.job(job["id"]).status
    assert isinstance(status, Done), status
    kept = {profile["model"] for profile in typed.json("profiles")["profiles"]}
    assert kept == ({str(typed.folder / "tiny.py")} if status.slot is not None else set())
    assert ("tiny-" in typed("profiles", "--list")) == (status.slot is not None)


def test_waiting_for_a_job_without_a_verdict_ends_as_its_search_does() -> None:
    for status, code in ((Done(ended=""), 0), (Done(ended="", open=True), 8), (Cancelled(ended=""), 130)):
        assert exit_code_of(Job(id=1, submitted="", request=make_job_request(), status=status)) == code
