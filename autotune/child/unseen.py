"""Why a script cannot be measured although nothing has failed."""

from __future__ import annotations

from typing import Protocol

from autotune.child.readings import Readings
from autotune.child.trail import Trail
from autotune.base.errors import WorkloadError


class Seen(Protocol):
    """A script that has been watched; see `ScriptProcess`."""

    trail: Trail
    in_background: bool


def too_short(script: Seen) -> WorkloadError:
    """Return the error for a script that ended before enough of its training was seen."""
    trail = script.trail
    if script.in_background and trail.elsewhere != "spawned":
        return WorkloadError(
            "the command has ended, and what it started goes on in the background, where it cannot be measured",
            advice="start the script in the foreground.",
        )
    taken = max(trail.optimizer_steps.values(), default=0)
    if isinstance(trail, Readings):
        return _told_too_little(trail, taken)
    if trail.torch_version is None:
        return WorkloadError(
            "the script ended and has not imported torch",
            advice="if it has, something on the way to it replaces PYTHONPATH, by which autotune enters; if it is not "
            "PyTorch's, it can tell its rate itself: --rate.",
        )
    if not taken and trail.elsewhere is not None:
        return trains_elsewhere(trail.elsewhere)
    if not taken:
        return WorkloadError(
            "the script ended and no optimizer of PyTorch has taken a step",
            advice="steps are seen of torch.optim's classes, and of those that are made from them.",
        )
    return WorkloadError(
        f"the script ended after {taken} step(s), too few to tell its rate",
        advice="let it train for longer; it is ended as soon as enough was seen.",
    )


def _told_too_little(trail: Readings, taken: int) -> WorkloadError:
    if taken:
        return WorkloadError(
            f"the program ended after it had told its rate {taken} time(s), too few to measure it",
            advice="let it train for longer, or tell its rate more often; it is ended as soon as enough was seen.",
        )
    where = "nothing that it wrote" if trail.events else "it wrote nothing that"
    return WorkloadError(
        f"the program ended, and {where} matches --rate {trail.expression!r}",
        advice="its lines are in stdout.log and stderr.log of the launch; a file of its own is named with --rate-file.",
    )


def trains_elsewhere(how: str) -> WorkloadError:
    """Return the error for a script that trains where it is not watched.

    Args:
        how: its process has come about: ``forked`` or ``spawned``.
    """
    return WorkloadError(
        f"the script trains in a process that it has {how} itself, and which is not seen",
        advice="let it train in its own process, or start its ranks with torchrun.",
    )


def updates_unseen(how: str) -> WorkloadError:
    """Return the error for a script that trains without steps that can be seen.

    Args:
        how: as a clause.
    """
    return WorkloadError(
        f"the script trains, and no optimizer of PyTorch takes a step: {how}",
        advice="update its weights by an optimizer of torch.optim, or a class made from one, or let the script print "
        "its rate, and say how with --rate.",
    )


def kept_out() -> WorkloadError:
    """Return the error for a script whose process the agent cannot enter."""
    return WorkloadError(
        "the script has imported torch, and autotune could not enter it: something on the way to it replaces "
        "PYTHONPATH, or has Python ignore it",
        advice="put folders in front of what is there (PYTHONPATH=DIR:$PYTHONPATH), or let the script print its rate, "
        "and say how with --rate.",
    )


def never_inside(trail: Trail) -> WorkloadError:
    """Return the error for a script that goes on training, and none of whose steps can be told from the turns of its
    epochs and its evaluations."""
    if isinstance(trail, Readings):
        taken = trail.optimizer_steps[0]
        return WorkloadError(
            f"the program told its rate only {taken} time(s) in the time that a launch is measured",
            advice="let it tell its rate more often, or allow more time with --budget.",
        )
    loader = trail.loader
    batches = "" if loader is None or loader.batches is None else f", of {loader.batches} batch(es) each,"
    return WorkloadError(
        f"none of the script's steps began and ended inside an epoch{batches} without anything else between",
        advice="let it train on more data, or evaluate less often.",
    )
