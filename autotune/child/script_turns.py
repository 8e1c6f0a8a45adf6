"""Configurations that take turns in a running script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from autotune.base.clock import Clock
from autotune.base.records import CommandRef, Config, Heat, HeatPlan, Phase, TrialSpec, TrialStatus, Turn
from autotune.child.failure import rebuilt
from autotune.child.launch import Beats
from autotune.child.script_process import KeptScript, Watched, never_inside, too_short, training
from autotune.child.trail import NONE_INSIDE, SeenStep, Trained
from autotune.child.windows import SurroundingsReader
from autotune.child.workload_turns import LEAST_STEPS, SETTLED_S, race, unless_disturbed
from autotune.knobs import refused_knob
from autotune.knobs.num_workers import workers_of
from autotune.knobs.prefetch_factor import prefetch_of
from autotune.launcher import script_entry
from autotune.space import delivery_part
from autotune.stats import LaunchNoise
from autotune.stats.racing import PRIORS, Contender

# Turns of a script's loader: between two of the script's steps it delivers batches with other workers. Nothing trains.


class ScriptLoaderTurns:
    """Lets configurations that differ in the workers of a script's loader take turns.

    Whatever an entrant raises is raised here, too: PyTorch keeps raising for a loader whose worker has died.

    Args:
        turn_s: the minimum time of a turn.
        busy_cores: cores that others may use in a turn that counts; ``None``: any.
    """

    def __init__(
        self, script: Watched, turn_s: float, around: SurroundingsReader, busy_cores: float | None, clock: Clock
    ) -> None:
        # The host makes the batches, whatever device they are for.
        self.prior = PRIORS["cpu"]
        #: Seconds spent on opening and closing loaders, and on waiting for the first batch of each worker.
        self.switch_s = 0.0
        self._script, self._turn_s = script, turn_s
        self._around, self._busy_cores, self._clock = around, busy_cores, clock
        self._looks = script.looks()

    def take(self, entrant: Contender) -> Turn | None:
        """Take a turn of at least `turn_s` seconds, in which each worker makes the same number of batches.

        Raises:
            WorkloadError: the script has ended.
            Exception: what the script's data set raised.
        """
        self._script.enter(Phase.MEASURE)
        trail = self._script.trail
        if self._script.has_ended:
            raise too_short(self._script)
        wanted = trail.loads + 1
        asked_at = self._clock.now()
        self._around.begin()
        arguments = script_entry.door_arguments(delivery_part(entrant.config), in_command=set()).get("loader", {})
        arguments.pop("batch_size", None)
        self._script.tell(load={"arguments": arguments, "least_s": self._turn_s})
        for _ in self._looks:
            if trail.loads == wanted:
                break
        else:
            raise too_short(self._script)
        around, _ = self._around.read()
        event = trail.load
        if "raised" in event:
            raise rebuilt(event["raised"])
        self.switch_s += max(0.0, self._clock.now() - asked_at - event["seconds"])
        entrant.step_s = event["seconds"] / event["batches"]
        turn = Turn(steps=event["batches"], samples=event["samples"], seconds=event["seconds"], around=around)
        return unless_disturbed(turn, self._around.cores, self._busy_cores)

    def leave(self, entrant: Contender) -> None:
        """Do nothing: an entrant's loader was closed at the end of its turn."""


# Turns of a script's training: its own loop runs on, and between two steps it is switched to another entrant.

#: A turn is tried this many times if no step could be counted in it, because epochs turned or something was evaluated.
_TRIES = 3


def command_heat(spec: TrialSpec, command: CommandRef, plan: HeatPlan, beats: Beats, kept: KeptScript) -> Heat:
    """Compare configurations that the training of a command can be switched between, by the time that the device takes;
    or that differ in their loaders, by what the loader delivers by itself.

    In a heat of the device every step trains, whichever entrant's turn it is; the script's waits for its loader do not
    count.

    Args:
        kept: holds the script in which they take turns, if one is kept.

    Raises:
        Disturbed: other processes kept the machine too busy to measure.
        WorkloadError: the script ended too early, or does not train as far as can be seen.
        Exception: what the script did not catch, whichever entrant's turn it was. A script that has ended allows no
            comparison.
    """
    with training(spec, command, beats, kept, in_turns=True) as script:
        around = SurroundingsReader.of(spec, beats.clock)
        turns: ScriptTurns | ScriptLoaderTurns
        if plan.side == "device":
            how = TurnPlan(
                plan.turn_s,
                cuda=spec.devices[0] != "cpu",
                busy_cores=spec.plan.busy_cores,
                samples_per_step=command.samples_per_step,
                even_steps=plan.even_steps,
            )
            turns = ScriptTurns(script, plan.entrants, script_entry.set_by(command), how, around, beats.clock)
        else:
            turns = ScriptLoaderTurns(script, plan.turn_s, around, spec.plan.busy_cores, beats.clock)
        script.wait_for_all()
        around.settle_in()
        return race(spec, plan, turns, beats)


@dataclass(frozen=True)
class TurnPlan:
    """How turns are taken.

    Attributes:
        turn_s: the counted steps of a turn last this long. cuda: the training runs on a card.
        busy_cores: cores that others may use in a turn that counts; ``None``: any.
        samples_per_step: ``None``: as observed. limit: a turn is ended once it takes this many times as long as
            `turn_s` and a step of the reference; ``None``: it is not.
        whole: the script's waits for its loader count, and batches that loaders have made in advance do not.
        even_steps: the number of counted steps of a turn is a multiple of this.
    """

    turn_s: float
    cuda: bool
    busy_cores: float | None = None
    samples_per_step: int | None = None
    limit: float | None = None
    whole: bool = False
    even_steps: int = 1


class ScriptTurns:
    """Lets configurations take turns in a script's own loop.

    Args:
        in_command: knobs that the command itself sets. own: the script's own configuration, if loaders are switched as
            well; ``None`` if they are not.

    Attributes:
        waited: for each entrant, the seconds that its counted steps waited for the loader, and their total seconds.
    """

    def __init__(
        self,
        script: Watched,
        entrants: Sequence[Config],
        in_command: set[str],
        how: TurnPlan,
        around: SurroundingsReader,
        clock: Clock,
        own: Config | None = None,
    ) -> None:
        self.how, self.clock = how, clock
        self.prior: LaunchNoise = PRIORS["cuda" if how.cuda else "cpu"]
        self.switch_s = 0.0
        self._script = script
        self._doors = [_doors(config, own, in_command) for config in entrants]
        self.waited = [[0.0, 0.0] for _ in entrants]
        #: The workers and queue of the last turn's loader: the most batches that it has made in advance.
        self._queue = self._own_queue = _queue(own)
        self._queues = [_queue(config) for config in entrants]
        self._around = around
        self._looks = script.looks()
        #: Seconds of a step of the reference.
        self._reference_s = 0.0
        #: The number of the last turn that was requested.
        self._turn = 0
        #: What has trained in each entrant's counted steps.
        self._trained = [Trained() for _ in entrants]
        #: The number of steps whose samples are known, and the total of these samples.
        self._known = [0, 0]

    def take(self, entrant: Contender) -> Turn | None:
        """Take a turn of as many steps as fill `turn_s`, and at least one; none counts if the script has ended.

        As in a heat with a loop of our own, an entrant's very first step is not counted, nor is the first step of any
        turn on CUDA, or on a CPU if steps are short.
        """
        how = self.how
        # Read it before any step of this turn changes it.
        ahead = self._ahead(entrant.number) if how.whole else 0
        first = entrant.first_step_s is None
        phase = Phase.COMPILE if first else Phase.MEASURE
        self._script.enter(phase)
        if first:
            # On CUDA the second step shows how many steps a turn needs, so that the first turn is as long as the
            # others.
            steps = self._steps(entrant.number, 2 if how.cuda and not how.whole else 1)
            if self._is_out(entrant, phase):
                return None
            if steps:
                entrant.first_step_s, entrant.step_s = self._seconds(steps[:1]), self._seconds(steps[-1:])
            self._script.enter(Phase.MEASURE)
        uncounted = 1 if how.cuda or entrant.step_s < SETTLED_S else 0
        wanted = math.ceil(how.turn_s / entrant.step_s) if entrant.step_s > 0 else LEAST_STEPS
        uncounted += ahead
        if how.whole:
            # A count that is not a multiple of the workers leaves the rate to luck.
            wanted = max(wanted, 2 * self._queues[entrant.number][0])
        wanted = how.even_steps * math.ceil(wanted / how.even_steps)
        self._around.begin()
        kept: list[SeenStep] = []
        for _ in range(_TRIES):
            steps = self._steps(entrant.number, uncounted + max(LEAST_STEPS, wanted))
            if self._is_out(entrant, Phase.MEASURE):
                return None
            kept = self._counted(steps[uncounted:])
            if kept or not steps:
                break
        around, _ = self._around.read()
        if self._is_unlike(entrant, kept):
            return None
        if not kept:
            if entrant.number == 0 and not any(entrant.turns):
                raise too_short(self._script) if self._script.has_ended else never_inside(self._script.trail)
            return None
        seconds = self._seconds(kept)
        entrant.step_s = seconds / len(kept)
        if entrant.number == 0:
            self._reference_s = entrant.step_s
        peak = self._script.trail.reserved_bytes
        if how.cuda and peak is not None:
            entrant.peak_bytes = max(entrant.peak_bytes or 0, peak)
        samples = self._samples(kept)
        self._script.rate_per_s = samples / seconds
        waited_s = sum(step.wait_s for step in kept)
        for place, more in enumerate((waited_s, sum(step.seconds for step in kept))):
            self.waited[entrant.number][place] += more
        turn = Turn(
            steps=len(kept), samples=samples, seconds=seconds, wait_s=None if how.whole else waited_s, around=around
        )
        return unless_disturbed(turn, self._around.cores, how.busy_cores)

    def _counted(self, steps: Sequence[SeenStep]) -> list[SeenStep]:
        """Return the steps that show how long a step takes: where epochs are too short to have steps inside, all but
        those in which something was evaluated."""
        loader = self._script.trail.loader
        batches = None if loader is None else loader.epoch_batches
        short = batches is not None and batches <= NONE_INSIDE
        return [step for step in steps if step.whole or (short and step.alone)]

    def _seconds(self, steps: Sequence[SeenStep]) -> float:
        return sum(step.seconds for step in steps) if self.how.whole else seconds_of(steps)

    def _ahead(self, number: int) -> int:
        """Return the most steps that it takes in an entrant's turn to use up what loaders have made in advance."""
        before, now = self._queue, self._queues[number]
        return 0 if before == now else math.prod(before) + math.prod(now)

    def _samples(self, steps: Sequence[SeenStep]) -> int:
        """Return the samples of steps, by the same rule for all entrants. Of several steps on one batch, one has all of
        its samples."""
        if self.how.samples_per_step is not None:
            return len(steps) * self.how.samples_per_step
        counts = [step.samples for step in steps]
        if None in counts:
            return len(steps)
        self._known = [self._known[0] + len(counts), self._known[1] + sum(n or 0 for n in counts)]
        if all(counts):
            return sum(n or 0 for n in counts)
        return max(1, round(len(counts) * self._known[1] / self._known[0]))

    def _is_out(self, entrant: Contender, phase: Phase) -> bool:
        trail = self._script.trail
        if trail.turns != self._turn:
            return False
        if trail.unswitched is not None:
            why = f"the script's training could not be switched to it: {trail.unswitched}"
        elif trail.failed is not None:
            why = trail.failed
        else:
            return False
        entrant.status, entrant.phase, entrant.cause = TrialStatus.CRASHED, phase, why
        entrant.refuses = refused_knob(entrant.config, why)
        # In live tuning, the script's own configuration is in force again.
        self._queue = self._own_queue
        return True

    def _is_unlike(self, entrant: Contender, kept: Sequence[SeenStep]) -> bool:
        """Return whether an entrant trains on its batches differently from the reference: the script goes on where
        something fails."""
        trained = self._trained[entrant.number]
        for step in kept:
            trained.add(step)
        why = trained.unlike(self._trained[0].per_batch)
        if why is None or entrant.number == 0:
            return False
        entrant.status, entrant.phase, entrant.cause = TrialStatus.DIVERGED, Phase.MEASURE, why
        return True

    def _steps(self, number: int, count: int) -> list[SeenStep]:
        """Let an entrant train for some steps; return those that ended before its turn, or the script, did."""
        trail = self._script.trail
        if self._script.has_ended:
            return []
        turn = self._turn = trail.turns + 1
        asked_at = self.clock.now()
        command: dict[str, Any] = {"steps": count, "doors": self._doors[number]}
        if self.how.limit is not None and self._reference_s:
            usual_s = count * self._reference_s if self.how.whole else self._reference_s
            command["limit_s"] = self.how.limit * max(self.how.turn_s, usual_s)
        self._queue = self._queues[number]
        self._script.tell(**command)
        steps: list[SeenStep] = []
        for _ in self._looks:
            steps += [step for step in self._script.found if step.turn == turn]
            if len(steps) >= count or trail.over == turn:
                break
        if trail.turns == turn:
            self.switch_s += max(0.0, trail.turn_at - asked_at)
        return steps

    def epoch_steps(self, samples: float) -> float | None:
        """Return the steps of an epoch, given the samples of one; ``None`` if that is not known."""
        loader = self._script.trail.loader
        batches = None if loader is None else loader.epoch_batches
        return None if loader is None or batches is None else batches * (loader.batch_size or samples) / samples

    def epoch_turn_s(self, number: int, samples: float, step_s: float, most_s: float) -> float | None:
        """Let an entrant train until an epoch begins; return how many seconds longer that step takes than others,
        because workers start in it. ``None`` if the length of epochs is not known, if they have hardly any other steps,
        or if they take too long.

        Args:
            samples, step_s: of its other steps. most_s: how long it may take.
        """
        steps, loader = self.epoch_steps(samples), self._script.trail.loader
        if steps is None or loader is None or steps <= NONE_INSIDE:
            return None
        left = steps * (1 - loader.taken / (loader.epoch_batches or 1))
        # Of an epoch that began before everything was observed, the steps taken so far do not show where it ends.
        for count in (math.ceil(left) + 2, math.ceil(steps) + 2):
            if count * step_s > most_s:
                return None
            turns_s = [step.own_s for step in self._steps(number, count) if step.began and step.own_s is not None]
            if turns_s:
                return max(0.0, fmean(turns_s) - step_s)
        return None

    def settle(self, number: int, sentence: str) -> None:
        """Let an entrant train from now on, with no more turns, and print a sentence for the user on the script's
        stderr."""
        self._script.tell(steps=0, doors=self._doors[number], settle=sentence)

    def leave(self, entrant: Contender) -> None:
        """Do nothing: only an entrant's compiled code is left, and the next turn switches everything."""


def _doors(config: Config, own: Config | None, in_command: set[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of a configuration for each door; for that of the loaders, only those that differ from the
    script's own.

    Loaders other than the one observed first may have other arguments of their own.
    """
    doors = script_entry.door_arguments(config, in_command=in_command)
    loader = doors.pop("loader", {})
    if own is not None:
        same = script_entry.door_arguments(own, in_command=in_command).get("loader", {})
        changed = {name: value for name, value in loader.items() if same.get(name) != value}
        if changed:
            doors["loader"] = changed
    return doors


def _queue(config: Config | None) -> tuple[int, int]:
    """Return the number of workers, and of the batches that each makes in advance."""
    values = config or {}
    workers = workers_of(values)
    return workers, prefetch_of(values) if workers else 0


def seconds_of(steps: Sequence[SeenStep]) -> float:
    """Return the seconds of steps without the wait for their loader; at least a microsecond for each."""
    return sum(max(step.seconds - step.wait_s, 1e-6) for step in steps)
