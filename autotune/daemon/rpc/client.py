"""Asking the daemon: one call, one connection."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from autotune.daemon.rpc.protocol import (
    CALL_BYTES,
    REPLY_BYTES,
    AskStatus,
    Call,
    ListJobs,
    Message,
    OneJob,
    Reply,
    Retry,
    Stop,
    Submit,
    error_of,
    short_name,
)
from autotune.errors import DaemonUnreachableError, UsageError
from autotune.layout import DaemonFiles
from autotune.records import Job, JobRequest, JobRow, JobState

#: An answer takes milliseconds; a disk that syncs slowly may take its time.
LIMIT_S = 30.0
_START = "`autotune daemon start` starts one."


class Client:
    """Calls a daemon. Every method raises what the daemon's own would, and DaemonUnreachableError where none answers.

    Args:
        limit_s: how long an answer may take.
    """

    def __init__(self, files: DaemonFiles, *, limit_s: float = LIMIT_S) -> None:
        self._files = files
        self._limit_s = limit_s

    def submit(self, *requests: JobRequest) -> list[Job]:
        """Jobs, taken in all or none; when this returns they are on disk."""
        call = Submit(requests=requests)
        try:
            found = self.call(call)
        except DaemonUnreachableError as error:
            if not isinstance(error.__cause__, TimeoutError | ConnectionError):
                raise
            # It may have been taken and not been said. Asking again takes nothing twice: each request has its mark.
            found = self.call(call)
        return [Job.model_validate(job) for job in found["jobs"]]

    def rows(self, states: tuple[JobState, ...] = tuple(JobState)) -> list[JobRow]:
        """The jobs in some states, the one whose turn it is first."""
        return [JobRow.model_validate(row) for row in self.call(ListJobs(states=states))["jobs"]]

    def job(self, number: int) -> Job:
        """One job."""
        return Job.model_validate(self.call(OneJob(op="show", id=number))["job"])

    def waits_for(self, number: int) -> str | None:
        """Why a queued job does not run, as a clause; ``None`` for one that is not queued."""
        return cast(str | None, self.call(OneJob(op="show", id=number)).get("waits"))

    def cancel(self, number: int) -> Job:
        """The job, cancelled, or about to be."""
        return Job.model_validate(self.call(OneJob(op="cancel", id=number))["job"])

    def pause(self, number: int) -> Job:
        """The job, paused, or about to be."""
        return Job.model_validate(self.call(OneJob(op="pause", id=number))["job"])

    def resume(self, number: int) -> Job:
        """The job, queued again after a pause."""
        return Job.model_validate(self.call(OneJob(op="resume", id=number))["job"])

    def let_go(self, number: int) -> Job:
        """The job, whose profile is not kept fresh any more."""
        return Job.model_validate(self.call(OneJob(op="let-go", id=number))["job"])

    def retry(self, number: int, sources: dict[str, str]) -> Job:
        """The job, queued again after it failed or was cancelled."""
        return Job.model_validate(self.call(Retry(id=number, sources=sources))["job"])

    def status(self) -> dict[str, Any]:
        """What `autotune daemon status --json` prints."""
        return self.call(AskStatus(op="status"))

    def metrics(self) -> str:
        """The figures in Prometheus' text format."""
        return str(self.call(AskStatus(op="metrics"))["metrics"])

    def stop(self, *, now: bool = False) -> int:
        """The pid of the daemon, which is about to end."""
        return int(self.call(Stop(now=now))["pid"])

    def call(self, call: Call) -> dict[str, Any]:
        """What the daemon answers to a call."""
        line = Message(call=call).model_dump_json().encode() + b"\n"
        if len(line) > CALL_BYTES:
            raise UsageError(
                f"that is {len(line)} bytes, and a call has {CALL_BYTES} at the most",
                advice="submit fewer jobs at once.",
            )
        reply = self._exchange(line)
        if reply.error is not None:
            raise error_of(reply.error)
        return reply.result or {}

    def _connect(self, connection: socket.socket) -> None:
        places = [self._files.socket]
        # A daemon that was started with another runtime folder, or whose own was taken away, says where it is.
        with contextlib.suppress(OSError, ValueError):
            places.insert(0, Path(self._files.address.read_text().strip()))
        for place in places:
            try:
                with short_name(place) as name:
                    connection.connect(name)
                return
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
                if place is places[-1]:
                    raise

    def _exchange(self, line: bytes) -> Reply:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
                connection.settimeout(self._limit_s)
                self._connect(connection)
                connection.sendall(line)
                received = bytearray()
                while not received.endswith(b"\n") and len(received) < REPLY_BYTES:
                    found = connection.recv(2**20)
                    if not found:
                        break
                    received += found
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise DaemonUnreachableError("no daemon runs", advice=_START) from None
        except OSError as error:
            raise DaemonUnreachableError(
                f"the daemon at {self._files.socket} does not answer: {error.strerror or error}",
                advice="`autotune daemon logs` may say why; `autotune jobs` says what was taken.",
            ) from error
        try:
            return Reply.model_validate_json(bytes(received))
        except ValidationError as error:
            raise DaemonUnreachableError(
                f"the daemon at {self._files.socket} gave no answer", advice="`autotune daemon logs` may say why."
            ) from error
