"""``python -P -m autotune.trial FD``: the template process, spoken to over the socket at descriptor FD."""

import socket
import sys

from autotune.trial.template import serve

if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
