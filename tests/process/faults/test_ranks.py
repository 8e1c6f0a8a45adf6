"""One rank of two fails, in each phase: the launch ends in seconds and names rank and cause, and the next one works."""

import os
import signal

import psutil
import pytest

from autotune.base.records import MeasurePlan, Phase, PhaseLimits, TrialStatus

from .conftest import ENDLESS, marked

TWO = {"ranks": 2}
PHASES = [("load", Phase.LOAD), ("build", Phase.BUILD), (1, Phase.COMPILE), (30, Phase.MEASURE)]
IDS = ["load", "build", "first step", "step"]


def of(rank):
    return {"ranks": 2, "args": {"rank": str(rank)}}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("at", "phase"), PHASES, ids=IDS)
def test_a_rank_is_killed(ended, at, phase, rank):
    end = ended("signals.kill", at, plan=ENDLESS, **of(rank))
    assert end.result.status is TrialStatus.KILLED, end.result.cause
    assert end.result.cause == f"rank {rank}: killed from outside (SIGKILL)"
    assert end.seconds < 10


@pytest.mark.parametrize(("at", "phase"), PHASES, ids=IDS)
def test_a_rank_raises(ended, at, phase):
    end = ended("errors.of_the_users_own", at, plan=ENDLESS, **of(1))
    assert end.seen == (TrialStatus.USER_ERROR, phase)
    assert end.result.cause.startswith("rank 1: ValueError: the labels are wrong")
    assert "ValueError: the labels are wrong" in end.result.evidence
    assert end.seconds < 10


def test_a_rank_runs_out_of_memory(ended):
    end = ended("errors.raised:allocator", 30, plan=ENDLESS, **of(1))
    assert end.result.status is TrialStatus.OOM and end.result.cause.startswith("rank 1: ")
    assert "CUDA out of memory" in end.result.cause


def test_a_rank_dies_of_itself(ended):
    end = ended("signals.segv", 30, plan=ENDLESS, **of(1))
    assert end.result.status is TrialStatus.CRASHED and end.result.cause == "rank 1: died by SIGSEGV"
    assert "in segv" in end.result.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "phase"), [("build", TrialStatus.TIMEOUT), (30, TrialStatus.HANG)], ids=["build", "step"]
)
def test_a_rank_hangs(ended, at, phase):
    end = ended("signals.wait", at, plan=ENDLESS, limits=PhaseLimits(build_s=3.0, silence_s=3.0), **of(1))
    assert end.result.status is phase, end.result.cause
    assert "rank 1 is in wait (fault_signals.py:" in end.result.cause
    assert end.result.cause.endswith("and the others wait for it")
    assert "in wait" in end.stderr and "rank 0" in end.stderr


@pytest.mark.slow
def test_a_rank_is_stopped(ended, study_mark):
    stopped = []

    def stop(beat):
        if beat.phase is Phase.MEASURE and not stopped:
            alive = marked(study_mark)
            (template,) = (pid for pid, parent in alive.items() if parent == os.getpid())
            (leader,) = (pid for pid, parent in alive.items() if parent == template)
            stopped.append(max(pid for pid, parent in alive.items() if parent == leader))
            os.kill(stopped[0], signal.SIGSTOP)

    end = ended("", plan=ENDLESS, limits=PhaseLimits(silence_s=3.0), on_beat=stop, **TWO)
    assert end.result.status is TrialStatus.HANG
    assert end.result.cause.endswith("rank 1 does not answer, and the others wait for it")
    assert not psutil.pid_exists(stopped[0])


def test_ranks_train_together(fault, process_launcher):
    plan = MeasurePlan(target_halfwidth=10.0, min_windows=4, min_window_s=0.05, max_measure_s=4.0)
    config = {"num_workers": 1, "prefetch_factor": 2}
    result = process_launcher.run(
        fault(config=config, plan=plan, ranks=2), on_beat=lambda beat: None, stop=lambda: False
    )
    assert result.status is TrialStatus.COMPLETE, result.cause
    found = result.measurement
    # Two batches of eight in each step.
    assert all(window.samples == 16 * window.steps for window in found.windows)
    assert found.batch_size == 8 and found.epoch_samples == 80000
    assert len(found.rank_wait_fractions) == 2 and all(0 <= part <= 1 for part in found.rank_wait_fractions)
