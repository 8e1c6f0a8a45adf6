"""Turns in somebody else's loop: between two steps, what trains is switched to another configuration."""

from __future__ import annotations

import json
import os
from typing import Any

from autotune_agent.models import ModelDoor
from autotune_agent.optimizers import OptimizerDoor
from autotune_agent.process import ProcessDoor
from autotune_agent.watching import Watching


class Turning:
    """Lets configurations take turns as a supervisor asks for them. Each step trains, whoever's turn it is.

    Before each turn a line is read from a pipe: ``{"steps": count, "doors": {…}}``, with what ``process``, ``model``
    and ``optimizer`` are told at the doors. The script waits for it, and goes on as it is, without turns, when the
    other end is closed.

    Args:
        commands: path of the pipe.
        watching: notes the turns.
    """

    def __init__(
        self,
        commands: str,
        around: ProcessDoor,
        models: ModelDoor,
        optimizers: OptimizerDoor,
        watching: Watching,
    ) -> None:
        self._path = commands
        self._around, self._models, self._optimizers = around, models, optimizers
        self._watching = watching
        self._descriptor: int | None = None
        self._unit: Any = None
        self._now: dict[str, Any] | None = None
        self._left = 0
        self._over = False

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has taken a step; between steps of the training, begin the next turn."""
        if self._unit is None:
            self._unit = self._optimizers.fewest
        if self._over or optimizer is not self._unit:
            return
        self._left -= 1
        if self._left > 0:
            return
        self._watching.catch_up()
        line = self._line()
        if not line:
            self._over = True
            return
        command = json.loads(line)
        self._left = int(command["steps"])
        why = None
        try:
            self._switch(command["doors"])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self._watching.turn(optimizer, why)

    def _switch(self, doors: dict[str, dict[str, Any]]) -> None:
        if doors == self._now:
            return
        # If it cannot be switched to, it is nobody's turn.
        self._now = None
        self._around.switch(doors.get("process", {}))
        self._models.switch(doors.get("model", {}))
        # After the models, whose layout its state follows.
        self._optimizers.switch(doors.get("optimizer", {}))
        self._now = doors

    def _line(self) -> bytes:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        line = b""
        while not line.endswith(b"\n"):
            # Lines are short and nothing is asked for before the last answer: one read never brings two.
            more = os.read(self._descriptor, 4096)
            if not more:
                return b""
            line += more
        return line
