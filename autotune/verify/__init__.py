"""The winner is proven, not sampled: everything between the end of the search and the profile.

`proof` has the order of it; each step is a module of its own, and what it finds is judged apart from what it launches.

| question | launched by | judged by |
|---|---|---|
| does it train like eager fp32? | `train_check` | `judgements` |
| how fast is it, launched again in turns with the baseline? | `race` | `comparison` |
| who won? | | `winner` |
| does it stay inside the device's memory? | `hold` | `judgements` |
| what limits it? | `ceilings` | `ceilings` |
| what did each of its knobs give? | `ablation` | `ablation` |
"""

from autotune.verify.proof import Proof, prove, race_winner
from autotune.verify.race import Final

__all__ = ["Final", "Proof", "prove", "race_winner"]
