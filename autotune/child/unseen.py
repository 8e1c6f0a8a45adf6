"""Why a script that ended, without a fault, cannot be measured."""

from __future__ import annotations

from autotune.child.trail import Trail
from autotune.errors import WorkloadError


def too_short(trail: Trail) -> WorkloadError:
    """Return the error for a script that ended before enough of its training was seen."""
    if trail.torch_version is None:
        return WorkloadError("the script ended and has not imported torch")
    taken = max(trail.optimizer_steps.values(), default=0)
    if not taken:
        return WorkloadError("the script ended and no optimizer of PyTorch has taken a step")
    short = trail.loader
    if short is not None and short.batches is not None and short.batches <= 2:
        return WorkloadError(
            f"the script's epochs have {short.batches} batch(es), of which none lies between two others",
            advice="let it train on more data.",
        )
    return WorkloadError(
        f"the script ended after {taken} step(s), too few to tell its rate",
        advice="let it train for longer; it is ended as soon as enough was seen.",
    )
