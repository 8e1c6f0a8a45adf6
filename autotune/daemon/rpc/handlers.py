"""Handlers for the calls of the RPC protocol."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.base.version import __version__
from autotune.base.clock import Clock, timestamp
from autotune.daemon.metrics import Metrics, exposition
from autotune.daemon.queue import Queue
from autotune.daemon.rpc.protocol import JobCall, ListJobs, RawReply, Reply, Retry, StatusCall, Stop, Submit, read_call
from autotune.daemon.scheduler import Scheduler
from autotune.base.errors import AutotuneError, MachineError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import ENDED, SCHEMA_VERSION, Job, JobRequest, JobState
from autotune.study.reservation import Reservation, refuse_reserved, release, reservation_of, reserve


class Handlers:
    """Handles calls. Runs on the daemon's main thread.

    Attributes:
        changed: a call has changed something, so that the scheduler should tick soon.
        notes: repairs made since the daemon started, for ``autotune daemon status``.
    """

    def __init__(self, queue: Queue, scheduler: Scheduler, clock: Clock, notes: tuple[str, ...] = ()) -> None:
        self.changed = False
        #: Returns the address of the web page, or why it is not served; ``None`` if it is disabled.
        self.page: Callable[[], str | None] = lambda: None
        self.notes = notes
        self.refused = 0
        self._queue = queue
        self._scheduler = scheduler
        self._clock = clock
        self._began = clock.now()
        self._started = timestamp()

    def handle(self, line: bytes) -> Reply | RawReply:
        """Handle one call and return the reply.

        Raises:
            AutotuneError: the call is invalid or failed.
        """
        found = self._result(read_call(line))
        return found if isinstance(found, RawReply) else Reply(result=found)

    def metrics(self) -> str:
        """Return the metrics in the Prometheus text format."""
        return exposition(
            Metrics(
                jobs=self._queue.counts(),
                devices=dict(self._scheduler.board.states),
                taken={name: job.id for name, job in self._scheduler.taken().items()},
                reads=self._scheduler.board.reads,
                uptime_s=self._clock.now() - self._began,
                trouble=self._scheduler.trouble,
                refused=self.refused,
                ended=dict(self._scheduler.ended_runs),
            )
        )

    def _result(self, call: Any) -> dict[str, Any] | RawReply:
        if isinstance(call, ListJobs):
            waits = self._scheduler.waiting() if JobState.QUEUED in call.states else {}
            return RawReply(f'{{"jobs": {self._queue.rows(call.states)}, "waits": {json.dumps(waits)}}}')
        if isinstance(call, StatusCall):
            return {"metrics": self.metrics()} if call.op == "metrics" else self.status()
        if isinstance(call, JobCall) and call.op == "show":
            job = self._queue.job(call.id)
            return {"job": job.model_dump(mode="json"), "waits": self._scheduler.waits_for(job)}
        self.changed = True
        if isinstance(call, Stop):
            self._scheduler.stop(now=call.now)
            return {"pid": os.getpid()}
        if isinstance(call, Submit):
            return {"jobs": [job.model_dump(mode="json") for job in self.submit(*call.requests)]}
        if isinstance(call, Retry):
            return {"job": self._retry(call).model_dump(mode="json")}
        scheduler = self._scheduler
        actions = {
            "cancel": scheduler.cancel,
            "pause": scheduler.pause,
            "resume": scheduler.resume,
            "let-go": scheduler.let_go,
        }
        return {"job": actions[call.op](call.id).model_dump(mode="json")}

    def status(self) -> dict[str, Any]:
        """Return what ``autotune daemon status --json`` prints."""
        scheduler, taken = self._scheduler, self._scheduler.taken()
        state = "stopping" if scheduler.stopping else "waiting" if scheduler.trouble else "running"
        return {
            "schema_version": SCHEMA_VERSION,
            "pid": os.getpid(),
            "state": state,
            "trouble": scheduler.trouble,
            "version": __version__,
            "started": self._started,
            "uptime_s": round(self._clock.now() - self._began, 1),
            "jobs": {state.value: count for state, count in self._queue.counts().items()},
            "devices": [
                {
                    "name": name,
                    "model": device.reading.model,
                    "state": device.label if name not in taken else "running",
                    "job": taken[name].id if name in taken else None,
                    "why": scheduler.board.obstacle(name, taken),
                }
                for name, device in scheduler.board.states.items()
            ],
            "page": self.page(),
            "notes": list(self.notes),
        }

    def submit(self, *requests: JobRequest) -> list[Job]:
        """Submit jobs, all or none. Studies without a name get one.

        Raises:
            UsageError: a study already exists or belongs to another job.
            MachineError: the daemon is stopping, or the queue cannot be written.
        """
        if self._scheduler.stopping:
            raise MachineError("the daemon is being stopped", advice="submit again when one runs.")
        asked = [(r.studies_dir, r.spec.name) for r in requests if r.spec.name]
        twice = next((name for folder, name in asked if asked.count((folder, name)) > 1), None)
        if twice is not None:
            raise UsageError(f"study {twice!r} is asked for twice")
        named: list[JobRequest] = []
        try:
            for request in requests:
                # Requests of the same call have no row yet.
                others = {r.spec.name for r in named if r.studies_dir == request.studies_dir}
                named.append(self._named(request, others))
            return self._queue.submit_all(named, self._reserve)
        except BaseException:
            for request in named:
                self._release(request)
            raise

    def _named(self, request: JobRequest, others: set[str]) -> JobRequest:
        """Return the request with a unique study name."""
        name = request.spec.name
        if self._queue.is_known(request.spec.mark):
            return request
        if name:
            files = StudyFiles(Path(request.studies_dir) / name)
            found = list(files.folder.iterdir()) if request.replay is None and files.folder.is_dir() else []
            if any(path != files.reservation for path in found):
                raise UsageError(f"study {name!r} exists already", advice="another --study starts a new one.")
            return request
        name = next(n for n in _names(request) if n not in others and self._take(request, n))
        return request.model_copy(update={"spec": request.spec.model_copy(update={"name": name})})

    def _take(self, request: JobRequest, name: str) -> bool:
        """Take a name for a study if it is free, by making its folder; a search on the command line does the same."""
        folder = Path(request.studies_dir) / name
        if folder.exists() or self._queue.is_taken(str(folder)):
            return False
        if request.replay is None:
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                return False
            except OSError as error:
                raise MachineError(
                    f"cannot make {folder}: {error.strerror}", advice="--studies-dir names another folder."
                ) from error
        return True

    def _reserve(self, job: Job) -> None:
        """Keep the folder of a job's study for it, so that no search on the command line takes it meanwhile."""
        if job.request.replay is not None:
            return
        files, mark = StudyFiles(Path(job.request.studies_dir) / job.request.spec.name), job.request.spec.mark
        self._refuse_reserved(files, mark)
        reserve(files, Reservation(job=job.id, mark=mark, daemon=str(self._queue.files.folder)))

    def _refuse_reserved(self, files: StudyFiles, mark: str) -> None:
        found = reservation_of(files)
        # A daemon that was killed before it acknowledged a job has left a reservation of no job.
        ours = found is not None and found.daemon == str(self._queue.files.folder)
        if found is None or not ours or self._queue.is_known(found.mark):
            refuse_reserved(files, mark)

    def _release(self, request: JobRequest) -> None:
        """Give up the name of a request that was not acknowledged."""
        # If the queue cannot be read, the folder is left: a job may be behind it.
        with contextlib.suppress(AutotuneError):
            if request.replay is None and request.spec.name and not self._queue.is_known(request.spec.mark):
                release(StudyFiles(Path(request.studies_dir) / request.spec.name), request.spec.mark)

    def _retry(self, call: Retry) -> Job:
        """Queue a job again. Its folder is reserved again if its study has no request, or was removed."""
        job = self._queue.job(call.id)
        study = StudyFiles(Path(job.request.studies_dir) / job.request.spec.name)
        if job.state in ENDED and not study.request.exists():
            self._reserve(job)
        return self._scheduler.retry(call.id, call.sources)


def _names(request: JobRequest) -> Iterator[str]:
    return (f"{request.label}-{number}" for number in itertools.count(1))
