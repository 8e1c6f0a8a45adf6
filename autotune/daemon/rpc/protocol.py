"""The RPC protocol: one call and one reply per connection, each a line of JSON."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autotune.base.errors import AutotuneError, UsageError, by_exit_code
from autotune.base.records import JobRequest, JobState, Record

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

    Reply: ``jobs``, a list of `JobRow`, and ``waits``: why the first queued ones do not run, by id.
    """

    op: Literal["jobs"] = "jobs"
    states: tuple[JobState, ...] = tuple(JobState)


class JobCall(Record):
    """Show or change one job. Reply: ``job``, as it is afterwards, and for ``show`` also what it ``waits`` for."""

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


class Message(Record):
    """A call as it is sent."""

    version: int = VERSION
    call: Call


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
        found = TypeAdapter(dict[str, Any]).validate_json(line)
    except ValidationError:
        raise UsageError("that is no call") from None
    if found.get("version") != VERSION:
        raise UsageError(
            f"the daemon speaks version {VERSION} of its language, and this call is in {found.get('version')!r}",
            advice="restart the daemon, so that both are of one autotune.",
        )
    try:
        return _CALL.validate_python(found.get("call"), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"that is no call: {where}: {first['msg']}") from None


def error_info(error: AutotuneError) -> ErrorInfo:
    """Convert an error for a reply."""
    return ErrorInfo(message=str(error), exit_code=error.exit_code, advice=error.advice)


def to_error(info: ErrorInfo) -> AutotuneError:
    """Convert an error in a reply back to the exception that the daemon raised."""
    return by_exit_code(info.exit_code)(info.message, advice=info.advice)
