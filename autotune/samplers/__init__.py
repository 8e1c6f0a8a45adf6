"""Samplers, which choose the next trial. Does not import torch, except that Optuna loads it for `--sampler gp`.

`translate` converts between our space and Optuna's, `sampler` restricts any Optuna sampler to legal and new
configurations, `auto` is our own sampler, `cost` predicts the duration of a
trial, and `experience` holds what the trials so far teach any of them.
"""

from autotune.samplers.auto import AutoSampler, Proposal
from autotune.samplers.sampler import (
    SAMPLERS,
    WARM_COMPILE,
    CostModel,
    Experience,
    LegalSampler,
    Searcher,
    cold_compiles,
    graph,
    make_sampler,
)

__all__ = [
    "SAMPLERS",
    "WARM_COMPILE",
    "AutoSampler",
    "CostModel",
    "Experience",
    "LegalSampler",
    "Proposal",
    "Searcher",
    "cold_compiles",
    "graph",
    "make_sampler",
]
