"""A space: the choices of one study, and which combinations of them are legal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autotune.base.errors import MORE_SHM
from autotune.knobs import spell
from autotune.knobs.compile_mode import eager
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.knobs.num_workers import workers_of
from autotune.base.records import Config, Value
from autotune.space.configuration import canonical, is_idle, key, why_apart
from autotune.space.lessons import queued_batches

#: Approximate memory of a worker forked from a process with torch loaded, from copied pages.
WORKER_BYTES = 200 * 2**20
#: File descriptors of a training in addition to its batches, and of each worker (pipes and sentinel).
OWN_DESCRIPTORS = 64
WORKER_DESCRIPTORS = 3


@dataclass(frozen=True)
class Choice:
    """One value of a knob.

    Attributes:
        refused: why it is refused; ``None`` if it is legal.
        further: a number that is not on its knob's ladder; it is tried only if the best so far is at most twice or half
            of it.
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
        only: keys of the configurations that may be launched, if these are not all combinations of the choices.
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

    def legal(self, name: str) -> tuple[Value, ...]:
        """Return the legal values of a knob, in order."""
        return tuple(c.value for c in self.choices[name] if c.refused is None)

    def rungs(self, name: str) -> tuple[Value, ...]:
        """Return the legal values of a knob that may be tried at any time, in order."""
        return tuple(c.value for c in self.choices[name] if c.refused is None and not c.further)

    @cached_property
    def further(self) -> Mapping[str, tuple[Value, ...]]:
        """The other legal values, which are tried only beside the best so far, of each knob that has some."""
        found = {n: tuple(c.value for c in cs if c.further and not c.refused) for n, cs in self.choices.items()}
        return {name: values for name, values in found.items() if values}

    def beside(self, name: str, value: Value | None) -> tuple[Value, ...]:
        """Return the `further` values of a knob that are at most a factor of two away from ``value``."""
        if value is None:
            return ()
        return tuple(v for v in self.further.get(name, ()) if int(value) <= 2 * int(v) <= 4 * int(value))

    def why_apart(self, config: Config, other: Config) -> str | None:
        """Return why a training cannot be switched from one configuration to another, as a clause; ``None`` if it
        can."""
        differ = [n for n in sorted(config.keys() | other.keys()) if config.get(n) != other.get(n)]
        told = next((name for name in differ if name in self.between_launches), None)
        return why_apart(config, other) if told is None else f"{told} needs a launch of its own"

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
            queued = self._queued_bytes(config)
            if queued > self.shm_bytes:
                return (
                    f"{workers} workers would queue {queued / 2**20:.0f} MiB, /dev/shm has "
                    f"{self.shm_bytes / 2**20:.0f} MiB ({MORE_SHM})"
                )
            needed = queued + workers * WORKER_BYTES
            if needed > self.memory_bytes:
                return (
                    f"{workers} workers and their queues would take {needed / 2**20:.0f} MiB of host memory, "
                    f"{self.memory_bytes / 2**20:.0f} MiB are free (containers: raise --memory)"
                )
        return self._descriptor_refusal(config, workers, batch)

    @property
    def shm_sentence(self) -> str | None:
        """What a small /dev/shm keeps from being searched at the baseline's batch size, as a sentence; ``None`` if
        nothing."""
        offered = [int(v) for v in (self.legal(WORKERS.name) if WORKERS.name in self.choices else ()) if v]
        fitting = [
            n
            for n in offered
            if self._queued_bytes(self.completed({**self.baseline, WORKERS.name: n})) <= self.shm_bytes
        ]
        if fitting == offered:
            return None
        most, batch = max(fitting, default=0), self.baseline["batch_size"]
        workers = f"at most {most} of {max(offered)} workers are" if most else "no workers are"
        return f"/dev/shm has {self.shm_bytes / 2**20:.0f} MiB, so {workers} tried at batch {batch} ({MORE_SHM})"

    def _queued_bytes(self, config: Config) -> int:
        """Return the bytes of all batches in the workers' queues; 0 if the size of a sample is not known."""
        return queued_batches(config) * int(config["batch_size"]) * (self.sample_bytes or 0)

    def _descriptor_refusal(self, config: Config, workers: int, batch: int) -> str | None:
        # With PyTorch's sharing strategy file_descriptor, a tensor from a worker is an open file until it is freed. If
        # one worker lags, all the batches prepared by the others wait in the training process.
        tensors = self.batch_tensors + self.sample_tensors * batch
        wanted = queued_batches(config) * tensors + OWN_DESCRIPTORS + WORKER_DESCRIPTORS * workers
        if self.open_files is None or wanted <= self.open_files:
            return None
        return (
            f"{workers} workers would hold {wanted} files open, one for each tensor in their queues, and "
            f"{self.open_files} are allowed (raise `ulimit -n`)"
        )

    def completed(self, config: Config) -> dict[str, Value]:
        """Adapt a configuration from another space: values that are missing, or are not a choice here, are taken from
        the baseline, or else from the first choice."""
        found: dict[str, Value] = {}
        for name in self.choices:
            legal = self.legal(name)
            own = self.baseline.get(name, legal[0] if legal else None)
            value = config.get(name)
            known = any(value == v and type(value) is type(v) for v in legal)
            chosen = value if known else own
            if chosen is not None:
                found[name] = chosen
        return canonical(found)

    def grid(self) -> Iterator[dict[str, Value]]:
        """Yield every legal configuration of `rungs` once, in canonical form. Lazy: a space can hold 10⁵ of them."""
        names = list(self.choices)
        seen: set[str] = set()

        def walk(index: int, config: dict[str, Value]) -> Iterator[dict[str, Value]]:
            if index == len(names):
                found = canonical(config)
                if self.combination_refusal(found) is None and (k := key(found)) not in seen:
                    seen.add(k)
                    yield found
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
