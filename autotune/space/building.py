"""The space of legal configurations on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from autotune.base.errors import MORE_SHM, ImpossibleError, UnknownNameError, UsageError
from autotune.base.records import Config, Host, Probe, Value
from autotune.knobs import KNOBS, SiteFacts, answer_to, spell
from autotune.knobs.batch_memory import in_slots
from autotune.knobs.compile_mode import eager
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.knobs.num_workers import workers_of
from autotune.space.configuration import (
    canonical,
    is_idle,
    key,
    maths_part,
    queued_batches,
    shared_batches,
    why_apart,
)

# A space: the choices of one study, and which combinations of them are legal.

#: Approximate memory of a worker forked from a process with torch loaded, from copied pages.
WORKER_BYTES = 200 * 2**20
#: Batches in slots of a worker besides those of its queue: its first, and those that a training holds.
_BESIDES_QUEUE = 2
#: File descriptors of a training in addition to its batches, and of each worker (pipes and sentinel).
OWN_DESCRIPTORS = 64
WORKER_DESCRIPTORS = 3


@dataclass(frozen=True)
class Choice:
    """One value of a knob.

    Attributes:
        refused: why it is refused; ``None`` if it is legal.
        further: a number that is not on its knob's ladder; it is tried only if the best so far is within a factor of
            two of it.
    """

    value: Value
    refused: str | None = None
    further: bool = False


@dataclass(frozen=True)
class Space:
    """The knobs of one study, their choices, and which combinations are legal.

    Attributes:
        choices: every value considered, with its refusal if any, per active knob.
        inactive: knobs that have no effect here, with the reason.
        baseline: the configuration of trial 0. It may always be launched, even if ``--set`` excludes it.
        sample_bytes: size of one sample's tensors; ``None`` if unknown.
        batch_tensors, sample_tensors: a batch of N samples has ``batch_tensors + N * sample_tensors`` tensors.
        shm_bytes, memory_bytes, open_files: free resources of the machine; ``None`` for no limit.
        speed_only: the workload's knobs that are declared to change only the speed.
        on_purpose: those that are declared to change what is trained.
        between_launches: knobs that a script is started with, so that no heat compares them.
        only: keys of the configurations that may be launched, if not all combinations of the choices.
        overlaps: whether workers load while a step computes. On one core, one of the two runs at a time.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    inactive: Mapping[str, str]
    baseline: Mapping[str, Value]
    dataset_samples: int | None = None
    sample_bytes: int | None = None
    shm_bytes: int = 0
    memory_bytes: int = 0
    batch_tensors: int = 0
    sample_tensors: int = 0
    open_files: int | None = None
    speed_only: frozenset[str] = frozenset()
    on_purpose: frozenset[str] = frozenset()
    between_launches: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    overlaps: bool = True

    def legal(self, name: str) -> tuple[Value, ...]:
        """Return the legal values of a knob, in order."""
        return tuple(c.value for c in self.choices[name] if c.refused is None)

    def rungs(self, name: str) -> tuple[Value, ...]:
        """Return the legal values of a knob that may be tried at any time, in order."""
        return tuple(c.value for c in self.choices[name] if c.refused is None and not c.further)

    @cached_property
    def further(self) -> Mapping[str, tuple[Value, ...]]:
        """The other legal values of each knob that has any; they are tried only next to the best so far."""
        further = {
            n: tuple(c.value for c in choices if c.further and not c.refused) for n, choices in self.choices.items()
        }
        return {name: values for name, values in further.items() if values}

    def beside(self, name: str, value: Value | None) -> tuple[Value, ...]:
        """Return the `further` values of a knob that are at most a factor of two away from ``value``."""
        if value is None:
            return ()
        return tuple(v for v in self.further.get(name, ()) if int(value) <= 2 * int(v) <= 4 * int(value))

    def why_apart(self, config: Config, other: Config) -> str | None:
        """Return why a training cannot be switched from one configuration to another, as a clause; ``None`` if it
        can."""
        differ = [n for n in sorted(config.keys() | other.keys()) if config.get(n) != other.get(n)]
        launch_knob = next((name for name in differ if name in self.between_launches), None)
        return why_apart(config, other) if launch_knob is None else f"{launch_knob} needs a launch of its own"

    def same_maths(self, config: Config) -> bool:
        """Return whether a configuration computes what the baseline does, except for rounding."""
        return not self.changed_maths(config)

    def changed_maths(self, config: Config) -> dict[str, Value]:
        """Return the settings by which a configuration computes something else than the baseline."""
        changed = ((name, value) for name, value in maths_part(config).items() if value != self.baseline.get(name))
        return {name: value for name, value in changed if name not in KNOBS or KNOBS[name].changes_maths}

    def without(self, names: Set[str]) -> Space:
        """Return the space of a study that was begun without some knobs."""
        return replace(
            self,
            choices={name: choices for name, choices in self.choices.items() if name not in names},
            inactive={**self.inactive, **dict.fromkeys(names & self.choices.keys(), "the study was begun without it")},
            baseline={name: value for name, value in self.baseline.items() if name not in names},
        )

    def in_heats(self, config: Config) -> Config:
        """Return a configuration with the values that it has in heats; see `Knob.in_heats`."""
        names = [n for n in self.choices if n in KNOBS and n in config and KNOBS[n].in_heats in self.legal(n)]
        return {**config, **{name: value for name in names if (value := KNOBS[name].in_heats) is not None}}

    def is_as_in_heats(self, config: Config) -> bool:
        """Return whether a configuration has the same effect among others in one process as in a process of its own."""
        return key(self.in_heats(config)) == key(config)

    def refusal(self, config: Config) -> str | None:
        """Return why a configuration may not be launched here; ``None`` if it may."""
        for name, value in canonical(config).items():
            if name not in self.choices:
                return f"{name}: {self.inactive.get(name, 'unknown knob')}"
            for choice in self.choices[name]:
                if choice.value == value and type(choice.value) is type(value):
                    if choice.refused is not None:
                        return f"{name}={spell(value)}: {choice.refused}"
                    break
            else:
                return f"{name}={spell(value)} is not among this study's choices"
        return self.combination_refusal(config)

    def combination_refusal(self, config: Config) -> str | None:
        """Return why the values of a configuration cannot be combined here, given that each is legal by itself."""
        if self.only is not None and key(config) not in self.only:
            return "nobody has recorded this combination"
        batch = int(config["batch_size"])
        if self.dataset_samples is not None and batch > self.dataset_samples:
            return f"batch_size={batch}: the data set holds only {self.dataset_samples} samples"
        workers = workers_of(config)
        if not workers:
            return None
        if self.sample_bytes:
            shared = self._shared_bytes(config)
            if shared > self.shm_bytes:
                return (
                    f"{workers} workers would queue {shared / 2**20:.0f} MiB, /dev/shm has "
                    f"{self.shm_bytes / 2**20:.0f} MiB ({MORE_SHM})"
                )
            held = queued_batches(config) + _BESIDES_QUEUE * workers * in_slots(config)
            needed = self._bytes_of(held, config) + workers * WORKER_BYTES
            if needed > self.memory_bytes:
                return (
                    f"{workers} workers and their queues would take {needed / 2**20:.0f} MiB of host memory, "
                    f"{self.memory_bytes / 2**20:.0f} MiB are free (containers: raise --memory)"
                )
        # With PyTorch's sharing strategy file_descriptor, a tensor from a worker is an open file until it is freed. If
        # one worker lags, all the batches prepared by the others wait in the training process.
        tensors = self.batch_tensors + self.sample_tensors * batch
        files = queued_batches(config) * tensors + OWN_DESCRIPTORS + WORKER_DESCRIPTORS * workers
        if self.open_files is None or files <= self.open_files:
            return None
        return (
            f"{workers} workers would hold {files} files open, one for each tensor in their queues, and "
            f"{self.open_files} are allowed (raise `ulimit -n`)"
        )

    @property
    def shm_sentence(self) -> str | None:
        """A sentence on what a small /dev/shm excludes from the search at the baseline's batch size; ``None`` if
        nothing."""
        offered = [int(v) for v in (self.legal(WORKERS.name) if WORKERS.name in self.choices else ()) if v]
        fitting = [
            n
            for n in offered
            if self._shared_bytes(self.completed({**self.baseline, WORKERS.name: n})) <= self.shm_bytes
        ]
        if fitting == offered:
            return None
        most, batch = max(fitting, default=0), self.baseline["batch_size"]
        workers = f"at most {most} of {max(offered)} workers are" if most else "no workers are"
        return f"/dev/shm has {self.shm_bytes / 2**20:.0f} MiB, so {workers} tried at batch {batch} ({MORE_SHM})"

    def _shared_bytes(self, config: Config) -> int:
        return self._bytes_of(shared_batches(config), config)

    def _bytes_of(self, batches: int, config: Config) -> int:
        """Return the bytes of so many batches; 0 if the size of a sample is unknown."""
        return batches * int(config["batch_size"]) * (self.sample_bytes or 0)

    def completed(self, config: Config) -> dict[str, Value]:
        """Adapt a configuration from another space: values that are missing, or not legal here, are taken from the
        baseline, or else from the first legal choice."""
        result: dict[str, Value] = {}
        for name in self.choices:
            legal = self.legal(name)
            default = self.baseline.get(name, legal[0] if legal else None)
            value = config.get(name)
            is_legal = any(value == v and type(value) is type(v) for v in legal)
            value_here = value if is_legal else default
            if value_here is not None:
                result[name] = value_here
        return canonical(result)

    def grid(self) -> Iterator[dict[str, Value]]:
        """Yield every legal configuration of `rungs` once, in canonical form. Lazy: a space can hold 10⁵ of them."""
        names = list(self.choices)
        keys: set[str] = set()

        def walk(index: int, config: dict[str, Value]) -> Iterator[dict[str, Value]]:
            if index == len(names):
                complete = canonical(config)
                if self.combination_refusal(complete) is None and (k := key(complete)) not in keys:
                    keys.add(k)
                    yield complete
                return
            name = names[index]
            if is_idle(name, config):
                yield from walk(index + 1, config)
                return
            for value in self.rungs(name):
                yield from walk(index + 1, {**config, name: value})

        yield from walk(0, {})

    @property
    def must_compile(self) -> bool:
        """Whether no configuration may be launched without compiling."""
        return self.refusal(eager(self.completed(self.baseline))) is not None

    def same_training(self, config: Config) -> bool:
        """Return whether a configuration trains as the baseline does: with its batch size, and with its values of the
        workload's knobs, except for those that are declared to change only the speed."""
        return config.get("batch_size") == self.baseline.get("batch_size") and all(
            config.get(name) == value
            for name, value in self.baseline.items()
            if name.startswith("workload.") and name not in self.speed_only
        )


# Builds a space from facts and a request: the values considered, the refusals, and the baseline.


@dataclass(frozen=True)
class SpaceRequest:
    """The user's restrictions of the space, with parsed values.

    Attributes:
        narrowed, fixed: values to search; they do not move the baseline.
        baseline: what the user runs today, as far as it differs from the defaults.
        keep_batch_size: search at the baseline's batch size only.
        global_batch: see `SiteFacts`.
        told: the values of knobs that a script's own flags set value by value. No others are possible except the one
            the script has by itself.
    """

    narrowed: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Value] = field(default_factory=dict)
    baseline: Mapping[str, Value] = field(default_factory=dict)
    batch_size: int | None = None
    keep_batch_size: bool = False
    global_batch: int | None = None
    told: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def own(self, name: str, facts: SiteFacts) -> Value | None:
        """Return the value that a script has by itself; ``None`` if unknown."""
        value = (facts.probe.own or {}).get(name)
        if value is not None or name not in self.told or is_idle(name, facts.probe.own or {}):
            return value
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
        stated = {repr(values[name]) for values in (request.fixed, request.baseline) if name in values}
        further = () if wanted or name not in KNOBS or name in request.told else KNOBS[name].further(facts)
        choices[name] = tuple(
            Choice(value, _refusal(name, value, facts, request, stated=repr(value) in stated), value in further)
            for value in (sorted({*offered, *further}, key=int) if further else wanted or offered)
        )
        # A sentence about the value that the user named is more useful than "no value left".
        if not any(c.refused is None for c in choices[name]):
            refused = choices[name][0]
            if refused.refused is not None and wanted is None and probe.own is not None:
                # Nothing can be set from outside, and the user did not ask for it.
                inactive[name] = refused.refused
                del choices[name]
                baseline.pop(name, None)
                continue
            raise ImpossibleError(f"{name}={spell(refused.value)} is not possible here: {refused.refused}")
    for name, value in baseline.items():
        refused_value = _refusal(name, value, facts, request, stated=name in request.baseline)
        if refused_value is not None:
            raise ImpossibleError(f"baseline {name}={spell(value)} is not possible here: {refused_value}")
    # All ranks would have to be switched at the same step.
    in_command = ("batch_size", *probe.in_command)
    space = Space(
        choices=choices,
        inactive=inactive,
        baseline=canonical(baseline),
        dataset_samples=probe.dataset_samples,
        sample_bytes=probe.sample_bytes,
        shm_bytes=host.shm_free_bytes,
        overlaps=facts.cuda or host.cores > 1,
        memory_bytes=host.available_bytes,
        # Samples of varying shapes cannot be stacked: a batch of them is a list of tensors.
        batch_tensors=0 if probe.varying_shapes else probe.sample_tensors,
        sample_tensors=probe.sample_tensors if probe.varying_shapes else 0,
        open_files=host.open_files,
        speed_only=frozenset(f"workload.{n}" for n, changes in probe.workload_maths.items() if not changes),
        between_launches=frozenset(() if probe.own is None else in_command if probe.ranks == 1 else KNOBS),
        on_purpose=frozenset(f"workload.{n}" for n, changes in probe.workload_maths.items() if changes),
    )
    refused_baseline = space.combination_refusal(space.baseline)
    if refused_baseline is not None:
        raise ImpossibleError(
            f"the baseline is not possible here: {refused_baseline}",
            advice="--batch-size or --baseline states another one.",
        )
    if next(space.grid(), None) is None:
        first_values = {name: space.legal(name)[0] for name in space.choices}
        why = space.combination_refusal(canonical(first_values))
        raise ImpossibleError(
            f"no combination of the values left is possible here: {why}", advice="allow more with --set, or fix less."
        )
    return space


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
            # With what a script has by itself, or its own flags set.
            ladder, told = knob.ladder(facts), (request.own(name, facts), *request.told.get(name, ()))
            more = tuple(dict.fromkeys(value for value in told if value is not None and value not in ladder))
            is_sorted = more and knob.numeric
            considered[name] = tuple(sorted((*ladder, *more), key=int)) if is_sorted else (*ladder, *more)
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
    """Return why a knob that takes part only if its values are stated does not; ``None`` if it does."""
    on_request = name.removeprefix("workload.") in facts.probe.workload_unasked
    searched = KNOBS[name].searched if name in KNOBS else not on_request
    if searched or name in (*request.narrowed, *request.fixed, *request.baseline):
        return None
    return f"takes part where it is asked for: --set {name}={','.join(map(spell, values))}"


def _baseline(facts: SiteFacts, request: SpaceRequest) -> dict[str, Value]:
    """Return what the user runs today: PyTorch's defaults, overridden by what was stated.

    Pinning a value for the search says nothing about today: the baseline may lie outside the pinned space.
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
        # The script does this by itself.
        return None
    if name in request.told and value not in request.told[name]:
        return "--map says nothing of it"
    return KNOBS[name].refusal(value, facts, stated=stated) or facts.probe.outside.get(name, {}).get(
        answer_to(KNOBS[name], value)
    )
