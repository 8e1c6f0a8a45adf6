"""Configurations, and what failures rule out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from autotune.base.errors import UnknownNameError, UsageError
from autotune.base.records import Config, Host, TrialStatus, Value
from autotune.knobs import KNOBS, Knob, Maths, Scope, spell
from autotune.knobs.batch_memory import KNOB as BATCH_MEMORY
from autotune.knobs.batch_memory import MOST_SLOTS, in_slots
from autotune.knobs.compile_mode import CUDAGRAPH_MODES, compiles, eager, mode_of
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.gradient_accumulation import parts_of
from autotune.knobs.num_workers import WORKERS, workers_of
from autotune.knobs.pin_memory import KNOB as PINNED
from autotune.knobs.prefetch_factor import prefetch_of

# Configurations: their canonical form and key, their parts, and parsing of values.

_PLACES = {name: i for i, name in enumerate(KNOBS)}
#: Knobs that have no effect without another one, and that one.
_NEEDS = {name: knob.needs for name, knob in KNOBS.items() if knob.needs is not None}
#: Knobs that determine how many samples go through the model at once.
AT_ONCE = ("batch_size", ACCUMULATION.name)
#: Those of the loader's knobs that affect the rate of a loader alone.
_DELIVERING = (WORKERS, BATCH_MEMORY.name, PINNED.name)
#: Values of a knob that disable the knobs that need it.
_OFF = (0, "off")


def is_idle(name: str, config: Config) -> bool:
    """Return whether a knob has no effect in a configuration because the knob it needs is off."""
    return name in _NEEDS and config.get(_NEEDS[name]) in _OFF


def settings(config: Config) -> Iterator[tuple[Knob, Value]]:
    """Yield the knobs of the catalog that a configuration sets, each with its value."""
    for name, value in canonical(config).items():
        if name in KNOBS:
            yield KNOBS[name], value


def canonical(config: Config) -> dict[str, Value]:
    """Return a configuration without its idle knobs, in the contract's order of names."""
    active = dict(config)
    for name, needed in _NEEDS.items():
        if name in active and config.get(needed) in _OFF:
            del active[name]
    return dict(sorted(active.items(), key=lambda item: (_PLACES.get(item[0], len(_PLACES)), item[0])))


def too_large(config: Config, host: Host) -> str | None:
    """Return which number of a configuration is too large for a machine, and why; ``None`` if there is none."""
    reasons = ((knob, value, knob.too_large(value, host)) for knob, value in settings(config))
    return next((f"{knob.name}={spell(value)}: {reason}" for knob, value, reason in reasons if reason), None)


def key(config: Config) -> str:
    """Return the canonical key, which is equal for configurations that run the same."""
    return json.dumps(canonical(config), sort_keys=True, separators=(",", ":"))


def samples_at_once(config: Config) -> int:
    """Return the number of samples that go through the model at once: of a batch, or of one of its parts."""
    return int(config["batch_size"]) // parts_of(config)


def device_part(config: Config) -> dict[str, Value]:
    """Return the knobs that affect the device's own rate and the compiled graphs: all but the loader's."""
    return {n: v for n, v in config.items() if not is_loaders(n)}


def loader_part(config: Config) -> dict[str, Value]:
    """Return the knobs that affect the loader's own rate: its knobs, the batch size, and the workload's knobs."""
    return {n: v for n, v in config.items() if is_loaders(n) or n == "batch_size" or n.startswith("workload.")}


def maths_part(config: Config) -> dict[str, Value]:
    """Return the knobs that determine the losses, and the workload's. Configurations with equal parts share one check.

    The batch size is not included: the check uses the user's.
    """
    return {
        name: value
        for name, value in canonical(config).items()
        if name not in KNOBS or (name != "batch_size" and KNOBS[name].maths is not Maths.SAME)
    }


def is_checked_by(config: Config, checked: Config) -> bool:
    """Return whether a check of how ``checked`` trains is one of ``config``: both compute the same, or the check did so
    eagerly because there was no time to compile."""
    return maths_part(checked) in (maths_part(config), maths_part(eager(config)))


def delivery_part(config: Config) -> dict[str, Value]:
    """Return the knobs that affect the rate of a loader alone: its workers, where they put batches, whether a thread
    copies these to pinned memory, the batch size, and the workload's knobs. Queues and persistent workers take effect
    only in a training."""
    return {n: v for n, v in loader_part(config).items() if n in _DELIVERING or not is_loaders(n)}


def is_loaders(name: str) -> bool:
    """Return whether a knob is one of the loader's own."""
    return name in KNOBS and KNOBS[name].scope is Scope.LOADER


def loads_as(config: Config, baseline: Config) -> bool:
    """Return whether a configuration's loader has the baseline's settings, so that there is nothing to compare."""
    return all(config.get(n) == baseline.get(n) for n in config.keys() | baseline.keys() if is_loaders(n))


def distance(one: Config, other: Config) -> int:
    """Return the number of knobs in which two configurations differ.

    A knob that is idle in only one of them is not counted, because the knob it needs is.
    """
    switched = {n for n, needed in _NEEDS.items() if (one.get(needed) in _OFF) != (other.get(needed) in _OFF)}
    return sum(one.get(name) != other.get(name) for name in (one.keys() | other.keys()) - switched)


def simplicity(config: Config, baseline: Config, peak_bytes: int | None) -> tuple[bool, bool, int, int, int]:
    """Sort key that puts simpler and safer first: the baseline, no compiling, fewer workers, less memory, fewer
    changes."""
    changed = sum(1 for name in config.keys() | baseline.keys() if config.get(name) != baseline.get(name))
    return (
        key(config) != key(baseline),
        compiles(config),
        workers_of(config),
        peak_bytes or 0,
        changed,
    )


def why_apart(config: Config, other: Config) -> str | None:
    """Return why a running training cannot be switched from one configuration to another, as a clause; ``None`` if it
    can."""
    for name in sorted(config.keys() | other.keys()):
        knob = KNOBS.get(name)
        if config.get(name) != other.get(name) and (knob is None or not knob.switchable):
            return f"{name} cannot be switched in a running process"
    for each in (config, other):
        if mode_of(each) in CUDAGRAPH_MODES:
            return f"CUDA graphs ({mode_of(each)}) hold the weights at fixed addresses"
    return None


def parse_value(name: str, text: str, workload_knobs: Mapping[str, tuple[Value, ...]] | None = None) -> Value:
    """Parse a knob's value from the command line.

    Raises:
        UnknownNameError: there is no such knob, or the knob has no such value.
        UsageError: the text is not a number, or the number is too small or too large.
    """
    if name.startswith("workload."):
        return _parse_workload_value(name, text, workload_knobs)
    if name not in KNOBS:
        unknown = UnknownNameError("knob", name, KNOBS)
        if not unknown.closest:
            # The workload's own knobs are still unknown.
            advice = (
                f"known: {', '.join(sorted(KNOBS))}; a workload's own begin with `workload.`, as in workload.{name}."
            )
            raise UnknownNameError("knob", name, KNOBS, advice=advice)
        raise unknown
    knob = KNOBS[name]
    if knob.values is None:
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{name} must be a whole number, not {text!r}") from None
        if number < knob.minimum:
            raise UsageError(f"{name} must be at least {knob.minimum}, not {number}")
        if number > knob.maximum:
            raise UsageError(f"{name} must be at most {knob.maximum}, not {text[:20]}")
        return number
    by_text = {spell(value): value for value in knob.values}
    if text.lower() not in by_text:
        raise UnknownNameError(f"value of {name}", text, by_text, advice=f"choices: {', '.join(by_text)}.")
    return by_text[text.lower()]


def _parse_workload_value(name: str, text: str, declared: Mapping[str, tuple[Value, ...]] | None) -> Value:
    if declared is None:
        return text
    short = name.removeprefix("workload.")
    if short not in declared:
        advice = None if declared else "it declares none: KNOBS in its file would."
        raise UnknownNameError("knob of the workload", name, [f"workload.{knob}" for knob in declared], advice=advice)
    by_text = {spell(value): value for value in declared[short]}
    # Python spells it `True`.
    choice = text if text in by_text else text.lower()
    if choice not in by_text:
        raise UnknownNameError(f"value of {name}", text, by_text, advice=f"choices: {', '.join(by_text)}.")
    return by_text[choice]


def environment(config: Config) -> dict[str, str]:
    """Return the environment variables that a configuration needs before CUDA is initialized."""
    variables: dict[str, str] = {}
    for knob, value in settings(config):
        variables |= knob.environment(value)
    return variables


# Infers from the failure of one configuration that others would fail as well.

#: Knobs that affect device memory, except the number of samples.
_MEMORY = tuple(name for name, knob in KNOBS.items() if knob.memory and name not in AT_ONCE)
#: Knobs that affect what a step computes, or in what order.
_ARITHMETIC = tuple(name for name, knob in KNOBS.items() if knob.scope not in (Scope.PROCESS, Scope.LOADER))
#: Knobs that, with the workload, determine whether a compiler can handle the model.
_COMPILED = tuple(
    name for name, knob in KNOBS.items() if knob.scope in (Scope.MODEL, Scope.STEP) and name not in AT_ONCE
)
#: Knobs of the loader.
_LOADER = tuple(name for name, knob in KNOBS.items() if knob.scope is Scope.LOADER)

_Part = tuple[tuple[str, str], ...]


class Lessons:
    """Configurations not to try, because they share everything that could cause the failure with a failed one.

    ===============  ==========================================================================================
    status           ruled out are configurations with
    ===============  ==========================================================================================
    oom              the same knobs that affect device memory, and a batch (or parts of one, if it is accumulated)
                     at least as large
    host_oom         these, and workers whose queues hold at least as many batches
    shm_exhausted    as much in /dev/shm: `shared_batches` × batch, whatever the device's knobs
    compile_failed   the same model for the compiler (mode, precision, layout), and a batch at least as large: a
                     kernel that did not fit may fit a smaller one; any that compiles, if this machine cannot
    diverged         the same arithmetic; only the knobs of the loader and the process may differ. If another with this
                     arithmetic has completed a trial, it is not the cause, and no difference at all
    timeout, hang    no difference at all: a slow launch may have met a cold cache or a slow disk
    ===============  ==========================================================================================

    Whatever its status, a failure because something refuses a knob's value (a precision, a memory format) rules out
    all configurations with that value, unless one of them has completed a trial. Any other status shows nothing about
    other configurations. The workload's own knobs must match in every case.
    """

    def __init__(self) -> None:
        #: How many times something was learned; while it is unchanged, so are the answers of `rule_out`.
        self.learned = 0
        self._failed: set[str] = set()
        #: Smallest batch size that failed.
        self._oom: dict[_Part, int] = {}
        self._compile: dict[_Part, int] = {}
        #: Samples at once, batch size and number of queued batches of each failure.
        self._host_oom: dict[_Part, list[tuple[int, int, int]]] = {}
        #: Smallest number of samples in /dev/shm that did not fit.
        self._shm: dict[_Part, int] = {}
        self._diverged: set[_Part] = set()
        self._trained: set[_Part] = set()
        self._wrong: set[str] = set()
        self._wrong_settings: set[tuple[str, Value]] = set()
        #: What delivers other samples: any number of workers but this one, and some settings of the loader.
        self._only_workers: int | None = None
        self._other_data: set[_Part] = set()
        #: Nothing can be compiled on this machine.
        self.cannot_compile = False
        #: Knobs with values that something in the training refuses, with the workload's knobs; and those that ran.
        self.refused: set[tuple[str, Value, _Part]] = set()
        self._ran: set[tuple[str, Value, _Part]] = set()

    def learn(
        self, status: TrialStatus, config: Config, *, cannot_compile: bool = False, refuses: str | None = None
    ) -> None:
        """Record how a configuration ended.

        Args:
            cannot_compile: it failed because of this machine, not because of the model.
            refuses: the knob whose value something in the training refuses, which is why it failed.
        """
        self.learned += 1
        self.cannot_compile |= cannot_compile
        if refuses is not None:
            self.refused.add((refuses, config[refuses], _part(config, ())))
        batch = int(config["batch_size"])
        queued = queued_batches(config)
        if status is TrialStatus.OOM:
            _least(self._oom, memory_part(config), samples_at_once(config))
        elif status is TrialStatus.HOST_OOM:
            self._host_oom.setdefault(memory_part(config), []).append((samples_at_once(config), batch, queued))
        elif status is TrialStatus.SHM_EXHAUSTED and queued:
            _least(self._shm, _part(config, (BATCH_MEMORY.name,)), shared_batches(config) * batch)
        elif status is TrialStatus.COMPILE_FAILED:
            _least(self._compile, _part(config, _COMPILED), samples_at_once(config))
        elif status is TrialStatus.COMPLETE:
            self._trained.add(_part(config, _ARITHMETIC))
            self._ran |= {(name, value, _part(config, ())) for name, value in config.items()}
        elif status is TrialStatus.DIVERGED:
            if _part(config, _ARITHMETIC) in self._trained:
                self._failed.add(key(config))
            else:
                self._diverged.add(_part(config, _ARITHMETIC))
        elif status in (TrialStatus.SHM_EXHAUSTED, TrialStatus.TIMEOUT, TrialStatus.HANG):
            self._failed.add(key(config))

    def learn_wrong(self, config: Config, changed: Mapping[str, Value] = MappingProxyType({})) -> None:
        """Record that a configuration does not train like eager fp32, which rules out all that share its maths.

        Args:
            changed: the settings by which it computes something else than the baseline. If it is one, all with that
                setting are ruled out.
        """
        self.learned += 1
        self._wrong.add(key(maths_part(config)))
        if len(changed) == 1:
            self._wrong_settings |= changed.items()

    def learn_other_data(self, config: Config, baseline: Config) -> None:
        """Record that a configuration's loader delivers other samples than the baseline's. If its number of workers
        differs from the baseline's, that rules out every other number; otherwise, all configurations with the same
        settings of the loader."""
        self.learned += 1
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
        if self._only_workers not in (None, workers_of(config)):
            return True
        if self._other_data and _part(config, _LOADER) in self._other_data:
            return True
        if not self._wrong:
            return False
        return any(config.get(n) == v for n, v in self._wrong_settings) or key(maths_part(config)) in self._wrong

    def rule_out(self, config: Config) -> bool:
        """Return whether a configuration would fail like a known one, or train wrongly like one."""
        # Called for thousands of configurations at a time, while most kinds of failure have not happened.
        batch, at_once, queued = int(config["batch_size"]), samples_at_once(config), queued_batches(config)
        shared = shared_batches(config) * batch
        host_ooms = self._host_oom.get(memory_part(config), ()) if self._host_oom else ()
        return bool(
            (self._oom and at_once >= self._oom.get(memory_part(config), at_once + 1))
            or any(at_once >= a and batch >= b and queued >= q for a, b, q in host_ooms)
            or (self._shm and shared >= self._shm.get(_part(config, (BATCH_MEMORY.name,)), shared + 1))
            or (self._compile and at_once >= self._compile.get(_part(config, _COMPILED), at_once + 1))
            or (self._diverged and _part(config, _ARITHMETIC) in self._diverged)
            or self.is_wrong(config)
            or (self._failed and key(config) in self._failed)
            or (self.cannot_compile and compiles(config))
            or any(config.get(n) == v and part == _part(config, ()) for n, v, part in self.refused - self._ran)
        )


def memory_part(config: Config) -> _Part:
    """Return the part of a configuration that affects device memory, except the number of samples."""
    return _part(config, _MEMORY)


def queued_batches(config: Config) -> int:
    """Return the number of batches that the workers hold: each has ``prefetch_factor`` ready and works on one more."""
    return workers_of(config) * (prefetch_of(config) + 1)


def shared_batches(config: Config) -> int:
    """Return the number of batches in /dev/shm at once: those that workers hold; with slots, the first of each worker,
    and those for which there are no more slots."""
    workers, queued = workers_of(config), queued_batches(config)
    return workers + max(0, queued - MOST_SLOTS * workers) if in_slots(config) else queued


def _part(config: Config, names: tuple[str, ...]) -> _Part:
    """Return the workload's knobs and those in ``names``, if active. ``repr`` distinguishes 1 from True."""
    return tuple(sorted((n, repr(v)) for n, v in config.items() if n in names or n.startswith("workload.")))


def _least(table: dict[_Part, int], part: _Part, value: int) -> None:
    table[part] = min(value, table.get(part, value))
