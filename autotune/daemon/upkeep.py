"""Profiles that hold no longer are searched anew, where their job says so."""

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

from autotune.clock import Clock, timestamp
from autotune.daemon.children import Children
from autotune.daemon.queue import Queue
from autotune.records import Done, Job, JobRequest

log = logging.getLogger(__name__)

#: How often it is looked whether anything has changed.
EVERY_S = 600.0
#: Looking takes a second or two.
LIMIT_S = 120.0


class Upkeep:
    """Looks now and then whether profiles still hold. For the daemon's main thread; no method waits.

    Args:
        profiles: the store's folder. submit: takes a request in, and gives its study a name.
    """

    def __init__(
        self, queue: Queue, profiles: Path, submit: Callable[[JobRequest], Job], clock: Clock, children: Children
    ) -> None:
        self._queue = queue
        self._profiles = profiles
        self._submit = submit
        self._clock = clock
        self._children = children
        self._looked: float | None = None
        self._looking: list[tuple[subprocess.Popen[bytes], IO[bytes], list[Job]]] = []

    def step(self) -> None:
        """Do what is due.

        Raises:
            MachineError: the queue cannot be read or written.
        """
        for process, output, jobs in list(self._looking):
            if process.poll() is not None:
                self._looking.remove((process, output, jobs))
                with output:
                    output.seek(0)
                    self._found(output.read(), process.returncode, jobs)
            elif self._looked is not None and self._clock.now() - self._looked > LIMIT_S:
                process.kill()
        if self._looked is None or self._clock.now() - self._looked >= EVERY_S:
            self._looked = self._clock.now()
            self._look()

    def _look(self) -> None:
        alike: dict[tuple[str, str], list[Job]] = {}
        for job in self._queue.kept_fresh():
            alike.setdefault((job.request.python, job.placed or "cpu"), []).append(job)
        for (python, device), jobs in alike.items():
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process has ended)
            command = [python, "-P", "-m", "autotune.daemon.fresh", str(self._profiles), device]
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
            self._looking.append((process, output, jobs))

    def _found(self, output: bytes, exit_code: int, jobs: list[Job]) -> None:
        try:
            stale: dict[str, dict[str, Any]] = json.loads(output) if exit_code == 0 else {}
        except ValueError:
            stale = {}
        # The latest job of a slot is the one whose request is asked again.
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
    """The request that asks whether anything is faster now than what was best. The same change asks once.

    Args:
        baseline: the configuration in force, as ``--baseline`` takes it.
        rows: what has changed.
    """
    mark = hashlib.sha256(json.dumps([slot, sorted(rows)]).encode()).hexdigest()[:32]
    spec = job.request.spec.model_copy(
        update={"name": "", "mark": mark, "created": timestamp(), "baseline": baseline, "batch_size": None}
    )
    # It was the workload's change perhaps that made it stale.
    changes = {"spec": spec, "refreshes": slot, "after": None, "not_before": None, "sources": {}}
    return job.request.model_copy(update=changes)
