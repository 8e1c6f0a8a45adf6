"""The configurations of a study ranked again, without launching anything, and a profile of any of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from autotune.base.errors import InfeasibleError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import (
    FIGURES,
    Config,
    Figure,
    Finding,
    LaunchKind,
    Measurement,
    NotScored,
    Outcome,
    Standing,
    StudySpec,
    TrialStatus,
)
from autotune.knobs.compile_mode import compiles
from autotune.profile import Profile, read
from autotune.samplers import cold_compiles, graph
from autotune.search.study_folders import study_argument
from autotune.space import key
from autotune.space.formatting import count, describe, unmet_text
from autotune.space.requirements import Requirements, figure_of
from autotune.study.history import read_launches
from autotune.study.tables import read_heats, read_trials
from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer

#: Prefixes of the names of launches that were made in turns (`autotune.search.proof.race`).
_IN_TURNS = ("verify", "narrow", "simpler", "ablate")


@dataclass(frozen=True)
class Ranked:
    """One configuration of a study.

    Attributes:
        trial: number of its trial; if there are several, of the first. derived: it is that trial with some knobs set
            back by the proof.
        launches: number of launches that the figures are based on. in_turns: they were made after the search, in turns
            with the baseline. Otherwise the figures come from the search's own launches, and are too good on average
            if the configuration was selected by them.
        score: the mean over the launches, each with the compile time of a cold cache.
        samples_per_s: the mean over the launches. start_s: seconds from the launch to the end of the first step.
        figures: by name, without those that are unknown or need something that was not stated.
        out: why it cannot be chosen, as a clause: the proof dropped it, it does not meet the requirements, or it is too
            slow for an objective that chooses among the fastest; ``None`` if it can be.
        overtakes_after: the step from which a compiled configuration is ahead of the fastest eager one, start-up and
            compiling included; ``None`` if it never is, or if it is eager.
    """

    config: Config
    trial: int
    launches: int
    in_turns: bool
    score: float
    samples_per_s: float
    start_s: float
    figures: Mapping[str, float]
    derived: bool = False
    out: str | None = None
    overtakes_after: int | None = None


@dataclass(frozen=True)
class Ranking:
    """The configurations of a study, best first; those that cannot be chosen come last.

    Attributes:
        objective: its name. unit: of its scores. figure: the one that users are shown instead; ``None`` if that is the
            score.
        unscored: the trials that are left out, because none of their launches has everything that the objective takes.
        rate_unit: the unit of rates.
    """

    objective: str
    unit: str
    figure: str | None
    baseline: Config
    rows: tuple[Ranked, ...]
    unscored: tuple[int, ...] = ()
    rate_unit: str = FIGURES["throughput"].unit

    @property
    def best(self) -> Ranked:
        """The best choice."""
        return self.rows[0]


def rank(files: StudyFiles, spec: StudySpec, outcome: Outcome | None) -> Ranking:
    """Rank the measured configurations of a study.

    Args:
        spec: the study's request, with the objective, the goal and the requirements to rank by.
        outcome: ``None`` if the study is not finished.

    Raises:
        UsageError: nothing was measured yet, or the objective needs something that was not stated or not measured.
        InfeasibleError: nothing meets the requirements; the advice names the nearest configuration.
    """
    measured = _seen(files, outcome)
    if not measured:
        raise UsageError(f"{files.name} has no measured trial yet", advice="finish it with `autotune resume`.")
    required = Requirements.parsed(spec.require, spec.goal)
    with closing(Scorer(find_objective(spec.objectives[0]), goal=spec.goal)) as scorer:
        scorer.check()
        facts = scorer.facts
        ranked = [(entry.trial, _ranked(entry, scorer, required, outcome)) for entry in measured]
        rows = [row for _, row in ranked if row is not None]
        if not rows:
            scorer.score(measured[0].measurements[0])
    if facts.rate_within:
        rows = _among_the_fastest(rows, facts.rate_within)
    rows = _with_overtaking(rows, spec.ranks)
    rows.sort(key=lambda row: (row.out is not None, -row.score))
    if rows[0].out is not None:
        raise _nothing_fits(measured, required, rows)
    unscored = tuple(trial for trial, row in ranked if row is None)
    rate_unit = measured[0].measurements[0].unit
    unit = rate_unit if facts.unit == FIGURES["throughput"].unit else facts.unit
    return Ranking(spec.objectives[0], unit, facts.figure, measured[0].config, tuple(rows), unscored, rate_unit)


def pareto(rows: Sequence[Ranked], figures: Sequence[Figure]) -> list[Ranked]:
    """Return the choices that no other one dominates, by being at least as good in all figures and better in one; the
    best in the first figure comes first.

    Raises:
        UsageError: a figure is not known for any configuration.
    """
    for figure in figures:
        if not any(figure.name in row.figures for row in rows):
            raise UsageError(f"{figure.name} is not known of any configuration of this study")
    choices = [row for row in rows if row.out is None and all(figure.name in row.figures for figure in figures)]

    def worth(row: Ranked) -> tuple[float, ...]:
        return tuple(row.figures[f.name] * (1 if f.more_is_better else -1) for f in figures)

    front = [
        row
        for row in choices
        if not any(
            worth(other) != worth(row) and all(a >= b for a, b in zip(worth(other), worth(row), strict=True))
            for other in choices
        )
    ]
    return sorted(front, key=worth, reverse=True)


@dataclass(frozen=True)
class _Seen:
    """The measurements of one configuration."""

    config: Config
    trial: int
    in_turns: bool
    derived: bool
    measurements: tuple[Measurement, ...]


def _seen(files: StudyFiles, outcome: Outcome | None) -> list[_Seen]:
    """Return the measurements of each configuration, the baseline first, in the order of the trials."""
    trials = [t for t in read_trials(files) if t.result.status is TrialStatus.COMPLETE and t.result.measurement]
    cold_s = cold_compiles(trials, [h.heat for h in read_heats(files)])
    from_turns: dict[str, list[Measurement]] = {}
    for launch, result in read_launches(files):
        after_search = launch.number is None and launch.kind is LaunchKind.MEASURE
        if after_search and launch.launch.startswith(_IN_TURNS) and result.status is TrialStatus.COMPLETE:
            from_turns.setdefault(key(launch.config), []).extend([result.measurement] if result.measurement else [])
    configs: dict[str, tuple[Config, int, bool]] = {}
    for trial in trials:
        configs.setdefault(key(trial.config), (trial.config, trial.number, False))
    for standing in () if outcome is None else (outcome.best, outcome.best_same_batch):
        configs.setdefault(key(standing.config), (standing.config, standing.trial, True))
    first_epochs = {} if outcome is None else {b.trial: b.cold_per_s[0] for b in outcome.bottlenecks if b.cold_per_s}
    measured = []
    for name, (config, number, derived) in configs.items():
        from_trials = [m for t in trials if key(t.config) == name and (m := t.result.measurement) is not None]
        compile_s = max(
            [cold_s.get(graph(config), 0.0), *(m.compile_s for m in (*from_trials, *from_turns.get(name, [])))]
        )
        # Where the first epoch was not measured, it is assumed to be no slower than any that was.
        cold = first_epochs.get(number, max(first_epochs.values(), default=None))
        update = {"compile_s": compile_s, "cold_per_s": cold}
        measurements = tuple(m.model_copy(update=update) for m in from_turns.get(name) or from_trials)
        if measurements:
            measured.append(_Seen(config, number, name in from_turns, derived, measurements))
    return measured


def _ranked(one: _Seen, scorer: Scorer, required: Requirements, outcome: Outcome | None) -> Ranked | None:
    scores = [score for m in one.measurements if (score := scorer.known(m)) is not None]
    if not scores:
        return None
    figures = {}
    for name, figure in FIGURES.items():
        try:
            value = figure_of(figure, one.measurements, required.goal)
        except NotScored:
            continue
        if value is not None:
            figures[name] = value
    # If the proof dropped a trial, it did not drop the configuration that it derived from that trial.
    dropped = None if outcome is None or one.derived else outcome.dropped.get(one.trial)
    return Ranked(
        config=one.config,
        trial=one.trial,
        launches=len(one.measurements),
        in_turns=one.in_turns,
        derived=one.derived,
        score=fmean(scores),
        samples_per_s=fmean(m.samples_per_s for m in one.measurements),
        start_s=fmean(m.startup_s + m.compile_s for m in one.measurements),
        figures=figures,
        out=dropped or unmet_text(required, one.measurements),
    )


def _among_the_fastest(rows: Sequence[Ranked], within: float) -> list[Ranked]:
    """Rule out the configurations that are too slow for an objective that chooses among the fastest."""
    choices = [row for row in rows if row.out is None]
    # Configurations launched in turns have better known rates, and were not selected by these rates themselves.
    references = [row for row in choices if row.in_turns] or choices
    minimum = (1 - within) * max((row.samples_per_s for row in references), default=0.0)
    reason = f"its rate is more than {100 * within:g} % below the fastest one's"
    return [replace(row, out=reason) if row.out is None and row.samples_per_s < minimum else row for row in rows]


def _with_overtaking(rows: Sequence[Ranked], ranks: int) -> list[Ranked]:
    """Fill in the step from which each compiled configuration is ahead of the fastest eager one, by the formula of
    `autotune.search.outcome.break_even_of`."""
    eager = [row for row in rows if not compiles(row.config)]
    fastest = max(eager, key=lambda row: row.samples_per_s, default=None)
    filled = []
    for row in rows:
        steps = None
        if fastest is not None and compiles(row.config) and row.samples_per_s > fastest.samples_per_s:
            saved_s = 1 / fastest.samples_per_s - 1 / row.samples_per_s
            samples = ranks * int(row.config["batch_size"])
            steps = max(0, math.ceil((row.start_s - fastest.start_s) / saved_s / samples))
        filled.append(replace(row, overtakes_after=steps))
    return filled


def _nothing_fits(seen: Sequence[_Seen], required: Requirements, rows: Sequence[Ranked]) -> InfeasibleError:
    """Return the error for a study in which nothing can be chosen, with the nearest configuration."""
    reasons = {key(row.config): row.out for row in rows}
    nearest = min(
        (entry for entry in seen if key(entry.config) in reasons), key=lambda entry: required.excess(entry.measurements)
    )
    description = f"trial {nearest.trial}, {describe(nearest.config, seen[0].config)}"
    # The nearest may meet it, and have dropped out for another reason.
    measured = count(len(seen), "configuration")
    left = f"of {measured} that were measured, nothing that meets {required} is left"
    return InfeasibleError(
        left if required.met_by(nearest.measurements) else f"none of {measured} that were measured meets {required}",
        advice=f"the nearest is {description}: {reasons[key(nearest.config)]}.",
    )


# The profile of a trial other than the winner, for when a study is ranked by another objective.


def profile_from(files: StudyFiles, outcome: Outcome | None, number: int | None) -> Profile:
    """Return the profile of a study, or of one of its trials.

    Args:
        outcome: of the study. number: of the trial; ``None`` for the profile that the study delivers.

    Raises:
        UsageError: there is no such profile.
    """
    study = study_argument(files)
    path = files.profile if outcome is None or outcome.found is not Finding.OPEN else files.usual
    if outcome is not None and outcome.found is Finding.OPEN and number is None:
        raise UsageError(
            f"{files.name} has no profile, because there is no verdict: {outcome.because}",
            advice=f"{outcome.advice} `--trial N` takes a candidate, `autotune show {study}` lists them.",
        )
    if not path.exists():
        option = "" if outcome is None else " --budget +60s"
        raise UsageError(f"{files.name} has no profile yet", advice=f"go on with it: autotune resume {study}{option}")
    profile = read(path)
    if number is None or number == profile.provenance.trial:
        return profile
    if outcome is None:
        raise UsageError(
            f"{files.name} is not finished, and has the profile of trial {profile.provenance.trial} only",
            advice=f"finish it with: autotune resume {study}",
        )
    return profile_of_trial(files, profile, outcome, number)


def profile_of_trial(files: StudyFiles, profile: Profile, outcome: Outcome, number: int) -> Profile:
    """Return the profile of a trial, under the conditions of the study's own.

    A finalist has the figures of its launches in turns with the baseline. Any other trial has those of its one launch,
    and no speedup, because it was not launched in turns with the baseline.

    Args:
        profile: the study's.

    Raises:
        UsageError: there is no such trial, it was not measured, or the proof dropped it.
    """
    trial = next((t for t in read_trials(files) if t.number == number), None)
    if trial is None:
        raise UsageError(f"{files.name} has no trial {number}", advice="`autotune show` lists its trials.")
    measured = trial.result.measurement
    if trial.result.status is not TrialStatus.COMPLETE or measured is None:
        raise UsageError(f"trial {number} ended as {trial.result.status}, so it promises nothing")
    if number in outcome.dropped and key(trial.config) != key(outcome.best.config):
        raise UsageError(
            f"trial {number} is out: {outcome.dropped[number]}", advice="`autotune rank` lists the others."
        )
    if key(trial.config) == key(profile.configuration):
        return profile
    standing = next((s for s in outcome.finalists if key(s.config) == key(trial.config) and s.verified), None)
    source: Standing | Measurement = standing or measured
    wait, baseline = source.loader_wait_fraction, profile.baseline.configuration
    figures: dict[str, Any] = {
        "peak_memory_bytes": measured.peak_bytes,
        "epoch_turn_seconds": source.epoch_turn_s,
        "compile_seconds": source.compile_s,
        "startup_seconds": source.startup_s,
        "loader_wait_fraction": None if wait is None else min(1.0, wait),
        "learning_rate": measured.learning_rate,
        "same_batch": trial.config["batch_size"] == baseline["batch_size"],
        "trains_like_fp32": next((c.passed for c in outcome.checks if number in c.trials), None),
        # Only the winners' data was compared.
        "same_data": next((d.passed for d in outcome.data if key(d.config) == key(trial.config)), None),
        # Only the winner was run for longer.
        "memory_headroom": None,
        "sustained_samples_per_second": None,
    }
    if standing is None:
        rate, ci95 = measured.samples_per_s, measured.ci95_per_s
        figures |= {"samples_per_second": rate, "ci95": ci95, "speedup": None, "speedup_ci95": None, "launches": 1}
    else:
        same_names = ("samples_per_second", "ci95", "speedup", "speedup_ci95", "launches", "peak_memory_bytes")
        figures |= {name: getattr(standing, name) for name in same_names}
    best = outcome.best_same_batch
    proven = outcome.evidence is None and best.speedup_ci95[0] > 1 and key(best.config) == key(trial.config)
    if not proven and key(trial.config) != key(baseline):
        figures["unproven"] = "a candidate that was chosen by hand, and not proven"
    origin = profile.provenance.model_copy(update={"trial": number, "score": trial.score})
    changed = {"configuration": trial.config, "gives": {**dict(profile.gives), **figures}, "provenance": origin}
    # Validated again, so that floats are like those of a profile.
    return Profile.model_validate({**dict(profile), **changed}).sealed()
