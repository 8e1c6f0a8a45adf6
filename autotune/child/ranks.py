"""Several ranks of a training: the first one measures, by the code of any launch, and the others train beside it until
it is done."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from pydantic import ValidationError

from autotune.base.files import write_atomic
from autotune.base.layout import LaunchFiles
from autotune.base.records import TRANSIENT, LaunchKind, Phase, TrialResult, TrialSpec, TrialStatus
from autotune.child.launch import MIN_GAP_S, Beats
from autotune.child.loop import Measuring, empty_queue, resident_of
from autotune.launcher.rank_processes import RankProcesses, at_fault, files_of
from autotune.launcher.result import tail, unreported
from autotune.machine.host import shared_memory
from autotune.training.feed import Feed, Source
from autotune.training.step import Step

#: Kinds of launch that several ranks take part in. The others need no training, or only one of them.
RANKED = (LaunchKind.MEASURE, LaunchKind.DEVICE_ONLY, LaunchKind.LOADER_ONLY, LaunchKind.TRAIN_CHECK, LaunchKind.HOLD)
#: How long all ranks may take to write their stacks; less than the time that a launch being ended has for its last
#: words.
DUMPED_S = 0.5
#: The most characters of the message to the launcher.
MOST_SAID = 900
#: The innermost frame of a rank's stack where it waits for the others: files, and functions of ours. On a card the
#: exchange itself does not wait. What waits is whatever next needs its result on the CPU, or copies to the card after
#: it.
_WAITS_IN = (
    *("torch/autograd/graph.py", "torch/nn/parallel/distributed.py", "torch/distributed/", "torch/cuda/"),
    *("torch/amp/", "torch/nn/utils/", "autotune/training/step.py"),
)
_WAITS_FOR_LOSS = "checked"
#: The innermost frame of the thread that received the signal, in the format of `faulthandler`.
_FRAME = re.compile(r'Current thread [^\n]*\(most recent call first\):\n {2}File "(.+?)", line (\d+) in (\S+)')

#: How a rank ends that has done what it was to do.
_WELL = (TrialStatus.COMPLETE, TrialStatus.PRUNED)


class RankBoard:
    """Figures that each rank reports to the leader, in shared memory. Create it before they are forked."""

    _FIELDS = 4

    def __init__(self, ranks: int) -> None:
        self._values = memoryview(mmap.mmap(-1, 8 * self._FIELDS * ranks)).cast("d")

    def note(
        self, rank: int, *, waited_s: float, seconds: float, peak_bytes: int | None, reserved_bytes: int | None
    ) -> None:
        """Note how long a rank has trained, including its waits for its loader, how long these were, and its peaks of
        memory."""
        begin = rank * self._FIELDS
        for place, value in enumerate((waited_s, seconds, float(peak_bytes or 0), float(reserved_bytes or 0))):
            self._values[begin + place] = value

    def wait_fraction(self, rank: int) -> float | None:
        """Return the fraction of its time that a rank has waited for its loader; ``None`` if it has noted nothing."""
        waited_s, seconds = self._values[rank * self._FIELDS], self._values[rank * self._FIELDS + 1]
        return waited_s / seconds if seconds else None

    def peaks(self, ranks: int) -> tuple[int, int]:
        """Return the highest peaks that ranks have noted, of allocated and of reserved memory; 0 if none."""
        rows = [self._values[rank * self._FIELDS : (rank + 1) * self._FIELDS] for rank in range(ranks)]
        return int(max(row[2] for row in rows)), int(max(row[3] for row in rows))


def lead(spec: TrialSpec, beats: int, train: Callable[[int, int, RankBoard], int]) -> int:
    """Run a launch of several ranks; write its result, and return its exit code.

    Args:
        beats: descriptor for the beats, which goes to the first rank.
        train: called in the process of each rank with its number, the descriptor for its beats and the board; returns
            its exit code, and leaves its result in `files_of`.
    """
    launch = LaunchFiles(Path(spec.folder))
    board = RankBoard(spec.ranks)

    def run(rank: int) -> int:
        # The processes of every rank are reported to the launcher, but only the first rank writes beats.
        return train(rank, os.open(os.devnull, os.O_WRONLY) if rank else beats, board)

    def unreported_result(rank: int, code: int, killed: bool) -> TrialResult:
        status, cause, advice = unreported(code, None, shared_memory(), kernel_killed=killed)
        return TrialResult(launch=spec.launch, status=status, cause=cause, advice=advice, transient=status in TRANSIENT)

    with RankProcesses(launch, spec.ranks, run) as ranks:
        signal.signal(signal.SIGUSR1, lambda *_: _tell_who_is_late(launch, ranks.pids, beats))
        each_ends = spec.kind is LaunchKind.TRAIN_CHECK
        results = ranks.ends(lambda rank: _reported(launch, rank), unreported_result, each_ends=each_ends)
    # What another one's end has done to a rank is an error of its own code, and no failure of any other kind.
    failed = {
        n: r.cause if r.status is TrialStatus.USER_ERROR else None for n, r in results.items() if r.status not in _WELL
    }
    rank = at_fault(failed, is_first_well=0 in results and 0 not in failed)
    # Of ranks that all ended well, the first one tells, whichever was the quickest.
    rank = min(results) if rank is None else rank
    for other in range(spec.ranks):
        # The one that counts is told below.
        files_of(launch, other).result.unlink(missing_ok=True)
    write_atomic(launch.result, _whole(results[rank], rank, spec.ranks, launch, board).model_dump_json())
    return 0 if results[rank].status in _WELL else 1


def _reported(launch: LaunchFiles, rank: int) -> TrialResult | None:
    """Return what a rank has reported as its end; ``None`` if it has not, or not whole."""
    try:
        return TrialResult.model_validate_json(files_of(launch, rank).result.read_text())
    except (OSError, ValidationError):
        return None


def _whole(result: TrialResult, rank: int, ranks: int, launch: LaunchFiles, board: RankBoard) -> TrialResult:
    """Return the result of a launch from that of the rank that has decided it."""
    measured, (allocated, reserved) = result.measurement, board.peaks(ranks)
    if result.cause is not None and result.status is not TrialStatus.PRUNED:
        result = result.model_copy(update={"cause": f"rank {rank}: {result.cause}"})
        # Where the launcher looks for a launch's last words.
        with contextlib.suppress(OSError):
            os.write(2, f"rank {rank}:\n{tail(files_of(launch, rank).stderr) or ''}\n".encode())
    if result.hold is not None:
        peak = max(result.hold.peak_bytes, reserved or allocated)
        return result.model_copy(update={"hold": result.hold.model_copy(update={"peak_bytes": peak})})
    if measured is None:
        return result
    waits = (measured.loader_wait_fraction, *(board.wait_fraction(number) for number in range(1, ranks)))
    figures = {
        "rank_wait_fractions": waits,
        "peak_allocated_bytes": max(measured.peak_allocated_bytes or 0, allocated) or None,
        "peak_reserved_bytes": max(measured.peak_reserved_bytes or 0, reserved) or None,
    }
    return result.model_copy(update={"measurement": measured.model_copy(update=figures)})


def _tell_who_is_late(launch: LaunchFiles, pids: dict[int, int], beats: int) -> None:
    """Make all ranks write their stacks, and report to the launcher which of them are not waiting for the others, and
    where they are instead."""
    logs = {rank: files_of(launch, rank).stderr for rank in pids}
    sizes = {rank: _size(path) for rank, path in logs.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + DUMPED_S
    while time.monotonic() < deadline and any(_size(logs[rank]) == sizes[rank] for rank in pids):
        time.sleep(0.01)
    time.sleep(0.05)
    late = {rank: place for rank in pids if (place := _place(logs[rank], sizes[rank])) is not None}
    for rank, path in logs.items():
        with contextlib.suppress(OSError):
            os.write(2, f"rank {rank}:\n{tail(path, 60) or ''}\n".encode())
    # If all ranks are busy, none of them holds up the others.
    if late and len(late) < len(pids):
        places = "; ".join(f"rank {rank} {place}" for rank, place in late.items())[:MOST_SAID]
        with contextlib.suppress(OSError):
            os.write(beats, b'{"late": "%s"}\n' % places.replace('"', "'").encode())


def _place(log: Path, since: int) -> str | None:
    """Return where a rank is, as a clause, from its own stack dump; ``None`` if it waits for the others."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(since)
        frames = _FRAME.findall(file.read().decode(errors="replace"))
        if frames:
            path, line, name = frames[-1]
            if any(part in path for part in _WAITS_IN) or name == _WAITS_FOR_LOSS:
                return None
            return f"is in {name} ({os.path.basename(path)}:{line})"
    return "does not answer"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# What the other ranks do beside the first one: they train as it does, until they are ended.


def follow(spec: TrialSpec, beats: Beats, board: RankBoard) -> NoReturn:
    """Take part in a launch that another rank measures.

    Raises:
        Diverged: the first loss was not finite. The first rank sees any later divergence, because gradients are
            averaged.
    """
    # The first rank watches all cards.
    launch = Measuring(spec, beats, cards=False)
    source: Source = (feed := Feed(launch.loader))
    work: Step | None = None
    if spec.kind is LaunchKind.LOADER_ONLY:
        launch.wake()
    else:
        work = launch.build()
        work.exchanges = spec.exchanges
        if spec.kind is LaunchKind.DEVICE_ONLY:
            source = resident_of(launch, feed)
    launch.first_step(source.next(), work)
    if work is not None and spec.kind is LaunchKind.MEASURE:
        empty_queue(source, beats)
    beats.enter(Phase.MEASURE)
    began = noted = time.monotonic()
    waited_s = 0.0
    while True:
        delivery = source.next()
        waited_s += delivery.wait_s
        if work is not None:
            work(delivery.batch)
        now = time.monotonic()
        if now - noted >= MIN_GAP_S:
            if launch.device.type == "cuda":
                # This rank must not run far ahead of what the first rank waits for.
                torch.cuda.synchronize()
            noted = now
            memory = launch.memory
            board.note(
                spec.rank,
                waited_s=waited_s,
                seconds=now - began,
                peak_bytes=memory.peak_bytes,
                reserved_bytes=memory.peak_reserved_bytes,
            )
