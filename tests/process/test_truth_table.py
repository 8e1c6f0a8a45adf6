"""Every way a launch can end, made to happen in a real child, and the proof that the next launch works."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.clock import SystemClock
from autotune.launcher import ProcessLauncher, end_survivors
from autotune.launcher.verdict import verdict
from autotune.launcher.watch import Watch
from autotune.layout import LaunchFiles
from autotune.records import LaunchKind, Phase, PhaseLimits, TrialStatus

from .alive import marked, wait_until

MIB = 2**20
RUN_A_SPEC = Path(__file__).parent / "run_a_spec.py"


@pytest.fixture
def launch(process_launcher, study_mark, faulty):
    """Run a spec on the shared launcher; afterwards nothing of it is alive, and a healthy launch completes."""

    def run(spec, *, on_beat=lambda beat: None, stop=lambda: False):
        result = process_launcher.run(spec, on_beat=on_beat, stop=stop)
        only_the_template_lives(study_mark)
        again = process_launcher.run(faulty(folder="next"), on_beat=lambda beat: None, stop=lambda: False)
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
    lines = (workloads / "faulty.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


PLACES = [("load", Phase.LOAD), ("build", Phase.BUILD), (1, Phase.COMPILE), (2, Phase.WARMUP), (6, Phase.MEASURE)]


def test_complete(launch, faulty):
    result = launch(faulty())
    assert (result.status, result.exit_code, result.unclean_exit) == (TrialStatus.COMPLETE, 0, False)


@pytest.mark.parametrize(("at", "phase"), PLACES)
def test_a_reported_failure_has_its_phase_and_the_users_own_line(launch, faulty, workloads, at, phase):
    result = launch(faulty("raise_an_error", at))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.USER_ERROR, phase, 1)
    line = line_of(workloads, "the labels are wrong")
    assert result.cause == f"ValueError: the labels are wrong (faulty.py:{line})"
    assert "raise_an_error" in result.evidence


def test_an_error_in_a_worker_is_the_users(launch, faulty):
    result = launch(faulty("raise_an_error", "worker", config={"num_workers": 2}))
    assert (result.status, result.exit_code) == (TrialStatus.USER_ERROR, 1)
    assert "ValueError: the labels are wrong" in result.cause
    # PyTorch would wait 5 s at exit for each worker, because nobody told them to stop.
    assert result.wall_s < 5


@pytest.mark.parametrize(
    ("fault", "signal_number"), [("segfault", signal.SIGSEGV), ("abort", signal.SIGABRT)], ids=["segfault", "abort"]
)
def test_a_signal_of_its_own_making_is_a_crash(launch, faulty, fault, signal_number):
    result = launch(faulty(fault, 2))
    assert (result.status, result.phase) == (TrialStatus.CRASHED, Phase.WARMUP)
    assert result.exit_code == -signal_number
    assert signal_number.name in result.cause
    assert f"in {fault}" in result.evidence  # faulthandler's stack


def test_sigkill_from_outside(launch, faulty):
    result = launch(faulty("kill_itself", 6))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.KILLED, Phase.MEASURE, -9)


def test_sigkill_while_the_kernels_counter_moved(faulty):
    spec = faulty("kill_itself", 6)
    files = LaunchFiles(Path(spec.folder))
    files.folder.mkdir()
    watch = Watch(spec, SystemClock(), lambda beat: None, lambda: False)
    watch.feed(b'{"phase": "measure", "step": 3, "memory_bytes": 77}\n')
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    result = verdict(spec, files, child.wait(), watch, kernel_killed=True)
    assert (result.status, result.phase, result.peak_bytes) == (TrialStatus.HOST_OOM, Phase.MEASURE, 77)
    assert "memory" in result.cause and result.advice


@pytest.mark.parametrize("fault", ["leave_with_0", "leave_politely"])
def test_exit_code_0_proves_nothing(launch, faulty, fault):
    result = launch(faulty(fault, 2))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.CRASHED, Phase.WARMUP, 0)
    assert "reported nothing" in result.cause


@pytest.mark.parametrize(("fault", "exit_code"), [("segfault", -11), ("kill_itself", -9)])
def test_success_then_death_in_teardown(launch, faulty, fault, exit_code):
    result = launch(faulty(fault, "exit"))
    assert (result.status, result.exit_code, result.unclean_exit) == (TrialStatus.COMPLETE, exit_code, True)
    assert result.measurement is not None


@pytest.mark.parametrize(("at", "phase"), PLACES[:3])
def test_past_a_phases_limit(launch, faulty, at, phase):
    limits = PhaseLimits(**{f"{phase}_s": 0.8})
    spec = faulty("sleep_for_ever", at, limits=limits)
    result = launch(spec)
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.TIMEOUT, phase, -9)
    assert f"phase {phase}" in result.cause and "0.8 s" in result.cause
    assert "in sleep_for_ever" in stderr_of(spec)
    assert result.phase_s[phase] >= 0.8


@pytest.mark.parametrize(("at", "phase"), PLACES[3:])
def test_a_step_that_never_ends_is_a_hang(launch, faulty, at, phase):
    spec = faulty("sleep_for_ever", at, limits=PhaseLimits(silence_s=0.5))
    result = launch(spec)
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.HANG, phase, -9)
    assert "in sleep_for_ever" in stderr_of(spec)


@pytest.mark.parametrize("fault", ["eat_memory", "eat_memory_outside_torch"])
def test_out_of_memory_under_a_limit(launch, faulty, fault):
    result = launch(faulty(fault, 2, memory_limit_bytes=320 * MIB))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.OOM, Phase.WARMUP, 1)
    assert 160 * MIB < result.peak_bytes < 400 * MIB
    assert result.advice


def test_a_worker_is_not_bound_by_the_memory_limit(launch, faulty):
    """The first workers are older than the limit; those of the next epoch are forked under it."""
    limit = {"memory_limit_bytes": 320 * MIB, "config": {"num_workers": 1}, "samples": 16}
    result = launch(faulty("eat_memory_outside_torch", "next worker", **limit))
    assert result.status is TrialStatus.USER_ERROR
    assert "there is no limit" in result.cause


def test_a_killed_worker(launch, faulty):
    result = launch(faulty("kill_itself", "worker", config={"num_workers": 2}))
    assert (result.status, result.exit_code) == (TrialStatus.LOADER_WORKER_DIED, 1)


def test_shared_memory_exhausted(faulty, tmp_path):
    mount = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--mount", "--map-root-user", "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting a small /dev/shm in a namespace of its own is not permitted here")
    spec = faulty(config={"num_workers": 2}, sample_bytes=2 * MIB)
    healthy = faulty(folder="next", config={"num_workers": 2})
    result, after = run_elsewhere(
        [spec, healthy], tmp_path, ["unshare", "--mount", "--map-root-user", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    )
    assert (result["status"], result["exit_code"]) == ("shm_exhausted", 1)
    assert "/dev/shm" in result["cause"] and "--shm-size" in result["advice"]
    assert after["status"] == "complete", after["cause"]


def run_elsewhere(specs, tmp_path, prefix):
    """Run specs one after the other on a launcher in a process of its own; returns their results as JSON."""
    files = [tmp_path / f"{i}.json" for i in range(len(specs))]
    for file, spec in zip(files, specs, strict=True):
        file.write_text(spec.model_dump_json())
    command = [*prefix, sys.executable, str(RUN_A_SPEC), "test-elsewhere", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line["result"] for line in lines if "result" in line]


@pytest.mark.parametrize(("at", "phase"), PLACES[2:])
def test_a_loss_that_is_not_finite(launch, faulty, at, phase):
    result = launch(faulty("nan", at))
    assert (result.status, result.phase) == (TrialStatus.DIVERGED, phase)
    assert "nan" in result.cause


def test_a_compiler_that_gives_up(launch, faulty):
    result = launch(faulty("break_the_graph", 1))
    assert (result.status, result.phase) == (TrialStatus.COMPILE_FAILED, Phase.COMPILE)


def test_a_c_compiler_that_fails(launch, faulty, tmp_path):
    spec = faulty(
        "break_the_compiler", "load", config={"compile_mode": "default"}, cache_folder=str(tmp_path / "cache")
    )
    result = launch(spec)
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.COMPILE_FAILED, Phase.COMPILE, 1)


def test_interrupted(launch, faulty):
    beats = []
    result = launch(faulty("sleep_for_ever", 1), on_beat=beats.append, stop=lambda: len(beats) == 3)
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.INTERRUPTED, Phase.COMPILE, -9)


def test_pruned(launch, faulty):
    spec = faulty()
    plan = spec.plan.model_copy(update={"prune_below_per_s": 1e12})
    result = launch(spec.model_copy(update={"plan": plan}))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.PRUNED, Phase.MEASURE, 0)
    assert 0 < result.rate_seen_per_s < 1e12 and not result.transient


@pytest.mark.parametrize("fault", ["half_a_result", "bytes_for_a_result", "a_list_for_a_result", "a_huge_result"])
def test_a_result_that_is_none(launch, faulty, fault):
    result = launch(faulty(fault, 6))
    assert (result.status, result.phase, result.exit_code) == (TrialStatus.CRASHED, Phase.MEASURE, 0)
    assert "result file" in result.cause


def test_noise_in_the_pipe_of_beats_is_not_taken_for_progress(launch, faulty):
    beats = []
    result = launch(faulty("scribble_on_the_beats", 2), on_beat=beats.append)
    assert result.status is TrialStatus.COMPLETE
    assert [beat.phase for beat in beats].count(Phase.LOAD) == 1


def test_a_probe_fails_like_any_launch(launch, faulty):
    result = launch(faulty("raise_an_error", "load", kind=LaunchKind.PROBE))
    assert (result.status, result.phase, result.probe) == (TrialStatus.USER_ERROR, Phase.LOAD, None)


def test_a_process_left_behind_is_gone_with_the_launch(launch, faulty):
    spec = faulty("leave_a_process_behind", "build")
    assert launch(spec).status is TrialStatus.COMPLETE
    pid = int(LaunchFiles(Path(spec.folder)).stdout.read_text())
    assert not psutil.pid_exists(pid)


def test_workers_that_ignore_sigterm_die_with_their_leader(launch, faulty, study_mark):
    seen = []
    spec = faulty("ignore_sigterm_and_sleep", "worker", config={"num_workers": 2}, limits=PhaseLimits(build_s=0.8))
    result = launch(spec, on_beat=lambda beat: seen.append(len(marked(study_mark))))
    assert (result.status, result.phase) == (TrialStatus.TIMEOUT, Phase.BUILD)
    assert max(seen) == 4  # template, leader, two workers


def test_a_killed_template_takes_its_launch_along_and_a_new_one_comes_up(faulty):
    mark = "test-template"
    launcher = ProcessLauncher(mark, SystemClock())

    def kill_the_template(beat):
        if beat.phase is Phase.COMPILE:
            (template,) = (pid for pid, parent in marked(mark).items() if parent == os.getpid())
            os.kill(template, signal.SIGKILL)

    try:
        result = launcher.run(faulty("sleep_for_ever", 1), on_beat=kill_the_template, stop=lambda: False)
        assert (result.status, result.phase, result.exit_code) == (TrialStatus.KILLED, Phase.COMPILE, -9)
        assert marked(mark) == {}
        after = launcher.run(faulty(folder="next"), on_beat=lambda beat: None, stop=lambda: False)
        assert after.status is TrialStatus.COMPLETE
    finally:
        launcher.close()
    assert marked(mark) == {}


@pytest.mark.parametrize(
    ("fault", "at", "phase", "workers"),
    [("sleep_for_ever", 1, "compile", 0), ("ignore_sigterm_and_sleep", "worker", "build", 2)],
    ids=["in a step", "in the workers"],
)
def test_kill_9_of_the_parent_ends_everything(faulty, tmp_path, fault, at, phase, workers):
    mark = f"test-parent-{workers}"
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(faulty(fault, at, config={"num_workers": workers}).model_dump_json())
    command = [sys.executable, str(RUN_A_SPEC), mark, str(spec_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        for line in parent.stdout:
            if f'"{phase}"' in line:
                break
        wait_until(lambda: len(marked(mark)) == 2 + workers)  # template and leader
        parent.kill()
    wait_until(lambda: marked(mark) == {})


def test_what_still_outlives_a_killed_parent_is_found_by_its_mark(faulty, tmp_path):
    mark = "test-survivor"
    command = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    env = {**os.environ, "AUTOTUNE_STUDY": mark}
    pid = int(subprocess.run(["sh", "-c", command], env=env, capture_output=True, check=True).stdout)
    wait_until(lambda: list(marked(mark)) == [pid])
    assert end_survivors("another-study", SystemClock()) == 0
    assert end_survivors(mark, SystemClock()) == 1
    assert marked(mark) == {}


@pytest.mark.gpu
def test_out_of_memory_on_a_card(faulty, process_launcher):
    spec = faulty(sample_bytes=64 * MIB, devices=("cuda:0",), memory_limit_bytes=256 * MIB)
    result = process_launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)
    assert (result.status, result.phase) == (TrialStatus.OOM, Phase.COMPILE), result.cause
    assert "out of memory" in result.cause and result.peak_bytes is not None
    after = process_launcher.run(faulty(folder="next", devices=("cuda:0",)), on_beat=lambda b: None, stop=lambda: False)
    assert after.status is TrialStatus.COMPLETE, after.cause
