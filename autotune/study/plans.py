"""How long launches may take and how precisely they measure, as parts of a study's budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.base.records import Config, HeatPlan, MeasurePlan, PhaseLimits, Side, Value

#: Half-widths of the ratios in a heat, 95 %, with which the rest are equal.
_SETTLED = {"cpu": 0.02, "cuda": 0.005}
_SETTLED_LOADER = 0.05
#: A turn of the loader is this many times as long as one of the device: batches come in bursts of all workers.
_LOADER_TURN = 10.0
#: In less time the turns of a heat show little, however short the budget.
_LEAST_HEAT_S = 4.0
#: No turn of a heat begins after this many times what it was expected to take, nor after this part of its time limit,
#: at which it would be killed and all of it lost.
_LATE, _LEAST_EXPECTED_S, _BEGIN_PART = 3.0, 10.0, 0.8
#: Fraction of the allowed cores that other processes may use if no core is free. The search's own process needs some.
BUSY_FRACTION = 0.1


def plan_for(budget_s: float, busy_cores: float | None) -> MeasurePlan:
    """Return the measuring plan of one launch: a fortieth of the budget, so that about twenty trials fit.

    Args:
        busy_cores: a window is discarded if no core is free and other processes use more cores than this, or if they
            use the card; ``None`` disables both checks.
    """
    return MeasurePlan(
        max_measure_s=min(30.0, max(3.0, budget_s / 40)),
        max_warmup_s=min(30.0, max(3.0, budget_s / 40)),
        busy_cores=busy_cores,
    )


def proof_plan_for(plan: MeasurePlan) -> MeasurePlan:
    """Return the measuring plan of a launch in the proof.

    Rates differ more between launches than between the windows of one launch, so several short launches tell more than
    one long one.
    """
    return plan.model_copy(update={"max_measure_s": max(3.0, 0.4 * plan.max_measure_s)})


def heat_plan_for(budget_s: float, entrants: Sequence[Config], device: str, side: Side = "device") -> HeatPlan:
    """Return the plan of a heat, whose turns take a fifteenth of the budget at most.

    Args:
        device: its contract name.
    """
    common = HeatPlan(
        side=side,
        entrants=tuple(dict[str, Value](config) for config in entrants),
        turn_s=turn_s_for(budget_s)[side],
        max_s=min(60.0, max(_LEAST_HEAT_S, budget_s / 15)),
        settled=_SETTLED["cpu" if device == "cpu" else "cuda"],
    )
    if side == "device":
        return common
    # Numbers of workers differ by much, if they differ at all.
    return common.model_copy(update={"min_rounds": 2, "max_rounds": 4, "settled": _SETTLED_LOADER})


def turn_s_for(budget_s: float) -> dict[Side, float]:
    """Return how long a turn in a heat of either side lasts at least."""
    device_s = min(0.2, max(0.02, budget_s / 3000))
    return {"device": device_s, "loader": _LOADER_TURN * device_s}


def limits_for(budget_s: float) -> PhaseLimits:
    """Return how long each phase may take before a launch counts as stuck: 120 s, or a quarter of a large budget."""
    long_s = max(120.0, budget_s / 4)
    return PhaseLimits(
        load_s=long_s, build_s=long_s, compile_s=long_s, warmup_s=180.0, measure_s=180.0, silence_s=120.0
    )


def last_turn_s(expected_s: float, left_s: float | None) -> float | None:
    """Return when the last turn of a heat may begin, in seconds after its launch; ``None`` if there is no limit."""
    late_s = min(_LATE * max(expected_s, _LEAST_EXPECTED_S), math.inf if left_s is None else _BEGIN_PART * left_s)
    return None if math.isinf(late_s) else max(0.1, late_s)
