"""Judges whether a finalist trains correctly and stays within memory, from the results of its launches.

A fast configuration can be silently wrong: a number format in which the loss overflows, a layout that scrambles the
input, a compiler that drops a gradient. The yardstick is the scatter of eager fp32, as in MLPerf's reference
convergence points (MLPerf Training Rules, "Reference Convergence Points"): runs of the reference that differ only in
their seeds show how far apart curves of the same training lie.

The thresholds are judgement calls. `benchmarks/results/gate-power.md` shows what they detect: 24 steps of 260 small
trainings (perceptrons, convolutions, transformers, dropout; SGD and AdamW at learning rates from too low to too high;
batches of 4 to 64; learnable and random labels), with other seeds than those used to set the thresholds. Of 1,300
correct runs two failed, both of one training at a learning rate far too high. Frozen tensors and a doubled loss were
always detected. Where the loss of fp32 fell by more than 30 %, so were gradients that were zero, noise, or of the wrong
sign, and 94 of 95 trainings with shuffled labels. Where it fell by less than 2 %, a fifth of the zero gradients, most
of the wrong signs and few of the shuffled labels were detected: a training that has not begun to learn shows little. No
short check detects a gradient that is wrong by a factor which could be part of the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, stdev, variance

from autotune.base.records import EAGER_FP32, Hold, TrainCheck

#: Losses closer than this fraction of their size count as equal, regardless of the seeds. Rounding to bf16 (8
#: significant bits, 0.4 %) moves a short curve by 1 to 2 %.
FLOOR = 0.05
#: The same for the fall of a loss; smaller, because it is computed from means over several steps.
FALL_FLOOR = 0.01
#: A curve may be this many times as far away as two seeds are: with three pairs seen, a fourth may be the largest.
SLACK = 1.5
#: Fraction of the steps left out when curves are compared: those with the largest differences.
JUMPS = 0.1
#: The loss must fall by this fraction of the fall of the slowest reference.
LEAST_FALL = 0.5
#: Differences below this many standard errors do not count: dropout draws other numbers in other kernels.
ERRORS = 4.0
#: Dropout moves a single loss by no more than this fraction of its size, even for small batches.
DROPOUT = 0.25
#: A reference whose loss rises to more than this multiple of its first value cannot serve as a yardstick.
EXPLODED = 3.0
#: A GradScaler starts at 65536 and may skip some steps before it finds its scale.
SKIPS_ALLOWED = 2
SKIPS_FRACTION = 0.25


@dataclass(frozen=True)
class Judgement:
    """Whether a training matches the eager fp32 training.

    Attributes:
        passed: ``None`` if that cannot be decided.
        reason: one sentence; ``None`` only if passed.
        tolerance: largest accepted mean difference between the curves (see `JUMPS`), in units of the loss.
        distance: the observed mean difference. Both are ``None`` if there are no curves to compare.
    """

    passed: bool | None
    reason: str | None = None
    tolerance: float | None = None
    distance: float | None = None


def judge(candidate: TrainCheck, references: Sequence[TrainCheck], beside: str = EAGER_FP32) -> Judgement:
    """Compare a training with eager fp32 trainings.

    Args:
        references: the first started from the candidate's weights, the others from weights of other seeds. All took
            the same steps over the same batches. Of a script, they are runs of it as it stands, which begin with the
            same random numbers if it does not seed them, the first with the candidate's.
        beside: what they are called.

    Raises:
        ValueError: there is no reference, or complete curves have different lengths.
    """
    unfit = _unfit(references, beside)
    if unfit is not None:
        return Judgement(None, unfit)
    reference = references[0]
    pairs = list(combinations((r.losses for r in references), 2))
    size = mean(abs(loss) for loss in reference.losses)
    tolerance = max(FLOOR * size, SLACK * max(_distance(a, b) for a, b in pairs))
    reason = _broken(candidate)
    if reason is not None:
        seen = _distance(candidate.losses, reference.losses) if candidate.losses else None
        return Judgement(False, reason, tolerance, seen)
    if any(len(r.losses) != len(candidate.losses) for r in references):
        raise ValueError("these curves were not made with the same number of steps")
    distance = _distance(candidate.losses, reference.losses)
    reason = (
        _unchanged(candidate, references, beside)
        or _begins_elsewhere(candidate, references, size, beside)
        or _does_not_fall(candidate, references, size, beside)
    )
    if reason is None and distance > tolerance:
        reason = (
            f"its loss is {_percent(distance, size)} off {beside}'s{_start(beside)} on average, "
            f"and {_percent(tolerance, size)} is accepted"
        )
    if reason is None:
        reason = _metric_differs(candidate, references, beside)
    return Judgement(reason is None, reason, tolerance, distance)


def held(hold: Hold, headroom: float) -> str | None:
    """Return why a training does not hold, in one sentence; ``None`` if it does.

    Args:
        headroom: fraction of the capacity that must have stayed free.
    """
    if not hold.settled:
        return f"its memory was still growing after {hold.seconds:.0f} s ({hold.steps} steps)"
    if hold.alloc_retries:
        return (
            f"CUDA's allocator ran out of memory and had to empty its cache (num_alloc_retries: {hold.alloc_retries})"
        )
    if hold.headroom < headroom:
        return (
            f"it leaves {100 * hold.headroom:.1f} % of {hold.capacity_bytes / 2**30:.1f} GiB free, "
            f"and {100 * headroom:.3g} % is wanted"
        )
    return None


def _unfit(references: Sequence[TrainCheck], beside: str) -> str | None:
    """Return why the references cannot serve as a yardstick; ``None`` if they can."""
    if not references:
        raise ValueError("a training can only be judged by a reference")
    if len(references) < 2:
        return f"there is one run of {beside} only, which shows no scatter to compare with"
    for reference in references:
        if not reference.finite:
            return f"{beside} itself fails: {_not_finite(reference)}"
        if reference.changed == 0:
            return f"{beside} itself changes no parameter"
        first, last = _ends(reference.losses)
        if last - first > EXPLODED * max(abs(first), abs(reference.losses[0])):
            return f"{beside} itself diverges on the saved batches: {first:.4g} → {last:.4g}"
    return None


def _start(beside: str) -> str:
    """Return what is known of where the references began."""
    return " from the same weights" if beside == EAGER_FP32 else ""


def _broken(candidate: TrainCheck) -> str | None:
    if not candidate.finite:
        return _not_finite(candidate)
    allowed = max(SKIPS_ALLOWED, SKIPS_FRACTION * len(candidate.losses))
    if candidate.scaler_skips > allowed:
        steps = len(candidate.losses) + candidate.scaler_skips
        return f"GradScaler left out {candidate.scaler_skips} of {steps} steps because of overflows"
    return None


def _not_finite(check: TrainCheck) -> str:
    return f"the loss became infinite or no number at step {len(check.losses) + 1}"


def _unchanged(candidate: TrainCheck, references: Sequence[TrainCheck], beside: str) -> str | None:
    """Check for frozen tensors. A tensor whose gradient is only rounding may change in some runs and not in others, so
    the reference with the fewest changed tensors counts."""
    least = min(r.changed for r in references)
    if candidate.changed >= least:
        return None
    if candidate.changed == 0:
        return "no parameter changed"
    return f"only {100 * candidate.changed:.3g} % of the trainable tensors changed, in {beside} {100 * least:.3g} %"


def _begins_elsewhere(candidate: TrainCheck, references: Sequence[TrainCheck], size: float, beside: str) -> str | None:
    """Check the first loss: before any update, equal weights and batches give equal losses, except for rounding and
    dropout."""
    mine, theirs = candidate.losses[0], references[0].losses[0]
    seeds = [r.losses[0] for r in references]
    early = _differences(candidate, references[0])[: _quarter(candidate.losses)]
    first_size = max(size, abs(theirs))
    dropout = min(ERRORS * stdev(early), DROPOUT * first_size) if len(early) > 1 else 0.0
    if abs(mine - theirs) <= max(FLOOR * first_size, SLACK * (max(seeds) - min(seeds)), dropout):
        return None
    return f"its first loss is {mine:.4g}, where {beside} has {theirs:.4g}{_start(beside)}"


def _does_not_fall(candidate: TrainCheck, references: Sequence[TrainCheck], size: float, beside: str) -> str | None:
    falls = [_fall(r.losses) for r in references]
    least = min(falls)
    if least <= 0:
        # Eager fp32 does not learn in these steps, so that no fall can be asked for; how far the curves may lie apart
        # is judged by itself. ResNet-50 at its usual learning rate rises from 6.7 to 7.4 in nine steps, bf16 to 8.6.
        return None
    error = _fall_error(_differences(candidate, references[0]))
    slack = max((1 - LEAST_FALL) * least, SLACK * (max(falls) - least), FALL_FLOOR * size, ERRORS * error)
    if _fall(candidate.losses) >= least - slack:
        return None
    (first, last), (ref_first, ref_last) = _ends(candidate.losses), _ends(references[0].losses)
    return (
        f"its loss does not fall as it should: {first:.4g} → {last:.4g}, "
        f"where {beside} went {ref_first:.4g} → {ref_last:.4g}"
    )


def _metric_differs(candidate: TrainCheck, references: Sequence[TrainCheck], beside: str) -> str | None:
    """Check the workload's own metric as the losses are checked: seeds show how far apart it may be."""
    theirs = [r.metric for r in references if r.metric is not None]
    if candidate.metric is None or len(theirs) < len(references) or len(set(theirs)) == 1:
        # What is the same for each seed (no class is told apart yet) shows no scatter to compare with.
        return None
    allowed = max(FLOOR * abs(theirs[0]), SLACK * (max(theirs) - min(theirs)))
    if abs(candidate.metric - theirs[0]) <= allowed:
        return None
    return (
        f"its losses are as they should be, and its metric is {candidate.metric:.4g} afterwards, where {beside} has "
        f"{theirs[0]:.4g}{_start(beside)}, and {allowed:.3g} of difference is accepted"
    )


def _differences(candidate: TrainCheck, reference: TrainCheck) -> list[float]:
    return [a - b for a, b in zip(candidate.losses, reference.losses, strict=True)]


def _fall_error(differences: Sequence[float]) -> float:
    """Return the standard error of the difference between two curves' falls, from their scatter around each other.

    It is that of a difference between two means (Snedecor & Cochran, Statistical Methods, ch. 6), for equal batches.
    """
    quarter = _quarter(differences)
    if quarter < 2:
        return 0.0
    return math.sqrt((variance(differences[:quarter]) + variance(differences[-quarter:])) / quarter)


def _quarter(losses: Sequence[float]) -> int:
    return max(1, len(losses) // 4)


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean losses over the first and the last quarter."""
    quarter = _quarter(losses)
    return mean(losses[:quarter]), mean(losses[-quarter:])


def _fall(losses: Sequence[float]) -> float:
    first, last = _ends(losses)
    return first - last


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean absolute difference over the common steps, without the largest differences.

    At a high learning rate a loss jumps now and then, and back, at random steps.
    """
    apart = sorted(abs(x - y) for x, y in zip(a, b, strict=False))
    return mean(apart[: len(apart) - int(JUMPS * len(apart))])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else f"{part:.3g}"
