"""Where an export comes from, in the sentences at its top."""

from __future__ import annotations

from autotune.space.formatting import rate_text, speedup_text
from autotune.profile import Profile, learning_rate_line, printable


def heading(profile: Profile, start: str = "torchrun --nproc-per-node={ranks}") -> list[str]:
    """Return lines with study, trial, device and rate, and what becomes of the learning rate if the batch changed.

    Args:
        start: what starts the processes of a training of several ``{ranks}``.
    """
    gives, origin = profile.gives, profile.provenance
    device = f"{profile.conditions.device_name} ({profile.conditions.device})"
    beside = speedup_text(gives.speedup, gives.speedup_ci95, gives.unproven)
    lines = [
        f"Study {origin.study}, trial {origin.trial}, of {origin.created}: {profile.workload.name} on {device},",
        f"{rate_text(gives.samples_per_second, gives.ci95)} {profile.unit} (95 %), {beside}.",
    ]
    batch, before = profile.configuration["batch_size"], profile.baseline.configuration["batch_size"]
    if batch != before:
        lines += [f"Batch {batch} instead of {before}.", learning_rate_line(profile)]
    ranks = profile.conditions.ranks
    if ranks > 1:
        lines.append(
            f"{ranks} ranks, a process each, train together on batches of their own: {start.format(ranks=ranks)}."
        )
    return [printable(line) for line in lines]
