"""Every way a launch can end, caused in a real child, and a check that the next launch works."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.base.clock import SystemClock
from autotune.base.errors import MachineError
from autotune.base.layout import LaunchFiles
from autotune.base.records import LaunchKind, Phase, PhaseLimits, TrialStatus
from autotune.knobs.compile_mode import phase_clause
from autotune.launcher import ProcessLauncher, end_survivors
from autotune.launcher.watch import kill_marked

from .alive import marked, wait_until

MIB = 2**20
RUN_SPECS = Path(__file__).parent / "run_specs.py"


@pytest.fixture
def launch(process_launcher, study_mark, fault):
    """Run a spec on the shared launcher; check that nothing of it survives and that a healthy launch completes."""

    def run(spec, *, on_beat=lambda beat: None, stop=lambda: False):
        result = process_launcher.run(spec, on_beat=on_beat, stop=stop)
        only_the_template_lives(study_mark)
        again = process_launcher.run(fault(folder="next"), on_beat=lambda beat: None, stop=lambda: False)
        assert again.status is TrialStatus.COMPLETE, again.cause
        assert again.measurement is not None and not again.unclean_exit
        only_the_template_lives(study_mark)
        return result

    return run


def only_the_template_lives(mark):
    assert list(marked(mark).values()) == [os.getpid()]


def stderr_of(spec):
    return LaunchFiles(Path(spec.folder)).stderr.read_text(errors="replace")


def line_of(workloads, text):
    lines = (workloads / "faults.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


PLACES = [("load", Phase.LOAD), ("build", Phase.BUILD), (1, Phase.COMPILE), (2, Phase.WARMUP), (6, Phase.MEASURE)]


def test_complete(launch, fault):
    result = launch(fault())
    assert (result.status, result.exit_code, result.unclean_exit) == (TrialStatus.COMPLETE, 0, False)


@pytest.mark.parametrize(("at", "phase"), PLACES)
def test_a_reported_failure_has_its_phase_and_the_users_own_line(launch, fault, workloads, at, phase):
    result = launch(fault("errors.of_the_users_own", at))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.USER_ERROR, phase, 1)
    line = line_of(workloads, "importlib.import_module(")
    assert result.cause == f"ValueError: the labels are wrong (faults.py:{line})"
    assert "in of_the_users_own" in result.evidence


def test_an_error_in_a_worker_is_the_users(launch, fault):
    result = launch(fault("errors.of_the_users_own", "worker", config={"num_workers": 2}))
    assert (result.status, result.exit_code) == (TrialStatus.USER_ERROR, 1)
    assert "ValueError: the labels are wrong" in result.cause
    # At exit PyTorch would wait 5 s for each worker, because none was told to stop.
    assert result.wall_s < 5


@pytest.mark.parametrize(("name", "exit_code"), [("segv", -11), ("kill", -9)])
def test_success_then_death_in_teardown(launch, fault, name, exit_code):
    result = launch(fault(f"signals.{name}", "exit"))
    assert (result.status, result.exit_code, result.unclean_exit) == (TrialStatus.COMPLETE, exit_code, True)
    assert result.measurement is not None


@pytest.mark.parametrize(("at", "phase"), PLACES[:3])
def test_past_a_phases_limit(launch, fault, at, phase):
    limits = PhaseLimits(**{f"{phase}_s": 0.8})
    spec = fault("signals.wait", at, limits=limits)
    result = launch(spec)
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.TIMEOUT, phase, -9)
    assert f"{phase_clause(phase, {})}" in result.cause and "0.8 s" in result.cause
    assert "in wait" in stderr_of(spec)
    assert result.phase_s[phase] >= 0.8


def test_a_worker_is_not_bound_by_the_memory_limit(launch, fault):
    """The first workers are forked before the limit is set, those of the next epoch after it."""
    limit = {"memory_limit_bytes": 320 * MIB, "config": {"num_workers": 1}, "args": {"samples": "16"}}
    result = launch(fault("errors.hoard_bytes", "next worker", **limit))
    assert result.status is TrialStatus.USER_ERROR
    assert "there is no limit" in result.cause


def test_a_compiler_that_gives_up(launch, fault):
    result = launch(fault("errors.broken_graph", 1))
    assert (result.status, result.phase) == (TrialStatus.COMPILE_FAILED, Phase.COMPILE)
    assert not result.cannot_compile


def test_pruned(launch, fault):
    spec = fault()
    plan = spec.plan.model_copy(update={"prune_below_per_s": 1e12})
    result = launch(spec.model_copy(update={"plan": plan}))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.PRUNED, Phase.MEASURE, 0)
    assert 0 < result.rate_seen_per_s < 1e12 and not result.transient


def test_noise_in_the_pipe_of_beats_is_not_taken_for_progress(launch, fault):
    beats = []
    result = launch(fault("results.noise_among_the_beats", 2), on_beat=beats.append)
    assert result.status is TrialStatus.COMPLETE
    assert [beat.phase for beat in beats].count(Phase.LOAD) == 1


def test_a_probe_fails_like_any_launch(launch, fault):
    result = launch(fault("errors.of_the_users_own", "load", kind=LaunchKind.PROBE))
    assert (result.status, result.phase, result.probe) == (TrialStatus.USER_ERROR, Phase.LOAD, None)


def test_a_probe_counts_what_a_batch_is_made_of(launch, fault):
    """Each tensor of a batch takes an open file on its way from a worker; a plain label becomes a tensor too."""
    found = launch(fault(kind=LaunchKind.PROBE, args={"sample_bytes": "640", "samples": "4096"})).probe
    assert (found.sample_tensors, found.sample_bytes, found.dataset_samples) == (2, 640, 4096)


@pytest.mark.slow
def test_a_killed_template_takes_its_launch_along_and_a_new_one_comes_up(fault):
    mark = f"test-{uuid4().hex}"
    launcher = ProcessLauncher(mark, SystemClock())

    def kill_the_template(beat):
        if beat.phase is Phase.COMPILE:
            (template,) = (pid for pid, parent in marked(mark).items() if parent == os.getpid())
            os.kill(template, signal.SIGKILL)

    try:
        result = launcher.run(fault("signals.wait", 1), on_beat=kill_the_template, stop=lambda: False)
        assert (result.status, result.phase, result.exit_code) == (TrialStatus.KILLED, Phase.COMPILE, -9)
        assert marked(mark) == {}
        after = launcher.run(fault(folder="next"), on_beat=lambda beat: None, stop=lambda: False)
        assert after.status is TrialStatus.COMPLETE
    finally:
        launcher.close()
    assert marked(mark) == {}


@pytest.mark.slow
def test_a_machine_that_starts_no_more_processes(fault, tmp_path, monkeypatch):
    """As by `ulimit -u`, which does not bind every user who runs this test."""
    refusing = "def fork(): raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))"
    (tmp_path / "sitecustomize.py").write_text(f"import errno, os\n{refusing}\nos.fork = fork\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = ProcessLauncher(f"test-{uuid4().hex}", SystemClock())
    with pytest.raises(MachineError, match="no process can be started: Resource temporarily unavailable") as refused:
        launcher.run(fault(), on_beat=lambda beat: None, stop=lambda: False)
    launcher.close()
    assert "ulimit -u" in refused.value.advice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at", "phase", "workers"),
    [("wait", 1, "compile", 0), ("wait_deaf", "worker", "build", 2)],
    ids=["in a step", "in the workers"],
)
def test_kill_9_of_the_parent_ends_everything(fault, tmp_path, name, at, phase, workers):
    mark = f"test-{uuid4().hex}"
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(fault(f"signals.{name}", at, config={"num_workers": workers}).model_dump_json())
    command = [sys.executable, str(RUN_SPECS), mark, str(spec_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        for line in parent.stdout:
            if f'"{phase}"' in line:
                break
        wait_until(lambda: len(marked(mark)) == 2 + workers)  # template and leader
        parent.kill()
    wait_until(lambda: marked(mark) == {})


@pytest.mark.slow
def test_time_in_which_the_parent_was_stopped_does_not_count(fault, tmp_path):
    """As by Ctrl-Z. The launch itself goes on, and its step takes longer than its limit."""
    spec = fault("signals.wait_for:7", 1, limits=PhaseLimits(compile_s=6.0))
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(spec.model_dump_json())
    command = [sys.executable, str(RUN_SPECS), f"test-{uuid4().hex}", str(spec_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        for line in parent.stdout:
            if '"compile"' in line:
                break
        parent.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        parent.send_signal(signal.SIGCONT)
        result = json.loads(parent.stdout.read().splitlines()[-1])["result"]
    assert result["status"] == "complete", result["cause"]


def test_what_still_outlives_a_killed_parent_is_found_by_its_mark():
    mark = f"test-{uuid4().hex}"
    command = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    env = {**os.environ, "AUTOTUNE_STUDY": mark}
    pid = int(subprocess.run(["sh", "-c", command], env=env, capture_output=True, check=True).stdout)
    # While a process starts a program, the kernel shows no environment.
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n" and list(marked(mark)) == [pid])
    left = Path(f"/dev/shm/torch_{pid}_1_0")
    left.touch()
    assert end_survivors(f"{mark}-another", SystemClock()) == 0
    assert left.exists()
    assert end_survivors(mark, SystemClock()) == 1
    assert marked(mark) == {} and not left.exists()


def test_who_overwrites_the_beginning_of_its_environment_is_found_by_its_mark():
    mark = f"test-{uuid4().hex}"
    command = """
import ctypes, time
first = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")[0]
ctypes.memset(first, 0, 9)
print("done", flush=True)
time.sleep(1000)
"""
    env = {"FIRST": "anything", **os.environ, "AUTOTUNE_STUDY": mark}
    with subprocess.Popen([sys.executable, "-c", command], env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"done\n"
            assert Path(f"/proc/{process.pid}/environ").read_bytes().startswith(bytes(9))
            assert kill_marked("AUTOTUNE_STUDY", mark) == {process.pid}
            assert process.wait() == -signal.SIGKILL
        finally:
            process.kill()


@pytest.mark.gpu
def test_out_of_memory_on_a_card(fault, process_launcher):
    samples = {"args": {"sample_bytes": str(64 * MIB), "samples": "4096"}}
    spec = fault(**samples, devices=("cuda:0",), memory_limit_bytes=256 * MIB)
    result = process_launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)
    assert (result.status, result.phase) == (TrialStatus.OOM, Phase.COMPILE), result.cause
    assert "out of memory" in result.cause and result.peak_bytes is not None
    after = process_launcher.run(fault(folder="next", devices=("cuda:0",)), on_beat=lambda b: None, stop=lambda: False)
    assert after.status is TrialStatus.COMPLETE, after.cause
