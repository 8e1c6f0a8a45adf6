"""What a person reads when a search is over: tables and sentences as rich renderables. Prints nothing.

Figures never wrap and never lose their units; only the column that describes a configuration gives way on a narrow
terminal. No meaning is carried by colour alone. Text that comes from outside (causes, paths, model names) is never
interpreted as markup, and its control characters are dropped.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.records import BreakEven, Config, Outcome, Standing, Trial, TrialStatus
from autotune.space import KNOBS, Choice, Space, spell
from autotune.wording import (
    count,
    counts_text,
    describe,
    ended_text,
    memory_text,
    one_line,
    phrase,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
    status_style,
    trial_peak_bytes,
    trial_rate_text,
)

#: Complete configurations in the table of the best, and failures worth knowing about.
TOP, FAILURES = 5, 3
#: A grid is counted one configuration at a time; past this many the number says nothing more.
COUNT_CAP = 100_000
_FIGURES = ("trial", "samples/s", "speedup", "peak\nmemory", "took", "trials")
#: Failures that the configuration itself caused come first among the notable ones; the rest follow by number.
_NOTABLE = (TrialStatus.OOM, TrialStatus.HOST_OOM, TrialStatus.COMPILE_FAILED, TrialStatus.DIVERGED)
_SAME_MATHS = "Epochs, updates and learning rate stay as they are."


def best_table(outcome: Outcome, trials: Sequence[Trial], folder: PurePath | None = None) -> RenderableType:
    """The end of a search: the table of the best against the baseline, the two winners, and what to do next.

    Args:
        folder: the reader's current folder, absolute: paths below it are shown as they would be typed there.
    """
    baseline, best, same = outcome.baseline, outcome.best, outcome.best_same_batch
    verified: dict[int, Standing] = {s.trial: s for s in (baseline, best, same)}
    table = _new_table("trial", "optimization", "samples/s", "speedup", "peak\nmemory", "status")

    for standing in verified.values():
        own = standing.trial == baseline.trial
        table.add_row(
            str(standing.trial),
            Text(f"baseline: {settings(baseline.config)}" if own else describe(standing.config, baseline.config)),
            rate_text(standing.samples_per_second, standing.ci95),
            ratio_text(standing.speedup),
            memory_text(standing.peak_memory_bytes),
            f"verified ×{standing.launches}" if standing.verified else "complete",
            style="" if own else "bold green",
        )
    for trial in _others(trials, verified, TOP + 1 - len(verified)) + _notable_failures(trials):
        complete = trial.result.status is TrialStatus.COMPLETE
        ratio = (trial.rate_per_s or 0.0) / baseline.samples_per_second
        table.add_row(
            str(trial.number),
            Text(describe(trial.config, baseline.config)),
            trial_rate_text(trial),
            ratio_text(ratio) if complete else "-",
            memory_text(trial_peak_bytes(trial)),
            _status(trial.result.status),
            style="" if complete else "dim",
        )
    where = "" if outcome.image_size is None else f", {outcome.image_size} px"
    title = Text(f"{one_line(outcome.model)} on {one_line(outcome.device_name)}{where}", style="bold")
    return Group(title, table, *_notes(outcome), Text(), *_winners(outcome, trials), Text(), *_closing(outcome, folder))


def _others(trials: Sequence[Trial], verified: Collection[int], limit: int) -> list[Trial]:
    scored = [t for t in trials if t.score is not None and t.number not in verified]
    return sorted(scored, key=lambda t: t.score or 0.0, reverse=True)[: max(0, limit)]


def _notable_failures(trials: Sequence[Trial]) -> list[Trial]:
    """For each way of failing the smallest batch that did: it tells where the limit lies."""
    smallest: dict[TrialStatus, Trial] = {}
    for trial in trials:
        status = trial.result.status
        if status in (TrialStatus.COMPLETE, TrialStatus.PRUNED, TrialStatus.INTERRUPTED):
            continue
        if status not in smallest or _batch(trial.config) < _batch(smallest[status].config):
            smallest[status] = trial
    rank = {status: i for i, status in enumerate(_NOTABLE)}
    found = sorted(smallest.values(), key=lambda t: (rank.get(t.result.status, len(rank)), t.number))
    return found[:FAILURES]


def _batch(config: Config) -> int:
    return int(config.get("batch_size", 0))


def _notes(outcome: Outcome) -> list[Text]:
    notes = [f"Peak memory is the {one_line(outcome.memory_is)}'s."]
    if any(s.verified for s in (outcome.baseline, outcome.best, outcome.best_same_batch)):
        notes.insert(0, "verified ×N: N fresh launches, in turns with the baseline's. Other rows rest on one each.")
    if outcome.objective != "throughput":
        notes.append(f"Ordered by the objective {one_line(outcome.objective)}.")
    return [Text(" ".join(notes), style="dim")]


def _winners(outcome: Outcome, trials: Sequence[Trial]) -> list[RenderableType]:
    baseline, best, same = outcome.baseline, outcome.best, outcome.best_same_batch
    if max(best.speedup_ci95[0], same.speedup_ci95[0]) <= 1:
        return [_nothing_faster(outcome)]
    lines: list[RenderableType] = []
    if best.config == same.config:
        lines.append(_winner("Best, overall and at your own batch size", best, baseline))
        lines.append(_hint(_SAME_MATHS))
    else:
        own = f"Best at your own batch size ({_batch(baseline.config)})"
        if same.config == baseline.config:
            lines.append(Text.assemble((f"{own}: ", "bold"), "the baseline itself."))
        else:
            lines.append(_winner(own, same, baseline))
            lines.append(_hint(_SAME_MATHS))
        lines.append(_winner("Best overall", best, baseline))
        lines.append(_hint(_what_changes(best.config, baseline.config, _epoch_samples(best, trials))))
    if outcome.break_even is not None:
        lines.append(_break_even(outcome.break_even, baseline.config))
    return lines


def _winner(title: str, standing: Standing, baseline: Standing) -> Text:
    low, high = standing.speedup_ci95
    text = Text(f"{title}: ", style="bold")
    text.append(describe(standing.config, baseline.config), style="green")
    figures = f"{rate_text(standing.samples_per_second, standing.ci95)} samples/s, {ratio_text(standing.speedup)}"
    text.append(f", {figures} the baseline (95 %: {low:.2f} to {high:.2f})", style="not bold")
    if low <= 1:
        text.append("; not shown to be faster than the baseline", style="yellow")
    return text


def _nothing_faster(outcome: Outcome) -> Text:
    text = Text("No configuration was shown to be faster than the baseline.", style="bold yellow")
    best = outcome.best
    if best.config == outcome.baseline.config:
        more = "It is the best of what was tried: keep what you have."
    else:
        low, high = best.speedup_ci95
        more = (
            f"The best one, {describe(best.config, outcome.baseline.config)}, ran at {ratio_text(best.speedup)}, with "
            f"95 % confidence between {low:.2f}× and {high:.2f}×. A longer --budget may tell them apart."
        )
    return text.append(f" {more}", style="not bold default")


def _hint(sentence: str) -> RenderableType:
    return Padding(Text(sentence), (0, 0, 0, 4))


def _epoch_samples(standing: Standing, trials: Sequence[Trial]) -> int | None:
    found = (t.result.measurement for t in trials if t.number == standing.trial)
    return next((m.epoch_samples for m in found if m is not None), None)


def _what_changes(config: Config, baseline: Config, epoch_samples: int | None) -> str:
    """What a configuration that is not the same maths changes, for the person who trains with it."""
    mine, theirs = _batch(config), _batch(baseline)
    own = [n for n, v in config.items() if n.startswith("workload.") and baseline.get(n) != v]
    parts = [f"It sets {', '.join(phrase(n, config[n]) for n in own)}, which changes what is trained"] if own else []
    if mine != theirs:
        factor, word = (mine / theirs, "fewer") if mine > theirs else (theirs / mine, "more")
        steps = ""
        if epoch_samples:
            now, before = math.ceil(epoch_samples / mine), math.ceil(epoch_samples / theirs)
            steps = f": an epoch is {count(now, 'step')} instead of {before:,}"
        parts.append(
            f"Batch {mine} instead of {theirs}{steps}. The same number of epochs makes {factor:.3g}× {word} updates, "
            f"and the learning rate usually needs rescaling"
        )
    return ". ".join(parts) + "."


def _break_even(pays: BreakEven, baseline: Config) -> Text:
    eager = f"{describe(pays.eager_config, baseline)}, {rate_text(pays.eager_samples_per_second)} samples/s"
    when = f"after {count(pays.steps, 'step')}" if pays.steps else "from the first step"
    cost = seconds_text(pays.compile_s)
    return Text(f"Compiling costs {cost}, and is ahead of the best eager configuration ({eager}) {when}.")


def _closing(outcome: Outcome, folder: PurePath | None) -> list[RenderableType]:
    stopped = one_line(outcome.stopped).rstrip(".")
    data = f"; making the data took {seconds_text(outcome.data_s)} before that" if outcome.data_s >= 1 else ""
    file, study = PurePath(outcome.profile), one_line(outcome.study)
    if folder is not None and file.is_relative_to(folder):
        file = file.relative_to(folder)
    profile = one_line(str(file))
    # A study is found by its name in the default place, and by its folder anywhere else.
    named = study if file.parent == PurePath("studies", outcome.study) else one_line(str(file.parent))
    train = f"autotune train --profile {shlex.quote(profile)} --model {shlex.quote(one_line(outcome.model))}"
    export = f"autotune export {shlex.quote(named)} -o {shlex.quote(f'{study}.yaml')}"
    return [
        Text(f"{count(sum(outcome.trials.values()), 'trial')}: {counts_text(outcome.trials)}."),
        Text(
            f"{stopped[:1].upper()}{stopped[1:]}. {seconds_text(outcome.elapsed_s)} of searching, of which "
            f"{seconds_text(outcome.measured_s)} inside kept windows{data}."
        ),
        Text(),
        Text.assemble(("Profile: ", "bold"), profile, overflow="fold"),
        Text("Next:", style="bold"),
        Padding(Group(Text(train, overflow="fold"), Text(export, overflow="fold")), (0, 0, 0, 2)),
    ]


def space_table(space: Space) -> RenderableType:
    """What may be searched here: per knob its choices, what is refused and why, then the size of the legal grid."""
    table = _new_table("knob", "about", "choices", "refused, and why", wrap=("about", "choices", "refused, and why"))
    for name, choices in space.choices.items():
        own = spell(space.baseline.get(name))
        legal = [spell(c.value) + "*" * (spell(c.value) == own) for c in choices if c.refused is None]
        if name in space.baseline and own not in [spell(c.value) for c in choices]:
            legal.append(f"(baseline: {own})")
        table.add_row(Text(one_line(name)), _about(name), Text(one_line(", ".join(legal))), _refusals(choices))
    for name, reason in space.inactive.items():
        table.add_row(Text(one_line(name)), _about(name), "not here", Text(one_line(reason)), style="dim")
    found = sum(1 for _ in islice(space.grid(), COUNT_CAP + 1))
    size = f"more than {COUNT_CAP:,} configurations" if found > COUNT_CAP else count(found, "configuration")
    return Group(table, Text("* the baseline's value", style="dim"), Text(f"Legal here: {size}."))


def _about(name: str) -> str:
    return KNOBS[name].about if name in KNOBS else "the workload's own"


def _refusals(choices: Sequence[Choice]) -> Text:
    by_reason: dict[str, list[str]] = {}
    for choice in choices:
        if choice.refused:
            by_reason.setdefault(choice.refused, []).append(spell(choice.value))
    return Text("\n".join(one_line(f"{', '.join(values)}: {reason}") for reason, values in by_reason.items()))


def trials_table(trials: Sequence[Trial], baseline_config: Config) -> RenderableType:
    """Every trial of a study in the order given; below, the phase and cause of each that failed."""
    table = _new_table("trial", "status", "optimization", "samples/s", "peak\nmemory", "took")
    for trial in trials:
        result = trial.result
        what = f"baseline: {settings(trial.config)}" if trial.number == 0 else describe(trial.config, baseline_config)
        table.add_row(
            str(trial.number),
            _status(result.status),
            Text(what),
            trial_rate_text(trial),
            memory_text(trial_peak_bytes(trial)),
            seconds_text(result.wall_s),
        )
    counts = Counter(trial.result.status.value for trial in trials)
    under = [Text(f"{count(len(trials), 'trial')}{': ' if counts else ''}{counts_text(counts)}.")]
    if TrialStatus.PRUNED in counts:
        under.append(Text("~ a rate seen before the trial was stopped for being slow", style="dim"))
    notes = Table.grid(padding=(0, 1))
    notes.add_column(justify="right", no_wrap=True)
    for trial in trials:
        for note in _trial_notes(trial):
            notes.add_row(str(trial.number), Text(note))
    return Group(table, *under, Padding(notes, (1 if notes.row_count else 0, 0, 0, 0)))


def _trial_notes(trial: Trial) -> list[str]:
    result, notes = trial.result, []
    if trial.repeats is not None:
        notes.append(f"repeats trial {trial.repeats}")
    if result.status not in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
        notes.append(f"{ended_text(trial)}: {one_line(result.cause or 'no cause was recorded')}")
    if result.unclean_exit:
        notes.append("the process died after it had reported its result")
    if result.measurement is not None and not result.measurement.settled:
        notes.append("the loader's queue was still draining: the rate may be too high")
    return notes


@dataclass(frozen=True)
class StudyRow:
    """One study, as the list of studies shows it.

    Attributes:
        state: ``done``, ``interrupted``, … in the caller's words.
        trials: how many have ended.
        best_speedup: of the best over the baseline; ``None`` before a search is done.
        created: ISO 8601.
        path: the study's folder.
    """

    name: str
    model: str
    state: str
    trials: int
    best_speedup: float | None
    created: str
    path: str


def studies_table(rows: Sequence[StudyRow]) -> RenderableType:
    """The studies of a folder, in the order given."""
    if not rows:
        return Text("No studies here yet. Start one: autotune search --model resnet50")
    table = _new_table("study", "model", "state", "trials", "speedup", "created", wrap=("model",))
    for row in rows:
        table.add_row(
            Text(one_line(row.name)),
            Text(one_line(row.model)),
            Text(one_line(row.state)),
            f"{row.trials:,}",
            "-" if row.best_speedup is None else ratio_text(row.best_speedup),
            Text(one_line(row.created)[:16].replace("T", " ")),
        )
    # A study's folder carries its name, so where the folders lie is all that is left to say.
    folders = sorted({one_line(str(PurePath(row.path).parent)) for row in rows})
    return Group(table, Text(f"in {', '.join(folders)}", style="dim", overflow="fold"))


def _new_table(*columns: str, wrap: Collection[str] = ("optimization",)) -> Table:
    """A table in which only the columns named by ``wrap`` give way; figures stand to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in _FIGURES else "left",
            no_wrap=name not in wrap,
            overflow="fold" if name in wrap else "ellipsis",
        )
    return table


def _status(status: TrialStatus) -> Text:
    # The longest by far would take its width from the descriptions.
    return Text(status.value.replace("worker_died", "worker_\ndied"), style=status_style(status))
