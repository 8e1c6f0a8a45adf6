"""``small_disk.py FOLDER PROJECT``: run a daemon whose state folder is on a full 1 MiB file system.

Prints the events as JSON, one object per line.
"""

import atexit
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
conftest = importlib.import_module("tests.daemon.conftest")
from autotune.base.errors import AutotuneError  # noqa: E402

small, project = Path(sys.argv[1]), Path(sys.argv[2])
ballast = small / "ballast"
daemon = conftest.Daemon(small / "state")
# Also kills the daemon if this script fails.
atexit.register(daemon.kill)
daemon.start()


def tell(**facts):
    print(json.dumps(facts), flush=True)


def submit(name, **changes):
    try:
        (job,) = daemon.client.submit(conftest.replay_request(project, name, **changes))
    except AutotuneError as error:
        tell(refused=name, code=error.exit_code, says=str(error))
        return None
    return job.id


def fill():
    with ballast.open("ab", buffering=0) as stream:
        for size in (2**14, 2**10, 1):
            try:
                while True:
                    stream.write(b"x" * size)
            except OSError:
                continue


ballast.write_bytes(b"x" * 300_000)
# Submit large jobs that do not start until the disk is full.
acknowledged = []
while (number := submit(f"large-{len(acknowledged)}", not_before=4e9, environment={"A": "x" * 20_000})) is not None:
    acknowledged.append(number)
tell(acknowledged=acknowledged, rows=[row.id for row in daemon.client.rows()])

# Restart the daemon on the full disk.
fill()
daemon.kill()
daemon.start()
tell(found=[row.id for row in daemon.client.rows()], state=daemon.client.status()["state"])
submit("on the full disk")
ballast.unlink()

# Submit a job that could start if its record could be written.
daemon.client.cancel(acknowledged[-1])
runnable = submit("runnable", after=acknowledged[0])
fill()
try:
    daemon.client.cancel(acknowledged[1])
except AutotuneError as error:
    tell(refused="a wish", code=error.exit_code, says=str(error))
tell(status=daemon.client.status()["state"], runnable=daemon.client.job(runnable).state)
ballast.unlink()
for number in acknowledged[1:-1]:
    daemon.client.cancel(number)
last = submit("last")
(ended,) = daemon.until_ended(last)
tell(last=ended.state, found=[row.id for row in daemon.client.rows()], ended=daemon.stop())
