"""Whether loader workers are kept between epochs.

Otherwise all workers exit at the end of an epoch and are started again for the next: they fork, open the data set and
fill their queues while the device waits.

Helps: short epochs, and workers that start slowly (large data sets held in Python objects, libraries imported by each
worker). One training with small epochs became 1.91 times as fast from this alone.

Hurts: the workers' memory stays allocated during evaluation, and state that a data set keeps in a worker persists.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import Expected, Knob, OwnOption, Scope


class PersistentWorkers(Knob):
    name = "persistent_workers"
    about = "workers outlive the epoch"
    scope = Scope.LOADER
    place = 80
    values = (False, True)
    default = False
    own_options = (OwnOption(("persistent_workers", "dataloader_persistent_workers"), sets=True),)
    needs = "num_workers"
    expected = {"loader": {True: Expected(0.0, 0.04)}, "whole": {True: Expected(0.02, 0.05)}}

    def phrase(self, value: Value) -> str:
        return "persistent workers" if value else "no persistent workers"

    def loader_options(self, value: Value) -> dict[str, Any]:
        return {"persistent_workers": bool(value)}


KNOB = PersistentWorkers()
