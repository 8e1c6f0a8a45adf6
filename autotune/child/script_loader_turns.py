"""Turns of a script's loader: between two of its steps it delivers batches under other workers. Nothing trains."""

from __future__ import annotations

from collections.abc import Callable

from autotune.launcher import entering
from autotune.child.script import rebuilt
from autotune.child.script_training import Training, tell, wait_for_all
from autotune.child.surroundings import Watcher, reason_to_discard
from autotune.child.unseen import too_short
from autotune.base.clock import Clock
from autotune.stats.racing import PRIORS, Contender
from autotune.base.records import Phase, Turn
from autotune.space import delivery_part


class ScriptLoaderTurns:
    """Lets configurations take turns that differ in the workers of a script's loader.

    Whatever an entrant raises is raised: PyTorch goes on raising for the workers of one that has died.

    Args:
        turn_s: the least time of a turn.
        commands: descriptor of the pipe on which the agent is told whose turn it is.
        busy_cores: cores that others may use in a turn that counts; ``None``: any.
        enter: told of each phase.
    """

    def __init__(
        self,
        script: Training,
        turn_s: float,
        commands: int,
        around: Watcher,
        busy_cores: float | None,
        enter: Callable[[Phase], None],
        clock: Clock,
    ) -> None:
        # The host makes the batches, whatever they are for.
        self.prior = PRIORS["cpu"]
        #: Seconds of opening and closing loaders, and of waiting for the first batch of each worker.
        self.switch_s = 0.0
        self._script, self._turn_s, self._commands = script, turn_s, commands
        self._around, self._busy_cores = around, busy_cores
        self._enter, self._clock = enter, clock
        self._looks = script.looks()

    def wait(self) -> None:
        """Wait until all that the script trains with has been seen.

        Raises:
            WorkloadError: it ended before.
        """
        wait_for_all(self._script, self._looks)

    def take(self, entrant: Contender) -> Turn | None:
        """Take a turn of at least `turn_s` seconds, in which each worker makes equally many batches.

        Raises:
            WorkloadError: the script has ended.
            Exception: what the script's data set raised.
        """
        self._enter(Phase.MEASURE)
        trail = self._script.trail
        if self._script.has_ended:
            raise too_short(self._script)
        wanted = trail.loads + 1
        asked = self._clock.now()
        self._around.begin()
        arguments = entering.doors(delivery_part(entrant.config), in_command=set()).get("loader", {})
        arguments.pop("batch_size", None)
        tell(self._commands, {"load": {"arguments": arguments, "least_s": self._turn_s}})
        for _ in self._looks:
            if trail.loads == wanted:
                break
        else:
            raise too_short(self._script)
        around, _ = self._around.read()
        found = trail.load
        if "raised" in found:
            raise rebuilt(found["raised"])
        self.switch_s += max(0.0, self._clock.now() - asked - found["seconds"])
        entrant.step_s = found["seconds"] / found["batches"]
        quiet = reason_to_discard(around, self._around.cores, self._busy_cores) is None
        turn = Turn(steps=found["batches"], samples=found["samples"], seconds=found["seconds"], around=around)
        return turn if quiet else None

    def leave(self, entrant: Contender) -> None:
        """Nothing is left of an entrant: its loader was closed at the end of its turn."""
