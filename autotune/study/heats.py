"""Heats of a study: configurations compared in one process, whatever single ones of them do to it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from autotune.base.records import ATTEMPTS, Config, Heat, HeatEntrant, HeatPlan, TrialResult, TrialStatus
from autotune.knobs import shares


def run_heat(launch: Callable[[int, HeatPlan], TrialResult], plan: HeatPlan) -> Heat:
    """Run a heat and return what is known of each entrant, in the order of the plan.

    Args:
        launch: runs one launch of a heat, given its number, counted from 1, and its plan; see `heat_steps`.
    """
    steps = heat_steps(plan)
    result = None
    while True:
        try:
            number, part = next(steps) if result is None else steps.send(result)
        except StopIteration as ended:
            heat: Heat = ended.value
            return heat
        result = launch(number, part)


def heat_steps(plan: HeatPlan) -> Generator[tuple[int, HeatPlan], TrialResult, Heat]:
    """Yield the number, counted from 1, and the plan of each launch of a heat; is sent the launch's result; returns
    what is known of each entrant, in the order of the plan.

    An entrant that ends the process (a crash, a hang, a time limit, and for the reference any failure) is charged with
    it, and the others run again without it, and without those that would be refused alike; ratios are then relative to
    the first of those. What was killed from outside is charged to nobody and runs again, at most `ATTEMPTS` times.
    Entrants of which nothing is known after that have the status ``interrupted``.
    """
    found: dict[int, HeatEntrant] = {}
    left = list(range(len(plan.entrants)))
    made = innocent = 0
    seen: Heat | None = None
    cause = "the heat could not be run to its end"
    while len(left) > 1:
        made += 1
        result = yield made, plan.model_copy(update={"entrants": tuple(plan.entrants[i] for i in left)})
        if result.heat is not None and result.status is TrialStatus.COMPLETE:
            seen = result.heat
            found |= dict(zip(left, seen.entrants, strict=True))
            break
        cause = result.cause or cause
        if result.status is TrialStatus.INTERRUPTED:
            break
        if result.status is TrialStatus.KILLED or result.turn is None:
            innocent += 1
            if innocent == ATTEMPTS or (result.turn is None and not result.transient):
                break
            continue
        failed = left[result.turn]
        # What refuses a value does so whatever the other knobs are.
        alike = [i for i in left if shares(result.refuses, plan.entrants[failed], plan.entrants[i])]
        # The reference has run with what it has.
        for charged in [failed] if 0 in alike or not alike else alike:
            left.remove(charged)
            found[charged] = HeatEntrant(
                config=dict(plan.entrants[charged]),
                status=result.status,
                phase=result.phase,
                cause=result.cause,
                advice=result.advice,
                cannot_compile=result.cannot_compile,
                refuses=result.refuses,
                peak_bytes=result.peak_bytes,
            )
    entrants = tuple(
        found.get(i, HeatEntrant(config=dict(config), status=TrialStatus.INTERRUPTED, cause=cause))
        for i, config in enumerate(plan.entrants)
    )
    if seen is None:
        return Heat(
            side=plan.side, entrants=entrants, noise_sd=0.0, startup_s=0.0, switch_s=0.0, measured_s=0.0, ended=cause
        )
    return seen.model_copy(update={"entrants": entrants})


def dealt(entrants: Sequence[Config], hands: int) -> list[tuple[Config, ...]]:
    """Deal the entrants of a heat out to several: the first one, the reference, takes part in all of them.

    Returns:
        at most ``hands`` heats, each with two entrants at least beside the reference, if there are as many.
    """
    reference, others = entrants[0], entrants[1:]
    count = max(1, min(hands, len(others) // 2))
    return [(reference, *others[first::count]) for first in range(count)]
