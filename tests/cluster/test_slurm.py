"""Searches in the queue of a real Slurm: preempted, on nodes that die or are drained, while its controller restarts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from autotune.profile import read
from autotune.space import key
from autotune.study.tables import read_trials

from ..process.alive import wait_until  # noqa: TID252
from .conftest import SHORT, User, processes_of
from .slurm import NODES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
DOCS = Path(__file__).parents[2] / "docs"


def node_of(user: User, number: int) -> str:
    return user.cluster.ask("squeue", "--noheader", f"--jobs={number}", "--format=%N").strip()


def assert_nothing_twice(user: User, study: str) -> None:
    trials = read_trials(user.study(study))
    finished = Counter(key(t.config) for t in trials if t.result.status != "interrupted")
    assert finished and max(finished.values()) == 1, f"measured twice: {finished.most_common(2)}"


def test_a_cell_of_a_matrix_is_in_slurms_queue_once(user: User) -> None:
    (user.folder / "matrix.yaml").write_text(
        "models: [{model: tiny.py, device: cpu}]\ntargets: {nodes: {to: slurm, sbatch: [hold]}}\nbatches: [8]\n"
    )
    (first,), (second,) = (user.json("submit", "matrix.yaml")["cells"] for _ in range(2))
    assert not first["left_out"] and second["left_out"] and second["job"] == first["job"]
    assert second["why"] == f"job {first['job']} is paused"
    assert user.study(first["study"]).request.exists()
    assert len(user.cluster.ask("squeue", "--noheader").splitlines()) == 1


def test_three_searches_on_two_nodes_with_all_that_happens_to_them(user: User) -> None:
    cluster = user.cluster
    one, two, three = numbers = [user.submit(name) for name in ("one", "two", "three")]
    user.until_measuring("one", after=2)
    # Preempted: every process of the job gets SIGTERM.
    cluster.ask("scontrol", "requeue", str(one))
    # Its node dies, with everything on it.
    user.until_measuring("two", after=2)
    dead = node_of(user, two)
    (other,) = set(NODES) - {dead}
    cluster.end(f"slurmd-{dead}", signal.SIGKILL)
    for pid in processes_of(two):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.ask("scontrol", "update", f"nodename={dead}", "state=down", "reason=dead")
    # The controller is restarted while jobs run and wait.
    cluster.end("slurmctld")
    done = user.run("jobs", "--json")
    assert done.returncode == 0 and "Slurm does not answer" in done.stderr
    cluster.start_controller()
    cluster.start_node(dead)
    cluster.ask("scontrol", "update", f"nodename={dead}", "state=resume")
    # As Slurm does 90 s before the job's time is over.
    user.until_measuring("three", after=2)
    cluster.ask("scancel", "--batch", "--signal=USR2", str(three))
    for number in numbers:
        user.until_started_again(number)
    # A drained node finishes what it has begun.
    cluster.ask("scontrol", "update", f"nodename={other}", "state=drain", "reason=maintenance")
    try:
        assert user.until_ended(*numbers) == dict.fromkeys(numbers, "done")
    finally:
        cluster.ask("scontrol", "update", f"nodename={other}", "state=resume")
    assert [user.restarts(number) for number in numbers] == [1, 1, 1]
    for name, number in zip(("one", "two", "three"), numbers, strict=True):
        files = user.study(name)
        assert files.profile.exists(), user.log(number)
        assert read(files.profile).provenance.study == name
        assert_nothing_twice(user, name)
    assert "interrupted" in user.log(one) and "interrupted" in user.log(three)
    assert {path.name for path in (user.folder / "studies").iterdir()} == {"one", "two", "three"}
    # All three are for one training on one kind of hardware.
    (slot,) = user.json("profiles")["profiles"]
    assert slot["model"] == str(user.folder / "tiny.py")
    assert len(list((user.folder / "state" / "profiles").glob("*/history/*.yaml"))) == 3
    text = user.run("jobs").stdout
    assert f"slurm:{one}" in text and "the baseline" in text
    assert "the baseline" in user.run("jobs", "show", f"slurm:{one}").stdout
    assert user.run("jobs", "wait", f"slurm:{one}").returncode == 0


def test_a_job_is_cancelled(user: User) -> None:
    running = user.submit("running")
    wait_until(lambda: user.states() == {running: "running"})
    waiting = user.submit("waiting", "--sbatch", "hold")
    assert user.states() == {running: "running", waiting: "paused"}
    said = user.run("jobs", "cancel", f"slurm:{waiting}")
    assert (said.returncode, said.stdout) == (0, f"job slurm:{waiting} is cancelled\n")
    assert user.run("jobs", "cancel", f"slurm:{running}").returncode == 0
    assert user.until_ended(running) == {running: "cancelled"}
    assert user.run("jobs", "wait", f"slurm:{running}").returncode == 130
    again = user.run("jobs", "cancel", f"slurm:{running}")
    assert (again.returncode, again.stderr) == (2, f"autotune: job slurm:{running} is cancelled.\n")
    wait_until(lambda: not processes_of(running))


def test_what_slurm_refuses_leaves_no_study(user: User) -> None:
    done = user.run("submit", "--to", "slurm", *SHORT, "--partition", "nowhere", "--study", "lost")
    assert done.returncode == 2 and "Slurm refuses" in done.stderr and "partition" in done.stderr
    assert "Traceback" not in done.stderr
    assert not user.study("lost").folder.exists()
    unknown = user.run("jobs", "show", "slurm:999999")
    assert unknown.returncode == 2 and "unknown job 'slurm:999999'" in unknown.stderr


def test_without_submitit(user: User) -> None:
    (user.folder / "lacking").mkdir()
    (user.folder / "lacking" / "submitit.py").write_text("raise ImportError\n")
    path = os.pathsep.join([str(user.folder / "lacking"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = user.run("submit", "--to", "slurm", *SHORT, env={"PYTHONPATH": path})
    assert done.returncode == 5 and "submitit is not installed" in done.stderr
    assert not (user.folder / "studies").exists()


def test_the_batch_script_of_the_documentation(user: User) -> None:
    page = (DOCS / "slurm.md").read_text()
    script = next(
        block for block in re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "#SBATCH" in block
    )
    options = " ".join(SHORT)
    assert "--model resnet50 --data /data --budget 30m" in script and "/shared/studies" in script
    script = script.replace("--model resnet50 --data /data --budget 30m", options)
    script = script.replace("/shared/studies", str(user.folder / "studies"))
    # This cluster has no cards, and its nodes say nothing of their memory.
    script = re.sub(r"^#SBATCH --(partition|gres|cpus-per-task|mem)=.*\n", "", script, flags=re.MULTILINE)
    (user.folder / "search.sbatch").write_text(script)
    done = user.cluster.ask("sbatch", "--parsable", f"--chdir={user.folder}", str(user.folder / "search.sbatch"))
    number = int(done)
    user.until_measuring("resnet50", after=2)
    # As Slurm does, 60 s before the job's time is over.
    user.cluster.ask("scancel", "--batch", "--signal=TERM", str(number))
    user.until_started_again(number)

    def state() -> str:
        return user.cluster.ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T").strip()

    wait_until(lambda: state() in ("COMPLETED", "FAILED"), 120)
    log = (user.folder / f"autotune-{number}.log").read_text()
    assert state() == "COMPLETED", log
    assert user.restarts(number) == 1
    assert_nothing_twice(user, "resnet50")
    assert read(user.study("resnet50").profile).provenance.study == "resnet50"
