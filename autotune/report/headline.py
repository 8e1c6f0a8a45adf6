"""The answer of a study, finished or not: its headline, one sentence, and what goes with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.base.records import Finding, Outcome, Standing, StudySpec, Trial
from autotune.report.document import Column, Commands, Facts, Grid, Kind, Paragraph, Part, Section, paragraphs
from autotune.report.material import Material
from autotune.report.sections import saved
from autotune.report.sentences import (
    NO_VERDICT,
    NOTHING_FASTER,
    RANKS,
    SearchVerdict,
    Won,
    batch_of,
    by_gain,
    full_stop,
    gain_text,
    knobs_line,
    limit_line,
    next_commands,
    profile_path,
    proof_line,
    required_line,
    unchecked,
    verdict_on,
)
from autotune.space import key
from autotune.space.formatting import (
    describe,
    memory_text,
    one_line,
    phrase,
    rate_text,
    ratio_text,
    settings,
    trial_peak_bytes,
    trial_rate_text,
    unit_of,
)
from autotune.space.requirements import Requirements

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
    rows = []
    for trial in listed:
        is_base = key(trial.config) == key(baseline.config)
        rows.append(
            (
                str(trial.number),
                f"baseline: {settings(trial.config)}" if is_base else describe(trial.config, baseline.config),
                trial_rate_text(trial),
                memory_text(trial_peak_bytes(trial)),
            )
        )
    columns = (
        Column("trial"),
        Column("configuration", Kind.TEXT),
        Column(unit_of(material.trials)),
        Column("peak\nmemory"),
    )
    return [Section("The best so far", (Grid(columns, tuple(rows)),))]


# What a reader wants to know first: the answer in one sentence, what it saves, what to paste, and the current limit.

#: Knobs whose gains the headline names.
NAMED = 3


@dataclass(frozen=True)
class StudyAnswer:
    """The answer of a study.

    Attributes:
        headline: one sentence.
        more: sentences that go with it: reasons, and advice if nothing is promised.
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
        return f"{NOTHING_FASTER.rstrip('.')}, {baseline} {outcome.unit}."
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
        return _unfinished(material)
    verdict, headline = verdict_on(outcome, material.trials), headline_of(outcome)
    if outcome.found in (Finding.OPEN, Finding.KEEP):
        rows = [("limit now", limit_line(outcome))] if outcome.found is Finding.KEEP else []
        commands = next_commands(outcome, material.folder)
        return StudyAnswer(
            headline,
            tuple(filter(None, (verdict.advice,))),
            _known(rows),
            tuple(commands[:1]) if outcome.again else (),
        )
    best = _promised(outcome)
    knobs = knobs_line(outcome)
    rows = [
        ("how", describe(best.config, outcome.baseline.config)),
        ("ranks", RANKS.format(outcome.ranks) if outcome.ranks > 1 else None),
        ("required", required_line(outcome)),
        *saved(outcome, best, material),
        ("checked", proof_line(outcome, best)),
        ("limit now", limit_line(outcome, best)),
        ("changes", verdict.best.consequence if best is outcome.best else verdict.own.consequence),
        (_own_name(outcome), None if verdict.one_winner else _own(verdict, outcome.unit)),
        ("each knob", knobs and knobs.removeprefix("What gave it: ")),
    ]
    profile = one_line(str(profile_path(outcome, material.folder)))
    return StudyAnswer(
        headline,
        tuple(filter(None, (verdict.likely,))),
        _known(rows),
        tuple(next_commands(outcome, material.folder)[: 2 if outcome.again else 1]),
        () if outcome.command else python_lines(profile),
    )


def python_lines(profile: str) -> tuple[str, ...]:
    """Return the lines that apply a profile in the user's own training loop, which then calls ``step(batch)``."""
    return (
        "import autotune",
        f"profile = autotune.load_profile({profile!r})",
        "loader, step = profile.prepare(model, optimizer, dataset, loss, shuffle=True)",
    )


def _known(rows: Sequence[tuple[str, str | None]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, text) for name, text in rows if text)


def _own_name(outcome: Outcome) -> str:
    baseline_batch = batch_of(outcome.baseline.config)
    return f"at batch {baseline_batch}" if baseline_batch != batch_of(outcome.best.config) else "as it is"


def _own(verdict: SearchVerdict, unit: str) -> str:
    """Return the best configuration that keeps the training as it is, as a sentence."""
    own: Won = verdict.own
    if own.is_baseline:
        return "Nothing was shown to be faster than the baseline."
    standing = own.standing
    shown = "" if own.shown else ", not shown to be faster"
    return (
        f"{ratio_text(standing.speedup, standing.speedup_ci95)} ({_between(standing)}){shown}: "
        f"{rate_text(standing.samples_per_second)} {unit}, as trial {own.label}."
    )


def _unfinished(material: Material) -> StudyAnswer:
    failure, resume = material.failure, (f"autotune resume {shlex.quote(material.typed)}",)
    so_far = best_so_far_line(material.trials, material.spec) or "No trial has ended yet."
    if failure is not None:
        advice = full_stop(failure.advice) if failure.advice else None
        headline = f"The search ended with an error, so nothing is promised: {full_stop(failure.message)}"
        return StudyAnswer(headline, tuple(filter(None, (advice, so_far))), shell=resume)
    return StudyAnswer("This study is not finished, so nothing is promised.", (so_far,), shell=resume)


def answer_section(answer: StudyAnswer) -> Section:
    """Return an answer as the first section of a report."""
    parts: list[Part] = [Paragraph(answer.headline, strong=True), *paragraphs(*answer.more)]
    parts += [Facts(answer.rows)] if answer.rows else []
    parts += [Commands(answer.shell)] if answer.shell else []
    parts += [Commands(answer.python, "python")] if answer.python else []
    return Section("Answer", tuple(parts))
