"""Writes down what a training does: its loaders, batches and the waits for them, steps, memory, and what ends it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from autotune_agent.begun import beginning, iterates_itself
from autotune_agent.facts import batch_size, chain, length, machine, samples_in
from autotune_agent.losses import Losses
from autotune_agent.making import Making
from autotune_agent.optimizers import OptimizerDoor
from autotune_agent.passes import Passes
from autotune_agent.setting import is_of_a_worker, say
from autotune_agent.trail_writer import TrailWriter

#: Lines are written together, at most this often, so that watching costs little where steps are short.
_EVERY_S = 0.1
#: If no step ends for so long, but batches come, a line says so.
_ALIVE_S = 1.0


class Watching:
    """Watches loaders, steps and exceptions, and writes what they do (see `TrailWriter`).

    Args:
        path: of the file; it is appended to.
        ours: returns whether this process may be the one that trains.
        optimizers: the door at which their steps are seen.
        losses: of how many calls of ``backward`` to write the loss; each waits for the device.
    """

    def __init__(self, path: str, ours: Callable[[], bool], optimizers: OptimizerDoor, losses: int = 0) -> None:
        self._trail = TrailWriter(path)
        self._ours = ours
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: By number, of the loader that has it now.
        self._same: dict[int, _Looks] = {}
        self._numbers = itertools.count()
        #: Since the last step, by loader: batches, samples (or none, if that is not known), seconds of waiting.
        self._batches: dict[int, list[Any]] = {}
        # On CUDA, marks before and after the waits since the last step.
        self._waits: list[tuple[Any, Any]] = []
        self._wrong: Exception | None = None
        self._stopped = False
        #: The thread that trains.
        self._thread: int | None = None
        #: What holds a function of ours, its name, ours, and theirs.
        self._patched: list[tuple[Any, str, Any, Any]] = []
        self._making = Making()
        self._losses = Losses(losses, ours, self._loss)
        self._passes = Passes(optimizers.steps_of, lambda: optimizers.is_stepping)

    def install(self) -> None:
        """Watch loaders and exceptions. ``import torch`` has just ended."""
        import torch
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._trail.note("torch", version=str(torch.__version__), cuda=torch.version.cuda)
        self._trail.flush()
        begin, take, get = DataLoader.__iter__, _BaseDataLoaderIter.__next__, DataLoader._get_iterator

        self._making.install()

        def iterate_by(start: Callable[[Any], Any], loader: Any) -> Any:
            if not self._ours():
                return start(loader)
            trains = torch.is_grad_enabled()
            if trains:
                # Before its workers are forked.
                self._making.expect(loader.dataset)
            before, asked = self._safely(self._trail.wait_mark) if trains else None, time.monotonic()
            iterator = start(loader)
            self._safely(self._iterated, loader, iterator, time.monotonic() - asked)
            if before is not None:
                self._waits.append((before, self._safely(self._trail.wait_mark)))
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
            before = self._safely(self._trail.wait_mark)
            asked = time.monotonic()
            try:
                batch = take(iterator)
            except StopIteration:
                iterator._autotune_over = True
                raise
            waited = time.monotonic() - asked
            self._safely(self._took, number, samples, batch, waited)
            if before is not None:
                self._waits.append((before, self._safely(self._trail.wait_mark)))
            return batch

        self._patched = [
            (DataLoader, "__iter__", iterate, begin),
            (DataLoader, "_get_iterator", get_iterator, get),
            (_BaseDataLoaderIter, "__next__", next_batch, take),
        ]
        for holder, name, ours, _ in self._patched:
            setattr(holder, name, ours)
        self._losses.install()
        self._passes.install()
        self._install_hooks()

    def _install_hooks(self) -> None:
        """Note what nobody catches, in the main thread or in another."""
        told, told_of_threads = sys.excepthook, threading.excepthook

        def hook(kind: Any, error: Any, trace: Any) -> None:
            self._tell(error)
            told(kind, error, trace)

        def thread_hook(args: Any) -> None:
            ident = None if args.thread is None else args.thread.ident
            self._tell(args.exc_value, thread=True, trains=ident is not None and ident == self._thread)
            told_of_threads(args)

        sys.excepthook = hook
        threading.excepthook = thread_hook

    def _tell(self, error: BaseException | None, **facts: Any) -> None:
        """Note what nobody has caught, also if watching has gone wrong: a card that has failed is first seen there."""
        if not self._ours() or self._stopped:
            return
        for _ in range(2):
            # That a worker has died is raised from a signal handler, perhaps in here, and once more.
            with contextlib.suppress(Exception):
                self._raised(error, facts)
                break

    def stop(self) -> None:
        """Watch no longer: loaders are as they were, but for those of others who have wrapped them meanwhile."""
        self._safely(self._trail.end)
        self._stopped = True
        self._making.stop()
        self._passes.stop()
        for holder, name, ours, theirs in self._patched:
            if getattr(holder, name) is ours:
                setattr(holder, name, theirs)

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
        """Note that the script trains without steps that can be seen."""
        self._safely(self._noted_unseen, how)

    def _noted_unseen(self, how: str) -> None:
        self._trail.note("unseen", how=how)
        self._trail.flush()

    def end(self) -> None:
        """Write what is left. The process ends."""
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
        # Batches that no step has used belong to the epoch before.
        self._trail.note("epoch", l=number, batches=self._taken(), start=round(took_s, 6))
        # Iterators of others' loaders may have no place for it.
        if hasattr(iterator, "__dict__"):
            iterator._autotune = (number, batch_size(loader))
        if number is not None:
            self._same[number].iterator = _reference(iterator)

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
            for loader, known in list(self._loaders.items()):
                seconds, batches = self._making.made(loader.dataset)
                self._trail.note("made", l=known, seconds=round(seconds, 6), batches=batches)
            self._trail.flush()

    def turn(self, optimizer: Any, why: str | None) -> None:
        """Note that a turn begins.

        Args:
            why: it could not be switched to.
        """
        self._safely(self._turn, optimizer, why)

    def _turn(self, optimizer: Any, why: str | None) -> None:
        # Peaks are each entrant's own, and it gets the memory that the last one has kept for itself.
        self._trail.forget_memory()
        text = json.dumps({"e": "turn", "at": round(time.monotonic(), 6), "why": why})[:-1]
        self._trail.note_ahead(self._trail.step_mark(optimizer), text, [])
        self._trail.flush()

    def ready(self) -> None:
        """Note that a turn is over, when the device has got to its end."""
        self._safely(self._ready)

    def _ready(self) -> None:
        self._trail.catch_up()
        self._trail.note("ready")
        self._trail.flush()

    def loaded(self, **facts: Any) -> None:
        """Note how the loader has delivered by itself."""
        self._safely(self._loaded, facts)

    def _loaded(self, facts: dict[str, Any]) -> None:
        self._trail.note("loaded", **facts)
        self._trail.flush()

    def failed(self, why: str, *, lost: bool) -> None:
        """Note that a configuration that was tried has failed.

        Args:
            lost: the step in which it did has trained nothing.
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
                # Made anew for an epoch, it is what it was before.
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
                kind=type(loader.dataset).__name__,
            )
        return number


class _Looks:
    """What a loader is told by, if it is made anew for each epoch.

    Attributes:
        iterator: refers to that of its last epoch; ``None`` if nothing can.
    """

    def __init__(self, loader: Any) -> None:
        self.iterator: Any = None
        self._dataset = _reference(loader.dataset)
        self._kind = type(loader.dataset)
        self._shape = (batch_size(loader), length(loader), _length(loader.dataset))

    def goes_on_for(self, before: _Looks) -> bool:
        """Whether it is the loader that was there before, made anew: over the same data set, or over one like it whose
        last one is gone, and the epoch before is over."""
        iterator = None if before.iterator is None else before.iterator()
        if iterator is not None and not getattr(iterator, "_autotune_over", False):
            return False
        if self._kind is not before._kind or self._shape != before._shape:
            return False
        own, last = (None if looks._dataset is None else looks._dataset() for looks in (self, before))
        if last is not None:
            return own is last
        return self._shape[2] is not None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None


def _reference(held: Any) -> Any:
    """Return a weak reference; ``None`` to what has none, such as a list."""
    try:
        return weakref.ref(held)
    except TypeError:
        return None
