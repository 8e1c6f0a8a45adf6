"""The report's sections on the machine: disturbances of the measurements, failures, and where the figures apply."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from autotune.base.layout import COLD
from autotune.base.records import Config, LaunchKind, Measurement, Outcome, Surroundings, TrialResult, TrialStatus
from autotune.knobs import spell
from autotune.knobs.compile_mode import phase_text
from autotune.machine.gpu import LASTING_SLOWDOWN, SLOWDOWNS
from autotune.report.document import Column, Facts, Grid, Kind, Part, Section, facts, paragraphs
from autotune.report.material import LaunchRecord, Material
from autotune.report.sentences import BUSY_ALLOWED, batch_of, ended, full_stop, listed_trials
from autotune.space import key
from autotune.space.formatting import count, counts_text, listed, one_line, percent_text, rate_text, seconds_text

_T = TypeVar("_T")
_NO_CAUSE = "no cause was recorded"
#: Maximum number of causes shown for one status. `autotune show` has all of them.
CAUSES = 4
_NUMBER = re.compile(r"\d[\d,.]*")
#: Reasons for reduced clocks, by NVML's bit (nvml.h). A power cap does not spoil a measurement, but explains its rate.
_CLOCKS = {**SLOWDOWNS, 0x4: "SW power cap"}


def machine(material: Material) -> list[Section]:
    """Return the conditions on the machine during the measurements, as a section."""
    measured = material.measured()
    if not measured:
        return []
    busy = BUSY_ALLOWED if material.spec.allow_busy else None
    kept, lost = sum(len(m.windows) for _, m in measured), sum(len(m.discarded) for _, m in measured)
    launches = count(len(measured), "launch", "launches")
    windows = f"{count(kept, 'window')} in {launches}; none had to be discarded."
    if lost:
        share = percent_text(lost / (kept + lost))
        windows = f"{count(kept, 'window')} kept in {launches}; {lost:,} discarded ({share})."
    parts: list[Part] = [*paragraphs(windows, _lasting(measured), busy), *_discarded(measured), *_unsettled(measured)]
    surroundings = [w.around for _, m in measured for w in m.windows if w.around is not None]
    retries = {x.name: m.alloc_retries for x, m in measured if m.alloc_retries is not None}
    retried = [f"{n:,} in {name}" for name, n in retries.items() if n]
    energy, spread = _energy_and_spread(material.outcome, measured)
    waited_s = [x.result.waited_s for x in material.launches if x.result.waited_s >= 0.1]
    waited = f"{seconds_text(sum(waited_s))}, before {count(len(waited_s), 'launch', 'launches')}"
    rows = (
        ("SM clock", _range((a.sm_clock_mhz for a in surroundings), "MHz")),
        ("memory clock", _range((a.memory_clock_mhz for a in surroundings), "MHz")),
        ("clocks held down", _held_down(surroundings)),
        ("temperature", _range((a.temperature_c for a in surroundings), "°C")),
        ("power", _range((a.power_w for a in surroundings), "W")),
        ("energy", energy),
        ("others on the card", _range((a.foreign_processes for a in surroundings), "processes")),
        ("SMs used by others, kept windows", _range((a.foreign_sm_percent for a in surroundings), "%")),
        ("CPU used by others, kept windows", _range((a.foreign_cores for a in surroundings), "cores", digits=2)),
        ("CPU left idle, kept windows", _range((a.idle_cores for a in surroundings), "cores", digits=2)),
        ("alloc retries", (_first(retried) if retried else "none") if retries else None),
        ("waiting for quiet", waited if waited_s else None),
        ("launches differ", spread),
    )
    conditions = facts(*rows)
    if not conditions:
        parts += paragraphs("What others did on the machine meanwhile was not recorded.")
    return [Section("How quiet the machine was", (*parts, *conditions))]


#: Launches with their measurements.
_Measured = Sequence[tuple[LaunchRecord, Measurement]]


def _lasting(measured: _Measured) -> str | None:
    """Return which launches were measured under the slowdown that is some cards' normal state."""
    reasons = {x.name: [w.around.clocks_event_reasons for w in m.windows if w.around is not None] for x, m in measured}
    slowed = [name for name, masks in reasons.items() if any((mask or 0) & LASTING_SLOWDOWN for mask in masks)]
    if not slowed:
        return None
    share = "all launches" if len(slowed) == len(measured) else f"{len(slowed)} of {len(measured)} launches"
    names = "" if len(slowed) == len(measured) else f": {_first(slowed)}"
    name = SLOWDOWNS[LASTING_SLOWDOWN]
    return f"{name} lasted through {share}, whose rates are therefore those of a hot card{names}."


def _alike(reasons: Iterable[tuple[str, _T]]) -> list[tuple[str, list[_T]]]:
    """Return what has the same reason, the most common first. Reasons that differ only in numbers are merged under the
    first."""
    groups: dict[str, tuple[str, list[_T]]] = {}
    for reason, item in reasons:
        groups.setdefault(_NUMBER.sub("#", reason), (reason, []))[1].append(item)
    return sorted(groups.values(), key=lambda group: len(group[1]), reverse=True)


def _discarded(measured: _Measured) -> list[Part]:
    windows = [(launch.name, window) for launch, m in measured for window in m.discarded]
    groups = _alike((one_line(w.discarded or "no reason was given").rstrip("."), (name, w)) for name, w in windows)
    rows = tuple(
        (reason, f"{len(some):,}", f"{sum(w.seconds for _, w in some):,.1f} s", f"{len({name for name, _ in some}):,}")
        for reason, some in groups
    )
    columns = (Column("discarded because", Kind.TEXT), Column("windows"), Column("time"), Column("launches"))
    return [Grid(columns, rows)] if rows else []


def _unsettled(measured: _Measured) -> list[Part]:
    default = "it had not settled when it was measured"
    groups = _alike((one_line(m.unsettled or default).rstrip("."), x.name) for x, m in measured if not m.settled)
    rows = tuple((reason, f"{len(names):,}", _first(names)) for reason, names in groups)
    columns = (Column("never settled because", Kind.TEXT), Column("launches"), Column("which", Kind.TEXT))
    return [Grid(columns, rows)] if rows else []


def _range(values: Iterable[float | None], unit: str, digits: int = 0) -> str | None:
    present = [v for v in values if v is not None]
    if not present:
        return None
    low, middle, high = (f"{v:,.{digits}f}" for v in (min(present), median(present), max(present)))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}, median {middle}"


def _held_down(around: Sequence[Surroundings]) -> str | None:
    masks = [a.clocks_event_reasons for a in around if a.clocks_event_reasons is not None]
    if not masks:
        return None
    counts = Counter(name for mask in masks for bit, name in _CLOCKS.items() if mask & bit)
    parts = [f"{name} in {n:,} of {count(len(masks), 'kept window')}" for name, n in counts.most_common()]
    return listed(parts) or "never"


def _energy_and_spread(outcome: Outcome | None, measured: _Measured) -> tuple[str | None, str | None]:
    """Return the energy of a sample, for the baseline and the winner, and the slowest and the fastest launch of each:
    the noise between launches."""
    if outcome is None:
        return None, None
    energies: list[str] = []
    spreads: dict[str, str] = {}
    for name, standing in (("the baseline", outcome.baseline), ("the winner", outcome.best)):
        config = key(standing.config)
        complete = [(x.spec, m) for x, m in measured if x.result.status is TrialStatus.COMPLETE]
        # A launch with an empty cache measured something else.
        usual = [(s, m) for s, m in complete if s.kind is LaunchKind.MEASURE and not s.launch.startswith(f"{COLD}-")]
        launches = [m for s, m in usual if key(s.config) == config]
        metered = [m for m in launches if m.energy_j is not None]
        samples = sum(w.samples for m in metered for w in m.windows)
        if samples:
            joules = sum(m.energy_j or 0.0 for m in metered) / samples
            energies.append(f"{name} {joules:.3g} J a sample")
        rates = [m.samples_per_s for m in launches]
        if len(rates) > 1:
            ends = f"{rate_text(min(rates))} to {rate_text(max(rates))} {outcome.unit}"
            spreads.setdefault(config, f"{len(rates)} of {name} ran at {ends}")
    return ", ".join(energies) or None, "; ".join(spreads.values()) or None


def _first(names: Sequence[str]) -> str:
    """List the names, or the first `CAUSES` of them and the number of the rest."""
    return listed(names) if len(names) <= CAUSES else f"{', '.join(names[:CAUSES])} and {len(names) - CAUSES} more"


@dataclass(frozen=True)
class _Ended:
    """How a trial, or a launch that belongs to no trial, ended."""

    name: str
    config: Config
    result: TrialResult

    @property
    def batch_size(self) -> int:
        return batch_of(self.config)


def failures(material: Material) -> list[Section]:
    """Return the failures by status, with cause and advice, as a section."""
    ends = [_Ended(str(t.number), t.config, t.result) for t in material.trials]
    ends += [_Ended(x.spec.launch, x.spec.config, x.result) for x in material.launches if x.spec.number is None]
    if not ends:
        return []
    by_status: dict[TrialStatus, list[_Ended]] = {}
    for end in ends:
        by_status.setdefault(end.result.status, []).append(end)
    by_status.pop(TrialStatus.COMPLETE, None)
    slow = len(by_status.pop(TrialStatus.PRUNED, []))
    verb = "was" if slow == 1 else "were"
    pruned = paragraphs(f"{count(slow, 'trial')} {verb} ended early for being slow." if slow else None)
    rows = tuple(row for status in TrialStatus for row in _causes(status, by_status.get(status, [])))
    if not rows:
        return [Section("What failed", (*paragraphs("Nothing failed."), *pruned))]
    counts = counts_text({s.value: len(group) for s, group in by_status.items()})
    return [Section("What failed", (*paragraphs(f"{counts}."), Facts(rows), *pruned))]


def _causes(status: TrialStatus, some: Sequence[_Ended]) -> list[tuple[str, str]]:
    """Return one row per cause, each with the text of that of the smallest batch."""
    ends = sorted(some, key=lambda e: e.batch_size)
    groups = [alike for _, alike in _alike((f"{e.result.phase} {e.result.cause or _NO_CAUSE}", e) for e in ends)]
    rows = [(f"{status.value} ×{len(group)}", _failure_text(group)) for group in groups[:CAUSES]]
    others = sum(map(len, groups[CAUSES:]))
    return rows + ([(f"{status.value} ×{others}", "other causes; `autotune show` has them all")] if others else [])


def _failure_text(alike: Sequence[_Ended]) -> str:
    first = alike[0]
    trials = sorted((e.name for e in alike if e.name.isdigit()), key=int)
    others = sorted(e.name for e in alike if not e.name.isdigit())
    who = ", ".join(filter(None, (listed_trials(trials) if trials else "", listed(others))))
    phase = f", in {phase_text(first.result.phase, first.config)}" if first.result.phase else ""
    batch = f", from batch {first.batch_size}" if len({e.batch_size for e in alike}) > 1 else ""
    advice = f" {full_stop(first.result.advice)}" if first.result.advice else ""
    return f"{who}{phase}{batch}: {ended(first.result.cause or _NO_CAUSE)}{advice}"


def where_it_holds(material: Material) -> list[Section]:
    """Return the machine and the workload for which the figures hold, as a section."""
    title, profile = "Where it holds", material.profile
    if profile is None:
        return [Section(title, paragraphs("There is no profile in the study's folder that could be read."))]
    values = profile.fingerprint.values
    rows = tuple((name, spell(value)) for name, value in values.items() if value is not None and value != "")
    uuid = profile.fingerprint.device_uuid
    more = (("device_uuid", f"{uuid} (recorded, not compared)"),) if uuid else ()
    note = "The figures hold where all of this is the same; `autotune train` says what differs."
    return [Section(title, (*paragraphs(note), Facts((*rows, *more))))]
