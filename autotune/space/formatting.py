"""Text for figures and configurations, the same in tables, panel and plain lines. Does not depend on rich.

Numbers have three significant digits, rates as many as their interval needs. Text from outside (causes, paths, names)
passes through `one_line` before it is written to a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from autotune.base.records import Config, Figure, Measurement, Side, Standing, Trial, TrialStatus, Value
from autotune.knobs import KNOBS, Scope, spell
from autotune.knobs.batch_size import KNOB as BATCH
from autotune.knobs.compile_mode import phase_text
from autotune.knobs.num_workers import WORKERS
from autotune.space.requirements import Requirements

#: Maximum distance between a value and the middle of its interval, as a fraction of the interval's width, up to which
#: the interval is written with ±.
LOPSIDED = 0.06
#: An interval whose ends differ by more than this factor says nothing, and is shown as not known.
ABSURD = 10.0
#: From here on a figure is not spelled out.
_TOO_LARGE = 1e12
#: PyTorch's defaults, which descriptions omit.
_PLAIN = {name: k.default for name, k in KNOBS.items() if k.default is not None and not k.said_always}
#: Order of the knobs in a description: those of the step first, then of the loader, then of the workload (the batch).
_LAST_SCOPES = (Scope.LOADER, Scope.WORKLOAD)
_ORDER = {
    name: i
    for i, name in enumerate(
        sorted(KNOBS, key=lambda n: _LAST_SCOPES.index(KNOBS[n].scope) + 1 if KNOBS[n].scope in _LAST_SCOPES else 0)
    )
}
_KNOB_ORDER = {name: i for i, name in enumerate(KNOBS)}
_STYLES = {
    TrialStatus.COMPLETE: "green",
    TrialStatus.PRUNED: "yellow",
    TrialStatus.INTERRUPTED: "yellow",
    TrialStatus.KILLED: "yellow",
}


def status_style(status: TrialStatus) -> str:
    """Return the rich style of a status. It accompanies the word and never replaces it."""
    return _STYLES.get(status, "red")


def one_line(text: str) -> str:
    """Return ``text`` on one line without control characters, so that a child's output cannot control the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def model_name(model: str) -> str:
    """Return a model's name for a title: the stem of a file, any other model as the user named it."""
    return one_line(PurePath(model).stem if model.endswith(".py") else model)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 trial``, ``12 trials``, ``1,281,167 samples``.

    Args:
        plural: the plural, if it is not the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def memory_text(size_bytes: int | None) -> str:
    """Format bytes with three digits: ``812 MiB``, ``1.24 GiB``; ``-`` if unknown."""
    if size_bytes is None:
        return "-"
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.{min(2, _decimals(size))}f} {unit}"
        size /= 1024
    return f"{size:,.{min(2, _decimals(size))}f} TiB"


def figure_text(figure: Figure, value: float, rate_unit: str = "samples/s") -> str:
    """Format a figure with its unit; a rate with that of the launches that it is of."""
    if figure.unit == "bytes":
        return memory_text(round(value))
    if figure.unit == "s":
        return seconds_text(value)
    if figure.unit == "fraction":
        return percent_text(value)
    if figure.unit == "money":
        return f"{value:.4g}"
    return f"{value:.4g} {rate_unit if figure.unit == 'samples/s' else figure.unit}"


def unmet_text(required: Requirements, measurements: Sequence[Measurement]) -> str | None:
    """Return what a configuration does not meet, as a clause: ``its peak_memory is 9.1 GiB, and peak_memory<=8GiB is
    required``; ``None`` if it meets everything."""
    said = []
    for one, value in required.unmet(measurements):
        what = "not known" if value is None else figure_text(one.figure, value, measurements[0].unit)
        said.append(f"its {one.figure.name} is {what}, and {one} is required")
    return "; ".join(said) or None


def seconds_text(seconds: float) -> str:
    """Format a duration: ``8.4 s``, ``41 s``, ``3 min 20 s``, ``1 h 02 min``, ``2 d 3 h``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def _decimals(value: float) -> int:
    """Return the number of decimals that gives three significant digits, at most three."""
    return 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3


def _grouped(value: float, decimals: int) -> str:
    """Format a figure with commas, or with an exponent if it is too large for anything that was measured."""
    return f"{value:,.{decimals}f}" if abs(value) < _TOO_LARGE else f"{value:.2e}"


def rate_text(per_s: float, ci95: tuple[float, float] | None = None) -> str:
    """Format a rate, without its unit, with its 95 % interval.

    ``61.8 ± 1.2``, ``1,234 ± 8``; ``128 (74 to 221)`` if the interval is too asymmetric for ± (`LOPSIDED`);
    ``128 (± not known)`` if it says nothing (`ABSURD`).
    """
    decimals = _decimals(per_s)
    if ci95 is None:
        return _grouped(per_s, decimals)
    if not is_known(ci95):
        return f"{_grouped(per_s, decimals)} (± not known)"
    half = (ci95[1] - ci95[0]) / 2
    if abs(ci95[0] + ci95[1] - 2 * per_s) > LOPSIDED * 2 * half:
        return f"{_grouped(per_s, decimals)} ({' to '.join(_grouped(end, _decimals(end)) for end in ci95)})"
    if 0 < half < 0.5 * 10**-decimals:
        decimals += 1  # One more digit is enough for most very steady rates; below that, ± 0 is correct rounding.
    return f"{_grouped(per_s, decimals)} ± {_grouped(half, decimals)}"


def trial_rate_text(trial: Trial) -> str:
    """Format a trial's rate: with ± if it was measured completely, with ``~`` if the trial was stopped, else ``-``."""
    if trial.rate_per_s is None:
        return "-"
    measurement = trial.result.measurement
    if measurement is None or trial.result.status is TrialStatus.PRUNED:
        return f"~{rate_text(trial.rate_per_s)}"
    return rate_text(measurement.samples_per_s, measurement.ci95_per_s)


def unit_of(trials: Iterable[Trial]) -> str:
    """Return the unit of the rates of a study's trials: ``samples/s``, or ``steps/s`` where no samples were seen."""
    return next((t.result.measurement.unit for t in trials if t.result.measurement is not None), "samples/s")


def trial_peak_bytes(trial: Trial) -> int | None:
    """Return a trial's peak memory: the allocator's on CUDA, the process's on a CPU; for a failure, the peak seen."""
    measurement = trial.result.measurement
    if measurement is None:
        return trial.result.peak_bytes
    return measurement.peak_bytes


def alone(side: Side) -> str:
    """Say what a heat of this side compared."""
    return "without loading" if side == "device" else "the loader alone"


def ratio_text(ratio: float, ci95: tuple[float, float] | None = None) -> str:
    """Format a ratio: ``2.06×``, or ``1.004×`` if its interval is narrower than 0.01."""
    return f"{_grouped(ratio, _ratio_decimals(ratio, ci95))}×"


def speedup_text(speedup: float | None, ci95: tuple[float, float] | None, unproven: str | None = None) -> str:
    """Format a speedup with its interval: ``2.06× the baseline (2.03 to 2.09)``; ``None`` if it was not launched in
    turns with the baseline.

    Args:
        unproven: what it is, if it was not proven, as a clause.
    """
    if speedup is None or ci95 is None:
        return "not launched in turns with the baseline"
    likely = f", {one_line(unproven)}" if unproven else ""
    return f"{ratio_text(speedup, ci95)} the baseline ({interval_text(ci95)}){likely}"


def likely_by(evidence: str) -> str:
    """Say that something is likely and not proven: ``likely, by one launch of each; not proven``."""
    return f"likely, by {one_line(evidence)}; not proven"


def standing_text(best: Standing, baseline: Standing, evidence: str | None = None) -> str:
    """Say in a few words what a search has found: ``2.06× (2.03 to 2.09) the baseline``.

    Args:
        evidence: what the best is likely by, if it was not proven.
    """
    if best.config == baseline.config:
        return "nothing was shown to be faster than the baseline"
    interval = f" ({interval_text(best.speedup_ci95)})" if best.verified or evidence else ""
    likely = f", {likely_by(evidence)}" if evidence else ""
    return f"{ratio_text(best.speedup, best.speedup_ci95)}{interval} the baseline{likely}"


def interval_text(ci95: tuple[float, float]) -> str:
    """Format the interval of a ratio: ``2.03 to 2.09``, or ``not known`` if it says nothing (`ABSURD`)."""
    if not is_known(ci95):
        return "not known"
    decimals = _ratio_decimals(ci95[0], ci95)
    return f"{_grouped(ci95[0], decimals)} to {_grouped(ci95[1], decimals)}"


def is_known(ci95: tuple[float, float]) -> bool:
    """Return whether an interval says anything (`ABSURD`)."""
    return ci95[0] > 0 and ci95[1] <= ABSURD * ci95[0]


def _ratio_decimals(ratio: float, ci95: tuple[float, float] | None) -> int:
    narrow = ci95 is not None and 0 < ci95[1] - ci95[0] < 0.01
    return min(3 if narrow else 2, _decimals(ratio) + narrow)


def percent_text(fraction: float) -> str:
    """Format a fraction as a percentage: ``52 %``, ``3 %``, ``0.4 %``, ``0 %``."""
    percent = 100 * fraction
    return f"{percent:.1f} %" if 0.05 <= abs(percent) < 0.95 else f"{percent:.0f} %"


def percents(parts: Sequence[float]) -> list[int]:
    """Return the parts of their sum in per cent, rounded so that they add up to 100 (the largest remainders are rounded
    up)."""
    exact = [100 * part / sum(parts) for part in parts]
    rounded = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: rounded[i] - exact[i])[: 100 - sum(rounded)]:
        rounded[i] += 1
    return rounded


def listed(words: Sequence[str]) -> str:
    """Join words to ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def ended_text(trial: Trial) -> str:
    """Return a trial's status, for a failure with its phase: ``complete``, ``pruned``, ``oom in build``."""
    result = trial.result
    if result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED) or result.phase is None:
        return result.status.value
    return f"{result.status.value} in {phase_text(result.phase, trial.config)}"


def describe(config: Config, baseline: Config) -> str:
    """Describe a configuration by its differences from the baseline: ``bf16 + channels_last + 2 workers + batch 64``.

    Different configurations have different descriptions. A knob that the baseline does not have (prefetch without
    workers) is omitted if it has PyTorch's default.
    """
    parts = [
        phrase(name, value) for name, value in _ordered(config, _ORDER) if baseline.get(name, _PLAIN.get(name)) != value
    ]
    return " + ".join(parts) or "as the baseline"


def settings(config: Config) -> str:
    """Describe a whole configuration, without PyTorch's defaults: ``fp32, batch 32, 0 workers``."""
    known = dict(config)
    if WORKERS not in known and known.get(BATCH.name) == 1:
        # Without a loader nothing tells how many samples a step has.
        del known[BATCH.name]
    parts = [phrase(name, value) for name, value in _ordered(known, _KNOB_ORDER) if _PLAIN.get(name) != value]
    return ", ".join(parts)


def _ordered(config: Config, order: Mapping[str, int]) -> list[tuple[str, Value]]:
    return sorted(config.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))


def phrase(name: str, value: Value) -> str:
    """Describe one knob's value: ``bf16``, ``batch 64``, ``no pin_memory``."""
    return KNOBS[name].phrase(value) if name in KNOBS else one_line(f"{name}={spell(value)}")


def counts_text(counts: Mapping[str, int]) -> str:
    """Format counts by status, in the order of `TrialStatus`: ``5 complete · 1 pruned · 1 oom``."""
    return " · ".join(f"{counts[status]} {status}" for status in TrialStatus if counts.get(status))
