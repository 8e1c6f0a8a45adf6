"""Every path inside a study's folder and the daemon's. Nobody else joins file names."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

#: A variable that names the daemon's state folder.
STATE_DIR = "AUTOTUNE_STATE_DIR"
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


@dataclass(frozen=True)
class StudyFiles:
    """The files of one study, ``<studies>/<name>/``."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def request(self) -> Path:
        """What was asked, written once when the study is made."""
        return self.folder / "study.yaml"

    @property
    def database(self) -> Path:
        return self.folder / "study.db"

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
    def report(self) -> Path:
        """The report as an HTML page, of the outcome that lies beside it."""
        return self.folder / "report.html"

    @property
    def failure(self) -> Path:
        """Why the last run ended without an outcome, if an error ended it."""
        return self.folder / "failure.json"

    @property
    def lock(self) -> Path:
        return self.folder / ".lock"

    @property
    def compile_cache(self) -> Path:
        return self.folder / "cache" / "inductor"

    @property
    def trials(self) -> Path:
        return self.folder / "trials"

    @property
    def checks(self) -> Path:
        """Saved weights and batches that every train_check of the study starts from."""
        return self.folder / "checks"

    @property
    def launches(self) -> Path:
        """Launches that are no trials: probes, checks, verification."""
        return self.folder / "launches"

    def trial(self, number: int) -> LaunchFiles:
        """The folder of trial ``number``."""
        return LaunchFiles(self.trials / f"{number:05d}")

    def launch(self, name: str) -> LaunchFiles:
        """The folder of a launch that is no trial, by its name (``probe-0001``)."""
        return LaunchFiles(self.launches / name)


@dataclass(frozen=True)
class JobFiles:
    """The files of one of the daemon's jobs."""

    folder: Path

    @property
    def job(self) -> Path:
        """What its row in the queue can be made from again."""
        return self.folder / "job.json"

    @property
    def end(self) -> Path:
        """How its process ended, in its own words."""
        return self.folder / "end.json"

    @property
    def events(self) -> Path:
        """What the search tells while it runs, one JSON object a line; each run starts it anew."""
        return self.folder / "events.jsonl"

    @property
    def replayed(self) -> Path:
        """What came of a search on a recorded surface."""
        return self.folder / "replayed.json"

    @property
    def log(self) -> Path:
        """What its processes wrote."""
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
        """Of SQLite, while a transaction is under way."""
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
    """The files of a daemon: what lasts in ``state``, what a reboot takes in ``runtime``."""

    state: Path
    runtime: Path

    @property
    def queue(self) -> QueueFiles:
        return QueueFiles(self.state)

    @property
    def lock(self) -> Path:
        """Held by the daemon as long as it lives."""
        return self.state / "daemon.lock"

    @property
    def log(self) -> Path:
        return self.state / "daemon.log"

    @property
    def page_log(self) -> Path:
        """What the page's process said: its address first."""
        return self.state / "page.log"

    @property
    def profiles(self) -> Path:
        return self.state / "profiles"

    @property
    def socket(self) -> Path:
        """Named after the state folder: two daemons of a user share the runtime folder."""
        name = hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        return self.runtime / f"{name}.sock"

    @property
    def address(self) -> Path:
        """Where the socket is, for whoever has another runtime folder (cron, su)."""
        return self.state / "daemon.address"

    @property
    def lasting_socket(self) -> Path:
        """Where it is when the runtime folder has been taken away."""
        return self.state / "run" / self.socket.name


def find_daemon(state: Path | None = None) -> DaemonFiles:
    """Where this user's daemon keeps its files.

    Args:
        state: a folder that holds all of them; ``None``: what `STATE_DIR` in the environment names, or else the user's
            own for state, and the one that a reboot empties.
    """
    if state is None and os.environ.get(STATE_DIR):
        state = Path(os.environ[STATE_DIR])
    if state is not None:
        folder = state.expanduser().absolute()
        return DaemonFiles(folder, folder / "run")
    folder = Path(platformdirs.user_state_dir("autotune"))
    # A shell without it (cron, su) finds the same daemon as one with it.
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}")
    return DaemonFiles(folder, runtime / "autotune" if os.access(runtime, os.W_OK) else folder / "run")
