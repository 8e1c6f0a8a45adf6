"""Proves the winner by new launches: every step between the end of the search and the profile.

`winner` runs the steps in order. Within each module, judging is kept apart from launching.

| question | launched by | judged by |
|---|---|---|
| does it train like eager fp32? | `train_check` | `train_check` |
| does its loader deliver the baseline's data? | `data_check` | `data_check` |
| how fast is it, launched in turns with the baseline? | `race` | `race` |
| which configuration wins? | | `winner` |
| does it stay within device memory? | `ceilings` | `train_check` |
| what limits it? | `ceilings` | `ceilings` |
| how much does each of its knobs gain? | `ceilings` | `ceilings` |
| what is likely, if nothing is proven? | | `likely` |
"""

from autotune.search.proof.context import ProofContext
from autotune.search.proof.likely import proof_takes_s, with_likely, without_refuted
from autotune.search.proof.winner import Contest, Proof, prove, race_winner

__all__ = [
    "Contest",
    "Proof",
    "ProofContext",
    "proof_takes_s",
    "prove",
    "race_winner",
    "with_likely",
    "without_refuted",
]
