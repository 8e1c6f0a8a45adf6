"""The page's server: GET and HEAD, and nothing else."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Iterable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from autotune.daemon.rpc.client import Client
from autotune.daemon.web.address import address_of, is_loopback, require_token
from autotune.daemon.web.dashboard import PATHS, Dashboards, is_there
from autotune.daemon.web.pages import one_job, overview, trouble
from autotune.daemon.web.progress import read_progress
from autotune.errors import AutotuneError, DaemonUnreachableError, UsageError
from autotune.layout import DaemonFiles, StudyFiles
from autotune.records import Job, JobState
from autotune.report.document import Document
from autotune.report.html import to_html

#: Who does not come to the point in so many seconds is sent away; more at once are not listened to.
LIMIT_S = 10.0
CONNECTIONS = 32
_OURS = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
_COOKIE, _STUDY = "autotune_token", "autotune_job"


class Site:
    """What is shown.

    Args:
        token: what a reader must know; ``None``: nothing.
        hosts: names by which the page may be asked for; anything else is another site that points here.
    """

    def __init__(self, files: DaemonFiles, token: str | None, hosts: frozenset[str] | None) -> None:
        self.files = files
        self.token = token
        self.hosts = hosts
        self.client = Client(files, limit_s=LIMIT_S)
        self.dashboards = Dashboards()

    def overview(self) -> Document:
        rows = self.client.rows()
        running = [row.id for row in rows if row.state is JobState.RUNNING]
        told = {number: read_progress(self.files.queue.job(number).events) for number in running}
        return overview(self.client.status(), rows, told)

    def job(self, number: int) -> Document:
        job = self.client.job(number)
        study = study_of(job)
        links = [("overview", "/")]
        if study is not None and study.report.is_file():
            links.append(("report", f"/jobs/{number}/report"))
        if study is not None and study.database.is_file():
            missing = "" if is_there() else " (pip install 'autotune[dashboard]')"
            links.append((f"Optuna's dashboard{missing}", f"/jobs/{number}/dashboard"))
        return one_job(job, read_progress(self.files.queue.job(number).events), tuple(links))


def study_of(job: Job) -> StudyFiles | None:
    """A job's study; a replay has none."""
    if job.request.replay is not None:
        return None
    return StudyFiles(Path(job.request.studies_dir) / job.request.spec.name)


class _Handler(BaseHTTPRequestHandler):
    timeout = LIMIT_S
    server_version = "autotune"
    sys_version = ""
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _refuse(self) -> None:
        self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    # Whatever exists, and whatever comes to be.
    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it, and a query may hold a token."""

    def _answer(self) -> None:
        address = urlsplit(self.path)
        try:
            if not self._host_is_ours():
                self._page(HTTPStatus.MISDIRECTED_REQUEST, trouble("Another site", "This page has another name."))
            elif not self._knows_the_token(parse_qs(address.query).get("token", [""])[0], address.path):
                self._page(
                    HTTPStatus.UNAUTHORIZED, trouble("A token is asked for", "Open the address with ?token=… once.")
                )
            else:
                self._route(address.path, address.query)
        except DaemonUnreachableError as error:
            self._page(HTTPStatus.SERVICE_UNAVAILABLE, trouble("No daemon", f"{error}."))
        except UsageError as error:
            self._page(HTTPStatus.NOT_FOUND, trouble("Not found", f"{error}."))
        except AutotuneError as error:
            self._page(HTTPStatus.INTERNAL_SERVER_ERROR, trouble("Trouble", f"{error}."))
        except OSError:
            # The reader has gone.
            self.close_connection = True

    def _route(self, path: str, query: str) -> None:
        site = self.server.site
        match path.strip("/").split("/"):
            case [""]:
                self._page(HTTPStatus.OK, site.overview())
            case ["metrics"]:
                self._send(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", site.client.metrics().encode())
            case ["jobs", number] if number.isdigit():
                self._page(HTTPStatus.OK, site.job(int(number)))
            case ["jobs", number, "report"] if number.isdigit():
                self._report(int(number))
            case ["jobs", number, "dashboard"] if number.isdigit():
                self._choose(int(number))
            case _ if path.startswith(PATHS):
                self._dashboard(path, query)
            case _:
                raise UsageError("there is nothing here")

    def _report(self, number: int) -> None:
        study = study_of(self.server.site.client.job(number))
        if study is None or not study.report.is_file():
            raise UsageError(f"job {number} has no report yet")
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", study.report.read_bytes())

    def _choose(self, number: int) -> None:
        """The dashboard knows one set of addresses only, so that a cookie says whose study they are of."""
        if not is_there():
            raise UsageError("Optuna's dashboard is not installed: pip install 'autotune[dashboard]'")
        cookie = (f"{_STUDY}={number}; HttpOnly; SameSite=Strict; Path=/",)
        self._send(HTTPStatus.FOUND, "text/plain", b"", (("Location", "/dashboard"), ("Set-Cookie", cookie[0])))

    def _dashboard(self, path: str, query: str) -> None:
        number = self._cookie(_STUDY)
        if not number.isdigit() or not is_there():
            raise UsageError("no job was chosen: open the dashboard from a job's page")
        study = study_of(self.server.site.client.job(int(number)))
        if study is None or not study.database.is_file():
            raise UsageError(f"job {number} has no study yet")
        status, headers, body = self.server.site.dashboards.get(
            study.database, path, query, self.headers.get("Accept-Encoding", "")
        )
        code = int(status.split()[0])
        kept = [
            (n, v) for n, v in headers if n.lower() not in ("content-length", "content-type", "connection", "server")
        ]
        content = next((v for n, v in headers if n.lower() == "content-type"), "application/octet-stream")
        self._send(HTTPStatus(code), content, body, kept, policy=None)

    def _page(self, status: HTTPStatus, document: Document) -> None:
        self._send(status, "text/html; charset=utf-8", to_html(document).encode())

    def _send(
        self,
        status: HTTPStatus,
        content: str,
        body: bytes,
        headers: Iterable[tuple[str, str]] = (),
        *,
        policy: str | None = _OURS,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if policy is not None:
            self.send_header("Content-Security-Policy", policy)
        if self._set_token:
            self.send_header("Set-Cookie", f"{_COOKIE}={self.server.site.token}; HttpOnly; SameSite=Strict; Path=/")
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    _set_token = False

    def _host_is_ours(self) -> bool:
        hosts = self.server.site.hosts
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return hosts is None or host in hosts

    def _knows_the_token(self, given: str, path: str) -> bool:
        token = self.server.site.token
        if token is None:
            return True
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self._set_token = hmac.compare_digest(given.encode(), token.encode())
        known = (hmac.compare_digest(one.encode(), token.encode()) for one in (bearer, self._cookie(_COOKIE)))
        return self._set_token or any(list(known))

    def _cookie(self, name: str) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(name)
        except CookieError:
            return ""
        return found.value if found is not None else ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int], site: Site) -> None:
        self.address_family = family
        self.site = site
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        """One request that fails is nobody else's trouble."""


def make_server(files: DaemonFiles, web: str, token: str | None) -> ThreadingHTTPServer:
    """A server that listens.

    Args:
        web: ``HOST:PORT``; port 0 takes a free one.
        token: asked of every reader, where the address can be reached from elsewhere.

    Raises:
        UsageError: no address, or one that others can reach without a token.
        OSError: it cannot be listened at.
    """
    host, port = address_of(web)
    require_token(web, token)
    here = is_loopback(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Somebody else's page that a browser has open may not read this one under a name of its own.
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if here else None
    return _Server(family, (host, port), Site(files, None if here else token, hosts))
