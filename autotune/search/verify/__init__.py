"""Proves the winner by new launches: every step between the end of the search and the profile.

`proof` runs the steps in order. Each step is a module, and judging is kept apart from launching.

| question | launched by | judged by |
|---|---|---|
| does it train like eager fp32? | `train_check` | `judgements` |
| how fast is it, launched in turns with the baseline? | `race` | `comparison` |
| which configuration wins? | | `winner` |
| does it stay within device memory? | `hold` | `judgements` |
| what limits it? | `ceilings` | `ceilings` |
| how much does each of its knobs gain? | `ablation` | `ablation` |
| what is likely, if nothing is proven? | | `likely` |
"""

from autotune.search.verify.final import Final
from autotune.search.verify.likely import proof_takes_s, with_likely, without_refuted
from autotune.search.verify.winner import Contest, Proof, prove, race_winner

__all__ = ["Contest", "Final", "Proof", "proof_takes_s", "prove", "race_winner", "with_likely", "without_refuted"]
