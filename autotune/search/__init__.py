"""What to try next. `translate` speaks Optuna, `sampler` keeps any Optuna sampler inside the legal and the new, `auto`
is our own, `cost` says what a trial will take. No torch (`--sampler gp` makes Optuna load it)."""

from autotune.search.auto import AutoSampler, Proposal
from autotune.search.cost import WARM_COMPILE, CostModel
from autotune.search.sampler import SAMPLERS, LegalSampler, Searcher, make_sampler

__all__ = [
    "SAMPLERS",
    "WARM_COMPILE",
    "AutoSampler",
    "CostModel",
    "LegalSampler",
    "Proposal",
    "Searcher",
    "make_sampler",
]
