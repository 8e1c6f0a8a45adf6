"""Replays recorded heats: the real race, with the recorded turns, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from autotune.base.clock import Clock
from autotune.launcher.watch import Watch
from autotune.stats.racing import PRIORS, Contender, Rounds, is_contained
from autotune.base.records import Beat, HeatPlan, Phase, TrialResult, TrialSpec, TrialStatus, Turn
from autotune.search.replay.rows import PARTS, Row, ShownEntrant
from autotune.space import key

#: A launch is ended this long after its limit at most.
_TICK_S = 1.0


class _Over(Exception):
    """The heat's process ends."""

    def __init__(self, result: TrialResult) -> None:
        super().__init__(result.cause)
        self.result = result


def replay_heat(
    spec: TrialSpec,
    plan: HeatPlan,
    row: Row,
    watch: Watch,
    clock: Clock,
    rng: random.Random,
    first_step_s: Callable[[ShownEntrant], float],
    failed: Mapping[str, Row],
) -> TrialResult:
    """Replay a heat with the turns of a recorded one.

    Entrants take the turns of one recorded round together, so that whatever slowed that round down slows all of them.
    The first round is the first recorded one; with which the others begin is drawn. There are at most as many as were
    recorded. The seconds before the first turn, and those between two of them, are the recorded heat's, whoever takes
    part in it.

    Args:
        row: a heat of that side with all entrants of the plan but those that failed.
        first_step_s: returns the seconds of an entrant's first step, with its compilation.
        failed: a failed launch of each part of the device that cannot be trained; no recorded heat has these.
    """
    began = clock.now()
    watch.beat(Beat(phase=Phase.LOAD))
    clock.sleep(row.startup_s or 0.0)
    entrants = [_entrant(key(PARTS[plan.side](config)), row, failed) for config in plan.entrants]
    plan = plan.model_copy(update={"max_rounds": max(2, min(plan.max_rounds, row.rounds))})
    turns = _Recorded(spec, plan, row, entrants, watch, clock, rng.randrange(1000), first_step_s)
    try:
        heat = Rounds(plan, turns, clock, rng).run(began)
    except _Over as over:
        return over.result
    if heat is None:
        cause = "other processes kept the machine too busy to compare anything"
        return TrialResult(launch=spec.launch, status=TrialStatus.INTERRUPTED, cause=cause, exit_code=1, transient=True)
    return TrialResult(launch=spec.launch, status=TrialStatus.COMPLETE, exit_code=0, heat=heat)


def _entrant(name: str, row: Row, failed: Mapping[str, Row]) -> ShownEntrant:
    if name in row.shown:
        return row.shown[name]
    launch = failed[name]
    return ShownEntrant(config=launch.config, status=launch.status, cause=launch.cause, peak_bytes=launch.peak_bytes)


class _Recorded:
    def __init__(
        self,
        spec: TrialSpec,
        plan: HeatPlan,
        row: Row,
        entrants: Sequence[ShownEntrant],
        watch: Watch,
        clock: Clock,
        start: int,
        first_step_s: Callable[[ShownEntrant], float],
    ) -> None:
        self._spec, self._plan, self._row, self._entrants = spec, plan, row, entrants
        self._watch, self._clock, self._start, self._first_step_s = watch, clock, start, first_step_s
        self.switch_s = 0.0
        self.prior = PRIORS["cuda" if spec.devices[0].startswith("cuda") and plan.side == "device" else "cpu"]

    def take(self, entrant: Contender) -> Turn | None:
        recorded = self._entrants[entrant.number]
        played = len(entrant.turns)
        compiles = not played and self._plan.side == "device"
        phase = Phase.COMPILE if compiles else Phase.WARMUP if self._plan.side == "loader" else Phase.MEASURE
        self._watch.beat(Beat(phase=phase, turn=entrant.number))
        self._sleep(self._row.between_each_s, entrant)
        self.switch_s += self._row.between_each_s
        if compiles and recorded.first_step_s is not None:
            seconds = self._first_step_s(recorded)
            self._sleep(seconds, entrant)
            entrant.first_step_s = seconds
        entrant.peak_bytes = recorded.peak_bytes
        if recorded.status is not TrialStatus.COMPLETE:
            self._fail(entrant, recorded, phase)
            return None
        turn = recorded.turn(0 if not played else 1 + (self._start + played - 1) % max(1, len(recorded.turns) - 1))
        if turn is None:
            return None
        self._watch.beat(Beat(phase=Phase.MEASURE, turn=entrant.number, step=played + 1))
        self._sleep(turn.seconds, entrant)
        entrant.step_s = turn.seconds / turn.steps
        return turn

    def leave(self, entrant: Contender) -> None:
        """Nothing is left of a recorded turn."""

    def _fail(self, entrant: Contender, recorded: ShownEntrant, phase: Phase) -> None:
        if entrant.number != 0 and is_contained(self._plan.side, self._spec.devices[0], recorded.status):
            entrant.status, entrant.phase, entrant.cause = recorded.status, phase, recorded.cause
            entrant.cannot_compile = recorded.cannot_compile
            return
        raise _Over(
            TrialResult(
                launch=self._spec.launch,
                status=recorded.status,
                phase=phase,
                cause=recorded.cause,
                exit_code=1,
                turn=entrant.number,
                cannot_compile=recorded.cannot_compile,
            )
        )

    def _sleep(self, seconds: float, entrant: Contender) -> None:
        while seconds > 0:
            self._clock.sleep(min(_TICK_S, seconds))
            seconds -= _TICK_S
            if self._watch.overdue():
                raise _Over(
                    TrialResult(
                        launch=self._spec.launch,
                        status=self._watch.ended or TrialStatus.INTERRUPTED,
                        phase=self._watch.phase,
                        cause=self._watch.cause,
                        exit_code=-9,
                        turn=entrant.number,
                    )
                )
