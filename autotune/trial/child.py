"""One launch, from its spec to its result. This process was forked for it and ends after it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

from autotune.clock import SystemClock
from autotune.errors import AutotuneError
from autotune.files import write_atomic
from autotune.layout import LaunchFiles
from autotune.records import LaunchKind, Measurement, Phase, Probe, TrialResult, TrialSpec, TrialStatus
from autotune.trial import system
from autotune.trial.beats import Beats
from autotune.trial.failure import Slow, Verdict, classify

#: Exit code of a launch that reported a failure of its own.
FAILED = 1


def run(spec_path: Path, beat_descriptor: int) -> int:
    """Carry out the launch described at ``spec_path``; returns the exit code.

    The result file is the last thing written, atomically: whoever finds one finds a whole one.
    """
    spec = TrialSpec.model_validate_json(spec_path.read_text())
    files = LaunchFiles(spec_path.parent)
    clock = SystemClock()
    beats = Beats(beat_descriptor, clock)
    # A launch past its limit is asked for its stacks before it is killed.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    faulthandler.enable()
    began = clock.now()
    measurement: Measurement | None = None
    probe: Probe | None = None
    verdict = Verdict(TrialStatus.COMPLETE, "")
    rate_seen: float | None = None
    error_code: int | None = None
    phase: Phase | None = None
    peak: int | None = None
    start_rss = system.status_bytes("VmRSS")
    try:
        os.environ.update(spec.env)
        if spec.cache_folder is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = spec.cache_folder
        system.workers_die_with_leader()
        if spec.kind is LaunchKind.PROBE:
            from autotune.trial.probe import probe as run_probe

            probe = run_probe(spec, beats)
        else:
            from autotune.trial.measure import measure

            measurement = measure(spec, beats, clock, began)
    except Slow as slow:
        rate_seen = slow.rate_per_s
        verdict = Verdict(TrialStatus.PRUNED, f"{slow}, below {spec.plan.prune_below_per_s:.4g}")
    except Exception as error:
        phase = beats.phase
        # Saying what happened needs room too, and the exception's frames still hold what did not fit.
        _lift_limit()
        traceback.print_exc()
        error_code = error.exit_code if isinstance(error, AutotuneError) else None
        verdict = classify(error, spec, phase)
        # A poisoned CUDA context answers every question with its error.
        with contextlib.suppress(Exception):
            peak = peak_bytes(spec, start_rss)
    phase = beats.phase or phase
    beats.close()
    result = TrialResult(
        launch=spec.launch,
        status=verdict.status,
        phase=phase,
        cause=verdict.cause or None,
        advice=verdict.advice,
        rate_seen_per_s=rate_seen,
        peak_bytes=peak,
        phase_s=beats.phase_s,
        wall_s=clock.now() - began,
        error_code=error_code,
        measurement=measurement,
        probe=probe,
    )
    write_atomic(files.result, result.model_dump_json())
    return 0 if verdict.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED) else FAILED


def _lift_limit() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def peak_bytes(spec: TrialSpec, start_rss: int) -> int | None:
    """Peak device memory of this process: the allocator's on CUDA, the growth of resident memory on a CPU."""
    if spec.devices[0] == "cpu":
        return max(0, system.status_bytes("VmHWM") - start_rss)
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_initialized() else None
