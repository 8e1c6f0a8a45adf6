"""``python -P -m autotune.child FD``: run the template process, controlled over the socket at descriptor FD.

``python -P -m autotune.child SPEC STDOUT STDERR BEATS`` runs the launch of a spec, with these descriptors; the template
starts it.
"""

import os
import socket
import sys
from pathlib import Path

from autotune.child.fork_server import lead, serve

if __name__ == "__main__":
    if len(sys.argv) > 2:
        lead(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]], spawned=True)
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    # Skip interpreter teardown: with torch loaded it takes about a second, and there is nothing to clean up.
    os._exit(code)
