"""Real daemons with real searches, killed at random and at the most critical moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from autotune.base.clock import SystemClock
from autotune.base.layout import StudyFiles
from autotune.base.records import JobState
from autotune.launcher.watch import JOB_MARK
from autotune.space import key
from autotune.study.tables import read_trials

from ..process.alive import wait_until  # noqa: TID252
from .conftest import SURFACE, Daemon, acted_request, real_request, replay_request, replayed

HERE = Path(__file__).parent


class Onlooker:
    """Checks in a background thread that no device ever has two runs."""

    def __init__(self, daemon: Daemon) -> None:
        self.together: list[set[str]] = []
        self._daemon = daemon
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Onlooker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.03):
            marks = set(self._daemon.leaders().values())
            if len(marks) > 1:
                self.together.append(marks)


@cache
def undisturbed(seed: int) -> dict[str, object]:
    """Return the result of a replayed search that is not killed."""
    command = [sys.executable, "-P", "-m", "autotune", "search", "--replay", str(SURFACE), "--json"]
    # A job does not inherit these, and another kernel of OpenBLAS rounds the last digits differently.
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    done = subprocess.run([*command, "--budget", "120s", "--seed", str(seed)], capture_output=True, check=True, env=env)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def no_survivor(daemon: Daemon) -> None:
    """Assert that no process of a run is alive."""
    folder = os.fsencode(daemon.state.parent)
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{entry}/environ").read_bytes() if entry.isdigit() else b""
            assert JOB_MARK.encode() not in environment or folder not in Path(f"/proc/{entry}/cmdline").read_bytes()
    assert daemon.leaders() == {}


def whole(daemon: Daemon) -> bool:
    with contextlib.closing(sqlite3.connect(daemon.files.queue.database)) as connection:
        return bool(connection.execute("pragma integrity_check").fetchone() == ("ok",))


def no_trial_twice(study: Path) -> None:
    """Assert that trials are numbered without gaps, and that no configuration was completed twice."""
    trials = read_trials(StudyFiles(study))
    assert [t.number for t in trials] == list(range(len(trials)))
    complete = Counter(key(t.config) for t in trials if t.score is not None)
    assert complete and set(complete.values()) == {1}, complete


def killed_at_random(daemon: Daemon, project: Path, *, replays: int, reals: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    requests = [replay_request(project, f"replay-{i}", seed=i) for i in range(replays)]
    requests += [real_request(project, f"real-{i}") for i in range(reals)]
    rng.shuffle(requests)
    clock = SystemClock()
    acknowledged = {}
    with Onlooker(daemon) as onlooker:
        for number in range(kills):
            daemon.start(wait=False)
            # Some kills hit the daemon before it answers, some during a submission, most while jobs run.
            if number % 3:
                daemon.until_it_answers()
                for request in requests[: 1 + len(requests) // kills * 2]:
                    (job,) = daemon.client.submit(request)
                    acknowledged[job.id] = request
                    requests.remove(request)
            clock.sleep(rng.uniform(0.0, 3.0))
            daemon.kill()
        daemon.start()
        for request in requests:
            (job,) = daemon.client.submit(request)
            acknowledged[job.id] = request
        ended = daemon.until_ended(*acknowledged, deadline_s=60.0 + 40.0 * reals + 5.0 * replays)
    assert len(acknowledged) == replays + reals == len(daemon.client.rows())
    assert [job.state for job in ended] == [JobState.DONE] * len(ended), [(j.id, j.status) for j in ended]
    # The log, which spans all restarts, reports the end of each job once.
    log = daemon.log()
    assert [log.count(f"job {job.id} is done") for job in ended] == [1] * len(ended)
    for job in ended:
        assert job.request.spec.mark == acknowledged[job.id].spec.mark
        if job.request.replay is None:
            no_trial_twice(project / "studies" / job.request.spec.name)
        else:
            found = replayed(daemon, job.id)
            assert found == undisturbed(job.request.spec.seed)
    assert onlooker.together == []
    assert daemon.stop() == 0
    no_survivor(daemon)
    assert whole(daemon)


@pytest.mark.stress
def test_killed_at_random_moments(daemon: Daemon, project: Path) -> None:
    killed_at_random(daemon, project, replays=4, reals=0, kills=4, seed=1)


@pytest.mark.stress
def test_killed_at_random_moments_of_a_real_search(daemon: Daemon, project: Path) -> None:
    killed_at_random(daemon, project, replays=3, reals=1, kills=4, seed=1)


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_killed_fifty_times(daemon: Daemon, project: Path, seed: int) -> None:
    killed_at_random(daemon, project, replays=8, reals=2, kills=50, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        *("submitted", "half-written", "claimed", "spawned", "ended"),
        *(pytest.param(step, marks=pytest.mark.stress) for step in ("noted", "looked", "settled")),
    ],
)
def test_killed_at_a_step(daemon: Daemon, project: Path, step: str) -> None:
    """The daemon kills itself right after the first occurrence of a step, and a new daemon continues."""
    daemon.start(program=[str(HERE / "killed_at.py"), step])
    request = replay_request(project, "mine", seed=3)
    with contextlib.suppress(Exception):
        daemon.client.submit(request)
    assert daemon.process is not None
    assert daemon.process.wait(timeout=60) == -signal.SIGKILL
    daemon.start()
    # A client that got no reply submits again, which adds no second job.
    (job,) = daemon.client.submit(request)
    (ended,) = daemon.until_ended(job.id)
    assert ended.state is JobState.DONE
    assert len(daemon.client.rows()) == 1
    assert daemon.log().count(f"job {job.id} is done") <= 1
    assert replayed(daemon, job.id) == undisturbed(3)
    assert whole(daemon) and daemon.leaders() == {}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=pytest.mark.stress)
        for moment in ("before-the-profile", "before-the-outcome", "before-the-last-word")
    ],
)
def test_job_and_daemon_killed_when_the_search_is_about_to_end(daemon: Daemon, project: Path, moment: str) -> None:
    daemon.start()
    wrapper = HERE / "job_killed_at.py"
    flag = project / "killed"
    environment = {"KILLED_AT": moment, "KILLED_ONCE": str(flag), "DAEMON": str(daemon.process and daemon.process.pid)}
    request = real_request(project, "mine", python=str(wrapper))
    request = request.model_copy(
        update={"environment": {**request.environment, **environment, "REAL_PYTHON": sys.executable}}
    )
    (job,) = daemon.client.submit(request)
    assert daemon.process is not None
    assert daemon.process.wait(timeout=120) == -signal.SIGKILL
    assert flag.exists() and daemon.leaders() == {}
    trials = len(read_trials(StudyFiles(project / "studies" / "mine")))
    daemon.start()
    (ended,) = daemon.until_ended(job.id)
    assert (ended.state, ended.runs) == (JobState.DONE, 2), ended.status
    assert (project / "studies" / "mine" / "profile.yaml").exists()
    no_trial_twice(project / "studies" / "mine")
    assert len(read_trials(StudyFiles(project / "studies" / "mine"))) == trials


def test_the_runtime_folder_is_wiped_and_the_socket_comes_back(daemon: Daemon) -> None:
    daemon.start()
    shutil.rmtree(daemon.files.runtime)
    assert daemon.until_it_answers()["state"] == "running"
    assert "the socket was taken away" in daemon.log()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "state"), [("resume", JobState.DONE), ("pause", JobState.PAUSED)])
def test_another_boot_id_and_no_runtime_folder(daemon: Daemon, project: Path, policy: str, state: JobState) -> None:
    """Simulates a reboot: the boot id is a new one, and processes and the runtime folder are gone."""
    daemon.start()
    (job,) = daemon.client.submit(acted_request(project, "mine", "waits_the_first_time", on_reboot=policy))
    wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
    daemon.kill()
    for pid in daemon.leaders():
        os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(daemon.files.runtime)
    daemon.start(program=[str(HERE / "rebooted.py")])
    wait_until(lambda: daemon.client.job(job.id).state is state)
    if policy == "pause":
        assert "started anew" in daemon.client.job(job.id).model_dump_json()
        daemon.client.resume(job.id)
        (ended,) = daemon.until_ended(job.id)
        assert ended.state is JobState.DONE


@pytest.mark.slow
def test_only_one_of_four_runs(daemon: Daemon) -> None:
    command = daemon.command()
    four = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(4)]
    try:
        wait_until(lambda: sum(p.poll() is None for p in four) == 1, 120)
        (one,) = [p for p in four if p.poll() is None]
        assert daemon.until_it_answers()["pid"] == one.pid
        for other in four:
            if other is not one:
                assert other.returncode == 2 and other.stderr is not None
                assert b"a daemon runs already" in other.stderr.read()
    finally:
        for process in four:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="choosing a process's number takes a pid namespace, and that root")
def test_the_number_of_a_dead_process_is_somebody_elses_now(daemon: Daemon, project: Path) -> None:
    script = [sys.executable, str(HERE / "number_taken.py"), str(daemon.state), str(project)]
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a pid namespace of its own is not permitted here")
    done = subprocess.run([*namespace, *script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"same number": True, "innocent lives": True, "job": "done"}
