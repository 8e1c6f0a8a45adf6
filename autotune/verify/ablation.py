"""Measures the gain of each knob: races the winner against itself with one knob set back to the baseline's value.

Leaves one knob out rather than adding one, because knobs interact (channels_last gains little in fp32 and much in bf16)
and the useful number is the loss from setting a knob back. The question is that of Fawcett & Hoos, "Analysing
differences between algorithm configurations through ablation", J. Heuristics 22, 2016; their method follows a path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.knobs import KNOBS
from autotune.knobs.compile_mode import compiles
from autotune.knobs.knob import UNKNOWN
from autotune.records import Config, KnobPart, Value
from autotune.space import Space, canonical, key
from autotune.verify.comparison import Comparison
from autotune.verify.entrant import Entrant
from autotune.verify.race import Final, Race, expected_s

#: A knob is of no use if its gain is surely below this ratio.
WORTH_HAVING = 1.01
_MAX_ROUNDS = 4


@dataclass(frozen=True)
class Variant:
    """The winner with one knob set back.

    Attributes:
        with_it: other knobs that have no effect without this one.
        refused: why it may not be launched, if so.
    """

    knob: str
    entrant: Entrant
    with_it: tuple[str, ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Ablation:
    """The gain of each knob, and the winner without a knob of no use, if there is one (`simpler`, measured)."""

    parts: tuple[KnobPart, ...] = ()
    simpler: Entrant | None = None


def ablate(final: Final, compared: Comparison, winner: Entrant, share_s: float) -> Ablation:
    """Measure the gain of each changed knob of the winner, for at most ``share_s`` seconds.

    Args:
        compared: the comparison of the race, which provides the noise of one launch.
    """
    baseline = final.space.baseline
    if key(winner.config) == key(baseline):
        return Ablation()
    variants = variants_of(final.space, winner)
    if len(variants) == 1 and key(variants[0].entrant.config) == key(baseline):
        # The race has measured this very ratio.
        return Ablation((_part(variants[0], winner, baseline, compared.ratio(winner, compared.baseline)),))
    own = Entrant(winner.config, winner.trial, expected_s=winner.expected_s, label="itself")
    race = Race(final, [own, *(v.entrant for v in variants)], purpose="ablate", prior=compared.noise)
    _run(race, [v.entrant for v in variants if v.refused is None], share_s)
    found = race.compared()
    parts, useless = [], []
    for variant in variants:
        one = variant.entrant
        gain = found.ratio(own, one) if own.again and one.again else None
        parts.append(_part(variant, winner, baseline, gain))
        if gain is not None and gain[2] < WORTH_HAVING:
            useless.append((gain[2], one))
    simpler = None
    if useless:
        _, least = min(useless, key=lambda pair: pair[0])
        simpler = Entrant(least.config, winner.trial, expected_s=least.expected_s, label=least.label)
    return Ablation(tuple(parts), simpler)


def variants_of(space: Space, winner: Entrant) -> list[Variant]:
    """Return the winner with each changed knob set back to the baseline's value, one at a time; largest expected effect
    first."""
    baseline, config = space.baseline, winner.config
    # Knobs that need workers are set back together with them, and do not count as changes if the baseline has none.
    changed = [n for n in config if config[n] != baseline.get(n) and (n in baseline or not _needs(n))]
    found = []
    for name in sorted(changed, key=lambda n: _expected_effect(n, config[n], baseline.get(n)), reverse=True):
        back = {**{n: baseline[n] for n in baseline if _needs(n) == name}, **config, name: baseline[name]}
        legal = canonical(back)
        with_it = tuple(n for n in config if n not in legal)
        # Each compiled variant has to be compiled first.
        compile_s = _compile_s(winner) if compiles(legal) else 0.0
        one = Entrant(legal, winner.trial, expected_s=winner.expected_s + compile_s, label=f"without {name}")
        found.append(Variant(name, one, with_it, space.combination_refusal(legal)))
    return found


def _needs(name: str) -> str | None:
    return KNOBS[name].needs if name in KNOBS else None


def _expected_effect(name: str, value: Value, baseline_value: Value | None) -> float:
    """Return the effect that a change of a knob may have, by the catalog's expectations."""
    if name not in KNOBS:
        return UNKNOWN.sd
    effects = KNOBS[name].effects("whole")
    if KNOBS[name].numeric and None in effects:
        doublings = abs(math.log2(max(1.0, float(value))) - math.log2(max(1.0, float(baseline_value or 1))))
        return doublings * (abs(effects[None].mean) + effects[None].sd)
    return max((abs(e.mean) + e.sd for v, e in effects.items() if v in (value, baseline_value)), default=0.0)


def _compile_s(winner: Entrant) -> float:
    measurement = winner.trial.result.measurement
    return measurement.compile_s if measurement is not None else 0.0


def _run(race: Race, variants: Sequence[Entrant], share_s: float) -> None:
    """Run rounds with the winner and as many variants as there is time for."""
    budget = race.final.launches.budget
    began = race.begin()
    racing = [race.baseline]
    for one in variants:
        if expected_s([*racing, one]) <= min(share_s, budget.limit_s - began):
            racing.append(one)
    for _ in range(_MAX_ROUNDS):
        racing = [e for e in racing if e.out is None]
        left_s = min(share_s - (budget.spent_s - began), budget.left_s)
        if len(racing) < 2 or race.round_s(racing) > max(0.0, left_s):
            break
        race.round(racing)


def _part(variant: Variant, winner: Entrant, baseline: Config, gain: tuple[float, float, float] | None) -> KnobPart:
    return KnobPart(
        knob=variant.knob,
        value=winner.config[variant.knob],
        baseline_value=baseline.get(variant.knob),
        with_it=variant.with_it,
        gain=gain,
        why_not=_why_not(variant, winner) if gain is None else None,
    )


def _why_not(variant: Variant, winner: Entrant) -> str:
    one = variant.entrant
    if variant.refused is not None:
        return variant.refused
    if one.out is not None:
        return f"it {one.out}"
    if one.rounds:
        return "it could not be measured undisturbed"
    again = compiles(winner.config) and compiles(one.config)
    return "there was no time for it" + (", it would have to be compiled again" if again else "")
