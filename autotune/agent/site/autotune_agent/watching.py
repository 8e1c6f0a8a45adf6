"""Writes down what a training does: its loaders, batches and the waits for them, steps, memory, and what ends it."""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

#: Lines are written together, at most this often, so that watching costs little where steps are short.
_EVERY_S = 0.1
#: Links of a chain of exceptions that are told.
_LINKS = 10


class Watching:
    """Writes events to a file, one JSON object a line, each with ``e``, its kind, and ``at``, on the monotonic clock,
    which all processes of a Linux machine share.

    ============  ==================================================================================================
    ``torch``     has been imported: ``version``, ``cuda``
    ``begin``     this process trains: it has called a model with gradients on, or an optimizer
    ``loader``    is first iterated over: ``l`` (its number), ``arguments`` (by the names of `DataLoader`), ``ahead``
                  (batches that its workers make in advance), ``batches`` (an epoch's, or null), ``kind``
    ``epoch``     of a loader begins: ``l``, or null if gradients are off
    ``step``      of an optimizer has ended: ``o`` (its number), ``batches`` (of loaders since the last step, each
                  ``[l, samples, wait in s]``); on CUDA ``device`` (s of the device's clock since the first step; the
                  line is written when the device has got there)
    ``own``       all has been seen: ``process``, ``model``, ``optimizer``, each with facts about the script's own;
                  ``machine``; and ``answers`` to what was asked, each ``[knob, value, why not, or null]``
    ``memory``    CUDA, now and then: ``reserved``, ``allocated``, peaks in bytes
    ``raised``    nobody has caught an exception: ``chain``, each link ``[type's name, those of its bases, message]``
    ============  ==================================================================================================

    Args:
        path: of the file; it is appended to.
        ours: returns whether this process may be the one that trains.
    """

    def __init__(self, path: str, ours: Callable[[], bool]) -> None:
        self._path = path
        self._ours = ours
        self._descriptor: int | None = None
        self._lines: list[str] = []
        self._written = 0.0
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._batches: list[list[Any]] = []
        # What is to be written once the device has got to a step, in order.
        self._ahead: deque[tuple[Any, str]] = deque()
        self._first: Any = None
        self._wrong: Exception | None = None

    def install(self) -> None:
        """Watch loaders and exceptions. ``import torch`` has just ended."""
        import torch
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._note("torch", version=str(torch.__version__), cuda=torch.version.cuda)
        self._flush()
        begin, take = DataLoader.__iter__, _BaseDataLoaderIter.__next__

        @wraps(begin)
        def iterate(loader: Any) -> Any:
            iterator = begin(loader)
            if self._ours():
                self._safely(self._iterated, loader, iterator)
            return iterator

        @wraps(take)
        def next_batch(iterator: Any) -> Any:
            number, samples = iterator.__dict__.get("_autotune", (None, None))
            if number is None or not self._ours():
                return take(iterator)
            asked = time.monotonic()
            batch = take(iterator)
            waited = time.monotonic() - asked
            self._safely(self._took, number, samples, batch, waited)
            return batch

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign, assignment]
        told = sys.excepthook

        def hook(kind: Any, error: Any, trace: Any) -> None:
            if self._ours():
                self._safely(self._raised, error)
            told(kind, error, trace)

        sys.excepthook = hook

    def began(self) -> None:
        """Note that this process trains."""
        self._safely(self._began)

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has taken a step."""
        self._safely(self._stepped, optimizer)

    def end(self) -> None:
        """Write what is left. The process ends."""
        if self._ours():
            self._safely(self._flush)

    def report(self, own: dict[str, Any], answers: list[list[Any]]) -> None:
        """Note what the script does itself, and what could be set."""
        self._safely(self._report, own, answers)

    def _report(self, own: dict[str, Any], answers: list[list[Any]]) -> None:
        self._note("own", **own, machine=_machine(own["model"].get("device", "cpu")), answers=answers)
        self._flush()

    def _safely(self, act: Callable[..., None], *told: Any) -> None:
        """Whatever goes wrong here, the training goes on."""
        if self._wrong is None:
            try:
                act(*told)
            except Exception as error:
                self._wrong = error
                print(f"autotune: the training is watched no longer: {type(error).__name__}: {error}", file=sys.stderr)

    def _began(self) -> None:
        self._note("begin")
        self._flush()

    def _iterated(self, loader: Any, iterator: Any) -> None:
        import torch

        number = self._number_of(loader) if torch.is_grad_enabled() else None
        self._note("epoch", l=number)
        # Iterators of others' loaders may have no place for it.
        if hasattr(iterator, "__dict__"):
            iterator._autotune = (number, _batch_size(loader))

    def _took(self, number: int, samples: int | None, batch: Any, waited: float) -> None:
        self._batches.append([number, samples or _samples_in(batch), round(waited, 6)])

    def _raised(self, error: BaseException | None) -> None:
        # The device may never get to what is ahead.
        self._ahead.clear()
        self._note("raised", chain=_chain(error))
        self._flush()

    def _stepped(self, optimizer: Any) -> None:
        now = time.monotonic()
        number = self._optimizers.setdefault(optimizer, len(self._optimizers))
        batches, self._batches = self._batches, []
        line = f'{{"e":"step","at":{now:.6f},"o":{number},"batches":{json.dumps(batches)}'
        mark = _mark(optimizer)
        self._first = self._first or mark
        self._ahead.append((mark, line))
        while self._ahead and (self._ahead[0][0] is None or self._ahead[0][0].query()):
            reached, text = self._ahead.popleft()
            if reached is not None:
                text = f'{text},"device":{self._first.elapsed_time(reached) / 1e3:.6f}'
            self._lines.append(text + "}\n")
        if now - self._written > _EVERY_S:
            if mark is not None:
                self._note_memory()
            self._flush()

    def _number_of(self, loader: Any) -> int:
        number = self._loaders.get(loader)
        if number is None:
            number = self._loaders[loader] = len(self._loaders)
            self._note(
                "loader",
                l=number,
                arguments={
                    "batch_size": _batch_size(loader),
                    "num_workers": loader.num_workers,
                    "prefetch_factor": loader.prefetch_factor,
                    "pin_memory": bool(loader.pin_memory),
                    "persistent_workers": bool(loader.persistent_workers),
                },
                ahead=loader.num_workers * (loader.prefetch_factor or 0),
                batches=_length(loader),
                kind=type(loader.dataset).__name__,
            )
        return number

    def _note_memory(self) -> None:
        import torch

        peaks = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
        self._note("memory", **peaks)

    def _note(self, event: str, **facts: Any) -> None:
        text = json.dumps({"e": event, "at": round(time.monotonic(), 6), **facts})[:-1]
        if self._ahead:
            self._ahead.append((None, text))
        else:
            self._lines.append(text + "}\n")

    def _flush(self) -> None:
        self._written = time.monotonic()
        lines, self._lines = self._lines, []
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            os.write(self._descriptor, "".join(lines).encode())
        except OSError:
            # Whoever reads it will miss it; the training goes on.
            self._descriptor = None


def _machine(device: str) -> dict[str, Any]:
    """Return facts about the script's PyTorch and the device that it trains on."""
    import multiprocessing
    import platform

    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "start_method": multiprocessing.get_start_method(),
        "vision": getattr(sys.modules.get("torchvision"), "__version__", None),
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        found.update(
            name=card.name,
            memory=card.total_memory,
            capability=[card.major, card.minor],
            multiprocessors=card.multi_processor_count,
            uuid=str(getattr(card, "uuid", "")) or None,
            cudnn=str(torch.backends.cudnn.version()),
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        )
    return found


def _mark(optimizer: Any) -> Any:
    """Return an event at the end of what has been enqueued on an optimizer's device; ``None`` if that is the CPU."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
                return None
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(parameter.device))
            return event
    return None


def _batch_size(loader: Any) -> int | None:
    own = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return own if isinstance(own, int) else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _samples_in(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in a batch."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for n in map(_samples_in, parts) if n is not None), None)


def _chain(error: BaseException | None) -> list[list[Any]]:
    """Return an exception with what caused it, the last one first."""
    found: list[list[Any]] = []
    while error is not None and len(found) < _LINKS:
        kind = type(error)
        found.append([_name(kind), [_name(base) for base in kind.__mro__[1:-2]], str(error)[:2000]])
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
