"""Builds a space from facts and a request: the values considered, the refusals, and the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.base.errors import ImpossibleError, UnknownNameError, UsageError
from autotune.knobs import KNOBS, Knob, SiteFacts, answer_to, spell
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.base.records import Host, Probe, Value
from autotune.space.configuration import canonical, is_idle
from autotune.space.legal import Choice, Space


@dataclass(frozen=True)
class SpaceRequest:
    """The user's restrictions of the space, with parsed values.

    Attributes:
        narrowed, fixed: values to search; they do not move the baseline.
        baseline: what the user runs today, as far as it differs from the defaults.
        keep_batch_size: search at the baseline's batch size only.
        global_batch: see `SiteFacts`.
        told: of knobs that a script's own flags set value by value, these. No others are possible, but its own.
    """

    narrowed: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Value] = field(default_factory=dict)
    baseline: Mapping[str, Value] = field(default_factory=dict)
    batch_size: int | None = None
    keep_batch_size: bool = False
    global_batch: int | None = None
    told: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def own(self, name: str, facts: SiteFacts) -> Value | None:
        """Return the value that a script has by itself; ``None`` if nothing tells."""
        seen = (facts.probe.own or {}).get(name)
        if seen is not None or name not in self.told or is_idle(name, facts.probe.own or {}):
            return seen
        return self.baseline.get(name, KNOBS[name].default_here(facts))


def build_space(probe: Probe, host: Host, request: SpaceRequest) -> Space:
    """Build the legal space of a workload on a machine.

    Raises:
        UsageError: the request names an illegal value, or leaves a knob without a legal one.
    """
    batch_size = request.batch_size or int(request.baseline.get("batch_size", probe.default_batch_size))
    parts = request.baseline.get(ACCUMULATION.name)
    facts = SiteFacts(
        probe,
        host,
        batch_size,
        request.global_batch,
        None if parts is None else int(parts),
        pinned=request.fixed,
    )
    considered, inactive = _considered(facts, request)
    baseline = _baseline(facts, request)
    for name in [*request.narrowed, *request.fixed, *request.baseline]:
        if name in inactive and not (name in request.baseline and name in baseline):
            raise UsageError(f"{name} cannot be set here: {inactive[name]}")
        if name not in considered and name not in inactive:
            raise UnknownNameError("knob", name, [*KNOBS, *considered])
    choices: dict[str, tuple[Choice, ...]] = {}
    kept = {"batch_size": baseline["batch_size"]} if request.keep_batch_size else {}
    pinned = {**request.fixed, **kept}
    for name, offered in considered.items():
        wanted = (pinned[name],) if name in pinned else request.narrowed.get(name)
        stated = {repr(given[name]) for given in (request.fixed, request.baseline) if name in given}
        choices[name] = _narrow(name, offered, wanted, stated, facts, request)
        # A sentence about the value that the user named is more useful than "no value left".
        if not any(c.refused is None for c in choices[name]):
            refused = choices[name][0]
            if refused.refused is not None and wanted is None and probe.own is not None:
                # Nothing can be set from outside, and nobody asked for it.
                inactive[name] = refused.refused
                del choices[name]
                baseline.pop(name, None)
                continue
            raise ImpossibleError(f"{name}={spell(refused.value)} is not possible here: {refused.refused}")
    for name, value in baseline.items():
        refused_value = _refusal(name, value, facts, request, stated=name in request.baseline)
        if refused_value is not None:
            raise ImpossibleError(f"baseline {name}={spell(value)} is not possible here: {refused_value}")
    space = Space(
        choices=choices,
        inactive=inactive,
        baseline=canonical(baseline),
        dataset_samples=probe.dataset_samples,
        sample_bytes=probe.sample_bytes,
        shm_bytes=host.shm_free_bytes,
        memory_bytes=host.available_bytes,
        # Samples of varying shapes cannot be stacked: a batch of them is a list of tensors.
        batch_tensors=0 if probe.varying_shapes else probe.sample_tensors,
        sample_tensors=probe.sample_tensors if probe.varying_shapes else 0,
        open_files=host.open_files,
        speed_only=frozenset(f"workload.{n}" for n, changes in probe.workload_maths.items() if not changes),
        between_launches=_between_launches(probe),
        on_purpose=frozenset(f"workload.{n}" for n, changes in probe.workload_maths.items() if changes),
    )
    refused_baseline = space.combination_refusal(space.baseline)
    if refused_baseline is not None:
        raise ImpossibleError(
            f"the baseline is not possible here: {refused_baseline}",
            advice="--batch-size or --baseline states another one.",
        )
    if next(space.grid(), None) is None:
        left = {name: space.legal(name)[0] for name in space.choices}
        why = space.combination_refusal(canonical(left))
        raise ImpossibleError(
            f"no combination of the values left is possible here: {why}", advice="allow more with --set, or fix less."
        )
    return space


def _between_launches(probe: Probe) -> frozenset[str]:
    if probe.own is None:
        return frozenset()
    # All ranks would have to be switched at the same step.
    return frozenset(KNOBS) if probe.ranks > 1 else frozenset(("batch_size", *probe.in_command))


def _narrow(
    name: str,
    offered: tuple[Value, ...],
    wanted: tuple[Value, ...] | None,
    stated: set[str],
    facts: SiteFacts,
    request: SpaceRequest,
) -> tuple[Choice, ...]:
    further = () if wanted or name not in KNOBS or name in request.told else KNOBS[name].further(facts)
    values = sorted({*offered, *further}, key=int) if further else (wanted or offered)
    return tuple(Choice(v, _refusal(name, v, facts, request, stated=repr(v) in stated), v in further) for v in values)


def _considered(facts: SiteFacts, request: SpaceRequest) -> tuple[dict[str, tuple[Value, ...]], dict[str, str]]:
    """Return the values to consider for each active knob, and the reason for each inactive one."""
    considered: dict[str, tuple[Value, ...]] = {}
    inactive: dict[str, str] = {}
    pinned = {n: values[0] for n, values in request.narrowed.items() if len(values) == 1} | dict(request.fixed)
    for name, knob in KNOBS.items():
        reason = knob.inactive_because(facts) or _unasked(name, facts, request, knob.values or ())
        if reason is None and is_idle(name, pinned):
            needed = KNOBS[knob.needs or ""]
            reason = f"needs {needed.name} above 0" if needed.numeric else f"needs {needed.name}"
        if reason is None:
            considered[name] = _with(knob, knob.ladder(facts), (request.own(name, facts), *request.told.get(name, ())))
        else:
            inactive[name] = reason
    for name, values in facts.probe.workload_knobs.items():
        reason = _unasked(f"workload.{name}", facts, request, values)
        if reason is None:
            considered[f"workload.{name}"] = values
        else:
            inactive[f"workload.{name}"] = reason
    return considered, inactive


def _unasked(name: str, facts: SiteFacts, request: SpaceRequest, values: tuple[Value, ...]) -> str | None:
    """Return why a knob that takes part only where its values are stated does not; ``None`` if it does."""
    own = name.removeprefix("workload.") in facts.probe.workload_unasked
    searched = KNOBS[name].searched if name in KNOBS else not own
    if searched or name in (*request.narrowed, *request.fixed, *request.baseline):
        return None
    return f"takes part where it is asked for: --set {name}={','.join(map(spell, values))}"


def _with(knob: Knob, ladder: tuple[Value, ...], more: tuple[Value | None, ...]) -> tuple[Value, ...]:
    """Return a ladder with the values that a script has by itself, or its own flags set, which may be any."""
    further = tuple(dict.fromkeys(value for value in more if value is not None and value not in ladder))
    return tuple(sorted((*ladder, *further), key=int)) if further and knob.numeric else (*ladder, *further)


def _baseline(facts: SiteFacts, request: SpaceRequest) -> dict[str, Value]:
    """Return what the user runs today: PyTorch's defaults, overridden by what was stated.

    What is pinned for the search is not stated about today: the baseline may lie outside the pinned space.
    """
    own = facts.probe.own or {}
    active = {
        n: knob
        for n, knob in KNOBS.items()
        if knob.inactive_because(facts) is None and _unasked(n, facts, request, ()) is None
    }
    defaults = {n: own[n] if n in own else knob.default_here(facts) for n, knob in active.items()}
    for name, values in facts.probe.workload_knobs.items():
        if _unasked(f"workload.{name}", facts, request, values) is None:
            defaults[f"workload.{name}"] = values[0]
    own_batch: dict[str, Value] = {} if request.batch_size is None else {"batch_size": request.batch_size}
    return canonical({**defaults, **own_batch, **request.baseline})


def _refusal(name: str, value: Value, facts: SiteFacts, request: SpaceRequest, *, stated: bool) -> str | None:
    """Return why a value is illegal for this device and workload; ``None`` if it is legal."""
    if name not in KNOBS:
        return None
    if request.own(name, facts) == value:
        # It is what the script does by itself.
        return None
    if name in request.told and value not in request.told[name]:
        return "--map says nothing of it"
    return KNOBS[name].refusal(value, facts, stated=stated) or facts.probe.outside.get(name, {}).get(
        answer_to(KNOBS[name], value)
    )
