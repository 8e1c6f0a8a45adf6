"""What the failure of one configuration says about others."""

from __future__ import annotations

from autotune.knobs import KNOBS, Scope
from autotune.knobs.num_workers import workers_of
from autotune.knobs.prefetch_factor import prefetch_of
from autotune.records import Config, TrialStatus
from autotune.space.configuration import key

#: What device memory depends on, but for the batch.
_MEMORY = tuple(name for name, knob in KNOBS.items() if knob.memory and name != "batch_size")
#: What a step computes, and in which order.
_ARITHMETIC = tuple(name for name, knob in KNOBS.items() if knob.scope not in (Scope.PROCESS, Scope.LOADER))
#: What decides, besides the workload itself, whether a compiler gets through a model.
_COMPILED = tuple(name for name, knob in KNOBS.items() if knob.scope in (Scope.MODEL, Scope.STEP))

_Part = tuple[tuple[str, str], ...]


class Lessons:
    """What need not be tried, because it differs from something that failed in nothing that could help.

    ===============  ==========================================================================================
    oom              the same where device memory depends on it, and a batch as large: the loader lives elsewhere
    host_oom         that, and workers whose queues hold as many batches
    shm_exhausted    queues as large: workers × (prefetch + 1) × batch, whatever the device does with them
    compile_failed   the same model to the compiler (mode, precision, layout), and a batch as large: a kernel that
                     did not fit may fit for a smaller one
    diverged         the same arithmetic: only the loader, or the process around it, is another
    timeout, hang    nothing but itself: what was slow once may have met a cold cache or a slow disk
    ===============  ==========================================================================================

    Every other status says nothing about other configurations. The workload's own knobs are part of all of it.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        #: The smallest batch that failed.
        self._oom: dict[_Part, int] = {}
        self._compile: dict[_Part, int] = {}
        #: Batch and queued batches of each that failed.
        self._host_oom: dict[_Part, list[tuple[int, int]]] = {}
        #: The smallest number of queued samples that had no room.
        self._shm: dict[_Part, int] = {}
        self._diverged: set[_Part] = set()

    def learn(self, status: TrialStatus, config: Config) -> None:
        """Enter how a configuration ended."""
        batch = int(config["batch_size"])
        queued = queued_batches(config)
        if status is TrialStatus.OOM:
            _least(self._oom, memory_part(config), batch)
        elif status is TrialStatus.HOST_OOM:
            self._host_oom.setdefault(memory_part(config), []).append((batch, queued))
        elif status is TrialStatus.SHM_EXHAUSTED and queued:
            _least(self._shm, _part(config, ()), queued * batch)
        elif status is TrialStatus.COMPILE_FAILED:
            _least(self._compile, _part(config, _COMPILED), batch)
        elif status is TrialStatus.DIVERGED:
            self._diverged.add(_part(config, _ARITHMETIC))
        elif status in (TrialStatus.SHM_EXHAUSTED, TrialStatus.TIMEOUT, TrialStatus.HANG):
            self._failed.add(key(config))

    def rule_out(self, config: Config) -> bool:
        """Whether a configuration would end as one that is known."""
        batch = int(config["batch_size"])
        queued = queued_batches(config)
        memory = memory_part(config)
        return (
            batch >= self._oom.get(memory, batch + 1)
            or any(batch >= b and queued >= q for b, q in self._host_oom.get(memory, ()))
            or queued * batch >= self._shm.get(_part(config, ()), queued * batch + 1)
            or batch >= self._compile.get(_part(config, _COMPILED), batch + 1)
            or _part(config, _ARITHMETIC) in self._diverged
            or key(config) in self._failed
        )


def memory_part(config: Config) -> _Part:
    """What device memory depends on, but for the batch."""
    return _part(config, _MEMORY)


def queued_batches(config: Config) -> int:
    """Batches that the workers hold at once: each has ``prefetch_factor`` ready and one more under way."""
    return workers_of(config) * (prefetch_of(config) + 1)


def _part(config: Config, names: tuple[str, ...]) -> _Part:
    """The workload's own knobs and those named, as far as they are active. ``repr`` tells 1 from True."""
    return tuple(sorted((n, repr(v)) for n, v in config.items() if n in names or n.startswith("workload.")))


def _least(table: dict[_Part, int], part: _Part, value: int) -> None:
    table[part] = min(value, table.get(part, value))
