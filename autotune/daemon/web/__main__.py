"""``python -m autotune.daemon.web STATE RUNTIME HOST:PORT``: serve the web page until the daemon ends."""

from __future__ import annotations

import os
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

from autotune.daemon.web.address import TOKEN
from autotune.daemon.web.server import make_server
from autotune.errors import AutotuneError
from autotune.layout import DaemonFiles


def main(arguments: list[str]) -> int:
    """Serve the page and return the exit code.

    Args:
        arguments: the daemon's state folder, its runtime folder, and the address.
    """
    files = DaemonFiles(Path(arguments[0]), Path(arguments[1]))
    try:
        server = make_server(files, arguments[2], os.environ.get(TOKEN))
    except (AutotuneError, OSError) as error:
        print(f"the page cannot be served at {arguments[2]}: {getattr(error, 'strerror', None) or error}")  # noqa: T201
        return 1
    # Stdin is a pipe from the daemon. It is closed when the daemon ends, even if the daemon is killed.
    threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
    host, port = server.server_address[:2]
    print(f"http://{host!s}:{port}/", flush=True)  # noqa: T201
    server.serve_forever()
    return 0


def _end_with_stdin(server: ThreadingHTTPServer) -> None:
    sys.stdin.buffer.read()
    server.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
