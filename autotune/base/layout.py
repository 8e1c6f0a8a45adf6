"""Every path inside a study's folder and the daemon's. No other module joins file names."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

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


@dataclass(frozen=True)
class LaunchFiles:
    """The files of one launch (one child process)."""

    folder: Path

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def stdout(self) -> Path:
        return self.folder / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.folder / "stderr.log"

    @property
    def trail(self) -> Path:
        """What the agent in a script has seen of its training; see `autotune_agent.watching`."""
        return self.folder / "trail.jsonl"

    @property
    def deliveries(self) -> Path:
        """What the loaders of a training have delivered; see `autotune_agent.deliveries`."""
        return self.folder / "deliveries.jsonl"

    @property
    def commands(self) -> Path:
        """The pipe that tells the agent what is to be in force; see `autotune_agent.turns`."""
        return self.folder / "commands.pipe"

    @property
    def further(self) -> Path:
        """The pipe on which a launch whose script is kept is told of the next one."""
        return self.folder / "further.pipe"

    @property
    def output(self) -> Path:
        """The folder that a script is told to write to. Removed when the launch has ended."""
        return self.folder / "output"

    @property
    def scratch(self) -> Path:
        """The folder in which a script is run, if not in the user's. Removed when the launch has ended."""
        return self.folder / "scratch"


@dataclass(frozen=True)
class StudyFiles:
    """The files of one study, ``<studies>/<name>/``."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def request(self) -> Path:
        """The search request, written once when the study is created."""
        return self.folder / "study.yaml"

    @property
    def slurm(self) -> Path:
        """What submitit writes of the study's job in Slurm's queue: its script and its log. Absent if there is none."""
        return self.folder / "slurm"

    @property
    def reservation(self) -> Path:
        """The job of the daemon for which the folder is kept. Absent once the study has a request."""
        return self.folder / "reserved.json"

    @property
    def database(self) -> Path:
        return self.folder / "study.db"

    @property
    def conditions(self) -> Path:
        """The machine and the space that the study is tied to, as in the database."""
        return self.folder / "conditions.json"

    @property
    def storage_url(self) -> str:
        """The URL under which Optuna opens the study."""
        return f"sqlite:///{self.database}"

    @property
    def spent(self) -> Path:
        """Seconds of the budget used so far; rewritten every few seconds."""
        return self.folder / "spent.json"

    @property
    def outcome(self) -> Path:
        """The finished search as data: what ``--json`` prints. Absent until the search is done."""
        return self.folder / "outcome.json"

    @property
    def profile(self) -> Path:
        return self.folder / "profile.yaml"

    @property
    def usual(self) -> Path:
        """The baseline's profile, of a study that hands over none: what a candidate's is made from."""
        return self.folder / "baseline.yaml"

    @property
    def report(self) -> Path:
        """The HTML report of the outcome in the same folder."""
        return self.folder / "report.html"

    @property
    def failure(self) -> Path:
        """The error that ended the last run without an outcome, if one did."""
        return self.folder / "failure.json"

    @property
    def lock(self) -> Path:
        return self.folder / ".lock"

    @property
    def caches(self) -> Path:
        """Caches of the launches. Removed when the search is finished."""
        return self.folder / "cache"

    @property
    def compile_cache(self) -> Path:
        return self.caches / "inductor"

    @property
    def trials(self) -> Path:
        return self.folder / "trials"

    @property
    def checks(self) -> Path:
        """Saved weights and batches that train checks start from. Removed when no check needs them any more."""
        return self.folder / "checks"

    @property
    def launches(self) -> Path:
        """Launches that are not trials: probes, checks, verification."""
        return self.folder / "launches"

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

    @property
    def job(self) -> Path:
        """A copy of the job's row in the queue, from which it can be restored."""
        return self.folder / "job.json"

    @property
    def end(self) -> Path:
        """How the job's process ended, as reported by itself."""
        return self.folder / "end.json"

    @property
    def events(self) -> Path:
        """The search's events, one JSON object per line; each run starts a new file."""
        return self.folder / "events.jsonl"

    @property
    def replayed(self) -> Path:
        """The result of a search on a recorded surface."""
        return self.folder / "replayed.json"

    @property
    def log(self) -> Path:
        """The output of the job's processes."""
        return self.folder / "log.txt"


@dataclass(frozen=True)
class QueueFiles:
    """The files of the daemon's queue."""

    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "queue.db"

    @property
    def journal(self) -> Path:
        """SQLite's journal of an open transaction."""
        return self.folder / "queue.db-journal"

    @property
    def database_in_making(self) -> Path:
        return self.folder / "queue.db.new"

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

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

    @property
    def lock(self) -> Path:
        """Held by the daemon while it runs."""
        return self.state / "daemon.lock"

    @property
    def log(self) -> Path:
        return self.state / "daemon.log"

    @property
    def page_log(self) -> Path:
        """The output of the web page's process, starting with its address."""
        return self.state / "page.log"

    @property
    def profiles(self) -> Path:
        return self.state / "profiles"

    @property
    def slurm(self) -> Path:
        """Notes of the jobs that were put into Slurm's queue, one file each; they need no daemon."""
        return self.state / "slurm"

    def slurm_job(self, number: int) -> Path:
        """The note of job ``number`` of Slurm's."""
        return self.slurm / f"{number}.json"

    @property
    def socket(self) -> Path:
        """Named after the state folder, because a user's daemons share the runtime folder."""
        name = hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        return self.runtime / f"{name}.sock"

    @property
    def address(self) -> Path:
        """The socket's path, for clients with another runtime folder (cron, su)."""
        return self.state / "daemon.address"

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
