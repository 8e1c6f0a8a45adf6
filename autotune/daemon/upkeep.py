"""Starts a new search when the profile of a ``--keep-fresh`` job becomes stale."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from autotune.base.clock import Clock, timestamp
from autotune.base.records import Done, Job, JobRequest
from autotune.daemon.children import Children
from autotune.daemon.queue import Queue

log = logging.getLogger(__name__)

#: Interval between checks for stale profiles.
EVERY_S = 600.0
#: A check is killed after this time; it usually takes a second or two.
LIMIT_S = 120.0


class Upkeep:
    """Checks periodically whether stored profiles are stale. Runs on the daemon's main thread; no method blocks.

    Args:
        profiles: the profile store's folder.
        submit: submits a request and names its study.
    """

    def __init__(
        self, queue: Queue, profiles: Path, submit: Callable[[JobRequest], Job], clock: Clock, children: Children
    ) -> None:
        self._queue = queue
        self._profiles = profiles
        self._submit = submit
        self._clock = clock
        self._children = children
        self._checked_at: float | None = None
        self._checks: list[tuple[subprocess.Popen[bytes], IO[bytes], list[Job]]] = []

    def step(self) -> None:
        """Process finished checks, and start new ones when they are due.

        Raises:
            MachineError: the queue cannot be read or written.
        """
        for process, output, jobs in list(self._checks):
            if process.poll() is not None:
                self._checks.remove((process, output, jobs))
                with output:
                    output.seek(0)
                    self._submit_stale(output.read(), process.returncode, jobs)
            elif self._checked_at is not None and self._clock.now() - self._checked_at > LIMIT_S:
                process.kill()
        if self._checked_at is None or self._clock.now() - self._checked_at >= EVERY_S:
            self._checked_at = self._clock.now()
            self._start_checks()

    def _start_checks(self) -> None:
        alike: dict[tuple[str, str], list[Job]] = {}
        for job in self._queue.kept_fresh():
            alike.setdefault((job.request.python, job.placed or "cpu"), []).append(job)
        for (python, device), jobs in alike.items():
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process has ended)
            command = [python, "-P", "-m", "autotune.daemon.stale_check", str(self._profiles), device]
            try:
                process = self._children.start(
                    command,
                    env={**os.environ, **jobs[-1].request.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                )
            except (OSError, ValueError) as error:
                output.close()
                log.warning("cannot look whether profiles still hold: %s: %s", python, error)
                continue
            self._checks.append((process, output, jobs))

    def _submit_stale(self, output: bytes, exit_code: int, jobs: list[Job]) -> None:
        try:
            stale: dict[str, dict[str, Any]] = json.loads(output) if exit_code == 0 else {}
        except ValueError:
            stale = {}
        if exit_code != 0:
            # An older autotune in the job's own interpreter, for one, does not know this check.
            log.warning("cannot look whether profiles still hold: the check ended with exit code %d", exit_code)
        # Only the latest job of each slot is submitted again.
        latest = {job.status.slot: job for job in jobs if isinstance(job.status, Done) and job.status.slot}
        for slot, job in latest.items():
            found = stale.get(slot)
            if not found or not found["rows"]:
                continue
            rows = found["rows"]
            again = rematch(job, slot, found["baseline"], rows)
            if self._queue.is_known(again.spec.mark):
                continue
            taken = self._submit(again)
            changes = "; ".join(f"{what} was {then}, is {now}" for what, then, now in rows)
            log.info("the profile %s holds no longer (%s): job %d searches again", slot, changes, taken.id)


def rematch(job: Job, slot: str, baseline: dict[str, str], rows: list[list[str]]) -> JobRequest:
    """Return the request for a new search with the current configuration as its baseline.

    The request's mark is a hash of the slot and the changes, so that each change is submitted only once.

    Args:
        baseline: the current configuration, in ``--baseline`` form.
        rows: the changed conditions, each as name, old value and new value.
    """
    mark = hashlib.sha256(json.dumps([slot, sorted(rows)]).encode()).hexdigest()[:32]
    spec = job.request.spec.model_copy(
        update={"name": "", "mark": mark, "created": timestamp(), "baseline": baseline, "batch_size": None}
    )
    # The source hashes are dropped, because a change to the workload may be what made the profile stale.
    changes = {"spec": spec, "refreshes": slot, "after": None, "not_before": None, "sources": {}}
    return job.request.model_copy(update=changes)
