"""Samplers, which choose the next trial. Does not import torch, except that Optuna loads it for `--sampler gp`.

`sampler` converts between autotune's space and Optuna's, restricts any Optuna sampler to legal and new configurations,
predicts the duration of a trial, and holds what the trials so far teach any sampler; `auto` is autotune's own sampler.
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
