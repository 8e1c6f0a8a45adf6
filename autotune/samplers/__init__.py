"""What to try next. `translate` speaks Optuna, `sampler` keeps any Optuna sampler inside the legal and the new, `auto`
is our own, `cost` says what a trial will take, `experience` what the trials so far teach any of them. No torch
(`--sampler gp` makes Optuna load it)."""

from autotune.samplers.auto import AutoSampler, Proposal
from autotune.samplers.cost import WARM_COMPILE, CostModel
from autotune.samplers.experience import Experience
from autotune.samplers.sampler import SAMPLERS, LegalSampler, Searcher, make_sampler

__all__ = [
    "SAMPLERS",
    "WARM_COMPILE",
    "AutoSampler",
    "CostModel",
    "Experience",
    "LegalSampler",
    "Proposal",
    "Searcher",
    "make_sampler",
]
