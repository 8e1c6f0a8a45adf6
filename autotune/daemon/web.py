"""``python -m autotune.daemon.web STATE RUNTIME HOST:PORT``: serve the read-only page until the daemon ends."""

from __future__ import annotations

import hmac
import importlib.util
import io
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer

from autotune.base.errors import AutotuneError, DaemonUnreachableError, MachineError, UsageError
from autotune.base.layout import DaemonFiles, StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import ENDED, Config, Job, JobRow, JobState, Running, StudySpec, Trial
from autotune.daemon.client import Client
from autotune.daemon.page import TOKEN, address_of, is_loopback, require_token
from autotune.daemon.runner import tell
from autotune.report import headline_of
from autotune.report.document import Column, Document, Grid, Kind, Links, Paragraph, Part, Section, facts, to_html
from autotune.search import load_outcome
from autotune.space.formatting import count, describe, listed, one_line, seconds_text, trial_rate_text, unit_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

#: How much of the end of a long event log is read, besides its first line.
_TAIL_BYTES = 2**20


class Progress(Observer):
    """An observer that keeps the latest state of a search.

    Attributes:
        headline: model, device and data.
        doing: title of the current launch; empty if there is none.
        said: the last message.
        spent_s, budget_s: seconds of the budget spent, and in total.
        trials: the latest event of each trial, in order.
    """

    def __init__(self) -> None:
        self.headline = ""
        self.doing = ""
        self.said = ""
        self.spent_s = 0.0
        self.budget_s: float | None = None
        self._trials: dict[int, Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        return [self._trials[number] for number in sorted(self._trials)]

    def begins(self, spec: StudySpec, headline: str) -> None:
        self.headline = headline

    def says(self, sentence: str) -> None:
        self.said = sentence

    def launch_begins(self, title: str, config: Config) -> None:
        self.doing = title

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        self.doing = title

    def trial_ends(self, trial: Trial) -> None:
        self._trials[trial.number] = trial

    def clock(self, spent_s: float, budget_s: float) -> None:
        self.spent_s, self.budget_s = spent_s, budget_s

    def ends(self) -> None:
        self.doing = ""


def read_progress(events: Path) -> Progress:
    """Read the progress of a job's search. It is empty if the event log does not exist yet."""
    progress = Progress()
    try:
        with events.open("rb") as stream:
            first = stream.readline()
            size = events.stat().st_size
            stream.seek(max(stream.tell(), size - _TAIL_BYTES))
            rest = stream.read(_TAIL_BYTES)
    except OSError:
        return progress
    for line in [first, *rest.splitlines()]:
        tell(line.decode(errors="replace"), progress)
    return progress


#: Interval at which a page reloads, in seconds.
REFRESH_S = 5
#: Maximum number of rows shown of a long list.
MOST = 100
_WORD, _TEXT = Kind.WORD, Kind.TEXT


def overview(status: Mapping[str, Any], rows: list[JobRow], progress: Mapping[int, Progress]) -> Document:
    """Build the first page."""
    counts = [f"{number} {state}" for state, number in status["jobs"].items() if number]
    running = [row for row in rows if row.state is JobState.RUNNING]
    waiting = [row for row in rows if row.state not in ENDED and row.state is not JobState.RUNNING]
    ended = sorted((row for row in rows if row.state in ENDED), key=lambda row: row.ended or "", reverse=True)
    state = Paragraph(
        f"The daemon is {status['state']}, for {seconds_text(status['uptime_s'])}: "
        f"{listed(counts) if counts else 'no job yet'}.",
        strong=True,
    )
    trouble = (Paragraph(f"Nothing is started: {status['trouble']}."),) if status["trouble"] else ()
    sections = [
        Section("Now", (state, *trouble, *map(Paragraph, status["notes"]))),
        Section("Devices", (_devices(status["devices"]),)),
        Section("Running", (_running(running, progress),) if running else (Paragraph("Nothing runs."),)),
    ]
    if waiting:
        sections.append(Section("Waiting", _jobs(waiting, "why")))
    if ended:
        sections.append(Section("Ended", _jobs(ended, "what came of it")))
    return Document("autotune", tuple(sections), REFRESH_S)


def one_job(
    job: Job, waits: str | None, progress: Progress, links: tuple[tuple[str, str], ...], answer: str | None = None
) -> Document:
    """Build the page of a job.

    Args:
        waits: why the job does not run, if it is queued. answer: its study's answer in one sentence, once finished.
    """
    status, request, doing = job.status, job.request, progress.doing or progress.said
    running = isinstance(status, Running)
    details = facts(
        ("state", job.state.value),
        ("what came of it", getattr(status, "found", None)),
        ("why", getattr(status, "why", None)),
        ("waits", waits),
        ("model", request.replay or request.spec.model),
        ("study", request.spec.name),
        ("device", getattr(status, "device", None) or job.placed),
        ("submitted", moment(job.submitted)),
        ("since", moment(getattr(status, "since", "") or getattr(status, "ended", ""))),
        ("ran", f"{count(job.runs, 'time')}, {seconds_text(job.spent_s)} in all" if job.runs else None),
        ("now", one_line(", ".join(filter(None, (_time(progress), doing)))) if running else None),
    )
    answers = (Paragraph(answer, strong=True),) if answer else ()
    sections = [Section("About", (*answers, *details, *((Links(links),) if links else ())))]
    if progress.trials:
        sections.append(Section("Trials", (_trials(progress),)))
    return Document(f"Job {job.id}", tuple(sections), REFRESH_S if running else None)


def trouble(title: str, sentence: str) -> Document:
    """Build an error page."""
    return Document("autotune", (Section(title, (Paragraph(sentence), Links((("overview", "/"),)))),))


def moment(text: str) -> str:
    """Format a time for people, in the local time zone; empty if there is none."""
    return datetime.fromisoformat(text).astimezone().strftime("%d %b %H:%M") if text else ""


def _devices(devices: list[Mapping[str, Any]]) -> Part:
    columns = (Column("device", _WORD), Column("model", _WORD), Column("state", _WORD), Column("", _TEXT))
    rows = tuple((_short(d["name"]), d["model"], d["state"], d["why"] or "") for d in devices)
    return Grid(columns, rows) if rows else Paragraph("They have not been looked at yet.")


def _running(rows: list[JobRow], progress: Mapping[int, Progress]) -> Part:
    # Narrow screens hide the last columns.
    columns = (
        *(Column("job", _WORD), Column("study", _TEXT), Column("doing", _TEXT)),
        *(Column("time", _WORD), Column("trials"), Column("device", _WORD)),
    )
    states = [progress.get(row.id, Progress()) for row in rows]
    cells = tuple(
        (str(row.id), row.study, p.doing or p.said, _time(p), str(len(p.trials)), _short(row.device))
        for row, p in zip(rows, states, strict=True)
    )
    return Grid(columns, cells, links=tuple(f"/jobs/{row.id}" for row in rows))


def _jobs(rows: list[JobRow], why: str) -> tuple[Part, ...]:
    columns = (
        *(Column("job", _WORD), Column("study", _TEXT), Column(why, _TEXT)),
        *(Column("state", _WORD), Column("since", _WORD)),
    )
    shown = rows[:MOST]
    cells = tuple(
        (str(r.id), r.study, r.reason, r.state.value, moment(r.ended or r.since or r.submitted)) for r in shown
    )
    grid = Grid(columns, cells, links=tuple(f"/jobs/{row.id}" for row in shown))
    hidden = len(rows) - len(shown)
    return (grid, Paragraph(f"And {count(hidden, 'more job', 'more jobs')}.")) if hidden else (grid,)


def _trials(progress: Progress) -> Part:
    trials = progress.trials
    columns = (Column("trial"), Column("status", _WORD), Column(unit_of(trials)), Column("configuration", _TEXT))
    baseline = trials[0].config
    rows = tuple(
        (str(t.number), t.result.status.value, trial_rate_text(t), describe(t.config, baseline)) for t in trials
    )
    best = max((t.score for t in trials if t.score is not None), default=None)
    strong = frozenset(i for i, t in enumerate(trials) if best is not None and t.score == best)
    return Grid(columns, rows, strong=strong)


def _time(progress: Progress) -> str:
    if progress.budget_s is None:
        return ""
    return f"{seconds_text(progress.spent_s)} of {seconds_text(progress.budget_s)}"


def _short(name: str | None) -> str:
    return "-".join((name or "").split("-")[:2])


# Mounts Optuna's dashboard behind the page's filter, because its HTTP API deletes studies without confirmation.
#
# The filter lets only read requests through, and the study is opened read-only, so that neither a request nor a bug in
# the dashboard can change it.

#: URL prefixes of the dashboard: its page, its API, its scripts.
PATHS = ("/dashboard", "/api/", "/static/")


def is_there() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("optuna_dashboard") is not None


def dashboard_of(database: Path) -> WSGIApplication:
    """Return the dashboard of a study as a WSGI application.

    Raises:
        MachineError: Optuna cannot read the database.
    """
    try:
        dashboard = _dashboard_of(database)
    except Exception as error:  # SQLAlchemy's and Optuna's errors have no common base
        # The page is for people who need not know the machine's folders.
        raise MachineError(f"Optuna's dashboard cannot read study {database.parent.name}") from error
    # The dashboard requires an Accept-Encoding header, must not see the reader's secrets, and nobody reads its errors.
    defaults = {"HTTP_ACCEPT_ENCODING": "identity"}
    hidden = {"HTTP_COOKIE": "", "HTTP_AUTHORIZATION": ""}
    return lambda environ, start: dashboard({**defaults, **environ, **hidden, "wsgi.errors": io.StringIO()}, start)


@cache
def _dashboard_of(database: Path) -> WSGIApplication:
    # Imported on first use, because it imports Optuna.
    import optuna
    from optuna_dashboard import wsgi
    from sqlalchemy import URL

    # SQLite reads the path as part of a URI of its own.
    url = URL.create("sqlite", database=f"file:{quote(str(database))}", query={"mode": "ro", "uri": "true"})
    storage = optuna.storages.RDBStorage(
        url.render_as_string(), skip_compatibility_check=True, skip_table_creation=True
    )
    app: WSGIApplication = wsgi(storage)
    return app


# The WSGI application: serves GET and HEAD only, for our own pages and for Optuna's dashboard.

#: A connection that sends nothing, or stops reading, is closed after this many seconds. Requests to the daemon have the
#: same limit.
LIMIT_S = 10
#: Maximum numbers of open connections, which use no thread, of threads, and of connections waiting to be accepted.
CONNECTIONS, THREADS, BACKLOG = 200, 8, 512
#: Maximum size of a request's head, and of its body. The page needs only the address; larger requests are refused.
_REQUEST_BYTES = 2**16
#: Responses below this size are buffered in memory rather than on a disk, which may be full.
_ANSWER_BYTES = 2**30
_HTML = "text/html; charset=utf-8"
_OURS = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
#: Headers of every response, including the dashboard's.
_ALWAYS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_COOKIE, _STUDY = "autotune_token", "autotune_job"
_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Answer:
    """A WSGI application with a constant response."""

    status: HTTPStatus
    body: bytes = b""
    content: str = _HTML
    headers: tuple[tuple[str, str], ...] = ()

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        headers = [("Content-Type", self.content), ("Content-Length", str(len(self.body)))]
        policy = ("Content-Security-Policy", _OURS)
        start(f"{self.status.value} {self.status.phrase}", [*headers, policy, *self.headers])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [self.body]


class Site:
    """The pages as a WSGI application.

    Args:
        token: token that every reader must send; ``None`` for no token.
        hosts: accepted host names, or ``None`` for any. Any other name belongs to a foreign site pointed here.
    """

    def __init__(self, files: DaemonFiles, token: str | None, hosts: frozenset[str] | None) -> None:
        self._files = files
        self._token = token
        self._hosts = hosts
        self._client = Client(files, limit_s=LIMIT_S)

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Respond to a request, adding our headers to every response, including the dashboard's."""
        token = _token_in(environ["QUERY_STRING"])
        # Quoted, because a cookie cannot hold semicolons or non-ASCII characters.
        cookies = [_set_cookie(_COOKIE, quote(token, safe=""))] if self._is_token(token) else []

        def start_guarded(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            return start(status, [*(h for h in headers if h[0] not in _ALWAYS), *_ALWAYS.items(), *cookies], exc_info)

        return self._answer_to(environ, token)(environ, start_guarded)

    def _answer_to(self, environ: WSGIEnvironment, given: str) -> WSGIApplication:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", "GET, HEAD"),))
        if not self._host_is_ours(environ.get("HTTP_HOST", "")):
            return _page(trouble("Another site", "This page has another name."), HTTPStatus.MISDIRECTED_REQUEST)
        # Headers are bytes, which WSGI hands over as Latin-1.
        bearer = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ").encode("latin-1", "replace")
        tokens = (given, os.fsdecode(bearer), unquote(_cookie(environ, _COOKIE), errors="surrogateescape"))
        if self._token is not None and not any(map(self._is_token, tokens)):
            page = trouble("A token is asked for", "Open the address with ?token=… once.")
            return _page(page, HTTPStatus.UNAUTHORIZED)
        try:
            return self._route(environ)
        except DaemonUnreachableError as error:
            return _page(trouble("No daemon", f"{error}."), HTTPStatus.SERVICE_UNAVAILABLE)
        except UsageError as error:
            return _page(trouble("Not found", f"{error}."), HTTPStatus.NOT_FOUND)
        except AutotuneError as error:
            return _page(trouble("Trouble", f"{error}."), HTTPStatus.INTERNAL_SERVER_ERROR)

    def _route(self, environ: WSGIEnvironment) -> WSGIApplication:
        path = environ["PATH_INFO"]
        match path.strip("/").split("/"):
            case [""]:
                return _page(self._overview())
            case ["metrics"]:
                metrics = self._client.metrics().encode()
                return Answer(HTTPStatus.OK, metrics, "text/plain; version=0.0.4; charset=utf-8")
            case ["jobs", number] if _NUMBER.fullmatch(number):
                return _page(self._job(int(number)))
            case ["jobs", number, "report"] if _NUMBER.fullmatch(number):
                return self._report(int(number))
            case ["jobs", number, "dashboard"] if _NUMBER.fullmatch(number):
                return _choose(int(number))
            case _ if path.startswith(PATHS):
                return self._dashboard(_cookie(environ, _STUDY))
        raise UsageError("there is nothing here")

    def _overview(self) -> Document:
        rows = self._client.rows()
        running = [row.id for row in rows if row.state is JobState.RUNNING]
        progress = {number: read_progress(self._files.queue.job(number).events) for number in running}
        return overview(self._client.status(), rows, progress)

    def _job(self, number: int) -> Document:
        job = self._client.job(number)
        study = study_of(job)
        links = [("overview", "/")]
        if study is not None and study.report.is_file():
            links.append(("the report, with pictures", f"/jobs/{number}/report"))
        if study is not None and study.database.is_file():
            hint = "" if is_there() else " (pip install 'autotune[dashboard]')"
            links.append((f"Optuna's dashboard{hint}", f"/jobs/{number}/dashboard"))
        progress = read_progress(self._files.queue.job(number).events)
        answer = None if study is None or job.state is not JobState.DONE else _answer_of(study)
        return one_job(job, self._client.waits_for(number), progress, tuple(links), answer)

    def _report(self, number: int) -> Answer:
        study = study_of(self._client.job(number))
        if study is None or not study.report.is_file():
            raise UsageError(f"job {number} has no report yet")
        return Answer(HTTPStatus.OK, study.report.read_bytes())

    def _dashboard(self, number: str) -> WSGIApplication:
        if not _NUMBER.fullmatch(number) or not is_there():
            raise UsageError("no job was chosen: open the dashboard from a job's page")
        study = study_of(self._client.job(int(number)))
        if study is None or not study.database.is_file():
            raise UsageError(f"job {number} has no study yet")
        return dashboard_of(study.database)

    def _host_is_ours(self, asked: str) -> bool:
        try:
            return self._hosts is None or urlsplit(f"//{asked}").hostname in self._hosts
        except ValueError:
            return False

    def _is_token(self, text: str) -> bool:
        return self._token is not None and hmac.compare_digest(os.fsencode(text), os.fsencode(self._token))


def study_of(job: Job) -> StudyFiles | None:
    """Return a job's study; ``None`` for a replay."""
    if job.request.replay is not None:
        return None
    return StudyFiles(Path(job.request.studies_dir) / job.request.spec.name)


def _answer_of(study: StudyFiles) -> str | None:
    """Return the answer of a finished study; ``None`` if its outcome is gone or from a version that cannot be read."""
    try:
        outcome = load_outcome(study)
    except AutotuneError:
        return None
    return None if outcome is None else headline_of(outcome)


def _page(document: Document, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(status, to_html(document).encode())


def _choose(number: int) -> Answer:
    """Redirect to the dashboard, and set a cookie with the job: the dashboard's addresses do not name a study."""
    if not is_there():
        raise UsageError("Optuna's dashboard is not installed: pip install 'autotune[dashboard]'")
    headers = (("Location", "/dashboard"), _set_cookie(_STUDY, str(number)))
    return Answer(HTTPStatus.FOUND, content="text/plain", headers=headers)


def _token_in(query: str) -> str:
    """Return the token in a query. A plus sign stands for itself, since tokens are often Base64."""
    part = next((part for part in query.split("&") if part.startswith("token=")), "")
    return unquote(part.removeprefix("token="), errors="surrogateescape")


def _set_cookie(name: str, value: str) -> tuple[str, str]:
    return "Set-Cookie", f"{name}={value}; HttpOnly; SameSite=Strict; Path=/"


def _cookie(environ: WSGIEnvironment, name: str) -> str:
    try:
        cookie = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(name)
    except CookieError:
        return ""
    return cookie.value if cookie is not None else ""


class _Server(TcpWSGIServer):  # type: ignore[misc]
    """Waitress's server, which makes room when there are too many connections.

    By itself, Waitress then accepts no more, and keeps connections whose clients send a byte of a request now and then
    forever.
    """

    def maintenance(self, now: float) -> None:
        """Close idle connections, and if there are too many, the older half of those that wait for a request."""
        super().maintenance(now)
        if len(self._map) >= self.adj.connection_limit:
            waiting = [channel for channel in self.active_channels.values() if not channel.requests]
            waiting.sort(key=lambda channel: channel.creation_time)
            for channel in waiting[: (len(waiting) + 1) // 2]:
                channel.will_close = True


def make_server(files: DaemonFiles, web: str, token: str | None) -> Any:
    """Return Waitress's server, listening; its ``run()`` serves.

    Args:
        web: ``HOST:PORT``; port 0 chooses a free one.
        token: required of every reader if other machines can reach the address.

    Raises:
        UsageError: the address is invalid, or can be reached by other machines and there is no token.
        OSError: listening on the address failed.
    """
    host, port = address_of(web)
    require_token(web, token)
    is_local = is_loopback(host)
    # A foreign page in a browser must not read this one through its own host name (DNS rebinding).
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if is_local else None
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    settings = Adjustments(
        ident="autotune",
        threads=THREADS,
        connection_limit=CONNECTIONS,
        backlog=BACKLOG,
        channel_timeout=LIMIT_S,
        cleanup_interval=1,
        max_request_header_size=_REQUEST_BYTES,
        max_request_body_size=_REQUEST_BYTES,
        outbuf_overflow=_ANSWER_BYTES,
    )
    site = Site(files, None if is_local else token, hosts)
    where = (listening.family, listening.type, listening.proto, listening.getsockname())
    server = _Server(site, _sock=listening, adj=settings, sockinfo=where, bind_socket=False)
    # Waitress closes a connection once it can write to it, which is never if the client has stopped reading.
    server.adj.socket_options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LIMIT_S),
    ]
    return server


def main(arguments: list[str]) -> int:
    """Serve the page and return the exit code."""
    # There is no reader for a request log, a query may contain a token, and the daemon takes the last line for the
    # address.
    logging.disable()
    files = DaemonFiles(Path(arguments[0]), Path(arguments[1]))
    try:
        server = make_server(files, arguments[2], os.environ.get(TOKEN))
    except (AutotuneError, OSError) as error:
        print(f"the page cannot be served at {arguments[2]}: {getattr(error, 'strerror', None) or error}")  # noqa: T201
        return 1
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    print(f"http://{server.effective_host}:{server.effective_port}/", flush=True)  # noqa: T201
    server.run()
    return 0


def _end_with_stdin() -> None:
    """Exit at the end of stdin, a pipe that is closed when the daemon ends, even if the daemon is killed."""
    sys.stdin.buffer.read()
    # There is nothing to save, and open requests are dropped.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
