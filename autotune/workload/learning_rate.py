"""How the learning rate usually changes with the batch size, in one sentence."""

from __future__ import annotations

import math


def follows(batch: int, before: int, *, now: float | None = None, was: float | None = None) -> str:
    """Return how the learning rate usually changes with another batch, in numbers where they are known.

    Linear in the batch: Goyal et al. 2017, arXiv:1706.02677 (SGD, after a warm-up of five epochs). In its square root:
    Krizhevsky 2014, arXiv:1404.5997; for Adam: Malladi et al. 2022, arXiv:2205.10287.

    Args:
        batch, before: samples per optimizer step, now and in the baseline.
        now, was: the learning rate of the first parameter group, as measured with each; ``None`` if unknown.

    Returns:
        A sentence without its full stop.
    """
    ratio = batch / before
    if now is not None and was is not None and now != was:
        return f"The workload scales its learning rate itself: {now:.3g} instead of {was:.3g}"
    linear, root = f"{ratio:.3g}×", f"{math.sqrt(ratio):.3g}×"
    subject = "The learning rate usually follows"
    if was is not None:
        linear, root = f"{was * ratio:.3g}", f"{was * math.sqrt(ratio):.3g}"
        subject = f"The learning rate of {was:.3g} usually follows"
    warm_up = ", after a warm-up of some epochs" if ratio > 1 else ""
    return f"{subject}: {linear} in proportion (SGD) or {root} with the square root (Adam){warm_up}"
