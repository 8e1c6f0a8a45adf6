"""A space: the choices of one study, and which combinations of them are legal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.records import Config, Value
from autotune.space.knobs import KNOBS, NEEDS_WORKERS, canonical, key, spell

#: A worker forked from a process with torch loaded dirties about this much of its own.
WORKER_BYTES = 200 * 2**20


@dataclass(frozen=True)
class Choice:
    """One value of a knob, and why it is refused (``None``: it is legal)."""

    value: Value
    refused: str | None = None


@dataclass(frozen=True)
class Space:
    """The knobs of one study, their choices, and which combinations are legal.

    Attributes:
        choices: every value considered, with its refusal if any, per active knob.
        inactive: knobs that mean nothing here, with the reason.
        baseline: the configuration of trial 0. Always launchable, even where ``--set`` leaves it outside.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    inactive: Mapping[str, str]
    baseline: Mapping[str, Value]
    dataset_samples: int | None = None
    sample_bytes: int | None = None
    shm_bytes: int = 0
    memory_bytes: int = 0

    def legal(self, name: str) -> tuple[Value, ...]:
        """The legal values of a knob, in order."""
        return tuple(c.value for c in self.choices[name] if c.refused is None)

    def refusal(self, config: Config) -> str | None:
        """Why a configuration may not be launched here, or ``None`` if it may."""
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
        """Why the values of a configuration may not come together here, each being legal by itself."""
        batch = int(config["batch_size"])
        if self.dataset_samples is not None and batch > self.dataset_samples:
            return f"batch_size={batch}: the data set holds only {self.dataset_samples} samples"
        workers = int(config.get("num_workers", 0))
        if workers and self.sample_bytes:
            # Each worker's queue holds prefetch_factor batches, and one more is being put together.
            queued = workers * (int(config.get("prefetch_factor", 2)) + 1) * batch * self.sample_bytes
            if queued > self.shm_bytes:
                return (
                    f"{workers} workers would queue {queued / 2**20:.0f} MiB, /dev/shm has "
                    f"{self.shm_bytes / 2**20:.0f} MiB (containers: raise --shm-size)"
                )
            if queued + workers * WORKER_BYTES > self.memory_bytes:
                return f"{workers} workers and their queues would not fit into host memory"
        return None

    def grid(self) -> Iterator[dict[str, Value]]:
        """Every legal configuration once, canonical. Lazy: a space can hold 10⁵ of them."""
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
            if name in NEEDS_WORKERS and config.get("num_workers") == 0:
                yield from walk(index + 1, config)
                return
            for value in self.legal(name):
                yield from walk(index + 1, {**config, name: value})

        yield from walk(0, {})

    def same_batch(self, config: Config) -> bool:
        """Whether a configuration trains at the baseline's batch size and with its own workload knobs."""
        return config.get("batch_size") == self.baseline.get("batch_size") and all(
            config.get(name) == value for name, value in self.baseline.items() if name.startswith("workload.")
        )

    def dominated(self, config: Config, out_of_memory: list[Config], *, host: bool = False) -> bool:
        """Whether one of ``out_of_memory`` was the same, as far as memory goes, and wanted no more of it.

        Args:
            host: they ran out of the host's memory, which workers and their queues take too; the device's does
                not depend on the loader.
        """
        mine = _memory_part(config)
        return any(
            _memory_part(failed) == mine
            and int(failed["batch_size"]) <= int(config["batch_size"])
            and not (host and _queued(failed) > _queued(config))
            for failed in out_of_memory
        )


def _memory_part(config: Config) -> dict[str, Value]:
    """What device memory depends on, but for the batch."""
    return {
        name: value
        for name, value in canonical(config).items()
        if name != "batch_size" and (name.startswith("workload.") or KNOBS[name].memory)
    }


def _queued(config: Config) -> int:
    """Batches that the workers hold at once."""
    return int(config.get("num_workers", 0)) * (int(config.get("prefetch_factor", 2)) + 1)
