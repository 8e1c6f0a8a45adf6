"""Turns of a script's training: its own loop goes on, and between two steps it is switched to another entrant."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from autotune import entering
from autotune.child.beats import Beats
from autotune.child.device_turns import LEAST_STEPS, SETTLED_S
from autotune.child.heat import race
from autotune.child.script import ScriptProcess
from autotune.child.surroundings import Watcher, card_of, reason_to_discard
from autotune.child.trail import SeenStep
from autotune.child.unseen import too_short
from autotune.clock import Clock
from autotune.errors import AutotuneError
from autotune.layout import LaunchFiles
from autotune.racing import PRIORS, Contender
from autotune.records import CommandRef, Heat, HeatPlan, Phase, TrialSpec, TrialStatus, Turn

#: A turn in which no step could be counted, because epochs turned or something was evaluated, is repeated so often.
_TRIES = 3


def command_heat(spec: TrialSpec, plan: HeatPlan, beats: Beats, clock: Clock, began: float) -> Heat:
    """Compare configurations that the training of ``spec.command`` can be switched between, by what the device does.

    Each step trains, whoever's turn it is; what the script waits for its loader does not count.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        Disturbed: other processes kept the machine too busy to measure.
        WorkloadError: the script ended too early, or does not train as far as can be seen.
        Exception: what the script did not catch, in whosoever turn it was. A script that has ended compares nobody.
    """
    command = spec.command
    if command is None:
        raise AutotuneError(f"{spec.launch} is to run a command and is not told which")
    files = LaunchFiles(Path(spec.folder))
    files.turns.unlink(missing_ok=True)
    os.mkfifo(files.turns)
    # For reading, too: the script opens it when it has begun to train, and it is not waited for.
    commands = os.open(files.turns, os.O_RDWR | os.O_CLOEXEC)
    try:
        script = ScriptProcess(spec, command, beats, commands=files.turns)
        try:
            turns = _ScriptTurns(spec, plan, script, command, commands, beats, clock)
            found = race(spec, plan, turns, beats, clock, began)
        finally:
            script.end()
    finally:
        os.close(commands)
        files.turns.unlink(missing_ok=True)
    # Of a failure it is evidence.
    files.trail.unlink(missing_ok=True)
    return found


class _ScriptTurns:
    def __init__(
        self,
        spec: TrialSpec,
        plan: HeatPlan,
        script: ScriptProcess,
        command: CommandRef,
        commands: int,
        beats: Beats,
        clock: Clock,
    ) -> None:
        self.spec, self.plan, self.beats, self.clock = spec, plan, beats, clock
        self.cuda = spec.devices[0] != "cpu"
        self.prior = PRIORS["cuda" if self.cuda else "cpu"]
        self.switch_s = 0.0
        self._script, self._command, self._commands = script, command, commands
        in_command = entering.places(command.words)
        self._doors = [entering.doors(config, in_command=in_command) for config in plan.entrants]
        self._around = Watcher(card_of(spec), clock)
        self._looks = script.looks()
        for _ in self._looks:
            if script.trail.own is not None:
                break
        else:
            raise too_short(script)
        self._around.settle_in()

    def take(self, entrant: Contender) -> Turn | None:
        """Take a turn of as many steps as last `turn_s`, and at least one; none counts if the script has ended.

        As in a heat without a loop of somebody else's, an entrant's very first step is not counted, and on a CPU no
        first step of a turn if steps are short.
        """
        trail = self._script.trail
        first = entrant.first_step_s is None
        self.beats.enter(Phase.COMPILE if first else Phase.MEASURE)
        if first:
            seen = self._steps(entrant.number, 1)
            if trail.unswitched is not None:
                entrant.status, entrant.phase = TrialStatus.CRASHED, self.beats.phase
                entrant.cause = f"the script's training could not be switched to it: {trail.unswitched}"
                return None
            if seen:
                entrant.first_step_s = entrant.step_s = self._seconds(seen)
            self.beats.enter(Phase.MEASURE)
        uncounted = 1 if self.cuda or entrant.step_s < SETTLED_S else 0
        wanted = math.ceil(self.plan.turn_s / entrant.step_s) if entrant.step_s > 0 else LEAST_STEPS
        self._around.begin()
        kept: list[SeenStep] = []
        for _ in range(_TRIES):
            seen = self._steps(entrant.number, uncounted + max(LEAST_STEPS, wanted))
            kept = [step for step in seen[uncounted:] if step.whole]
            if kept or not seen:
                break
        around, _ = self._around.read()
        if not kept:
            if entrant.number == 0 and self._script.has_ended and not any(entrant.turns):
                raise too_short(self._script)
            return None
        seconds = self._seconds(kept)
        entrant.step_s = seconds / len(kept)
        if self.cuda and trail.reserved_bytes is not None:
            entrant.peak_bytes = max(entrant.peak_bytes or 0, trail.reserved_bytes)
        samples = sum(self._command.samples_per_step or step.samples or 1 for step in kept)
        self._script.rate_per_s = samples / seconds
        quiet = reason_to_discard(around, self._around.cores, self.spec.plan.busy_cores) is None
        return Turn(steps=len(kept), samples=samples, seconds=seconds, around=around) if quiet else None

    def _seconds(self, steps: Sequence[SeenStep]) -> float:
        # Of steps that did nothing but wait for their loader, something is left.
        return sum(max(step.seconds - step.wait_s, 1e-6) for step in steps)

    def _steps(self, number: int, count: int) -> list[SeenStep]:
        """Let an entrant train for some steps; return those that have ended before the script did."""
        trail = self._script.trail
        turn = trail.turns + 1
        asked = self.clock.now()
        told = {"steps": count, "doors": self._doors[number]}
        # A pipe takes as much at once, and nothing is asked for before the last turn has ended.
        os.write(self._commands, json.dumps(told).encode() + b"\n")
        found: list[SeenStep] = []
        for _ in self._looks:
            found += [step for step in self._script.found if step.turn == turn]
            if len(found) >= count:
                break
        if trail.turns == turn:
            self.switch_s += max(0.0, trail.turn_at - asked)
        return found

    def leave(self, entrant: Contender) -> None:
        """Nothing is left of an entrant but its compiled code: the next turn switches everything."""
