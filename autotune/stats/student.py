"""Quantiles of Student's t distribution."""

from __future__ import annotations

import math
from statistics import NormalDist

#: Above this, the quantiles equal those of the normal distribution to six digits.
_ENDLESS = 1e6


def t_quantile(degrees: float, probability: float = 0.975) -> float:
    """Return a quantile of Student's t distribution.

    Uses Hill's expansion (G. W. Hill, "Algorithm 396: Student's t-quantiles", CACM 13, 1970): exact for one and two
    degrees of freedom, within 5e-4 above. Between one and two, where the expansion fails, the logarithm is interpolated
    over 1 / degrees, which is up to 3 % too wide.

    Args:
        degrees: degrees of freedom, at least 1. Satterthwaite's formula gives fractional ones; infinity means that the
            standard error is known exactly.
        probability: in (0.5, 1).
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    tail = 2 * (1 - probability)
    if degrees == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    if degrees < 2:
        one, two = math.log(t_quantile(1, probability)), math.log(t_quantile(2, probability))
        return math.exp(two + (one - two) * (2 / degrees - 1))
    if degrees > _ENDLESS:
        return NormalDist().inv_cdf(probability)
    a = 1 / (degrees - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * degrees
    x = d * tail
    y = x ** (2 / degrees)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(tail / 2)
        y = x * x
        if degrees < 5:
            c += 0.3 * (degrees - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = (
            (1 / (((degrees + 6) / (degrees * y) - 0.089 * d - 0.822) * (degrees + 2) * 3) + 0.5 / (degrees + 4)) * y
            - 1
        ) * (degrees + 1) / (degrees + 2) + 1 / y
    return math.sqrt(degrees * y)
