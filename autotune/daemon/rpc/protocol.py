"""What the daemon and its clients say to each other: one call and one reply a connection, each a line of JSON."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autotune.errors import AutotuneError, UsageError, by_exit_code
from autotune.records import JobRequest, JobState, Record

VERSION = 1
#: A call is no longer than this; a reply may list ten thousand jobs.
CALL_BYTES = 256 * 2**10
REPLY_BYTES = 64 * 2**20


class Submit(Record):
    """Take these jobs in, all or none of those that are not yet there. The reply has them as ``jobs``."""

    op: Literal["submit"] = "submit"
    requests: tuple[JobRequest, ...] = Field(min_length=1)


class ListJobs(Record):
    """The reply has rows as ``jobs``, the one whose turn it is first."""

    op: Literal["jobs"] = "jobs"
    states: tuple[JobState, ...] = tuple(JobState)


class OneJob(Record):
    """About one job. The reply has it as ``job``, as it is then; for ``show`` also what it ``waits`` for."""

    op: Literal["show", "cancel", "pause", "resume", "let-go"]
    id: int


class Retry(Record):
    """The same; `sources` are the job's files as they are now."""

    op: Literal["retry"] = "retry"
    id: int
    sources: dict[str, str] = Field(default_factory=dict)


class AskStatus(Record):
    """The reply has what `autotune daemon status --json` prints."""

    op: Literal["status", "metrics"]


class Stop(Record):
    """End the daemon. The reply comes before that has happened."""

    op: Literal["stop"] = "stop"
    now: bool = False


Call = Annotated[Submit | ListJobs | OneJob | Retry | AskStatus | Stop, Field(discriminator="op")]
_CALL: TypeAdapter[Any] = TypeAdapter(Call)


class Message(Record):
    """A call on its way."""

    version: int = VERSION
    call: Call


class Trouble(Record):
    """An error on its way back."""

    message: str
    exit_code: int
    advice: str | None = None


class Reply(Record):
    """What comes back: `result`, or `error`."""

    version: int = VERSION
    result: dict[str, Any] | None = None
    error: Trouble | None = None

    def line(self) -> bytes:
        """As it is sent."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


@dataclass(frozen=True)
class RawReply:
    """A reply whose result is JSON already: a list of ten thousand jobs is not taken apart to be put together again."""

    result: str

    def line(self) -> bytes:
        """As it is sent."""
        return f'{{"version": {VERSION}, "result": {self.result}}}\n'.encode()


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name for a socket that fits into the 107 bytes that the kernel takes, however long its path is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def read_call(line: bytes) -> Any:
    """The call in a line.

    Raises:
        UsageError: it is none, or one of another version.
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


def trouble_of(error: AutotuneError) -> Trouble:
    """An error for the way back."""
    return Trouble(message=str(error), exit_code=error.exit_code, advice=error.advice)


def error_of(trouble: Trouble) -> AutotuneError:
    """The error as it was raised at the other end."""
    return by_exit_code(trouble.exit_code)(trouble.message, advice=trouble.advice)
