"""Infers from the failure of one configuration that others would fail, too."""

from __future__ import annotations

from autotune.knobs import KNOBS, Scope
from autotune.knobs.compile_mode import compiles
from autotune.knobs.num_workers import workers_of
from autotune.knobs.prefetch_factor import prefetch_of
from autotune.base.records import Config, TrialStatus, Value
from autotune.space.configuration import AT_ONCE, key, maths_part, samples_at_once

#: Knobs that affect device memory, except the number of samples.
_MEMORY = tuple(name for name, knob in KNOBS.items() if knob.memory and name not in AT_ONCE)
#: Knobs that affect what a step computes, or in which order.
_ARITHMETIC = tuple(name for name, knob in KNOBS.items() if knob.scope not in (Scope.PROCESS, Scope.LOADER))
#: Knobs that, with the workload, determine whether a compiler can handle the model.
_COMPILED = tuple(
    name for name, knob in KNOBS.items() if knob.scope in (Scope.MODEL, Scope.STEP) and name not in AT_ONCE
)
#: Knobs of the loader.
_LOADER = tuple(name for name, knob in KNOBS.items() if knob.scope is Scope.LOADER)

_Part = tuple[tuple[str, str], ...]


class Lessons:
    """Configurations not to try, because they share with a failed one all that could cause the failure.

    ===============  ==========================================================================================
    status           ruled out are configurations with
    ===============  ==========================================================================================
    oom              the same knobs that affect device memory, and a batch (or parts of one, if it is accumulated)
                     at least as large
    host_oom         these, and workers whose queues hold at least as many batches
    shm_exhausted    queues at least as large: workers × (prefetch + 1) × batch, whatever the device's knobs
    compile_failed   the same model for the compiler (mode, precision, layout), and a batch at least as large: a
                     kernel that did not fit may fit a smaller one; any that compiles, if this machine cannot
    diverged         the same arithmetic; only the knobs of the loader and the process may differ. If another with this
                     arithmetic has completed a trial, it is not the cause, and no difference at all
    timeout, hang    no difference at all: a slow launch may have met a cold cache or a slow disk
    ===============  ==========================================================================================

    Whatever its status, a failure by which something refuses a knob's value (a precision, a memory format) rules out
    all configurations with it. Any other status says nothing about other configurations. The workload's own knobs must
    match in every case.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        #: Smallest batch size that failed.
        self._oom: dict[_Part, int] = {}
        self._compile: dict[_Part, int] = {}
        #: Samples at once, batch size and number of queued batches of each failure.
        self._host_oom: dict[_Part, list[tuple[int, int, int]]] = {}
        #: Smallest number of queued samples that did not fit.
        self._shm: dict[_Part, int] = {}
        self._diverged: set[_Part] = set()
        self._trained: set[_Part] = set()
        self._wrong: set[str] = set()
        #: What delivers other samples: any number of workers but this one, and ways to set the loader.
        self._only_workers: int | None = None
        self._other_data: set[_Part] = set()
        #: Nothing can be compiled on this machine.
        self.cannot_compile = False
        #: Knobs with values that something in the training refuses.
        self.refused: set[tuple[str, Value]] = set()

    def learn(
        self, status: TrialStatus, config: Config, *, cannot_compile: bool = False, refuses: str | None = None
    ) -> None:
        """Record how a configuration ended.

        Args:
            cannot_compile: it failed for a reason that is this machine's and not the model's.
            refuses: the knob because of whose value it failed: something in the training refuses it.
        """
        self.cannot_compile |= cannot_compile
        if refuses is not None:
            self.refused.add((refuses, config[refuses]))
        batch = int(config["batch_size"])
        queued = queued_batches(config)
        if status is TrialStatus.OOM:
            _least(self._oom, memory_part(config), samples_at_once(config))
        elif status is TrialStatus.HOST_OOM:
            self._host_oom.setdefault(memory_part(config), []).append((samples_at_once(config), batch, queued))
        elif status is TrialStatus.SHM_EXHAUSTED and queued:
            _least(self._shm, _part(config, ()), queued * batch)
        elif status is TrialStatus.COMPILE_FAILED:
            _least(self._compile, _part(config, _COMPILED), samples_at_once(config))
        elif status is TrialStatus.COMPLETE:
            self._trained.add(_part(config, _ARITHMETIC))
        elif status is TrialStatus.DIVERGED:
            if _part(config, _ARITHMETIC) in self._trained:
                self._failed.add(key(config))
            else:
                self._diverged.add(_part(config, _ARITHMETIC))
        elif status in (TrialStatus.SHM_EXHAUSTED, TrialStatus.TIMEOUT, TrialStatus.HANG):
            self._failed.add(key(config))

    def learn_wrong(self, config: Config) -> None:
        """Record that a configuration does not train like eager fp32, which rules out all that share its maths."""
        self._wrong.add(key(maths_part(config)))

    def learn_other_data(self, config: Config, baseline: Config) -> None:
        """Record that a configuration's loader delivers other samples than the baseline's. If it has other workers,
        that rules out any others than the baseline's; otherwise all that set the loader in the same way."""
        if workers_of(config) != workers_of(baseline):
            self._only_workers = workers_of(baseline)
        else:
            self._other_data.add(_part(config, _LOADER))

    @property
    def wrong(self) -> int:
        """Number of ways to compute that do not train like eager fp32, or to load that deliver other samples."""
        return len(self._wrong) + len(self._other_data) + (self._only_workers is not None)

    def is_wrong(self, config: Config) -> bool:
        """Return whether a configuration computes in a way that does not train like eager fp32, or loads other samples
        than the baseline."""
        if self._only_workers not in (None, workers_of(config)) or _part(config, _LOADER) in self._other_data:
            return True
        return bool(self._wrong) and key(maths_part(config)) in self._wrong

    def rule_out(self, config: Config) -> bool:
        """Return whether a configuration would fail like a known one, or train wrongly like one."""
        batch = int(config["batch_size"])
        queued = queued_batches(config)
        memory = memory_part(config)
        part = samples_at_once(config)
        return (
            part >= self._oom.get(memory, part + 1)
            or any(part >= p and batch >= b and queued >= q for p, b, q in self._host_oom.get(memory, ()))
            or queued * batch >= self._shm.get(_part(config, ()), queued * batch + 1)
            or part >= self._compile.get(_part(config, _COMPILED), part + 1)
            or _part(config, _ARITHMETIC) in self._diverged
            or self.is_wrong(config)
            or key(config) in self._failed
            or (self.cannot_compile and compiles(config))
            or any(config.get(name) == value for name, value in self.refused)
        )


def memory_part(config: Config) -> _Part:
    """Return the part of a configuration that affects device memory, except the number of samples."""
    return _part(config, _MEMORY)


def queued_batches(config: Config) -> int:
    """Return the number of batches that the workers hold: each has ``prefetch_factor`` ready and works on one more."""
    return workers_of(config) * (prefetch_of(config) + 1)


def _part(config: Config, names: tuple[str, ...]) -> _Part:
    """Return the workload's knobs and those in ``names``, if active. ``repr`` distinguishes 1 from True."""
    return tuple(sorted((n, repr(v)) for n, v in config.items() if n in names or n.startswith("workload.")))


def _least(table: dict[_Part, int], part: _Part, value: int) -> None:
    table[part] = min(value, table.get(part, value))
