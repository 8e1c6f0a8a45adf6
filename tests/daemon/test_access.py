"""Access to the daemon's socket: permissions, invalid calls and misbehaving clients."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.base.errors import DaemonUnreachableError, MachineError, UsageError
from autotune.base.layout import DaemonFiles, find_daemon
from autotune.base.records import JobState
from autotune.daemon.client import CALL_BYTES, Client, Reply, short_name
from autotune.daemon.server import Server

from .conftest import Daemon, replay_request


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that starts no jobs, shared by the tests of this module."""
    # The path is longer than the maximum length of a socket's address.
    folder = tmp_path_factory.mktemp("talking") / "a-rather-long-name-for-a-folder" / ("deep" * 20)
    folder.mkdir(parents=True)
    found = Daemon(folder / "state", ("--quiet-for", "10h")).start()
    yield found
    assert found.stop() == 0


def connected(daemon: Daemon) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(20.0)
    with short_name(daemon.files.socket) as name:
        found.connect(name)
    return found


def said(daemon: Daemon, line: bytes) -> dict[str, object]:
    """Send a line and return the reply; empty if the connection is closed without one."""
    with connected(daemon) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while found := connection.recv(2**16):
                answer += found
    return json.loads(answer) if answer else {}


def still_answers(daemon: Daemon) -> None:
    # Less than the five seconds after which silent connections are closed. `benchmarks/daemon.py` measures the latency.
    assert Client(daemon.files, limit_s=4.0).status()["state"] == "running"


def test_folder_and_socket_are_the_users_own(talking: Daemon) -> None:
    assert stat.S_IMODE(talking.state.stat().st_mode) == 0o700
    assert stat.S_IMODE(talking.files.runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE(talking.files.socket.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user takes root")
def test_another_user_is_refused_even_where_the_folders_let_him_in() -> None:
    knock = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1]);"
        's.sendall(b\'{"version": 1, "call": {"op": "status"}}\\n\'); print(len(s.recv(100)))'
    )
    somebody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", knock]

    def knocks(daemon: Daemon) -> str:
        done = subprocess.run([*somebody, daemon.files.socket], capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    # In a folder that every user can enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        daemon = Daemon(Path(folder) / "state").start()
        try:
            assert "Permission denied" in knocks(daemon)
            daemon.state.chmod(0o777)
            daemon.files.runtime.chmod(0o777)
            daemon.files.socket.chmod(0o666)
            # The connection is closed before or after the client has sent its call.
            assert knocks(daemon).split(":")[0] in ("0", "ConnectionResetError", "BrokenPipeError")
            assert "a process of user 65534 was refused" in daemon.log()
            still_answers(daemon)
        finally:
            daemon.stop()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\n", "no call"),
        (b"GET / HTTP/1.1\r\n", "no call"),
        (b"[]\n", "no call"),
        (b'{"version": 99, "call": {"op": "status"}}\n', "restart the daemon"),
        (b'{"call": {"op": "status"}}\n', "restart the daemon"),
        (b'{"version": 1}\n', "no call"),
        (b'{"version": 1, "call": {"op": "explode"}}\n', "no call"),
        (b'{"version": 1, "call": {"op": "show", "id": "1; drop table jobs"}}\n', "no call"),
        (b'{"version": 1, "call": {"op": "show", "id": 1e400}}\n', "no call"),
        (b'{"version": 1, "call": {"op": "submit", "requests": []}}\n', "no call"),
        (b'{"version": 1, "call": {"op": "show", "id": 4711}}\n', "unknown job"),
        (b'{"version": 1, "call": {"op": "status", "more": 1}}\n', "no call"),
        (b"[" * 100_000 + b"\n", "no call"),
    ],
)
def test_what_is_no_call_gets_one_sentence(talking: Daemon, line: bytes, words: str) -> None:
    error = said(talking, line)["error"]
    assert isinstance(error, dict)
    assert words in f"{error['message']} {error.get('advice')}" and error["exit_code"] == 2
    still_answers(talking)


def test_random_bytes(talking: Daemon) -> None:
    rng = random.Random(5)
    for _ in range(200):
        said(talking, rng.randbytes(rng.randrange(1, 2000)) + rng.choice([b"", b"\n"]))
    still_answers(talking)


def test_a_megabyte_is_refused(talking: Daemon) -> None:
    answer = said(talking, b"x" * 2**20)
    assert not answer or "at the most" in str(answer["error"])
    with pytest.raises(UsageError, match="at the most"):
        Client(talking.files).submit(replay_request(Path("/nowhere"), "huge", environment={"A": "x" * CALL_BYTES}))
    still_answers(talking)


@pytest.mark.slow
def test_five_hundred_who_say_nothing_and_one_who_reads_nothing(talking: Daemon) -> None:
    talkers = []
    try:
        for number in range(500):
            talkers.append(connected(talking))
            if number % 3 == 0:
                with contextlib.suppress(OSError):
                    talkers[-1].sendall(b'{"version": 1, ')
            if number % 50 == 0:
                still_answers(talking)
        still_answers(talking)
        # The server has closed connections that did not complete a call, so a read returns nothing.
        assert talkers[0].recv(10) == b""
        assert talkers[-1].recv(10) == b""
    finally:
        for talker in talkers:
            talker.close()
    assert talking.client.metrics().count("autotune_connections_refused_total") == 3
    still_answers(talking)


def test_two_hundred_whose_calls_arrive_together_are_all_replied_to(tmp_path: Path) -> None:
    server = Server(tmp_path / "made" / "socket", lambda line: Reply(result={"said": line.decode()}))
    callers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(200)]
    try:
        for number, caller in enumerate(callers):
            caller.connect(str(server.path))
            caller.sendall(b"%d\n" % number)
        while server.serve(0.1) or select.select(callers, (), (), 0)[0] != callers:
            pass
        assert [json.loads(caller.recv(2**10))["result"]["said"] for caller in callers] == list(map(str, range(200)))
        assert server.refused == 0
    finally:
        for caller in callers:
            caller.close()
        server.close()


def test_without_descriptors_the_connection_with_the_nearest_deadline_makes_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "made" / "socket", lambda line: Reply(result={"said": line.decode()}))
    silent, caller = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        silent.connect(str(server.path))
        server.serve(0.1)
        caller.connect(str(server.path))
        caller.sendall(b"a call\n")
        free = os.dup(0)
        os.close(free)
        # The next descriptor is one too many.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        deadline = time.monotonic() + 20
        while not select.select([caller], (), (), 0)[0] and time.monotonic() < deadline:
            server.serve(0.1)
        assert json.loads(caller.recv(2**10))["result"]["said"] == "a call" and silent.recv(1) == b""
        assert 1 <= len(caplog.records) < 5 and "Too many open files" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in (silent, caller):
            one.close()
        server.close()


def test_the_answers_are_those_of_the_daemons_own(talking: Daemon, tmp_path: Path) -> None:
    client = talking.client
    request = replay_request(tmp_path, "", priority=3)
    (job,) = client.submit(request)
    assert (job.request.spec.name, job.state) == ("replay-1", JobState.QUEUED)
    assert client.submit(request) == [job] == [client.job(job.id)]
    (other,) = client.submit(replay_request(tmp_path, "mine"))
    with pytest.raises(UsageError, match="that of job"):
        client.submit(
            replay_request(tmp_path, "mine").model_copy(
                update={"spec": job.request.spec.model_copy(update={"name": "mine", "mark": "x"})}
            )
        )
    with pytest.raises(UsageError, match="unknown job '99'"):
        client.submit(replay_request(tmp_path, "later", after=99))
    # All or none: the first of these two requests is valid.
    with pytest.raises(UsageError, match="unknown job"):
        client.submit(replay_request(tmp_path, "fine"), replay_request(tmp_path, "later", after=99))
    assert [row.study for row in client.rows()] == ["replay-1", "mine"]
    assert client.pause(other.id).state is JobState.PAUSED
    assert [row.id for row in client.rows((JobState.PAUSED,))] == [other.id]
    assert client.resume(other.id).state is JobState.QUEUED
    assert client.cancel(other.id).state is JobState.CANCELLED
    with pytest.raises(UsageError, match="is cancelled"):
        client.cancel(other.id)
    assert client.retry(other.id, {}).state is JobState.QUEUED
    assert client.status()["jobs"]["queued"] == 2


def test_where_no_daemon_runs(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "not-there"):
        with pytest.raises(DaemonUnreachableError, match="no daemon runs") as caught:
            Client(find_daemon(place)).status()
        assert caught.value.exit_code == 7


class TestThePlaceOfTheSocket:
    def test_one_that_a_dead_daemon_left_is_taken_over(self, daemon: Daemon) -> None:
        daemon.start()
        daemon.kill()
        assert daemon.files.socket.exists()
        daemon.start()
        still_answers(daemon)

    def test_one_where_somebody_listens_is_left_alone(self, daemon: Daemon) -> None:
        daemon.files.runtime.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            with short_name(daemon.files.socket) as name:
                other.bind(name)
            other.listen()
            daemon.start(wait=False)
            assert daemon.process is not None and daemon.process.wait(timeout=30) == MachineError.exit_code
            assert daemon.files.socket.is_socket()

    def test_two_daemons_of_one_user_share_the_runtime_folder(self, daemon: Daemon, tmp_path: Path) -> None:
        """Each daemon has its own socket."""
        one, two = (DaemonFiles(tmp_path / name, tmp_path / "run") for name in ("one", "two"))
        assert one.socket != two.socket

    def test_whoever_has_another_runtime_folder_finds_it_all_the_same(self, daemon: Daemon, tmp_path: Path) -> None:
        """As in a cron job, where XDG_RUNTIME_DIR is not set."""
        daemon.start()
        elsewhere = DaemonFiles(daemon.state, tmp_path / "another-runtime-folder")
        assert Client(elsewhere).status()["state"] == "running"

    def test_what_is_no_socket_is_left_alone(self, daemon: Daemon) -> None:
        daemon.files.runtime.mkdir(parents=True)
        daemon.files.socket.write_text("mine")
        daemon.start(wait=False)
        assert daemon.process is not None and daemon.process.wait(timeout=30) == MachineError.exit_code
        assert daemon.files.socket.read_text() == "mine"


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOTUNE_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert find_daemon() == DaemonFiles(tmp_path / "state" / "autotune", tmp_path / "autotune")
    monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(tmp_path / "y"))
    assert find_daemon() == DaemonFiles(tmp_path / "y", tmp_path / "y" / "run")
    assert find_daemon(tmp_path / "x") == DaemonFiles(tmp_path / "x", tmp_path / "x" / "run")
