"""Checks that the winner holds: trains until its memory has settled, with an evaluation pass and the largest sample."""

from __future__ import annotations

from statistics import fmean

from autotune.space.formatting import figure_text
from autotune.base.records import FIGURES, Hold, HoldPlan, HoldVerdict, LaunchKind, TrialStatus
from autotune.search.verify.entrant import Entrant, ended_from_outside
from autotune.search.verify.final import Final
from autotune.search.verify.judgements import held

#: Fraction of device memory that must stay free, for other processes, fragmentation, or a larger sample.
HEADROOM = 0.08
#: Training for less time does not show growth of memory.
_LEAST_S = 2.0
#: On CUDA the winner then trains for at most this long, and at most half of the time, to tell the rate that the card
#: holds. The windows of a launch take a few seconds after a pause, in which a card may run at clocks that its limits of
#: power and heat do not allow for longer.
_SUSTAIN_S = 20.0
_LEAST_LIMIT_S = 20.0


def check_holding(final: Final, winner: Entrant, share_s: float) -> HoldVerdict:
    """Run the winner until its memory settles, and on CUDA some time longer. If it does not hold, it drops out of the
    race."""
    number = winner.trial.number
    if final.by_command:
        why = "a script is not run for longer than its launches"
        return HoldVerdict(trial=number, passed=None, reason=why, headroom_wanted=HEADROOM)
    start_s = max((m.startup_s + m.compile_s for m in winner.seen), default=0.0)
    train_s = min(share_s, final.launches.budget.left_s) - start_s
    name = f"hold-{winner.name}"
    if train_s < _LEAST_S and final.launches.finished(name, winner.config) is None:
        return HoldVerdict(trial=number, passed=None, reason="there was no time to check it", headroom_wanted=HEADROOM)
    # The evaluation pass may need compiling, too.
    limit_s = max(_LEAST_LIMIT_S, 2 * (start_s + max(train_s, _LEAST_S)))
    train_s = max(train_s, _LEAST_S)
    sustain_s = min(_SUSTAIN_S, train_s / 2) if final.device == "cuda" else 0.0
    plan = HoldPlan(min_s=min(5.0, train_s / 2), max_s=train_s - sustain_s, sustain_s=sustain_s)
    result = final.launches.run_outside(
        LaunchKind.HOLD, name, f"checking that trial {number} holds", winner.config, hold=plan, limit_s=limit_s
    )
    final.raise_if_stopped()
    if result.hold is not None:
        reason = held(result.hold, HEADROOM)
        passed: bool | None = reason is None
        # Memory that kept growing, but left enough room, is neither a pass nor a failure.
        if held(result.hold.model_copy(update={"settled": True}), HEADROOM) is None and not result.hold.settled:
            passed = None
        if passed is not False:
            beyond = _beyond_required(final, result.hold)
            passed, reason = (passed, reason) if beyond is None else (False, beyond)
    elif ended_from_outside(result) or result.status is TrialStatus.TIMEOUT:
        # The time limit is ours, and hitting it says nothing about memory.
        passed, reason = None, f"its check ended as {result.status}: {result.cause}"
    else:
        passed, reason = False, f"it ended as {result.status} in the long run: {result.cause}"
    if passed is False:
        winner.out = f"did not hold: {reason}"
        final.observer.says(f"{winner.title} {winner.out}")
    return HoldVerdict(
        trial=number,
        passed=passed,
        reason=reason,
        hold=result.hold,
        headroom_wanted=HEADROOM,
        sustained_per_s=_sustained_per_s(result.hold, winner),
    )


def _beyond_required(final: Final, hold: Hold) -> str | None:
    """Return by what its memory exceeds what is required, as a clause: an evaluation and the largest sample may take
    more than the launches did."""
    memory = FIGURES["peak_memory"]
    for one in final.required.every:
        if one.figure is memory and one.at_most and hold.peak_bytes > one.limit:
            took = figure_text(memory, hold.peak_bytes)
            return f"it took {took} in a longer training with an evaluation, and {one} is required"
    return None


def _sustained_per_s(hold: Hold | None, winner: Entrant) -> float | None:
    """Return the sustained rate with the turns of epochs, which take the same part of it as in the launches that were
    timed."""
    if hold is None or hold.sustained_per_s is None or not winner.seen:
        return None
    return hold.sustained_per_s * fmean(m.samples_per_s / m.steady_per_s for m in winner.seen)
