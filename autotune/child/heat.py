"""A heat in this process: what an entrant does to itself takes it out, what it does to the process ends the heat.

How entrants race, `autotune.stats.racing` says; what a turn is, `device_turns` and `loader_turns`.
"""

from __future__ import annotations

import os
import random

from autotune.child.beats import Beats
from autotune.child.failure import Disturbed, classify
from autotune.child.launch import order_seed
from autotune.base.clock import Clock
from autotune.knobs import shares
from autotune.stats.racing import Contender, Rounds, Turns, is_contained
from autotune.base.records import Heat, HeatPlan, TrialSpec, Turn
from autotune.stats import LaunchNoise


def race(spec: TrialSpec, plan: HeatPlan, turns: Turns, beats: Beats, clock: Clock, began: float) -> Heat:
    """Compare the entrants of a heat in rounds.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        Disturbed: other processes kept the machine too busy to measure.

    Whatever the reference raises is raised; what another entrant raises takes that one out of the heat if the others
    are unharmed (`is_contained`).
    """
    order = random.Random(order_seed(spec))
    found = Rounds(plan, _Guarded(spec, plan, turns, beats), clock, order).run(began)
    if found is None:
        raise Disturbed("other processes kept the machine too busy to compare anything")
    return found


class _Guarded:
    """Turns whose errors are charged to whose turn it is."""

    def __init__(self, spec: TrialSpec, plan: HeatPlan, turns: Turns, beats: Beats) -> None:
        self._spec, self._plan, self._turns, self._beats = spec, plan, turns, beats
        #: Entrants of which something has refused a knob's value.
        self._refused: list[Contender] = []

    @property
    def prior(self) -> LaunchNoise:
        return self._turns.prior

    @property
    def switch_s(self) -> float:
        return self._turns.switch_s

    def take(self, entrant: Contender) -> Turn | None:
        leader = os.getpid()
        first = next((one for one in self._refused if shares(one.refuses, one.config, entrant.config)), None)
        if first is not None:
            # What refuses a value does so whatever the other knobs are.
            entrant.phase, entrant.status, entrant.cause = first.phase, first.status, first.cause
            entrant.refuses = first.refuses
            return None
        self._beats.turn(entrant.number)
        try:
            return self._turns.take(entrant)
        except BaseException as error:
            if os.getpid() != leader or entrant.number == 0:
                raise
            spec = self._spec.model_copy(update={"config": dict(entrant.config)})
            found = classify(error, spec, self._beats.phase)
            # A script that has ended goes on with nobody.
            if spec.command is not None or not is_contained(self._plan.side, spec.devices[0], found.status):
                raise
            entrant.phase = self._beats.phase
            entrant.status, entrant.cause, entrant.advice = found.status, found.cause, found.advice
            entrant.cannot_compile, entrant.refuses = found.cannot_compile, found.refuses
            if found.refuses is not None:
                self._refused.append(entrant)
            return None

    def leave(self, entrant: Contender) -> None:
        self._turns.leave(entrant)
