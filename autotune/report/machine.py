"""The report's sections on the machine: disturbances of the measurements, failures, and where the figures apply."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from autotune.base.layout import COLD
from autotune.base.records import Config, LaunchKind, Measurement, Surroundings, TrialResult, TrialStatus
from autotune.knobs import spell
from autotune.knobs.compile_mode import phase_text
from autotune.machine.gpu import LASTING_SLOWDOWN, SLOWDOWNS
from autotune.report.document import Column, Facts, Grid, Kind, Part, Section, facts, paragraphs
from autotune.report.material import LaunchRecord, Material
from autotune.report.sentences import BUSY_ALLOWED, batch_of, ended, full_stop, listed_trials
from autotune.space import key
from autotune.space.formatting import count, counts_text, listed, one_line, percent_text, rate_text, seconds_text

_NO_CAUSE = "no cause was recorded"
#: Maximum number of causes shown for one status. `autotune show` has all of them.
CAUSES = 4
_NUMBER = re.compile(r"\d[\d,.]*")
#: Reasons for reduced clocks, by NVML's bit (nvml.h). A power cap disturbs no measurement, but explains its rate.
_CLOCKS = {**SLOWDOWNS, 0x4: "SW power cap"}


def machine(material: Material) -> list[Section]:
    """Return the conditions on the machine during the measurements, as a section."""
    measured = material.measured()
    if not measured:
        return []
    busy = BUSY_ALLOWED if material.spec.allow_busy else None
    texts = (_windows(measured), _lasting(measured), busy)
    parts: list[Part] = [*paragraphs(*texts), *_discarded(measured), *_unsettled(measured)]
    around = [w.around for _, m in measured for w in m.windows if w.around is not None]
    rows = (
        ("SM clock", _range((a.sm_clock_mhz for a in around), "MHz")),
        ("memory clock", _range((a.memory_clock_mhz for a in around), "MHz")),
        ("clocks held down", _held_down(around)),
        ("temperature", _range((a.temperature_c for a in around), "°C")),
        ("power", _range((a.power_w for a in around), "W")),
        ("energy", _energy(material, measured)),
        ("others on the card", _range((a.foreign_processes for a in around), "processes")),
        ("SMs used by others, kept windows", _range((a.foreign_sm_percent for a in around), "%")),
        ("CPU used by others, kept windows", _range((a.foreign_cores for a in around), "cores", digits=2)),
        ("CPU left idle, kept windows", _range((a.idle_cores for a in around), "cores", digits=2)),
        ("alloc retries", _retries(measured)),
        ("waiting for quiet", _waited(material)),
        ("launches differ", _spread(material, measured)),
    )
    kept = facts(*rows)
    if not kept:
        parts += paragraphs("What others did on the machine meanwhile was not recorded.")
    return [Section("How quiet the machine was", (*parts, *kept))]


def _windows(measured: Sequence[tuple[LaunchRecord, Measurement]]) -> str:
    kept = sum(len(m.windows) for _, m in measured)
    lost = sum(len(m.discarded) for _, m in measured)
    launches = count(len(measured), "launch", "launches")
    if not lost:
        return f"{count(kept, 'window')} in {launches}; none had to be discarded."
    return f"{count(kept, 'window')} kept in {launches}; {lost:,} discarded ({percent_text(lost / (kept + lost))})."


def _lasting(measured: Sequence[tuple[LaunchRecord, Measurement]]) -> str | None:
    """Return which launches were measured under the slowdown that is some cards' normal state."""
    known = {x.name: [w.around.clocks_event_reasons for w in m.windows if w.around is not None] for x, m in measured}
    slowed = [name for name, masks in known.items() if any((mask or 0) & LASTING_SLOWDOWN for mask in masks)]
    if not slowed:
        return None
    who = "all launches" if len(slowed) == len(measured) else f"{len(slowed)} of {len(measured)} launches"
    which = "" if len(slowed) == len(measured) else f": {_first(slowed)}"
    name = SLOWDOWNS[LASTING_SLOWDOWN]
    return f"{name} lasted through {who}, whose rates are therefore those of a hot card{which}."


def _discarded(measured: Sequence[tuple[LaunchRecord, Measurement]]) -> list[Part]:
    """Return the discarded windows by reason. Reasons that differ only in numbers are merged under the first one."""
    found: dict[str, list[tuple[str, str, float]]] = {}
    for launch, m in measured:
        for window in m.discarded:
            reason = one_line(window.discarded or "no reason was given").rstrip(".")
            found.setdefault(_NUMBER.sub("#", reason), []).append((reason, launch.name, window.seconds))
    ordered = sorted(found.values(), key=len, reverse=True)
    rows = tuple(
        (some[0][0], f"{len(some):,}", f"{sum(s for *_, s in some):,.1f} s", f"{len({n for _, n, _ in some}):,}")
        for some in ordered
    )
    columns = (Column("discarded because", Kind.TEXT), Column("windows"), Column("time"), Column("launches"))
    return [Grid(columns, rows)] if rows else []


def _unsettled(measured: Sequence[tuple[LaunchRecord, Measurement]]) -> list[Part]:
    """Return the launches that never settled by reason. Reasons that differ only in numbers are merged."""
    found: dict[str, list[tuple[str, str]]] = {}
    for launch, m in measured:
        if not m.settled:
            reason = one_line(m.unsettled or "it had not settled when it was measured").rstrip(".")
            found.setdefault(_NUMBER.sub("#", reason), []).append((reason, launch.name))
    ordered = sorted(found.values(), key=len, reverse=True)
    rows = tuple((some[0][0], f"{len(some):,}", _first([name for _, name in some])) for some in ordered)
    columns = (Column("never settled because", Kind.TEXT), Column("launches"), Column("which", Kind.TEXT))
    return [Grid(columns, rows)] if rows else []


def _range(values: Iterable[float | None], unit: str, digits: int = 0) -> str | None:
    known = [v for v in values if v is not None]
    if not known:
        return None
    low, middle, high = (f"{v:,.{digits}f}" for v in (min(known), median(known), max(known)))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}, median {middle}"


def _held_down(around: Sequence[Surroundings]) -> str | None:
    known = [a.clocks_event_reasons for a in around if a.clocks_event_reasons is not None]
    if not known:
        return None
    named = Counter(name for mask in known for bit, name in _CLOCKS.items() if mask & bit)
    parts = [f"{name} in {n:,} of {count(len(known), 'kept window')}" for name, n in named.most_common()]
    return listed(parts) or "never"


def _energy(material: Material, measured: Sequence[tuple[LaunchRecord, Measurement]]) -> str | None:
    outcome = material.outcome
    if outcome is None:
        return None
    parts = []
    for who, standing in (("the baseline", outcome.baseline), ("the winner", outcome.best)):
        mine = [m for x, m in measured if _measures(x, standing.config) and m.energy_j is not None]
        samples = sum(w.samples for m in mine for w in m.windows)
        if samples:
            parts.append(f"{who} {sum(m.energy_j or 0.0 for m in mine) / samples:.3g} J a sample")
    return ", ".join(dict.fromkeys(parts)) or None


def _retries(measured: Sequence[tuple[LaunchRecord, Measurement]]) -> str | None:
    known = {x.name: m.alloc_retries for x, m in measured if m.alloc_retries is not None}
    if not known:
        return None
    some = [f"{n:,} in {name}" for name, n in known.items() if n]
    return _first(some) if some else "none"


def _waited(material: Material) -> str | None:
    waited = [(x.name, x.result.waited_s) for x in material.launches if x.result.waited_s >= 0.1]
    if not waited:
        return None
    total = seconds_text(sum(s for _, s in waited))
    return f"{total}, before {count(len(waited), 'launch', 'launches')}"


def _spread(material: Material, measured: Sequence[tuple[LaunchRecord, Measurement]]) -> str | None:
    """Return the slowest and the fastest launch of the baseline and of the winner: the noise between launches."""
    outcome = material.outcome
    if outcome is None:
        return None
    parts: dict[str, str] = {}
    for who, standing in (("the baseline", outcome.baseline), ("the winner", outcome.best)):
        rates = [m.samples_per_s for x, m in measured if _measures(x, standing.config)]
        if len(rates) > 1:
            low, high = rate_text(min(rates)), rate_text(max(rates))
            parts.setdefault(key(standing.config), f"{len(rates)} of {who} ran at {low} to {high} {outcome.unit}")
    return "; ".join(parts.values()) or None


def _first(names: Sequence[str]) -> str:
    """List the names, or the first `CAUSES` of them and the number of the others."""
    return listed(names) if len(names) <= CAUSES else f"{', '.join(names[:CAUSES])} and {len(names) - CAUSES} more"


def _measures(launch: LaunchRecord, config: Config) -> bool:
    """Whether a launch measured this configuration and completed."""
    complete = launch.result.status is TrialStatus.COMPLETE
    # Behind an empty cache it is another training.
    complete = complete and not launch.spec.launch.startswith(f"{COLD}-")
    return complete and launch.spec.kind is LaunchKind.MEASURE and key(launch.spec.config) == key(config)


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
    every = [_Ended(str(t.number), t.config, t.result) for t in material.trials]
    every += [_Ended(x.spec.launch, x.spec.config, x.result) for x in material.launches if x.spec.number is None]
    if not every:
        return []
    by_status: dict[TrialStatus, list[_Ended]] = {}
    for one in every:
        by_status.setdefault(one.result.status, []).append(one)
    by_status.pop(TrialStatus.COMPLETE, None)
    slow = len(by_status.pop(TrialStatus.PRUNED, []))
    was = "was" if slow == 1 else "were"
    early = paragraphs(f"{count(slow, 'trial')} {was} ended early for being slow." if slow else None)
    rows = tuple(row for status in TrialStatus for row in _causes(status, by_status.get(status, [])))
    if not rows:
        return [Section("What failed", (*paragraphs("Nothing failed."), *early))]
    counts = counts_text({s.value: len(some) for s, some in by_status.items()})
    return [Section("What failed", (*paragraphs(f"{counts}."), Facts(rows), *early))]


def _causes(status: TrialStatus, some: Sequence[_Ended]) -> list[tuple[str, str]]:
    """Return one row per cause. Causes that differ only in numbers are merged under that of the smallest batch."""
    found: dict[str, list[_Ended]] = {}
    for one in sorted(some, key=lambda e: e.batch_size):
        found.setdefault(f"{one.result.phase} {_NUMBER.sub('#', one.result.cause or _NO_CAUSE)}", []).append(one)
    ordered = sorted(found.values(), key=len, reverse=True)
    rows = [(f"{status.value} ×{len(alike)}", _failure_text(alike)) for alike in ordered[:CAUSES]]
    left = sum(map(len, ordered[CAUSES:]))
    return rows + ([(f"{status.value} ×{left}", "other causes; `autotune show` has them all")] if left else [])


def _failure_text(alike: Sequence[_Ended]) -> str:
    first = alike[0]
    trials = sorted((e.name for e in alike if e.name.isdigit()), key=int)
    others = sorted(e.name for e in alike if not e.name.isdigit())
    who = ", ".join(filter(None, (listed_trials(trials) if trials else "", listed(others))))
    where = f", in {phase_text(first.result.phase, first.config)}" if first.result.phase else ""
    batch = f", from batch {first.batch_size}" if len({e.batch_size for e in alike}) > 1 else ""
    advice = f" {full_stop(first.result.advice)}" if first.result.advice else ""
    return f"{who}{where}{batch}: {ended(first.result.cause or _NO_CAUSE)}{advice}"


def where_it_holds(material: Material) -> list[Section]:
    """Return the machine and the workload for which the figures hold, as a section."""
    title, profile = "Where it holds", material.profile
    if profile is None:
        return [Section(title, paragraphs("There is no profile in the study's folder that could be read."))]
    values = profile.fingerprint.values
    known = tuple((name, spell(value)) for name, value in values.items() if value is not None and value != "")
    uuid = profile.fingerprint.device_uuid
    more = (("device_uuid", f"{uuid} (recorded, not compared)"),) if uuid else ()
    what = "The figures hold where all of this is the same; `autotune train` says what differs."
    return [Section(title, (*paragraphs(what), Facts((*known, *more))))]
