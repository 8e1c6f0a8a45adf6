"""Quantiles of Student's t distribution."""

from __future__ import annotations

import math
from statistics import NormalDist


def t_quantile(degrees: float, probability: float = 0.975) -> float:
    """Return a quantile of Student's t distribution.

    Args:
        degrees: degrees of freedom, at least 1; fractional ones come from Satterthwaite's formula, infinite ones mean
            that the standard error is known.
        probability: in (0.5, 1).
    """
    # A tenth of a second to import, which the command line's help does not wait for.
    from scipy.special import stdtrit

    return NormalDist().inv_cdf(probability) if math.isinf(degrees) else float(stdtrit(degrees, probability))
