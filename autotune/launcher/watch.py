"""Watches a launch from outside: its beats, its log, its limits. What hangs or overruns is noticed here, and ended by
`autotune.launcher.fork_client`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from pydantic import ValidationError

from autotune.base.clock import Clock
from autotune.base.errors import MachineError
from autotune.base.files import FREE_SOME_SPACE, no_room, write_atomic
from autotune.base.layout import LaunchFiles
from autotune.base.records import Beat, Phase, TrialSpec, TrialStatus
from autotune.knobs.compile_mode import compiles, phase_clause

#: Format of a process's report of itself. Linux pids have at most seven digits.
_FORKED = re.compile(rb'\{"forked": (\d{1,7})\}')
#: How the leader of several ranks reports those that the others wait for.
_LATE = re.compile(rb'\{"late": "([^"]{1,1000})"\}')
#: The line of a launch that is over, and whose script goes on for others.
KEPT = b'{"kept": true}'
#: The line of a spawned process whose imports are done.
_IMPORTED = b'{"imported": true}'
_STEPPING = (Phase.WARMUP, Phase.MEASURE)
#: What a script failed to do within the limit of a phase; see `ScriptProcess`.
_NOT_YET = {
    Phase.LOAD: "the script did not import torch within {}",
    Phase.BUILD: "the script imported torch, and called no model to train it within {}",
    Phase.COMPILE: "the script called a model to train it, and no optimizer of PyTorch took a step within {}",
}
_PREPARE = "before it trains, a script may take two minutes, or a quarter of the --budget if that is more."
#: Time between a launch's report and its exit, for exit handlers. After that its processes are killed.
EXIT_S = 5.0
#: Time limit for these imports; the template has done the same ones shortly before.
IMPORT_S = 180.0
#: A difference between the child's clock and ours counts only above these seconds and this fraction.
DRIFT_S = 0.5
DRIFT_FRACTION = 0.1


class Watch:
    """Tracks a running launch and decides whether it must end."""

    def __init__(
        self, spec: TrialSpec, clock: Clock, on_beat: Callable[[Beat], None], stop: Callable[[], bool]
    ) -> None:
        self.spec = spec
        self.clock = clock
        self.phase: Phase | None = None
        self.phase_s: dict[str, float] = {}
        self.peak_bytes: int | None = None
        #: Pids of all processes the launch has reported, running or not.
        self.pids: set[int] = set()
        #: The status with which the launcher ended it, if it did.
        self.ended: TrialStatus | None = None
        self.cause = ""
        #: Which ranks the others were waiting for when it was ended, as a clause.
        self.late: str | None = None
        #: What to do about it, if known here.
        self.advice: str | None = None
        #: What disturbed its last window, as a clause.
        self.disturbed: str | None = None
        #: In a heat, the turn at the last beat.
        self.turn: int | None = None
        #: It has reported, and waits for another launch.
        self.kept = False
        #: This process was stopped while the launch ran, and the clock does not count that time.
        self.was_stopped = False
        self._imports = self._imported = False
        self._reported_at: float | None = None
        #: For each beat in the measure phase: the child's clock, and how late it arrived by ours.
        self._stamps: list[tuple[float, float]] = []
        self._on_beat = on_beat
        self._stop = stop
        self._began = self._phase_began = self._last_beat = clock.now()
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        """Process beats and the pids of new processes, as they arrive through the pipe."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            forked = _FORKED.fullmatch(line)
            if forked:
                self.pids.add(int(forked[1]))
                continue
            late = _LATE.fullmatch(line)
            if late:
                self.late = late[1].decode(errors="replace")
                continue
            if line == KEPT:
                self.kept = True
                continue
            if line == _IMPORTED and self.phase is None:
                self._imported, self._imports = True, False
                self.begin()
                continue
            with contextlib.suppress(ValidationError):
                self.beat(Beat.model_validate_json(line))
        # An overlong line without an end is not ours: user code can write to the pipe too.
        self._buffer = self._buffer[-4096:]

    def beat(self, beat: Beat) -> None:
        """Process one beat."""
        now = self.clock.now()
        if beat.phase is not self.phase:
            self._book(now)
            self.phase, self._phase_began = beat.phase, now
        if beat.turn is not None and beat.turn != self.turn:
            # Each entrant gets the whole limit of a phase.
            self._book(now)
            self.turn, self._phase_began = beat.turn, now
        self._last_beat = now
        self.disturbed = beat.disturbed
        if beat.at_s is not None and beat.phase is Phase.MEASURE:
            self._stamps.append((beat.at_s, now - beat.at_s))
        if beat.memory_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, beat.memory_bytes)
        self._on_beat(beat)

    def _book(self, now: float) -> None:
        if self.phase is not None:
            self.phase_s[self.phase] = self.phase_s.get(self.phase, 0.0) + now - self._phase_began

    def begin(self) -> None:
        """Start counting the launch's time now: its process is about to be forked, or has done its imports."""
        self._began = self._phase_began = self._last_beat = self.clock.now()

    def spawned(self) -> None:
        """Note that the launch is a fresh process: its imports do not count as part of it, and have their own limit."""
        self._imports = not self._imported

    def reported(self) -> None:
        """Note that the launch has written its result."""
        self._reported_at = self.clock.now() if self._reported_at is None else self._reported_at

    @property
    def seconds(self) -> float:
        """Seconds since the launch began, or between its beginning and its report if it has reported."""
        return (self.clock.now() if self._reported_at is None else self._reported_at) - self._began

    @property
    def clock_speed(self) -> float:
        """Speed of the child's clock in the measure phase relative to this process's; 1 if they agree.

        A beat may be read late but not early, so the least delayed beat of each half shows how far the clocks have
        diverged.
        """
        count = len(self._stamps)
        if count < 4:
            return 1.0
        first = min(self._stamps[: count // 2], key=lambda stamp: stamp[1])
        last = min(self._stamps[count // 2 :], key=lambda stamp: stamp[1])
        child_s = last[0] - first[0]
        own_s = child_s + last[1] - first[1]
        differ = abs(own_s - child_s) > max(DRIFT_S, DRIFT_FRACTION * max(own_s, child_s))
        return child_s / own_s if differ and own_s > 0 else 1.0

    def finish(self) -> None:
        """Add the duration of the last phase to `phase_s`, and note whether the search was asked to end meanwhile.

        Whatever ends a whole job, such as Slurm, signals the launch and its search at once, and the launch may die
        first.
        """
        self._book(self.clock.now())
        if self.ended is None and self._stop():
            self._interrupted()

    def overdue(self) -> bool:
        """Return whether the launch must end now: because it has not exited after its report, or else with `ended` and
        `cause` set."""
        now = self.clock.now()
        limits, phase = self.spec.limits, self.phase or Phase.LOAD
        phase_name = phase_clause(phase, self.spec.config)
        if self._stop():
            self._interrupted()
        elif self._imports:
            if now - self._began > IMPORT_S:
                self.ended = TrialStatus.TIMEOUT
                self.cause = f"the import of torch took longer than {IMPORT_S:.4g} s"
        elif self._reported_at is not None:
            return now - self._reported_at > EXIT_S
        elif phase in _STEPPING and now - self._last_beat > limits.silence_s:
            self.ended = TrialStatus.HANG
            self.cause = f"no step was finished for {limits.silence_s:.4g} s in {phase_name}"
        elif limits.total_s is not None and now - self._began > limits.total_s:
            self.ended = TrialStatus.TIMEOUT
            self.cause = f"it was not measured within the {limits.total_s:.4g} s it was given"
        elif now - self._phase_began > limits.of(phase):
            self.ended = TrialStatus.TIMEOUT
            self.cause, self.advice = self._late(phase)
        return self.ended is not None

    def _interrupted(self) -> None:
        meanwhile = "" if self.disturbed is None else f", and {self.disturbed}"
        self.ended, self.cause = TrialStatus.INTERRUPTED, f"the search was ended while it ran{meanwhile}"

    def _late(self, phase: Phase) -> tuple[str, str | None]:
        """Return a sentence that the limit of a phase has passed, and what to do about it."""
        limit = f"{self.spec.limits.of(phase):.4g} s"
        if self.spec.command is not None and self.spec.command.rate is not None and phase is Phase.COMPILE:
            return f"the program told no rate within {limit} that --rate matches", _PREPARE
        # In the turns of a heat, a phase has another meaning.
        is_observed = self.spec.command is not None and self.turn is None
        if is_observed and phase in _NOT_YET and not (phase is Phase.COMPILE and compiles(self.spec.config)):
            return _NOT_YET[phase].format(limit), _PREPARE
        return f"{phase_clause(phase, self.spec.config)} took longer than its limit of {limit}", None


def make_way(path: Path) -> None:
    """Remove a folder that user code has put where one of our files belongs. All else can be replaced or unlinked."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def open_folder(spec: TrialSpec) -> LaunchFiles:
    """Create the launch's folder and write ``spec.json`` into it.

    The result of an earlier launch with the same name is removed.

    Raises:
        MachineError: the folder cannot be created or written.
    """
    files = LaunchFiles(Path(spec.folder))
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        make_way(files.result)
        files.result.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot use the folder {files.folder}: {error.strerror}", advice="--studies-dir names another place."
        ) from error
    write_atomic(files.spec, spec.model_dump_json(indent=1))
    return files


# The logs of a launch: what it writes to stdout and stderr, up to a limit.

#: A log that grows beyond the first size is cut to its beginning and its end, each of the second size.
LIMIT_BYTES = 16 * 2**20
KEPT_BYTES = 2**20


class Logs:
    """Both logs of one launch, open from before it is forked until it has ended.

    The launch writes to the files directly, without us in between, and always at their ends: it may go on while they
    are cut here.

    Raises:
        MachineError: the files cannot be created.
    """

    def __init__(self, files: LaunchFiles) -> None:
        #: The descriptors of stdout and stderr that the launch gets.
        self.descriptors: list[int] = []
        #: Our own ones, which write anywhere.
        self._own: list[int] = []
        #: Bytes cut out of each log.
        self._lost = [0, 0]
        try:
            for path in (files.stdout, files.stderr):
                # An earlier launch may have left anything under this name.
                make_way(path)
                path.unlink(missing_ok=True)
                create = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._own.append(os.open(path, create, 0o666))
                self.descriptors.append(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            advice = FREE_SOME_SPACE if no_room(error) else "--studies-dir names another place."
            raise MachineError(f"cannot write into {files.folder}: {error.strerror}", advice=advice) from error

    def cut(self) -> None:
        """Cut logs that are too long. To be called several times a second; logs may exceed the limit by what is written
        between two calls."""
        for number, descriptor in enumerate(self._own):
            size = os.fstat(descriptor).st_size
            if size <= LIMIT_BYTES:
                continue
            self._lost[number] += size - 2 * KEPT_BYTES
            tail = os.pread(descriptor, KEPT_BYTES, size - KEPT_BYTES)
            note = f"\n[autotune: {self._lost[number] >> 20} MiB of this log were cut out here]\n".encode()
            # Over what is to go, so that a full disk has room and whatever is written later comes later. Only output
            # of this very moment is lost.
            with contextlib.suppress(OSError):  # the disk is full, and writes nothing in its place
                os.pwrite(descriptor, note + tail, KEPT_BYTES)
            os.ftruncate(descriptor, KEPT_BYTES + len(note) + len(tail))

    def close(self) -> None:
        """Cut the logs for the last time, and close them."""
        self.cut()
        for descriptor in (*self._own, *self.descriptors):
            os.close(descriptor)
        self._own, self.descriptors = [], []


SHM = Path("/dev/shm")
#: File names that contain their creator's pid: PyTorch's tensors, multiprocessing's heaps, CUDA's shared memory (with
#: the pid in hexadecimal).
_NAMES = (re.compile(r"torch_(\d+)_.*"), re.compile(r"pym-(\d+)-.*"))
_CUDA = re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\..*")


def remove_leftovers(pids: Iterable[int], *, folder: Path = SHM) -> list[str]:
    """Remove files that dead processes left in shared memory; return their names.

    Only files that have one of ``pids`` in their name and belong to this user are removed, and only if no process has
    that pid now: it may have been reused.

    Args:
        pids: pids of processes that belonged to this study.
    """
    study_pids = set(pids)
    removed: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            maker = _maker(entry.name)
            if maker not in study_pids or is_alive(maker):
                continue
            # Another cleanup may have removed it already.
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    os.unlink(entry.path)
                    removed.append(entry.name)
    return sorted(removed)


def _maker(name: str) -> int | None:
    for pattern in _NAMES:
        if match := pattern.fullmatch(name):
            return int(match[1])
    match = _CUDA.fullmatch(name)
    return int(match[1], 16) if match else None


def is_alive(pid: int) -> bool:
    """Return whether a process is running. A zombie is not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, OSError):
        return False


# Processes that an earlier run left behind, found by a mark in their environment.

#: Set in the environment of every process of a study.
STUDY_MARK = "AUTOTUNE_STUDY"
#: The same for one launcher, of which a study may have several.
LAUNCHER_MARK = "AUTOTUNE_LAUNCHER"
#: Set in the environment of every process of a daemon job's run.
JOB_MARK = "AUTOTUNE_JOB"
#: A killed process exits within milliseconds unless it is stuck in the kernel.
END_S = 30.0


def end_survivors(mark: str, clock: Clock, variable: str = STUDY_MARK) -> int:
    """Kill processes left by an earlier run of a study and remove their shared memory; return how many there were.

    Only processes with the mark in their environment are killed. The caller must hold the study's lock, so that no live
    search owns them.

    Raises:
        MachineError: a process could not be killed (stuck in the kernel).
    """
    ended: set[int] = set()
    deadline = clock.now() + END_S
    while True:
        alive = kill_marked(variable, mark)
        if not alive:
            remove_leftovers(ended)
            return len(ended)
        ended |= alive
        if clock.now() > deadline:
            raise MachineError(
                f"processes of an earlier run cannot be ended: {', '.join(map(str, sorted(alive)))}",
                advice="a driver or a network file system that does not answer keeps them; a reboot ends them.",
            )
        clock.sleep(0.05)


def kill_marked(variable: str, mark: str) -> set[int]:
    """Kill every process but this one whose environment holds ``variable=mark``; return the pids that were running.

    Raises:
        MachineError: the processes cannot be listed, because descriptors or memory have run out.
    """
    marked, wanted = set[int](), f"{variable}={mark}".encode()
    try:
        for pid in psutil.pids():
            # Other users' processes cannot be ours, and zombies have no environment.
            with contextlib.suppress(psutil.Error, PermissionError, FileNotFoundError, ProcessLookupError):
                # Found anew at each call: psutil keeps those of an earlier iteration, and would not kill another one
                # that has the pid now. Its `environ` ends where a program has overwritten the beginning.
                process = psutil.Process(pid)
                if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    marked.add(pid)
                    # Not if another process has this pid by now.
                    process.kill()
    except OSError as error:
        # If the processes cannot be read, do not report that there are none.
        raise MachineError(f"cannot look for processes of an earlier run: {error.strerror}") from error
    return marked
