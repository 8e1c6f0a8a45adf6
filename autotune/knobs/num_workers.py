"""The number of processes that load and decode samples in parallel with the training process.

With 0, the training process loads each batch itself while the device waits.

Helps: whenever loading takes a noticeable part of a step. On a slow store each worker adds its own rate until the
device's rate is reached, even with more workers than cores, because workers wait more than they compute (29 to 469
images/s with 0 to 16 workers on 2 cores and a store that takes 30 ms per read).

Hurts: each worker is a process with its own memory, and its queue of batches is in /dev/shm, which is small in
containers. On a CPU, workers take cores from the training itself.

Source: https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Config, Host, Value
from autotune.knobs.knob import Expected, Knob, OwnOption, Scope, SiteFacts, doubled

#: The largest number considered: `PER_CORE` workers for each allowed core, but at least `AT_LEAST` and at most
#: `AT_MOST` in all. Hundreds take minutes to start, and no training waits for that many.
PER_CORE, AT_LEAST, AT_MOST = 4, 8, 64
#: Beside a GPU, larger numbers are tried only if this one has won: 64 took 27 to 34 s to start beside an H200, in each
#: launch again.
AT_MOST_BESIDE_GPU = 16
#: The largest number that may be asked for, likewise: each worker is a process.
MOST_PER_CORE, MOST_ALWAYS = 16, 64


class NumWorkers(Knob):
    name = "num_workers"
    about = "loader processes"
    scope = Scope.LOADER
    place = 50
    minimum = 0
    default = 0
    said_always = True
    own_options = (
        OwnOption(("workers", "num_workers", "n_workers", "j", "dataloader_num_workers"), like=r".*worker.*"),
    )
    # Workers may take cores from a training on the CPU, but not from one on a GPU. Nothing they do makes it faster.
    expected = {
        "device": {None: Expected(-0.01, 0.015), 0: Expected(0.12, 0.12)},
        # A worker hands its batches over through new pages of shared memory. Where samples are made quickly, that takes
        # most of its time (2,200 images a second beside an H200, 12,000 without workers); decoding hardly notices.
        "loader": {None: Expected(0.8, 0.4), 0: Expected(0.3, 0.8)},
        "whole": {None: Expected(0.1, 0.25), 0: Expected(-0.1, 0.25)},
    }

    def ladder(self, facts: SiteFacts) -> tuple[Value, ...]:
        """0, 1 and its doublings up to 4 for each core (workers that wait for a store overlap), at least up to 8 and at
        most up to 64, or 16 beside a GPU."""
        most = AT_MOST_BESIDE_GPU if facts.cuda else AT_MOST
        return (0, *doubled(1, min(most, max(AT_LEAST, PER_CORE * facts.host.cores))))

    def largest_here(self, host: Host) -> int:
        return min(self.maximum, max(MOST_ALWAYS, MOST_PER_CORE * host.cores))

    def phrase(self, value: Value) -> str:
        return f"{value} worker" if value == 1 else f"{value} workers"

    def loader_options(self, value: Value) -> dict[str, Any]:
        return {"num_workers": int(value)}


KNOB = NumWorkers()
#: Its name in configurations.
WORKERS = KNOB.name


def workers_of(config: Config) -> int:
    """Return the number of workers of a configuration, or PyTorch's own if it is not set."""
    return int(config.get(KNOB.name, KNOB.default))
