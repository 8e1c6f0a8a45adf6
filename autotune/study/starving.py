"""Trainings that wait for their loader: which winners of other studies are not worth being tried first, because they
leave a starving loader alone, and which trials cannot run beside others."""

from __future__ import annotations

from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.base.records import Config, Trial

#: If a training waits for its loader for more than this part of a step, what its device gains hardly matters: at most
#: 1 / WAITS (Amdahl, AFIPS 1967).
WAITS = 2 / 3
#: A training that waits for less than this part of a step hardly changes with what others read.
READS = 0.2


def waits_as_long(config: Config, baseline: Trial | None) -> bool:
    """Return whether a configuration has as many workers as a baseline that mostly waits for its loader.

    It could gain little, and its trial would take as long as the baseline's. The sampler is free to propose it later.
    """
    measured = None if baseline is None else baseline.result.measurement
    if baseline is None or measured is None or (measured.loader_wait_fraction or 0.0) <= WAITS:
        return False
    return config.get(WORKERS.name) == baseline.config.get(WORKERS.name)


def waits_for_the_disk(trial: Trial) -> bool:
    """Return whether a complete trial waited for files that are not known to be in the page cache.

    Beside others it would have to share the disk, or the network, with what they read.
    """
    measured = trial.result.measurement
    if measured is None or measured.page_cache not in ("cold", "unknown"):
        return False
    return (measured.loader_wait_fraction or 0.0) > READS
