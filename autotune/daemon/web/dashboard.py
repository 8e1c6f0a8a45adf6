"""Optuna's dashboard behind a filter: its own programming interface deletes studies without asking.

Only GET comes through, and the study is opened read-only, so that neither a request nor a fault there can change it.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
#: What belongs to the dashboard: its page, its interface, its scripts.
PATHS = ("/dashboard", "/api/", "/static/")


def is_there() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("optuna_dashboard") is not None


class Dashboards:
    """One application for each study that somebody has looked at."""

    def __init__(self) -> None:
        self._apps: dict[Path, WsgiApp] = {}

    def get(self, database: Path, path: str, query: str, encodings: str) -> tuple[str, list[tuple[str, str]], bytes]:
        """The answer to a GET: status line, headers, body.

        Args:
            database: a study's ``study.db``. encodings: that the reader takes; the dashboard counts on being told.
        """
        answer: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
            answer[:] = [status, headers]

        environment = {
            "REQUEST_METHOD": "GET",
            "SCRIPT_NAME": "",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT_ENCODING": encodings or "identity",
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(),
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        body = b"".join(self._app(database)(environment, start))
        return answer[0], answer[1], body

    def _app(self, database: Path) -> WsgiApp:
        if database not in self._apps:
            # Not before somebody wants it: it brings Optuna along.
            import optuna
            from optuna_dashboard import wsgi

            url = f"sqlite:///file:{quote(str(database))}?mode=ro&uri=true"
            storage = optuna.storages.RDBStorage(url, skip_compatibility_check=True, skip_table_creation=True)
            self._apps[database] = wsgi(storage)
        return self._apps[database]
