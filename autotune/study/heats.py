"""Heats of a study: configurations compared in one process, whatever single ones of them do to it."""

from __future__ import annotations

from collections.abc import Callable

from autotune.records import ATTEMPTS, Heat, HeatEntrant, HeatPlan, TrialResult, TrialStatus


def run_heat(launch: Callable[[int, HeatPlan], TrialResult], plan: HeatPlan) -> Heat:
    """Run a heat and return what is known of each entrant, in the order of the plan.

    An entrant that ends the process (a crash, a hang, a time limit, and for the reference any failure) is charged with
    it, and the others run again without it; ratios are then relative to the first of those. What was killed from
    outside is charged to nobody and runs again, at most `ATTEMPTS` times. Entrants of which nothing is known after that
    have the status ``interrupted``.

    Args:
        launch: runs one launch of a heat, given its number, counted from 1, and its plan.
    """
    found: dict[int, HeatEntrant] = {}
    left = list(range(len(plan.entrants)))
    made = innocent = 0
    seen: Heat | None = None
    cause = "the heat could not be run to its end"
    while len(left) > 1:
        made += 1
        result = launch(made, plan.model_copy(update={"entrants": tuple(plan.entrants[i] for i in left)}))
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
        charged = left.pop(result.turn)
        found[charged] = HeatEntrant(
            config=dict(plan.entrants[charged]),
            status=result.status,
            phase=result.phase,
            cause=result.cause,
            advice=result.advice,
            cannot_compile=result.cannot_compile,
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
