"""Trials by a figure, and a profile of any of them."""

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

# Ranks the configurations of a study anew: by another objective, or under other requirements. Launches nothing.

#: First words of the names of launches that were made in turns (`autotune.search.verify.race`).
_IN_TURNS = ("verify", "narrow", "simpler", "ablate")


@dataclass(frozen=True)
class Ranked:
    """One configuration of a study.

    Attributes:
        trial: number of its trial; of several, the first. derived: it has knobs of that trial set back, by the proof.
        launches: number of launches that the figures rest on. in_turns: they were made after the search, in turns with
            the baseline. Otherwise the figures are those of the search's own launches, which are too good on average
            for what was chosen by them.
        score: the mean over the launches, each with the compile time of a cold cache.
        samples_per_s: the mean over the launches. start_s: seconds from the launch to the end of the first step.
        figures: by name; those that are not known, or need what was not stated, are left out.
        out: why it is no choice, as a clause: it was dropped by the proof, does not meet what is required, or is too
            slow for an objective that chooses among the fastest; ``None`` if it is one.
        overtakes_after: of a compiled one, the step from which it is ahead of the fastest eager one, start-up and
            compiling included; ``None`` if it never is, or is eager.
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
    """The configurations of a study, best first; those that are no choice come last.

    Attributes:
        objective: its name. unit: of its scores. figure: the one that people are shown instead; ``None`` if it is the
            score.
        unscored: the trials that are left out, because no launch of theirs has all that the objective takes.
        rate_unit: of rates.
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
        UsageError: nothing was measured yet; or the objective needs what was not stated or not measured.
        InfeasibleError: nothing meets what is required; the nearest is in the advice.
    """
    seen = _seen(files, outcome)
    if not seen:
        raise UsageError(f"{files.name} has no measured trial yet", advice="finish it with `autotune resume`.")
    required = Requirements.parsed(spec.require, spec.goal)
    with closing(Scorer(find_objective(spec.objectives[0]), goal=spec.goal)) as scorer:
        scorer.check()
        facts = scorer.facts
        found = [(one.trial, _ranked(one, scorer, required, outcome)) for one in seen]
        rows = [row for _, row in found if row is not None]
        if not rows:
            scorer.score(seen[0].measurements[0])
    if facts.rate_within:
        rows = _among_the_fastest(rows, facts.rate_within)
    rows = _with_overtaking(rows, spec.ranks)
    rows.sort(key=lambda row: (row.out is not None, -row.score))
    if rows[0].out is not None:
        raise _nothing_fits(seen, required, rows)
    unscored = tuple(trial for trial, row in found if row is None)
    rate_unit = seen[0].measurements[0].unit
    unit = rate_unit if facts.unit == FIGURES["throughput"].unit else facts.unit
    return Ranking(spec.objectives[0], unit, facts.figure, seen[0].config, tuple(rows), unscored, rate_unit)


def pareto(rows: Sequence[Ranked], figures: Sequence[Figure]) -> list[Ranked]:
    """Return those that no other choice is at least as good as in all figures and better in one, best of the first
    figure first.

    Raises:
        UsageError: a figure is not known of any configuration.
    """
    for figure in figures:
        if not any(figure.name in row.figures for row in rows):
            raise UsageError(f"{figure.name} is not known of any configuration of this study")
    known = [row for row in rows if row.out is None and all(figure.name in row.figures for figure in figures)]

    def worth(row: Ranked) -> tuple[float, ...]:
        return tuple(row.figures[f.name] * (1 if f.more_is_better else -1) for f in figures)

    front = [
        row
        for row in known
        if not any(
            worth(other) != worth(row) and all(a >= b for a, b in zip(worth(other), worth(row), strict=True))
            for other in known
        )
    ]
    return sorted(front, key=worth, reverse=True)


@dataclass(frozen=True)
class _Seen:
    """What was measured of one configuration."""

    config: Config
    trial: int
    in_turns: bool
    derived: bool
    measurements: tuple[Measurement, ...]


def _seen(files: StudyFiles, outcome: Outcome | None) -> list[_Seen]:
    """Return what was measured of each configuration, the baseline first, in the order of the trials."""
    trials = [t for t in read_trials(files) if t.result.status is TrialStatus.COMPLETE and t.result.measurement]
    cold_s = cold_compiles(trials, [h.heat for h in read_heats(files)])
    again: dict[str, list[Measurement]] = {}
    for launch, result in read_launches(files):
        made = launch.number is None and launch.kind is LaunchKind.MEASURE
        if made and launch.launch.startswith(_IN_TURNS) and result.status is TrialStatus.COMPLETE:
            again.setdefault(key(launch.config), []).extend([result.measurement] if result.measurement else [])
    configs: dict[str, tuple[Config, int, bool]] = {}
    for trial in trials:
        configs.setdefault(key(trial.config), (trial.config, trial.number, False))
    for one in () if outcome is None else (outcome.best, outcome.best_same_batch):
        configs.setdefault(key(one.config), (one.config, one.trial, True))
    first_epochs = {} if outcome is None else {b.trial: b.cold_per_s[0] for b in outcome.bottlenecks if b.cold_per_s}
    found = []
    for name, (config, number, derived) in configs.items():
        own = [m for t in trials if key(t.config) == name and (m := t.result.measurement) is not None]
        compile_s = max([cold_s.get(graph(config), 0.0), *(m.compile_s for m in (*own, *again.get(name, [])))])
        # The first epoch of one that was not measured so is taken to be no slower than any that was.
        cold = first_epochs.get(number, max(first_epochs.values(), default=None))
        told = {"compile_s": compile_s, "cold_per_s": cold}
        used = tuple(m.model_copy(update=told) for m in again.get(name) or own)
        if used:
            found.append(_Seen(config, number, name in again, derived, used))
    return found


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
    # What the proof derived from a trial that it dropped is not dropped.
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
    """Rule out those that are too slow for an objective that chooses among the fastest."""
    choices = [row for row in rows if row.out is None]
    # What was launched in turns is known better, and was not chosen by the figure itself.
    known = [row for row in choices if row.in_turns] or choices
    least = (1 - within) * max((row.samples_per_s for row in known), default=0.0)
    slow = f"its rate is more than {100 * within:g} % below the fastest one's"
    return [replace(row, out=slow) if row.out is None and row.samples_per_s < least else row for row in rows]


def _with_overtaking(rows: Sequence[Ranked], ranks: int) -> list[Ranked]:
    """Fill in from which step the compiled configurations are ahead of the fastest eager one.

    With start-up and first step f and rate r, n samples take f + n / r seconds; both are equal at
    n = (f_compiled - f_eager) / (1 / r_eager - 1 / r_compiled).
    """
    eager = [row for row in rows if not compiles(row.config)]
    fastest = max(eager, key=lambda row: row.samples_per_s, default=None)
    found = []
    for row in rows:
        steps = None
        if fastest is not None and compiles(row.config) and row.samples_per_s > fastest.samples_per_s:
            saved_s = 1 / fastest.samples_per_s - 1 / row.samples_per_s
            samples = ranks * int(row.config["batch_size"])
            steps = max(0, math.ceil((row.start_s - fastest.start_s) / saved_s / samples))
        found.append(replace(row, overtakes_after=steps))
    return found


def _nothing_fits(seen: Sequence[_Seen], required: Requirements, rows: Sequence[Ranked]) -> InfeasibleError:
    """Return the error for a study in which there is no choice, with the nearest configuration."""
    reasons = {key(row.config): row.out for row in rows}
    nearest = min(
        (one for one in seen if key(one.config) in reasons), key=lambda one: required.excess(one.measurements)
    )
    who = f"trial {nearest.trial}, {describe(nearest.config, seen[0].config)}"
    return InfeasibleError(
        f"none of {count(len(seen), 'configuration')} that were measured meets {required}",
        advice=f"the nearest is {who}: {reasons[key(nearest.config)]}.",
    )


# The profile of another trial than the winner, for when a study is ranked by another objective.


def profile_from(files: StudyFiles, outcome: Outcome | None, number: int | None) -> Profile:
    """Return the profile of a study, or of one of its trials.

    Args:
        outcome: the study's. number: the trial's; ``None`` for what the study hands over.

    Raises:
        UsageError: there is none.
    """
    study = study_argument(files)
    usual = files.profile if outcome is None or outcome.found is not Finding.OPEN else files.usual
    if outcome is not None and outcome.found is Finding.OPEN and number is None:
        raise UsageError(
            f"{files.name} has no profile, because there is no verdict: {outcome.because}",
            advice=f"{outcome.advice} `--trial N` takes a candidate, `autotune show {study}` lists them.",
        )
    if not usual.exists():
        more = "" if outcome is None else " --budget +60s"
        raise UsageError(f"{files.name} has no profile yet", advice=f"go on with it: autotune resume {study}{more}")
    found = read(usual)
    if number is None or number == found.provenance.trial:
        return found
    if outcome is None:
        raise UsageError(
            f"{files.name} is not finished, and has the profile of trial {found.provenance.trial} only",
            advice=f"finish it with: autotune resume {study}",
        )
    return profile_of_trial(files, found, outcome, number)


def profile_of_trial(files: StudyFiles, profile: Profile, outcome: Outcome, number: int) -> Profile:
    """Return the profile of a trial, under the conditions of the study's own.

    A finalist has the figures of its launches in turns with the baseline; any other trial has those of its one launch,
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
    found: Standing | Measurement = standing or measured
    wait, own = found.loader_wait_fraction, profile.baseline.configuration
    figures: dict[str, Any] = {
        "peak_memory_bytes": measured.peak_bytes,
        "epoch_turn_seconds": found.epoch_turn_s,
        "compile_seconds": found.compile_s,
        "startup_seconds": found.startup_s,
        "loader_wait_fraction": None if wait is None else min(1.0, wait),
        "learning_rate": measured.learning_rate,
        "same_batch": trial.config["batch_size"] == own["batch_size"],
        "trains_like_fp32": next((c.passed for c in outcome.checks if number in c.trials), None),
        # Only the winners' were compared.
        "same_data": next((d.passed for d in outcome.data if key(d.config) == key(trial.config)), None),
        # Only the winner was tried for longer.
        "memory_headroom": None,
        "sustained_samples_per_second": None,
    }
    if standing is None:
        rate, ci95 = measured.samples_per_s, measured.ci95_per_s
        figures |= {"samples_per_second": rate, "ci95": ci95, "speedup": None, "speedup_ci95": None, "launches": 1}
    else:
        same_names = ("samples_per_second", "ci95", "speedup", "speedup_ci95", "launches", "peak_memory_bytes")
        figures |= {name: getattr(standing, name) for name in same_names}
    own_best = outcome.best_same_batch
    proven = outcome.evidence is None and own_best.speedup_ci95[0] > 1 and key(own_best.config) == key(trial.config)
    if not proven and key(trial.config) != key(own):
        figures["unproven"] = "a candidate that was chosen by hand, and not proven"
    origin = profile.provenance.model_copy(update={"trial": number, "score": trial.score})
    changed = {"configuration": trial.config, "gives": {**dict(profile.gives), **figures}, "provenance": origin}
    # Validated anew, so that floats are as those of a profile.
    return Profile.model_validate({**dict(profile), **changed}).sealed()
