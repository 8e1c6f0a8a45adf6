"""The number of batches that each loader worker prepares in advance.

Helps: varying read times, as from a network store: a longer queue bridges slow reads.

Hurts: the queues of all workers take /dev/shm and host memory: workers × (prefetch + 1) batches. If the queues are
always full, longer ones gain nothing.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Config, Value
from autotune.knobs.knob import Expected, Knob, OwnOption, Scope, SiteFacts


class PrefetchFactor(Knob):
    name = "prefetch_factor"
    about = "batches each worker prepares ahead"
    scope = Scope.LOADER
    place = 60
    default = 2
    maximum = 2**8
    own_options = (OwnOption(("prefetch_factor", "dataloader_prefetch_factor"), like=r".*prefetch.*"),)
    needs = "num_workers"
    expected = {"loader": {None: Expected(0.0, 0.04)}, "whole": {None: Expected(0.0, 0.05)}}

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """2, 4 and 8."""
        return (2, 4, 8)

    def phrase(self, value: Value) -> str:
        return f"prefetch {value}"

    def loader_options(self, value: Value) -> dict[str, Any]:
        return {"prefetch_factor": int(value)}


KNOB = PrefetchFactor()


def prefetch_of(config: Config) -> int:
    """Return the prefetch factor of a configuration, or PyTorch's own if it is not set."""
    return int(config.get(KNOB.name, KNOB.default))
