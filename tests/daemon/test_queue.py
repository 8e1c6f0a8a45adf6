"""The queue: acknowledged changes survive crashes, full disks and damaged files."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.layout import QueueFiles
from autotune.base.records import Cancelled, Done, Failed, Job, JobRow, JobState, Paused, Queued, Running
from autotune.daemon.queue import Queue, checksum, open_queue, read_job_file
from tests.support import make_job_request, make_study_spec

NOW = "2026-11-22T03:00:00+00:00"
RUNNING = Running(since=NOW, device="cpu", boot_id="boot", mark="run")
WRITER = Path(__file__).parent / "write_jobs.py"


@pytest.fixture
def files(tmp_path: Path) -> QueueFiles:
    return QueueFiles(tmp_path / "state")


def opened(files: QueueFiles) -> Queue:
    """Open a queue that needs no repair."""
    found = open_queue(files)
    assert (found.aside, found.lost) == (None, ())
    return found.queue


def filled(files: QueueFiles, count: int = 40) -> list[Job]:
    """Write a queue with jobs in all states, close it, and return the jobs."""
    with closing(opened(files)) as queue:
        for i in range(count):
            queue.submit(make_job_request(study=f"net-{i}", priority=i % 3))
        for i, end in enumerate(
            (Done(ended=NOW), Failed(ended=NOW, exit_code=4, why="no data"), Cancelled(ended=NOW)), 1
        ):
            queue.move(i, JobState.QUEUED, RUNNING, runs=1)
            queue.move(i, JobState.RUNNING, end, spent_s=60.0 + i)
        queue.move(4, JobState.QUEUED, Paused(since=NOW, why="asked to"))
        queue.move(5, JobState.QUEUED, RUNNING, runs=1)
        return queue.jobs()


def rows_of(text: str) -> list[JobRow]:
    return [JobRow.model_validate(row) for row in json.loads(text)]


def submit_until_full(queue: Queue, acknowledged: list[Job]) -> None:
    """Submit jobs until it fails, and append those that were acknowledged."""
    for i in itertools.count():
        acknowledged.append(queue.submit(make_job_request(study=f"more-{i}", label="x" * 2000)))


class TestJobs:
    def test_what_is_submitted_is_there_for_the_next_process(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            request = make_job_request(label="größer", environment={"A": "1"}, window=(1320, 420))
            told = queue.submit(request)
        assert (told.id, told.request, told.status, told.runs, told.spent_s) == (1, request, Queued(), 0, 0.0)
        with closing(opened(files)) as again:
            assert again.job(1) == told and again.jobs() == [told]

    def test_the_highest_priority_goes_first_and_then_the_oldest(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            for i, priority in enumerate((0, 5, -1, 5)):
                queue.submit(make_job_request(study=f"net-{i}", priority=priority))
            assert [job.id for job in queue.jobs()] == [2, 4, 1, 3]
            queue.move(4, JobState.QUEUED, RUNNING)
            assert [job.id for job in queue.jobs({JobState.QUEUED})] == [2, 1, 3]
            assert [job.id for job in queue.jobs({JobState.RUNNING, JobState.DONE})] == [4]

    def test_a_job_goes_only_from_where_it_is(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            queue.submit(make_job_request())
            ran = queue.move(1, {JobState.QUEUED, JobState.PAUSED}, RUNNING, runs=1)
            assert (ran.state, ran.runs) == (JobState.RUNNING, 1)
            with pytest.raises(UsageError, match="job 1 is running"):
                queue.move(1, JobState.QUEUED, Cancelled(ended=NOW))
            back = queue.move(1, JobState.RUNNING, Queued(why="somebody else is on the card"), spent_s=2.5)
            again = queue.move(1, JobState.QUEUED, RUNNING, runs=2)
            assert (back.runs, back.spent_s, again.runs, again.spent_s) == (1, 2.5, 2, 2.5)
            assert queue.job(1) == again

    def test_no_two_jobs_share_a_study(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            queue.submit(make_job_request(study="mine"))
            with pytest.raises(UsageError, match="that of job 1"):
                queue.submit(make_job_request(spec=make_study_spec("mine", mark="another")))
            queue.submit(make_job_request(study="mine", studies_dir="/elsewhere"))
            assert [job.id for job in queue.jobs()] == [1, 2]

    def test_what_is_sent_twice_is_taken_once(self, files: QueueFiles) -> None:
        """A client that did not receive the reply repeats the call."""
        with closing(opened(files)) as queue:
            first = queue.submit(make_job_request(study="mine"))
            assert queue.submit(make_job_request(study="mine")) == first
            assert queue.jobs() == [first]

    def test_what_keeps_a_job_from_starting(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            queue.submit(make_job_request("plain"))
            queue.submit(make_job_request("late", not_before=5000.0))
            queue.submit(make_job_request("by-night", window=(22 * 60, 7 * 60)))
            queue.submit(make_job_request("by-day", window=(8 * 60, 18 * 60), priority=1))
            queue.submit(make_job_request("second", after=1))

            def startable(wall_s: float, hour: int) -> list[str]:
                return [queue.job(number).request.spec.name for number in queue.startable(wall_s, hour * 60)]

            assert startable(4999.0, 7) == ["plain"]
            assert startable(5000.0, 6) == ["plain", "late", "by-night"]
            assert startable(4999.0, 22) == ["plain", "by-night"]
            assert startable(4999.0, 8) == ["by-day", "plain"]
            queue.move(1, JobState.QUEUED, RUNNING)
            assert startable(4999.0, 7) == []
            queue.move(1, JobState.RUNNING, Done(ended=NOW))
            assert startable(4999.0, 7) == ["second"]
            assert queue.dependency_failed() == []

    def test_what_waits_for_a_job_that_failed_waits_in_vain(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            queue.submit(make_job_request("first"))
            queue.submit(make_job_request("second", after=1))
            queue.move(1, JobState.QUEUED, Cancelled(ended=NOW))
            assert [job.id for job in queue.dependency_failed()] == [2]

    def test_a_list_says_what_the_jobs_say(self, files: QueueFiles) -> None:
        before = filled(files)
        with closing(opened(files)) as queue:
            rows = rows_of(queue.rows())
            assert [(r.id, r.state, r.study, r.priority, r.submitted) for r in rows] == [
                (j.id, j.state, j.request.spec.name, j.request.priority, j.submitted) for j in before
            ]
            assert {r.id: r.why for r in rows if r.why} == {2: "no data", 4: "asked to"}
            assert [(r.id, r.device, r.since) for r in rows if r.state is JobState.RUNNING] == [(5, "cpu", NOW)]
            assert [r.id for r in rows_of(queue.rows({JobState.PAUSED}))] == [4]
            assert queue.counts() == {state: sum(j.state is state for j in before) for state in JobState}

    def test_who_is_still_to_be_told(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            for i in range(3):
                queue.submit(make_job_request(f"net-{i}"))
            for i, notice in enumerate(("none", "due", "sent"), 1):
                queue.move(i, JobState.QUEUED, Cancelled(ended=NOW), notice=notice)
            assert [job.id for job in queue.notice_due()] == [2]

    def test_what_there_is_not(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            for ask in (
                lambda: queue.job(7),
                lambda: queue.move(7, JobState.QUEUED, RUNNING),
                lambda: queue.submit(make_job_request(after=7)),
            ):
                with pytest.raises(UnknownNameError, match="'7'"):
                    ask()
            assert queue.jobs() == []

    def test_a_closed_one_opens_again(self, files: QueueFiles) -> None:
        queue = opened(files)
        queue.submit(make_job_request())
        queue.close()
        queue.close()
        assert len(queue.jobs()) == 1
        queue.close()


class TestDurability:
    def test_every_commit_is_synced(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            connection = queue._open()
            assert connection.execute("pragma synchronous").fetchone() == (2,)
            assert connection.execute("pragma journal_mode").fetchone() == ("delete",)

    @pytest.mark.parametrize("seed", range(5))
    def test_killed_at_any_moment_nothing_that_was_acknowledged_is_lost(self, files: QueueFiles, seed: int) -> None:
        """A process that submits and moves jobs prints each acknowledged change, and is killed at a random time."""
        process = subprocess.Popen([sys.executable, WRITER, files.folder, str(seed)], stdout=subprocess.PIPE, text=True)
        told: list[Job] = []
        for _ in range(random.Random(seed).randrange(1, 60)):
            told.append(Job.model_validate_json(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        told += [Job.model_validate_json(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        process.stdout.close()
        acknowledged = {job.id: job for job in told}
        with closing(opened(files)) as queue:
            found = {job.id: job for job in queue.jobs()}
            for number, job in acknowledged.items():
                # The last change may have been made but not printed.
                assert found[number] == job or number == told[-1].id or found[number].runs == job.runs + 1
            assert len(found) - len(acknowledged) in (0, 1)
            queue.submit(make_job_request(study="after"))

    def test_a_full_disk_is_said_and_acknowledges_nothing(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            for i in range(3):
                queue.submit(make_job_request(study=f"net-{i}"))
            before = queue.jobs()
            (pages,) = queue._open().execute("pragma page_count").fetchone()
            queue._open().execute(f"pragma max_page_count = {pages + 8}")
            with pytest.raises(MachineError, match="the disk is full"):
                submit_until_full(queue, before)
            assert len(before) > 3 and queue.jobs() == before
            # With free space again.
            assert queue.submit(make_job_request(study="last")).id == len(before) + 1


class TestDamage:
    def test_a_file_that_is_gone_is_made_again(self, files: QueueFiles) -> None:
        before = filled(files)
        files.database.unlink()
        found = open_queue(files)
        with closing(found.queue) as queue:
            assert queue.jobs() == before
        assert (found.aside, found.lost) == (None, ())

    @pytest.mark.parametrize("seed", range(4))
    def test_flipped_or_cut_anywhere_nothing_is_lost_and_nothing_is_taken_for_true(
        self, files: QueueFiles, tmp_path: Path, seed: int
    ) -> None:
        before = filled(files)
        whole = files.database.read_bytes()
        rng = random.Random(seed)
        for number in range(50):
            offset = rng.randrange(len(whole))
            damaged = bytearray(whole)
            if number % 5:
                damaged[offset] ^= 1 << rng.randrange(8)
            else:
                del damaged[offset:]
            files.database.write_bytes(damaged)
            found = open_queue(files)
            with closing(found.queue) as queue:
                # A flipped bit in an unused part of the file needs no repair.
                assert queue.jobs() == before, offset
                assert found.lost == ()
            if found.aside is not None:
                assert found.aside.read_bytes() == damaged
                found.aside.unlink()

    def test_what_cannot_be_read_is_kept_under_another_name(self, files: QueueFiles) -> None:
        filled(files)
        for number in (1, 2):
            files.database.write_bytes(b"this is no database" * number)
            found = open_queue(files)
            found.queue.close()
            assert found.aside == files.database.with_name(f"queue.db.damaged-{number}")
            assert found.aside.read_bytes() == b"this is no database" * number

    def test_jobs_whose_folder_is_damaged_too_are_named(self, files: QueueFiles) -> None:
        before = filled(files, 10)
        cut, flipped = files.job(2).job, files.job(3).job
        cut.write_text(cut.read_text()[:50])
        flipped.write_text(flipped.read_text().replace("net-2", "net-9"))
        files.database.unlink()
        found = open_queue(files)
        with closing(found.queue) as queue:
            assert {j.id for j in queue.jobs()} == {j.id for j in before} - {2, 3}
            # The ids of lost jobs are not reused.
            assert queue.submit(make_job_request(study="new")).id == 11
        assert found.lost == tuple(p.parent.with_name(f"{p.parent.name}.damaged-1") for p in (cut, flipped))
        assert all((folder / cut.name).exists() for folder in found.lost)

    def test_a_damaged_row_is_made_again_from_its_folder(self, files: QueueFiles) -> None:
        before = filled(files)
        with closing(sqlite3.connect(files.database)) as connection, connection:
            connection.execute("update jobs set job = replace(job, '\"runs\":1', '\"runs\":7') where id = 5")
            connection.execute("update jobs set priority = 99 where id = 7")
        with closing(Queue(files)) as queue:
            assert queue.jobs() == before
            assert queue.job(5).runs == 1

    def test_one_whose_folder_is_damaged_too_is_an_error_and_no_job(self, files: QueueFiles) -> None:
        filled(files)
        files.job(5).job.write_text("nothing")
        with closing(sqlite3.connect(files.database)) as connection, connection:
            connection.execute("update jobs set job = replace(job, '\"runs\":1', '\"runs\":7') where id = 5")
        with closing(Queue(files)) as queue:
            with pytest.raises(MachineError, match="the row of job 5 is damaged"):
                queue.jobs()
            assert queue.job(6).id == 6

    def test_what_was_refused_leaves_nothing_to_be_found(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            queue.submit(make_job_request("first"))
            with pytest.raises(UnknownNameError):
                queue.submit_all([make_job_request("second"), make_job_request("third", after=77)])
            told = queue.submit(make_job_request("fourth"))
        files.database.unlink()
        found = open_queue(files)
        with closing(found.queue) as queue:
            assert [j.request.spec.name for j in queue.jobs()] == ["first", "fourth"] and found.lost == ()
            assert told.id == 2

    def test_two_folders_of_one_study_do_not_keep_the_queue_from_opening(self, files: QueueFiles) -> None:
        filled(files, 5)
        copy = files.job(9)
        copy.folder.mkdir()
        text = files.job(3).job.read_text().splitlines()[0].replace('"id":3,', '"id":9,')
        copy.job.write_text(f"{text}\n{checksum(text)}\n")
        files.database.unlink()
        found = open_queue(files)
        with closing(found.queue) as queue:
            assert [j.id for j in sorted(queue.jobs(), key=lambda j: j.id)] == [1, 2, 3, 4, 5]
        assert [p.name for p in found.lost] == ["000009.damaged-1"]

    def test_any_character_may_stand_in_a_job(self, files: QueueFiles) -> None:
        with closing(opened(files)) as queue:
            told = queue.submit(make_job_request(on_done="a\u2028b\u2029c\u0085d\x1ce\nf"))
        assert read_job_file(files.job(1)) == told
        files.database.unlink()
        with closing(open_queue(files).queue) as queue:
            assert queue.jobs() == [told]

    @pytest.mark.parametrize("change", ["drop column sum", "add column more", "rename to tasks", "rename id to id"])
    def test_one_that_a_newer_version_wrote_is_left_alone(self, files: QueueFiles, change: str) -> None:
        filled(files)
        with closing(sqlite3.connect(files.database)) as connection, connection:
            connection.execute(f"alter table jobs {change}")
            connection.execute("pragma user_version = 99")
        before = files.database.read_bytes()
        with pytest.raises(MachineError, match="newer autotune") as caught:
            open_queue(files)
        assert caught.value.advice == "upgrade autotune."
        assert files.database.read_bytes() == before

    def test_rows_that_lack_what_was_added_since_are_read(self, files: QueueFiles) -> None:
        before = filled(files, 5)
        with closing(sqlite3.connect(files.database)) as connection, connection:
            for number, text in connection.execute("select id, job from jobs").fetchall():
                fields = json.loads(text)
                del fields["notice"], fields["request"]["keep_fresh"]
                older = json.dumps(fields)
                connection.execute("update jobs set job = ?, sum = ? where id = ?", (older, checksum(older), number))
        with closing(opened(files)) as queue:
            assert queue.jobs() == before

    @pytest.mark.parametrize("gone", [False, True])
    def test_rows_that_another_version_wrote_are_no_damage(self, files: QueueFiles, gone: bool) -> None:
        filled(files, 5)
        newer = json.dumps({**json.loads(files.job(2).job.read_text().splitlines()[0]), "unheard_of": 1})
        with closing(sqlite3.connect(files.database)) as connection, connection:
            connection.execute("update jobs set job = ?, sum = ? where id = 2", (newer, checksum(newer)))
        files.job(2).job.write_text(f"{newer}\n{checksum(newer)}\n")
        if gone:
            files.database.unlink()
        with pytest.raises(MachineError, match="another version of autotune"):
            open_queue(files)
        assert files.job(2).job.exists() and files.database.exists() is not gone
        assert not list(files.folder.glob("**/*.damaged-*"))

    def test_killed_while_it_was_made_again_it_is_made_again(self, files: QueueFiles) -> None:
        before = filled(files)
        files.database.rename(files.database_in_making)
        files.database_in_making.write_bytes(files.database_in_making.read_bytes()[:5000])
        with closing(open_queue(files).queue) as queue:
            assert queue.jobs() == before
        assert not files.database_in_making.exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(MachineError, match="cannot make"):
        open_queue(QueueFiles(tmp_path / "state"))


def test_the_folders_alone_are_enough(files: QueueFiles, tmp_path: Path) -> None:
    """A missing database is rebuilt, as after restoring a backup without it."""
    before = filled(files)
    elsewhere = QueueFiles(tmp_path / "elsewhere")
    shutil.copytree(files.jobs, elsewhere.jobs)
    with closing(open_queue(elsewhere).queue) as queue:
        assert queue.jobs() == before
