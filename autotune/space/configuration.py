"""Configurations: their canonical form and key, their parts, and parsing of values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from autotune.base.errors import UnknownNameError, UsageError
from autotune.knobs import KNOBS, Knob, Maths, Scope, spell
from autotune.knobs.compile_mode import CUDAGRAPH_MODES, compiles, mode_of
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.gradient_accumulation import parts_of
from autotune.knobs.num_workers import WORKERS, workers_of
from autotune.base.records import Config, Host, Value

_PLACES = {name: i for i, name in enumerate(KNOBS)}
#: Knobs that have no effect without another one, and that one.
_NEEDS = {name: knob.needs for name, knob in KNOBS.items() if knob.needs is not None}
#: Knobs that determine how many samples go through the model at once.
AT_ONCE = ("batch_size", ACCUMULATION.name)
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
    """Return which number of a configuration a machine cannot stand, and why; ``None`` if there is none."""
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


def delivery_part(config: Config) -> dict[str, Value]:
    """Return the knobs that affect the rate of a loader alone: its workers, the batch size, and the workload's knobs.
    Queues, pinning and workers that persist show only in a training."""
    return {n: v for n, v in loader_part(config).items() if n == WORKERS or not is_loaders(n)}


def is_loaders(name: str) -> bool:
    """Return whether a knob is one of the loader's own."""
    return name in KNOBS and KNOBS[name].scope is Scope.LOADER


def loads_as(config: Config, baseline: Config) -> bool:
    """Whether a configuration's loader is set as the baseline's, so that there is nothing to compare."""
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
    for one in (config, other):
        if mode_of(one) in CUDAGRAPH_MODES:
            return f"CUDA graphs ({mode_of(one)}) hold the weights at fixed addresses"
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
            # The workload's own knobs are not known yet.
            own = f"known: {', '.join(sorted(KNOBS))}; a workload's own begin with `workload.`, as in workload.{name}."
            raise UnknownNameError("knob", name, KNOBS, advice=own)
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
        raise UnknownNameError("knob of the workload", name, [f"workload.{own}" for own in declared], advice=advice)
    by_text = {spell(value): value for value in declared[short]}
    # `True` is what Python calls it.
    found = text if text in by_text else text.lower()
    if found not in by_text:
        raise UnknownNameError(f"value of {name}", text, by_text, advice=f"choices: {', '.join(by_text)}.")
    return by_text[found]


def environment(config: Config) -> dict[str, str]:
    """Return the environment variables that a configuration needs before CUDA is initialized."""
    found: dict[str, str] = {}
    for knob, value in settings(config):
        found |= knob.environment(value)
    return found
