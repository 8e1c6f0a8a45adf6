"""``--on-done`` notices: run a command or POST to a URL, in a separate process, when a job ends.

``python -m autotune.daemon.notices ADDRESS``: POST the JSON on stdin; exit with 0 if the request succeeds, else 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

from autotune.base.clock import Clock
from autotune.base.records import SCHEMA_VERSION, Job
from autotune.daemon.claims import NOTICE, Children
from autotune.daemon.page import TOKEN

#: A notice is killed after this time.
LIMIT_S = 60.0
#: Attempts per notice, and the delay between them.
ATTEMPTS = 3
RETRY_DELAY_S = 30.0
#: Number of notices that run at the same time.
MAX_RUNNING = 4


class Notices:
    """Sends notices. Runs on the daemon's main thread; no method blocks.

    Delivery is at least once: a daemon that is killed before it records the result of a notice sends it again.
    """

    def __init__(self, clock: Clock, children: Children | None = None) -> None:
        self._clock = clock
        self._children = children or Children()
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._failed: dict[int, tuple[int, float]] = {}
        #: Results of finished notices, kept until they are recorded.
        self._results: dict[int, bool] = {}

    def start(self, job: Job) -> None:
        """Send a job's notice, unless it is already running or waiting for its next attempt."""
        attempts, retry_at = self._failed.get(job.id, (0, 0.0))
        under_way = job.id in self._running or job.id in self._results or len(self._running) >= MAX_RUNNING
        if under_way or job.request.on_done is None or self._clock.now() < retry_at:
            return
        target = job.request.on_done
        is_url = target.startswith(("http://", "https://"))
        command = [sys.executable, "-P", "-m", "autotune.daemon.notices", target] if is_url else ["sh", "-c", target]
        study = f"{job.request.studies_dir}/{job.request.spec.name}"
        environment = {
            **{name: value for name, value in os.environ.items() if name != TOKEN},
            **job.request.environment,
            "AUTOTUNE_JOB_ID": str(job.id),
            NOTICE: job.state.value,
            "AUTOTUNE_STUDY_FOLDER": study,
        }
        # Short enough to fit into the pipe's buffer, so that writing it never blocks.
        payload = json.dumps(
            {"schema_version": SCHEMA_VERSION, "id": job.id, "state": job.state.value, "study": study}
            | {"why": (getattr(job.status, "why", None) or "")[:2000]}
        )
        try:
            process = self._children.start(
                command,
                cwd=job.request.folder if os.path.isdir(job.request.folder) else "/",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, ValueError):
            self._record(job.id, attempts + 1, delivered=False)
            return
        self._running[job.id] = process, self._clock.now()
        assert process.stdin is not None
        try:
            process.stdin.write(payload.encode())
            process.stdin.close()
        except OSError:
            # The command has closed its stdin without reading it.
            pass

    def finished(self) -> dict[int, bool]:
        """Return whether each finished notice was delivered, by job id. A notice is listed until `forget` is called."""
        for number, (process, started) in list(self._running.items()):
            if process.poll() is None:
                if self._clock.now() - started > LIMIT_S:
                    # A process that changed its user (sudo) cannot be killed; wait for it instead.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                continue
            del self._running[number]
            attempts = self._failed.get(number, (0, 0.0))[0] + 1
            self._record(number, attempts, delivered=process.returncode == 0)
        return dict(self._results)

    def is_sending(self) -> bool:
        """Return whether a notice is running."""
        return bool(self._running)

    def close(self) -> None:
        """Kill the notices that still run, with what they have started. The next daemon sends them again."""
        for process, _ in self._running.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        self._running.clear()

    def forget(self, job: int) -> None:
        """Drop the result of a notice, once it is recorded in the queue."""
        self._results.pop(job, None)

    def _record(self, job: int, attempts: int, *, delivered: bool) -> None:
        if delivered or attempts >= ATTEMPTS:
            self._failed.pop(job, None)
            self._results[job] = delivered
        else:
            self._failed[job] = attempts, self._clock.now() + RETRY_DELAY_S


def _post(address: str) -> int:
    # The daemon itself does not need it.
    import urllib.request

    body, headers = sys.stdin.buffer.read(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=30):
            return 0
    except (OSError, ValueError):
        return 1


if __name__ == "__main__":
    sys.exit(_post(sys.argv[1]))
