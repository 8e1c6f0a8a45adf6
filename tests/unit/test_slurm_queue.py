"""What Slurm's words for a job mean, and what is known of one that it has forgotten. Its commands are played here."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest

from autotune.base.errors import InfeasibleError, MachineError, UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import DaemonFiles, StudyFiles
from autotune.base.records import JobState
from autotune.cluster.slurm_queue import SlurmJob, SlurmQueue
from autotune.cluster.slurm_run import _ENDING, WARNING, StudyRun
from autotune.study.loop import note_failure

FINISHED = Path(__file__).parents[1] / "old" / "studies" / "finished"


class Played:
    """A state folder with notes of jobs, and commands of Slurm's that print what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = DaemonFiles(folder / "state", folder / "run")
        self.files.slurm.mkdir(parents=True)
        self.queue = SlurmQueue(self.files)
        self.says("squeue", "")
        self.says("sacct", "", error="sacct: error: Slurm accounting storage is disabled")

    def says(self, command: str, text: str, *, error: str = "") -> None:
        path = self.folder / "bin" / command
        path.parent.mkdir(exist_ok=True)
        lines = ["#!/bin/sh", f"echo x >> {self.folder}/{command}.calls"]
        lines += [f"echo '{error}' >&2", "exit 1"] if error else [f"printf '%s' '{text}'"]
        path.write_text("\n".join(lines))
        path.chmod(0o755)

    def calls(self, command: str) -> int:
        path = self.folder / f"{command}.calls"
        return len(path.read_text().split()) if path.exists() else 0

    def note(self, number: int, study: Path | None = None) -> None:
        folder = study or self.folder / f"study-{number}"
        folder.mkdir(exist_ok=True)
        note = SlurmJob(id=number, study=str(folder), model="tiny", log="/none", submitted="2026-11-23T22:00:00+00:00")
        write_atomic(self.files.slurm_job(number), note.model_dump_json())

    def states(self) -> dict[int, JobState]:
        return {job.id: job.state for job in self.queue.look().jobs}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return Played(tmp_path)


def test_every_state_is_one_of_ours_after_one_call(played: Played) -> None:
    words = {
        1: ("PENDING", "", "Resources", JobState.QUEUED),
        2: ("PENDING", "", "JobHeldUser", JobState.PAUSED),
        3: ("PENDING", "", "BeginTime", JobState.QUEUED),
        4: ("CONFIGURING", "n1", "None", JobState.RUNNING),
        5: ("RUNNING", "n1", "None", JobState.RUNNING),
        6: ("COMPLETING", "n1", "None", JobState.RUNNING),
        7: ("SUSPENDED", "n1", "None", JobState.PAUSED),
        8: ("CANCELLED", "", "None", JobState.CANCELLED),
        9: ("TIMEOUT", "n1", "TimeLimit", JobState.FAILED),
        10: ("NODE_FAIL", "n1", "None", JobState.FAILED),
        11: ("COMPLETED", "n1", "None", JobState.DONE),
        12: ("A_STATE_OF_TOMORROW", "n1", "None", JobState.RUNNING),
    }
    for number in words:
        played.note(number)
    lines = [f"{n}|{word}|{node}|N/A|{reason}" for n, (word, node, reason, _) in words.items()]
    played.says("squeue", "\n".join([*lines, "77|RUNNING|n1|N/A|None", "no job at all"]) + "\n")
    assert played.states() == {number: state for number, (*_, state) in words.items()}
    assert played.calls("squeue") == 1 and played.calls("sacct") == 0
    assert "Slurm says TIMEOUT" in str(played.queue.job(9).why)


def test_a_finished_search_is_done_whatever_slurm_remembers_and_its_profile_is_kept_once(played: Played) -> None:
    study = played.folder / "finished"
    shutil.copytree(FINISHED, study)
    played.note(1, study)
    for _ in range(2):
        (job,) = played.queue.look().jobs
        assert job.state is JobState.DONE and "the baseline" in str(job.why)
    # A job that has ended is not asked for again.
    assert played.calls("squeue") == 1
    assert len(list(played.files.profiles.glob("*/history/*.yaml"))) == 1


def test_a_search_that_failed_says_why(played: Played) -> None:
    played.note(1)
    note_failure(StudyFiles(played.folder / "study-1"), InfeasibleError("nothing meets it"))
    played.says("squeue", "1|FAILED|n1|N/A|NonZeroExitCode\n")
    (job,) = played.queue.look().jobs
    assert (job.state, job.why, job.exit_code) == (JobState.FAILED, "nothing meets it", 3)


def test_what_slurm_has_forgotten_its_accounts_may_know(played: Played) -> None:
    played.note(1)
    played.note(2)
    played.says("sacct", "1|CANCELLED by 1000|n1\n")
    assert played.states() == {1: JobState.CANCELLED, 2: JobState.FAILED}
    assert "Slurm has forgotten it" in str(played.queue.job(2).why)
    assert played.calls("sacct") == 1


def test_without_an_answer_the_last_known_state_stays(played: Played) -> None:
    played.note(1)
    played.says("squeue", "1|RUNNING|n1|2026-11-25T22:00:00|None\n")
    assert played.states() == {1: JobState.RUNNING}
    played.says("squeue", "", error="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    found = played.queue.look()
    assert found.jobs[0].state is JobState.RUNNING and found.jobs[0].node == "n1"
    assert found.troubles == ("Slurm does not answer: Unable to contact slurm controller (connect failure)",)
    with pytest.raises(MachineError, match="does not answer"):
        played.queue.cancel(1)


def test_slurm_may_refuse_to_cancel(played: Played) -> None:
    played.note(1)
    played.says("squeue", "1|RUNNING|n1|N/A|None\n")
    played.says("scancel", "", error="scancel: error: Kill job error on job id 1: Access/permission denied")
    with pytest.raises(UsageError, match="Slurm refuses: Kill job error on job id 1: Access/permission denied"):
        played.queue.cancel(1)


def test_a_damaged_note_hides_no_other(played: Played) -> None:
    played.note(1)
    played.files.slurm_job(2).write_text("{")
    played.says("squeue", "1|PENDING||N/A|Priority\n")
    found = played.queue.look()
    assert [job.id for job in found.jobs] == [1] and "cannot be read" in found.troubles[0]
    assert played.queue.job(1).state is JobState.QUEUED


@pytest.mark.parametrize("number", [15, 9])
def test_a_search_that_ends_before_it_listens_to_signals_is_requeued(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is still importing, so that SIGTERM kills it. SIGKILL is nobody's request to go on later."""
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nkill -{number} $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    played.says("squeue", "", error="squeue: error: Unable to contact slurm controller")
    study, requeued = shutil.copytree(FINISHED, tmp_path / "study"), []
    before = {each: signal.getsignal(each) for each in _ENDING}
    signal.signal(WARNING, lambda *told: requeued.append(told))
    try:
        with pytest.raises(SystemExit) as ended:
            StudyRun(str(study), {})()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == 128 + number and len(requeued) == (number == 15)
