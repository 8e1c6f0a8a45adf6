"""Mounts Optuna's dashboard behind the page's filter, because its HTTP API deletes studies without confirmation.

The filter lets only read requests through, and the study is opened read-only, so that neither a request nor a bug in
the dashboard can change it.
"""

from __future__ import annotations

import importlib.util
import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from autotune.base.errors import MachineError

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

#: URL prefixes of the dashboard: its page, its API, its scripts.
PATHS = ("/dashboard", "/api/", "/static/")


def is_there() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("optuna_dashboard") is not None


def dashboard_of(database: Path) -> WSGIApplication:
    """Return the dashboard of a study as a WSGI application.

    Args:
        database: the study's ``study.db``.

    Raises:
        MachineError: Optuna cannot read the database.
    """
    try:
        dashboard = _dashboard_of(database)
    except Exception as error:  # SQLAlchemy's and Optuna's errors have no common base
        # The page is for people who need not know the machine's folders.
        raise MachineError(f"Optuna's dashboard cannot read study {database.parent.name}") from error
    # The dashboard requires a header for encodings, must not see the reader's secrets, and has no reader for its
    # errors.
    told = {"HTTP_ACCEPT_ENCODING": "identity"}
    hidden = {"HTTP_COOKIE": "", "HTTP_AUTHORIZATION": ""}
    return lambda environ, start: dashboard({**told, **environ, **hidden, "wsgi.errors": io.StringIO()}, start)


@cache
def _dashboard_of(database: Path) -> WSGIApplication:
    # Imported on first use, because it imports Optuna.
    import optuna
    from optuna_dashboard import wsgi

    url = f"sqlite:///file:{quote(str(database))}?mode=ro&uri=true"
    storage = optuna.storages.RDBStorage(url, skip_compatibility_check=True, skip_table_creation=True)
    app: WSGIApplication = wsgi(storage)
    return app
