"""Turns in the script's own loop: between two steps, the training is switched to another configuration."""

from __future__ import annotations

import json
import math
import os
import select
import time
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from autotune_agent.dataset_state import open_places
from autotune_agent.facts import chain
from autotune_agent.loaders import LoaderDoor
from autotune_agent.models import ModelDoor
from autotune_agent.optimizers import OptimizerDoor
from autotune_agent.process import ProcessDoor
from autotune_agent.setting import is_of_a_worker, say
from autotune_agent.watching import TrainingObserver

#: Seconds within which a supervisor that tunes a live training must answer, or the training goes on without it.
_ANSWER_S = 5.0
#: Seconds within which it must have begun, or it is no longer waited for.
_START_S = 300.0
#: If an optimizer takes no step while others take more than this, the script has finished with it.
_GONE_AFTER = 50


class Turning:
    """Lets configurations take turns as a supervisor commands. Each step trains, whichever configuration is in force.

    Before each turn a line is read from a pipe: ``{"steps": count, "doors": {…}}``, with the arguments for the doors
    ``process``, ``model`` and ``optimizer``. The script waits for it, and goes on as it is, without turns, when the
    other end is closed. Before that there may be lines ``{"load": {"arguments": {…}, "least_s": seconds}}``, which let
    the loader deliver by itself, ``{"deliver": {"arguments": {…}, "noted": {…}}}``, which let workers make some batches
    and note them (see `autotune_agent.deliveries`), or ``{"wait": true}``, which does nothing. With ``open`` a turn
    ends as soon as there is another line.

    In a training that is to go on (``live``), loaders are switched as well (``loader``), the first turn is the script's
    own, and the script's own is in force again as soon as another configuration fails: the forward pass or the batch is
    repeated, and a step whose backward pass fails or whose loss is not finite is taken with gradients of zero. A
    command may have ``limit_s``, after which the turn ends with the current step, and ``settle``, the sentence to end
    with: what it switches to stays, there are no more turns, and nothing is watched.

    Args:
        commands: path of the pipe.
        watching: notes the turns.
        live: whether the training goes on when it has been tuned.
        first: called when the first command comes, for which the script then does not wait; ``None`` makes it wait.
    """

    def __init__(
        self,
        commands: str,
        around: ProcessDoor,
        models: ModelDoor,
        optimizers: OptimizerDoor,
        loaders: LoaderDoor,
        watching: TrainingObserver,
        *,
        live: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        self._path = commands
        self._around, self._models, self._optimizers, self._loaders = around, models, optimizers, loaders
        self._watching = watching
        self._live = live
        self._first = first
        #: Whether to wait for commands.
        self._waits = not live and first is None
        self._process = os.getpid()
        self._descriptor: int | None = None
        self._read = b""
        #: The optimizer whose steps end those of the training, and how many steps others have taken since its last.
        self._unit: weakref.ref[Any] | None = None
        self._others = 0
        self._now: dict[str, Any] | None = None
        #: What was in force in the first turn: the script's own.
        self._own: dict[str, Any] | None = None
        self._left = 0
        self._until = math.inf
        self._open = False
        self._began = time.monotonic()
        #: Configurations that have trained a step without failing.
        self._proven: list[dict[str, Any]] = []
        #: The last loss.
        self._loss: Any = None
        self._over = False
        self._restore: Any = None
        #: What was open when the first turn began.
        self._places: dict[int, tuple[str, Any]] = {}

    def install(self) -> None:
        """Guard the calls of ``backward``, if the training is to go on whatever is tried in it."""
        if not self._live:
            return
        import torch

        original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._over or not self.is_tried:
                original(tensors, *args, **kwargs)
                return
            is_loss = isinstance(tensors, torch.Tensor) and tensors.numel() == 1
            self._loss = tensors.detach() if is_loss else None
            if self._now not in self._proven and not _is_finite(self._loss):
                why = "its loss is not finite"
            else:
                try:
                    original(tensors, *args, **kwargs)
                    return
                except Exception as error:
                    if is_of_a_worker(error):
                        raise
                    why = _words(error)
            # Not in the handler above, where the error keeps memory alive.
            self._back(why, lost=True)
            # If some gradients are missing, the others are worthless.
            self._optimizers.forget_gradients()

        def restore() -> None:
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        torch.autograd.backward = backward
        self._restore = restore

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has taken a step; between steps of the training, begin the next turn."""
        if self._over or not self._is_unit(optimizer):
            return
        try:
            self._stepped(optimizer)
        except Exception:
            self._end()
            raise

    def _is_unit(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer ends a step of the training: it is the one that takes the fewest."""
        unit = None if self._unit is None else self._unit()
        self._others += 1
        if unit is None or self._others > _GONE_AFTER:
            # No optimizer has been chosen yet, or the script has moved on to another one.
            unit = self._optimizers.fewest if self._unit is None else optimizer
            self._unit = weakref.ref(unit)
        if unit is optimizer:
            self._others = 0
        return unit is optimizer

    def _stepped(self, optimizer: Any) -> None:
        if self._now is not None and self._now not in self._proven:
            self._proven.append(self._now)
        self._left -= 1
        if self._left > 0 and time.monotonic() < self._until and not (self._open and self._is_told(0.0)):
            return
        if not self._waits and not self._is_told(0.0):
            # The supervisor may still be starting or observing; there is no need to wait before the first turn.
            if time.monotonic() - self._began > _START_S:
                self._end()
            return
        if not self._waits and self._first is not None:
            self._first()
        self._waits = True
        if self.is_tried and not _is_finite(self._loss):
            self._back("its loss is not finite", lost=False)
        self._watching.ready()
        command = self._command()
        while command is not None and "steps" not in command:
            if "load" in command:
                self._load(command["load"])
            elif "deliver" in command:
                self._deliver(command["deliver"])
            command = self._command()
        if command is None:
            was_tried = self.is_tried
            self._end()
            if was_tried and self._own is not None:
                self._switch(self._own)
            return
        self._left = int(command["steps"])
        self._until = time.monotonic() + float(command.get("limit_s", math.inf))
        self._open = "open" in command
        if self._own is None:
            self._own = command["doors"]
            self._places = open_places()
        why = None
        try:
            self._switch(command["doors"])
        except Exception as error:
            why, self._left = _words(error), 0
            if self._live:
                self._switch(self._own)
        if "settle" in command:
            self._end()
            failed = f"what was found could not be set ({why}): the training goes on as the script has it"
            say(str(command["settle"]) if why is None else failed)
            return
        self._watching.turn(optimizer, why)

    def _load(self, told: dict[str, Any]) -> None:
        """Let the loader deliver by itself, and report how fast it is."""
        try:
            rates = self._loaders.alone(told["arguments"], told["least_s"])
        except Exception as error:
            self._watching.loaded(raised=chain(error))
        else:
            self._watching.loaded(**rates)

    def _deliver(self, told: dict[str, Any]) -> None:
        """Let workers make some batches, and note what they deliver, unless there is a reason against workers."""
        try:
            why = self._loaders.why_not_copied(self._places)
            if why is None:
                self._loaders.deliver(told["arguments"], told["noted"])
        except Exception as error:
            self._watching.loaded(raised=chain(error))
        else:
            self._watching.loaded(refused=why)

    def rescue(self, error: Exception) -> Callable[[], None] | None:
        """Return a function that puts the script's own in force again, so that a forward pass can be repeated.

        Args:
            error: what the forward pass has raised.

        Returns:
            ``None`` if nothing else was in force, so that the error is the script's.
        """
        if is_of_a_worker(error) or not self.is_tried:
            return None
        return partial(self._back, _words(error), lost=False)

    def rescue_loader(self, error: Exception) -> Callable[[], None] | None:
        """Return a function that puts the script's own in force again, so that its own workers can make a batch.

        Args:
            error: what a loader has raised under other settings than the script's own.

        Returns:
            ``None`` if nothing else is in force any more.
        """
        return partial(self._back, _words(error), lost=False) if self.is_tried else None

    @property
    def is_tried(self) -> bool:
        """Whether anything other than the script's own is in force."""
        return (
            self._live
            and self._own is not None
            and self._now != self._own
            # A child forked by the script is not ours to tune.
            and os.getpid() == self._process
        )

    def _back(self, why: str, *, lost: bool) -> None:
        """Put the script's own in force again.

        Args:
            why: how the configuration on trial has failed. lost: whether the gradients of this step are zero.
        """
        import torch

        if torch.cuda.is_initialized():
            # Laying out the weights again needs memory.
            torch.cuda.empty_cache()
        self._switch(self._own or {})
        # The turn ends with this step.
        self._left = 0
        if self._over:
            say(f"back to the script's own settings: {why}")
        else:
            self._watching.failed(why, lost=lost)

    def _end(self) -> None:
        self._over = True
        self._unit = self._loss = None
        self._models.settle()
        if self._live:
            self._watching.stop()
        if self._restore is not None:
            self._restore()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _switch(self, doors: dict[str, dict[str, Any]]) -> None:
        if doors == self._now:
            return
        # If switching fails, no known configuration is in force.
        self._now = None
        self._around.switch(doors.get("process", {}))
        self._models.switch(doors.get("model", {}))
        # After the models, whose layout the state of optimizers follows.
        self._optimizers.switch(doors.get("optimizer", {}))
        if self._live:
            self._loaders.switch(doors.get("loader", {}))
        self._now = doors

    def _pipe(self) -> int:
        if self._descriptor is None:
            # Opening must not block: if the supervisor has died, nothing would ever come.
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(self._descriptor, True)
        return self._descriptor

    def _is_told(self, timeout_s: float) -> bool:
        """Whether within a time there is something to read: a command, or the end of a closed pipe."""
        return bool(select.select([self._pipe()], [], [], timeout_s)[0])

    def _command(self) -> dict[str, Any] | None:
        """Return the next command; ``None`` if there are no more."""
        line = self._line()
        command: dict[str, Any] | None = json.loads(line) if line else None
        return command

    def _line(self) -> bytes:
        while b"\n" not in self._read:
            if self._live and not self._is_told(_ANSWER_S):
                return b""
            more = os.read(self._pipe(), 4096)
            if not more:
                return b""
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line


def _is_finite(loss: Any) -> bool:
    return loss is None or bool(loss.isfinite())


def _words(error: Exception) -> str:
    text = str(error)
    if "Original Traceback" in text:
        # From a loader's worker: its last line is what was raised there.
        return f"{text.strip().splitlines()[-1]} (in a worker)"
    return f"{type(error).__name__}: {text}"
