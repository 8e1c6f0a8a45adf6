"""Which of several ranks of a training this process is, by the environment that ``torchrun`` sets.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

#: Names a file through which ranks of one machine find each other, in place of ``MASTER_ADDR`` and ``MASTER_PORT``. No
#: port is needed then, which another process might take.
RENDEZVOUS = "AUTOTUNE_RENDEZVOUS"
#: Variables by which a process knows that it is one of several ranks.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Rank:
    """A process among the ranks of its training.

    Attributes:
        number: from 0 to ``count - 1``. local: the same, among those on this machine; it is the number of the card.
    """

    number: int = 0
    count: int = 1
    local: int = 0


def own_rank(environ: Mapping[str, str] = os.environ) -> Rank:
    """Return this process's rank from the environment; the only rank if the environment states none."""
    texts = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(text.isascii() and text.isdigit() for text in texts):
        # Clusters set some of these for jobs that are not distributed trainings.
        return Rank()
    number, count, local = map(int, texts)
    return Rank(number, count, local) if count > 1 else Rank()
