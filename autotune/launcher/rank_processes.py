"""Starts a process for each rank of a training on this machine, and ends all of them when the first one fails.

The leader does not train. It forks the ranks, waits for them, and names the one at fault: the others only lose their
connection to it, or wait for it forever. `RankProcesses` is what a launch of several ranks and a training with a
profile have in common; `in_each_rank` is all that the latter needs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from autotune.base.errors import (
    MORE_PROCESSES,
    AutotuneError,
    InterruptedSearch,
    MachineError,
    WorkloadError,
    by_exit_code,
)
from autotune.base.files import CANNOT_WRITE, no_room
from autotune.base.layout import LaunchFiles
from autotune.base.ranks import RENDEZVOUS
from autotune.base.records import TrialStatus
from autotune.launcher.fork_client import IMPORT_ENV
from autotune.launcher.result import tail, unreported
from autotune.launcher.watch import Logs
from autotune.machine import system
from autotune.machine.host import oom_kill_count, shared_memory

_T = TypeVar("_T")

#: A rank that has lost its connection to another one may end before the other does.
GRACE_S = 1.0
#: The same, where the end of a rank matters more: by then, trackers have been told and checkpoints are complete.
TRAINING_GRACE_S = 3.0
#: How often the leader attends to anything other than the ends of ranks.
LOOK_S = 0.5
#: How long a killed process may take to end. Only one that is stuck in the kernel takes longer.
_GONE_S = 5.0
#: Errors from gloo and NCCL in a rank whose peer has gone.
_LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe"),
    *("NCCL error", "NCCL communicator was aborted", "remote process exited"),
)


class RankProcesses:
    """The processes of all ranks of a training, forked from this one, which must have no other threads.

    Each has the environment that ``torchrun`` sets, and dies with this process. Leaving the ``with`` statement kills
    those that remain.

    Args:
        launch: its folder holds one for each rank (see `files_of`), with its logs, and, meanwhile, the file through
            which they find each other.
        count: number of ranks.
        run: called in each process with the rank's number; returns its exit code.
        first_speaks: the first rank has this process's streams, and writes no logs.

    Raises:
        MachineError: a process cannot be started.
    """

    def __init__(
        self, launch: LaunchFiles, count: int, run: Callable[[int], int], *, first_speaks: bool = False
    ) -> None:
        self._count = count
        self._meeting = launch.folder / "rendezvous"
        self._meeting.unlink(missing_ok=True)
        self._oom_kills = oom_kill_count()
        self._logs: list[Logs] = []
        #: Rank and pid by descriptor, of the ranks not known to have ended.
        self._left: dict[int, tuple[int, int]] = {}
        try:
            for rank in range(count):
                files = files_of(launch, rank)
                files.folder.mkdir(exist_ok=True)
                files.result.unlink(missing_ok=True)
                self._logs.append(Logs(files))
        except BaseException:
            self.end()
            raise
        try:
            for rank in range(count):
                streams = [] if first_speaks and not rank else self._logs[rank].descriptors
                pid = os.fork() or _be(rank, count, self._meeting, streams, run)
                self._left[os.pidfd_open(pid)] = rank, pid
        except OSError as error:
            self.end()
            raise MachineError(
                f"no process can be started for rank {rank}: {error.strerror}", advice=MORE_PROCESSES
            ) from error

    @property
    def pids(self) -> dict[int, int]:
        """The pids of the ranks that have not ended, by rank."""
        return dict(self._left.values())

    def ends(
        self,
        reported: Callable[[int], _T | None],
        otherwise: Callable[[int, int, bool], _T],
        *,
        each_ends: bool,
        grace_s: float = GRACE_S,
    ) -> dict[int, _T]:
        """Wait until the training is over, and kill the ranks that remain; return how ranks have ended, in the order in
        which they did.

        It is over when the first rank ends, or when any rank fails.

        Args:
            reported: returns what a rank reports as its end; ``None`` if it does not.
            otherwise: returns the end of a rank that reports none, from its number and its exit code (as in
                `os.waitstatus_to_exitcode`), and whether the kernel has killed a process for its memory.
            each_ends: each rank ends by itself. Otherwise only the first rank does.
            grace_s: seconds that the others then get to end by themselves, or to fail. If only the first rank ends by
                itself, and ends well, they get none.
        """
        statuses = self._first_ends(each_ends=each_ends, grace_s=grace_s)
        self.end()
        killed = self._oom_kills is not None and (oom_kill_count() or 0) > self._oom_kills
        ends = {
            rank: reported(rank) or otherwise(rank, os.waitstatus_to_exitcode(status), killed)
            for rank, status in statuses.items()
        }
        # A rank that has reported its end may have been killed while it ended its loader workers.
        late = {rank: reported(rank) for rank in range(self._count) if each_ends and rank not in ends}
        return ends | {rank: end for rank, end in late.items() if end is not None}

    def _first_ends(self, *, each_ends: bool, grace_s: float) -> dict[int, int]:
        """Wait until the training is over; return the wait status of each ended rank."""
        poller = select.poll()
        for descriptor in self._left:
            poller.register(descriptor, select.POLLIN)
        statuses: dict[int, int] = {}
        deadline: float | None = None
        while True:
            left_s = LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))
            for descriptor, _ in poller.poll(1000 * left_s):
                rank, pid = self._left.pop(descriptor)
                poller.unregister(descriptor)
                os.close(descriptor)
                statuses[rank] = os.waitpid(pid, 0)[1]
                if rank == 0 and statuses[rank] == 0 and not each_ends:
                    return statuses
                if deadline is None and (rank == 0 or statuses[rank] or not each_ends):
                    deadline = time.monotonic() + grace_s
            for log in self._logs:
                log.cut()
            if not self._left or (deadline is not None and time.monotonic() >= deadline):
                return statuses

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill the remaining ranks. Those that ended by themselves are known; the rest have nothing more to report."""
        for _, pid in self._left.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for descriptor, (_, pid) in self._left.items():
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if poller.poll(1000 * _GONE_S):
                os.waitpid(pid, 0)
            os.close(descriptor)
        self._left.clear()
        self._meeting.unlink(missing_ok=True)
        while self._logs:
            self._logs.pop().close()


def files_of(launch: LaunchFiles, rank: int) -> LaunchFiles:
    """Return the files of one rank of a launch."""
    return LaunchFiles(launch.folder / f"rank-{rank}")


def _be(rank: int, count: int, meeting: Path, streams: Sequence[int], run: Callable[[int], int]) -> int:
    """Run a rank in the process forked for it. Does not return.

    Args:
        streams: descriptors for its stdout and stderr, if it has its own.
    """
    code = 1
    try:
        system.die_with_parent()
        for number, opened in enumerate(streams, 1):
            os.dup2(opened, number)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            RENDEZVOUS: str(meeting),
        }
        # All ranks are on this machine, whose name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        code = run(rank)
    except Exception as error:
        # Every failure is printed, unless it cannot be written.
        code = CANNOT_WRITE if no_room(error) else 1
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        system.leave(code)


def at_fault(causes: Mapping[int, str | None], *, is_first_well: bool) -> int | None:
    """Return the rank whose failure decides the training's end: the first one that did not fail because another one was
    gone, or else the first.

    Args:
        causes: the causes of the ranks that have failed, in order.
        is_first_well: the first rank has ended well. That it was gone then is no failure of the others.

    Returns:
        The rank; ``None`` if no failure counts.
    """
    of_its_own = (rank for rank, cause in causes.items() if not any(text in (cause or "") for text in _LOST))
    return next(of_its_own, None if is_first_well else next(iter(causes), None))


@dataclass(frozen=True)
class _End:
    """What a rank of a training reports at its end: its result, or its error and where that was raised."""

    value: Any = None
    cause: str | None = None
    exit_code: int = 0
    advice: str | None = None
    detail: str | None = None
    trace: str = ""


class _TraceOfRank(Exception):
    """Shows where the error of a rank was raised, as the cause of the leader's error."""


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Keep libraries imported in this block from starting threads, because this process will be forked."""
    before = {name: os.environ.get(name) for name in IMPORT_ENV}
    os.environ |= IMPORT_ENV
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_each_rank(count: int, train: Callable[[], _T], *, each_ends: bool, advice: str | None = None) -> _T:
    """Train in a process for each rank of this machine, and return the first rank's result.

    Only the first rank has this process's streams. Each is in a session of its own, so that Ctrl-C reaches only this
    process; they inherit its signal handlers, and share the memory that is already shared.

    Args:
        train: called in each process, whose environment makes it one of several ranks. Its result in the first rank is
            pickled.
        each_ends: each rank ends by itself. Otherwise the others end with the first one.
        advice: what to do if a rank was killed.

    Raises:
        InterruptedSearch: a rank has raised it.
        AutotuneError: a rank has failed. The message names the rank.
    """
    if count == 1:
        return train()
    # Not a `TemporaryDirectory`, which the first rank to end would remove.
    launch = LaunchFiles(Path(tempfile.mkdtemp(prefix="autotune-ranks-")))
    with contextlib.ExitStack() as opened_here:
        opened_here.callback(shutil.rmtree, launch.folder, ignore_errors=True)
        reports = [os.memfd_create(f"rank-{rank}") for rank in range(count)]
        for descriptor in reports:
            opened_here.callback(os.close, descriptor)

        def run(rank: int) -> int:
            os.setsid()
            faulthandler.enable(2)
            # Loader workers would otherwise outlive a rank that is killed, and be missed by one that ends.
            system.workers_die_with_leader()
            system.raise_for_workers_between_batches()
            end = _ended(train, told=rank == 0)
            with open(reports[rank], "wb", closefd=False) as stream:
                pickle.dump(end, stream)
            return end.exit_code

        def unreported_end(rank: int, code: int, killed: bool) -> _End:
            status, cause, other = unreported(code, None, shared_memory(), kernel_killed=killed)
            fault = WorkloadError if status is TrialStatus.CRASHED else MachineError
            return _End(None, cause, fault.exit_code, other or advice, tail(files_of(launch, rank).stderr))

        with RankProcesses(launch, count, run, first_speaks=True) as ranks:
            ends = ranks.ends(
                lambda rank: _told(reports[rank]), unreported_end, each_ends=each_ends, grace_s=TRAINING_GRACE_S
            )
    failed = {rank: end.cause for rank, end in ends.items() if end.exit_code}
    is_first_well = 0 in ends and 0 not in failed
    rank = at_fault(failed, is_first_well=is_first_well)
    if is_first_well and (rank is None or not each_ends):
        value: _T = ends[0].value
        return value
    # If none has failed, the first rank is missing, and one that ended before it is at fault.
    rank = next(iter(ends)) if rank is None else rank
    # A cause that all ranks report is not specific to one of them.
    same_cause = len(ends) == count and len({end.cause for end in ends.values()}) == 1
    raise _error(ends[rank], "" if same_cause else f"rank {rank}: ")


def _ended(train: Callable[[], Any], *, told: bool) -> _End:
    """Train, and return how the training ended."""
    try:
        value = train()
        return _End(value if told else None)
    except BaseException as error:
        # Not only Exception: the workload may call sys.exit().
        trace = traceback.format_exc()
        if isinstance(error, AutotuneError):
            return _End(None, str(error), error.exit_code, error.advice, error.detail, trace)
        return _End(None, f"{type(error).__name__}: {error}", WorkloadError.exit_code, trace=trace)


def _told(descriptor: int) -> _End | None:
    """Return what a rank has reported; ``None`` if it ended before it could."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as stream, contextlib.suppress(EOFError, pickle.UnpicklingError):
        end = pickle.load(stream)
        assert isinstance(end, _End)
        return end
    return None


def _error(end: _End, who: str) -> AutotuneError:
    """Return the error that the leader raises for a rank's; its message begins with ``who``."""
    if end.exit_code > 128:
        error: AutotuneError = InterruptedSearch(end.exit_code - 128, advice=end.advice)
    else:
        error = by_exit_code(end.exit_code)(f"{who}{end.cause}", advice=end.advice)
        error.detail = end.detail
    if end.trace:
        error.__cause__ = _TraceOfRank(f"\n{end.trace}")
    return error
