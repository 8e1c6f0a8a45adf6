"""The file in which the agent writes what a training does, and the clock of the device that it trains on."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from typing import Any

from autotune_agent.facts import is_capturing


class TrailWriter:
    """Writes events to a file, one JSON object a line, each with ``e``, its kind, and ``at``, on the monotonic clock,
    which all processes of a Linux machine share.

    ============  ==================================================================================================
    ``torch``     has been imported: ``version``, ``cuda``
    ``alive``     batches have come, but no step has ended for some time
    ``lost``      nothing more will be written: ``why``
    ``begin``     this process, ``pid``, trains: it has called a model with gradients on, ``backward`` or an optimizer
    ``unseen``    it has trained for some time, and no step was seen: ``how``, a clause
    ``loader``    is first iterated over: ``l`` (its number), ``arguments`` (by the names of `DataLoader`), ``ahead``
                  (batches that its workers make in advance), ``batches`` (an epoch's, or null), ``kind``
    ``epoch``     of a loader begins: ``l``, or null if gradients are off; ``batches`` as below; ``start``: s that its
                  iterator, with its workers, has taken to start. A loader that is made anew for each epoch keeps its
                  number
    ``made``      so far, from the data set of ``l``: ``batches``, in ``seconds``, added up over workers
    ``step``      of an optimizer has ended: ``o`` (its number), ``batches`` (of loaders since the last step, each
                  ``[l, batches, samples or null, wait in s]``), ``backwards`` (passes since the last step),
                  ``left_out`` (updates that a gradient scaler has left out since then, if there are any); on CUDA
                  ``device`` (s of the device's clock since the first step; the line is written when the device has
                  got there) and ``stalled`` (s of that clock in which the device had nothing to do while the script
                  waited for batches, or for workers to start)
    ``turn``      another configuration has been switched to (``why``: or could not be); ``device`` as of a step
    ``ready``     a turn is over, and the next command is waited for
    ``loaded``    the loader has delivered by itself: ``batches``, ``samples``, ``seconds``; or what it delivers has
                  been noted, unless that was ``refused``, with a reason; or ``raised``, a chain
    ``failed``    a configuration that was tried has failed in the middle of a step (``why``), and the script's own is
                  in force again; ``lost``: that step has trained nothing
    ``loss``      ``backward`` is called: ``value``, of as many as were asked for
    ``own``       all has been seen: ``process``, ``model``, ``optimizer``, each with facts about the script's own;
                  ``machine``; and ``answers`` to what was asked, each ``[knob, value, why not, or null]``
    ``memory``    CUDA, now and then: ``reserved``, ``allocated``, peaks in bytes
    ``raised``    nobody has caught an exception in process ``pid``: ``chain``, each link ``[type's name, those of its
                  bases, message, {errno, filename, layer, frames}]``, each frame ``[file, line]``, the innermost last;
                  if that has ended a ``thread`` only, whether it ``trains``
    ============  ==================================================================================================

    Lines wait for `flush`. An event that is noted after a mark on the device is written when the device has got there.

    Args:
        path: of the file; it is appended to.

    Attributes:
        written_s: when lines were last written, on the monotonic clock.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.written_s = 0.0
        self._lines: list[str] = []
        # What is to be written once the device has got to a mark, in order.
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
            text: its line, without the closing brace. waits: marks before and after each wait for a batch.
        """
        self._ahead.append((mark, text, waits))
        self._write_reached()

    def drop_ahead(self) -> None:
        """Drop what waits for the device, which may never get there."""
        self._ahead.clear()

    def flush(self) -> None:
        """Write the lines that wait for nothing."""
        self.written_s = time.monotonic()
        lines, self._lines = self._lines, []
        # Opened each time: a script may close descriptors that it does not know, and open its own in their place.
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
        """Return a mark at the end of what the device has been given; ``None`` before a step on CUDA has been seen."""
        import torch

        if self._first is None or is_capturing():
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def step_mark(self, optimizer: Any) -> Any:
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

    def begins_at(self, mark: Any) -> None:
        """Count the device's clock from a mark, unless it is counted already."""
        self._first = self._first or mark

    def note_memory(self) -> None:
        """Add the peaks of the card of the first step."""
        import torch

        peaks = {
            "reserved": torch.cuda.max_memory_reserved(self._device),
            "allocated": torch.cuda.max_memory_allocated(self._device),
        }
        self.note("memory", **peaks)

    def forget_memory(self) -> None:
        """Begin peaks anew, and give back what no tensor uses, if training is on a card."""
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
