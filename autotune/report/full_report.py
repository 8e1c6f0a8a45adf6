"""A study as a document: its answer, at length, in short, as JSON, and the summary at the end of a search."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import SCHEMA_VERSION, DataRef, Finding, Outcome, Standing, StudySpec, Trial, TrialStatus
from autotune.knobs import spell
from autotune.report.document import (
    FILE_WIDTH,
    Column,
    Commands,
    Curves,
    Document,
    Facts,
    Grid,
    Kind,
    Line,
    Paragraph,
    Part,
    Picture,
    Section,
    Verbatim,
    facts,
    new_table,
    paragraphs,
    status_cell,
    to_html,
    to_text,
)
from autotune.report.machine import failures, machine, where_it_holds
from autotune.report.material import Material, read_material
from autotune.report.pictures import pictures
from autotune.report.sections import (
    delivers,
    epochs,
    finalists,
    heats,
    holds,
    knobs,
    ledger,
    limits,
    saved,
    trains,
    whole_training,
    whole_training_s,
)
from autotune.report.sentences import (
    BUSY_ALLOWED,
    NO_VERDICT,
    RANKS,
    SearchVerdict,
    Won,
    batch_of,
    by_gain,
    full_stop,
    gain_text,
    gain_words,
    is_out,
    knobs_line,
    label_of,
    ledger_line,
    left_text,
    limit_line,
    next_commands,
    nothing_better,
    predictions_line,
    profile_path,
    proof_line,
    required_line,
    standings,
    study_folder,
    unchecked,
    verdict_on,
)
from autotune.space import key
from autotune.space.formatting import (
    count,
    counts_text,
    describe,
    interval_text,
    memory_text,
    model_name,
    one_line,
    phrase,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
    trial_peak_bytes,
    trial_rate_text,
    unit_of,
)
from autotune.space.requirements import Requirements
from autotune.study.request import command_of

# The best of an unfinished search, where nothing is proven yet.

#: How many trials are listed.
SO_FAR = 5


def by_merit(trials: Sequence[Trial], required: Requirements) -> list[Trial]:
    """Return the trials that have a score, best first; those that do not meet the requirements come last."""
    return sorted((t for t in trials if t.score is not None), key=lambda t: (not required.allow(t), -(t.score or 0.0)))


def best_so_far_line(trials: Sequence[Trial], spec: StudySpec) -> str | None:
    """Return the best trial of an unfinished search beside its baseline, as text; ``None`` if nothing was measured.

    There is no ratio, because the two were not launched in turns.
    """
    required = Requirements.parsed(spec.require, spec.goal)
    scored = by_merit(trials, required)
    if not scored:
        return None
    base, best = trials[0].config, scored[0]
    if not required.allow(best):
        return f"Nothing that was measured so far meets {required}. Nothing is proven yet."
    baseline = next((t for t in scored if key(t.config) == key(base)), None)
    unit = unit_of(trials)
    comparison = "" if baseline is None else f"; the baseline ran at {trial_rate_text(baseline)}"
    if best is baseline:
        return f"The best so far is the baseline, {trial_rate_text(baseline)} {unit}. Nothing is proven yet."
    description = f"trial {best.number}, {describe(best.config, base)}: {trial_rate_text(best)} {unit} in one launch"
    return f"The best so far is {description}{comparison}. Nothing is proven yet."


def best_so_far(material: Material) -> list[Section]:
    """Return the best trials of an unfinished study, as a section."""
    scored = by_merit(material.trials, material.required)
    if not scored:
        return []
    baseline = material.trials[0]
    listed = scored[:SO_FAR] if baseline.score is None or baseline in scored[:SO_FAR] else [*scored[:SO_FAR], baseline]
    rows = tuple(
        (
            str(trial.number),
            f"baseline: {settings(trial.config)}"
            if key(trial.config) == key(baseline.config)
            else describe(trial.config, baseline.config),
            trial_rate_text(trial),
            memory_text(trial_peak_bytes(trial)),
        )
        for trial in listed
    )
    titles = (Column("trial"), Column("configuration", Kind.TEXT), Column(unit_of(material.trials)))
    return [Section("The best so far", (Grid((*titles, Column("peak\nmemory")), rows),))]


# What a reader wants to know first: the answer in one sentence, what it saves, what to paste, and the current limit.

#: Knobs whose gains the headline names.
NAMED = 3


@dataclass(frozen=True)
class StudyAnswer:
    """The answer of a study.

    Attributes:
        more: sentences that go with the headline: reasons, and advice if nothing is promised.
        rows: what to know about the winner, as rows of a name and a text, the most important first.
        shell: the command that trains with the profile, or goes on. python: the lines that do so in the user's own
            training loop; empty if that is a script, which stays as it is, or if there is nothing to apply.
    """

    headline: str
    more: tuple[str, ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    shell: tuple[str, ...] = ()
    python: tuple[str, ...] = ()


def headline_of(outcome: Outcome) -> str:
    """Return the answer of a finished search in one sentence."""
    baseline = rate_text(outcome.baseline.samples_per_second)
    if outcome.found is Finding.OPEN:
        return NO_VERDICT
    if outcome.found is Finding.KEEP:
        return f"{nothing_better(outcome).rstrip('.')}, {baseline} {outcome.unit}."
    best = _promised(outcome)
    gains = [
        f"{phrase(part.knob, part.value)} {ratio_text(part.gain[0], part.gain[1:])}"
        for part in by_gain(outcome.ablation)
        if part.gain and part.gain[1] > 1 and best.config.get(part.knob) == part.value
    ]
    details = f"; of this {', '.join(gains[:NAMED])}" if gains else ""
    gaps = unchecked(outcome, best)
    details += f". Not checked: {gaps}" if gaps else ""
    rates = f"{rate_text(best.samples_per_second)} instead of {baseline} {outcome.unit}"
    at_rate = f"at {ratio_text(best.speedup, best.speedup_ci95)} the rate ({_between(best)}): {rates}{details}."
    if outcome.baseline_unmet is not None:
        return f"Meets {' and '.join(outcome.require)}, which the baseline does not, {at_rate}"
    if outcome.objective != "throughput":
        return f"Better by the objective {one_line(outcome.objective)}, {at_rate}"
    faster = "faster, not checked" if gaps else "faster"
    if outcome.evidence is not None:
        ratio = f"{ratio_text(best.speedup, best.speedup_ci95)} {faster} ({_between(best)})"
        return f"Likely {ratio}, by {one_line(outcome.evidence)}: {rates}{details}. Not proven yet."
    return f"{ratio_text(best.speedup, best.speedup_ci95)} {faster} ({_between(best)}): {rates}{details}."


def _between(standing: Standing) -> str:
    return gain_text((standing.speedup, *standing.speedup_ci95))[1]


def _promised(outcome: Outcome) -> Standing:
    """Return the winner, or the one with the user's own training if only that was shown to be faster."""
    best, own = outcome.best, outcome.best_same_batch
    if outcome.objective != "throughput" or outcome.baseline_unmet is not None:
        # It was not chosen by its rate alone.
        return best
    return own if best.speedup_ci95[0] <= 1 < own.speedup_ci95[0] else best


def answer_of(material: Material) -> StudyAnswer:
    """Return the answer of a study, which may be that there is none yet."""
    outcome = material.outcome
    if outcome is None:
        failure, resume = material.failure, (f"autotune resume {shlex.quote(material.typed)}",)
        so_far = best_so_far_line(material.trials, material.spec) or "No trial has ended yet."
        if failure is None:
            return StudyAnswer("This study is not finished, so nothing is promised.", (so_far,), shell=resume)
        advice = full_stop(failure.advice) if failure.advice else None
        headline = f"The search ended with an error, so nothing is promised: {full_stop(failure.message)}"
        return StudyAnswer(headline, tuple(filter(None, (advice, so_far))), shell=resume)
    verdict, headline = verdict_on(outcome, material.trials), headline_of(outcome)
    commands = next_commands(outcome, material.folder)
    if outcome.found in (Finding.OPEN, Finding.KEEP):
        limit = limit_line(outcome) if outcome.found is Finding.KEEP else None
        return StudyAnswer(
            headline,
            tuple(filter(None, (verdict.advice,))),
            (("limit now", limit),) if limit else (),
            tuple(commands[:1]) if outcome.again else (),
        )
    best, knobs_gave = _promised(outcome), knobs_line(outcome)
    own_batch = batch_of(outcome.baseline.config)
    own_name = f"at batch {own_batch}" if own_batch != batch_of(outcome.best.config) else "as it is"
    rows = [
        ("how", describe(best.config, outcome.baseline.config)),
        ("ranks", RANKS.format(outcome.ranks) if outcome.ranks > 1 else None),
        ("required", required_line(outcome)),
        *saved(outcome, best, material),
        ("checked", proof_line(outcome, best)),
        ("limit now", limit_line(outcome, best)),
        ("changes", verdict.best.consequence if best is outcome.best else verdict.own.consequence),
        (own_name, None if verdict.one_winner else _own(verdict, outcome.unit)),
        ("each knob", knobs_gave and knobs_gave.removeprefix("What gave it: ")),
    ]
    profile = one_line(str(profile_path(outcome, material.folder)))
    # The user's own training loop then calls ``step(batch)``.
    python = (
        "import autotune",
        f"profile = autotune.load_profile({profile!r})",
        "loader, step = profile.prepare(model, optimizer, dataset, loss, shuffle=True)",
    )
    return StudyAnswer(
        headline,
        tuple(filter(None, (verdict.likely,))),
        tuple((name, text) for name, text in rows if text),
        tuple(commands[: 2 if outcome.again else 1]),
        () if outcome.command else python,
    )


def _own(verdict: SearchVerdict, unit: str) -> str:
    """Return the best configuration that keeps the training as it is, as a sentence."""
    own: Won = verdict.own
    if own.is_baseline:
        return "Nothing was shown to be faster than the baseline."
    standing = own.standing
    shown = "" if own.shown else ", not shown to be faster"
    return (
        f"{gain_words((standing.speedup, *standing.speedup_ci95))}{shown}: "
        f"{rate_text(standing.samples_per_second)} {unit}, as trial {own.label}."
    )


def answer_section(answer: StudyAnswer) -> Section:
    parts: list[Part] = [Paragraph(answer.headline, strong=True), *paragraphs(*answer.more)]
    parts += [Facts(answer.rows)] if answer.rows else []
    parts += [Commands(answer.shell)] if answer.shell else []
    parts += [Commands(answer.python, "python")] if answer.python else []
    return Section("Answer", tuple(parts))


def leave_page(files: StudyFiles, outcome: Outcome, typed: str) -> str | None:
    """Write ``report.html``; return an error message, or ``None``. Never raises: the search itself has succeeded.

    Args:
        typed: the study as a command-line argument, relative to the current folder.
    """
    try:
        material = read_material(files, outcome, typed=typed, folder=Path.cwd())
        write_atomic(files.report, to_html(report_on(material)))
    except Exception as error:
        # An existing report describes an earlier outcome.
        with contextlib.suppress(OSError):
            files.report.unlink(missing_ok=True)
        return f"the report could not be written: {one_line(str(error)) or type(error).__name__}"
    return None


# The full report of a study: request, verdict, evidence, costs, and the next commands.


def report_on(material: Material) -> Document:
    """Return the full report of a study, for a reader who did not follow the search.

    The report of an unfinished study has only the sections for which there are results. Checks that were not made, or
    that an older version did not record, are reported as missing or omitted.
    """
    outcome = material.outcome
    sections = [answer_section(answer_of(material)), *pictures(material)]
    if outcome is None:
        sections += best_so_far(material)
    else:
        sections += [
            *_verdict(outcome, material),
            finalists(outcome, material),
            *limits(outcome, material.trials),
            *epochs(outcome, material),
            *knobs(outcome),
            *trains(outcome),
            *delivers(outcome),
            *holds(outcome),
        ]
    baseline = outcome.baseline.config if outcome else next((t.config for t in material.trials), None)
    sections += [*heats(material.heats, baseline), *failures(material)]
    if outcome is not None:
        if outcome.left is not None:
            left = left_text(outcome.left, outcome.own_folders)
            sections.append(Section("Files left behind", paragraphs(left)))
        sections += ledger(outcome)
    sections += [_asked(material), *machine(material)]
    typed = shlex.quote(material.typed)
    if outcome is None:
        commands = [f"autotune resume {typed}", f"autotune show {typed}"]
    else:
        if material.profile is not None:
            rows = tuple((name, spell(value)) for name, value in material.profile.configuration.items())
            sections.append(Section("The profile", (Facts(rows),)))
        sections += where_it_holds(material)
        commands = [c for c in next_commands(outcome, material.folder) if not c.startswith("autotune report")]
        report = f"autotune report {typed} -o {shlex.quote(f'{material.name}.md')}"
        commands = list(dict.fromkeys([*commands, f"autotune show {typed}", report]))
    sections.append(Section("Next", (Commands(tuple(commands)),)))
    return Document(title=title_of(material), sections=tuple(sections))


def title_of(material: Material) -> str:
    """Return a title that says what was trained on which device, and names the study."""
    outcome, probe = material.outcome, material.probe
    device = outcome.device_name if outcome else probe.device_name if probe else material.device
    size = outcome.image_size if outcome else material.image_size
    return (
        f"{model_name(material.spec.model)} on {device}{'' if size is None else f', {size} px'}: study {material.name}"
    )


def _asked(material: Material) -> Section:
    spec, outcome, probe = material.spec, material.outcome, material.probe
    device, size = material.device, outcome.image_size if outcome else material.image_size
    name = outcome.device_name if outcome else probe.device_name if probe else ""
    names = {"torch": "torch", "torchvision": "torchvision", "CUDA": "cuda", "cuDNN": "cudnn", "Python": "python"}
    versions = {} if probe is None else {n: getattr(probe, f"{field}_version") for n, field in names.items()}
    return Section(
        "What was asked",
        facts(
            ("command", Verbatim(command_of(spec))),
            ("begun", spec.created[:16].replace("T", " ")),
            ("device", device if name in ("", device) else f"{name} ({device})"),
            ("image size", None if size is None else f"{size} px"),
            ("data", _data(material)),
            ("software", ", ".join(f"{n} {version}" for n, version in versions.items() if version)),
            ("objective", None if spec.objective == "throughput" else spec.objective),
            ("search", _search(material)),
            *_tried(material),
            ("predictions", predictions_line(material.trials)),
        ),
    )


def _data(material: Material) -> str:
    data = material.data or DataRef(kind=material.spec.data)
    kinds = {"none": "the workload's own", "synthetic": "synthetic, made on the device's side of the loader"}
    text = kinds.get(data.kind, data.kind)
    if data.path is not None:
        text += f", {data.path}"
    if data.store is not None:
        text += f", behind a slow store that was put there ({data.store.words})"
    cache = (material.outcome.page_cache if material.outcome else None) or data.page_cache
    states = {
        "warm": "page cache warm, all files had been read before the first launch",
        "cold": "page cache cold, files may have come from the disk",
        "unknown": "whether its files came from the page cache or the disk is not known",
    }
    return text if cache is None else f"{text}; {states.get(cache, cache)}"


def _search(material: Material) -> str:
    outcome, spec = material.outcome, material.spec
    if outcome is None:
        spent = "" if material.spent_s is None else f", {seconds_text(material.spent_s)} used"
        return (
            f"not finished; {count(len(material.trials), 'trial')}{spent} of a budget of {seconds_text(spec.budget_s)}"
        )
    data = f"; making the data took {seconds_text(outcome.data_s)} before" if outcome.data_s >= 1 else ""
    return (
        f"{count(sum(outcome.trials.values()), 'trial')} ({counts_text(outcome.trials)}) in "
        f"{seconds_text(outcome.elapsed_s)} of a budget of {seconds_text(spec.budget_s)}; {outcome.stopped.rstrip('.')}"
        f"{data}"
    )


def _tried(material: Material) -> list[tuple[str, str | None]]:
    """Return how many values of each knob were tried, and which knobs had the same value in all trials.

    A value that was not tried, for lack of time or of expected gain, is not known to be slower.
    """
    configs = [
        t.config for t in material.trials if t.result.status is not TrialStatus.INTERRUPTED and not t.result.transient
    ]
    configs += [e.config for h in material.heats for e in h.heat.entrants if e.status is not TrialStatus.INTERRUPTED]
    varied, same = [], []
    for name, values in material.choices.items():
        used = {spell(config[name]) for config in configs if name in config}
        if len(values) > 1 and len(used) > 1:
            varied.append(f"{name} {len(used.intersection(values))} of {len(values)}")
        elif len(values) > 1:
            same.append(name)
    if not configs:
        return []
    return [("values tried", " · ".join(varied) or None), ("never varied", ", ".join(same) or None)]


def _verdict(outcome: Outcome, material: Material) -> list[Section]:
    """Return the verdict with every figure that supports it, as a section; empty if there is nothing to add."""
    verdict = verdict_on(outcome, material.trials)
    best, own, dropped = verdict.best, verdict.own, paragraphs(*verdict.dropped)
    if verdict.nothing_faster is not None:
        return [Section("Verdict", dropped)] if dropped else []
    # Another objective, or a requirement that the baseline does not meet, may select a slower configuration.
    by_rate = material.spec.objective == "throughput" and best.standing.speedup >= 1
    chosen = "fastest" if by_rate else "best"
    title = "What is likely the fastest" if verdict.likely else f"The {chosen}"
    parts: list[Part] = [Paragraph(_winner_sentence(title, best, outcome))]
    at_own = f"{verdict.own_title[0].upper()}{verdict.own_title[1:]}"
    if verdict.one_winner:
        parts += paragraphs(f"That is {verdict.own_title}. {best.consequence}")
    elif own.is_baseline:
        parts += paragraphs(best.consequence, f"{at_own} nothing was shown to be faster than the baseline.")
    else:
        fastest = _winner_sentence(f"{at_own} the {chosen}", own, outcome)
        parts += paragraphs(best.consequence, f"{fastest} {own.consequence}")
    parts += paragraphs(verdict.likely, verdict.tie, verdict.cautions, verdict.break_even, *verdict.edges)
    return [Section("Verdict", (*parts, *dropped))]


def _winner_sentence(title: str, won: Won, outcome: Outcome) -> str:
    standing, baseline, evidence = won.standing, outcome.baseline, outcome.evidence
    doubt = "" if won.shown else " That is not shown to be faster."
    if evidence is not None and not won.is_baseline:
        rest = one_line(evidence)
    elif standing.verified:
        base = " of each" if baseline.launches == standing.launches else f" and {baseline.launches} of the baseline"
        rest = f"{count(standing.launches, 'fresh launch', 'fresh launches')}{base}, in turns"
    else:
        rest = "the search's own launch, whose figure is too good on average because it was chosen for it"
    return (
        f"{title} is trial {won.label}, {describe(standing.config, baseline.config)}: "
        f"{rate_text(standing.samples_per_second, standing.ci95)} {outcome.unit}, "
        f"{ratio_text(standing.speedup, standing.speedup_ci95)} the baseline's "
        f"{rate_text(baseline.samples_per_second, baseline.ci95)} "
        f"(95 %: {interval_text(standing.speedup_ci95)}), from {rest}.{doubt}"
    )


# The report at a glance: the answer, the baseline beside the winner, and the next commands; at most a terminal screen.
#
# As Markdown, it is the description of a pull request that adopts the profile.

#: Lines of a terminal; few have fewer.
LINES = 24
#: Rows of an answer that are dropped last, and in this order, if there is no room for them: nobody should paste a
#: command without having read what it changes.
GIVES_WAY = ("limit now", "costs", "saves", "how", "checked", "changes")
#: The same if the user asked for the time and cost of a whole training.
GIVES_WAY_ASKED = ("limit now", "how", "checked", "costs", "saves", "changes")


def short_report_on(material: Material, *, lines: int | None = LINES, width: int = FILE_WIDTH) -> Document:
    """Return the short report of a study, finished or not. `report_on` has whatever does not fit.

    Args:
        lines: maximum height on a terminal; ``None`` for no limit. width: of the terminal, in columns.
    """
    answer = answer_of(material)
    rows = list(answer.rows)
    order = GIVES_WAY if whole_training(material) is None else GIVES_WAY_ASKED
    document = _document(material, answer, rows)
    while lines is not None and rows and len(to_text(document, width).splitlines()) > lines:
        rows.remove(min(reversed(rows), key=lambda row: order.index(row[0]) if row[0] in order else -1))
        document = _document(material, answer, rows)
    return document


def _document(material: Material, answer: StudyAnswer, rows: list[tuple[str, str]]) -> Document:
    outcome = material.outcome
    parts: list[Part] = [Paragraph(answer.headline, strong=True), *paragraphs(*answer.more)]
    if outcome is not None:
        standings: dict[str, Standing] = {}
        for standing in (outcome.baseline, outcome.best, outcome.best_same_batch):
            standings.setdefault(key(standing.config), standing)
        titles = map(Column, (outcome.unit, "speedup", "95 %", "peak memory", "launches"))
        cells = tuple(_row(outcome, standing, material) for standing in standings.values())
        parts.append(Grid((Column("", Kind.WORD), *titles), cells))
    parts += [Facts(tuple(rows))] if rows else []
    parts.append(Commands((*answer.shell, f"autotune report {shlex.quote(material.typed)} --full")))
    return Document(title_of(material), (Section("", tuple(parts)),))


def _row(outcome: Outcome, standing: Standing, material: Material) -> tuple[str, ...]:
    is_baseline = standing is outcome.baseline
    is_winner = key(standing.config) == key(outcome.best.config) and outcome.found in (Finding.FASTER, Finding.LIKELY)
    trial = f"trial {label_of(standing, material.trials)}"
    role = "likely" if outcome.evidence else "winner"
    name = "baseline" if is_baseline else f"{role}, {trial}" if is_winner else trial
    return (
        name,
        rate_text(standing.samples_per_second, standing.ci95),
        *(("1.00×", "-") if is_baseline else gain_text((standing.speedup, *standing.speedup_ci95))),
        memory_text(standing.peak_memory_bytes),
        str(standing.launches) if standing.verified else "1, not in turns",
    )


# The table at the end of a search, and the text under it.

#: Minimum number of complete configurations in the table besides the baseline, and maximum number of failures.
TOP, FAILURES = 5, 3
#: Failures that the configuration itself caused. They are shown first; the others follow by trial number.
_NOTABLE = (TrialStatus.OOM, TrialStatus.HOST_OOM, TrialStatus.COMPILE_FAILED, TrialStatus.DIVERGED)


def best_table(outcome: Outcome, trials: Sequence[Trial], folder: PurePath | None = None) -> RenderableType:
    """Return the summary of a search: the best trials against the baseline, winners, evidence and next commands.

    Args:
        folder: the reader's current folder, absolute. Paths below it are shown relative to it.
    """
    baseline, verdict = outcome.baseline, verdict_on(outcome, trials)
    # Dropped finalists are listed below the table, where their rates cannot be mistaken for a winner's.
    ranked = [s for s in standings(outcome) if not is_out(outcome, s)]
    table = new_table("trial", "optimization", outcome.unit, "speedup", "peak\nmemory", "status")
    winners = [c for c in (outcome.best.config, outcome.best_same_batch.config) if c != baseline.config]
    for standing in ranked:
        is_baseline = standing is baseline
        # One launch in turns with the baseline's proves nothing.
        in_turns = f"verified ×{standing.launches}" if standing.launches > 1 else "in turns, once"
        table.add_row(
            label_of(standing, trials),
            Text(
                f"baseline: {settings(baseline.config)}" if is_baseline else describe(standing.config, baseline.config)
            ),
            rate_text(standing.samples_per_second, standing.ci95),
            ratio_text(standing.speedup),
            memory_text(standing.peak_memory_bytes),
            "likely"
            if outcome.evidence and standing.config in winners
            else in_turns
            if standing.verified
            else "complete",
            style="bold green" if standing.config in winners else "",
        )
    listed = {s.trial for s in ranked} | outcome.dropped.keys()
    scored = [t for t in trials if t.score is not None and t.number not in listed]
    others = sorted(scored, key=lambda t: t.score or 0.0, reverse=True)[: max(0, TOP + 1 - len(ranked))]
    for trial in others + _notable_failures(trials):
        complete = trial.result.status is TrialStatus.COMPLETE
        table.add_row(
            str(trial.number),
            Text(describe(trial.config, baseline.config)),
            trial_rate_text(trial),
            # Its launch and the baseline's ran at different times, so there is no ratio to state.
            "",
            memory_text(trial_peak_bytes(trial)),
            status_cell(trial.result.status),
            style="" if complete else "dim",
        )
    size = "" if outcome.image_size is None else f", {outcome.image_size} px"
    title = Text(f"{model_name(outcome.model)} on {one_line(outcome.device_name)}{size}", style="bold")
    has_winner = outcome.found in (Finding.FASTER, Finding.LIKELY)
    answer = [Text(headline_of(outcome), style="bold"), Text()] if has_winner else []
    # The evidence for the winner and against the others, one line per check that was made.
    evidence = (proof_line(outcome), limit_line(outcome), knobs_line(outcome), *verdict.edges, verdict.tie)
    because = [Text(line) for line in (*evidence, *verdict.dropped) if line]
    parts = (
        title,
        *answer,
        table,
        _notes(outcome, ranked),
        Text(),
        *_winners(verdict, outcome),
        *([Text(), *because] if because else []),
        Text(),
        *_closing(outcome, trials, folder),
    )
    return Group(*(Line(part) if isinstance(part, Text) else part for part in parts))


def _notable_failures(trials: Sequence[Trial]) -> list[Trial]:
    """Return, for each failure status, the trial with the smallest batch: it shows where the limit lies."""
    smallest: dict[TrialStatus, Trial] = {}
    for trial in trials:
        status = trial.result.status
        if status in (TrialStatus.COMPLETE, TrialStatus.PRUNED, TrialStatus.INTERRUPTED):
            continue
        if status not in smallest or batch_of(trial.config) < batch_of(smallest[status].config):
            smallest[status] = trial
    rank = {status: i for i, status in enumerate(_NOTABLE)}
    notable = sorted(smallest.values(), key=lambda t: (rank.get(t.result.status, len(rank)), t.number))
    return notable[:FAILURES]


def _notes(outcome: Outcome, ranked: Sequence[Standing]) -> Text:
    notes = []
    if any(s.verified for s in ranked):
        notes.append(
            "verified ×N: N fresh launches, in turns with the baseline's. Other rows rest on one each, at another "
            "moment, so their speedup is not known."
        )
    notes.append(f"Peak memory is the {one_line(outcome.memory_is)}'s.")
    if outcome.ranks > 1:
        notes.append(RANKS.format(outcome.ranks))
    if outcome.require:
        notes.append(f"Required: {required_line(outcome)}")
    if outcome.objective != "throughput":
        notes.append(f"Ordered by the objective {one_line(outcome.objective)}.")
    if outcome.allow_busy:
        notes.append(BUSY_ALLOWED)
    if outcome.page_cache == "cold":
        notes.append("The data does not fit into the page cache: its files may have come from the disk.")
    return Text(" ".join(notes), style="dim")


def _winners(verdict: SearchVerdict, outcome: Outcome) -> list[RenderableType]:
    if verdict.nothing_faster is not None:
        text = Text(verdict.nothing_faster, style="bold yellow")
        return [text.append(f" {verdict.advice}", style="not bold default")]
    best, own = verdict.best, verdict.own
    if verdict.one_winner:
        title = "Likely best" if verdict.likely else "Best"
        lines = _winner_lines(f"{title}, overall and {verdict.own_title}", best, outcome)
    elif own.is_baseline:
        itself: RenderableType = Text.assemble((f"Best {verdict.own_title}: ", "bold"), "the baseline itself.")
        lines = [itself, *_winner_lines("Best overall", best, outcome)]
    else:
        lines = [
            *_winner_lines(f"Best {verdict.own_title}", own, outcome),
            *_winner_lines("Best overall", best, outcome),
        ]
    more = [Text(verdict.likely, style="yellow")] if verdict.likely else []
    return [*lines, *more, *([Text(verdict.break_even)] if verdict.break_even else [])]


def _winner_lines(title: str, won: Won, outcome: Outcome) -> list[RenderableType]:
    standing, baseline = won.standing, outcome.baseline
    text = Text(f"{title}: ", style="bold")
    text.append(describe(standing.config, baseline.config), style="green")
    speedup = ratio_text(standing.speedup, standing.speedup_ci95)
    figures = f"{rate_text(standing.samples_per_second, standing.ci95)} {outcome.unit}, {speedup}"
    text.append(f", {figures} the baseline (95 %: {interval_text(standing.speedup_ci95)})", style="not bold")
    if not won.shown:
        text.append("; not shown to be faster than the baseline", style="yellow")
    return [text, Line(won.consequence, 4)]


def _closing(outcome: Outcome, trials: Sequence[Trial], folder: PurePath | None) -> list[RenderableType]:
    windows = f"of which {seconds_text(outcome.measured_s)} inside kept windows"
    spent = [
        full_stop(outcome.stopped),
        ledger_line(outcome.ledger) or f"{seconds_text(outcome.elapsed_s)} of searching, {windows}.",
        f"Making the data took {seconds_text(outcome.data_s)} before that." if outcome.data_s >= 1 else "",
        f"Waiting for a quiet device took {seconds_text(outcome.wait_s)} more." if outcome.wait_s >= 1 else "",
    ]
    profile = profile_path(outcome, folder)
    profile_label = "Profile of the baseline" if outcome.found is Finding.KEEP else "Profile"
    files = [] if outcome.profile is None else [(profile_label, profile)]
    report = StudyFiles(Path(study_folder(outcome))).report
    if report.is_file():
        files.append(("Report", profile.with_name(report.name)))
    # Trials that other processes on the machine spoiled.
    given_up = [t.result for t in trials if t.result.status is TrialStatus.INTERRUPTED and t.result.transient]
    disturbed: list[Text] = []
    if given_up:
        cause, advice = one_line(given_up[-1].cause or "").partition(";")[0], full_stop(given_up[-1].advice or "")
        sentence = f"{count(len(given_up), 'trial')} given up because {cause}. {advice}"
        disturbed = [Text(sentence.rstrip(), style="yellow")]
    return [
        Text(f"{count(sum(outcome.trials.values()), 'trial')}: {counts_text(outcome.trials)}."),
        *disturbed,
        Text(" ".join(filter(None, spent))),
        Text(),
        *(Line(Text.assemble((f"{label}: ", "bold"), one_line(str(file))), verbatim=True) for label, file in files),
        Text("Next:", style="bold"),
        *(Line(command, 2, verbatim=True) for command in next_commands(outcome, folder)),
    ]


# A report as one JSON object: the outcome's figures as numbers, and the report's sections as they are printed.
#
# ``{"schema_version", "study", "state", "title", "answer", "training", "outcome", "sections"}``, as docs/json.md shows.
# ``state`` is ``done``, ``failed`` or ``unfinished``; ``outcome`` is the object that ``autotune search --json`` prints,
# or null if the search is not done. ``sections`` is a list of ``{"title", "parts"}``. The ``kind`` of a part determines
# its other keys:
#
# ============= ============================================================
# ``paragraph`` ``text``, and ``strong`` if it holds the main result
# ``facts``     ``rows`` of a name and a value
# ``table``     ``columns`` (names), and ``rows`` of as many texts
# ``curves``    ``rows`` of ``{"name", "values"}``; a value that is not finite is null
# ``picture``   ``title``, ``about`` (in words), ``plot``
#               (`autotune.report.drawing`, and its ``kind``), ``table`` or null
# ``commands``  ``lines`` to type or paste, and their ``language``
# ``links``     ``rows`` of a name and a target
# ============= ============================================================


def to_json(material: Material, document: Document) -> dict[str, Any]:
    """Return the report as an object for ``json.dumps``.

    Args:
        document: the report of this material, from `report_on`.
    """
    outcome, answer = material.outcome, answer_of(material)
    return {
        "schema_version": SCHEMA_VERSION,
        "study": material.name,
        "state": "done" if outcome else "failed" if material.failure else "unfinished",
        "title": document.title,
        "answer": {**asdict(answer), "rows": [{"name": name, "text": text} for name, text in answer.rows]},
        "training": None if outcome is None else _training(outcome, material),
        "outcome": outcome and outcome.model_dump(mode="json"),
        "sections": [{"title": s.title, "parts": [_json_part(part) for part in s.parts]} for s in document.sections],
    }


def _training(outcome: Outcome, material: Material) -> dict[str, Any] | None:
    whole = whole_training(material)
    if whole is None:
        return None
    names = {"baseline": outcome.baseline, "best": outcome.best, "best_same_batch": outcome.best_same_batch}
    seconds = {f"{name}_s": whole_training_s(outcome, standing, whole) for name, standing in names.items()}
    return {"samples": whole.samples, **seconds, "price_per_hour": material.spec.price_per_hour}


def _json_part(part: Part) -> dict[str, Any]:
    match part:
        case Grid():
            titles = [" ".join(column.title.split()) for column in part.columns]
            return {"kind": "table", "columns": titles, "rows": [list(row) for row in part.rows]}
        case Curves():
            return {"kind": "curves", "rows": [{"name": n, "values": _plain(values)} for n, values in part.rows]}
        case Picture():
            plot = {"kind": type(part.plot).__name__.lower(), **_plain(asdict(part.plot))}
            instead = None if part.instead is None else _json_part(part.instead)
            return {"kind": "picture", "title": part.title, "about": part.about, "plot": plot, "table": instead}
        case _:
            return {"kind": type(part).__name__.lower(), **_plain(asdict(part))}


def _plain(value: Any) -> Any:
    """Convert a value from a dataclass for JSON: tuples to lists, non-finite numbers to null."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
