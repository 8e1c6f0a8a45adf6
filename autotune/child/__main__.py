"""``python -P -m autotune.child FD``: run the template process, controlled over the socket at descriptor FD."""

import os
import socket
import sys

from autotune.child.fork_server import serve

if __name__ == "__main__":
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    # Skip interpreter teardown: with torch loaded it takes about a second, and there is nothing to clean up.
    os._exit(code)
