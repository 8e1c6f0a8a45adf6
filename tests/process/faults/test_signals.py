"""Deaths by signal of the leader and of a loader worker, self-inflicted and from outside; and refusals to die."""

import os
import signal

import pytest

from autotune.base.records import Phase, PhaseLimits, TrialStatus
from autotune.knobs.compile_mode import phase_clause

from .conftest import ENDLESS, marked

SIGNALS = {"bus": signal.SIGBUS, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}
TWO_WORKERS = {"num_workers": 2, "prefetch_factor": 2}
MIDWAY = f"worker {8 * 60}"


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize(("at", "phase"), [("build", Phase.BUILD), (2, Phase.WARMUP)], ids=["build", "step"])
def test_the_leader_dies_of_itself(ended, name, at, phase):
    end = ended(f"signals.{name}", at)
    assert end.seen == (TrialStatus.CRASHED, phase)
    assert end.result.exit_code == -SIGNALS[name]
    assert end.result.cause == f"died by {SIGNALS[name].name}"
    assert f"in {name}" in end.result.evidence  # the stack, by faulthandler
    assert "stderr.log" in end.result.advice


@pytest.mark.parametrize("number", [signal.SIGKILL, *SIGNALS.values()], ids=lambda number: number.name)
def test_the_leader_is_killed_from_outside(ended, study_mark, number):
    def kill_the_leader(beat):
        if beat.phase is Phase.COMPILE:
            alive = marked(study_mark)
            (template,) = (pid for pid, parent in alive.items() if parent == os.getpid())
            (leader,) = (pid for pid, parent in alive.items() if parent == template)
            os.kill(leader, number)

    end = ended("signals.wait", 1, on_beat=kill_the_leader)
    killed = number is signal.SIGKILL
    assert end.seen == (TrialStatus.KILLED if killed else TrialStatus.CRASHED, Phase.COMPILE)
    assert end.result.exit_code == -number
    assert end.result.cause == ("killed from outside (SIGKILL)" if killed else f"died by {number.name}")


@pytest.mark.parametrize("name", ["kill", *SIGNALS])
@pytest.mark.parametrize(
    ("at", "phase"), [("worker", Phase.BUILD), (MIDWAY, Phase.MEASURE)], ids=["first sample", "midway"]
)
def test_a_worker_dies(ended, name, at, phase):
    end = ended(f"signals.{name}", at, config=TWO_WORKERS, plan=ENDLESS)
    assert end.seen == (TrialStatus.LOADER_WORKER_DIED, phase), f"{end.result.cause}\n{end.stderr}"
    assert end.result.exit_code == 1
    how = "was killed (SIGKILL)" if name == "kill" else f"died by {SIGNALS[name].name}"
    assert end.result.cause.startswith(f"a loader worker {how}")
    assert "stderr.log" in end.result.advice


def test_a_workers_death_is_told_when_a_batch_is_asked_for(ended):
    # Raised elsewhere, it could leave a queue's lock taken, and the launch would wait for it until its limit.
    end = ended("signals.lose_workers", "build", config=TWO_WORKERS)
    assert end.seen == (TrialStatus.LOADER_WORKER_DIED, Phase.BUILD), end.result.cause
    assert (end.files.folder / "uninterrupted").read_text() == "2"


def test_a_worker_is_stuck_in_getitem(ended):
    end = ended("signals.wait_in_c", "worker", config=TWO_WORKERS, limits=PhaseLimits(build_s=0.5))
    assert end.seen == (TrialStatus.TIMEOUT, Phase.BUILD)
    assert "phase build" in end.result.cause and "0.5 s" in end.result.cause
    assert "stacks of all threads" in end.result.advice
    assert "dataloader.py" in end.stderr  # where the leader waits for it


@pytest.mark.slow
def test_a_worker_gets_stuck_midway(ended):
    end = ended("signals.wait_deaf", MIDWAY, config=TWO_WORKERS, plan=ENDLESS, limits=PhaseLimits(silence_s=1.0))
    assert end.seen == (TrialStatus.HANG, Phase.MEASURE)
    assert "no step was finished for 1 s" in end.result.cause
    assert "dataloader.py" in end.stderr


def test_the_leader_hangs_in_a_step(ended):
    end = ended("signals.wait_in_c", 3, plan=ENDLESS, limits=PhaseLimits(silence_s=0.5))
    assert end.result.status is TrialStatus.HANG
    assert end.result.phase in (Phase.WARMUP, Phase.MEASURE)
    assert end.result.cause == f"no step was finished for 0.5 s in phase {end.result.phase}"
    assert end.result.exit_code == -signal.SIGKILL
    assert "in wait_in_c" in end.stderr


@pytest.mark.parametrize(("at", "phase"), [("load", Phase.LOAD), (1, Phase.COMPILE)], ids=["load", "compile"])
def test_a_phases_limit_ends_the_deaf(ended, at, phase):
    end = ended("signals.wait_deaf", at, limits=PhaseLimits(**{f"{phase}_s": 0.4}))
    assert end.seen == (TrialStatus.TIMEOUT, phase)
    assert end.result.cause == f"{phase_clause(phase, {})} took longer than its limit of 0.4 s"
    assert "in wait_deaf" in end.stderr


@pytest.mark.slow
def test_steps_that_go_on_for_ever_are_no_hang(ended):
    end = ended("", plan=ENDLESS, limits=PhaseLimits(measure_s=1.5, silence_s=1.0))
    assert end.seen == (TrialStatus.TIMEOUT, Phase.MEASURE)
    assert "phase measure" in end.result.cause


def test_the_deaf_are_interrupted(ended):
    phases = []
    end = ended(
        "signals.wait_deaf", 1, on_beat=lambda beat: phases.append(beat.phase), stop=lambda: Phase.COMPILE in phases
    )
    assert end.seen == (TrialStatus.INTERRUPTED, Phase.COMPILE)
    assert end.result.exit_code == -signal.SIGKILL
    assert end.seconds < 5


@pytest.mark.parametrize(
    ("name", "at", "phase"),
    [("leave_with_0", "load", Phase.LOAD), ("leave_with_0", 2, Phase.WARMUP)],
)
def test_exit_code_0_proves_nothing(ended, name, at, phase):
    end = ended(f"signals.{name}", at)
    assert end.seen == (TrialStatus.CRASHED, phase)
    assert (end.result.exit_code, end.result.measurement) == (0, None)
    assert end.result.cause == "ended with exit code 0 and reported nothing"


def test_a_polite_exit_is_the_users(ended):
    end = ended("signals.leave_politely", "load")
    assert end.seen == (TrialStatus.USER_ERROR, Phase.LOAD)
    assert end.result.cause.startswith("SystemExit: 0 (faults.py:")


def test_a_polite_exit_of_a_process_that_the_user_forked(ended):
    end = ended("signals.leave_politely_in_a_fork", 2)
    assert end.result.status is TrialStatus.COMPLETE, end.result.cause
