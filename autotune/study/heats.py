"""Heats of a study: configurations compared in one process, whatever single ones of them do to it."""

from __future__ import annotations

from typing import Protocol

from autotune.records import ATTEMPTS, Config, HeatEntrant, HeatPlan, LaunchKind, TrialResult, TrialStatus


class RunsHeats(Protocol):
    """What a heat needs of `Launches`."""

    def run_outside(
        self,
        kind: LaunchKind,
        launch: str,
        title: str,
        config: Config,
        *,
        heat: HeatPlan,
        attempts: int,
        limit_s: float | None,
    ) -> TrialResult: ...


def run_heat(
    launches: RunsHeats, name: str, title: str, plan: HeatPlan, *, limit_s: float | None = None
) -> tuple[HeatEntrant, ...]:
    """Run a heat and return what is known of each entrant, in the order of the plan.

    An entrant that ends the process (a crash, a hang, a time limit, and for the reference any failure) is charged with
    it, and the others run again without it; ratios are then relative to the first of those. What was killed from
    outside is charged to nobody and runs again, at most `ATTEMPTS` times. Entrants of which nothing is known after that
    have the status ``interrupted``.

    Args:
        name: of the heat, unique in the study; its launches are called ``name-1``, ``name-2``, …
        limit_s: time limit of each launch.
    """
    found: dict[int, HeatEntrant] = {}
    left = list(range(len(plan.entrants)))
    launch = innocent = 0
    while len(left) > 1:
        launch += 1
        entrants = tuple(plan.entrants[i] for i in left)
        result = launches.run_outside(
            LaunchKind.HEAT,
            f"{name}-{launch}",
            title,
            entrants[0],
            heat=plan.model_copy(update={"entrants": entrants}),
            attempts=1,
            limit_s=limit_s,
        )
        if result.heat is not None:
            found |= dict(zip(left, result.heat.entrants, strict=True))
            return tuple(found[i] for i in range(len(plan.entrants)))
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
    unknown = "the heat could not be run to its end"
    return tuple(
        found.get(i, HeatEntrant(config=dict(config), status=TrialStatus.INTERRUPTED, cause=unknown))
        for i, config in enumerate(plan.entrants)
    )
