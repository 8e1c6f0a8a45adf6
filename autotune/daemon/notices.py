"""Telling somebody of a job's end: a command, or a POST to an address, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

from autotune.clock import Clock
from autotune.daemon.children import NOTICE, Children
from autotune.daemon.web.address import TOKEN
from autotune.records import SCHEMA_VERSION, Job

#: One that takes longer is ended.
LIMIT_S = 60.0
#: So often it is tried in all, and so long apart.
ATTEMPTS = 3
BETWEEN_S = 30.0
#: So many are under way together.
AT_ONCE = 4


class Notices:
    """Notices under way. For the daemon's main thread alone; no method waits.

    At least once: a daemon that is killed before a notice's end is written down sends it again.
    """

    def __init__(self, clock: Clock, children: Children | None = None) -> None:
        self._clock = clock
        self._children = children or Children()
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._failed: dict[int, tuple[int, float]] = {}
        #: What came of notices that are over, until it is written down.
        self._over: dict[int, bool] = {}

    def begin(self, job: Job) -> None:
        """Start telling of a job's end, unless that is under way or has just failed."""
        attempts, again = self._failed.get(job.id, (0, 0.0))
        under_way = job.id in self._running or job.id in self._over or len(self._running) >= AT_ONCE
        if under_way or job.request.on_done is None or self._clock.now() < again:
            return
        target = job.request.on_done
        to_an_address = target.startswith(("http://", "https://"))
        command = (
            [sys.executable, "-P", "-m", "autotune.daemon.post", target] if to_an_address else ["sh", "-c", target]
        )
        study = f"{job.request.studies_dir}/{job.request.spec.name}"
        environment = {
            **{name: value for name, value in os.environ.items() if name != TOKEN},
            **job.request.environment,
            "AUTOTUNE_JOB_ID": str(job.id),
            NOTICE: job.state.value,
            "AUTOTUNE_STUDY_FOLDER": study,
        }
        # Short, so that it fits into the pipe and nobody waits for a reader.
        told = json.dumps(
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
            self._count(job.id, attempts + 1, taken=False)
            return
        self._running[job.id] = process, self._clock.now()
        assert process.stdin is not None
        try:
            process.stdin.write(told.encode())
            process.stdin.close()
        except OSError:
            # It does not want to know more.
            pass

    def over(self) -> dict[int, bool]:
        """Notices that are over, by job, and whether they were taken; each until `forget` is told of it."""
        for number, (process, began) in list(self._running.items()):
            if process.poll() is None:
                if self._clock.now() - began > LIMIT_S:
                    # Another user's by now (sudo) cannot be killed, and is waited for.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                continue
            del self._running[number]
            attempts = self._failed.get(number, (0, 0.0))[0] + 1
            self._count(number, attempts, taken=process.returncode == 0)
        return dict(self._over)

    def forget(self, job: int) -> None:
        """What came of a notice is written down."""
        self._over.pop(job, None)

    def _count(self, job: int, attempts: int, *, taken: bool) -> None:
        if taken or attempts >= ATTEMPTS:
            self._failed.pop(job, None)
            self._over[job] = taken
        else:
            self._failed[job] = attempts, self._clock.now() + BETWEEN_S
