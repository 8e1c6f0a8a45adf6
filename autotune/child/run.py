"""One launch, from its spec to its result. It runs in a process that is forked for it and exits afterwards."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock
from autotune.base.errors import AutotuneError
from autotune.base.files import write_atomic
from autotune.base.layout import LaunchFiles
from autotune.base.ranks import RANK_VARIABLES
from autotune.base.records import TRANSIENT, LaunchKind, TrialResult, TrialSpec, TrialStatus
from autotune.child.failure import Disturbed, Slow, classify, is_told
from autotune.child.hold import hold
from autotune.child.launch import Beats
from autotune.child.loop import device_only, loader_only, measure
from autotune.child.probe import probe
from autotune.child.ranks import RANKED, RankBoard, follow, lead
from autotune.child.script_folders import first_look
from autotune.child.script_launches import check_command, measure_command, probe_command
from autotune.child.script_process import KeptScript
from autotune.child.script_turns import command_heat
from autotune.child.trail import deliver
from autotune.child.train_check import train_check
from autotune.child.workload_turns import workload_heat
from autotune.launcher.rank_processes import files_of
from autotune.machine import system

#: Exit code of a launch that reported a failure.
FAILED = 1


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
    beats = Beats(beat_descriptor, SystemClock())
    # The launcher requests stack dumps from an overdue launch before killing it.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    faulthandler.enable()
    within = None if kept.script is None else kept.launch
    ended = _guarded(spec, beats, kept, board)
    status, phase = ended["status"], beats.phase
    success = status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
    # If others kept the machine busy, nothing has gone wrong in the script.
    if not success and status is not TrialStatus.INTERRUPTED:
        kept.end()
    beats.close()
    result = TrialResult(
        launch=spec.launch,
        phase=phase,
        phase_s=beats.phase_s,
        wall_s=beats.clock.now() - beats.began,
        samples_drawn=beats.samples_drawn(),
        within=within,
        # INTERRUPTED set by the child means a disturbance, which is temporary.
        transient=status in TRANSIENT or status is TrialStatus.INTERRUPTED,
        **ended,
    )
    write_atomic(files.result, result.model_dump_json())
    return 0 if success else FAILED


def _guarded(spec: TrialSpec, beats: Beats, kept: KeptScript, board: RankBoard | None) -> dict[str, Any]:
    """Do the work of a launch, and classify whatever ends it; return fields of `TrialResult`."""
    leader = os.getpid()
    try:
        os.environ.update(spec.env)
        if spec.cache_folder is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = spec.cache_folder
        system.workers_die_with_leader()
        system.workers_exit_on_lost_batches()
        system.raise_for_workers_between_batches()
        if board is not None and spec.rank and spec.kind is not LaunchKind.TRAIN_CHECK:
            follow(spec, beats, board)
        return {"status": TrialStatus.COMPLETE, **_done(spec, beats, kept)}
    except Slow as slow:
        cause = f"{slow}, and below {spec.plan.prune_below_per_s:.4g} is not the best"
        figures = {"rate_seen_per_s": slow.rate_per_s, "measurement": slow.measurement}
        return {"status": TrialStatus.PRUNED, "cause": cause, **figures}
    except Disturbed as disturbed:
        # Nothing went wrong in this launch; measurements under foreign load are invalid.
        return {"status": TrialStatus.INTERRUPTED, "cause": str(disturbed), "advice": disturbed.advice}
    except BaseException as error:
        # Not only Exception: user code may call sys.exit(). A process that it has forked must not report.
        if os.getpid() != leader:
            raise
        # Reporting needs memory too, and the exception's frames still hold what did not fit.
        system.lift_data_limit()
        # For a script, its own last words are evidence; how its end was noticed is not.
        if spec.command is None or not is_told(error):
            # User code may have closed our streams.
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exc()
        if spec.heat is not None and beats.whose is not None:
            spec = spec.model_copy(update={"config": dict(spec.heat.entrants[beats.whose])})
        ended = {**vars(classify(error, spec))}
        if isinstance(error, AutotuneError):
            ended["error_code"] = error.exit_code
        # With a corrupted CUDA context every call raises its error again.
        with contextlib.suppress(Exception):
            ended["peak_bytes"] = beats.memory_bytes()
        return ended


def _done(spec: TrialSpec, beats: Beats, kept: KeptScript) -> dict[str, Any]:
    """Do what launches of this kind do, with a workload's file in this process, or with a command in a process of its
    own; return what came of it, by the name of its field in `TrialResult`.

    What a script does is on the host's monotonic clock, which is what the clock of `beats` reads here.
    """
    command = spec.command
    match spec.kind:
        case LaunchKind.PROBE:
            look = partial(probe_command, spec, beats=beats, kept=kept)
            return {"probe": probe(spec, beats) if command is None else first_look(spec, command, look)}
        case LaunchKind.MEASURE:
            measured = measure(spec, beats) if command is None else measure_command(spec, command, beats, kept)
            return {"measurement": measured}
        case LaunchKind.DEVICE_ONLY:
            return {"measurement": device_only(spec, beats)}
        case LaunchKind.LOADER_ONLY:
            return {"measurement": loader_only(spec, beats)}
        case LaunchKind.TRAIN_CHECK if spec.check is not None:
            if command is not None:
                return {"check": check_command(spec, command, spec.check, beats)}
            if spec.check.deliveries is not None:
                return {"check": deliver(spec, spec.check.deliveries, beats)}
            return {"check": train_check(spec, spec.check, beats)}
        case LaunchKind.HOLD if spec.hold is not None:
            return {"hold": hold(spec, spec.hold, beats)}
        case LaunchKind.HEAT if spec.heat is not None and command is None:
            return {"heat": workload_heat(spec, spec.heat, beats)}
        case LaunchKind.HEAT if spec.heat is not None and command is not None:
            return {"heat": command_heat(spec, command, spec.heat, beats, kept)}
        case kind:
            raise AutotuneError(f"{spec.launch}, a {kind} launch, has no plan")
