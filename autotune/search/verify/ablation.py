"""Measures the gain of each knob: races the winner against itself with one knob set back to the baseline's value.

Leaves one knob out rather than adding one, because knobs interact (channels_last gains little in fp32 and much in bf16)
and the useful number is the loss from setting a knob back. The question is that of Fawcett & Hoos, "Analysing
differences between algorithm configurations through ablation", J. Heuristics 22, 2016; their method follows a path.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autotune.base.records import Config, KnobPart, Value
from autotune.knobs import KNOBS
from autotune.knobs.compile_mode import compiles
from autotune.knobs.knob import UNKNOWN
from autotune.knobs.num_workers import workers_of
from autotune.samplers import WARM_COMPILE, cold_compiles, graph
from autotune.samplers.auto.rates import MOSTLY_DEVICE
from autotune.search.verify.race import Entrant, Race, expected_s, wait_fraction
from autotune.space import Space, canonical, key

_MAX_ROUNDS = 4
#: Name of the heat, and the number of steps or turns that a variant is expected to take in it.
_HEAT, _HEAT_ROUNDS = "ablate-heat", 10
#: Largest part of the time that a training with workers, which go on while the device is slow, may wait for them if its
#: gains are to come from a heat.
FEW_WAITS = 0.05


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


def ablate(race: Race, winner: Entrant, share_s: float) -> tuple[KnobPart, ...]:
    """Measure the gain of each changed knob of the winner, for at most ``share_s`` seconds.

    If the winner hardly waits for its loader, the variants that its training can be switched to are compared in a heat.
    The others are launched in more rounds of the race, in turns with the baseline, too, so that one of them can replace
    the winner.
    """
    baseline = race.baseline
    if winner is baseline:
        return ()
    budget = race.final.launches.budget
    variants = variants_of(race.final.space, winner)
    began = budget.spent_s
    told = _in_a_heat(race, winner, variants, min(share_s, budget.left_s))
    rest = [v for v in variants if v.knob not in told]
    if rest and not (len(variants) == 1 and key(variants[0].entrant.config) == key(baseline.config)):
        _run(race, winner, [v.entrant for v in rest if v.refused is None], share_s - (budget.spent_s - began))
    compared = race.compared()
    parts = []
    for variant in variants:
        # The race has measured the winner without its only change: that is the baseline.
        one = baseline if key(variant.entrant.config) == key(baseline.config) else variant.entrant
        gain = told.get(variant.knob)
        if gain is None and compared.in_turns(winner, one):
            gain = compared.ratio(winner, one)
        part = _part(variant, winner, baseline.config, gain)
        parts.append(part.model_copy(update={"launches": len(one.again), "in_heat": variant.knob in told}))
    return tuple(parts)


def _in_a_heat(
    race: Race, winner: Entrant, variants: Sequence[Variant], limit_s: float
) -> dict[str, tuple[float, float, float]]:
    """Return the gain of each knob that a heat of the winner and its variants has shown.

    A heat shows the device's part. The winner's waits for its loader are added to the time of each, so the gains hold
    for the training: without workers exactly, and with workers if there is hardly any wait.
    """
    known = wait_fraction(winner.seen)
    waits = 1.0 if known is None else known
    if not race.final.by_rate or waits > (FEW_WAITS if workers_of(winner.config) else MOSTLY_DEVICE):
        return {}
    launches = race.final.launches
    if launches.conditions.ranks > 1 or launches.even_steps is None:
        return {}
    entrants, knobs = [winner.config], [""]
    cold_s = max(_compile_s(winner), race.compiled_s.get(graph(winner.config), 0.0))
    left_s = limit_s - winner.seen[0].startup_s - (WARM_COMPILE * cold_s if compiles(winner.config) else 0.0)
    # A resumed study has spent the seconds of the variants that it had chosen before.
    earlier = launches.heat_plan(_HEAT)
    begun = earlier.entrants if earlier is not None and earlier.entrants[0] == winner.config else ()
    for variant in variants:
        config = variant.entrant.config
        step_s = int(config["batch_size"]) / winner.seen[0].samples_per_s
        taken_s = _HEAT_ROUNDS * max(launches.even_steps * step_s, launches.turn_s["device"]) + (
            cold_s if compiles(config) else 0.0
        )
        fits = config in begun if begun else taken_s < left_s
        # The race has measured the winner without its only change.
        fits &= key(config) != key(race.baseline.config)
        if fits and variant.refused is None and race.final.space.why_apart(winner.config, config) is None:
            left_s -= taken_s
            entrants.append(config)
            knobs.append(variant.knob)
    if len(entrants) < 2:
        return {}
    found, _ = launches.heat(_HEAT, "the gains of its knobs", entrants, limit_s=limit_s)
    race.final.raise_if_stopped()
    for name, seconds in cold_compiles([], [found]).items():
        race.compiled_s[name] = max(seconds, race.compiled_s.get(name, 0.0))
    if found.reference is not found.entrants[0]:
        return {}
    gains = {}
    for knob, one in zip(knobs[1:], found.entrants[1:], strict=True):
        if one.ratio is not None and one.ratio_ci95 is not None:
            # The winner takes one second, of which it waits for a part; without the knob its device takes longer.
            low, high = one.ratio_ci95
            gain, least, most = ((1 - waits) / ratio + waits for ratio in (one.ratio, high, low))
            gains[knob] = gain, least, most
    return gains


def variants_of(space: Space, winner: Entrant) -> list[Variant]:
    """Return the winner with each changed knob set back to the baseline's value, one at a time; largest expected effect
    first."""
    baseline, config = space.baseline, winner.config
    # Knobs that need workers are set back together with them, and do not count as changes if the baseline has none.
    changed = [n for n in config if config[n] != baseline.get(n) and (n in baseline or not _needs(n))]
    found = []
    for name in sorted(changed, key=lambda n: _expected_effect(n, config[n], baseline.get(n)), reverse=True):
        legal = set_back(space, config, [name])
        with_it = tuple(n for n in config if n not in legal)
        # Each compiled variant has to be compiled first.
        compile_s = _compile_s(winner) if compiles(legal) else 0.0
        one = Entrant(legal, winner.trial, expected_s=winner.expected_s + compile_s, label=f"without {name}")
        found.append(Variant(name, one, with_it, space.combination_refusal(legal)))
    return found


def set_back(space: Space, config: Config, names: Collection[str]) -> dict[str, Value]:
    """Return a configuration with some knobs set back to the baseline's values, and with them the knobs that have no
    effect without them."""
    baseline = space.baseline
    needing = {n: baseline[n] for n in baseline if _needs(n) in names}
    return canonical({**needing, **config, **{n: baseline[n] for n in names}})


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


def _run(race: Race, winner: Entrant, variants: Sequence[Entrant], share_s: float) -> None:
    """Run rounds with the baseline, the winner, and as many variants as there is time for.

    A round is kept in reserve, because a variant that is as good as the winner replaces it after another launch. If
    only fewer variants could run then, they run in turns with the winner alone, which tells their gains and no more.
    """
    budget = race.final.launches.budget
    # The launches get their own names, so that a resume does not take these rounds for the race's.
    race.purpose = "ablate"
    began = budget.spent_s
    limit_s = min(share_s, budget.left_s)
    reserve_s = expected_s([race.baseline, winner, winner])
    # A resumed study has spent the seconds of the variants that it had chosen before.
    tested = [one for one in variants if race.has_run(one)]
    racing = [race.baseline, winner]
    if not tested:
        tested = _fitting(race, racing, variants, limit_s - reserve_s)
        alone = _fitting(race, [winner], variants, limit_s)
        if len(alone) > len(tested):
            racing, tested, reserve_s = [winner], alone, 0.0
    racing += tested
    race.entrants += tested
    for _ in range(_MAX_ROUNDS):
        racing = [e for e in racing if e.out is None]
        left_s = min(share_s - (budget.spent_s - began), budget.left_s) - reserve_s
        if not any(e in tested for e in racing) or race.round_s(racing) > max(0.0, left_s):
            break
        race.round(racing)


def _fitting(race: Race, racing: Sequence[Entrant], variants: Sequence[Entrant], limit_s: float) -> list[Entrant]:
    """Return the variants of which a round, together with ``racing``, fits into the seconds given."""
    found: list[Entrant] = []
    for one in variants:
        if race.round_s([*racing, *found, one]) <= limit_s:
            found.append(one)
    return found


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
