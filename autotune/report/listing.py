"""Lists of trials, studies, spaces and profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePath
from textwrap import wrap
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column
from rich.text import Text

from autotune.base.records import Config, Fingerprint, Trial, TrialStatus
from autotune.knobs import KNOBS, spell
from autotune.knobs.knob import ONE_RANK
from autotune.profile import Profile
from autotune.profile.in_force import HARDWARE, Row, Slot, has_default_size, on_hardware
from autotune.report.document import FittingTable, Line, new_table, pairs, status_cell
from autotune.space import Space
from autotune.space.formatting import (
    count,
    counts_text,
    describe,
    ended_text,
    interval_text,
    listed,
    memory_text,
    model_name,
    one_line,
    ratio_text,
    seconds_text,
    settings,
    trial_peak_bytes,
    trial_rate_text,
    unit_of,
)

# Tables of a study's trials, of a folder's studies, and of a workload's space.

#: Up to how many the legal configurations are counted, which is done one by one.
COUNT_CAP = 100_000


def space_table(space: Space) -> RenderableType:
    """Return the table of a space: each knob's choices, its refused values and the reasons, then the space's size."""
    table = new_table("knob", "about", "choices", "refused, and why", wrap=("about", "choices", "refused, and why"))
    for name, choices in space.choices.items():
        baseline = spell(space.baseline.get(name))
        legal: list[str] = []
        by_reason: dict[str, list[str]] = {}
        for choice in choices:
            value = spell(choice.value)
            if choice.refused:
                by_reason.setdefault(choice.refused, []).append(value)
            elif choice.refused is None:
                legal.append(f"({value})" if choice.further else value + "*" * (value == baseline))
        if name in space.baseline and baseline not in [spell(c.value) for c in choices]:
            legal.append(f"(baseline: {baseline})")
        refused = Text("\n".join(one_line(f"{', '.join(values)}: {reason}") for reason, values in by_reason.items()))
        table.add_row(Text(one_line(name)), _about(name), Text(one_line(", ".join(legal))), refused)
    for name, reason in space.inactive.items():
        if reason == ONE_RANK:
            # With one rank, the exchange between ranks does not concern the user.
            continue
        table.add_row(Text(one_line(name)), _about(name), "not here", Text(one_line(reason)), style="dim")
    legal_count = sum(1 for _ in islice(space.grid(), COUNT_CAP + 1))
    size = f"more than {COUNT_CAP:,} configurations" if legal_count > COUNT_CAP else count(legal_count, "configuration")
    note = "* the baseline's value" + "; (…) tried only beside the best so far" * bool(space.further)
    return Group(table, Text(note, style="dim"), Line(f"Legal here: {size}."))


def _about(name: str) -> str:
    return KNOBS[name].about if name in KNOBS else "the workload's own"


def trials_table(trials: Sequence[Trial], baseline_config: Config) -> RenderableType:
    """Return the table of a study's trials in the given order, followed by the phase and cause of each failure."""
    table = new_table("trial", "status", "optimization", unit_of(trials), "peak\nmemory", "took")
    for trial in trials:
        result = trial.result
        configuration = (
            f"baseline: {settings(trial.config)}" if trial.number == 0 else describe(trial.config, baseline_config)
        )
        table.add_row(
            str(trial.number),
            status_cell(result.status),
            Text(configuration),
            trial_rate_text(trial),
            memory_text(trial_peak_bytes(trial)),
            seconds_text(result.wall_s),
        )
    counts = Counter(trial.result.status.value for trial in trials)
    lines = [Text(f"{count(len(trials), 'trial')}{': ' if counts else ''}{counts_text(counts)}.")]
    lines.append(Text("Each figure is of one launch, ± from its own windows; launches differ by more.", style="dim"))
    if TrialStatus.PRUNED in counts:
        lines.append(Text("~ a rate seen before the trial was stopped for being slow", style="dim"))
    widest = max((len(str(trial.number)) for trial in trials), default=0)
    notes = [(f"{trial.number:>{widest}}", note, False) for trial in trials for note in _trial_notes(trial)]
    return Group(table, *map(Line, lines), *([Text()] if notes else []), *pairs(notes))


def _trial_notes(trial: Trial) -> list[str]:
    """Return what to know of a trial beside its figures, such as reasons to doubt its rate, one clause each."""
    result, notes = trial.result, []
    if trial.repeats is not None:
        notes.append(f"repeats trial {trial.repeats}")
    if result.status not in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
        notes.append(f"{ended_text(trial)}: {one_line(result.cause or 'no cause was recorded')}")
    if result.unclean_exit:
        notes.append("the process died after it had reported its result")
    measurement = result.measurement
    if measurement is None:
        return notes
    if not measurement.settled:
        notes.append(one_line(measurement.unsettled or "it had not settled when it was measured").rstrip("."))
    elif measurement.recompiles:
        notes.append(f"compiled again {count(measurement.recompiles, 'time')} before it was measured")
    discarded = Counter(one_line(w.discarded or "no reason was given").rstrip(".") for w in measurement.discarded)
    return notes + [f"{count(windows, 'window')} discarded: {reason}" for reason, windows in discarded.items()]


@dataclass(frozen=True)
class StudyRow:
    """One row of the table of studies.

    Attributes:
        state: ``done``, ``failed``, ``unfinished``, … as chosen by the caller.
        best_speedup: the winner's speedup over the baseline; ``None`` if the search is not finished.
        created: ISO 8601.
    """

    name: str
    model: str
    state: str
    trials: int
    best_speedup: float | None
    created: str
    path: str


def studies_table(rows: Sequence[StudyRow]) -> RenderableType:
    if not rows:
        return Text("No studies here yet. Start one: autotune search --model resnet50")
    table = new_table("study", "model", "state", "trials", "speedup", "created", wrap=("model",))
    for row in rows:
        table.add_row(
            Text(one_line(row.name)),
            Text(model_name(row.model)),
            Text(one_line(row.state)),
            f"{row.trials:,}",
            "-" if row.best_speedup is None else ratio_text(row.best_speedup),
            Text(one_line(row.created)[:16].replace("T", " ")),
        )
    # A study's folder has the study's name, so only the parent folders are shown.
    folders = sorted({one_line(str(PurePath(row.path).parent)) for row in rows})
    return Group(table, Line(Text(f"in {', '.join(folders)}", style="dim"), verbatim=True))


# Profiles as a grid: a row for each training, a column for each kind of hardware.

#: Appended to the title of this machine's column.
_HERE = " (here)"
State = Literal["tuned", "stale", "missing"]
_STYLES: Mapping[State, str] = {"tuned": "", "stale": "yellow", "missing": "red"}
#: Width of a title, unless a word is longer: about that of the gain below it, on one line and on two.
_WIDE, _NARROW = 18, 14
#: Maximum number of profiles listed with the reason why they are stale.
_PLACES = 4
#: Stands for a batch size that is free to choose.
ANY_BATCH = "any"


@dataclass(frozen=True)
class GridCell:
    """What is known of one training on one kind of hardware.

    Attributes:
        kept: its profile; ``None`` if it is missing. stale: what has changed since the profile was measured.
    """

    kept: Slot | None = None
    stale: tuple[Row, ...] = ()

    @property
    def state(self) -> State:
        return "missing" if self.kept is None else "stale" if self.stale else "tuned"

    def text(self, between: str = " ") -> Text:
        """Return the gain and the state.

        Args:
            between: separates the gain from its interval.
        """
        gain, _, interval = ("" if self.kept is None else gain_text(self.kept.profile)).partition(" (")
        state = "" if self.state == "tuned" else self.state
        head = f"{gain} {state}".strip()
        text = Text(f"{head}{f'{between}({interval}' if interval else ''}")
        text.stylize(_STYLES[self.state], len(head) - len(state), len(head))
        return text


@dataclass(frozen=True)
class ProfileGrid:
    """A grid of profiles.

    Attributes:
        rows: model, batch size, and whatever else distinguishes the training, as text. columns: kinds of hardware.
        cells: by the numbers of their row and column. A cell that is absent was not requested.
    """

    rows: Sequence[tuple[str, str, str]]
    columns: Sequence[str]
    cells: Mapping[tuple[int, int], GridCell] = field(default_factory=dict)

    def counts(self) -> str:
        """Return how many cells are in each state, as text."""
        counts = Counter(cell.state for cell in self.cells.values())
        return listed([f"{counts[state]} {state}" for state in _STYLES if counts[state]])


def gain_text(profile: Profile) -> str:
    """Return a profile's gain over its baseline as text: ``2.06× (2.03 to 2.09)``."""
    gives = profile.gives
    if profile.configuration == profile.baseline.configuration:
        return "nothing faster"
    if gives.speedup is None or gives.speedup_ci95 is None:
        return "not compared"
    not_proven = ", not proven" if gives.unproven else ""
    return f"{ratio_text(gives.speedup, gives.speedup_ci95)} ({interval_text(gives.speedup_ci95)}){not_proven}"


def stale_text(rows: Iterable[Row]) -> str:
    """Return what has changed since a profile was measured as text: ``stale: torch was 2.14.1, is 2.15.0``."""
    return f"stale: {'; '.join(f'{name} was {old}, is {new}' for name, old, new in rows)}"


def grid_of(kept: Sequence[Slot], here: Fingerprint) -> ProfileGrid:
    """Arrange profiles in a grid. A training with a profile on one kind of hardware is missing on all others."""
    trainings = _titles(kept)
    hardware = _columns([slot.profile for slot in kept], here)
    counts = Counter(zip(trainings, hardware, strict=True))
    for i, (slot, title, kind) in enumerate(zip(kept, list(trainings), hardware, strict=True)):
        if counts[title, kind] > 1:
            # Two profiles have the same text, such as those of two files with the same name.
            trainings[i] = (*title[:2], ", ".join(filter(None, (title[2], slot.name))))
    rows = sorted(set(trainings), key=lambda row: (row[0], row[2], row[1] != ANY_BATCH, len(row[1]), row[1]))
    columns = sorted(set(hardware), key=lambda name: (not name.endswith(_HERE), name))
    cells = dict.fromkeys(((r, c) for r in range(len(rows)) for c in range(len(columns))), GridCell())
    for slot, training, kind in zip(kept, trainings, hardware, strict=True):
        cells[rows.index(training), columns.index(kind)] = GridCell(slot, tuple(slot.stale(here)))
    return ProfileGrid(rows, columns, cells)


def _titles(kept: Sequence[Slot]) -> list[tuple[str, str, str]]:
    """Return each profile's training as text, without what all trainings of its model have in common."""
    facts = []
    for slot in kept:
        profile = slot.profile
        conditions, workload = profile.conditions, profile.workload
        # A workload's default differs between devices, but it is the same training.
        pixels = "" if has_default_size(profile) else f"{conditions.image_size} px"
        args = ", ".join(f"{name}={value}" for name, value in sorted(workload.args.items()))
        ranks = f"{conditions.ranks} ranks" if conditions.ranks > 1 else ""
        objective = profile.provenance.objective
        objective = "" if objective == "throughput" else f"objective={model_name(objective)}"
        facts.append((args, ranks, objective, pixels, conditions.data, workload.path or workload.module or ""))
    titles = []
    for slot, own_facts in zip(kept, facts, strict=True):
        model = model_name(slot.profile.workload.name)
        others = [f for s, f in zip(kept, facts, strict=True) if model_name(s.profile.workload.name) == model]
        # Arguments, ranks and the objective are always included.
        parts = [
            fact for i, fact in enumerate(own_facts) if fact and (i < 3 or any(other[i] != fact for other in others))
        ]
        batch = str(slot.profile.configuration["batch_size"]) if slot.profile.conditions.keeps_batch_size else ANY_BATCH
        titles.append((model, batch, one_line(", ".join(parts))))
    return titles


def _columns(profiles: Sequence[Profile], here: Fingerprint) -> list[str]:
    """Return each profile's hardware as text, just long enough to tell the kinds apart."""
    kinds = [tuple(profile.fingerprint.values.get(name) for name in HARDWARE) for profile in profiles]
    names = []
    for profile in profiles:
        name, mig = profile.conditions.device_name, profile.fingerprint.values.get("mig")
        of_card = f"{name.removeprefix('NVIDIA ')}{f' MIG {mig}' if mig else ''}"
        on_cpu = profile.conditions.device == "cpu"
        names.append(f"{name}, {_cores(profile.fingerprint.values)}" if on_cpu else of_card)
    unique = {name: len({k for k, n in zip(kinds, names, strict=True) if n == name}) == 1 for name in names}
    titles = []
    for profile, name in zip(profiles, names, strict=True):
        values = profile.fingerprint.values
        more = "" if unique[name] else f", {_cores(values)} of {values.get('cpu_model')}"
        titles.append(one_line(f"{name}{more}") + (_HERE if on_hardware(profile, here) else ""))
    return titles


def _cores(values: Mapping[str, object]) -> str:
    cores = values.get("cores")
    return f"{cores} {'core' if cores == 1 else 'cores'}"


class GridTable:
    """A grid as a table, with a line for each reason why profiles are stale.

    If the terminal is too narrow, intervals go on lines of their own; if it still is, the table becomes a list.
    """

    def __init__(self, grid: ProfileGrid) -> None:
        self._grid = grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide, narrow = self._table(" ", _WIDE), self._table("\n", _NARROW)
        yield wide if wide.fits(console, options) or not narrow.fits(console, options) else narrow
        reasons: dict[str, list[str]] = {}
        for (r, c), cell in self._grid.cells.items():
            if cell.stale:
                model, batch, more = self._grid.rows[r]
                name = f"{model}{'' if batch == ANY_BATCH else f' at batch {batch}'}{f' ({more})' if more else ''}"
                reasons.setdefault(stale_text(cell.stale), []).append(f"{name} on {self._grid.columns[c]}")
        if reasons:
            yield Text()
        for reason, places in sorted(reasons.items()):
            others = [f"{len(places) - _PLACES} more"] if len(places) > _PLACES else []
            yield Line(f"{reason} ({listed([*places[:_PLACES], *others])})")

    def _table(self, between: str, title: int) -> FittingTable:
        grid = self._grid
        has_more = any(more for _, _, more in grid.rows)
        columns = [Column("model", no_wrap=True), Column("batch", no_wrap=True)]
        columns += [Column("with", overflow="fold")] if has_more else []
        columns += [Column("\n".join(wrap(name, title)), no_wrap=True) for name in grid.columns]
        table = FittingTable(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for r, (model, batch, more) in enumerate(grid.rows):
            cells = [grid.cells.get((r, c)) for c in range(len(grid.columns))]
            texts = [Text("-") if cell is None else cell.text(between) for cell in cells]
            table.add_row(Text(model), batch, *([Text(more)] if has_more else []), *texts)
        return table
