"""Slurm: requests, commands, jobs."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.base.clock import timestamp
from autotune.base.errors import AutotuneError, MachineError, NoVerdictError, UnknownNameError, UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import STATE_DIR, DaemonFiles, StudyFiles
from autotune.base.parsing import duration_s, duration_text, size_bytes
from autotune.base.records import ENDED, SCHEMA_VERSION, Finding, JobRequest, JobRow, JobState, Outcome, Record
from autotune.cluster.slurm_commands import SlurmView, complaint, require_sbatch, sacct, scancel, squeue
from autotune.cluster.slurm_run import WARNING, StudyRun
from autotune.profile.in_force import Store, look_here
from autotune.search import SearchResult, load_outcome, new_study
from autotune.search.request import check_request
from autotune.space.formatting import standing_text
from autotune.study.loop import read_failure

# What a job requests from Slurm, and how that is passed to submitit.

#: Seconds before its time limit at which a job is warned. A launch ends within a second, a script within six.
WARNED_S = 90
#: Shortest time limit: a job with less could spend all of it on starting.
LEAST_S = 300
#: Time beyond its budget in which a search makes data, waits for a quiet device, and proves what it has found.
_BESIDE_S = 1800
_KEY = re.compile(r"[a-z][a-z0-9-]*")
#: Options of sbatch that determine how a job passes through the queue.
_OURS = frozenset(
    {"array", "error", "job-name", "no-requeue", "ntasks", "nodes", "open-mode", "output", "requeue", "signal", "wrap"}
)
#: Options that sbatch, submitit and `autotune submit` name alike, and whose values are passed on as they are.
_TEXTS = ("partition", "gres", "account", "qos")
#: Options of sbatch for which `autotune submit` has options of its own.
_NAMED = {"cpus-per-task": "--cpus", **{name: f"--{name}" for name in (*_TEXTS, "mem", "time")}}


@dataclass(frozen=True)
class Allocation:
    """What a job requests from Slurm. ``None`` leaves it to the cluster's defaults.

    Attributes:
        time_s: time limit of one run of the job; a search that needs longer continues in the next run.
        more: further options of sbatch, without dashes; ``True`` for an option without a value.
        environment: variables of the search, in addition to those that sbatch passes on.
    """

    partition: str | None = None
    gres: str | None = None
    time_s: float | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    account: str | None = None
    qos: str | None = None
    more: dict[str, str | bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def parameters(self, budget_s: float) -> dict[str, object]:
        """Return the parameters of submitit's executor, except the job's name."""
        options = {name: getattr(self, name) for name in _TEXTS} | {
            "cpus_per_task": self.cpus,
            "mem": None if self.memory_bytes is None else f"{math.ceil(self.memory_bytes / 2**20)}M",
        }
        return {
            **{name: value for name, value in options.items() if value is not None},
            "time": math.ceil(self._time_s(budget_s) / 60),
            "stderr_to_stdout": True,
            # srun kills its step as soon as it receives a signal, so a job that is requeued could not stop cleanly.
            "use_srun": False,
            "additional_parameters": {
                "requeue": True,
                "signal": f"B:{WARNING.name.removeprefix('SIG')}@{WARNED_S}",
                **self.more,
            },
        }

    def restarts(self, budget_s: float) -> int:
        """Return how often a job may run out of time. A search cannot use that many: each run has at least one minute
        to itself, and preempted runs do not count."""
        return math.ceil(2 * (budget_s + _BESIDE_S) / (self._time_s(budget_s) - WARNED_S)) + 1

    def _time_s(self, budget_s: float) -> float:
        return self.time_s or budget_s + _BESIDE_S


def allocation(typed: Mapping[str, Any], environment: Mapping[str, str]) -> Allocation:
    """Return the allocation that command-line options describe.

    Args:
        typed: values by option of `autotune submit`.

    Raises:
        UsageError: a value is invalid.
    """
    time, mem = typed["time"], typed["mem"]
    time_s = None if time is None else duration_s(time, "--time")
    if time_s is not None and time_s < LEAST_S:
        raise UsageError(
            f"--time {time} is too short for a job that is told {WARNED_S} s before it is over",
            advice=f"at least {duration_text(LEAST_S)}; a search that needs more goes on in the next run of its job.",
        )
    for name in _TEXTS:
        _check_value(f"--{name}", typed[name])
    return Allocation(
        **{name: typed[name] for name in _TEXTS},
        time_s=time_s,
        cpus=typed["cpus"],
        memory_bytes=None if mem is None else size_bytes(mem, "--mem"),
        more=_more(typed["sbatch"] or ()),
        environment=dict(environment),
    )


def _more(words: Iterable[str]) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not _KEY.fullmatch(key) or (equals and not value):
            raise UsageError(
                f"--sbatch takes KEY=VALUE, or KEY alone, not {word[:60]!r}",
                advice="write an option of sbatch without its dashes: --sbatch constraint=a100.",
            )
        if key in _OURS:
            raise UsageError(
                f"--sbatch {key} is set by autotune, so that the search can stop, go on and be found again"
            )
        if key in _NAMED:
            raise UsageError(f"--sbatch {key} has an option of its own", advice=f"write {_NAMED[key]}.")
        if key in options:
            raise UsageError(f"--sbatch gives {key} twice")
        if equals:
            _check_value(f"--sbatch {key}", value)
        options[key] = value if equals else True
    return options


def _check_value(flag: str, text: str | None) -> None:
    """Refuse a value that would not stay on its line in the batch script."""
    if text is not None and (not text or not text.isprintable() or text != text.strip()):
        raise UsageError(f"{flag} cannot be {text[:60]!r}")


# This user's searches in Slurm's queue: submitted by submitit, noted in the state folder, queried from Slurm.
#
# Without accounting, Slurm forgets a job some minutes after its end. So a note of each job is kept where the job was
# submitted, and the outcome of its search is read from its study.

#: Prefix of a Slurm job's number, which distinguishes it from the daemon's jobs, which are numbered separately.
PREFIX = "slurm:"


class SlurmRow(JobRow):
    """A Slurm job in a list. Its device is the node."""

    queue: Literal["slurm"] = "slurm"

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.id}"


class SlurmJob(Record):
    """A note of a job in Slurm's queue.

    Attributes:
        id: Slurm's number for it.
        study: absolute path of the study's folder.
        model: name of the workload.
        log: absolute path of what its processes write.
        submitted: ISO 8601, for display. ended: when its end was noticed here; it is not queried again after that.
        state: the last known one.
        node: where it runs or last ran. began: when its run began, in the controller's local time.
        why: why it is in its state, or the summary of its result.
        exit_code: of a failed search, if it has reported one.
    """

    schema_version: int = SCHEMA_VERSION
    id: int
    study: str
    model: str
    log: str
    submitted: str
    ended: str | None = None
    state: JobState = JobState.QUEUED
    node: str = ""
    began: str = ""
    why: str | None = None
    exit_code: int | None = None

    @property
    def name(self) -> str:
        """Its name in commands."""
        return self.row.name

    @property
    def row(self) -> SlurmRow:
        return SlurmRow(
            id=self.id,
            state=self.state,
            study=StudyFiles(Path(self.study)).name,
            model=self.model,
            priority=0,
            submitted=self.submitted,
            device=self.node or None,
            since=self.began if self.began and self.state is JobState.RUNNING else None,
            ended=self.ended,
            why=self.why,
        )


@dataclass(frozen=True)
class SlurmLook:
    """All jobs, oldest first, and sentences on what could not be read.

    Attributes:
        silent: why Slurm did not answer; states are then the last known ones.
    """

    jobs: tuple[SlurmJob, ...]
    troubles: tuple[str, ...] = ()
    silent: str | None = None


class SlurmQueue:
    """The jobs that were put into Slurm's queue with one state folder. No daemon is needed.

    Several processes may use it: Slurm is authoritative, and a note only repeats what Slurm has reported.
    """

    def __init__(self, files: DaemonFiles) -> None:
        self._files = files

    def submit(self, request: JobRequest, asked: Allocation) -> SlurmJob:
        """Create the study of a search, and put the search into Slurm's queue.

        Args:
            request: its search, name and folder of studies are used.

        Raises:
            UsageError: the study cannot be created, or Slurm refuses the job. No study is left then.
            MachineError: submitit or sbatch is missing, or Slurm does not answer.
        """
        require_sbatch()
        submitit = _submitit()
        files, spec = new_study(request.spec, check_request(request.spec), Path(request.studies_dir))
        run = StudyRun(str(files.folder), {STATE_DIR: str(self._files.state), **asked.environment})
        try:
            # submitit's folder contains the job's environment, and notes contain paths.
            for folder in (self._files.slurm, files.slurm):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            executor = submitit.SlurmExecutor(
                files.slurm,
                max_num_timeout=asked.restarts(spec.budget_s),
                # Slurm warns only the batch script's own process, so Python has to be that process.
                python=f"exec {shlex.quote(sys.executable)}",
            )
            executor.update_parameters(job_name=f"autotune-{files.name}", **asked.parameters(spec.budget_s))
            job = executor.submit(run)
        except BaseException as error:
            shutil.rmtree(files.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise MachineError(f"the job cannot be submitted: {error}") from error
            if isinstance(error, submitit.core.utils.FailedJobError | submitit.core.utils.FailedSubmissionError):
                raise complaint(str(error)) from error
            raise
        note = SlurmJob(
            id=int(job.job_id),
            study=str(files.folder),
            model=request.label,
            log=str(job.paths.stdout),
            submitted=timestamp(),
        )
        self._write(note)
        return note

    def is_empty(self) -> bool:
        """Return whether no job has ever been submitted."""
        return next(self._files.slurm.glob("*.json"), None) is None

    def look(self) -> SlurmLook:
        """Query Slurm once for all jobs that have not ended, note what it reports, and keep the profiles of those that
        have ended since."""
        notes, troubles = self._notes()
        unsettled = [note.id for note in notes if note.state not in ENDED or note.ended is None]
        if not unsettled:
            return SlurmLook(tuple(notes), tuple(troubles))
        try:
            views = squeue()
        except AutotuneError as error:
            return SlurmLook(tuple(notes), (*troubles, str(error)), silent=str(error))
        forgotten = [number for number in unsettled if number not in views]
        if forgotten:
            # Without accounting, only the study shows what became of the job.
            with contextlib.suppress(AutotuneError):
                views = {**sacct(forgotten), **views}
        jobs = [self._seen(note, views.get(note.id)) if note.id in unsettled else note for note in notes]
        return SlurmLook(tuple(jobs), tuple(troubles))

    def job(self, number: int) -> SlurmJob:
        """Return a job as Slurm sees it now.

        Raises:
            UnknownNameError: it was not submitted from here.
            MachineError: Slurm does not answer.
        """
        look = self.look()
        jobs = {job.id: job for job in look.jobs}
        if number not in jobs:
            raise UnknownNameError("job", f"{PREFIX}{number}", [job.name for job in look.jobs])
        job = jobs[number]
        if job.ended is None and look.silent is not None:
            raise MachineError(look.silent, advice=f"it was {job.state.value} when it was last seen.")
        return job

    def cancel(self, number: int) -> SlurmJob:
        """End a job for good, and return it; a running one ends within seconds.

        Raises:
            UsageError: it has ended, or Slurm refuses.
            MachineError: Slurm does not answer.
        """
        job = self.job(number)
        if job.state in ENDED:
            raise UsageError(f"job {job.name} is {job.state.value}")
        scancel(number)
        return self.job(number)

    def _notes(self) -> tuple[list[SlurmJob], list[str]]:
        notes, troubles = [], []
        for path in self._files.slurm.glob("*.json"):
            try:
                notes.append(SlurmJob.model_validate_json(path.read_text()))
            except (OSError, ValueError):
                troubles.append(f"{path}, the note of a job, cannot be read")
        return sorted(notes, key=lambda note: note.id), troubles

    def _seen(self, note: SlurmJob, seen: SlurmView | None) -> SlurmJob:
        """Return a job, updated by Slurm's view of it, or by its study if Slurm has forgotten it."""
        if seen is not None and seen.state not in ENDED:
            changes = {"state": seen.state, "node": seen.node, "began": seen.began, "why": seen.reason or None}
        else:
            changes = self._ended(note, seen)
        updated = note.model_copy(update=changes)
        if updated != note:
            self._write(updated)
        return updated

    def _ended(self, note: SlurmJob, seen: SlurmView | None) -> dict[str, Any]:
        files = StudyFiles(Path(note.study))
        outcome = None
        with contextlib.suppress(MachineError):
            outcome = load_outcome(files)
        end_fields = {"ended": timestamp(), "node": note.node if seen is None else seen.node}
        if outcome is not None:
            code = NoVerdictError.exit_code if outcome.found is Finding.OPEN else 0
            return {**end_fields, "state": JobState.DONE, "why": self._kept(files, outcome), "exit_code": code}
        if seen is not None and seen.state is JobState.DONE and files.folder.exists():
            # A shared file system may show the node's files some seconds later, so the job is queried again.
            return {"state": JobState.DONE, "why": f"its outcome is not to be seen in {files.folder} yet"}
        if seen is not None and seen.state is JobState.CANCELLED:
            return {**end_fields, "state": JobState.CANCELLED, "why": None}
        failure = read_failure(files)
        why = "Slurm has forgotten it" if seen is None else f"Slurm says {seen.word}"
        return {
            **end_fields,
            "state": JobState.FAILED,
            "why": f"{why}; its study is not finished" if failure is None else failure.message,
            "exit_code": None if failure is None else failure.exit_code,
        }

    def _kept(self, files: StudyFiles, outcome: Outcome) -> str:
        """Keep the profile of a finished search; return a summary of the result."""
        text = standing_text(outcome.best, outcome.baseline, outcome.evidence)
        try:
            profile = SearchResult(files, outcome).profile
            if profile is None:
                return f"no verdict: {outcome.because}"
            if profile.behind_store is None and outcome.evidence is None:
                # Unless the node has kept it there already. It was measured on another machine.
                Store(self._files.profiles).keep(profile, foreign_to=look_here())
        except AutotuneError as error:
            return f"{text}; its profile is not kept here: {error}"
        return text

    def _write(self, note: SlurmJob) -> None:
        write_atomic(self._files.slurm_job(note.id), note.model_dump_json(indent=1))


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise MachineError(
            "submitit is not installed, by which jobs are put into Slurm's queue",
            advice="pip install 'autotune[slurm]'.",
        ) from None
    return submitit
