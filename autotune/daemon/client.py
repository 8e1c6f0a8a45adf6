"""The socket's protocol, and its client."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError

from autotune.base.errors import AutotuneError, DaemonUnreachableError, UsageError, by_exit_code
from autotune.base.layout import DaemonFiles
from autotune.base.records import Job, JobRequest, JobRow, JobState, Record

# The protocol: one call and one reply per connection, each a line of JSON.

VERSION = 1
#: Maximum length of a call and of a reply. A reply may list ten thousand jobs.
CALL_BYTES = 256 * 2**10
REPLY_BYTES = 64 * 2**20


class Submit(Record):
    """Submit jobs, all or none. Jobs that are already in the queue are not added again. Reply: ``jobs``."""

    op: Literal["submit"] = "submit"
    requests: tuple[JobRequest, ...] = Field(min_length=1)


class ListJobs(Record):
    """List the jobs in the given states, in the order they start.

    Reply: ``jobs``, a list of `JobRow`, and ``waits``: why the first queued jobs do not run, by id.
    """

    op: Literal["jobs"] = "jobs"
    states: tuple[JobState, ...] = tuple(JobState)


class JobCall(Record):
    """Show or change one job. Reply: ``job`` as it is afterwards, and for ``show`` also what it ``waits`` for."""

    op: Literal["show", "cancel", "pause", "resume", "let-go"]
    id: int


class Retry(Record):
    """Queue a failed or cancelled job again. Reply: ``job``. ``sources`` are the current hashes of the job's files."""

    op: Literal["retry"] = "retry"
    id: int
    sources: dict[str, str] = Field(default_factory=dict)


class StatusCall(Record):
    """Get what ``autotune daemon status --json`` prints, or ``metrics`` in the Prometheus text format."""

    op: Literal["status", "metrics"]


class Stop(Record):
    """Stop the daemon. Reply: ``pid``, sent before the daemon ends."""

    op: Literal["stop"] = "stop"
    now: bool = False


Call = Annotated[Submit | ListJobs | JobCall | Retry | StatusCall | Stop, Field(discriminator="op")]
_CALL: TypeAdapter[Any] = TypeAdapter(Call)


class ErrorInfo(Record):
    """An error as it is sent in a reply."""

    message: str
    exit_code: int
    advice: str | None = None


class Reply(Record):
    """A reply with either ``result`` or ``error``."""

    version: int = VERSION
    result: dict[str, Any] | None = None
    error: ErrorInfo | None = None

    def line(self) -> bytes:
        """Serialize the reply as a line of JSON."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


@dataclass(frozen=True)
class RawReply:
    """A reply whose result is already JSON, so that a list of ten thousand jobs is not parsed and serialized again."""

    result: str

    def line(self) -> bytes:
        """Serialize the reply as a line of JSON."""
        return f'{{"version": {VERSION}, "result": {self.result}}}\n'.encode()


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield a path for a socket that fits into ``sun_path`` (107 bytes), however long the real path is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def read_call(line: bytes) -> Any:
    """Parse a call.

    Raises:
        UsageError: the line is not a valid call, or has another protocol version.
    """
    try:
        message = TypeAdapter(dict[str, Any]).validate_json(line)
    except ValidationError:
        raise UsageError("that is no call") from None
    if message.get("version") != VERSION:
        raise UsageError(
            f"the daemon speaks version {VERSION} of its language, and this call is in {message.get('version')!r}",
            advice="restart the daemon, so that both are of one autotune.",
        )
    try:
        return _CALL.validate_python(message.get("call"), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"that is no call: {where}: {first['msg']}") from None


def error_info(error: AutotuneError) -> ErrorInfo:
    """Convert an error for a reply."""
    return ErrorInfo(message=str(error), exit_code=error.exit_code, advice=error.advice)


#: Default timeout of a call. A reply usually takes milliseconds, but a disk may sync slowly.
LIMIT_S = 30.0
_START = "`autotune daemon start` starts one."


class Client:
    """Calls a daemon. Each call opens its own connection.

    Every method raises the errors of the daemon's own method, and `DaemonUnreachableError` if no daemon replies.
    """

    def __init__(self, files: DaemonFiles, *, limit_s: float = LIMIT_S) -> None:
        self._files = files
        self._limit_s = limit_s

    def submit(self, *requests: JobRequest) -> list[Job]:
        """Submit jobs, all or none, and return them. They are on disk when this returns."""
        call = Submit(requests=requests)
        try:
            result = self.call(call)
        except DaemonUnreachableError as error:
            if not isinstance(error.__cause__, TimeoutError | ConnectionError):
                raise
            # The reply may have been lost. Retrying adds no job twice, because each request has a mark.
            result = self.call(call)
        return [Job.model_validate(job) for job in result["jobs"]]

    def rows(self, states: tuple[JobState, ...] = tuple(JobState)) -> list[JobRow]:
        """Return the jobs in the given states, in the order they start."""
        result = self.call(ListJobs(states=states))
        waits = result.get("waits", {})
        return [JobRow.model_validate({**row, "waits": waits.get(str(row["id"]))}) for row in result["jobs"]]

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
        message = {"version": VERSION, "call": call.model_dump(mode="json")}
        line = json.dumps(message, ensure_ascii=False).encode() + b"\n"
        if len(line) > CALL_BYTES:
            raise UsageError(
                f"that is {len(line)} bytes, and a call has {CALL_BYTES} at the most",
                advice="submit fewer jobs at once.",
            )
        reply = self._exchange(line)
        if reply.error is not None:
            raise by_exit_code(reply.error.exit_code)(reply.error.message, advice=reply.error.advice)
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
                    chunk = connection.recv(2**20)
                    if not chunk:
                        break
                    received += chunk
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
