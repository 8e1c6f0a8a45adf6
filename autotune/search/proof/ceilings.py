"""What limits a configuration, whether it holds, and what each of its knobs gains."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from autotune import stats
from autotune.base.layout import COLD
from autotune.base.records import (
    FIGURES,
    Bottleneck,
    Config,
    Hold,
    HoldPlan,
    HoldVerdict,
    KnobPart,
    LaunchKind,
    Limit,
    Measurement,
    MeasurePlan,
    TrialStatus,
    Value,
)
from autotune.knobs import KNOBS
from autotune.knobs.batch_memory import KNOB as BATCH_MEMORY
from autotune.knobs.compile_mode import compiles
from autotune.knobs.knob import UNKNOWN
from autotune.knobs.num_workers import WORKERS, workers_of
from autotune.knobs.pin_memory import KNOB as PINNED
from autotune.knobs.static_graph import KNOB as STATIC_GRAPH
from autotune.samplers import WARM_COMPILE, cold_compiles, graph
from autotune.samplers.auto.rates import MOSTLY_DEVICE
from autotune.search.proof import ProofContext
from autotune.search.proof.race import Comparison, Entrant, Race, expected_s, shared_rounds, wait_fraction
from autotune.space import Space, canonical, device_part, key, loader_part
from autotune.space.formatting import figure_text, percent_text, rate_text
from autotune.study.budget import LEAST_LAUNCHES
from autotune.study.launches import ended_from_outside

# Finds what limits a configuration by comparing its rate with those of the device alone and of the loader alone.
#
# A training that overlaps loading and computing runs at most at the smaller of the two rates (the roofline argument:
# Williams, Waterman & Patterson, CACM 52, 2009, with the loader in place of the memory). Without loader workers, the
# times of loading and computing add up. With several ranks, the rate of the device alone is measured both with and
# without the exchange of gradients.

#: Something is a limit only if removing it would gain at least this ratio.
MATTERS = 1.1
#: A ceiling below this fraction of the measured rate contradicts it. The launches took place at different times.
CONTRADICTS = 0.9
#: If loading, copying and computing take turns, one that takes less than this fraction of the time is not the limit.
SMALL_SHARE = 1 / 3
#: The device waits for the host if enqueueing takes at least this fraction of a step.
LAUNCH_BOUND = 0.9
#: A loader that waits for its store for more than this fraction of the time is limited by it.
STORE = 0.3

_NAMES = {LaunchKind.DEVICE_ONLY: "device", LaunchKind.LOADER_ONLY: "loader", LaunchKind.MEASURE: COLD}


def bottlenecks(
    context: ProofContext, compared: Comparison, entrants: Sequence[Entrant], share_s: float
) -> list[Bottleneck]:
    """Return the bottleneck of each entrant, measuring ceilings as time permits; those that entrants share, once."""
    if not context.sees_inside or WORKERS not in context.space.baseline:
        return []
    budget = context.launches.budget
    earlier = (context.launches.finished(_name(kind, e), e.config) for e in entrants for kind in _NAMES)
    # Launches by an earlier run of the study count against this step's share.
    began = budget.spent_s - sum(result.wall_s for result in earlier if result is not None)

    def left_s(reserve_s: float = 0.0) -> float:
        return max(0.0, min(share_s - (budget.spent_s - began), budget.left_s) - reserve_s)

    # A training's own launches reveal its limit less reliably, and its first epoch not at all: the winner comes first.
    by_use = sorted(entrants, key=lambda e: -compared.rate(e).per_s)
    reserve_s = _cost_s(context, LaunchKind.MEASURE, by_use[0]) if by_use and reads_apart(context) else 0.0
    ceilings: dict[tuple[LaunchKind, str], Measurement | None] = {}
    unexchanged: dict[str, Measurement | None] = {}
    results = {}
    for entrant in entrants:
        ceiling_keys = [
            (LaunchKind.DEVICE_ONLY, key(device_part(entrant.config))),
            (LaunchKind.LOADER_ONLY, key(loader_part(entrant.config))),
        ]
        missing = [n for n in ceiling_keys if n not in ceilings and not context.by_command]
        # One ceiling without the other reveals little.
        if missing and sum(_cost_s(context, kind, entrant) for kind, _ in missing) <= left_s(reserve_s):
            for ceiling_key in missing:
                ceilings[ceiling_key] = _ceiling(context, ceiling_key[0], entrant)
        device, loader = (ceilings.get(n) for n in ceiling_keys)
        part = ceiling_keys[0][1]
        # For a sharded model, only a part of the exchange could be left out.
        if device is not None and STATIC_GRAPH.name in context.space.choices and part not in unexchanged:
            affordable = _cost_s(context, LaunchKind.DEVICE_ONLY, entrant, apart=True) <= left_s()
            unexchanged[part] = _ceiling(context, LaunchKind.DEVICE_ONLY, entrant, apart=True) if affordable else None
        rate, on_cpu = compared.rate(entrant).per_s, context.device == "cpu"
        results[entrant.name] = bottleneck(entrant, rate, context.cores, on_cpu, device, loader, unexchanged.get(part))
    # This comes last because it empties a cache that all other launches need full.
    for entrant in by_use:
        results[entrant.name] = _with_cold(context, results[entrant.name], entrant, left_s())
    return [results[entrant.name] for entrant in entrants]


def reads_apart(context: ProofContext) -> bool:
    """Return whether a first epoch reads from elsewhere than later ones and is to be measured: behind a simulated
    store, or if the search is asked about epochs."""
    data = context.launches.conditions.data
    return data.first_epoch_apart and not context.by_command and (data.store is not None or context.epochs is not None)


def _with_cold(context: ProofContext, found: Bottleneck, one: Entrant, left_s: float) -> Bottleneck:
    """Measure the first epoch, whose files are in no cache yet, if it `reads_apart` and there is time."""
    data = context.launches.conditions.data
    name = _name(LaunchKind.MEASURE, one)
    more_s = None if context.deliveries is None else stats.first_epoch_more_s(context.deliveries)
    if more_s is not None:
        # Its launches measure later epochs.
        cold_per_s = 1 / (1 / found.samples_per_s + more_s)
        start = f"{found.sentence} Its data set keeps what it has made: in the first epoch it runs at about "
        sentence = f"{start}{rate_text(cold_per_s)} samples/s."
        return found.model_copy(update={"cold_per_s": (cold_per_s, cold_per_s, cold_per_s), "sentence": sentence})
    if not reads_apart(context) or _cost_s(context, LaunchKind.MEASURE, one) > left_s:
        return found
    if data.store is not None:
        cold = data.model_copy(update={"store": data.store.model_copy(update={"cached": 0.0})})
        condition = "the store's cache is empty"
        cached = f"; the cache holds {percent_text(data.store.cached)} of the files"
    else:
        if context.launches.finished(name, one.config) is None and not context.evict():
            return found
        cold = data.model_copy(update={"page_cache": "cold"})
        condition, cached = "no file is in the page cache", ""
    title = f"an empty cache, trial {one.trial.number}"
    result = context.launches.run_outside(
        LaunchKind.MEASURE, name, title, one.config, plan=_plan(context), data=cold, limit_s=left_s
    )
    context.raise_if_stopped()
    measurement = result.measurement if result.status is TrialStatus.COMPLETE else None
    if measurement is None:
        return found
    rate = rate_text(measurement.samples_per_s)
    sentence = f"{found.sentence} While {condition}, in the first epoch, it runs at {rate} samples/s{cached}."
    return found.model_copy(update={"cold_per_s": _triple(measurement), "sentence": sentence})


def _cost_s(context: ProofContext, kind: LaunchKind, one: Entrant, *, apart: bool = False) -> float:
    """Estimate the duration of such a launch; 0 if an earlier run of the study completed it."""
    if context.launches.finished(_name(kind, one, apart=apart), one.config) is not None:
        return 0.0
    start_s = max((m.startup_s + m.warmup_s for m in one.seen), default=0.0)
    # The compiler's cache is warm by now.
    return start_s + 1.2 * _plan(context).max_measure_s


def _name(kind: LaunchKind, one: Entrant, *, apart: bool = False) -> str:
    return f"{'apart' if apart else _NAMES[kind]}-{one.name}"


def _ceiling(context: ProofContext, kind: LaunchKind, one: Entrant, *, apart: bool = False) -> Measurement | None:
    """Launch one side of a training alone; ``apart``: in ranks that do not exchange gradients."""
    side = "the device alone" if kind is LaunchKind.DEVICE_ONLY else "the loader alone"
    title = f"{side}{' in each rank' if apart else ''}, trial {one.trial.number}"
    result = context.launches.run_outside(
        kind, _name(kind, one, apart=apart), title, one.config, plan=_plan(context), exchanges=not apart
    )
    context.raise_if_stopped()
    return result.measurement if result.status is TrialStatus.COMPLETE else None


def _plan(context: ProofContext) -> MeasurePlan:
    """Return a shorter measuring plan: ceilings only support a verdict and need less precision than the race."""
    plan = context.launches.plan
    return plan.model_copy(update={"max_measure_s": max(2.0, plan.max_measure_s / 4), "target_halfwidth": 0.05})


def bottleneck(
    one: Entrant,
    rate: float,
    cores: int,
    on_cpu: bool,
    device: Measurement | None,
    loader: Measurement | None,
    apart: Measurement | None = None,
) -> Bottleneck:
    """Return the bottleneck of an entrant.

    Args:
        rate: end-to-end rate in samples/s. cores: number of cores a training may use; on_cpu: it also computes on them.
        device, loader: launches of each alone; ``None`` if there was no time for them.
        apart: a launch of the device alone, in ranks that do not exchange gradients.
    """
    waits = wait_fraction(one.seen) or 0.0
    # In most launches, or it is not the limit.
    handed = median([(m.hand_over_fraction or 0.0) * m.waits_for_hand_over for m in one.seen] or [0.0])
    limit, sentence = verdict(one.config, rate, waits, device, loader, apart, handed=handed, on_cpu=on_cpu)
    sides = sides_of(one.config, one.seen, device, None if contradictory(rate, loader) else loader)
    device_per_s, loader_per_s, apart_per_s = (
        None if side is None or contradictory(rate, side) else _triple(side) for side in (device, loader, apart)
    )
    local = None
    if limit is Limit.LOADER and sides is not None and sides.idle > STORE:
        local = max(rate, without_store(one.config, sides, cores, shared=on_cpu))
        sentence += (
            f" For {percent_text(sides.idle)} of the time it takes, the loader's processes wait for files or the "
            f"network: from a copy in memory the training would run at about {rate_text(local)} samples/s."
        )
    return Bottleneck(
        trial=one.trial.number,
        limit=limit,
        samples_per_s=rate,
        device_only_per_s=device_per_s,
        loader_only_per_s=loader_per_s,
        alone_per_s=apart_per_s,
        store_fraction=None if sides is None else sides.idle,
        local_per_s=local,
        sentence=sentence,
    )


@dataclass(frozen=True)
class DeviceAndLoader:
    """Rates of device and loader on their own, in samples/s.

    Attributes:
        idle: fraction of the time in which the loader's processes make batches that they spend waiting for files or the
            network.
    """

    device_per_s: float
    loader_per_s: float
    idle: float


def sides_of(
    config: Config, seen: Sequence[Measurement], device: Measurement | None, loader: Measurement | None
) -> DeviceAndLoader | None:
    """Return what is known about both sides of a training.

    Without workers, its own launches show them best: loading and computing take turns, and both are slower than alone,
    because each leaves the other with cold caches. With workers, the two get in each other's way, so launches of each
    alone show more, if there were any.

    Args:
        seen: launches of the training. device, loader: launches of each alone.
    """
    from_launches = None
    rows = [(m.device_per_s, m.loader_capacity_per_s, m.loader_idle_fraction) for m in seen]
    complete_rows = [
        (device_per_s, loader_per_s, idle)
        for device_per_s, loader_per_s, idle in rows
        if device_per_s and loader_per_s and idle is not None
    ]
    if complete_rows:
        from_launches = DeviceAndLoader(*(median(column) for column in zip(*complete_rows, strict=True)))
    if (
        device is None
        or loader is None
        or loader.loader_idle_fraction is None
        or (from_launches and not workers_of(config))
    ):
        return from_launches
    return DeviceAndLoader(device.samples_per_s, loader.samples_per_s, loader.loader_idle_fraction)


def without_store(config: Config, sides: DeviceAndLoader, cores: int, *, shared: bool) -> float:
    """Estimate the rate of a training whose loader need not wait for its store, in samples/s.

    What remains of the loader's time is that in which its processes are busy. With workers, as many of them are busy at
    once as there are cores, and the training runs at most at the device's rate.

    Args:
        shared: the device is the CPU, so that training and loader share its cores.
    """
    workers = workers_of(config)
    busy_s = (1 - sides.idle) * max(1, workers) / sides.loader_per_s
    if not workers:
        return 1 / (1 / sides.device_per_s + busy_s)
    if shared:
        # The work of both is spread over all cores.
        shared_per_s = 1 / (1 / sides.device_per_s + busy_s / cores)
        return min(shared_per_s, workers / busy_s)
    return min(sides.device_per_s, min(workers, cores) / busy_s)


def contradictory(rate: float, ceiling: Measurement | None) -> bool:
    """Return whether a ceiling is so far below the end-to-end rate that one of them must be wrong."""
    return ceiling is not None and ceiling.ci95_per_s[1] < CONTRADICTS * rate


def _triple(measurement: Measurement) -> tuple[float, float, float]:
    return (measurement.samples_per_s, *measurement.ci95_per_s)


def verdict(
    config: Config,
    rate: float,
    wait_fraction: float,
    device: Measurement | None,
    loader: Measurement | None,
    apart: Measurement | None = None,
    *,
    handed: float = 0.0,
    on_cpu: bool = True,
) -> tuple[Limit, str]:
    """Return what limits a configuration, and a sentence that says what removing each limit would gain.

    Args:
        rate: end-to-end rate in samples/s.
        wait_fraction: fraction of a step spent waiting for the loader; the only criterion if a ceiling is missing.
        handed: fraction of a step spent waiting for the hand-over of batches that were made, if that is the limit.
        on_cpu: batches are not copied to another device.
    """
    if handed:
        copies = " and copies them to pinned memory" if config.get(PINNED.name) else ""
        offered = config.get(BATCH_MEMORY.name) == BATCH_MEMORY.default
        less = "smaller samples, or batch_memory=slots," if offered else "smaller samples"
        return Limit.HAND_OVER, (
            f"{Limit.HAND_OVER}: for {percent_text(handed)} of a step, batches that workers have made wait for the one "
            f"thread of the training's process that receives them{copies}: {less} would take less, and more workers "
            "would not."
        )
    is_contradictory = contradictory(rate, device) or contradictory(rate, loader)
    if is_contradictory or device is None or loader is None:
        limit = Limit.LOADER if wait_fraction > 0.5 else Limit.DEVICE if wait_fraction < 0.1 else Limit.BALANCED
        reason = (
            "a ceiling came out below the rate itself, so the machine was not the same then, and it is left out"
            if is_contradictory
            else "the ceilings were not measured"
        )
        return limit, f"{limit}: {percent_text(wait_fraction)} of a step is waiting for the loader ({reason})."
    copying = 0.0 if on_cpu or config.get(PINNED.name) else 1 - wait_fraction - rate / device.samples_per_s
    if copying > max(SMALL_SHARE, wait_fraction):
        return Limit.COPY, (
            f"{Limit.COPY}: for about {percent_text(copying)} of a step the device neither computes (alone it runs at "
            f"{rate_text(device.samples_per_s)} samples/s) nor waits for the loader: without {PINNED.phrase(True)} it "
            "waits while each batch is copied."
        )
    waits_for_host = device.enqueue_s is not None and device.enqueue_s >= LAUNCH_BOUND * device.mean_step_s
    bound = Limit.LAUNCH if waits_for_host else Limit.DEVICE
    gains = (
        f"{_buys('a loader', device.samples_per_s, rate)}, {_buys('a device', loader.samples_per_s, rate)}".capitalize()
    )
    if apart is not None:
        gains += f"; of the device alone, ranks that exchange nothing would make {rate_text(apart.samples_per_s)}"
        bound = Limit.COMMUNICATION if apart.samples_per_s > MATTERS * device.samples_per_s else bound
    if workers_of(config) == 0:
        share = device.samples_per_s / (device.samples_per_s + loader.samples_per_s)
        limit = Limit.LOADER if share > 1 - SMALL_SHARE else bound if share < SMALL_SHARE else Limit.BALANCED
        turns = f"without workers loading and computing take turns, and loading takes {percent_text(share)} of the time"
        return limit, f"{limit}: {turns}. {gains}."
    # A ceiling below the measured rate is noise: removing the other limit would gain nothing.
    faster_loader, faster_device = max(1.0, device.samples_per_s / rate), max(1.0, loader.samples_per_s / rate)
    if faster_loader > MATTERS and faster_loader > MATTERS * faster_device:
        limit = Limit.LOADER
    elif faster_device > MATTERS and faster_device > MATTERS * faster_loader:
        limit = bound
    else:
        limit = Limit.BALANCED
    return limit, f"{limit}: {gains[0].lower()}{gains[1:]}."


def _buys(what: str, ceiling_per_s: float, rate_per_s: float) -> str:
    """Return a clause on the rate that would be reached if one side took no time."""
    if ceiling_per_s < rate_per_s:
        # A ceiling a little below the measured rate is noise.
        return f"{what} that costs nothing would buy nothing (alone: {rate_text(ceiling_per_s)} samples/s)"
    # No ratio is given: the two rates were measured at different times.
    return f"with {what} that costs nothing it would run at {rate_text(ceiling_per_s)} samples/s"


# Checks that the winner holds: it trains until its memory has settled, with an evaluation pass and the largest sample.

#: Fraction of device memory that must stay free, for other processes, fragmentation, or a larger sample.
HEADROOM = 0.08
#: Training for less time does not show whether memory grows.
_LEAST_S = 2.0
#: On CUDA the winner then trains for at most this long, and at most half of the time, to measure the rate that the card
#: sustains. The windows of a launch take a few seconds after a pause, in which a card may run at clocks that its power
#: and thermal limits do not allow for longer.
_SUSTAIN_S = 20.0
_LEAST_LIMIT_S = 20.0


def check_holding(context: ProofContext, winner: Entrant, share_s: float) -> HoldVerdict:
    """Run the winner until its memory settles, and somewhat longer on CUDA. If it does not hold, it drops out of the
    race."""
    number = winner.trial.number
    if context.by_command:
        why = "a script is not run for longer than its launches"
        return HoldVerdict(trial=number, passed=None, reason=why, headroom_wanted=HEADROOM)
    start_s = max((m.startup_s + m.compile_s for m in winner.seen), default=0.0)
    # The evaluation pass compiles graphs of its own, which no cache has yet, as the first launch did.
    start_s += context.compiled_s.get(graph(winner.config), 0.0) if compiles(winner.config) else 0.0
    train_s = min(share_s, context.launches.budget.left_s) - start_s
    name = f"hold-{winner.name}"
    if train_s < _LEAST_S and context.launches.finished(name, winner.config) is None:
        return HoldVerdict(trial=number, passed=None, reason="there was no time to check it", headroom_wanted=HEADROOM)
    limit_s = max(_LEAST_LIMIT_S, 2 * (start_s + max(train_s, _LEAST_S)))
    train_s = max(train_s, _LEAST_S)
    sustain_s = min(_SUSTAIN_S, train_s / 2) if context.device == "cuda" else 0.0
    plan = HoldPlan(min_s=min(5.0, train_s / 2), max_s=train_s - sustain_s, sustain_s=sustain_s)
    result = context.launches.run_outside(
        LaunchKind.HOLD, name, f"checking that trial {number} holds", winner.config, hold=plan, limit_s=limit_s
    )
    context.raise_if_stopped()
    if result.hold is not None:
        reason = held(result.hold, HEADROOM)
        passed: bool | None = reason is None
        # Memory that kept growing but left enough room is neither a pass nor a failure.
        if held(result.hold.model_copy(update={"settled": True}), HEADROOM) is None and not result.hold.settled:
            passed = None
        if passed is not False:
            excess = _beyond_required(context, result.hold)
            passed, reason = (passed, reason) if excess is None else (False, excess)
    elif ended_from_outside(result) or result.status is TrialStatus.TIMEOUT:
        # The time limit is set here, so hitting it says nothing about memory.
        passed, reason = None, f"its check ended as {result.status}: {result.cause}"
    else:
        passed, reason = False, f"it ended as {result.status} in the long run: {result.cause}"
    if passed is False:
        winner.out = f"did not hold: {reason}"
        context.observer.says(f"{winner.title} {winner.out}")
    sustained_per_s = None
    if result.hold is not None and result.hold.sustained_per_s is not None and winner.seen:
        # The turns of epochs take the same fraction of it as in the timed launches.
        turns = fmean(m.samples_per_s / m.steady_per_s for m in winner.seen)
        sustained_per_s = turns * result.hold.sustained_per_s
    return HoldVerdict(
        trial=number,
        passed=passed,
        reason=reason,
        hold=result.hold,
        headroom_wanted=HEADROOM,
        sustained_per_s=sustained_per_s,
    )


def held(hold: Hold, headroom: float) -> str | None:
    """Return one sentence on why a training does not hold; ``None`` if it does.

    Args:
        headroom: fraction of the capacity that must have remained free.
    """
    if not hold.settled:
        return f"its memory was still growing after {hold.seconds:.0f} s ({hold.steps} steps)"
    if hold.alloc_retries:
        return (
            f"CUDA's allocator ran out of memory and had to empty its cache (num_alloc_retries: {hold.alloc_retries})"
        )
    if hold.headroom < headroom:
        return (
            f"it leaves {100 * hold.headroom:.1f} % of {hold.capacity_bytes / 2**30:.1f} GiB free, "
            f"and {100 * headroom:.3g} % is wanted"
        )
    return None


def _beyond_required(context: ProofContext, hold: Hold) -> str | None:
    """Return a clause on how its memory exceeds a requirement: an evaluation and the largest sample may take more than
    the launches did."""
    memory = FIGURES["peak_memory"]
    for requirement in context.required.every:
        if requirement.figure is memory and requirement.at_most and hold.peak_bytes > requirement.limit:
            peak = figure_text(memory, hold.peak_bytes)
            return f"it took {peak} in a longer training with an evaluation, and {requirement} is required"
    return None


# Measures the gain of each knob by racing the winner against itself with one knob set back to the baseline's value.
#
# One knob is left out rather than added, because knobs interact (channels_last gains little in fp32 and much in bf16)
# and the useful number is the loss from setting a knob back. The question is that of Fawcett & Hoos, "Analysing
# differences between algorithm configurations through ablation", J. Heuristics 22, 2016; their method follows a path.


_MAX_ROUNDS = 4
#: First word of the names of the launches after which a variant takes the winner's place.
TAKEOVER = "simpler"
#: Name of the heat, and the number of turns or steps that a variant is expected to take in it.
_HEAT, _HEAT_ROUNDS = "ablate-heat", 10
#: Largest fraction of the time that a training with workers may wait for them if its gains are to come from a heat:
#: workers continue while the device is slow.
FEW_WAITS = 0.05


@dataclass(frozen=True)
class Variant:
    """The winner with one knob set back.

    Attributes:
        with_it: other knobs that have no effect without this one.
        refused: why it may not be launched; ``None`` if it may.
    """

    knob: str
    entrant: Entrant
    with_it: tuple[str, ...] = ()
    refused: str | None = None


def ablate(race: Race, winner: Entrant, share_s: float) -> tuple[KnobPart, ...]:
    """Measure the gain of each changed knob of the winner, for at most ``share_s`` seconds.

    If the winner hardly waits for its loader, the variants to which its training can be switched are compared in a
    heat. The others are launched in further rounds of the race, in turns with the baseline as well, so that one of them
    can replace the winner.
    """
    baseline = race.baseline
    if winner is baseline:
        return ()
    budget = race.context.launches.budget
    variants = variants_of(race.context.space, winner)
    began = budget.spent_s
    heat_gains = _in_a_heat(race, winner, variants, min(share_s, budget.left_s))
    remaining = [v for v in variants if v.knob not in heat_gains]
    if remaining and not (len(variants) == 1 and key(variants[0].entrant.config) == key(baseline.config)):
        _run(race, winner, [v.entrant for v in remaining if v.refused is None], share_s - (budget.spent_s - began))
    compared = race.compared()
    parts = []
    for variant in variants:
        # Without its only change, the winner is the baseline, which the race has measured.
        entrant = baseline if key(variant.entrant.config) == key(baseline.config) else variant.entrant
        gain = heat_gains.get(variant.knob)
        if gain is None and compared.in_turns(winner, entrant):
            gain = compared.ratio(winner, entrant)
        parts.append(
            KnobPart(
                knob=variant.knob,
                value=winner.config[variant.knob],
                baseline_value=baseline.config.get(variant.knob),
                with_it=variant.with_it,
                gain=gain,
                why_not=_why_not(variant, winner) if gain is None else None,
                launches=len(entrant.again),
                in_heat=variant.knob in heat_gains,
            )
        )
    return tuple(parts)


def _in_a_heat(
    race: Race, winner: Entrant, variants: Sequence[Variant], limit_s: float
) -> dict[str, tuple[float, float, float]]:
    """Return the gain of each knob as measured in a heat of the winner and its variants.

    A heat shows the device's part. The winner's waits for its loader are added to the time of each variant, so that the
    gains apply to the training: exactly without workers, and with workers if there is hardly any waiting.
    """
    fraction = wait_fraction(winner.seen)
    waits = 1.0 if fraction is None else fraction
    if not race.context.by_rate or waits > (FEW_WAITS if workers_of(winner.config) else MOSTLY_DEVICE):
        return {}
    launches = race.context.launches
    if launches.conditions.ranks > 1 or launches.even_steps is None:
        return {}
    if not race.context.space.is_as_in_heats(winner.config):
        # What its variants show in one process is not what they show in launches.
        return {}
    entrants, knobs = [winner.config], [""]
    cold_s = max(_compile_s(winner), race.compiled_s.get(graph(winner.config), 0.0))
    left_s = limit_s - winner.seen[0].startup_s - (WARM_COMPILE * cold_s if compiles(winner.config) else 0.0)
    # A resumed study has already spent the seconds of the variants that it had chosen.
    earlier = launches.heat_plan(_HEAT)
    earlier_entrants = earlier.entrants if earlier is not None and earlier.entrants[0] == winner.config else ()
    for variant in variants:
        config = variant.entrant.config
        step_s = int(config["batch_size"]) / winner.seen[0].samples_per_s
        taken_s = _HEAT_ROUNDS * max(launches.even_steps * step_s, launches.turn_s["device"]) + (
            cold_s if compiles(config) else 0.0
        )
        fits = config in earlier_entrants if earlier_entrants else taken_s < left_s
        # Without its only change, the winner is the baseline, which the race has measured.
        fits &= key(config) != key(race.baseline.config)
        if fits and variant.refused is None and race.context.space.why_apart(winner.config, config) is None:
            left_s -= taken_s
            entrants.append(config)
            knobs.append(variant.knob)
    if len(entrants) < 2:
        return {}
    heat, _ = launches.heat(_HEAT, "the gains of its knobs", entrants, limit_s=limit_s)
    race.context.raise_if_stopped()
    for name, seconds in cold_compiles([], [heat]).items():
        race.compiled_s[name] = max(seconds, race.compiled_s.get(name, 0.0))
    if heat.reference is not heat.entrants[0]:
        return {}
    gains = {}
    for knob, entrant in zip(knobs[1:], heat.entrants[1:], strict=True):
        if entrant.ratio is not None and entrant.ratio_ci95 is not None:
            # The winner takes one unit of time, part of which is waiting; without the knob, its device takes longer.
            low, high = entrant.ratio_ci95
            gain, least, most = ((1 - waits) / ratio + waits for ratio in (entrant.ratio, high, low))
            gains[knob] = gain, least, most
    return gains


def variants_of(space: Space, winner: Entrant) -> list[Variant]:
    """Return the winner with each changed knob set back to the baseline's value, one at a time, the largest expected
    effect first."""
    baseline, config = space.baseline, winner.config
    # Knobs that need workers are set back together with them, and are no changes if the baseline has no workers.
    changed = [n for n in config if config[n] != baseline.get(n) and (n in baseline or not _needs(n))]
    variants = []
    for name in sorted(changed, key=lambda n: _expected_effect(n, config[n], baseline.get(n)), reverse=True):
        variant_config = set_back(space, config, [name])
        with_it = tuple(n for n in config if n not in variant_config)
        # A compiled variant has to be compiled first.
        compile_s = _compile_s(winner) if compiles(variant_config) else 0.0
        entrant = Entrant(
            variant_config, winner.trial, expected_s=winner.expected_s + compile_s, label=f"without {name}"
        )
        variants.append(Variant(name, entrant, with_it, space.combination_refusal(variant_config)))
    return variants


def set_back(space: Space, config: Config, names: Collection[str]) -> dict[str, Value]:
    """Return a configuration with some knobs set back to the baseline's values, along with the knobs that have no
    effect without them."""
    baseline = space.baseline
    needing = {n: baseline[n] for n in baseline if _needs(n) in names}
    return canonical({**needing, **config, **{n: baseline[n] for n in names}})


def _needs(name: str) -> str | None:
    return KNOBS[name].needs if name in KNOBS else None


def _expected_effect(name: str, value: Value, baseline_value: Value | None) -> float:
    """Return the effect that changing a knob may have according to the catalog."""
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

    Time for one more round is reserved, because a variant as good as the winner replaces it after another launch. If
    more variants fit without the baseline and the reserve, they run in turns with the winner alone, which shows only
    their gains.
    """
    budget = race.context.launches.budget
    # These launches have their own names, so that a resume does not mistake them for the race's.
    race.purpose = "ablate"
    began = budget.spent_s
    limit_s = min(share_s, budget.left_s)
    reserve_s = expected_s([race.baseline, winner, winner])
    # A resumed study has already spent the seconds of the variants that it had chosen.
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
        next_s = race.round_s(racing)
        if not any(e in tested for e in racing) or next_s > max(0.0, left_s):
            break
        # Whether one can take the winner's place matters more than a narrower gain. There may be no time for both.
        if next_s and any(_takes_over_now(race, winner, one, next_s) for one in tested):
            break
        race.round(racing)


def _takes_over_now(race: Race, winner: Entrant, variant: Entrant, round_s: float) -> bool:
    """Return whether to see now if a variant can take the winner's place, if the rate is what counts: it is shown to be
    faster, or it leads and there would be no time for that after another round of so many seconds."""
    compared = race.compared()
    if not race.context.by_rate or variant.out is not None or not compared.in_turns(winner, variant):
        return False
    ratio, _, high = compared.ratio(winner, variant)
    if ratio >= 1 or not takeover_fits(race, winner, variant):
        return False
    return high < 1 or not takeover_fits(race, winner, variant, after_s=round_s)


def takeover_rounds(race: Race, winner: Entrant, variant: Entrant) -> list[list[Entrant]]:
    """Return the rounds with baseline and winner after which a variant can take the winner's place."""
    with_baseline, with_winner = (LEAST_LAUNCHES - shared_rounds(variant, e) for e in (race.baseline, winner))
    return [
        [*([race.baseline] if n < with_baseline else []), *([winner] if n < with_winner else []), variant]
        for n in range(max(with_baseline, with_winner))
    ]


def takeover_fits(race: Race, winner: Entrant, variant: Entrant, *, after_s: float = 0.0) -> bool:
    """Return whether there is time for these rounds, now or after so many seconds. Those of an earlier run of the study
    cost nothing, even if it has spent the budget."""
    rounds = takeover_rounds(race, winner, variant)
    needed_s = sum(race.round_s(racing, n, TAKEOVER) for n, racing in enumerate(rounds))
    return needed_s <= max(0.0, race.context.launches.budget.left_s - after_s)


def _fitting(race: Race, racing: Sequence[Entrant], variants: Sequence[Entrant], limit_s: float) -> list[Entrant]:
    """Return the variants that, together with ``racing``, fit into a round of the given seconds."""
    fitting: list[Entrant] = []
    for variant in variants:
        if race.round_s([*racing, *fitting, variant]) <= limit_s:
            fitting.append(variant)
    return fitting


def _why_not(variant: Variant, winner: Entrant) -> str:
    entrant = variant.entrant
    if variant.refused is not None:
        return variant.refused
    if entrant.out is not None:
        return f"it {entrant.out}"
    if entrant.rounds:
        return "it could not be measured undisturbed"
    must_compile = compiles(winner.config) and compiles(entrant.config)
    return "there was no time for it" + (", it would have to be compiled again" if must_compile else "")
