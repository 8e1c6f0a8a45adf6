"""What the daemon answers to each call."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.clock import Clock, timestamp
from autotune.daemon.metrics import Metrics, exposition
from autotune.daemon.queue import Queue
from autotune.daemon.rpc.protocol import AskStatus, ListJobs, OneJob, RawReply, Reply, Retry, Stop, Submit, read_call
from autotune.daemon.scheduler import Scheduler
from autotune.errors import MachineError, UsageError
from autotune.records import SCHEMA_VERSION, Job, JobRequest


class Desk:
    """Answers calls. For the daemon's main thread.

    Attributes:
        changed: something was asked for that the scheduler should look at soon.
        notes: what a person should know of how the daemon was started.
    """

    def __init__(self, queue: Queue, scheduler: Scheduler, clock: Clock, notes: tuple[str, ...] = ()) -> None:
        self.changed = False
        #: Says where the page is, or why it is not; ``None``: there is to be none.
        self.page: Callable[[], str | None] = lambda: None
        self.notes = notes
        self.refused = 0
        self._queue = queue
        self._scheduler = scheduler
        self._clock = clock
        self._began = clock.now()
        self._started = timestamp()

    def answer(self, line: bytes) -> Reply | RawReply:
        """The reply to one line.

        Raises:
            AutotuneError: what was asked cannot be had.
        """
        found = self._result(read_call(line))
        return found if isinstance(found, RawReply) else Reply(result=found)

    def metrics(self) -> str:
        """Everything that is counted, in Prometheus' text format."""
        return exposition(
            Metrics(
                jobs=self._queue.counts(),
                standings=dict(self._scheduler.board.standings),
                taken={name: job.id for name, job in self._scheduler.taken().items()},
                looks=self._scheduler.board.looks,
                uptime_s=self._clock.now() - self._began,
                trouble=self._scheduler.trouble,
                refused=self.refused,
                ended=dict(self._scheduler.ended_runs),
            )
        )

    def _result(self, call: Any) -> dict[str, Any] | RawReply:
        if isinstance(call, ListJobs):
            return RawReply(f'{{"jobs": {self._queue.rows(call.states)}}}')
        if isinstance(call, AskStatus):
            return {"metrics": self.metrics()} if call.op == "metrics" else self.status()
        if isinstance(call, OneJob) and call.op == "show":
            job = self._queue.job(call.id)
            return {"job": job.model_dump(mode="json"), "waits": self._scheduler.waits_for(job)}
        self.changed = True
        if isinstance(call, Stop):
            self._scheduler.stop(now=call.now)
            return {"pid": os.getpid()}
        if isinstance(call, Submit):
            return {"jobs": [job.model_dump(mode="json") for job in self.submit(*call.requests)]}
        if isinstance(call, Retry):
            return {"job": self._scheduler.retry(call.id, call.sources).model_dump(mode="json")}
        scheduler = self._scheduler
        do = {
            "cancel": scheduler.cancel,
            "pause": scheduler.pause,
            "resume": scheduler.resume,
            "let-go": scheduler.let_go,
        }
        return {"job": do[call.op](call.id).model_dump(mode="json")}

    def status(self) -> dict[str, Any]:
        """What `autotune daemon status --json` prints."""
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
                    "model": standing.reading.model,
                    "state": standing.word if name not in taken else "running",
                    "job": taken[name].id if name in taken else None,
                    "why": scheduler.board.obstacle(name, taken),
                }
                for name, standing in scheduler.board.standings.items()
            ],
            "page": self.page(),
            "notes": list(self.notes),
        }

    def submit(self, *requests: JobRequest) -> list[Job]:
        """Take jobs in, all or none; a study without a name gets one.

        Raises:
            UsageError: a study is there already, or is another job's.
            MachineError: the daemon is being stopped, or the queue cannot be written.
        """
        if self._scheduler.stopping:
            raise MachineError("the daemon is being stopped", advice="submit again when one runs.")
        named: list[JobRequest] = []
        asked = [(r.studies_dir, r.spec.name) for r in requests if r.spec.name]
        twice = next((name for folder, name in asked if asked.count((folder, name)) > 1), None)
        if twice is not None:
            raise UsageError(f"study {twice!r} is asked for twice")
        for request in requests:
            # Those that were sent in the same call have no row yet.
            others = {r.spec.name for r in named if r.studies_dir == request.studies_dir}
            named.append(self._named(request, others))
        jobs = self._queue.submit_all(named)
        for job in jobs:
            # So that a search on the command line does not take the name meanwhile.
            if job.request.replay is None:
                with contextlib.suppress(OSError):
                    (Path(job.request.studies_dir) / job.request.spec.name).mkdir(parents=True, exist_ok=True)
        return jobs

    def _named(self, request: JobRequest, others: set[str]) -> JobRequest:
        """The request with a study of its own."""
        name = request.spec.name
        if name and request.replay is None:
            folder = Path(request.studies_dir) / name
            if not self._queue.is_known(request.spec.mark) and folder.exists() and any(folder.iterdir()):
                raise UsageError(f"study {name!r} exists already", advice="another --study starts a new one.")
        if name:
            return request
        name = next(n for n in _names(request) if n not in others and self._is_free(request, n))
        return request.model_copy(update={"spec": request.spec.model_copy(update={"name": name})})

    def _is_free(self, request: JobRequest, name: str) -> bool:
        folder = Path(request.studies_dir) / name
        return not folder.exists() and not self._queue.is_taken(str(folder))


def _names(request: JobRequest) -> Iterator[str]:
    return (f"{request.label}-{number}" for number in itertools.count(1))
