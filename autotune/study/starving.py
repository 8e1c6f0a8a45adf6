"""Which winners of other studies are not worth being tried first: those that leave a starving loader alone."""

from __future__ import annotations

from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.records import Config, Trial

#: If a training waits for its loader for more than this part of a step, what its device gains hardly matters: at most
#: 1 / WAITS (Amdahl, AFIPS 1967).
WAITS = 2 / 3


def waits_as_long(config: Config, baseline: Trial | None) -> bool:
    """Return whether a configuration has as many workers as a baseline that mostly waits for its loader.

    It could gain little, and its trial would take as long as the baseline's. The sampler is free to propose it later.
    """
    measured = None if baseline is None else baseline.result.measurement
    if baseline is None or measured is None or (measured.loader_wait_fraction or 0.0) <= WAITS:
        return False
    return config.get(WORKERS.name) == baseline.config.get(WORKERS.name)
