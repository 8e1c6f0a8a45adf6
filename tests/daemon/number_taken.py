"""``number_taken.py STATE PROJECT``: let another process reuse a job's pid after a crash of the daemon.

Must run as process 1 of a pid namespace. Prints the result as JSON.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
conftest = importlib.import_module("tests.daemon.conftest")

state, project = Path(sys.argv[1]), Path(sys.argv[2])
daemon = conftest.Daemon(state).start()
(job,) = daemon.client.submit(conftest.acted_request(project, "mine", "waits_the_first_time"))
conftest.wait_until(lambda: getattr(daemon.client.job(job.id).status, "child", None) is not None)
pid = daemon.client.job(job.id).status.child.pid
conftest.wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
daemon.kill()
os.killpg(pid, signal.SIGKILL)


def reaped():
    # Process 1 adopts the daemon's children.
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return not Path(f"/proc/{pid}").exists()


conftest.wait_until(reaped)
Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
innocent = subprocess.Popen(["sleep", "600"])
daemon.start()
(ended,) = daemon.until_ended(job.id)
print(json.dumps({"same number": innocent.pid == pid, "innocent lives": innocent.poll() is None, "job": ended.state}))
innocent.kill()
innocent.wait()
daemon.stop()
