"""Failures of the machine: full disk, failing syncs, damaged database, hanging main loop, leftover processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import MachineError
from autotune.base.records import Done, Job, JobState
from autotune.daemon.notices import Notices
from autotune.daemon.queue import Queue
from autotune.launcher.watch import is_alive
from tests.support import FakeClock, make_job_request

from ..process.alive import on_small_disk, wait_until  # noqa: TID252
from .conftest import Daemon, acted_request, replay_request

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_disk_that_fills_up(tmp_path: Path, project: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    told = on_small_disk(small, "1m", sys.executable, HERE / "small_disk.py", small, project)
    refused = [t for t in told if "refused" in t]
    assert all(t["code"] == 5 and ("full" in t["says"] or "No space" in t["says"]) for t in refused), refused
    assert [t["refused"] for t in refused[1:]] == ["on the full disk", "a wish"]
    filled, again, waiting, end = (t for t in told if "refused" not in t)
    assert len(filled["acknowledged"]) >= 3
    # The queue has exactly the acknowledged jobs.
    assert filled["rows"] == filled["acknowledged"] == again["found"]
    assert waiting == {"status": "running", "runnable": "queued"}
    assert end["last"] == "done" and end["ended"] == 0
    assert set(filled["acknowledged"]) < set(end["found"])


@pytest.mark.skipif(shutil.which("strace") is None, reason="failing syncs are made by strace")
def test_what_could_not_be_synced_is_not_acknowledged(daemon: Daemon, project: Path) -> None:
    daemon.start("--quiet-for", "10h")
    assert daemon.process is not None
    (before,) = daemon.client.submit(replay_request(project, "before"))
    tracer = subprocess.Popen(
        [
            *("strace", "-f", "-p", str(daemon.process.pid), "-o", "/dev/null"),
            *("-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:error=EIO"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    if "attached" not in tracer.stderr.readline():
        tracer.kill()
        tracer.wait()
        tracer.stderr.close()
        pytest.skip("tracing a process is not permitted here")
    try:
        for number in range(3):
            with pytest.raises(MachineError):
                daemon.client.submit(replay_request(project, f"failing-{number}"))
        with pytest.raises(MachineError):
            daemon.client.cancel(before.id)
        assert daemon.client.status()["pid"] == daemon.process.pid
        assert [row.id for row in daemon.client.rows()] == [before.id]
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        tracer.stderr.close()
    (after,) = daemon.client.submit(replay_request(project, "after"))
    daemon.kill()
    daemon.start("--quiet-for", "10h")
    assert [(row.id, row.state) for row in daemon.client.rows()] == [
        (before.id, JobState.QUEUED),
        (after.id, JobState.QUEUED),
    ]


def test_a_database_that_was_damaged_is_made_again_and_said(daemon: Daemon, project: Path) -> None:
    daemon.start("--quiet-for", "10h")
    for number in range(3):
        daemon.client.submit(acted_request(project, f"mine-{number}", "well"))
    daemon.kill()
    content = bytearray(daemon.files.queue.database.read_bytes())
    content[len(content) // 2 :] = b"\0" * (len(content) - len(content) // 2)
    daemon.files.queue.database.write_bytes(content)
    daemon.start()
    (note,) = daemon.client.status()["notes"]
    assert "queue.db.damaged-1" in note and (daemon.state / "queue.db.damaged-1").read_bytes() == content
    assert [job.state for job in daemon.until_ended(1, 2, 3)] == [JobState.DONE] * 3


def test_a_database_that_is_taken_away_from_under_it_is_made_again(daemon: Daemon, project: Path) -> None:
    daemon.start("--quiet-for", "10h")
    (job,) = daemon.client.submit(replay_request(project, "mine"))
    daemon.files.queue.database.unlink()
    wait_until(lambda: any("taken away" in note for note in daemon.client.status()["notes"]))
    assert [row.id for row in daemon.client.rows()] == [job.id]
    (other,) = daemon.client.submit(replay_request(project, "other"))
    assert other.id == job.id + 1
    # If the jobs' folders are gone too, the daemon reports an error instead of making an empty queue.
    daemon.files.queue.jobs.rename(daemon.state / "elsewhere")
    daemon.files.queue.database.unlink()
    wait_until(lambda: "was taken away" in daemon.log().splitlines()[-1])
    with pytest.raises(MachineError):
        daemon.client.submit(replay_request(project, "lost"))
    assert not daemon.files.queue.jobs.exists()


class TestWatchdog:
    """The systemd watchdog, with a test socket in place of systemd."""

    def listen(self, daemon: Daemon, folder: Path) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        found.bind(str(folder / "notify"))
        found.settimeout(20.0)
        daemon.env = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "4000000"}
        return found

    def hear(self, listener: socket.socket, wanted: bytes) -> None:
        while listener.recv(1000) != wanted:
            pass

    @pytest.mark.slow
    def test_it_is_fed_as_long_as_the_loop_turns(self, daemon: Daemon, tmp_path: Path) -> None:
        with self.listen(daemon, tmp_path) as listener:
            daemon.start()
            self.hear(listener, b"READY=1")
            for _ in range(3):
                self.hear(listener, b"WATCHDOG=1")
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            self.hear(listener, b"STOPPING=1")
            assert daemon.process.wait(timeout=20) == 0

    @pytest.mark.slow
    def test_a_scheduler_that_stands_still_feeds_nobody(self, daemon: Daemon, tmp_path: Path) -> None:
        with self.listen(daemon, tmp_path) as listener:
            freeze = tmp_path / "freeze"
            daemon.env["FREEZE"] = str(freeze)
            daemon.start(program=[str(HERE / "frozen.py")])
            self.hear(listener, b"WATCHDOG=1")
            freeze.touch()
            wait_until((tmp_path / "freeze.frozen").exists)
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while listener.recv(1000):
                    pass
            listener.settimeout(4.0)
            with pytest.raises(TimeoutError):
                listener.recv(1000)


@pytest.mark.slow
def test_stop_ends_what_runs_and_the_next_one_goes_on(daemon: Daemon, project: Path) -> None:
    daemon.start()
    (job,) = daemon.client.submit(acted_request(project, "mine", "waits_the_first_time"))
    wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
    assert daemon.stop() == 0
    assert daemon.leaders() == {}
    daemon.start()
    (ended,) = daemon.until_ended(job.id)
    assert (ended.state, ended.runs, ended.faults) == (JobState.DONE, 2, 0)


def test_one_that_does_not_listen_is_killed_when_the_daemon_ends(daemon: Daemon, project: Path) -> None:
    daemon.start()
    (job,) = daemon.client.submit(acted_request(project, "mine", "deaf"))
    wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
    daemon.client.stop(now=True)
    assert daemon.process is not None and daemon.process.wait(timeout=20) == 0
    assert daemon.leaders() == {}
    assert not any(str(daemon.state) in command for command in commands())


def commands() -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{entry}/cmdline").read_text() if entry.isdigit() else "")
    return found


class TestWhatIsLeftBehind:
    """Processes that outlive their job or notice, and descriptors."""

    @pytest.mark.slow
    def test_many_jobs_leave_no_descriptor_open(self, daemon: Daemon, project: Path) -> None:
        daemon.start()
        assert daemon.process is not None
        descriptors = Path(f"/proc/{daemon.process.pid}/fd")
        requests = [acted_request(project, f"job-{n}", "well", on_done="true") for n in range(13)]
        (first,) = daemon.client.submit(requests[0])
        daemon.until_ended(first.id)
        wait_until(lambda: daemon.client.job(first.id).notice == "sent")
        before = len(list(descriptors.iterdir()))
        jobs = daemon.client.submit(*requests[1:])
        daemon.until_ended(*(job.id for job in jobs))
        wait_until(lambda: all(daemon.client.job(job.id).notice == "sent" for job in jobs))
        # A call that is just being closed may still be counted.
        wait_until(lambda: len(list(descriptors.iterdir())) <= before)

    def test_a_jobs_orphans_are_ended_even_with_a_clean_environment(self, daemon: Daemon, project: Path) -> None:
        daemon.start()
        (job,) = daemon.client.submit(acted_request(project, "mine", "leaves_an_orphan"))
        (ended,) = daemon.until_ended(job.id)
        pid = int((daemon.files.queue.job(job.id).folder / "orphan").read_text())
        # The orphan was killed before the job was reported as done.
        assert ended.state is JobState.DONE and not is_alive(pid)

    def test_what_a_notice_starts_is_its_users_own(self, daemon: Daemon, project: Path) -> None:
        daemon.start()
        left = f"(sleep 300 & echo $! > {project}/left)"
        (first,) = daemon.client.submit(acted_request(project, "first", "well", on_done=left))
        daemon.until_ended(first.id)
        wait_until((project / "left").exists)
        (second,) = daemon.client.submit(acted_request(project, "second", "well"))
        daemon.until_ended(second.id)
        pid = int((project / "left").read_text())
        assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)


class TestNotices:
    @pytest.mark.slow
    @pytest.mark.parametrize(("command", "notice"), [("sleep 1", "sent"), ("sleep 300; true", "due")])
    def test_none_outlives_the_daemon(self, daemon: Daemon, project: Path, command: str, notice: str) -> None:
        """A short one is waited for, and one that is killed is sent again by the next daemon."""
        daemon.start()
        told = f"echo $$ >> {project}/pid; {command}"
        (job,) = daemon.client.submit(acted_request(project, "mine", "well", on_done=told))
        wait_until(lambda: (project / "pid").exists() and (project / "pid").read_text().endswith("\n"))
        assert daemon.stop() == 0
        (pid,) = map(int, (project / "pid").read_text().split())
        wait_until(lambda: not is_alive(pid))
        with contextlib.closing(Queue(daemon.files.queue)) as queue:
            assert queue.job(job.id).notice == notice

    def test_a_command_and_an_address_are_told(self, daemon: Daemon, project: Path) -> None:
        told: list[dict[str, Any]] = []

        class Listener(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        with HTTPServer(("127.0.0.1", 0), Listener) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            daemon.start()
            command = f'cat > {project}/told.json; echo "$AUTOTUNE_JOB_ID $AUTOTUNE_JOB_STATE" > {project}/told.txt'
            one, two = daemon.client.submit(
                acted_request(project, "well", "well", on_done=command),
                acted_request(project, "badly", "badly", on_done=f"http://127.0.0.1:{server.server_port}/hook"),
            )
            wait_until(lambda: [daemon.client.job(j.id).notice for j in (one, two)] == ["sent", "sent"])
            server.shutdown()
            thread.join()
        assert (project / "told.txt").read_text() == f"{one.id} done\n"
        assert json.loads((project / "told.json").read_text())["state"] == "done"
        (posted,) = told
        assert (posted["id"], posted["state"], posted["why"]) == (two.id, "failed", "no such data")

    def test_one_that_fails_is_tried_three_times_and_holds_up_nobody(self, tmp_path: Path) -> None:
        clock = FakeClock()
        notices = Notices(clock)
        request = make_job_request(on_done=f"echo >> {tmp_path}/tries; exit 1", folder=str(tmp_path / "gone"))
        job = Job(id=7, submitted="", request=request, status=Done(ended=""), notice="due")

        def over() -> dict[int, bool]:
            notices.start(job)
            clock.advance(40.0)
            return notices.finished()

        wait_until(lambda: over() == {7: False})
        assert len((tmp_path / "tries").read_text().splitlines()) == 3
        # The result is kept until `forget` is called, and the notice is not sent again meanwhile.
        notices.start(job)
        assert notices.finished() == {7: False}
        notices.forget(7)
        assert notices.finished() == {}
