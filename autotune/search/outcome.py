"""What a search has found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import optuna

from autotune.base.clock import timestamp
from autotune.base.errors import MachineError, NoVerdictError
from autotune.base.records import (
    BreakEven,
    Config,
    Edge,
    Finding,
    HeatEntrant,
    Limit,
    Measurement,
    Outcome,
    Standing,
    StudyHeat,
    TrainVerdict,
    Trial,
    TrialResult,
    TrialStatus,
)
from autotune.base.version import __version__
from autotune.knobs import KNOBS, Scope, answer_to, spell
from autotune.knobs.compile_mode import compiles
from autotune.knobs.knob import OTHERS
from autotune.knobs.num_workers import WORKERS, workers_of
from autotune.profile import Compared, Conditions, Gives, Measured, Profile, ProfileWorkload, Provenance, Versions
from autotune.report.sentences import data_of, measurement_of
from autotune.search.proof.likely import proof_takes_s, telling_heats
from autotune.search.proof.winner import MAY_BE_FASTER, Contest, Proof
from autotune.search.setup import Setup
from autotune.search.study_folders import resume_command, study_argument
from autotune.search.subject import own_folders
from autotune.space import Lessons, Space, device_part, key, loads_as, maths_part
from autotune.space.formatting import count, describe, interval_text, likely_by, listed, ratio_text
from autotune.study.budget import LEAST_LAUNCHES
from autotune.study.history import seconds_by_purpose
from autotune.study.loop import StudyLoop
from autotune.study.request import command_of

# The finding of a search: what its measurements show about the baseline, or why they show nothing.

#: If fewer configurations were compared, that none was faster is not conclusive, unless there are no others.
HANDFUL = 5
_UNKNOWN = (TrialStatus.INTERRUPTED, TrialStatus.KILLED, TrialStatus.TIMEOUT)
_LONGER = "a longer --budget has time to see how it trains."
_EITHER = "a longer --budget, or a quieter machine, may tell them apart."
_QUIETER = "search again when the machine is quiet, or measure in spite of it with --allow-busy."


@dataclass(frozen=True)
class Conclusion:
    """A finding, and if nothing is proven, why not and what to do, one sentence each.

    Attributes:
        evidence: what makes it likely that something is faster, as a phrase.
    """

    finding: Finding
    because: str | None = None
    advice: str | None = None
    evidence: str | None = None


@dataclass(frozen=True)
class Coverage:
    """What the trials and heats show about the configurations other than the baseline.

    Attributes:
        tried: number of configurations with a rate from a trial of their own. measured: the same, and those that heats
            have compared, if heats are conclusive for the training. failed: number of those that cannot run here.
        disturbed: the last result of each configuration whose measurement others prevented.
        everything: every legal configuration was measured, failed, or is ruled out by one that failed.
    """

    tried: int
    measured: int
    failed: int
    disturbed: tuple[TrialResult, ...]
    everything: bool

    @property
    def enough(self) -> bool:
        """Whether the comparisons suffice to say that nothing is faster."""
        settled = self.measured + self.failed
        return self.everything or (settled >= HANDFUL and settled >= len(self.disturbed))


def coverage(space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat] = ()) -> Coverage:
    """Count what the trials and heats of a search compared with the baseline."""
    last: dict[str, TrialResult] = {}
    for trial in trials:
        name = key(trial.config)
        # A later attempt that was cut short does not invalidate a result.
        is_newer = name not in last or _is_known(trial.result) or not _is_known(last[name])
        if trial.config and name != key(space.baseline) and is_newer:
            last[name] = trial.result
    entrants = [e for heat in telling_heats(space, trials, heats) for e in heat.entrants]
    tried = {name for name, r in last.items() if r.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)}
    ran = tried | {key(e.config) for e in entrants if e.ratio is not None} - {key(space.baseline)}
    settled = {name for name, last_result in last.items() if _is_known(last_result)} | ran | {key(space.baseline)}
    # An entrant without an undisturbed turn, or beside a reference without one, has shown nothing.
    shown = [e for e in entrants if e.ratio is not None or e.status is not TrialStatus.COMPLETE]
    settled |= {key(e.config) for e in shown if e.status not in _UNKNOWN}
    lessons = Lessons()
    ended: list[tuple[Config, HeatEntrant | TrialResult]] = [(e.config, e) for e in entrants]
    for config, result in [*ended, *((t.config, t.result) for t in trials if t.config)]:
        lessons.learn(result.status, config, cannot_compile=result.cannot_compile, refuses=result.refuses)
    return Coverage(
        tried=len(tried),
        measured=len(ran),
        failed=len(settled - ran) - 1,
        disturbed=tuple(r for r in last.values() if r.status is TrialStatus.INTERRUPTED and r.transient),
        everything=all(key(c) in settled or lessons.rule_out(c) for c in space.grid()),
    )


def _open(standings: Sequence[Standing], proof: Proof, *, by_rate: bool) -> str:
    """Return, as a clause about the best of these, why none of them is shown to be better than the baseline."""
    best = max(standings, key=lambda s: s.speedup if by_rate else s.score)
    if not by_rate:
        return f"trial {best.trial} may be better, and was not shown to be"
    rate_clause = f"trial {best.trial} ran at {ratio_text(best.speedup, best.speedup_ci95)} the baseline"
    interval = f"95 %: {interval_text(best.speedup_ci95)}"
    if min(best.launches, proof.baseline.launches) < LEAST_LAUNCHES:
        interval = "one launch"
    elif best.speedup_ci95[0] > 1 and len(standings) > 1:
        # Its interval holds for a single comparison, but it was picked as the fastest of several.
        return (
            f"{rate_clause} ({interval}); of {len(standings)} compared one may seem so by luck, and more launches tell"
        )
    return f"{rate_clause} ({interval}), which is no proof of being faster"


def _untried(
    space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat], checks: Sequence[TrainVerdict]
) -> HeatEntrant | None:
    """Return an entrant that may be faster than the baseline, and whose device's part has no trial; ``None`` if there
    is none. What trains wrongly does not count."""
    lessons = Lessons()
    for verdict in checks:
        if verdict.passed is False:
            lessons.learn_wrong(verdict.config, space.changed_maths(verdict.config))
    tried = {key(device_part(t.config)) for t in trials if t.config and _is_known(t.result)}
    own, in_heats = (key(device_part(config)) for config in (space.baseline, space.in_heats(space.baseline)))
    for heat in telling_heats(space, trials, heats):
        rows = {key(device_part(e.config)): e for e in heat.entrants if e.ratio is not None}
        row = rows.get(own) or rows.get(in_heats)
        if row is None:
            continue
        # How much what all entrants have in common gives, no heat shows, but a trial of the baseline with it does.
        gain = 1.0 if own in rows else _gain(space, trials, in_heats)
        for part, entrant in rows.items():
            # An entrant that dropped out is behind another one.
            left = entrant.status is TrialStatus.COMPLETE and part not in tried and not lessons.is_wrong(entrant.config)
            if left and (gain is None or (entrant.ratio or 0.0) * gain > MAY_BE_FASTER * (row.ratio or math.inf)):
                return entrant
    return None


def _gain(space: Space, trials: Sequence[Trial], part: str) -> float | None:
    """Return how many times as fast as the baseline trials with this device's part were that load alike, if known."""
    rates: dict[str, float] = {}
    for trial in trials:
        if trial.result.measurement is not None and loads_as(trial.config, space.baseline):
            rates.setdefault(key(device_part(trial.config)), trial.result.measurement.samples_per_s)
    own = rates.get(key(device_part(space.baseline)))
    return rates[part] / own if own and part in rates else None


def _is_known(result: TrialResult) -> bool:
    # A timeout may be autotune's own doing: a trial gets at most the time left for searching.
    return result.status not in _UNKNOWN


def raise_if_nothing_compared(
    space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat], stopped: str, *, trials_asked: int | None
) -> None:
    """Raise if nothing but the baseline could be measured, although more was to be tried.

    Raises:
        MachineError: others kept the machine too busy. NoVerdictError: there was no time.
    """
    covered = coverage(space, trials, heats)
    if covered.tried or (covered.enough and not heats) or trials_asked == 1:
        return
    nothing = "no verdict, because nothing but the baseline was measured"
    if covered.disturbed:
        raise MachineError(f"{nothing}: {_disturbance(covered)}", advice=_QUIETER)
    raise NoVerdictError(f"{nothing}: {stopped}", advice="allow it a longer --budget.")


def conclude(
    space: Space, trials: Sequence[Trial], heats: Sequence[StudyHeat], proof: Proof, *, by_rate: bool
) -> Conclusion:
    """Return the finding of a search whose proof is complete."""
    baseline = key(space.baseline)
    if any(key(s.config) != baseline for s in (proof.best, proof.best_same_batch)):
        return Conclusion(Finding.FASTER)
    covered = coverage(space, trials, heats)
    others = [s for s in proof.finalists if key(s.config) != baseline and s.trial not in proof.dropped]
    if by_rate:
        open_ = [s for s in others if s.speedup_ci95[1] > MAY_BE_FASTER]
    else:
        open_ = [s for s in others if s.score > proof.baseline.score]
    if not covered.enough and len(covered.disturbed) > covered.measured + covered.failed:
        return Conclusion(Finding.OPEN, _disturbance(covered), _QUIETER)
    if open_ or proof.unproven:
        # What was launched in turns comes first: it is the most promising, and the most is known about it.
        ahead = [s for s in open_ if s.speedup > 1 or not (proof.unproven and by_rate)]
        clauses = [_open(ahead, proof, by_rate=by_rate)] if ahead else []
        if proof.unproven:
            names = f"trial{'' if len(proof.unproven) == 1 else 's'} {listed([str(n) for n in proof.unproven])}"
            clauses.append(
                f"{names} may be faster{' as well' if ahead else ''}, and could not be launched again in turns with "
                "the baseline"
            )
        return Conclusion(Finding.OPEN, "; ".join(clauses), _EITHER)
    if proof.doubted:
        number, reason = next(iter(proof.doubted.items()))
        return Conclusion(Finding.OPEN, f"trial {number} may be faster, and is out: {reason}", _LONGER)
    untried = _untried(space, trials, heats, proof.checks)
    if by_rate and untried is not None:
        settings = describe(untried.config, space.baseline)
        return Conclusion(
            Finding.OPEN, f"{settings} may be faster, judging by a heat, and no trial of it was made", _EITHER
        )
    if not covered.enough:
        compared = covered.measured + covered.failed
        because = (
            f"only {count(compared, 'configuration')} {'was' if compared == 1 else 'were'} compared with the baseline"
        )
        return Conclusion(Finding.OPEN, because, "allow more: a longer --budget, more --trials.")
    return Conclusion(Finding.KEEP)


def _disturbance(found: Coverage) -> str:
    among = len(found.disturbed) + found.measured + found.failed
    cause = (found.disturbed[-1].cause or "others used the machine").partition(";")[0]
    return f"{len(found.disturbed)} of {count(among, 'other configuration')} could not be measured, because {cause}"


# The results of a finished search: the outcome as data, and the profile.


@dataclass(frozen=True)
class Course:
    """The course of a search: its loop, its contest, and why it ended, one sentence."""

    study: StudyLoop
    contest: Contest
    stopped: str

    @property
    def trials(self) -> Sequence[Trial]:
        return self.study.history.trials

    @property
    def baseline(self) -> Measurement | None:
        """The baseline's own trial."""
        return self.contest.race.baseline.trial.result.measurement


def outcome_of(setup: Setup, proof: Proof, course: Course, conclusion: Conclusion) -> Outcome:
    """Return the outcome of a finished search."""
    files, spec, elapsed_s = setup.run.files, setup.run.spec, setup.run.budget.spent_s
    launches, noise = course.contest.race.context.launches, course.study.noise
    more_s = proof_takes_s(course.contest, noise, proof.best if conclusion.evidence else None)
    cpu = setup.probe.device == "cpu"
    open_ = conclusion.finding is Finding.OPEN
    unproven = open_ or conclusion.finding is Finding.LIKELY
    # More time does not yield more trials than were requested.
    others = [s for s in proof.finalists if s.trial != proof.baseline.trial and s.trial not in proof.dropped]
    # Known to train as the baseline does. Those of a script are checked only if they are ahead.
    passed = {number for verdict in proof.checks if verdict.passed for number in verdict.trials}
    own_maths = maths_part(proof.baseline.config)
    trusted = [s for s in proof.finalists if s.trial in passed or maths_part(s.config) == own_maths]
    may_prove = others or proof.unproven or proof.doubted
    spent = open_ and not may_prove and spec.trials is not None and len(course.trials) >= spec.trials
    return Outcome(
        study=files.name,
        state="done",
        finding=conclusion.finding,
        because=conclusion.because,
        advice=conclusion.advice,
        evidence=conclusion.evidence,
        again=resume_command(study_argument(files), more_s) if unproven and not spent else None,
        model=spec.model,
        command=setup.run.subject.words,
        flags=spec.flags,
        counts=course.baseline.counts if course.baseline else "samples",
        left=setup.run.subject.left(files),
        own_folders=own_folders(spec),
        folder=str(files.folder),
        # An open finding promises nothing.
        profile=None if open_ else str(files.profile),
        objective=spec.objective,
        require=spec.require,
        keeps_batch_size=setup.space.legal("batch_size") == (setup.space.baseline["batch_size"],),
        speed_only=tuple(sorted(setup.space.speed_only)),
        device=setup.conditions.device,
        device_name=setup.host.cpu_model if cpu else setup.probe.device_name,
        devices=len(setup.run.devices),
        image_size=setup.conditions.image_size,
        memory_is="host" if cpu else "device",
        break_even=break_even_of(proof.best, trusted, course.trials),
        edges=edges_of(setup, proof),
        no_more_workers=why_no_more_workers(setup),
        trials=dict(sorted(Counter(t.result.status.value for t in course.trials).items())),
        elapsed_s=elapsed_s,
        measured_s=launches.measured_s,
        data_s=setup.data_s,
        stopped=course.stopped,
        wait_s=setup.run.budget.waited_s,
        page_cache=setup.conditions.data.page_cache,
        epochs=spec.epochs,
        dataset_samples=setup.probe.dataset_samples,
        samples_read=None if setup.run.subject.words else launches.running.reading.samples,
        allow_busy=spec.allow_busy,
        ranks=setup.conditions.ranks,
        ledger=seconds_by_purpose(files, elapsed_s),
        **{name: value for name, value in vars(proof).items() if name in Outcome.model_fields},
    )


def break_even_of(best: Standing, finalists: Sequence[Standing], trials: Sequence[Trial]) -> BreakEven | None:
    """Return when the compiled winner catches up with the best eager finalist, or ``None`` if it never does.

    If start-up and first step take f seconds and the rate is r, n samples take f + n / r seconds. The two are equal at
    n = (f_compiled - f_eager) / (1 / r_eager - 1 / r_compiled).
    """
    trial = next((t for t in trials if t.number == best.trial), None)
    measured = None if trial is None else trial.result.measurement
    if not compiles(best.config) or trial is None or measured is None or measured.samples_per_step is None:
        return None
    # Only figures from the same turns can be compared. The baseline is always among the finalists.
    eager = max((s for s in finalists if not compiles(s.config)), key=lambda s: s.speedup, default=None)
    if eager is None or eager.speedup >= best.speedup:
        return None
    # Its own steps say what one counts: a script may take a step for several batches, a workload may count tokens.
    samples = measured.samples_per_step * int(best.config["batch_size"]) / int(trial.config["batch_size"])
    per_step_s = samples / best.samples_per_second
    gain_s = (best.speedup / eager.speedup - 1) * per_step_s
    extra_s = max(0.0, best.startup_s + best.compile_s - eager.startup_s - eager.compile_s)
    return BreakEven(
        compile_s=best.compile_s,
        eager_config=eager.config,
        eager_samples_per_second=eager.samples_per_second,
        steps=math.ceil(extra_s / gain_s),
    )


def why_no_more_workers(setup: Setup) -> str | None:
    """Return, as a clause, why the space has no more workers than the script itself uses; ``None`` if it has, or if the
    probe saw nothing that speaks against more."""
    space = setup.space
    script_workers = workers_of(space.baseline)
    # A program has a loader of its own, so this knob does not exist.
    if WORKERS not in space.choices or any(
        workers_of({WORKERS: count}) > script_workers for count in space.legal(WORKERS)
    ):
        return None
    return setup.probe.outside.get(WORKERS, {}).get(OTHERS)


def edges_of(setup: Setup, proof: Proof) -> tuple[Edge, ...]:
    """Return the numeric knobs that were shown to matter and whose value in the winner is the largest that was offered,
    each with the command that searches beyond it."""
    space, spec, best = setup.space, setup.run.spec, proof.best
    matter = {p.knob for p in proof.ablation if p.gain is not None and p.gain[1] > 1}
    waiting = any(b.trial == best.trial and b.limit is Limit.LOADER for b in proof.bottlenecks)
    edges = []
    for name, value in best.config.items():
        knob = KNOBS.get(name)
        legal = space.legal(name) if name in space.choices else ()
        if knob is None or not knob.numeric or len(legal) < 2 or value != max(legal):
            continue
        if name not in matter and not (waiting and knob.scope is Scope.LOADER):
            continue
        outside = setup.probe.outside.get(name, {})
        beyond = tuple(
            b
            for b in knob.beyond(value)
            if answer_to(knob, b) not in outside and space.combination_refusal({**best.config, name: b}) is None
        )
        if beyond:
            narrowed = {**spec.narrowed, name: tuple(spell(v) for v in (value, *beyond))}
            command = command_of(spec.model_copy(update={"narrowed": narrowed}))
            edges.append(Edge(knob=name, value=value, beyond=beyond, command=command))
    return tuple(edges)


def profile_of(setup: Setup, outcome: Outcome, course: Course) -> Profile:
    """Return the profile of a finished search."""
    best, same = outcome.best, outcome.best_same_batch
    probe, driver = setup.probe, setup.fingerprint.values.get("driver")
    return Profile(
        workload=_workload(setup),
        configuration=best.config,
        gives=_gives(outcome, course.trials),
        baseline=Measured(
            configuration=outcome.baseline.config,
            samples_per_second=outcome.baseline.samples_per_second,
            ci95=outcome.baseline.ci95,
            learning_rate=_learning_rate(outcome.baseline, course.trials),
        ),
        best_same_batch=Compared(
            configuration=same.config,
            samples_per_second=same.samples_per_second,
            ci95=same.ci95,
            speedup=same.speedup,
            speedup_ci95=same.speedup_ci95,
        ),
        conditions=Conditions(
            device=outcome.device,
            device_name=outcome.device_name,
            image_size=outcome.image_size,
            data=setup.conditions.data.kind,
            page_cache=outcome.page_cache,
            epoch_samples=(course.baseline.epoch_samples or None) if course.baseline else None,
            worker_start_method=setup.conditions.worker_start_method,
            seed=setup.conditions.seed,
            allow_busy=outcome.allow_busy,
            ranks=setup.conditions.ranks,
            counts=outcome.counts,
            cards=max(1, len(setup.conditions.cards)) if setup.run.subject.words else 1,
            keeps_batch_size=setup.run.spec.keep_batch_size,
        ),
        fingerprint=setup.fingerprint,
        versions=Versions(
            autotune=__version__,
            torch=probe.torch_version,
            torchvision=probe.torchvision_version,
            optuna=optuna.__version__,
            python=probe.python_version,
            cuda=probe.cuda_version,
            cudnn=probe.cudnn_version,
            driver=None if driver is None else str(driver),
        ),
        provenance=Provenance(
            study=outcome.study,
            trial=best.trial,
            objective=outcome.objective,
            score=best.score,
            trials=outcome.trials,
            measured_seconds=outcome.measured_s,
            elapsed_seconds=outcome.elapsed_s,
            created=timestamp(),
        ),
    ).sealed()


def _workload(setup: Setup) -> ProfileWorkload:
    spec, ref = setup.run.spec, setup.run.ref
    catalog = ref.path is not None and spec.model == ref.name
    command = setup.conditions.command
    return ProfileWorkload(
        name=ref.name,
        path=None if catalog else ref.path,
        module=None if ref.path is not None or setup.run.subject.words else spec.model,
        args=spec.args,
        flags=spec.flags,
        own={} if command is None else command.own,
        sha256=setup.probe.workload_sha256,
    )


def _gives(outcome: Outcome, trials: Sequence[Trial]) -> Gives:
    best, data = outcome.best, data_of(outcome, outcome.best)
    hold = outcome.hold if outcome.hold is not None and outcome.hold.trial == best.trial else None
    checks = [c.passed for c in outcome.checks if best.trial in c.trials and best.config != outcome.baseline.config]
    return Gives(
        samples_per_second=best.samples_per_second,
        ci95=best.ci95,
        speedup=best.speedup,
        speedup_ci95=best.speedup_ci95,
        peak_memory_bytes=best.peak_memory_bytes,
        peak_memory_is="host" if outcome.memory_is == "host" else "device",
        compile_seconds=best.compile_s,
        startup_seconds=best.startup_s,
        loader_wait_fraction=None if best.loader_wait_fraction is None else min(1.0, best.loader_wait_fraction),
        epoch_turn_seconds=best.epoch_turn_s,
        launches=best.launches,
        same_batch=best.config["batch_size"] == outcome.baseline.config["batch_size"],
        trains_like_fp32=checks[0] if checks else None,
        same_data=None if data is None else data.passed,
        memory_headroom=None if hold is None or hold.hold is None else min(1.0, max(0.0, hold.hold.headroom)),
        sustained_samples_per_second=None if hold is None else hold.sustained_per_s,
        learning_rate=_learning_rate(best, trials),
        unproven=None if outcome.evidence is None else likely_by(outcome.evidence),
    )


def _learning_rate(standing: Standing, trials: Sequence[Trial]) -> float | None:
    measured = measurement_of(standing, trials)
    rate = None if measured is None else measured.learning_rate
    return rate if rate is not None and 0 <= rate < math.inf else None
