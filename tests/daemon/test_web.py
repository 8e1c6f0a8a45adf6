"""The web page is read-only, and needs a token for clients on other machines."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit
from wsgiref.util import setup_testing_defaults

import optuna
import psutil
import pytest

from autotune.base.errors import MachineError, UsageError
from autotune.base.layout import DaemonFiles, StudyFiles
from autotune.base.records import Beat, JobState, Phase
from autotune.daemon.page import address_of, is_loopback, require_token
from autotune.daemon.runner import EventLog
from autotune.daemon.web import CONNECTIONS, Site, dashboard_of, overview, read_progress
from tests.support import FakeClock, make_outcome, make_study_spec, make_trial

from ..process.alive import wait_until  # noqa: TID252
from .conftest import Daemon, acted_request

METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")


class Reader:
    """An HTTP client of the page."""

    def __init__(self, daemon: Daemon) -> None:
        wait_until(lambda: daemon.files.page_log.exists() and "http" in daemon.files.page_log.read_text())
        self.address = urlsplit(daemon.files.page_log.read_text().split()[0])
        assert self.address.hostname and self.address.port
        self.where = (self.address.hostname.replace("0.0.0.0", "127.0.0.1"), self.address.port)

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Send a request and return the status, headers and body of the response."""
        connection = http.client.HTTPConnection(*self.where, timeout=20)
        try:
            connection.request(method, path, body, headers={k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode(errors="replace")
        finally:
            connection.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Reader, Path]]:
    """A daemon with a web page, a running job, and a job whose study Optuna can read."""
    folder = tmp_path_factory.mktemp("served")
    daemon = Daemon(folder / "state", ("--quiet-for", "0s", "--idle-cores", "1000", "--web", "127.0.0.1:0")).start()
    try:
        yield daemon, Reader(daemon), _prepared(daemon, folder)
    finally:
        daemon.stop()


def _prepared(daemon: Daemon, folder: Path) -> Path:
    (job,) = daemon.client.submit(acted_request(folder, "running", "waits"))
    study = folder / "studies" / "running"
    study.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{study / 'study.db'}"
    optuna.create_study(storage=storage, study_name="running").optimize(lambda trial: trial.suggest_int("x", 1, 3), 3)
    (study / "report.html").write_text("<title>the report</title>")
    (waiting,) = daemon.client.submit(acted_request(folder, "waiting", "well", not_before=4e9))
    wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
    assert (job.id, waiting.id) == (1, 2)
    return study


def test_it_shows_what_runs_and_what_waits(served: tuple[Daemon, Reader, Path]) -> None:
    daemon, reader, _ = served
    told = EventLog(daemon.files.queue.job(1).events, FakeClock())
    told.begins(make_study_spec("running"), "resnet18, on cpu")
    told.launch_begins("trial 1", {})
    told.trial_ends(make_trial(0, {"batch_size": 32}))
    told.clock(12.0, 600.0)
    told.close()
    status, headers, page = reader.ask("/")
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    why = "the time before which it is not to run has not come"
    assert why in reader.ask("/jobs/2")[2]
    for text in (why, "1 queued and 1 running", "job 1 runs on it", "trial 1", "12 s of 10 min", 'href="/jobs/2"'):
        assert text in page, text
    assert "<script" not in page and "http://" not in page
    status, _, page = reader.ask("/jobs/1")
    assert status == 200 and "/jobs/1/report" in page and "/jobs/1/dashboard" in page
    assert "the report" in reader.ask("/jobs/1/report")[2]
    assert reader.ask("/metrics")[2] == daemon.client.metrics() or "autotune_jobs" in reader.ask("/metrics")[2]


def test_of_a_finished_job_the_answer_comes_first(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start("--quiet-for", "0s", "--idle-cores", "1000", "--web", "127.0.0.1:0")
    reader = Reader(daemon)
    (job,) = daemon.client.submit(acted_request(tmp_path, "ended", "well"))
    wait_until(lambda: daemon.client.job(job.id).state is JobState.DONE)
    study = StudyFiles(tmp_path / "studies" / "ended")
    study.folder.mkdir(parents=True, exist_ok=True)
    study.outcome.write_text(make_outcome().model_dump_json())
    study.report.write_text("<title>the report</title>")
    status, _, page = reader.ask(f"/jobs/{job.id}")
    assert status == 200 and "<strong>2.10× faster (2.04–2.16): 63.4 instead of 30.2 samples/s" in page
    assert f'href="/jobs/{job.id}/report"' in page
    # A damaged outcome takes nothing else from the page.
    study.outcome.write_text("{")
    status, _, page = reader.ask(f"/jobs/{job.id}")
    assert status == 200 and "faster" not in page and f'href="/jobs/{job.id}/report"' in page


@pytest.mark.parametrize(
    "path",
    [
        *("/jobs/99", "/jobs/2/report", "/nothing", "/%2e%2e/", "/jobs/%B2", "/jobs/-1", "/jobs/" + "9" * 5000),
        *("/jobs/../../etc/passwd", "/jobs/1/../../state/queue.db"),
    ],
)
def test_what_there_is_not(served: tuple[Daemon, Reader, Path], path: str) -> None:
    assert served[1].ask(path)[0] == 404


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_reading(served: tuple[Daemon, Reader, Path], method: str) -> None:
    daemon, reader, study = served
    before = (study / "study.db").read_bytes(), [row.state for row in daemon.client.rows()]
    for path in ("/", "/jobs/1", "/jobs/1/dashboard", "/dashboard", "/api/studies", "/api/studies/1", "/metrics"):
        status, headers, _ = reader.ask(path, method, Cookie="autotune_job=1", Content_Length="0")
        assert (status, headers["Allow"]) == (405, "GET, HEAD"), path
    assert before == ((study / "study.db").read_bytes(), [row.state for row in daemon.client.rows()])


def test_what_is_sent_along_is_not_read(served: tuple[Daemon, Reader, Path]) -> None:
    _, reader, _ = served
    assert reader.ask("/api/studies", "POST", b"{}", Cookie="autotune_job=1")[0] == 405
    assert reader.ask("/", "POST", Content_Length="1000000000")[0] == 413
    assert reader.ask("/", X_Long="x" * 100_000)[0] == 431


def test_a_head_has_no_body(served: tuple[Daemon, Reader, Path]) -> None:
    status, headers, body = served[1].ask("/", "HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 1000 and body == ""


def test_the_dashboard_shows_the_study_of_the_job_that_was_chosen(served: tuple[Daemon, Reader, Path]) -> None:
    _, reader, study = served
    assert reader.ask("/dashboard")[0] == 404
    status, headers, _ = reader.ask("/jobs/1/dashboard")
    assert (status, headers["Location"]) == (302, "/dashboard")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    before = (study / "study.db").read_bytes()
    status, _, page = reader.ask("/dashboard", Cookie=cookie.split(";")[0])
    assert status == 200 and "Optuna Dashboard" in page
    status, _, found = reader.ask("/api/studies", Cookie=cookie.split(";")[0])
    assert status == 200 and '"study_name": "running"' in found
    assert reader.ask("/api/studies/1", Cookie=cookie.split(";")[0])[0] == 200
    # A script that the page loads, requested with and without compression.
    script = page.partition('src="')[2].partition('"')[0]
    for encodings in ({"Accept_Encoding": "gzip, deflate, br"}, {}):
        status, headers, _ = reader.ask(script, Cookie=cookie.split(";")[0], **encodings)
        assert status == 200 and "javascript" in headers["Content-Type"], script
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    assert (study / "study.db").read_bytes() == before
    for path in ("/static/..%2f_app.py", "/static/%2e%2e/_app.py", "/static/..%5c_app.py", "/static//etc/passwd"):
        assert reader.ask(path, Cookie=cookie.split(";")[0])[0] in (403, 404), path
    # A job without a study has no dashboard.
    assert reader.ask("/dashboard", Cookie="autotune_job=2")[0] == 404
    assert reader.ask("/dashboard", Cookie='autotune_job=1;;="')[0] in (200, 404)


def test_another_sites_name_for_it_is_refused(served: tuple[Daemon, Reader, Path]) -> None:
    assert served[1].ask("/", Host="evil.example")[0] == 421
    assert served[1].ask("/", Host="[")[0] == 421
    assert served[1].ask("/", Host="localhost:1")[0] == 200


def established() -> set[tuple[int, int]]:
    """The open connections of this machine, each as the ports of the two sides."""
    found = psutil.net_connections("tcp")
    return {(c.laddr.port, c.raddr.port) for c in found if c.status == psutil.CONN_ESTABLISHED}


@pytest.mark.stress
def test_clients_that_send_nothing_or_stop_reading_are_disconnected(served: tuple[Daemon, Reader, Path]) -> None:
    _, reader, _ = served
    cookie = reader.ask("/jobs/1/dashboard")[1]["Set-Cookie"].split(";")[0]
    script = reader.ask("/dashboard", Cookie=cookie)[2].partition('src="')[2].partition('"')[0]
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(reader.where, timeout=60)) for _ in range(50)]
        for one in silent[::2]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        stalled = stack.enter_context(socket.socket())
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.settimeout(60)
        stalled.connect(reader.where)
        stalled.sendall(f"GET {script} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode())
        head = stalled.recv(1024)
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])
        assert reader.ask("/")[0] == 200, "none of them keeps others waiting"
        assert [one.recv(1) for one in silent] == [b""] * 50
        ours = (reader.where[1], stalled.getsockname()[1])
        wait_until(lambda: ours not in established(), 40)
        received = len(head)
        with contextlib.suppress(ConnectionResetError):
            while found := stalled.recv(2**16):
                received += len(found)
    assert received < length, "the whole answer fitted into the sockets' buffers"
    assert reader.ask("/")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [40, 2 * CONNECTIONS])
def test_slow_clients_keep_nobody_waiting(served: tuple[Daemon, Reader, Path], number: int) -> None:
    """Each sends a byte of its request now and then, so that it never counts as idle."""
    _, reader, _ = served
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(reader.where, timeout=60)) for _ in range(number)]

        def drip() -> None:
            while not over.wait(0.5):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.send(b"x", socket.MSG_DONTWAIT)

        for one in slow:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            # The timeout of the reader is the limit.
            assert [reader.ask("/")[0] for _ in range(3)] == [200, 200, 200]
        finally:
            over.set()
            dripping.join()


def test_what_goes_wrong_is_told_without_its_particulars(served: tuple[Daemon, Reader, Path]) -> None:
    daemon, reader, study = served
    broken = study.with_name("waiting") / "study.db"
    broken.parent.mkdir(exist_ok=True)
    broken.write_text("this is no database" * 1000)
    try:
        status, _, page = reader.ask("/api/studies", Cookie="autotune_job=2")
        assert status == 500 and "Traceback" not in page and str(study.parent) not in page
    finally:
        broken.unlink()
    # Nothing but the address stands where the daemon looks for it.
    assert daemon.files.page_log.read_text() == f"{reader.address.geturl()}\n"


@pytest.mark.slow
def test_from_elsewhere_a_token_is_asked_for(daemon: Daemon) -> None:
    daemon.start("--web", "0.0.0.0:0", wait=False)
    assert daemon.process is not None and daemon.process.wait(timeout=20) == UsageError.exit_code
    daemon.env = {"AUTOTUNE_WEB_TOKEN": "a-long-secret"}
    daemon.start("--web", "0.0.0.0:0")
    reader = Reader(daemon)
    assert reader.ask("/")[0] == 401
    assert reader.ask("/?token=wrong")[0] == 401
    assert reader.ask("/", Authorization="Bearer wrong", Cookie="autotune_token=wrong")[0] == 401
    assert reader.ask("/", "DELETE", Authorization="Bearer a-long-secret")[0] == 405
    assert "a-long-secret" not in str(reader.ask("/nothing", Cookie="autotune_token=a-long-secret"))
    status, headers, page = reader.ask("/?token=a-long-secret")
    assert status == 200 and "a-long-secret" not in page
    assert reader.ask("/metrics", Cookie=headers["Set-Cookie"].split(";")[0])[0] == 200
    assert reader.ask("/metrics", Authorization="Bearer a-long-secret")[0] == 200
    # The page's process ends with the daemon, even if the daemon is killed.
    daemon.kill()

    def gone() -> bool:
        try:
            reader.ask("/metrics", Authorization="Bearer a-long-secret")
        except OSError:
            return True
        return False

    wait_until(gone)


@pytest.mark.parametrize("token", ["a;b", "clé-鍵", "ab+/cd==", "a b", 'q"uo\\te', "a,b=c&d%41", "a-long-secret"])
def test_any_token_that_a_header_can_carry_works(tmp_path: Path, token: str) -> None:
    site = Site(DaemonFiles(tmp_path, tmp_path / "run"), token, None)

    def ask(**environ: str) -> tuple[str, dict[str, str]]:
        found: list[tuple[str, dict[str, str]]] = []
        given = {"QUERY_STRING": "", **environ}
        setup_testing_defaults(given)
        list(site(given, lambda status, headers, exc_info=None: found.append((status, dict(headers)))))  # type: ignore[arg-type, func-returns-value, return-value]
        return found[0]

    require_token("0.0.0.0:80", token)
    assert ask()[0].startswith("401") and ask(QUERY_STRING=f"token={quote(token)}x")[0].startswith("401")
    # Without a daemon, whoever is let in is told so.
    status, headers = ask(QUERY_STRING=f"a=b&token={quote(token, safe='+/=')}")
    assert status.startswith("503")
    cookie, _, more = headers["Set-Cookie"].partition(";")
    assert cookie.isascii() and more == " HttpOnly; SameSite=Strict; Path=/"
    assert ask(HTTP_COOKIE=f"other=1; {cookie}")[0].startswith("503")
    # As a client sends it, and as WSGI hands over its bytes.
    assert ask(HTTP_AUTHORIZATION=f"Bearer {token}".encode().decode("latin-1"))[0].startswith("503")


@pytest.mark.parametrize("token", ["a\r\nSet-Cookie: x=y", "secret\n", " secret", "a\0b", "\udcff"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="that no header can carry"):
        require_token("0.0.0.0:80", token)


def test_without_a_daemon_it_says_so(daemon: Daemon) -> None:
    daemon.start("--web", "127.0.0.1:0")
    reader = Reader(daemon)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    os.rename(daemon.files.socket, daemon.files.socket.with_name("elsewhere"))
    try:
        status, _, page = reader.ask("/")
        assert status == 503 and "no daemon runs" in page
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_what_comes_from_outside_is_no_markup() -> None:
    status = {
        "state": "running",
        "jobs": {"failed": 1},
        "uptime_s": 5.0,
        "trouble": "<script>alert(1)</script>",
        "devices": [],
        "notes": ["<b>"],
    }
    from autotune.report import to_html

    page = to_html(overview(status, [], {}))
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>" not in page


def test_addresses() -> None:
    assert address_of("127.0.0.1:80") == ("127.0.0.1", 80)
    assert address_of("[::1]:8080") == ("::1", 8080)
    assert is_loopback("127.1.2.3") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("example.com")
    for wrong in ("8080", ":8080", "host:", "host:99999", "host:x"):
        with pytest.raises(UsageError, match="no address"):
            address_of(wrong)
    with pytest.raises(UsageError, match="from elsewhere"):
        require_token("example.com:80", None)


class TestProgress:
    def test_of_a_long_story_the_end_and_the_headline_are_read(self, tmp_path: Path) -> None:
        log = EventLog(tmp_path / "events.jsonl", FakeClock())
        log.begins(make_study_spec(), "resnet18, on cpu")
        for number in range(2000):
            log.trial_ends(make_trial(number, {"batch_size": 32}))
        log.says("the end")
        log.close()
        found = read_progress(tmp_path / "events.jsonl")
        assert (found.headline, found.said) == ("resnet18, on cpu", "the end")
        assert 0 < len(found.trials) < 2000 and found.trials[-1].number == 1999

    def test_what_comes_many_times_a_second_is_written_once(self, tmp_path: Path) -> None:
        clock = FakeClock()
        log = EventLog(tmp_path / "events.jsonl", clock)
        for _ in range(100):
            log.beat(Beat(phase=Phase.MEASURE))
            log.clock(clock.now(), 600.0)
            clock.advance(0.05)
        log.close()
        assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 10

    def test_nothing_told_yet_and_rubbish(self, tmp_path: Path) -> None:
        assert read_progress(tmp_path / "not there").trials == []
        (tmp_path / "events.jsonl").write_bytes(
            b'\xff\n{"says": 1, "x": 2}\n[]\n{"begins": []}\n{"unheard": [1]}\n{"says"'
        )
        assert read_progress(tmp_path / "events.jsonl").headline == ""


def test_a_database_that_optuna_cannot_read_is_an_error_page(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"garbage" * 600)
    with pytest.raises(MachineError, match="dashboard cannot read"):
        dashboard_of(tmp_path / "study.db")
