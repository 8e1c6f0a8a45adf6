"""The folder of a study is kept for a job from its submission on; no search on the command line takes it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import MachineError, UsageError
from autotune.base.layout import QueueFiles, StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import JobRequest, StudySpec
from autotune.daemon.client import Retry
from autotune.daemon.devices import Board, Settings
from autotune.daemon.notices import Notices
from autotune.daemon.queue import open_queue
from autotune.daemon.scheduler import Scheduler
from autotune.daemon.server import Handlers
from autotune.search import Environment, search, study_folders
from autotune.study.budget import Reservation, reservation_of, reserve
from autotune.study.request import write_request
from autotune.workload.catalog import find_workload
from tests.support import FakeClock, ScriptedDevices, ScriptedRunner, make_job_request, make_study_spec


class Office:
    """A daemon's handlers, with a real queue and nothing that runs."""

    def __init__(self, folder: Path) -> None:
        self.studies = folder / "studies"
        clock, settings = FakeClock(), Settings()
        self.queue = open_queue(QueueFiles(folder / "state")).queue
        board = Board(ScriptedDevices(), clock, settings.quiet_s)
        self.scheduler = Scheduler(
            self.queue, ScriptedRunner(), board, Notices(clock), settings, clock, lambda: 0.0, "boot-1"
        )
        self.handlers = Handlers(self.queue, self.scheduler, clock)

    def request(self, name: str = "", mark: str = "of-the-job", **changes: Any) -> JobRequest:
        return make_job_request(
            spec=make_study_spec(name, mark=mark), label="tiny", studies_dir=str(self.studies), **changes
        )

    def study(self, name: str) -> StudyFiles:
        return StudyFiles(self.studies / name)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    found = Office(tmp_path)
    yield found
    found.queue.close()


class Begun(Exception):
    """A search has its folder, and would set up its run now."""


def begin(spec: StudySpec, studies: Path) -> None:
    """Begin a search, up to the point where its first process would start.

    Raises:
        Begun: the folder is the search's own.
    """

    def no_launcher(mark: str, devices: int) -> Any:
        raise Begun

    search(
        spec.model_copy(update={"model": "resnet18"}),
        studies,
        Environment(Observer(), FakeClock(), lambda: None, no_launcher),
    )


def test_a_search_by_that_name_is_refused_and_the_job_gets_its_folder(office: Office) -> None:
    (job,) = office.handlers.submit(office.request("X"))
    with pytest.raises(UsageError, match=rf"study 'X' is kept for job {job.id} of the daemon") as caught:
        begin(make_study_spec("X", mark="of-a-search"), office.studies)
    assert "jobs show 1" in str(caught.value.advice)
    with pytest.raises(Begun):
        begin(job.request.spec, office.studies)
    assert office.study("X").request.exists() and not office.study("X").reservation.exists()


def test_numbers_are_given_once(office: Office) -> None:
    (job,) = office.handlers.submit(office.request())
    assert job.request.spec.name == "tiny-1"
    ref = find_workload("resnet18", {}).model_copy(update={"name": "tiny"})
    assert study_folders.new_folder(make_study_spec("", mark="of-a-search"), ref, office.studies).name == "tiny-2"
    (other,) = office.handlers.submit(office.request(mark="another"))
    assert other.request.spec.name == "tiny-3"
    # The reply to the first submission was lost, and it is sent again.
    assert office.handlers.submit(office.request()) == [job]
    assert sorted(path.name for path in office.studies.iterdir()) == ["tiny-1", "tiny-2", "tiny-3"]


@pytest.mark.parametrize("first", ["job", "search"])
def test_of_two_that_come_at_the_same_moment_one_gives_way(
    office: Office, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Each looks for the other's file after it has written its own, and acknowledges nothing before that."""
    spec = make_study_spec("X", mark="of-a-search")
    if first == "job":
        found = study_folders.new_folder

        def reserved_meanwhile(*given: Any) -> StudyFiles:
            files = found(*given)
            office.handlers.submit(office.request("X"))
            return files

        monkeypatch.setattr("autotune.search.new_folder", reserved_meanwhile)
        with pytest.raises(UsageError, match="is kept for job 1"):
            begin(spec, office.studies)
        assert not office.study("X").request.exists() and office.study("X").reservation.exists()
        return
    office.study("X").folder.mkdir(parents=True)
    taken = reserve

    def begun_meanwhile(files: StudyFiles, reservation: Reservation) -> None:
        write_request(files, spec)
        taken(files, reservation)

    monkeypatch.setattr("autotune.daemon.server.reserve", begun_meanwhile)
    with pytest.raises(UsageError, match="exists already"):
        office.handlers.submit(office.request("X"))
    assert office.queue.jobs() == [] and not office.study("X").reservation.exists()
    assert office.study("X").request.exists()


def test_what_is_not_acknowledged_keeps_nothing(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="unknown job"):
        office.handlers.submit(office.request(), office.request("X", "x"), office.request("Y", "y", after=99))
    assert list(office.studies.iterdir()) == []

    def no_more_room(*given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("autotune.daemon.queue._insert", no_more_room)
    with pytest.raises(MachineError):
        office.handlers.submit(office.request("X"))
    assert list(office.studies.iterdir()) == []


def test_what_a_killed_daemon_reserved_for_no_job_is_taken_over(office: Office) -> None:
    state = str(office.queue.files.folder)
    reserve(office.study("X"), Reservation(job=1, mark="never acknowledged", daemon=state))
    (job,) = office.handlers.submit(office.request("X"))
    found = reservation_of(office.study("X"))
    assert found is not None and found.mark == job.request.spec.mark
    # One of another daemon is never taken over, since its queue cannot be asked.
    reserve(office.study("Y"), Reservation(job=4, mark="of another daemon", daemon=f"{state}-2"))
    with pytest.raises(UsageError, match="is kept for job 4"):
        office.handlers.submit(office.request("Y", "y"))


def test_a_job_that_is_queued_again_keeps_its_folder_again(office: Office) -> None:
    (job,) = office.handlers.submit(office.request("X"))
    office.scheduler.cancel(job.id)
    office.study("X").reservation.unlink()
    office.study("X").folder.rmdir()
    office.handlers._result(Retry(id=job.id))
    with pytest.raises(UsageError, match="is kept for job 1"):
        begin(make_study_spec("X", mark="of-a-search"), office.studies)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', "\0" * 100])
def test_a_file_that_is_no_reservation_is_one_sentence(tmp_path: Path, text: str) -> None:
    files = StudyFiles(tmp_path)
    files.reservation.write_text(text)
    with pytest.raises(UsageError, match=r"reserved\.json cannot be read"):
        reservation_of(files)


def test_a_folder_that_cannot_be_made_is_said_at_submission(office: Office) -> None:
    office.studies.write_text("a file")
    for name in ("", "X"):
        with pytest.raises(MachineError, match="cannot make"):
            office.handlers.submit(office.request(name))
    assert office.queue.jobs() == []
