"""A job of the daemon: what was submitted, and where it stands."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, Record
from autotune.records.study import StudySpec


class JobState(StrEnum):
    """Where a job stands. Exactly one holds."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


#: A job leaves these only when somebody asks for it (`autotune jobs retry`).
ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


class JobRequest(Record):
    """What was submitted.

    Attributes:
        spec: what to search for. Its ``name`` is the study's; empty until the daemon has given it one.
        label: what the workload is called, for tables and for the study's name.
        studies_dir: where the study lands, absolute.
        replay: a recorded surface to search instead, absolute; such a job leaves no study.
        folder: where it was submitted, absolute; its processes run there.
        python: the interpreter of whoever submitted it, which has what the workload imports.
        environment: variables its processes get besides the daemon's own few.
        sources: the workload's and the objective's own files, and the hash of each (with its sibling modules) then.
        priority: the highest goes first, and among equals the oldest.
        gpu: ``any``, a part of a card's name, or its UUID.
        not_before: UNIX seconds; it does not start before.
        window: minutes after midnight, local time, between which it may run; the end may lie before the beginning.
        max_s: it is ended after so many seconds of running in all.
        after: it waits until this job is done.
        on_reboot: what becomes of it when the machine has started anew while it ran.
        on_done: a command, or an ``http(s)://`` address that gets a POST, when it has ended.
        host_memory_bytes, cores: what its processes may use of the machine, together.
        keep_fresh: search again when the machine or the workload has changed since.
        refreshes: the slot of the profile that this search is a rematch of; its configuration is the baseline.
    """

    schema_version: int = SCHEMA_VERSION
    spec: StudySpec
    label: str
    studies_dir: str
    replay: str | None = None
    folder: str
    python: str
    environment: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    gpu: str = "any"
    not_before: float | None = None
    window: tuple[int, int] | None = None
    max_s: float | None = Field(default=None, gt=0)
    after: int | None = None
    on_reboot: Literal["resume", "pause"] = "resume"
    on_done: str | None = None
    host_memory_bytes: int | None = Field(default=None, gt=0)
    cores: int | None = Field(default=None, gt=0)
    keep_fresh: bool = False
    refreshes: str | None = None


class Child(Record):
    """A process, named so that no other is ever taken for it.

    Attributes:
        started: clock ticks from the machine's start to its own (``starttime`` of proc(5)).
    """

    pid: int
    started: int


class Queued(Record):
    """It waits for its turn.

    Attributes:
        why: it was set aside, if it ran before.
        boot_id: of the machine's start in which the daemon was told to stop while it ran.
    """

    state: Literal[JobState.QUEUED] = JobState.QUEUED
    why: str | None = None
    boot_id: str | None = None


class Paused(Record):
    """It waits until somebody lets it go on."""

    state: Literal[JobState.PAUSED] = JobState.PAUSED
    since: str
    why: str


class Done(Record):
    """Its search is finished.

    Attributes:
        found: what came of it, in a few words. slot: where its profile is kept (`autotune.profile.store`).
    """

    state: Literal[JobState.DONE] = JobState.DONE
    ended: str
    found: str | None = None
    slot: str | None = None


class Failed(Record):
    """It ended otherwise. `exit_code` is ``None`` where it never ran, or nothing was left to tell."""

    state: Literal[JobState.FAILED] = JobState.FAILED
    ended: str
    exit_code: int | None
    why: str


class Cancelled(Record):
    """Somebody did not want it any more."""

    state: Literal[JobState.CANCELLED] = JobState.CANCELLED
    ended: str


class Running(Record):
    """It has a device.

    Attributes:
        since: ISO 8601. device: ``cpu`` or a card's UUID.
        boot_id: of the machine's start in which it was claimed.
        mark: what all its processes carry in their environment; another one for each run.
        child: ``None`` from the claim until its process is there.
        then: what becomes of it when its processes have ended, if that was decided before they did. Written down before
            they are asked to end, so that a crash in between forgets nothing.
    """

    state: Literal[JobState.RUNNING] = JobState.RUNNING
    since: str
    device: str
    boot_id: str
    mark: str
    child: Child | None = None
    then: Annotated[Queued | Paused | Failed | Cancelled, Field(discriminator="state")] | None = None


Status = Annotated[Queued | Running | Paused | Done | Failed | Cancelled, Field(discriminator="state")]


class Job(Record):
    """A job as the queue keeps it.

    Attributes:
        submitted: ISO 8601, for people.
        runs: how many processes were started for it. spent_s: for how long they ran, together.
        faults: how many of these ended badly one after the other, for reasons that another time may not have.
        placed: the device it ran on first. It goes on there alone: another one would measure something else.
        notice: whether `JobRequest.on_done` has still to be told of its end.
    """

    schema_version: int = SCHEMA_VERSION
    id: int
    submitted: str
    request: JobRequest
    status: Status = Queued()
    runs: int = 0
    spent_s: float = 0.0
    faults: int = 0
    placed: str | None = None
    notice: Literal["none", "due", "sent", "failed"] = "none"

    @property
    def state(self) -> JobState:
        return self.status.state


class JobRow(Record):
    """A job in a list.

    Attributes:
        since: when it came into its state, where that is noted. ended: likewise.
        why: it is in this state, or what came of it.
    """

    id: int
    state: JobState
    study: str
    model: str
    priority: int
    submitted: str
    device: str | None = None
    since: str | None = None
    ended: str | None = None
    why: str | None = None


class End(Record):
    """How a job's process ended, as it says itself with its last breath.

    Attributes:
        mark: of the run, so that an earlier run's word is not taken for this one's.
        found: what came of the search, in a few words. slot: where its profile is kept.
    """

    schema_version: int = SCHEMA_VERSION
    mark: str
    exit_code: int
    found: str | None = None
    slot: str | None = None
    message: str | None = None
    advice: str | None = None
