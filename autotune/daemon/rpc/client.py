"""The client of the daemon's socket."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from autotune.daemon.rpc.protocol import (
    CALL_BYTES,
    REPLY_BYTES,
    Call,
    JobCall,
    ListJobs,
    Message,
    Reply,
    Retry,
    StatusCall,
    Stop,
    Submit,
    short_name,
    to_error,
)
from autotune.base.errors import DaemonUnreachableError, UsageError
from autotune.base.layout import DaemonFiles
from autotune.base.records import Job, JobRequest, JobRow, JobState

#: Default timeout of a call. A reply usually takes milliseconds, but a disk may sync slowly.
LIMIT_S = 30.0
_START = "`autotune daemon start` starts one."


class Client:
    """Calls a daemon. Each call opens its own connection.

    Every method raises the errors of the daemon's own method, and `DaemonUnreachableError` if no daemon replies.

    Args:
        limit_s: timeout of a call.
    """

    def __init__(self, files: DaemonFiles, *, limit_s: float = LIMIT_S) -> None:
        self._files = files
        self._limit_s = limit_s

    def submit(self, *requests: JobRequest) -> list[Job]:
        """Submit jobs, all or none, and return them. They are on disk when this returns."""
        call = Submit(requests=requests)
        try:
            found = self.call(call)
        except DaemonUnreachableError as error:
            if not isinstance(error.__cause__, TimeoutError | ConnectionError):
                raise
            # The reply may have been lost. Retrying adds no job twice, because each request has its mark.
            found = self.call(call)
        return [Job.model_validate(job) for job in found["jobs"]]

    def rows(self, states: tuple[JobState, ...] = tuple(JobState)) -> list[JobRow]:
        """Return the jobs in the given states, in the order they start."""
        found = self.call(ListJobs(states=states))
        waits = found.get("waits", {})
        return [JobRow.model_validate({**row, "waits": waits.get(str(row["id"]))}) for row in found["jobs"]]

    def job(self, number: int) -> Job:
        """Return one job."""
        return Job.model_validate(self.call(JobCall(op="show", id=number))["job"])

    def waits_for(self, number: int) -> str | None:
        """Return why a queued job does not run, as a clause; ``None`` if the job is not queued."""
        return cast(str | None, self.call(JobCall(op="show", id=number)).get("waits"))

    def cancel(self, number: int) -> Job:
        """Cancel a job and return it. A running job is cancelled once its processes have ended."""
        return Job.model_validate(self.call(JobCall(op="cancel", id=number))["job"])

    def pause(self, number: int) -> Job:
        """Pause a job and return it. A running job is paused once its processes have ended."""
        return Job.model_validate(self.call(JobCall(op="pause", id=number))["job"])

    def resume(self, number: int) -> Job:
        """Queue a paused job again and return it."""
        return Job.model_validate(self.call(JobCall(op="resume", id=number))["job"])

    def let_go(self, number: int) -> Job:
        """Stop keeping a job's profile fresh, and return the job."""
        return Job.model_validate(self.call(JobCall(op="let-go", id=number))["job"])

    def retry(self, number: int, sources: dict[str, str]) -> Job:
        """Queue a failed or cancelled job again and return it."""
        return Job.model_validate(self.call(Retry(id=number, sources=sources))["job"])

    def status(self) -> dict[str, Any]:
        """Return what ``autotune daemon status --json`` prints."""
        return self.call(StatusCall(op="status"))

    def metrics(self) -> str:
        """Return the metrics in the Prometheus text format."""
        return str(self.call(StatusCall(op="metrics"))["metrics"])

    def stop(self, *, now: bool = False) -> int:
        """Stop the daemon and return its pid. The daemon may still be running when this returns."""
        return int(self.call(Stop(now=now))["pid"])

    def call(self, call: Call) -> dict[str, Any]:
        """Send a call and return the result."""
        line = Message(call=call).model_dump_json().encode() + b"\n"
        if len(line) > CALL_BYTES:
            raise UsageError(
                f"that is {len(line)} bytes, and a call has {CALL_BYTES} at the most",
                advice="submit fewer jobs at once.",
            )
        reply = self._exchange(line)
        if reply.error is not None:
            raise to_error(reply.error)
        return reply.result or {}

    def _connect(self, connection: socket.socket) -> None:
        places = [self._files.socket]
        # The address file has the actual socket of a daemon whose runtime folder differs or was removed.
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
