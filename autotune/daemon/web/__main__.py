"""``python -m autotune.daemon.web STATE RUNTIME HOST:PORT``: serve the web page until the daemon ends."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from autotune.base.errors import AutotuneError
from autotune.base.layout import DaemonFiles
from autotune.daemon.web.process import TOKEN
from autotune.daemon.web.server import make_server


def main(arguments: list[str]) -> int:
    """Serve the page and return the exit code.

    Args:
        arguments: the daemon's state folder, its runtime folder, and the address.
    """
    # There is no reader for a request log, a query may contain a token, and the daemon takes the last line for the
    # address.
    logging.disable()
    files = DaemonFiles(Path(arguments[0]), Path(arguments[1]))
    try:
        server = make_server(files, arguments[2], os.environ.get(TOKEN))
    except (AutotuneError, OSError) as error:
        print(f"the page cannot be served at {arguments[2]}: {getattr(error, 'strerror', None) or error}")  # noqa: T201
        return 1
    # Stdin is a pipe from the daemon. It is closed when the daemon ends, even if the daemon is killed.
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    print(f"http://{server.effective_host}:{server.effective_port}/", flush=True)  # noqa: T201
    server.run()
    return 0


def _end_with_stdin() -> None:
    """Exit at the end of stdin, a pipe that is closed when the daemon ends for any reason."""
    sys.stdin.buffer.read()
    # There is nothing to save, and open requests are dropped.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
