"""Whether another round of a comparison is worth its seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

#: Draws from what more rounds may show, always the same ones.
_DRAWS = 1000
#: How many more rounds are looked at together. A single one may be worth nothing although several are worth much
#: (Frazier & Powell, "Paradoxes in learning and the marginal value of information", Decision Analysis 7, 2010).
_AHEAD = 1, 2, 4, 8


def gain_per_round(effects: Sequence[float], rounds: int, noise_sd: float) -> float:
    """Return by how much each of the next rounds is expected to improve the best contender, at most.

    The one that leads is chosen, now or after the rounds; they may show that another one is better. This is the
    knowledge gradient of a batch of observations, here of one of each contender (Frazier, Powell & Dayanik, "A
    knowledge-gradient policy for sequential information collection", SIAM J. Control Optim. 47, 2008), if nothing is
    known of the contenders but what the rounds showed.

    Args:
        effects: of the contenders that are still compared, in natural logarithms.
        rounds: number of rounds so far, at least one.
        noise_sd: of one turn, in natural logarithms.

    Returns:
        Improvement in natural logarithms per round, for the number of rounds for which it is largest.
    """
    if len(effects) < 2:
        return 0.0
    means = np.asarray(effects, dtype=np.float64)
    draws = np.random.default_rng(0).standard_normal((_DRAWS, len(means)))
    # Means of few draws are not quite 0, and a leader would seem to gain by itself.
    draws -= draws.mean(axis=0)
    found = []
    for ahead in _AHEAD:
        moved = noise_sd * math.sqrt(1 / rounds - 1 / (rounds + ahead))
        found.append(float((means + moved * draws).max(axis=1).mean() - means.max()) / ahead)
    return max(0.0, *found)
