"""Whether loader workers outlive an epoch.

Without it all workers end with an epoch and start again with the next: they fork, open the data set and fill their
queues while the device waits.

Helps: short epochs, slow worker starts (large data sets held in Python objects, libraries imported by each worker).
A team that trained on small epochs gained 1.91 times from this alone.

Hurts: the memory of the workers stays taken during evaluation, and state that a data set keeps in a worker lives on.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
"""

from __future__ import annotations

from typing import Any

from autotune.knobs.knob import Expected, Knob, Scope
from autotune.records import Value


class PersistentWorkers(Knob):
    name = "persistent_workers"
    about = "workers outlive the epoch"
    scope = Scope.LOADER
    place = 80
    values = (False, True)
    default = False
    needs = "num_workers"
    expected = {"loader": {True: Expected(0.0, 0.04)}, "whole": {True: Expected(0.02, 0.05)}}

    def phrase(self, value: Value) -> str:
        return "persistent workers" if value else "no persistent workers"

    def loader_options(self, value: Value) -> dict[str, Any]:
        return {"persistent_workers": bool(value)}


KNOB = PersistentWorkers()
