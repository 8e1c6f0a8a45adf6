"""What is observed of a training, and reported."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

from autotune_agent.facts import batch_size, chain, is_capturing, length, machine, samples_in
from autotune_agent.loaders import beginning, iterates_itself
from autotune_agent.optimizers import OptimizerDoor
from autotune_agent.setting import is_of_a_worker, say

# The file in which the agent writes what a training does, and the clock of the device that it trains on.


class TrailWriter:
    """Writes events to a file, one JSON object a line. Each has ``e``, its kind, and ``at``, its time on the monotonic
    clock, which all processes of a Linux machine share.

    ============  ==================================================================================================
    ``torch``     torch has been imported: ``version``, ``cuda``
    ``alive``     batches have come, but no step has ended for some time
    ``lost``      nothing more will be written: ``why``
    ``begin``     this process, ``pid``, trains: it has called a model with gradients on, ``backward`` or an optimizer
    ``unseen``    it has trained for some time, and no step was seen: ``how``, a clause
    ``loader``    a loader is first iterated over: ``l`` (its number), ``arguments`` (by the names of `DataLoader`),
                  ``ahead`` (batches that its workers make in advance), ``batches`` (of an epoch, or null)
    ``epoch``     an epoch of a loader begins: ``l``, or null if gradients are off; ``batches`` as below; ``start``: s
                  that its iterator, with its workers, took to start. A loader that is made anew for each epoch keeps
                  its number
    ``made``      batches made so far from the data set of ``l``: ``batches``, in ``seconds``, added up over workers
    ``step``      a step of an optimizer has ended: ``o`` (its number), ``batches`` (of loaders since the last step,
                  each ``[l, batches, samples or null, wait in s]``), ``backwards`` (passes since the last step),
                  ``left_out`` (updates that a gradient scaler has skipped since then, if any); on CUDA ``device`` (s of
                  the device's clock since the first step; the line is written when the device has got there) and
                  ``stalled`` (s of that clock in which the device was idle while the script waited for batches, or for
                  workers to start)
    ``turn``      another configuration has been put in force, or could not be (``why``); ``device`` as for a step
    ``ready``     a turn is over, and the agent waits for the next command
    ``loaded``    the loader has delivered by itself: ``batches``, ``samples``, ``seconds``; or what it delivers has
                  been noted, unless that was ``refused``, with a reason; or ``raised``, a chain
    ``failed``    a configuration on trial has failed in the middle of a step (``why``), and the script's own is in
                  force again; ``lost``: that step has trained nothing
    ``loss``      ``backward`` is called: ``value``, for as many calls as were requested
    ``own``       everything has been seen: ``process``, ``model``, ``optimizer``, each with facts about the script's
                  own; ``machine``; and ``answers`` to the questions, each ``[knob, value, why not, or null]``
    ``memory``    on CUDA, now and then: ``reserved``, ``allocated``, peaks in bytes
    ``raised``    an exception in process ``pid`` was not caught: ``chain``, each link ``[name of its type, names of the
                  bases, message, {errno, filename, layer, frames}]``, each frame ``[file, line]``, the innermost last;
                  if it has only ended a ``thread``, whether that ``trains``
    ============  ==================================================================================================

    Lines wait for `flush`. An event that is noted after a mark on the device is written when the device has got there.

    Args:
        path: the file, which is appended to.

    Attributes:
        written_s: when lines were last written, on the monotonic clock.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.written_s = 0.0
        self._lines: list[str] = []
        # Events to be written once the device has got to a mark, in order.
        self._ahead: deque[tuple[Any, str, list[tuple[Any, Any]]]] = deque()
        self._first: Any = None
        #: The card of the first step.
        self._device: Any = None

    def note(self, event: str, **facts: Any) -> None:
        """Add an event, after everything that still waits for the device."""
        text = json.dumps({"e": event, "at": round(time.monotonic(), 6), **facts})[:-1]
        if self._ahead:
            self._ahead.append((None, text, []))
        else:
            self._lines.append(text + "}\n")

    def note_ahead(self, mark: Any, text: str, waits: list[tuple[Any, Any]]) -> None:
        """Add an event that ends when the device gets to a mark; without a mark, it ends now.

        Args:
            text: the line of the event, without the closing brace. waits: marks before and after each wait for a batch.
        """
        self._ahead.append((mark, text, waits))
        self._write_reached()

    def drop_ahead(self) -> None:
        """Drop the events that wait for the device, which may never get there."""
        self._ahead.clear()

    def flush(self) -> None:
        """Write the lines that wait for nothing."""
        self.written_s = time.monotonic()
        lines, self._lines = self._lines, []
        # Opened each time, as a script may close descriptors unknown to it, and open its own in their place.
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, "".join(lines).encode())
            finally:
                os.close(descriptor)

    def end(self) -> None:
        """Write everything, without waiting for the device, which may hang."""
        self._lines += [text + "}\n" for _, text, _ in self._ahead]
        self._ahead.clear()
        self.flush()

    def catch_up(self) -> None:
        """Wait for the device, and write everything."""
        import torch

        if self._first is not None:
            torch.cuda.synchronize(self._device)
            self._write_reached()
            self.note_memory()
        self.flush()

    def wait_mark(self) -> Any:
        """Return a mark at the end of the device's queue; ``None`` before a step on CUDA has been seen."""
        import torch

        if self._first is None or is_capturing():
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def step_mark(self, optimizer: Any) -> Any:
        """Return a mark at the end of the queue of an optimizer's card; ``None`` if it is not on a card, or on another
        one than that of the first step."""
        import torch

        device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        if device is None or device.type != "cuda" or self._device not in (None, device):
            return None
        self._device = device
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(device))
        return mark

    def begins_at(self, mark: Any) -> None:
        """Start the device's clock at a mark, unless it runs already."""
        self._first = self._first or mark

    def note_memory(self) -> None:
        """Add the memory peaks of the card of the first step."""
        import torch

        peaks = {
            "reserved": torch.cuda.max_memory_reserved(self._device),
            "allocated": torch.cuda.max_memory_allocated(self._device),
        }
        self.note("memory", **peaks)

    def forget_memory(self) -> None:
        """Reset the peaks, and release memory that no tensor uses, if the training is on a card."""
        import torch

        if self._first is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _write_reached(self) -> None:
        """Move what the device has got to among the lines to be written."""
        while self._ahead and (self._ahead[0][0] is None or self._ahead[0][0].query()):
            reached, text, waits = self._ahead.popleft()
            if reached is not None:
                text = f'{text},"device":{self._first.elapsed_time(reached) / 1e3:.6f}'
            if waits and all(mark is not None and mark.query() for marks in waits for mark in marks):
                stalled_s = sum(before.elapsed_time(after) for before, after in waits) / 1e3
                text = f'{text},"stalled":{stalled_s:.6f}'
            self._lines.append(text + "}\n")


# Observes the first losses of a training.


class Losses:
    """Reports the losses on which ``backward`` is called. Each makes the process wait for the device.

    Args:
        count: how many of them; after that, the original functions are restored.
        ours: returns whether this process may be the one that trains.
        tell: called with each, a tensor with one element.
    """

    def __init__(self, count: int, ours: Callable[[], bool], tell: Callable[[Any], None]) -> None:
        self._left = count
        self._ours = ours
        self._tell = tell
        #: The last loss that a scaler has scaled, as it was before.
        self._unscaled: Any = None

    def install(self) -> None:
        """Look at every call of ``backward``, if any losses are to be reported."""
        if not self._left:
            return
        import torch

        original, scale = torch.Tensor.backward, torch.amp.GradScaler.scale

        @wraps(scale)
        def scaling(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if self._left and isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                # The scale is not part of the loss.
                self._unscaled = outputs.detach()
            return scaled

        @wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._left and tensor.numel() == 1 and self._ours() and not is_capturing():
                self._left -= 1
                unscaled, self._unscaled = self._unscaled, None
                self._tell(tensor.detach() if unscaled is None else unscaled)
                if not self._left and torch.Tensor.backward is backward:
                    torch.Tensor.backward = original  # type: ignore[method-assign]
                    if torch.amp.GradScaler.scale is scaling:
                        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
            return original(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
        torch.amp.GradScaler.scale = scaling  # type: ignore[method-assign, assignment]


# Measures how long a loader takes to make a batch, in whichever process.

#: The most data sets to count at a time; a script may make its data set anew for each epoch.
_DATASETS = 64
#: Workers with a place of their own; any more share places, and if two write at once, one count may be lost.
_PLACES = 512
_SHAPE = struct.Struct("dq")


class Making:
    """Adds up the seconds and the number of batches of each data set, in memory that forked workers share.

    Spawned workers are not counted.
    """

    def __init__(self) -> None:
        # By the address of the data set, which is the same in a forked worker as in its parent.
        self._counts: dict[int, mmap.mmap] = {}

    def install(self) -> None:
        """Time all batches that are made from now on, here or in workers that are forked."""
        from torch.utils.data._utils import fetch

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._time(kind)

    def _time(self, kind: Any) -> None:
        original = kind.fetch

        @wraps(original)
        def timed(fetcher: Any, *args: Any) -> Any:
            counts = self._counts.get(id(fetcher.dataset))
            if counts is None:
                return original(fetcher, *args)
            start = time.perf_counter()
            batch = original(fetcher, *args)
            _add(counts, time.perf_counter() - start)
            return batch

        kind.fetch = timed

    def expect(self, dataset: Any) -> None:
        """Count the batches of a data set whose loader is about to be iterated over."""
        if id(dataset) not in self._counts:
            while len(self._counts) >= _DATASETS:
                del self._counts[next(iter(self._counts))]
            self._counts[id(dataset)] = mmap.mmap(-1, _PLACES * _SHAPE.size)

    def stop(self) -> None:
        """Count no longer."""
        self._counts = {}

    def made(self, dataset: Any) -> tuple[float, int]:
        """Return the seconds in which batches of a data set were made, added up over workers, and their number."""
        counts = self._counts.get(id(dataset))
        if counts is None:
            return 0.0, 0
        places = list(_SHAPE.iter_unpack(counts[:]))
        return sum(seconds for seconds, _ in places), sum(number for _, number in places)


def _add(counts: mmap.mmap, more_s: float) -> None:
    at = os.getpid() % _PLACES * _SHAPE.size
    seconds, number = _SHAPE.unpack_from(counts, at)
    _SHAPE.pack_into(counts, at, seconds + more_s, number + 1)


# Counts backward passes, and the updates that a gradient scaler skips.


class Passes:
    """Counts backward passes that have ended without an error, outside of an optimizer's step, as how often a step
    calls its closure depends on the numbers. It also counts the updates that a `GradScaler` skips because gradients
    have overflowed, for which the configuration on trial is not to blame.

    Args:
        steps: returns the steps that an optimizer has taken; ``None`` if it is not known.
        is_stepping: returns whether an optimizer is in the middle of a step.
    """

    def __init__(self, steps: Callable[[Any], int | None], is_stepping: Callable[[], bool]) -> None:
        self._steps, self._is_stepping = steps, is_stepping
        self._backwards = self._left_out = 0
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Start counting."""
        import torch

        original_backward, original_step = torch.autograd.backward, torch.amp.GradScaler.step

        @wraps(original_backward)
        def backward(*args: Any, **kwargs: Any) -> None:
            original_backward(*args, **kwargs)
            if not self._is_stepping():
                self._backwards += 1

        @wraps(original_step)
        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps(optimizer)
            result = original_step(scaler, optimizer, *args, **kwargs)
            self._left_out += before is not None and self._steps(optimizer) == before
            return result

        self._put(torch.autograd, "backward", backward, original_backward)
        self._put(torch.amp.GradScaler, "step", scaled_step, original_step)

    def _put(self, holder: Any, name: str, ours: Any, theirs: Any) -> None:
        setattr(holder, name, ours)

        def undo() -> None:
            if getattr(holder, name) is ours:
                setattr(holder, name, theirs)

        self._undo.append(undo)

    def stop(self) -> None:
        """Count no longer."""
        while self._undo:
            self._undo.pop()()

    def take(self) -> tuple[int, int]:
        """Return the numbers of backward passes and of skipped updates since the last call."""
        counts = self._backwards, self._left_out
        self._backwards = self._left_out = 0
        return counts


# Records what a training does: its loaders, batches and the waits for them, steps, memory, and what ends it.

#: Lines are written together, at most once in so many seconds, so that watching costs little where steps are short.
_EVERY_S = 0.1
#: If no step ends for so many seconds, but batches come, a line says so.
_ALIVE_S = 1.0


class TrainingObserver:
    """Watches loaders, steps and exceptions, and writes what they do (see `TrailWriter`).

    Args:
        path: the file, which is appended to.
        ours: returns whether this process may be the one that trains.
        optimizers: the door that sees the steps of optimizers.
        losses: for how many calls of ``backward`` to write the loss; each waits for the device.
    """

    def __init__(self, path: str, ours: Callable[[], bool], optimizers: OptimizerDoor, losses: int = 0) -> None:
        self._trail = TrailWriter(path)
        self._ours = ours
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: By number, the looks of the loader that has it now.
        self._same: dict[int, _Looks] = {}
        self._numbers = itertools.count()
        #: Since the last step, by loader: batches, samples (``None`` if not known), seconds of waiting.
        self._batches: dict[int, list[Any]] = {}
        #: Loaders whose batches are as long as they say.
        self._in_rows: set[int] = set()
        # On CUDA, marks before and after the waits since the last step.
        self._waits: list[tuple[Any, Any]] = []
        self._wrong: Exception | None = None
        self._stopped = False
        #: The thread that trains.
        self._thread: int | None = None
        #: Patched functions: the holder, the name, our replacement, and the original.
        self._patched: list[tuple[Any, str, Any, Any]] = []
        self._making = Making()
        self._losses = Losses(losses, ours, self._loss)
        self._passes = Passes(optimizers.steps_of, lambda: optimizers.is_stepping)

    def install(self) -> None:
        """Watch loaders and exceptions. Called when ``import torch`` has just ended."""
        import torch
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._trail.note("torch", version=str(torch.__version__), cuda=torch.version.cuda)
        self._trail.flush()
        original_iter, original_next, original_get = (
            DataLoader.__iter__,
            _BaseDataLoaderIter.__next__,
            DataLoader._get_iterator,
        )

        self._making.install()

        def iterate_by(start: Callable[[Any], Any], loader: Any) -> Any:
            if not self._ours():
                return start(loader)
            trains = torch.is_grad_enabled()
            if trains:
                # Before the loader's workers are forked.
                self._making.expect(loader.dataset)
            before, start_s = self._safely(self._trail.wait_mark) if trains else None, time.monotonic()
            iterator = start(loader)
            self._safely(self._iterated, loader, iterator, time.monotonic() - start_s)
            if before is not None:
                self._waits.append((before, self._safely(self._trail.wait_mark)))
            return iterator

        @wraps(original_iter)
        def iterate(loader: Any) -> Any:
            with beginning(loader):
                return iterate_by(original_iter, loader)

        @wraps(original_get)
        def get_iterator(loader: Any) -> Any:
            return iterate_by(original_get, loader) if iterates_itself(loader) else original_get(loader)

        @wraps(original_next)
        def next_batch(iterator: Any) -> Any:
            number, samples = iterator.__dict__.get("_autotune", (None, None))
            if number is None or not self._ours():
                batch = original_next(iterator)
                if self._ours():
                    self._safely(self._alive)
                return batch
            before = self._safely(self._trail.wait_mark)
            start_s = time.monotonic()
            try:
                batch = original_next(iterator)
            except StopIteration:
                iterator._autotune_over = True
                raise
            waited = time.monotonic() - start_s
            self._safely(self._took, number, samples, batch, waited)
            if before is not None:
                self._waits.append((before, self._safely(self._trail.wait_mark)))
            return batch

        self._patched = [
            (DataLoader, "__iter__", iterate, original_iter),
            (DataLoader, "_get_iterator", get_iterator, original_get),
            (_BaseDataLoaderIter, "__next__", next_batch, original_next),
        ]
        for holder, name, replacement, _ in self._patched:
            setattr(holder, name, replacement)
        self._losses.install()
        self._passes.install()
        self._install_hooks()

    def _install_hooks(self) -> None:
        """Note uncaught exceptions, in the main thread or in another."""
        hook_before, thread_hook_before = sys.excepthook, threading.excepthook

        def hook(kind: Any, error: Any, trace: Any) -> None:
            self._tell(error)
            hook_before(kind, error, trace)

        def thread_hook(args: Any) -> None:
            ident = None if args.thread is None else args.thread.ident
            self._tell(args.exc_value, thread=True, trains=ident is not None and ident == self._thread)
            thread_hook_before(args)

        sys.excepthook = hook
        threading.excepthook = thread_hook

    def _tell(self, error: BaseException | None, **facts: Any) -> None:
        """Note an uncaught exception, even if watching has failed: that is where a failed card shows first."""
        if not self._ours() or self._stopped:
            return
        for _ in range(2):
            # The death of a worker is raised from a signal handler, perhaps in here, hence the second attempt.
            with contextlib.suppress(Exception):
                self._raised(error, facts)
                break

    def stop(self) -> None:
        """Stop watching: restore what was patched, unless somebody else has wrapped it meanwhile."""
        self._safely(self._trail.end)
        self._stopped = True
        self._making.stop()
        self._passes.stop()
        for holder, name, replacement, original in self._patched:
            if getattr(holder, name) is replacement:
                setattr(holder, name, original)

    def _loss(self, value: Any) -> None:
        self._safely(self._noted_loss, value)

    def _noted_loss(self, value: Any) -> None:
        self._trail.note("loss", value=float(value))
        self._trail.flush()

    def began(self) -> None:
        """Note that this process trains."""
        self._safely(self._began)

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has taken a step."""
        self._safely(self._stepped, optimizer)

    def unseen(self, how: str) -> None:
        """Note that the script trains without visible steps."""
        self._safely(self._noted_unseen, how)

    def _noted_unseen(self, how: str) -> None:
        self._trail.note("unseen", how=how)
        self._trail.flush()

    def end(self) -> None:
        """Write what is left, as the process ends."""
        if self._ours():
            self._safely(self._trail.end)

    def report(self, own: dict[str, Any], answers: list[list[Any]]) -> None:
        """Note what the script does itself, and what could be set."""
        self._safely(self._report, own, answers)

    def _report(self, own: dict[str, Any], answers: list[list[Any]]) -> None:
        device = own["model"].get("device") or own["optimizer"].get("device", "cpu")
        self._trail.note("own", **own, machine=machine(device, own["model"].get("index")), answers=answers)
        self._trail.flush()

    def _safely(self, act: Callable[..., Any], *told: Any) -> Any:
        """Call a function; whatever goes wrong in it, the training goes on."""
        if self._wrong is None and not self._stopped:
            try:
                return act(*told)
            except Exception as error:
                if is_of_a_worker(error):
                    raise
                self._wrong = error
                why = f"{type(error).__name__}: {error}"
                say(f"the training is watched no longer: {why}")
                with contextlib.suppress(Exception):
                    self._trail.note("lost", why=why)
                    self._trail.flush()
        return None

    def _began(self) -> None:
        self._thread = threading.get_ident()
        self._trail.note("begin", pid=os.getpid())
        self._trail.flush()

    def _iterated(self, loader: Any, iterator: Any, took_s: float) -> None:
        import torch

        number = self._number_of(loader) if torch.is_grad_enabled() else None
        # Batches that no step has used yet belong to the previous epoch.
        self._trail.note("epoch", l=number, batches=self._taken(), start=round(took_s, 6))
        # Iterators of other libraries' loaders may have no place for it.
        if hasattr(iterator, "__dict__"):
            iterator._autotune = (number, batch_size(loader))
        if number is not None:
            self._same[number].iterator = _reference(iterator)

    def _took(self, number: int, samples: int | None, batch: Any, waited: float) -> None:
        totals = self._batches.setdefault(number, [0, 0, 0.0])
        found = samples_in(batch)
        if samples and found == samples:
            self._in_rows.add(number)
        # The last batch of an epoch may have fewer samples than the loader says.
        size = found if samples and found and found < samples and number in self._in_rows else samples or found
        totals[0] += 1
        totals[1] = None if size is None or totals[1] is None else totals[1] + size
        totals[2] += waited
        self._alive()

    def _taken(self) -> list[list[Any]]:
        batches, self._batches = self._batches, {}
        return [[number, count, samples, round(waited, 6)] for number, (count, samples, waited) in batches.items()]

    def _alive(self) -> None:
        """Let the supervisor know, now and then, that the process is working even if no step ends."""
        if time.monotonic() - self._trail.written_s > _ALIVE_S:
            self._trail.note("alive")
            self._trail.flush()

    def _raised(self, error: BaseException | None, facts: dict[str, Any]) -> None:
        self._trail.drop_ahead()
        self._trail.note("raised", chain=chain(error), pid=os.getpid(), **facts)
        self._trail.flush()

    def _stepped(self, optimizer: Any) -> None:
        now = time.monotonic()
        self._thread = threading.get_ident()
        number = self._optimizers.get(optimizer)
        if number is None:
            number = self._optimizers[optimizer] = next(self._numbers)
        backwards, left_out = self._passes.take()
        line = f'{{"e":"step","at":{now:.6f},"o":{number},"batches":{json.dumps(self._taken())},"backwards":{backwards}'
        if left_out:
            line = f'{line},"left_out":{left_out}'
        mark = self._trail.step_mark(optimizer)
        self._trail.begins_at(mark)
        waits, self._waits = self._waits, []
        self._trail.note_ahead(mark, line, waits)
        if now - self._trail.written_s > _EVERY_S:
            if mark is not None:
                self._trail.note_memory()
            for loader, loader_number in list(self._loaders.items()):
                seconds, batches = self._making.made(loader.dataset)
                self._trail.note("made", l=loader_number, seconds=round(seconds, 6), batches=batches)
            self._trail.flush()

    def turn(self, optimizer: Any, why: str | None) -> None:
        """Note that a turn begins.

        Args:
            why: the reason, if its configuration could not be put in force.
        """
        self._safely(self._turn, optimizer, why)

    def _turn(self, optimizer: Any, why: str | None) -> None:
        # Each entrant has its own peaks, and gets the memory that the last one kept reserved.
        self._trail.forget_memory()
        text = json.dumps({"e": "turn", "at": round(time.monotonic(), 6), "why": why})[:-1]
        self._trail.note_ahead(self._trail.step_mark(optimizer), text, [])
        self._trail.flush()

    def ready(self) -> None:
        """Note that a turn is over, once the device has got to its end."""
        self._safely(self._ready)

    def _ready(self) -> None:
        self._trail.catch_up()
        self._trail.note("ready")
        self._trail.flush()

    def loaded(self, **facts: Any) -> None:
        """Note what the loader has delivered by itself."""
        self._safely(self._loaded, facts)

    def _loaded(self, facts: dict[str, Any]) -> None:
        self._trail.note("loaded", **facts)
        self._trail.flush()

    def failed(self, why: str, *, lost: bool) -> None:
        """Note that a configuration on trial has failed.

        Args:
            lost: whether the step in which it failed has trained nothing.
        """
        self._safely(self._failed, why, lost)

    def _failed(self, why: str, lost: bool) -> None:
        self._trail.note("failed", why=why, lost=lost)
        self._trail.flush()

    def _number_of(self, loader: Any) -> int:
        number = self._loaders.get(loader)
        if number is None:
            looks = _Looks(loader)
            number = next((n for n, before in self._same.items() if looks.goes_on_for(before)), None)
            if number is not None:
                # A loader that is made anew for an epoch keeps its number.
                self._same[number] = looks
                self._loaders[loader] = number
        if number is None:
            number = self._loaders[loader] = next(self._numbers)
            self._same[number] = looks
            self._trail.note(
                "loader",
                l=number,
                arguments={
                    "batch_size": batch_size(loader),
                    "num_workers": loader.num_workers,
                    "prefetch_factor": loader.prefetch_factor,
                    "pin_memory": bool(loader.pin_memory),
                    "persistent_workers": bool(loader.persistent_workers),
                },
                ahead=loader.num_workers * (loader.prefetch_factor or 0),
                batches=length(loader),
            )
        return number


class _Looks:
    """Identifies a loader that is made anew for each epoch.

    Attributes:
        iterator: a weak reference to the iterator of its last epoch; ``None`` if it allows none.
    """

    def __init__(self, loader: Any) -> None:
        self.iterator: Any = None
        self._dataset = _reference(loader.dataset)
        self._kind = type(loader.dataset)
        self._shape = (batch_size(loader), length(loader), _length(loader.dataset))

    def goes_on_for(self, before: _Looks) -> bool:
        """Whether this is an earlier loader, made anew: the epoch of that one is over, and both have the same data set,
        or that of the earlier one is gone, and this one's is like it."""
        iterator = None if before.iterator is None else before.iterator()
        if iterator is not None and not getattr(iterator, "_autotune_over", False):
            return False
        if self._kind is not before._kind or self._shape != before._shape:
            return False
        dataset, dataset_before = (None if looks._dataset is None else looks._dataset() for looks in (self, before))
        if dataset_before is not None:
            return dataset is dataset_before
        return self._shape[2] is not None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None


def _reference(held: Any) -> Any:
    """Return a weak reference; ``None`` for objects that allow none, such as a list."""
    try:
        return weakref.ref(held)
    except TypeError:
        return None
