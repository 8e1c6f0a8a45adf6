"""A job of the daemon: its request and its state."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from autotune.base.records.base import SCHEMA_VERSION, Record
from autotune.base.records.study import StudySpec


class JobState(StrEnum):
    """The state of a job. A job is in exactly one."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


#: States that a job leaves only by ``autotune jobs retry``.
ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


class JobRequest(Record):
    """A submitted job.

    Attributes:
        spec: the search. Its ``name`` is the study's name, and empty until the daemon has chosen one.
        label: name of the workload, for tables and as the stem of the study's name.
        studies_dir: absolute path of the folder for the study.
        replay: absolute path of a recorded surface to search instead; such a job leaves no study.
        folder: absolute path of the working directory of the job's processes, where it was submitted.
        python: the submitter's interpreter, which can import what the workload needs.
        environment: environment variables of the job's processes, besides the few inherited from the daemon.
        sources: the workload's and the objective's files, each with its hash (including sibling modules) when
            submitted.
        priority: the job with the highest priority starts first, and among equals the oldest.
        gpu: ``any``, part of a GPU's name, or its UUID.
        not_before: earliest start, in UNIX seconds.
        window: start and end of the time of day in which the job may run, in minutes after midnight, local time. The
            end may be before the start.
        max_s: maximum running time in seconds, over all runs.
        after: id of the job that must be done before this one starts.
        on_reboot: whether to resume or pause the job if the machine reboots while it runs.
        on_done: a command to run, or an ``http(s)://`` address to POST to, when the job ends.
        host_memory_bytes, cores: limits for the job's processes together.
        keep_fresh: search again when the machine or the workload has changed.
        refreshes: slot of the stale profile that this search may replace. Its configuration is the baseline.
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
    """A process, identified uniquely even if its pid is reused.

    Attributes:
        started: start time in clock ticks since boot (``starttime`` in proc(5)).
    """

    pid: int
    started: int


class Queued(Record):
    """The job waits to be started.

    Attributes:
        why: why it is queued again, if it has run or was tried before.
        boot_id: boot of the machine in which the daemon was stopped while the job ran; else ``None``.
    """

    state: Literal[JobState.QUEUED] = JobState.QUEUED
    why: str | None = None
    boot_id: str | None = None


class Paused(Record):
    """The job waits until the user resumes it."""

    state: Literal[JobState.PAUSED] = JobState.PAUSED
    since: str
    why: str


class Done(Record):
    """The job's search is finished.

    Attributes:
        found: short summary of the result. open: there is no verdict.
        slot: slot of its profile in the store (`autotune.profile.in_force`).
    """

    state: Literal[JobState.DONE] = JobState.DONE
    ended: str
    found: str | None = None
    open: bool = False
    slot: str | None = None


class Failed(Record):
    """The job failed. ``exit_code`` is ``None`` if it never ran, or if its exit code is unknown."""

    state: Literal[JobState.FAILED] = JobState.FAILED
    ended: str
    exit_code: int | None
    why: str


class Cancelled(Record):
    """The user cancelled the job."""

    state: Literal[JobState.CANCELLED] = JobState.CANCELLED
    ended: str


class Running(Record):
    """The job has claimed a device.

    Attributes:
        since: ISO 8601.
        device: ``cpu`` or a GPU's UUID.
        boot_id: boot of the machine in which the device was claimed.
        mark: unique id of the run, in the environment of all its processes.
        child: the run's process; ``None`` until it is started.
        then: the job's next state, if the run is being stopped. It is recorded before the processes are terminated, so
            that it survives a crash of the daemon.
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
    """A job in the queue.

    Attributes:
        submitted: ISO 8601, for display.
        runs: number of runs started.
        spent_s: total running time in seconds.
        faults: number of consecutive runs that failed for a reason that a retry may not meet again.
        placed: the device of the first run. Later runs use the same one, because measurements on another device are
            not comparable.
        notice: status of the `JobRequest.on_done` notice.
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
        since: when the job entered its state, if the state records it.
        ended: when the job ended, if it has.
        why: why the job is in its state, or the summary of its result.
        waits: why a queued job does not run, if it is among the first ones.
        refreshes: slot of the stale profile that its search may replace.
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
    waits: str | None = None
    refreshes: str | None = None

    @property
    def name(self) -> str:
        """How commands call the job."""
        return str(self.id)

    @property
    def reason(self) -> str:
        """Both reasons in one text; empty if there is none."""
        return "; ".join(reason for reason in (self.why, self.waits) if reason)


class End(Record):
    """The end record of a run, which its process writes just before it exits.

    Attributes:
        mark: mark of the run, so that the record of an earlier run is not mistaken for this one's.
        found: short summary of the result. open: there is no verdict.
        slot: slot of its profile in the store.
    """

    schema_version: int = SCHEMA_VERSION
    mark: str
    exit_code: int
    found: str | None = None
    open: bool = False
    slot: str | None = None
    message: str | None = None
    advice: str | None = None
