"""The verdict on a search as data, from which both the table at the end of a search and the report are rendered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.space.formatting import count, describe, one_line, phrase, rate_text, seconds_text
from autotune.workload.learning_rate import follows
from autotune.base.records import BreakEven, Config, Finding, Outcome, Standing, Trial
from autotune.report.sentences import (
    batch_of,
    check_of,
    dropped_lines,
    edge_lines,
    full_stop,
    holds_line,
    label_of,
    measurement_of,
    trains_line,
    unchecked,
)
from autotune.space import key

NOTHING_FASTER = "No configuration was shown to be faster than the baseline."
NO_VERDICT = "No verdict, and no profile."
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
        headline, advice: what is said if nothing was shown to be faster than the baseline; ``None`` if something was.
        best: the winner over all.
        own: the winner with the user's own training, which may be the same one.
        own_title: what `own` is the best of, as the beginning of a sentence.
        likely: what the winner is likely by, and why it is not proven; ``None`` if it is, or if there is none.
        tie: the configurations that the winner was preferred to; ``None`` also if the advice mentions them.
        cautions: checks that the winner did not pass.
        break_even: when compiling pays off.
        dropped: a sentence for each dropped finalist.
        edges: a sentence for each knob of the winner at the end of its range.
    """

    headline: str | None
    advice: str | None
    best: Won
    own: Won
    own_title: str
    likely: str | None = None
    tie: str | None = None
    cautions: str | None = None
    break_even: str | None = None
    dropped: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()

    @property
    def one_winner(self) -> bool:
        """Whether the winner over all is also the winner at the user's own batch size."""
        return key(self.best.standing.config) == key(self.own.standing.config)


def verdict_on(outcome: Outcome, trials: Sequence[Trial]) -> SearchVerdict:
    """Return the verdict on a finished search."""
    best, own = outcome.best, outcome.best_same_batch
    anything = outcome.found in (Finding.FASTER, Finding.LIKELY)
    changes = _unchanged(outcome, own) if key(best.config) == key(own.config) else _what_changes(outcome, trials)
    pays = outcome.break_even
    return SearchVerdict(
        headline=None if anything else NO_VERDICT if outcome.found is Finding.OPEN else NOTHING_FASTER,
        advice=None if anything else _advice(outcome),
        best=_won(best, outcome, trials, changes),
        own=_won(own, outcome, trials, changes if key(best.config) == key(own.config) else _unchanged(outcome, own)),
        own_title=_own_title(outcome),
        likely=_likely(outcome),
        tie=full_stop(outcome.tie) if outcome.tie and anything else None,
        cautions=_cautions(outcome),
        break_even=None if pays is None else _break_even(pays, outcome.baseline.config, outcome.unit),
        dropped=tuple(dropped_lines(outcome, trials)),
        edges=tuple(edge_lines(outcome)),
    )


def required_line(outcome: Outcome) -> str | None:
    """Return what the winner had to meet, and whether the baseline does, as a sentence; ``None`` if nothing."""
    if not outcome.require:
        return None
    own = f"the baseline does not: {outcome.baseline_unmet}" if outcome.baseline_unmet else "the baseline meets it, too"
    return f"{' and '.join(outcome.require)}; {own}."


def _own_title(outcome: Outcome) -> str:
    """Name the group of configurations that train as the user does today: by its batch size, if that is what
    distinguishes it."""
    best, own = batch_of(outcome.best.config), batch_of(outcome.baseline.config)
    if outcome.keeps_batch_size or (best == own and key(outcome.best.config) != key(outcome.best_same_batch.config)):
        # What was not compared is not called the same training.
        return (
            "with its batch size as it is"
            if unchecked(outcome, outcome.best_same_batch)
            else "with the training as it is"
        )
    return f"at your own batch size ({own})"


def _unchanged(outcome: Outcome, standing: Standing) -> str:
    lacks = unchecked(outcome, standing)
    return SAME_MATHS if lacks is None else f"{SAME_MATHS} Not checked: {lacks}."


def _won(standing: Standing, outcome: Outcome, trials: Sequence[Trial], consequence: str) -> Won:
    return Won(
        standing=standing,
        label=label_of(standing, trials),
        is_baseline=key(standing.config) == key(outcome.baseline.config),
        shown=standing.speedup_ci95[0] > 1,
        consequence=consequence,
    )


def _likely(outcome: Outcome) -> str | None:
    if outcome.evidence is None:
        return None
    why = f", because {one_line(outcome.because).rstrip('.')}" if outcome.because else ""
    return f"This is likely, by {one_line(outcome.evidence)}. It is not proven by separate launches in turns{why}."


def _advice(outcome: Outcome) -> str:
    if outcome.found is Finding.OPEN:
        return " ".join(full_stop(part) for part in (outcome.because, outcome.advice) if part)
    tie = f"{full_stop(outcome.tie)} " if outcome.tie else ""
    return f"{tie or f'It is the best of what {_tried(outcome)}. '}Keep what you have."


def _tried(outcome: Outcome) -> str:
    return "is left" if outcome.dropped else "was tried"


def _what_changes(outcome: Outcome, trials: Sequence[Trial]) -> str:
    """Describe how the winner, which has other maths than the baseline, changes the training."""
    standing, baseline = outcome.best, outcome.baseline.config
    config = standing.config
    mine, theirs = batch_of(config), batch_of(baseline)
    own = [
        n
        for n, v in config.items()
        if n.startswith("workload.") and n not in outcome.speed_only and baseline.get(n) != v
    ]
    parts = [f"It sets {', '.join(phrase(n, config[n]) for n in own)}, which may change what is trained"] if own else []
    if mine != theirs:
        factor, word = (mine / theirs, "fewer") if mine > theirs else (theirs / mine, "more")
        steps = ""
        measured = measurement_of(standing, trials)
        if measured is not None and measured.epoch_samples:
            now, before = (math.ceil(measured.epoch_samples / outcome.ranks / batch) for batch in (mine, theirs))
            steps = f": an epoch is {count(now, 'step')} instead of {before:,}"
        parts.append(
            f"Batch {mine} instead of {theirs}{steps}. The same number of epochs makes {factor:.3g}× {word} updates. "
            f"{_learning_rate(outcome, trials)}"
        )
    return ". ".join(parts) + "."


def _learning_rate(outcome: Outcome, trials: Sequence[Trial]) -> str:
    """Say what usually becomes of the learning rate with the winner's batch."""
    launches = (measurement_of(standing, trials) for standing in (outcome.best, outcome.baseline))
    now, was = (None if one is None else one.learning_rate for one in launches)
    return follows(batch_of(outcome.best.config), batch_of(outcome.baseline.config), now=now, was=was)


def _cautions(outcome: Outcome) -> str | None:
    check, hold = check_of(outcome, outcome.best.trial), outcome.hold
    lines = (
        trains_line(check) if check is not None and not check.passed else None,
        holds_line(hold) if hold is not None and not hold.passed else None,
    )
    return " ".join(filter(None, lines)) or None


def _break_even(pays: BreakEven, baseline: Config, unit: str) -> str:
    what = "the baseline" if key(pays.eager_config) == key(baseline) else describe(pays.eager_config, baseline)
    eager = f"{what}, {rate_text(pays.eager_samples_per_second)} {unit}"
    when = f"after {count(pays.steps, 'step')}" if pays.steps else "from the first step"
    cost = seconds_text(pays.compile_s)
    return f"Compiling costs {cost}, and is ahead of the best eager finalist ({eager}) {when}."
