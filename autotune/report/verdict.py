"""The verdict on a search as data, from which both the table at the end of a search and the report are rendered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.formatting import count, describe, phrase, rate_text, ratio_text, seconds_text
from autotune.records import BreakEven, Config, Outcome, Standing, Trial
from autotune.report.sentences import (
    batch_of,
    check_of,
    dropped_lines,
    full_stop,
    holds_line,
    is_out,
    label_of,
    trains_line,
)
from autotune.space import key

NOTHING_FASTER = "No configuration was shown to be faster than the baseline."
#: If nothing was shown to be faster but a finalist's interval reaches above this speedup, the search is inconclusive.
MAY_BE_FASTER = 1.05
SAME_MATHS = "Epochs, updates and learning rate stay as they are."


@dataclass(frozen=True)
class Won:
    """A winning configuration, over all or at the user's batch size.

    Attributes:
        label: the label of its trial.
        is_baseline: it is the baseline itself.
        shown: it was shown to be faster than the baseline.
        consequence: how the training changes with it, in sentences.
    """

    standing: Standing
    label: str
    is_baseline: bool
    shown: bool
    consequence: str


@dataclass(frozen=True)
class SearchVerdict:
    """The verdict on a search. All text is in whole sentences.

    Attributes:
        advice: advice if nothing was shown to be faster than the baseline; ``None`` if something was.
        best: the winner over all.
        own: the winner at the user's own batch size, which may be the same one.
        own_batch: the user's own batch size.
        tie: the configurations that the winner was preferred to; ``None`` also if the advice mentions them.
        cautions: checks that the winner did not pass.
        break_even: when compiling pays off.
        dropped: a sentence for each dropped finalist.
    """

    advice: str | None
    best: Won
    own: Won
    own_batch: int
    tie: str | None = None
    cautions: str | None = None
    break_even: str | None = None
    dropped: tuple[str, ...] = ()

    @property
    def one_winner(self) -> bool:
        """Whether the winner over all is also the winner at the user's own batch size."""
        return key(self.best.standing.config) == key(self.own.standing.config)


def verdict_on(outcome: Outcome, trials: Sequence[Trial]) -> SearchVerdict:
    """Return the verdict on a finished search."""
    best, own = outcome.best, outcome.best_same_batch
    anything = max(best.speedup_ci95[0], own.speedup_ci95[0]) > 1
    changes = SAME_MATHS
    if key(best.config) != key(own.config):
        changes = _what_changes(best, outcome.baseline.config, trials)
    pays = outcome.break_even
    return SearchVerdict(
        advice=None if anything else _advice(outcome),
        best=_won(best, outcome, trials, changes),
        own=_won(own, outcome, trials, SAME_MATHS),
        own_batch=batch_of(outcome.baseline.config),
        tie=full_stop(outcome.tie) if outcome.tie and anything else None,
        cautions=_cautions(outcome),
        break_even=None if pays is None else _break_even(pays, outcome.baseline.config),
        dropped=tuple(dropped_lines(outcome, trials)),
    )


def _won(standing: Standing, outcome: Outcome, trials: Sequence[Trial], consequence: str) -> Won:
    return Won(
        standing=standing,
        label=label_of(standing, trials),
        is_baseline=key(standing.config) == key(outcome.baseline.config),
        shown=standing.speedup_ci95[0] > 1,
        consequence=consequence,
    )


def _advice(outcome: Outcome) -> str:
    best = outcome.best
    tie = f"{full_stop(outcome.tie)} " if outcome.tie else ""
    more = "A longer --budget, or a quieter machine, may tell them apart."
    if key(best.config) == key(outcome.baseline.config):
        of_what = "is left" if outcome.dropped else "was tried"
        open_ = any(s.speedup_ci95[1] > MAY_BE_FASTER and not is_out(outcome, s) for s in outcome.finalists)
        return f"{tie or f'It is the best of what {of_what}. '}{more if open_ else 'Keep what you have.'}"
    low, high = best.speedup_ci95
    return (
        f"The best one, {describe(best.config, outcome.baseline.config)}, ran at {ratio_text(best.speedup)}, with "
        f"95 % confidence between {low:.2f}× and {high:.2f}×. {tie}{more}"
    )


def _what_changes(standing: Standing, baseline: Config, trials: Sequence[Trial]) -> str:
    """Describe how a configuration with other maths than the baseline changes the training."""
    config = standing.config
    mine, theirs = batch_of(config), batch_of(baseline)
    own = [n for n, v in config.items() if n.startswith("workload.") and baseline.get(n) != v]
    parts = [f"It sets {', '.join(phrase(n, config[n]) for n in own)}, which changes what is trained"] if own else []
    if mine != theirs:
        factor, word = (mine / theirs, "fewer") if mine > theirs else (theirs / mine, "more")
        steps = ""
        epoch_samples = _epoch_samples(standing, trials)
        if epoch_samples:
            now, before = math.ceil(epoch_samples / mine), math.ceil(epoch_samples / theirs)
            steps = f": an epoch is {count(now, 'step')} instead of {before:,}"
        parts.append(
            f"Batch {mine} instead of {theirs}{steps}. The same number of epochs makes {factor:.3g}× {word} updates, "
            f"and the learning rate usually needs rescaling"
        )
    return ". ".join(parts) + "."


def _epoch_samples(standing: Standing, trials: Sequence[Trial]) -> int | None:
    """Return the number of samples of an epoch, from the trial of a standing."""
    found = (t.result.measurement for t in trials if t.number == standing.trial)
    return next((m.epoch_samples for m in found if m is not None), None)


def _cautions(outcome: Outcome) -> str | None:
    check, hold = check_of(outcome, outcome.best.trial), outcome.hold
    lines = (
        trains_line(check) if check is not None and not check.passed else None,
        holds_line(hold) if hold is not None and not hold.passed else None,
    )
    return " ".join(filter(None, lines)) or None


def _break_even(pays: BreakEven, baseline: Config) -> str:
    eager = f"{describe(pays.eager_config, baseline)}, {rate_text(pays.eager_samples_per_second)} samples/s"
    when = f"after {count(pays.steps, 'step')}" if pays.steps else "from the first step"
    cost = seconds_text(pays.compile_s)
    return f"Compiling costs {cost}, and is ahead of the best eager configuration ({eager}) {when}."
