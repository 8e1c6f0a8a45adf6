"""Writes down what a training does: its loaders, batches and the waits for them, steps, memory, and what ends it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

from autotune_agent.begun import beginning, iterates_itself
from autotune_agent.facts import batch_size, chain, is_capturing, length, machine, samples_in
from autotune_agent.losses import Losses
from autotune_agent.making import Making
from autotune_agent.setting import is_of_a_worker, say

#: Lines are written together, at most this often, so that watching costs little where steps are short.
_EVERY_S = 0.1
#: If no step ends for so long, but batches come, a line says so.
_ALIVE_S = 1.0


class Watching:
    """Writes events to a file, one JSON object a line, each with ``e``, its kind, and ``at``, on the monotonic clock,
    which all processes of a Linux machine share.

    ============  ==================================================================================================
    ``torch``     has been imported: ``version``, ``cuda``
    ``alive``     batches have come, but no step has ended for some time
    ``lost``      nothing more will be written: ``why``
    ``begin``     this process, ``pid``, trains: it has called a model with gradients on, or an optimizer
    ``loader``    is first iterated over: ``l`` (its number), ``arguments`` (by the names of `DataLoader`), ``ahead``
                  (batches that its workers make in advance), ``batches`` (an epoch's, or null), ``kind``
    ``epoch``     of a loader begins: ``l``, or null if gradients are off; ``batches`` as below
    ``made``      so far, from the data set of ``l``: ``batches``, in ``seconds``, added up over workers
    ``step``      of an optimizer has ended: ``o`` (its number), ``batches`` (of loaders since the last step, each
                  ``[l, batches, samples or null, wait in s]``); on CUDA ``device`` (s of the device's clock since the
                  first step; the line is written when the device has got there) and ``stalled`` (s of that clock in
                  which the device had nothing to do while the script waited for batches)
    ``turn``      another configuration has been switched to (``why``: or could not be); ``device`` as of a step
    ``ready``     a turn is over, and the next command is waited for
    ``loaded``    the loader has delivered by itself: ``batches``, ``samples``, ``seconds``, or ``raised``, a chain
    ``failed``    a configuration that was tried has failed in the middle of a step (``why``), and the script's own is
                  in force again; ``lost``: that step has trained nothing
    ``loss``      ``backward`` is called: ``value``, of as many as were asked for
    ``own``       all has been seen: ``process``, ``model``, ``optimizer``, each with facts about the script's own;
                  ``machine``; and ``answers`` to what was asked, each ``[knob, value, why not, or null]``
    ``memory``    CUDA, now and then: ``reserved``, ``allocated``, peaks in bytes
    ``raised``    nobody has caught an exception in process ``pid``: ``chain``, each link ``[type's name, those of its
                  bases, message, {errno, filename, frames}]``, each frame ``[file, line]``, the innermost last
    ============  ==================================================================================================

    Args:
        path: of the file; it is appended to.
        ours: returns whether this process may be the one that trains.
        losses: of how many calls of ``backward`` to write the loss; each waits for the device.
    """

    def __init__(self, path: str, ours: Callable[[], bool], losses: int = 0) -> None:
        self._path = path
        self._ours = ours
        self._lines: list[str] = []
        self._written = 0.0
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        #: Since the last step, by loader: batches, samples (or none, if that is not known), seconds of waiting.
        self._batches: dict[int, list[Any]] = {}
        # What is to be written once the device has got to a step, in order.
        self._ahead: deque[tuple[Any, str, list[tuple[Any, Any]]]] = deque()
        self._first: Any = None
        #: The card of the first step.
        self._device: Any = None
        # On CUDA, marks before and after the waits since the last step.
        self._waits: list[tuple[Any, Any]] = []
        self._wrong: Exception | None = None
        self._stopped = False
        #: What holds a function of ours, its name, ours, and theirs.
        self._patched: list[tuple[Any, str, Any, Any]] = []
        self._making = Making()
        self._losses = Losses(losses, ours, self._loss)

    def install(self) -> None:
        """Watch loaders and exceptions. ``import torch`` has just ended."""
        import torch
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._note("torch", version=str(torch.__version__), cuda=torch.version.cuda)
        self._flush()
        begin, take, get = DataLoader.__iter__, _BaseDataLoaderIter.__next__, DataLoader._get_iterator

        self._making.install()

        def iterate_by(start: Callable[[Any], Any], loader: Any) -> Any:
            if self._ours() and torch.is_grad_enabled():
                # Before its workers are forked.
                self._making.expect(loader.dataset)
            iterator = start(loader)
            if self._ours():
                self._safely(self._iterated, loader, iterator)
            return iterator

        @wraps(begin)
        def iterate(loader: Any) -> Any:
            with beginning(loader):
                return iterate_by(begin, loader)

        @wraps(get)
        def get_iterator(loader: Any) -> Any:
            return iterate_by(get, loader) if iterates_itself(loader) else get(loader)

        @wraps(take)
        def next_batch(iterator: Any) -> Any:
            number, samples = iterator.__dict__.get("_autotune", (None, None))
            if number is None or not self._ours():
                batch = take(iterator)
                if self._ours():
                    self._safely(self._alive)
                return batch
            before = self._safely(self._device_mark)
            asked = time.monotonic()
            batch = take(iterator)
            waited = time.monotonic() - asked
            self._safely(self._took, number, samples, batch, waited)
            if before is not None:
                self._waits.append((before, self._safely(self._device_mark)))
            return batch

        self._patched = [
            (DataLoader, "__iter__", iterate, begin),
            (DataLoader, "_get_iterator", get_iterator, get),
            (_BaseDataLoaderIter, "__next__", next_batch, take),
        ]
        for holder, name, ours, _ in self._patched:
            setattr(holder, name, ours)
        self._losses.install()
        told = sys.excepthook

        def hook(kind: Any, error: Any, trace: Any) -> None:
            if self._ours() and not self._stopped:
                # Also if watching has gone wrong: a card that has failed is first seen there.
                for _ in range(2):
                    # That a worker has died is raised from a signal handler, perhaps in here, and once more.
                    with contextlib.suppress(Exception):
                        self._raised(error)
                        break
            told(kind, error, trace)

        sys.excepthook = hook

    def stop(self) -> None:
        """Watch no longer: loaders are as they were, but for those of others who have wrapped them meanwhile."""
        self._safely(self._end)
        self._stopped = True
        self._making.stop()
        for holder, name, ours, theirs in self._patched:
            if getattr(holder, name) is ours:
                setattr(holder, name, theirs)

    def _loss(self, value: Any) -> None:
        self._safely(self._noted_loss, value)

    def _noted_loss(self, value: Any) -> None:
        self._note("loss", value=float(value))
        self._flush()

    def began(self) -> None:
        """Note that this process trains."""
        self._safely(self._began)

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has taken a step."""
        self._safely(self._stepped, optimizer)

    def end(self) -> None:
        """Write what is left. The process ends."""
        if self._ours():
            self._safely(self._end)

    def _end(self) -> None:
        # It is not waited for the device, which may hang.
        self._lines += [text + "}\n" for _, text, _ in self._ahead]
        self._ahead.clear()
        self._flush()

    def report(self, own: dict[str, Any], answers: list[list[Any]]) -> None:
        """Note what the script does itself, and what could be set."""
        self._safely(self._report, own, answers)

    def _report(self, own: dict[str, Any], answers: list[list[Any]]) -> None:
        device = own["model"].get("device") or own["optimizer"].get("device", "cpu")
        self._note("own", **own, machine=machine(device, own["model"].get("index")), answers=answers)
        self._flush()

    def _safely(self, act: Callable[..., Any], *told: Any) -> Any:
        """Whatever goes wrong here, the training goes on."""
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
                    self._note("lost", why=why)
                    self._flush()
        return None

    def _began(self) -> None:
        self._note("begin", pid=os.getpid())
        self._flush()

    def _iterated(self, loader: Any, iterator: Any) -> None:
        import torch

        number = self._number_of(loader) if torch.is_grad_enabled() else None
        # Batches that no step has used belong to the epoch before.
        self._note("epoch", l=number, batches=self._taken())
        # Iterators of others' loaders may have no place for it.
        if hasattr(iterator, "__dict__"):
            iterator._autotune = (number, batch_size(loader))

    def _device_mark(self) -> Any:
        """Return a mark at the end of what the device has been given; ``None`` before a step on CUDA has been seen."""
        import torch

        if self._first is None or is_capturing():
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def _mark(self, optimizer: Any) -> Any:
        """Return a mark at the end of what an optimizer's card has been given; ``None`` if that is no card, or another
        one than that of the first step."""
        import torch

        device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        if device is None or device.type != "cuda" or self._device not in (None, device):
            return None
        self._device = device
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(device))
        return mark

    def _took(self, number: int, samples: int | None, batch: Any, waited: float) -> None:
        found = self._batches.setdefault(number, [0, 0, 0.0])
        more = samples or samples_in(batch)
        found[0] += 1
        found[1] = None if more is None or found[1] is None else found[1] + more
        found[2] += waited
        self._alive()

    def _taken(self) -> list[list[Any]]:
        batches, self._batches = self._batches, {}
        return [[number, count, samples, round(waited, 6)] for number, (count, samples, waited) in batches.items()]

    def _alive(self) -> None:
        """Let the supervisor know, now and then, that something goes on even if no step ends."""
        if time.monotonic() - self._written > _ALIVE_S:
            self._note("alive")
            self._flush()

    def _raised(self, error: BaseException | None) -> None:
        # The device may never get to what is ahead.
        self._ahead.clear()
        self._note("raised", chain=chain(error), pid=os.getpid())
        self._flush()

    def _stepped(self, optimizer: Any) -> None:
        now = time.monotonic()
        number = self._optimizers.get(optimizer)
        if number is None:
            number = self._optimizers[optimizer] = next(self._numbers)
        line = f'{{"e":"step","at":{now:.6f},"o":{number},"batches":{json.dumps(self._taken())}'
        mark = self._mark(optimizer)
        self._first = self._first or mark
        waits, self._waits = self._waits, []
        self._ahead.append((mark, line, waits))
        self._write_reached()
        if now - self._written > _EVERY_S:
            if mark is not None:
                self._note_memory()
            for loader, known in list(self._loaders.items()):
                seconds, batches = self._making.made(loader.dataset)
                self._note("made", l=known, seconds=round(seconds, 6), batches=batches)
            self._flush()

    def _catch_up(self) -> None:
        import torch

        if self._first is not None:
            torch.cuda.synchronize(self._device)
            self._write_reached()
            self._note_memory()
        self._flush()

    def turn(self, optimizer: Any, why: str | None) -> None:
        """Note that a turn begins.

        Args:
            why: it could not be switched to.
        """
        self._safely(self._turn, optimizer, why)

    def _turn(self, optimizer: Any, why: str | None) -> None:
        import torch

        if self._first is not None:
            # Peaks are each entrant's own, and it gets the memory that the last one has kept for itself.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        text = json.dumps({"e": "turn", "at": round(time.monotonic(), 6), "why": why})[:-1]
        self._ahead.append((self._mark(optimizer), text, []))
        self._write_reached()
        self._flush()

    def ready(self) -> None:
        """Note that a turn is over, when the device has got to its end."""
        self._safely(self._ready)

    def _ready(self) -> None:
        self._catch_up()
        self._note("ready")
        self._flush()

    def loaded(self, **facts: Any) -> None:
        """Note how the loader has delivered by itself."""
        self._safely(self._loaded, facts)

    def _loaded(self, facts: dict[str, Any]) -> None:
        self._note("loaded", **facts)
        self._flush()

    def failed(self, why: str, *, lost: bool) -> None:
        """Note that a configuration that was tried has failed.

        Args:
            lost: the step in which it did has trained nothing.
        """
        self._safely(self._failed, why, lost)

    def _failed(self, why: str, lost: bool) -> None:
        self._note("failed", why=why, lost=lost)
        self._flush()

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

    def _number_of(self, loader: Any) -> int:
        number = self._loaders.get(loader)
        if number is None:
            number = self._loaders[loader] = next(self._numbers)
            self._note(
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
                kind=type(loader.dataset).__name__,
            )
        return number

    def _note_memory(self) -> None:
        import torch

        peaks = {
            "reserved": torch.cuda.max_memory_reserved(self._device),
            "allocated": torch.cuda.max_memory_allocated(self._device),
        }
        self._note("memory", **peaks)

    def _note(self, event: str, **facts: Any) -> None:
        text = json.dumps({"e": event, "at": round(time.monotonic(), 6), **facts})[:-1]
        if self._ahead:
            self._ahead.append((None, text, []))
        else:
            self._lines.append(text + "}\n")

    def _flush(self) -> None:
        self._written = time.monotonic()
        lines, self._lines = self._lines, []
        # Opened each time: a script may close descriptors that it does not know, and open its own in their place.
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, "".join(lines).encode())
            finally:
                os.close(descriptor)
