"""The results of a finished search: the outcome as data, and the profile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from autotune.base.version import __version__
from autotune.base.clock import timestamp
from autotune.space.formatting import likely_by
from autotune.knobs import KNOBS, Scope, answer_to, spell
from autotune.knobs.compile_mode import compiles
from autotune.knobs.knob import OTHERS
from autotune.knobs.num_workers import WORKERS, workers_of
from autotune.profile import (
    Compared,
    Conditions,
    Gives,
    Measured,
    Profile,
    ProfileWorkload,
    Provenance,
    Versions,
)
from autotune.base.records import BreakEven, Edge, Finding, Limit, Outcome, Standing, Trial
from autotune.report.sentences import data_of, measurement_of
from autotune.search.conclusion import Conclusion
from autotune.search.left_files import left_behind, own_folders
from autotune.search.setup import Setup
from autotune.search.study_folders import resume_command, study_argument
from autotune.space import maths_part
from autotune.study.seconds import seconds_by_purpose
from autotune.study.typed_request import command_of
from autotune.search.verify import Proof


@dataclass(frozen=True)
class Course:
    """The course of a search.

    Attributes:
        stopped: why the search ended, one sentence.
        elapsed_s: the used part of the budget, in seconds.
        measured_s: seconds inside kept windows.
        wait_s: seconds of waiting for a quiet device, which the budget does not count.
        epoch_samples: samples between two epoch turns; ``None`` if unknown.
        samples_read: by all launches together; ``None`` if a script trains.
        more_s: seconds that a proof would take beyond those of the budget.
    """

    trials: Sequence[Trial]
    stopped: str
    elapsed_s: float
    measured_s: float
    wait_s: float
    epoch_samples: int | None
    samples_read: int | None = None
    more_s: float = 0.0
    counts: str = "samples"


def outcome_of(setup: Setup, proof: Proof, course: Course, conclusion: Conclusion) -> Outcome:
    """Return the outcome of a finished search."""
    files, spec = setup.run.files, setup.run.spec
    cpu = setup.probe.device == "cpu"
    open_ = conclusion.finding is Finding.OPEN
    unproven = open_ or conclusion.finding is Finding.LIKELY
    # More time brings no more trials than were asked for.
    others = [s for s in proof.finalists if s.trial != proof.baseline.trial and s.trial not in proof.dropped]
    spent = open_ and not others and spec.trials is not None and len(course.trials) >= spec.trials
    return Outcome(
        study=files.name,
        state="done",
        finding=conclusion.finding,
        because=conclusion.because,
        advice=conclusion.advice,
        evidence=conclusion.evidence,
        again=resume_command(study_argument(files), course.more_s) if unproven and not spent else None,
        model=spec.model,
        command=() if spec.command is None else spec.command.words,
        flags=spec.flags,
        counts=course.counts,
        left=left_behind(files, spec),
        own_folders=own_folders(spec),
        folder=str(files.folder),
        # What is not proven is not promised.
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
        break_even=_break_even(proof.best, _trusted(proof), setup.conditions.ranks),
        edges=edges_of(setup, proof),
        no_more_workers=why_no_more_workers(setup),
        trials=dict(sorted(Counter(t.result.status.value for t in course.trials).items())),
        elapsed_s=course.elapsed_s,
        measured_s=course.measured_s,
        data_s=setup.data_s,
        stopped=course.stopped,
        wait_s=course.wait_s,
        page_cache=setup.conditions.data.page_cache,
        epochs=spec.epochs,
        dataset_samples=setup.probe.dataset_samples,
        samples_read=course.samples_read,
        allow_busy=spec.allow_busy,
        ranks=setup.conditions.ranks,
        ledger=seconds_by_purpose(files, course.elapsed_s),
        # `Proof` and `Outcome` have the same names for the results of the proof.
        **{name: value for name, value in vars(proof).items() if name != "unproven"},
    )


def _trusted(proof: Proof) -> list[Standing]:
    """Return the finalists that are known to train as the baseline does. Of a script, who is not ahead is not
    checked."""
    known = {number for verdict in proof.checks if verdict.passed for number in verdict.trials}
    own = maths_part(proof.baseline.config)
    return [s for s in proof.finalists if s.trial in known or maths_part(s.config) == own]


def _break_even(best: Standing, finalists: Sequence[Standing], ranks: int) -> BreakEven | None:
    """Return when the compiled winner catches up with the best eager finalist, or ``None`` if it never does.

    With start-up and first step f and rate r, n samples take f + n / r seconds; both are equal at
    n = (f_compiled - f_eager) / (1 / r_eager - 1 / r_compiled).
    """
    if not compiles(best.config):
        return None
    # Only figures from the same turns can be compared. The baseline is always among them.
    eager = max((s for s in finalists if not compiles(s.config)), key=lambda s: s.speedup, default=None)
    if eager is None or eager.speedup >= best.speedup:
        return None
    per_step_s = ranks * int(best.config["batch_size"]) / best.samples_per_second
    gain_s = (best.speedup / eager.speedup - 1) * per_step_s
    extra_s = max(0.0, best.startup_s + best.compile_s - eager.startup_s - eager.compile_s)
    return BreakEven(
        compile_s=best.compile_s,
        eager_config=eager.config,
        eager_samples_per_second=eager.samples_per_second,
        steps=math.ceil(extra_s / gain_s),
    )


def why_no_more_workers(setup: Setup) -> str | None:
    """Return why no more workers than the script's own were on offer, as a clause; ``None`` if they were, or if nothing
    that was seen of it speaks against them."""
    space = setup.space
    own = workers_of(space.baseline)
    # A program's loader is its own: there is no such knob.
    if WORKERS not in space.choices or any(workers_of({WORKERS: count}) > own for count in space.legal(WORKERS)):
        return None
    return setup.probe.outside.get(WORKERS, {}).get(OTHERS)


def edges_of(setup: Setup, proof: Proof) -> tuple[Edge, ...]:
    """Return the numeric knobs whose value in the winner is the largest that was offered and that were shown to matter,
    with the command that searches beyond."""
    space, spec, best = setup.space, setup.run.spec, proof.best
    matter = {p.knob for p in proof.ablation if p.gain is not None and p.gain[1] > 1}
    waiting = any(b.trial == best.trial and b.limit is Limit.LOADER for b in proof.bottlenecks)
    found = []
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
            found.append(Edge(knob=name, value=value, beyond=beyond, command=command))
    return tuple(found)


def profile_of(setup: Setup, outcome: Outcome, course: Course) -> Profile:
    """Return the profile of a finished search."""
    best, same = outcome.best, outcome.best_same_batch
    return Profile(
        workload=_workload(setup),
        configuration=best.config,
        gives=_gives(outcome, course),
        baseline=Measured(
            configuration=outcome.baseline.config,
            samples_per_second=outcome.baseline.samples_per_second,
            ci95=outcome.baseline.ci95,
            learning_rate=_learning_rate(outcome.baseline, course),
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
            epoch_samples=course.epoch_samples,
            worker_start_method=setup.conditions.worker_start_method,
            seed=setup.conditions.seed,
            allow_busy=outcome.allow_busy,
            ranks=setup.conditions.ranks,
            counts=outcome.counts,
            cards=1 if setup.conditions.command is None else max(1, len(setup.conditions.cards)),
            keeps_batch_size=setup.run.spec.keep_batch_size,
        ),
        fingerprint=setup.fingerprint,
        versions=_versions(setup),
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
        module=None if ref.path is not None or spec.command is not None else spec.model,
        args=spec.args,
        flags=spec.flags,
        own={} if command is None else command.own,
        sha256=setup.probe.workload_sha256,
    )


def _gives(outcome: Outcome, course: Course) -> Gives:
    best = outcome.best
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
        trains_like_fp32=_trains(outcome),
        same_data=_same_data(outcome),
        memory_headroom=_headroom(outcome),
        sustained_samples_per_second=_sustained_per_s(outcome),
        learning_rate=_learning_rate(best, course),
        unproven=None if outcome.evidence is None else likely_by(outcome.evidence),
    )


def _learning_rate(standing: Standing, course: Course) -> float | None:
    measured = measurement_of(standing, course.trials)
    rate = None if measured is None else measured.learning_rate
    return rate if rate is not None and 0 <= rate < math.inf else None


def _versions(setup: Setup) -> Versions:
    probe = setup.probe
    driver = setup.fingerprint.values.get("driver")
    return Versions(
        autotune=__version__,
        torch=probe.torch_version,
        torchvision=probe.torchvision_version,
        optuna=_version("optuna"),
        python=probe.python_version,
        cuda=probe.cuda_version,
        cudnn=probe.cudnn_version,
        driver=None if driver is None else str(driver),
    )


def _trains(outcome: Outcome) -> bool | None:
    """Whether the winner trains like eager fp32; ``None`` if this was not checked, or if the baseline is the winner."""
    if outcome.best.config == outcome.baseline.config:
        return None
    return next((c.passed for c in outcome.checks if outcome.best.trial in c.trials), None)


def _same_data(outcome: Outcome) -> bool | None:
    """Whether the winner's loader delivers what the baseline's does; ``None`` if that was not compared."""
    found = data_of(outcome, outcome.best)
    return None if found is None else found.passed


def _headroom(outcome: Outcome) -> float | None:
    hold = outcome.hold
    if hold is None or hold.hold is None or hold.trial != outcome.best.trial:
        return None
    return min(1.0, max(0.0, hold.hold.headroom))


def _sustained_per_s(outcome: Outcome) -> float | None:
    hold = outcome.hold
    return None if hold is None or hold.trial != outcome.best.trial else hold.sustained_per_s


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
