"""Does it hold? The winner trained on until its memory has settled, with an evaluation pass and the largest sample."""

from __future__ import annotations

from autotune.records import HoldPlan, HoldVerdict, LaunchKind, TrialStatus
from autotune.verify.entrant import Entrant, ended_from_outside
from autotune.verify.judgements import held
from autotune.verify.race import Final

#: Fraction of the device's memory that has to stay free: other processes, fragmentation, a larger sample.
HEADROOM = 0.08
#: Training shorter than this shows no growth.
_LEAST_S = 2.0
_LEAST_LIMIT_S = 20.0


def check_holding(final: Final, winner: Entrant, share_s: float) -> HoldVerdict:
    """Let the winner hold; one that does not is out of the race."""
    number = winner.trial.number
    start_s = max((m.startup_s + m.compile_s for m in winner.seen), default=0.0)
    train_s = min(share_s, final.launches.budget.left_s) - start_s
    name = f"hold-{winner.name}"
    if train_s < _LEAST_S and final.launches.finished(name, winner.config) is None:
        return HoldVerdict(trial=number, passed=None, reason="there was no time to check it", headroom_wanted=HEADROOM)
    # The evaluation pass may have to be compiled as well.
    limit_s = max(_LEAST_LIMIT_S, 2 * (start_s + max(train_s, _LEAST_S)))
    plan = HoldPlan(min_s=min(5.0, max(train_s, _LEAST_S) / 2), max_s=max(train_s, _LEAST_S))
    result = final.launches.aside(
        LaunchKind.HOLD, name, f"checking that trial {number} holds", winner.config, hold=plan, limit_s=limit_s
    )
    final.heed()
    if result.hold is not None:
        reason = held(result.hold, HEADROOM)
        passed: bool | None = reason is None
        # Memory that went on growing, with room to spare, was not seen to hold, and not seen to fail.
        if held(result.hold.model_copy(update={"settled": True}), HEADROOM) is None and not result.hold.settled:
            passed = None
    elif ended_from_outside(result) or result.status is TrialStatus.TIMEOUT:
        # Its time limit is ours, and says nothing about memory.
        passed, reason = None, f"its check ended as {result.status}: {result.cause}"
    else:
        passed, reason = False, f"it ended as {result.status} in the long run: {result.cause}"
    if passed is False:
        winner.out = f"did not hold: {reason}"
        final.observer.says(f"{winner.title} {winner.out}")
    return HoldVerdict(trial=number, passed=passed, reason=reason, hold=result.hold, headroom_wanted=HEADROOM)
