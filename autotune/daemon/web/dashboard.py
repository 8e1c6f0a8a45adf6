"""Optuna's dashboard, to be mounted behind the page's filter: its own programming interface deletes studies unasked.

Only reading comes through to it, and the study is opened read-only, so that neither a request nor a fault there can
change it.
"""

from __future__ import annotations

import importlib.util
import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

#: What belongs to the dashboard: its page, its interface, its scripts.
PATHS = ("/dashboard", "/api/", "/static/")


def is_there() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("optuna_dashboard") is not None


def dashboard_of(database: Path) -> WSGIApplication:
    """The dashboard of a study.

    Args:
        database: its ``study.db``.
    """
    dashboard = _dashboard_of(database)
    # It counts on being told of encodings, has no use for the reader's secrets, and nobody reads its complaints.
    told = {"HTTP_ACCEPT_ENCODING": "identity"}
    hidden = {"HTTP_COOKIE": "", "HTTP_AUTHORIZATION": ""}
    return lambda environ, start: dashboard({**told, **environ, **hidden, "wsgi.errors": io.StringIO()}, start)


@cache
def _dashboard_of(database: Path) -> WSGIApplication:
    # Not before somebody wants it: it brings Optuna along.
    import optuna
    from optuna_dashboard import wsgi

    url = f"sqlite:///file:{quote(str(database))}?mode=ro&uri=true"
    storage = optuna.storages.RDBStorage(url, skip_compatibility_check=True, skip_table_creation=True)
    app: WSGIApplication = wsgi(storage)
    return app
