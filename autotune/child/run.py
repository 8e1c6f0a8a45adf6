"""One launch, from its spec to its result. It runs in a process that is forked for it and exits afterwards."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autotune.base.clock import Clock, SystemClock
from autotune.base.errors import AutotuneError
from autotune.base.files import write_atomic
from autotune.base.layout import LaunchFiles
from autotune.base.ranks import RANK_VARIABLES
from autotune.base.records import (
    TRANSIENT,
    Heat,
    HeatPlan,
    Hold,
    LaunchKind,
    Measurement,
    Phase,
    Probe,
    TrainCheck,
    TrialResult,
    TrialSpec,
    TrialStatus,
)
from autotune.child.failure import Disturbed, Slow, Verdict, classify
from autotune.child.hold import hold
from autotune.child.launch import Beats
from autotune.child.loop import device_only, loader_only, measure
from autotune.child.probe import probe
from autotune.child.ranks import RANKED, RankBoard, files_of, follow, lead
from autotune.child.script_folders import first_look
from autotune.child.script_launches import check_command, measure_command, probe_command
from autotune.child.script_process import KeptScript, is_told
from autotune.child.script_turns import command_heat
from autotune.child.trail import deliver
from autotune.child.train_check import train_check
from autotune.child.workload_turns import device_heat, loader_heat
from autotune.machine import system

#: Exit code of a launch that reported a failure.
FAILED = 1


@dataclass(frozen=True)
class _Done:
    """The results of a launch; the field of its kind is set."""

    measurement: Measurement | None = None
    probe: Probe | None = None
    check: TrainCheck | None = None
    hold: Hold | None = None
    heat: Heat | None = None


@dataclass(frozen=True)
class _End:
    """How the work of a launch ended, as far as the child can tell.

    Attributes:
        phase: the phase in which an error occurred; ``None`` after a success.
        error_code: the exit code of an error of autotune's own.
    """

    verdict: Verdict
    done: _Done = _Done()
    rate_seen_per_s: float | None = None
    phase: Phase | None = None
    peak_bytes: int | None = None
    error_code: int | None = None


def run(spec_path: Path, beat_descriptor: int) -> int:
    """Carry out the launch described at ``spec_path``; return the exit code.

    The result file is written last and atomically, so a result file is always complete.
    """
    spec = TrialSpec.model_validate_json(spec_path.read_text())
    if spec.command is None:
        for name in RANK_VARIABLES:
            # They belong to whatever has started the search.
            os.environ.pop(name, None)
    # A single rank reports what a loader delivers.
    notes_deliveries = spec.check is not None and spec.check.deliveries is not None
    if spec.ranks == 1 or spec.kind not in RANKED or notes_deliveries:
        alone, kept = spec.model_copy(update={"ranks": 1}), KeptScript()
        code = _carry_out(alone, LaunchFiles(spec_path.parent), beat_descriptor, kept)
        while (further := kept.next_spec(beat_descriptor)) is not None:
            following = TrialSpec.model_validate_json(further.read_text())
            code = _carry_out(following, LaunchFiles(further.parent), beat_descriptor, kept)
        return code

    def train(rank: int, beats: int, board: RankBoard) -> int:
        files = files_of(LaunchFiles(spec_path.parent), rank)
        return _carry_out(spec.model_copy(update={"rank": rank}), files, beats, KeptScript(), board)

    return lead(spec, beat_descriptor, train)


def _carry_out(
    spec: TrialSpec, files: LaunchFiles, beat_descriptor: int, kept: KeptScript, board: RankBoard | None = None
) -> int:
    clock = SystemClock()
    beats = Beats(beat_descriptor, clock)
    # The launcher requests stack dumps from an overdue launch before killing it.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    faulthandler.enable()
    began = clock.now()
    within = None if kept.script is None else kept.launch
    end = _guarded(spec, beats, clock, began, kept, board)
    verdict, done = end.verdict, end.done
    success = verdict.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
    # If others kept the machine busy, nothing has gone wrong in the script.
    if not success and verdict.status is not TrialStatus.INTERRUPTED:
        kept.end()
    phase = beats.phase or end.phase
    beats.close()
    result = TrialResult(
        launch=spec.launch,
        status=verdict.status,
        phase=phase,
        cause=verdict.cause or None,
        advice=verdict.advice,
        cannot_compile=verdict.cannot_compile,
        refuses=verdict.refuses,
        rate_seen_per_s=end.rate_seen_per_s,
        peak_bytes=end.peak_bytes,
        phase_s=beats.phase_s,
        wall_s=clock.now() - began,
        error_code=end.error_code,
        samples_drawn=beats.samples_drawn(),
        within=within,
        # INTERRUPTED set by the child means a disturbance, which is temporary.
        transient=verdict.status in TRANSIENT or verdict.status is TrialStatus.INTERRUPTED,
        measurement=done.measurement,
        check=done.check,
        hold=done.hold,
        heat=done.heat,
        probe=done.probe,
    )
    write_atomic(files.result, result.model_dump_json())
    return 0 if success else FAILED


def _guarded(
    spec: TrialSpec, beats: Beats, clock: SystemClock, began: float, kept: KeptScript, board: RankBoard | None
) -> _End:
    """Do the work of a launch, and classify whatever ends it."""
    leader = os.getpid()
    try:
        os.environ.update(spec.env)
        if spec.cache_folder is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = spec.cache_folder
        system.workers_die_with_leader()
        system.workers_exit_on_lost_batches()
        system.raise_for_workers_between_batches()
        if board is not None and spec.rank and spec.kind is not LaunchKind.TRAIN_CHECK:
            follow(spec, beats, clock, began, board)
        subject = (_Workload if spec.command is None else _Script)(spec, beats, clock, began, kept)
        return _End(Verdict(TrialStatus.COMPLETE, ""), subject.do())
    except Slow as slow:
        cause = f"{slow}, and below {spec.plan.prune_below_per_s:.4g} is not the best"
        return _End(Verdict(TrialStatus.PRUNED, cause), _Done(measurement=slow.measurement), slow.rate_per_s)
    except Disturbed as disturbed:
        # Nothing went wrong in this launch; measurements under foreign load are invalid.
        return _End(Verdict(TrialStatus.INTERRUPTED, str(disturbed), disturbed.advice))
    except BaseException as error:
        # Not only Exception: user code may call sys.exit(). A process that it has forked must not report.
        if os.getpid() != leader:
            raise
        phase, peak = beats.phase, None
        # Reporting needs memory too, and the exception's frames still hold what did not fit.
        _lift_limit()
        # For a script, its own last words are evidence; how its end was noticed is not.
        if spec.command is None or not is_told(error):
            # User code may have closed our streams.
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exc()
        code = error.exit_code if isinstance(error, AutotuneError) else None
        verdict = classify(error, _in_turn(spec, beats), phase)
        # With a corrupted CUDA context every call raises its error again.
        with contextlib.suppress(Exception):
            peak = beats.memory_bytes()
        return _End(verdict, phase=phase, peak_bytes=peak, error_code=code)


def _in_turn(spec: TrialSpec, beats: Beats) -> TrialSpec:
    """Return the spec of a launch with the configuration whose turn it is, in a heat."""
    if spec.heat is None or beats.whose is None:
        return spec
    return spec.model_copy(update={"config": dict(spec.heat.entrants[beats.whose])})


class _Subject(ABC):
    """What a launch trains, and how each kind of launch is done with it."""

    def __init__(self, spec: TrialSpec, beats: Beats, clock: Clock, began: float, kept: KeptScript) -> None:
        self.spec, self.beats, self.clock, self.began, self.kept = spec, beats, clock, began, kept

    def do(self) -> _Done:
        """Run the launch according to its kind."""
        match self.spec.kind:
            case LaunchKind.PROBE:
                return _Done(probe=self.probe())
            case LaunchKind.MEASURE:
                return _Done(measurement=self.measure())
            case LaunchKind.DEVICE_ONLY:
                return _Done(measurement=device_only(self.spec, self.beats, self.clock, self.began))
            case LaunchKind.LOADER_ONLY:
                return _Done(measurement=loader_only(self.spec, self.beats, self.clock, self.began))
            case LaunchKind.TRAIN_CHECK:
                return _Done(check=self.check())
            case LaunchKind.HOLD:
                return _Done(hold=hold(self.spec, self.beats, self.clock))
            case LaunchKind.HEAT:
                if self.spec.heat is None:
                    raise AutotuneError(f"{self.spec.launch} is to compare configurations and is not told which")
                return _Done(heat=self.heat(self.spec.heat))

    @abstractmethod
    def probe(self) -> Probe:
        """Collect facts about it and this machine."""

    @abstractmethod
    def measure(self) -> Measurement:
        """Measure its rate."""

    @abstractmethod
    def check(self) -> TrainCheck:
        """Train a few steps from the same weights as the other launches of the check."""

    @abstractmethod
    def heat(self, plan: HeatPlan) -> Heat:
        """Compare configurations that take turns."""


class _Workload(_Subject):
    """A workload's file, trained in this process."""

    def probe(self) -> Probe:
        return probe(self.spec, self.beats, self.clock)

    def measure(self) -> Measurement:
        return measure(self.spec, self.beats, self.clock, self.began)

    def check(self) -> TrainCheck:
        notes = self.spec.check is not None and self.spec.check.deliveries is not None
        return deliver(self.spec, self.beats) if notes else train_check(self.spec, self.beats)

    def heat(self, plan: HeatPlan) -> Heat:
        take_turns = device_heat if plan.side == "device" else loader_heat
        return take_turns(self.spec, plan, self.beats, self.clock, self.began)


class _Script(_Subject):
    """A command, which trains in a process of its own and is watched from here. Times are those of the host's monotonic
    clock, which is what `clock` reads here."""

    def probe(self) -> Probe:
        assert self.spec.command is not None
        look = partial(probe_command, began=self.began, kept=self.kept)
        return first_look(self.spec, self.spec.command, self.beats, look)

    def measure(self) -> Measurement:
        return measure_command(self.spec, self.beats, self.clock, self.began, self.kept)

    def check(self) -> TrainCheck:
        return check_command(self.spec, self.beats)

    def heat(self, plan: HeatPlan) -> Heat:
        return command_heat(self.spec, plan, self.beats, self.clock, self.began, self.kept)


def _lift_limit() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
