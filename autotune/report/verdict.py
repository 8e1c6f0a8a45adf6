"""Who won, in words that the table at the end of a search and the report both show: each says it in its own form."""

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
#: Nothing was shown to be faster, and a finalist may be by more than this: that is no answer yet.
MAY_BE_FASTER = 1.05
SAME_MATHS = "Epochs, updates and learning rate stay as they are."


@dataclass(frozen=True)
class Won:
    """A configuration that is best at something.

    Attributes:
        label: of its trial. is_baseline: the baseline itself is best.
        shown: to be faster than the baseline.
        consequence: what it changes for the person who trains with it.
    """

    standing: Standing
    label: str
    is_baseline: bool
    shown: bool
    consequence: str


@dataclass(frozen=True)
class SearchVerdict:
    """What came out of a search. All text is whole sentences.

    Attributes:
        advice: what to make of it that nothing was shown to be faster than the baseline; ``None`` where something was.
        best: over all. own: at the user's own batch size, the same one where that is best over all.
        own_batch: the user's own batch size.
        tie: what the best was preferred to; ``None`` also where the advice tells it.
        cautions: what was looked at and not shown of the best.
        break_even: when compiling pays.
        dropped: a sentence for each finalist that is out.
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
        """Whether what is best over all trains at the user's own batch size."""
        return key(self.best.standing.config) == key(self.own.standing.config)


def verdict_on(outcome: Outcome, trials: Sequence[Trial]) -> SearchVerdict:
    """The verdict on a finished search."""
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
    """What a configuration that is not the same maths changes."""
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
    """How many samples an epoch has, from the trial of a standing."""
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
