"""Every path inside a study's folder and the daemon's. No other module joins file names."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import platformdirs

if TYPE_CHECKING:
    from sqlalchemy import URL

#: Environment variable for the daemon's state folder.
STATE_DIR = "AUTOTUNE_STATE_DIR"
#: Environment variable for the folder of the locks by which the daemons of a machine share its devices.
LOCK_DIR = "AUTOTUNE_LOCK_DIR"
#: Environment variable for the URL of a storage that several machines share, with its password. Kept from launches.
STORAGE_URL = "AUTOTUNE_STORAGE"
#: What the name of a launch begins with that finds the cache of its store empty.
COLD = "cold"
#: Where studies land, from the folder in which the search is started.
DEFAULT_STUDIES = Path("studies")


class _Below:
    """A file or folder by its name below one of its owner's folders."""

    def __init__(self, name: str, folder: str = "folder") -> None:
        self._name = name
        self._folder = folder

    def __get__(self, owner: object, kind: type | None = None) -> Path:
        folder: Path = getattr(owner, self._folder)
        return folder / self._name


@dataclass(frozen=True)
class LaunchFiles:
    """The files of one launch (one child process)."""

    folder: Path

    spec = _Below("spec.json")
    result = _Below("result.json")
    stdout = _Below("stdout.log")
    stderr = _Below("stderr.log")
    #: What the agent in a script has seen of its training; see `autotune_agent.watching`.
    trail = _Below("trail.jsonl")
    #: What the loaders of a training have delivered; see `autotune_agent.deliveries`.
    deliveries = _Below("deliveries.jsonl")
    #: The pipe that tells the agent what is to be in force; see `autotune_agent.turns`.
    commands = _Below("commands.pipe")
    #: The pipe on which a launch whose script is kept is told of the next one.
    further = _Below("further.pipe")
    #: The folder that a script is told to write to. Removed when the launch has ended.
    output = _Below("output")
    #: The folder in which a script is run, if not in the user's. Removed when the launch has ended.
    scratch = _Below("scratch")


@dataclass(frozen=True)
class StudyFiles:
    """The files of one study, ``<studies>/<name>/``."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    #: The search request, written once when the study is created.
    request = _Below("study.yaml")
    #: What submitit writes of the study's job in Slurm's queue: its script and its log. Absent if there is none.
    slurm = _Below("slurm")
    #: The job of the daemon for which the folder is kept. Absent once the study has a request.
    reservation = _Below("reserved.json")
    database = _Below("study.db")
    #: The machine and the space that the study is tied to, as in the database.
    conditions = _Below("conditions.json")

    @property
    def storage_url(self) -> str:
        """The URL under which Optuna opens the study."""
        # It substitutes whatever is in braces.
        return self.database_url.render_as_string().replace("{", "{{").replace("}", "}}")

    @property
    def database_url(self) -> URL:
        """The URL of the database. Its path may have characters that mean something else in a URL."""
        # Imported on demand: most commands open no study.
        from sqlalchemy import URL

        if "?" not in str(self.database):
            return URL.create("sqlite", database=str(self.database))
        # SQLAlchemy 2.0 has no other way to say it.
        return URL.create("sqlite", database=f"file:{quote(str(self.database))}", query={"uri": "true"})

    #: Seconds of the budget used so far; rewritten every few seconds.
    spent = _Below("spent.json")
    #: The finished search as data: what ``--json`` prints. Absent until the search is done.
    outcome = _Below("outcome.json")
    profile = _Below("profile.yaml")
    #: The baseline's profile, of a study that hands over none: what a candidate's is made from.
    usual = _Below("baseline.yaml")
    #: The HTML report of the outcome in the same folder.
    report = _Below("report.html")
    #: The error that ended the last run without an outcome, if one did.
    failure = _Below("failure.json")
    lock = _Below(".lock")
    #: Caches of the launches. Removed when the search is finished.
    caches = _Below("cache")
    compile_cache = _Below("inductor", "caches")
    trials = _Below("trials")
    #: Saved weights and batches that train checks start from. Removed when no check needs them any more.
    checks = _Below("checks")
    #: Launches that are not trials: probes, checks, verification.
    launches = _Below("launches")

    def trial(self, number: int) -> LaunchFiles:
        """The folder of trial ``number``."""
        return LaunchFiles(self.trials / f"{number:05d}")

    def launch(self, name: str) -> LaunchFiles:
        """The folder of a launch that is not a trial, by its name (``probe-0001``)."""
        return LaunchFiles(self.launches / name)


def workload_source(studies: Path, digest: str, stem: str) -> Path:
    """The file of a workload that was given as Python objects, under the hash of its content.

    No study's name begins with a dot.
    """
    return studies / ".workloads" / digest[:12] / f"{stem}.py"


@dataclass(frozen=True)
class JobFiles:
    """The files of one of the daemon's jobs."""

    folder: Path

    #: A copy of the job's row in the queue, from which it can be restored.
    job = _Below("job.json")
    #: How the job's process ended, as reported by itself.
    end = _Below("end.json")
    #: The search's events, one JSON object per line; each run starts a new file.
    events = _Below("events.jsonl")
    #: The result of a search on a recorded surface.
    replayed = _Below("replayed.json")
    #: The output of the job's processes.
    log = _Below("log.txt")


@dataclass(frozen=True)
class QueueFiles:
    """The files of the daemon's queue."""

    folder: Path

    database = _Below("queue.db")
    #: SQLite's journal of an open transaction.
    journal = _Below("queue.db-journal")
    database_in_making = _Below("queue.db.new")
    jobs = _Below("jobs")

    def job(self, number: int) -> JobFiles:
        """The folder of job ``number``."""
        return JobFiles(self.jobs / f"{number:06d}")


@dataclass(frozen=True)
class DaemonFiles:
    """The files of a daemon: persistent ones in ``state``, those lost on reboot in ``runtime``."""

    state: Path
    runtime: Path

    @property
    def queue(self) -> QueueFiles:
        return QueueFiles(self.state)

    #: Held by the daemon while it runs.
    lock = _Below("daemon.lock", "state")
    log = _Below("daemon.log", "state")
    #: The output of the web page's process, starting with its address.
    page_log = _Below("page.log", "state")
    profiles = _Below("profiles", "state")
    #: Notes of the jobs that were put into Slurm's queue, one file each; they need no daemon.
    slurm = _Below("slurm", "state")

    def slurm_job(self, number: int) -> Path:
        """The note of job ``number`` of Slurm's."""
        return self.slurm / f"{number}.json"

    #: The socket's path, for clients with another runtime folder (cron, su).
    address = _Below("daemon.address", "state")

    @property
    def socket(self) -> Path:
        """Named after the state folder, because a user's daemons share the runtime folder."""
        name = hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        return self.runtime / f"{name}.sock"

    @property
    def lasting_socket(self) -> Path:
        """The socket's path when the runtime folder has been removed."""
        return self.state / "run" / self.socket.name


def find_daemon(state: Path | None = None) -> DaemonFiles:
    """Return the paths of this user's daemon.

    Args:
        state: a folder for all files; ``None`` for the one named by `STATE_DIR` in the environment, or else the user's
            state folder and runtime folder.
    """
    if state is None and os.environ.get(STATE_DIR):
        state = Path(os.environ[STATE_DIR])
    if state is not None:
        folder = state.expanduser().absolute()
        return DaemonFiles(folder, folder / "run")
    folder = Path(platformdirs.user_state_dir("autotune"))
    # A shell without the variable (cron, su) must find the same daemon as one with it.
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}")
    return DaemonFiles(folder, runtime / "autotune" if os.access(runtime, os.W_OK) else folder / "run")


def lock_folder() -> Path:
    """Return the folder of the locks on devices, which must be the same for all daemons of a machine."""
    # Not the folder of TMPDIR, which every user may set differently.
    return Path(os.environ.get(LOCK_DIR) or "/tmp").absolute()
