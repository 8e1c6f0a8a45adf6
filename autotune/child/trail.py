"""What the agent, or a program itself, reports about a script: steps, batches, pauses, and what its loader delivers."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from autotune import stats
from autotune.base.errors import WorkloadError
from autotune.base.layout import LaunchFiles
from autotune.base.records import (
    CommandRef,
    Config,
    Deliveries,
    DeliveryPlan,
    Measurement,
    Phase,
    TrainCheck,
    TrialSpec,
    Value,
    deliveries_of,
)
from autotune.child.launch import Beats, Launch
from autotune.knobs import KNOBS, answer_to
from autotune.knobs.knob import OTHERS
from autotune.knobs.num_workers import WORKERS
from autotune.knobs.persistent_workers import KNOB as PERSISTENT_WORKERS
from autotune.launcher import script_entry
from autotune.training.step import open_loader

# Turns what the agent in a script has written (see `autotune_agent.watching`) into steps of a training.
#
# A step of the training ends with a step of the optimizer that takes the fewest: this holds for one step per batch or
# per several batches (gradient accumulation), and for several optimizers (a GAN's). Its samples are those of the
# batches delivered since the last one ended. Steps during which an epoch ended, began, or anything was evaluated are
# set apart: their time is not that of a step. What was evaluated before an epoch begins is not part of the epoch.

#: After this many steps of one optimizer all optimizers have been seen, as in `autotune_agent.agent`.
SEEN_AFTER = 6
#: If an optimizer takes no step while another takes more than this, the script no longer uses it.
GONE_AFTER = 50
#: An epoch of at most this many steps has no step inside it, or only one.
NONE_INSIDE = 3

#: If backward passes or updates per batch differ by more than this fraction, it is a different training.
UNLIKE = 0.05


@dataclass(frozen=True)
class SeenStep:
    """One step of a script's training.

    Attributes:
        ended_at: on the host's monotonic clock. seconds: since the last step ended; on CUDA by the device's clock.
        host_s: the same by the host's clock. wait_s: how long the script waited for its batches; on CUDA, how long the
            device was idle meanwhile, if that was observed. Starting the loader's workers counts as waiting.
        samples: in its batches; ``None`` if that is not known.
        whole: it trained on batches in the middle of an epoch, and nothing else was observed in it.
        turned: an epoch of the training loader began in it, and none ended.
        turn: how many turns had begun by then.
        batches: how many were delivered. backwards: how many backward passes ended. updates: steps of all optimizers,
            including those that a gradient scaler skipped.
        began: an epoch of the training loader began in it.
        own_s: `seconds` without evaluations before the epoch began; ``None`` if anything else was observed in it whose
            time cannot be separated.
        alone: nothing was evaluated in it.
    """

    ended_at: float
    seconds: float
    host_s: float
    wait_s: float
    samples: int | None
    whole: bool
    turned: bool
    turn: int = 0
    batches: int = 0
    backwards: int = 0
    updates: int = 1
    began: bool = False
    own_s: float | None = None
    alone: bool = True


@dataclass
class Trained:
    """How much was trained in some steps; see `SeenStep`."""

    batches: int = 0
    backwards: int = 0
    updates: int = 0

    def add(self, step: SeenStep) -> None:
        """Add a step."""
        self.batches += step.batches
        self.backwards += step.backwards
        self.updates += step.updates

    @property
    def per_batch(self) -> tuple[float, float] | None:
        """Backward passes and updates for each batch; ``None`` where no loader delivers any."""
        return (self.backwards / self.batches, self.updates / self.batches) if self.batches else None

    def unlike(self, usual: tuple[float, float] | None) -> str | None:
        """Return how training per batch differs from `per_batch` of a training that is known to be correct, as a
        clause; ``None`` if it does not, or that is unknown."""
        if usual is None or self.per_batch is None:
            return None
        # Of a small number of batches, one or two may belong to another step.
        slack = max(UNLIKE, 2 / self.batches)
        for number, what in ((1, "updates"), (0, "backward passes")):
            actual, expected = self.per_batch[number], usual[number]
            if expected and abs(actual / expected - 1) > slack:
                return f"{_failing(1 - actual / expected)}{actual:.2f} {what} per batch instead of {expected:.2f}"
        return None


def _failing(part: float) -> str:
    if part < 0:
        return ""
    return "every second batch fails: " if abs(part - 0.5) < 0.05 else f"{100 * part:.0f} % of batches fail: "


@dataclass
class SeenLoader:
    """A loader that was iterated over with gradients enabled; see `torch.utils.data.DataLoader`.

    Attributes:
        arguments: those of its class that are in force. ahead: batches that its workers make in advance.
        batches: the number in an epoch; ``None`` if that is not known.
        taken: batches taken of the current epoch. before: those of the last epoch, if one is over.
        made: the number of batches made so far, and the seconds that this took, summed over workers.
    """

    arguments: dict[str, Value | None]
    ahead: int
    batches: int | None
    taken: int = 0
    before: int = 0
    made: tuple[int, float] = (0, 0.0)

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch; ``None`` if that is not known."""
        size = self.arguments["batch_size"]
        return None if size is None else int(size)

    @property
    def epoch_batches(self) -> int | None:
        """Batches that the script takes in an epoch; ``None`` if that is not known: it may break off early, or never
        end."""
        return next((n for n in (self.before, self.batches) if n and n >= self.taken), None)


@dataclass(frozen=True)
class EndedThread:
    """A thread of a script that was ended by an exception; its process goes on.

    Attributes:
        chain: of the exception, like `Trail.raised`. trained: the training ran in it.
    """

    chain: list[list[Any]]
    trained: bool


class _JsonLines:
    """Reads a file of JSON objects, one per line, while it grows. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the objects whose lines have ended since the last call."""
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._at)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._at += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


class Trail:
    """Reads the agent's file while it grows.

    Args:
        path: of the file; it need not exist yet.

    Attributes:
        torch_version, cuda: versions of the script's own PyTorch and its CUDA, once it has been imported.
        began_at: when the script first called a model to train it, or took a step, on the host's monotonic clock.
        loaders: those that were iterated over with gradients enabled, by number.
        optimizer_steps: the number of steps that each optimizer has taken.
        own: facts about the script's own configuration, as the agent reports them once everything has been observed.
        losses: those that the agent was asked to report, in order.
        lost: why nothing more will be written, if so.
        elsewhere: if a process that is not watched trains, how it was created: ``forked`` or ``spawned``.
        elsewhere_at: since when, on the host's monotonic clock.
        unseen: how it trains without steps that can be observed, as a clause, if it does.
        thread: the thread that an exception has ended, if any: the one that trained, or else the first.
        loader: a loader that delivers batches for the steps; ``None`` until one has.
        events: the number of events read so far.
        turns: the number of turns that have begun. turn_at: when the last one did, on the host's monotonic clock.
        unswitched: why the configuration of the last turn could not be switched to, if so. over: how many turns are
            over.
        waits: how often the script has waited for a command.
        failed: why the configuration of the last turn failed in it, if it did. steps_lost: the number of steps that
            trained nothing.
        loads: how often the loader has delivered by itself. load: the event of the last time it did.
        reserved_bytes, allocated_bytes: CUDA: peaks of the script's allocator.
    """

    def __init__(self, path: Path) -> None:
        self.torch_version: str | None = None
        self.cuda: str | None = None
        self.began_at: float | None = None
        self.loaders: dict[int, SeenLoader] = {}
        self.optimizer_steps: Counter[int] = Counter()
        self.own: dict[str, Any] | None = None
        self.losses: list[float] = []
        self.lost: str | None = None
        self.elsewhere: str | None = None
        self.elsewhere_at = 0.0
        self.unseen: str | None = None
        self.thread: EndedThread | None = None
        self.loader: SeenLoader | None = None
        self.events = 0
        self.turns = 0
        self.turn_at = 0.0
        self.unswitched: str | None = None
        self.over = self.waits = 0
        self.failed: str | None = None
        self.steps_lost = 0
        self.loads = 0
        self.load: dict[str, Any] = {}
        self._raised: dict[int, list[list[Any]]] = {}
        self._trains: int | None = None
        self.reserved_bytes: int | None = None
        self.allocated_bytes: int | None = None
        self._file = _JsonLines(path)
        self._held: list[dict[str, Any]] = []
        self._unit: int | None = None
        #: Steps of each optimizer since the one that ends a step of the training last took one.
        self._recent_steps: Counter[int] = Counter()
        #: The loaders that delivered batches for each of the last steps.
        self._recent: deque[frozenset[int]] = deque(maxlen=20)
        #: Batches per backward pass in the last steps.
        self._by_backward: deque[float] = deque(maxlen=20)
        self._since: _Since | None = None

    def close(self) -> None:
        """Close what is open."""
        return

    def known(self, found: Measurement, spec: TrialSpec) -> Measurement:
        """Return the figures of a launch's measurement that are really known: here, all of them."""
        return found

    @property
    def raised(self) -> list[list[Any]] | None:
        """The chain of an uncaught exception, the last first (see `autotune_agent.watching`): that of the process that
        trains, or else of the first process that reported one. Launchers end with exceptions of their own."""
        chain = self._raised.get(self._trains) if self._trains is not None else None
        return chain or next(iter(self._raised.values()), None)

    def read(self, *, decide: bool = False) -> list[SeenStep]:
        """Return the steps that have ended since the last call, in order, except the very first.

        Args:
            decide: take it that all optimizers have been seen, however few steps they have taken. Otherwise steps are
                held back until one has taken `SEEN_AFTER`.
        """
        for event in self._file.new():
            self.events += 1
            match event["e"]:
                case "torch":
                    self.torch_version, self.cuda = event["version"], event["cuda"]
                case "begin":
                    self.began_at, self._trains = event["at"], event["pid"]
                case "own":
                    self.own = event
                case "loss":
                    self.losses.append(event["value"])
                case "unseen":
                    self.unseen = event["how"]
                case "elsewhere":
                    self.elsewhere, self.elsewhere_at = event["how"], event["at"]
                case "lost":
                    self.lost = event["why"]
                case "made":
                    self.loaders[event["l"]].made = event["batches"], event["seconds"]
                case "loaded":
                    self.loads, self.load = self.loads + 1, event
                case "memory":
                    self.reserved_bytes, self.allocated_bytes = event["reserved"], event["allocated"]
                case "raised" if event.get("thread"):
                    if self.thread is None or (event["trains"] and not self.thread.trained):
                        self.thread = EndedThread(event["chain"], event["trains"])
                case "raised":
                    self._raised.setdefault(event["pid"], event["chain"])
                case "loader":
                    self.loaders[event["l"]] = SeenLoader(event["arguments"], event["ahead"], event["batches"])
                case kind if kind in ("step", "epoch", "turn", "ready", "failed"):
                    self._held.append(event)
                    if kind == "step":
                        self.optimizer_steps[event["o"]] += 1
                        self._recent_steps[event["o"]] += 1
        counts = self._recent_steps
        if self._unit is not None and max(counts.values(), default=0) > GONE_AFTER and not counts[self._unit]:
            # The script has moved on to another optimizer.
            self._unit = None
        if self._unit is None and counts and (decide or max(counts.values()) >= SEEN_AFTER):
            # Of several with the same number, the one that was seen last ends a step.
            self._unit = min(counts, key=lambda number: (counts[number] or math.inf, -number))
        if self._unit is None:
            return []
        if counts[self._unit]:
            counts.clear()
        held, self._held = self._held, []
        return [step for event in held if (step := self._note(event)) is not None]

    def _note(self, event: dict[str, Any]) -> SeenStep | None:
        if event["e"] == "turn":
            # What happened before it belongs to no step.
            self._since = _Since(event["at"], event.get("device"))
            self.turns, self.turn_at, self.unswitched = self.turns + 1, event["at"], event["why"]
            self.failed = None
            # Peaks start afresh.
            self.reserved_bytes = self.allocated_bytes = None
            return None
        if event["e"] == "ready":
            self.over = self.turns
            self.waits += 1
            return None
        if event["e"] == "failed":
            self.failed = event["why"]
            self.steps_lost += event["lost"]
            return None
        for number, count, samples, wait_s in event["batches"]:
            self._take(number, count, samples, wait_s)
        if event["e"] == "epoch":
            number = event["l"]
            if number is not None:
                loader = self.loaders[number]
                loader.before, loader.taken = loader.taken or loader.before, 0
            if self._since is not None:
                start_s = event.get("start", 0.0)
                self._since.began.append((number, event["at"] - start_s))
                self._since.wait_s += 0.0 if number is None else start_s
            return None
        if self._since is not None:
            self._since.backwards += event.get("backwards", 0)
            self._since.updates += 1 + event.get("left_out", 0)
        if event["o"] != self._unit:
            return None
        since, self._since = self._since, _Since(event["at"], event.get("device"))
        if since is None:
            return None
        since.wait_s = event.get("stalled", since.wait_s)
        return self._ended(since, self._since)

    def _take(self, number: int, count: int, samples: int | None, wait_s: float) -> None:
        loader, since = self.loaders[number], self._since
        loader.taken += count
        if since is None:
            return
        since.batches += count
        since.wait_s += wait_s
        before = since.by.get(number, 0)
        since.by[number] = None if samples is None or before is None else before + samples
        # The last batch of an epoch may have fewer samples than reported.
        since.last = since.last or loader.taken == loader.batches

    def _ended(self, since: _Since, now: _Since) -> SeenStep:
        seconds = now.at - since.at
        if now.device is not None and since.device is not None:
            seconds = now.device - since.device
        if since.by:
            self._recent.append(frozenset(since.by))
        often = Counter(number for by in self._recent for number in by)
        # Several loaders may deliver for each step; one for evaluation may deliver more batches, but in few steps.
        trains = {number for number, steps in often.items() if 2 * steps >= len(self._recent)}
        self.loader = self.loaders[min(trains)] if trains else self.loader
        counts = [since.by[number] for number in trains & since.by.keys()]
        samples = None if None in counts else sum(n or 0 for n in counts)
        began_at = [at for number, at in since.began if number in trains]
        alone = since.by.keys() <= trains and all(number in trains for number, _ in since.began)
        own_s: float | None = seconds
        if not alone:
            # An evaluation before the epoch is known to end when the epoch begins.
            before = bool(began_at) and since.began[-1][0] in trains
            own_s = max(0.0, seconds - (min(began_at) - since.at)) if before else None
        return SeenStep(
            ended_at=now.at,
            seconds=seconds,
            host_s=now.at - since.at,
            wait_s=min(since.wait_s, seconds),
            # Where there is a loader, several steps may be taken on the same batch.
            samples=self._seen_by_backward(since, samples) if trains else None,
            whole=alone and not since.began and not since.last,
            turned=own_s is not None and {number for number, _ in since.began} >= trains > set() and not since.last,
            turn=self.turns,
            batches=since.batches,
            backwards=since.backwards,
            updates=since.updates,
            began=bool(began_at),
            own_s=own_s,
            alone=alone,
        )

    def _seen_by_backward(self, since: _Since, samples: int | None) -> int | None:
        """Return the samples of a step without those of batches that no backward pass has seen, which show in more
        batches per pass than usual."""
        if samples is None or not since.batches:
            return samples
        if since.backwards:
            self._by_backward.append(since.batches / since.backwards)
        if not self._by_backward:
            return samples
        usual = median(self._by_backward)
        return min(samples, round(samples * since.backwards * usual / since.batches))


@dataclass
class _Since:
    """What has been observed since the last step ended: batches of loaders, beginnings of epochs."""

    at: float
    device: float | None
    wait_s: float = 0.0
    last: bool = False
    batches: int = 0
    backwards: int = 0
    updates: int = 0
    #: The samples that each loader has delivered; ``None`` if not known.
    by: dict[int, int | None] = field(default_factory=dict)
    #: Loaders whose epochs began, and when.
    began: list[tuple[int | None, float]] = field(default_factory=list)


# Rates that a program itself reports, in its output or in a file, in place of what the agent would observe.

#: Lines end with either: a progress bar overwrites itself.
_ENDS = re.compile(rb"[\r\n]+")
#: Of a line that does not end, only this many last bytes are kept.
_LONGEST_LINE = 2**16


class Readings(Trail):
    """Turns the rates that a program writes into steps of a training, while they are being written.

    A rate is that of the time since the one before; what it counts (images, tokens) is up to the program. Each makes
    one step of a training, which lasts about as long as has passed since then, so that a whole number of samples gives
    the reported rate.

    Args:
        files: those of the launch, whose output is read if `path` is ``None``.
        samples_per_step: samples in one step of the program, for programs that report seconds per step.

    Attributes:
        expression: the regular expression that is searched for, as the user gave it.
    """

    def __init__(self, files: LaunchFiles, command: CommandRef, path: Path | None, samples_per_step: int) -> None:
        super().__init__(files.trail)
        self.expression = command.rate or ""
        self._pattern = re.compile(self.expression)
        self._samples_per_step = samples_per_step
        if path is None:
            self._tails = [_Tail(files.stdout, is_log=True), _Tail(files.stderr, is_log=True)]
        else:
            self._tails = [_Tail(path, is_log=False)]
        self._read_at: float | None = None

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails:
            tail.close()

    def read(self, *, decide: bool = False) -> list[SeenStep]:
        # Raises `WorkloadError` if what the expression matched is not a number.
        steps = []
        for tail in self._tails:
            for line in tail.lines():
                match = self._pattern.search(line)
                step = None if match is None else self._step(match)
                if step is not None:
                    steps.append(step)
        # Anything that the program writes is a sign of life.
        self.events = sum(tail.taken for tail in self._tails)
        return steps

    def known(self, found: Measurement, spec: TrialSpec) -> Measurement:
        """Return `found` without what remains unknown of a program that the agent does not enter: its waits, the
        device's share of a step, and the memory of a card that it takes."""
        unknown: dict[str, Any] = {"device_per_s": None, "loader_wait_fraction": None}
        if spec.devices[0] != "cpu":
            unknown["peak_allocated_bytes"] = None
        return found.model_copy(update={**unknown, "batch_size": spec.batch_size})

    def _step(self, match: re.Match[str]) -> SeenStep | None:
        (name, text), *_ = match.groupdict("").items()
        try:
            value = float(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise WorkloadError(
                f"--rate found {text[:60]!r} in {match.string.strip()[:100]!r}, which is no number",
                advice=f"let (?P<{name}>…) match the number alone.",
            ) from None
        if not math.isfinite(value) or value <= 0:
            # Some programs report a rate of 0 when they begin.
            return None
        before, self._read_at = self._read_at, time.monotonic()
        self.optimizer_steps[0] += 1
        if before is None:
            self.began_at = self._read_at
            return None
        passed_s = self._read_at - before
        per_s, unit = (value, 1) if name == "rate" else (self._samples_per_step / value, self._samples_per_step)
        samples = unit * max(1, round(passed_s * per_s / unit))
        return SeenStep(
            ended_at=self._read_at,
            seconds=samples / per_s,
            host_s=passed_s,
            wait_s=0.0,
            samples=samples,
            whole=True,
            turned=False,
            own_s=samples / per_s,
        )


class _Tail:
    """The lines of a growing file, without those that it held when this object was created.

    Args:
        is_log: the file is one of the launch's own logs: new at each launch, and truncated when it grows long.

    Attributes:
        taken: bytes read so far.
    """

    def __init__(self, path: Path, *, is_log: bool) -> None:
        self.taken = 0
        self._path = path
        self._is_log = is_log
        self._descriptor: int | None = None
        self._rest = b""
        # A file that an earlier run has left may be appended to, or replaced.
        self._left = None if is_log else _look(path)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def lines(self) -> Iterator[str]:
        """Yield the lines that have ended since the last call."""
        descriptor = self._descriptor = self._opened() if self._descriptor is None else self._descriptor
        if descriptor is None:
            return
        size = os.fstat(descriptor).st_size
        if size < os.lseek(descriptor, 0, os.SEEK_CUR):
            os.lseek(descriptor, size if self._is_log else 0, os.SEEK_SET)
            # The line that had not ended is gone with what was cut.
            self._rest = b""
        while data := os.read(descriptor, 2**16):
            self.taken += len(data)
            *lines, rest = _ENDS.split(self._rest + data)
            self._rest = rest[-_LONGEST_LINE:]
            yield from (line.decode(errors="replace") for line in lines)
        now = _look(self._path)
        if now is not None and not os.path.samestat(now, os.fstat(descriptor)):
            # The program has replaced the file.
            self.close()
            self._left, self._rest = None, b""

    def _opened(self) -> int | None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if self._left is not None and os.path.samestat(self._left, os.fstat(descriptor)):
            os.lseek(descriptor, self._left.st_size, os.SEEK_SET)
        return descriptor


def _look(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


# Long pauses that recur between the steps of a script: rollouts, evaluations, checkpoints.
#
# The rates of windows with and without a pause differ by what the pause takes, and those with one look disturbed. So
# where pauses take much of the time, a window lasts from one pause to another.

#: A step has a pause in it if it takes more than `LONG` times as long as usual, judged by up to `_AMONG` steps before
#: it, and at least `_FEWEST`.
LONG, _AMONG, _FEWEST = 5.0, 64, 4
#: Pauses that together take less than this fraction of the time do not matter.
_MATTERS = 0.1
#: If no pause comes for this many times the interval between the last two, they were not regular.
_GONE = 4.0


class Pauses:
    """Detects pauses, and whether they come regularly.

    Attributes:
        regular: there have been two or more, and they take much of the time.
        may_be: there has been one, which takes much of the time, and others may follow.
        period_s: from the last pause but one to the last. across: an epoch has ended between these two.
    """

    def __init__(self) -> None:
        self.regular = self.may_be = self.across = False
        self.period_s = 0.0
        self._turned = False
        self._recent: deque[float] = deque(maxlen=_AMONG)
        self._began_at: float | None = None
        self._at: list[float] = []
        self._seconds = 0.0
        self._gone = False

    def turn(self) -> None:
        """Note that an epoch has ended."""
        self._turned = True

    def add(self, step: SeenStep) -> bool:
        """Note a step in the middle of an epoch; return whether there was a pause in it."""
        if self._began_at is None:
            self._began_at = step.ended_at - step.seconds
        usual_s = median(self._recent) if len(self._recent) >= _FEWEST else step.seconds
        self._recent.append(step.seconds)
        paused = step.seconds > LONG * usual_s
        if paused:
            if self._at:
                self.period_s, self.across = step.ended_at - self._at[-1], self._turned
            self._turned = False
            self._at.append(step.ended_at)
            self._seconds += step.seconds - usual_s
        elif len(self._at) > 1 and step.ended_at - self._at[-1] > _GONE * (self._at[-1] - self._at[-2]):
            self._gone = True
        much = not self._gone and self._seconds > _MATTERS * (step.ended_at - self._began_at)
        self.regular, self.may_be = much and len(self._at) > 1, much and len(self._at) == 1
        return paused


# What the loaders of a training deliver, as noted by the agent (see `autotune_agent.deliveries`): for a script while it
# trains, for a workload without training.


PERSISTENT = PERSISTENT_WORKERS.name
#: In the middle of an epoch, wait this many times as long for the next batch as between two epochs.
_IDLE = 2.0


def told_deliveries(plan: DeliveryPlan, files: LaunchFiles, *, goes_on: bool = False) -> dict[str, Any]:
    """Return the part of the agent's plan that says what deliveries to note, and whether the training is to go on and
    be measured later. What an earlier attempt has noted is removed."""
    files.deliveries.unlink(missing_ok=True)
    return {
        "goes_on": goes_on,
        "path": str(files.deliveries),
        "seed": plan.seed,
        "batches": [plan.least, plan.most],
        "limit_s": plan.limit_s,
        "second": plan.second,
        "totals": list(plan.totals),
        "epochs": plan.epochs,
    }


class DeliveryLog:
    """Reads what the agent notes, while it is being written. Without a plan, nothing is noted."""

    def __init__(self, plan: DeliveryPlan | None, files: LaunchFiles) -> None:
        self._plan = plan
        self._path = files.deliveries
        self._file = _JsonLines(self._path)
        self._events: list[dict[str, Any]] = []
        self._done = False
        self._ended_at: float | None = None
        self._newest_at = 0.0

    def is_over(self) -> bool:
        """Read what is new; return whether there is nothing more to wait for."""
        if self._plan is None:
            return True
        for event in self._file.new():
            self._events.append(event)
            self._newest_at = time.monotonic()
            if event["e"] == "end":
                self._ended_at = time.monotonic()
            elif event["e"] == "epoch":
                self._ended_at = None
            elif event["e"] in ("done", "lost"):
                # Workers do not know that, and go on.
                self._done = True
        if self._done:
            return True
        now = time.monotonic()
        if self._ended_at is None:
            # The script may go on with a batch that it has, or everything has been noted.
            return bool(self._events) and now - self._newest_at > _IDLE * self._plan.wait_s
        # Between two epochs a script may do anything, for as long as it likes.
        return now - self._ended_at > self._plan.wait_s

    @property
    def has_begun(self) -> bool:
        """Whether a loader of the training has been iterated over."""
        return bool(self._events)

    @property
    def persists(self) -> bool:
        """Whether workers persist from one epoch to the next, and their part of the noting with them."""
        return any(event["e"] == "loader" and event["workers"] and event["persist"] for event in self._events)

    @property
    def has_ended_early(self) -> bool:
        """Whether an epoch was ended for a reason that is not the script's, which may make the script fail."""
        return any(event["e"] == "end" and not event["whole"] for event in self._events)

    def found(self) -> Deliveries | None:
        """Return what has been noted, and remove the file; ``None`` if nothing was to be noted."""
        if self._plan is None:
            return None
        self._events += self._file.new()
        self._path.unlink(missing_ok=True)
        return deliveries_of(self._events)


def refused_by(deliveries: Deliveries, own: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what the deliveries of a training's own data set rule out, given its own configuration as far as it is
    known: a knob, the answer it is for (see `autotune.knobs.answer_to`), and the reason, as a clause."""
    has_second = any(len(data_set.epochs) > 1 and data_set.epochs[1].batches for data_set in deliveries.sets)
    for data_set in deliveries.sets:
        yield from ((WORKERS, OTHERS, why) for why in stats.why_not_copied(data_set))
        cached = stats.is_cached(data_set)
        if cached is not None:
            why = f"the data set keeps what it has made (once more takes {100 * cached:.0f} % of the time)"
            yield WORKERS, OTHERS, f"{why}, and workers would lose it after each epoch"
        changed = next((what for epoch in data_set.epochs[1:] for what in epoch.changed), None)
        if own.get(PERSISTENT):
            continue
        answer = answer_to(KNOBS[PERSISTENT], True)
        if changed is not None:
            why = f"the script changes {changed} between epochs, and workers that persist never see it"
            yield PERSISTENT, answer, why
        elif data_set.iterable:
            yield PERSISTENT, answer, "of a data set that is iterated, workers that persist may go on where they ended"
        elif not has_second:
            yield PERSISTENT, answer, "no second epoch was seen, of which workers that persist may miss what is new"


def deliver(spec: TrialSpec, plan: DeliveryPlan, beats: Beats) -> TrainCheck:
    """Let the loader of a workload deliver as a plan says, under ``spec.config``, without training."""
    files = LaunchFiles(Path(spec.folder))
    log = DeliveryLog(plan, files)
    launch = Launch(spec, beats)
    # Appended only now: nothing else is to be imported from the agent's folder.
    sys.path.append(str(script_entry.FOLDER))
    from autotune_agent.deliveries import Noting

    process = os.getpid()
    Noting(told_deliveries(plan, files), ours=lambda: os.getpid() == process).install()
    loader = open_loader(launch.workload, launch.ctx, spec.config, worker_start_method=spec.worker_start_method)
    beats.enter(Phase.COMPILE)
    taken = 0
    for _ in range(plan.epochs):
        if log.is_over():
            break
        for _ in loader:
            taken += 1
            beats.step(taken)
            if beats.phase is Phase.COMPILE:
                beats.enter(Phase.MEASURE)
    return TrainCheck(losses=(), finite=True, changed=1.0, deliveries=log.found())
