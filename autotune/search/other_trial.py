"""The profile of another trial than the winner, for when a study is ranked by another objective."""

from __future__ import annotations

from typing import Any

from autotune.base.errors import UsageError
from autotune.base.layout import StudyFiles
from autotune.profile import Profile, read
from autotune.base.records import Finding, Measurement, Outcome, Standing, TrialStatus
from autotune.search.study_folders import study_argument
from autotune.space import key
from autotune.study.reading import read_trials


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
