"""``python -P -m autotune.child FD``: the template process, spoken to over the socket at descriptor FD."""

import os
import socket
import sys

from autotune.child.fork_server import serve

if __name__ == "__main__":
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    # It holds nothing that would need tidying; taking the interpreter with torch apart lasts a second.
    os._exit(code)
