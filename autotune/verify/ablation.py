"""What did each knob give? The winner beside itself with one knob set back to the baseline's value, in turns.

Leave-one-out rather than add-one-in: knobs work on top of each other (channels_last gives little in fp32 and much in
bf16), and what a reader wants to know is what would be lost by setting one back (Fawcett & Hoos, "Analysing differences
between algorithm configurations through ablation", J. Heuristics 22, 2016, for the question; theirs goes a path).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune import stats
from autotune.records import Config, KnobPart, LaunchKind, Measurement, TrialStatus, Value
from autotune.space import KNOBS, NEEDS_WORKERS, Space, canonical, key
from autotune.study.launches import proof_plan_for
from autotune.verify.entrant import Entrant, widened
from autotune.verify.race import Compared, Final, rates

#: A knob whose gain is below this for sure is not worth having.
WORTH_HAVING = 1.01
#: In this order knobs are measured while there is time: what usually gives most first.
_ORDER = ("precision", "batch_size", "num_workers", "compile_mode", "memory_format", "optimizer_impl")
_MAX_ROUNDS = 4


@dataclass
class _Variant:
    """The winner with one knob (and what hangs on it) set back."""

    knob: str
    config: dict[str, Value]
    with_it: tuple[str, ...]
    refused: str | None = None
    rounds: list[Measurement | None] = field(default_factory=list)


@dataclass(frozen=True)
class Ablation:
    """The parts, and the winner without what is surely of no use, if there is such a thing (`simpler`, measured)."""

    parts: tuple[KnobPart, ...] = ()
    simpler: Entrant | None = None


def ablate(final: Final, compared: Compared, winner: Entrant, share_s: float) -> Ablation:
    """Measure what each changed knob of the winner gives, for at most ``share_s`` seconds."""
    baseline = final.space.baseline
    if key(winner.config) == key(baseline):
        return Ablation()
    variants = variants_of(final.space, winner.config)
    if len(variants) == 1 and key(variants[0].config) == key(baseline):
        # The verification has measured just that.
        only = variants[0]
        gain = compared.ratio(winner, compared.baseline)
        return Ablation((_told(only, winner.config, baseline, gain, None),))
    budget = final.launches.budget
    began = budget.spent_s
    own = _Variant("", winner.config, ())
    measured: list[_Variant] = []
    for number in range(1, _MAX_ROUNDS + 1):
        left_s = min(share_s - (budget.spent_s - began), budget.left_s)
        racing = _affordable(final, winner, variants, left_s) if number == 1 else measured
        if not racing or (number > 1 and _cost_s(final, winner, racing, number) > left_s):
            break
        measured = racing
        for one in [own, *racing] if number % 2 else [*reversed(racing), own]:
            _launch(final, winner, one, number)
    rows = {id(v): rates(v.rounds) for v in [own, *measured] if any(v.rounds)}
    parts = [_part(v, own, rows, compared.noise, winner.config, baseline) for v in variants]
    useless = [
        (part.gain[2], v)
        for part, v in zip(parts, variants, strict=True)
        if part.gain is not None and part.gain[2] < WORTH_HAVING
    ]
    simpler = None
    if useless:
        _, least = min(useless, key=lambda pair: pair[0])
        simpler = Entrant(config=least.config, trial=winner.trial, wall_s=winner.wall_s, label=f"without-{least.knob}")
    return Ablation(tuple(parts), simpler)


def variants_of(space: Space, config: Config) -> list[_Variant]:
    """The configuration with each changed knob set back to the baseline's value, one at a time."""
    baseline = space.baseline
    # What only means something with workers goes back with them: no change of its own where the baseline has none.
    changed = [n for n in config if config[n] != baseline.get(n) and (n in baseline or n not in NEEDS_WORKERS)]
    order = {name: i for i, name in enumerate((*_ORDER, *(n for n in KNOBS if n not in _ORDER)))}
    found = []
    for name in sorted(changed, key=lambda n: order.get(n, len(order))):
        back = {**config, name: baseline[name]}
        if name == "num_workers" and baseline[name] != 0:
            back = {**{n: baseline[n] for n in NEEDS_WORKERS if n in baseline}, **back}
        legal = canonical(back)
        with_it = tuple(n for n in config if n not in legal)
        refused = space.combination_refusal(legal)
        found.append(_Variant(name, legal, with_it, refused))
    return found


def _affordable(final: Final, winner: Entrant, variants: Sequence[_Variant], left_s: float) -> list[_Variant]:
    """As many variants as one round has time for, beside the winner itself."""
    chosen: list[_Variant] = []
    for one in variants:
        if one.refused is None and _cost_s(final, winner, [*chosen, one], 1) <= left_s:
            chosen.append(one)
    return chosen


def _cost_s(final: Final, winner: Entrant, variants: Sequence[_Variant], number: int) -> float:
    """About how long a round takes. What is compiled has to be compiled again for every other configuration; launches
    that an earlier run of the study finished take no time."""
    done = final.launches.finished
    own_s = 0.0 if done(_name(winner, "", number), winner.config) else winner.wall_s
    return own_s + sum(_variant_s(winner, v) for v in variants if done(_name(winner, v.knob, number), v.config) is None)


def _variant_s(winner: Entrant, variant: _Variant) -> float:
    if variant.config.get("compile_mode", "off") == "off" or variant.rounds:
        return winner.wall_s
    return winner.wall_s + _compile_s(winner)


def _name(winner: Entrant, knob: str, number: int) -> str:
    return f"ablate-{winner.name}-{knob.replace('workload.', 'own-') or 'winner'}-{number}"


def _compile_s(winner: Entrant) -> float:
    measurement = winner.trial.result.measurement
    return measurement.compile_s if measurement is not None else 0.0


def _launch(final: Final, winner: Entrant, one: _Variant, number: int) -> None:
    what = f"without {one.knob}" if one.knob else "itself"
    result = final.launches.aside(
        LaunchKind.MEASURE,
        _name(winner, one.knob, number),
        f"trial {winner.trial.number} {what}, launch {number}",
        one.config,
        plan=proof_plan_for(final.launches.plan),
    )
    final.heed()
    one.rounds.append(result.measurement if result.status is TrialStatus.COMPLETE else None)
    if one.rounds[-1] is None:
        one.refused = f"it ended as {result.status}: {result.cause}"


def _part(
    variant: _Variant,
    own: _Variant,
    rows: dict[int, list[float | None]],
    noise: stats.LaunchNoise,
    config: Config,
    baseline: Config,
) -> KnobPart:
    gain = None
    if id(own) in rows and id(variant) in rows:
        # The verification knows the noise of a launch; a table of one round knows none, and a launch that went badly
        # has more.
        launches = [m for m in (*own.rounds, *variant.rounds) if m is not None]
        gain = stats.compare_rounds(rows, prior=widened(noise, launches)).ratio(id(own), id(variant))
    again = config.get("compile_mode", "off") != "off" and variant.config.get("compile_mode", "off") != "off"
    no_time = f"there was no time for it{', it would have to be compiled again' if again else ''}"
    return _told(variant, config, baseline, gain, None if gain is not None else variant.refused or no_time)


def _told(
    variant: _Variant, config: Config, baseline: Config, gain: tuple[float, float, float] | None, why: str | None
) -> KnobPart:
    return KnobPart(
        knob=variant.knob,
        value=config[variant.knob],
        baseline_value=baseline.get(variant.knob),
        with_it=variant.with_it,
        gain=gain,
        why_not=why,
    )
