"""Every known error of PyTorch, CUDA and the loader, and the status it leads to."""

import signal

import pytest
import torch

from autotune.base.records import Phase, TrialStatus

MIB = 2**20
FULL = ["allocator", "driver", "cublas", "cudnn", "engine"]
CAUSES = {
    "allocator": "CUDA out of memory",
    "driver": "CUDA error: out of memory",
    "cublas": "CUBLAS_STATUS_ALLOC_FAILED",
    "cudnn": "CUDNN_STATUS_NOT_SUPPORTED",
    "engine": "unable to find an engine",
}


@pytest.mark.parametrize("name", FULL)
def test_out_of_memory_in_a_step(ended, name):
    end = ended(f"errors.raised:{name}", 2)
    assert end.seen == (TrialStatus.OOM, Phase.WARMUP)
    assert CAUSES[name] in end.result.cause
    assert "smaller batch" in end.result.advice


@pytest.mark.parametrize("name", FULL)
def test_out_of_memory_while_compiling(ended, name):
    end = ended(f"errors.while_compiling:{name}", 1)
    assert end.seen == (TrialStatus.OOM, Phase.COMPILE)
    assert CAUSES[name] in end.result.cause


def test_out_of_memory_that_inductor_wrapped_itself(ended):
    end = ended("errors.out_of_memory_in_a_pass", 1)
    assert end.seen == (TrialStatus.OOM, Phase.COMPILE)
    assert "CUDA out of memory" in end.result.cause
    assert "InductorError" in end.stderr or "BackendCompilerFailed" in end.stderr


@pytest.mark.parametrize(
    ("name", "at", "phase"),
    [
        ("hoard_tensors", "build", Phase.BUILD),
        ("hoard_tensors", 2, Phase.WARMUP),
        ("hoard_bytes", 2, Phase.WARMUP),
        ("hoard_arrays", 2, Phase.WARMUP),
        ("hoard_threads", 2, Phase.WARMUP),
    ],
)
def test_out_of_memory_under_a_limit(ended, name, at, phase):
    end = ended(f"errors.{name}", at, memory_limit_bytes=256 * MIB)
    assert end.seen == (TrialStatus.OOM, phase), end.result.cause
    assert end.result.cause and "there is no limit" not in end.result.cause
    assert end.result.peak_bytes < 300 * MIB


def test_no_triton_configuration_fits_a_kernel_into_its_shared_memory(ended):
    """That shared memory is part of the chip, and unrelated to the memory for a batch."""
    end = ended("errors.no_triton_configs", 1)
    assert end.seen == (TrialStatus.COMPILE_FAILED, Phase.COMPILE)
    assert "No valid triton configs" in end.result.cause and not end.result.cannot_compile


@pytest.mark.slow
def test_a_c_compiler_that_fails(ended, tmp_path):
    end = ended("errors.compiler_that_fails", 1, cache_folder=str(tmp_path / "cache"))
    assert end.seen == (TrialStatus.COMPILE_FAILED, Phase.COMPILE)
    assert "CppCompileError" in end.result.cause or "/bin/false" in end.result.cause, end.result.cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache", "cause", "advice"),
    [
        ("compile_without_a_compiler", "cache", "No working C++ compiler found", "install g++"),
        ("compile_without_headers", "cache", "fatal error: Python.h: No such file or directory", "-dev"),
        ("out_of_memory_in_a_pass", "a-file/cache", "the compiler's cache cannot be written", "folder writable"),
    ],
    ids=["no compiler", "no headers", "no cache"],
)
def test_a_machine_that_cannot_compile(ended, tmp_path, name, cache, cause, advice):
    (tmp_path / "a-file").touch()
    end = ended(f"errors.{name}", 1, cache_folder=str(tmp_path / cache))
    assert end.seen == (TrialStatus.COMPILE_FAILED, Phase.COMPILE), end.result.cause
    assert end.result.cannot_compile
    assert cause in end.result.cause and advice in end.result.advice


def test_an_illegal_address(ended):
    end = ended("errors.raised:address", 2)
    assert end.seen == (TrialStatus.CRASHED, Phase.WARMUP)
    assert "illegal memory access" in end.result.cause
    assert end.result.exit_code == 1


@pytest.mark.parametrize("at", ["worker", 2], ids=["in a worker", "in the leader"])
def test_no_room_in_shared_memory(ended, at):
    end = ended("errors.raised:shm", at, config={"num_workers": 1})
    assert end.result.status is TrialStatus.SHM_EXHAUSTED
    assert "/dev/shm" in end.result.cause and "--shm-size" in end.result.advice


def test_workers_killed_by_their_leaders_side(ended):
    """Batches are in flight, so a broken connection is usually seen before the worker's death."""
    end = ended("errors.kill_all_workers", 4, config={"num_workers": 2, "prefetch_factor": 4})
    assert end.result.status is TrialStatus.LOADER_WORKER_DIED, end.result.cause
    assert "stderr.log" in end.result.advice


def test_a_cut_connection_of_the_users_own_is_no_dead_worker(ended):
    end = ended("errors.raised:reset", 2)
    assert end.seen == (TrialStatus.USER_ERROR, Phase.WARMUP)
    assert "Connection reset by peer" in end.result.cause


@pytest.mark.parametrize(
    ("name", "cause"),
    [("prefetch_without_workers", "prefetch_factor"), ("persistent_workers_without_workers", "persistent_workers")],
)
def test_loader_options_that_need_workers(ended, name, cause):
    end = ended(f"errors.{name}")
    assert end.seen == (TrialStatus.USER_ERROR, Phase.LOAD)
    assert end.result.cause.startswith("ValueError") and cause in end.result.cause


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this PyTorch has only the older switch"
)
def test_mixed_tf32_switches(ended):
    end = ended("errors.mixed_tf32_switches", "build")
    assert end.seen == (TrialStatus.USER_ERROR, Phase.BUILD)
    assert "allow_tf32" in end.result.cause.lower() or "fp32_precision" in end.result.cause


@pytest.mark.parametrize(
    ("name", "at", "phase"), [("nan", 1, Phase.COMPILE), ("infinity", 2, Phase.WARMUP)], ids=["nan", "infinity"]
)
def test_a_loss_that_is_not_finite(ended, name, at, phase):
    end = ended(f"errors.{name}", at)
    assert end.seen == (TrialStatus.DIVERGED, phase)
    assert "the loss became" in end.result.cause and name[:3] in end.result.cause


@pytest.mark.parametrize("who", ["leader", "worker"])
def test_a_kill_that_the_kernel_counted(ended, monkeypatch, tmp_path, who):
    """The kernel counts before it kills. The test can only change the counter, not cause a real OOM kill."""
    counts = tmp_path / "launch" / "left-behind"
    monkeypatch.setattr("autotune.launcher.oom_kill_count", lambda: int(counts.exists()))
    end = ended("leftovers.kill_noted", 2 if who == "leader" else "worker", config={"num_workers": 1})
    assert end.result.status is TrialStatus.HOST_OOM
    assert "the kernel's memory killer" in end.result.cause
    assert end.result.exit_code == (-signal.SIGKILL if who == "leader" else 1)
    assert "fewer workers" in end.result.advice


@pytest.mark.gpu
def test_a_failed_assertion_in_a_kernel(process_launcher, fault):
    """A real failure, if there is a card: this process cannot use it any more, the next one can."""
    spec = fault("errors.index_out_of_range_on_the_card", 2, devices=("cuda:0",))
    result = process_launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False)
    assert (result.status, result.phase) == (TrialStatus.CRASHED, Phase.WARMUP), result.cause
    assert "device-side assert" in result.cause
    after = process_launcher.run(
        fault(folder="next", devices=("cuda:0",)), on_beat=lambda beat: None, stop=lambda: False
    )
    assert after.status is TrialStatus.COMPLETE, after.cause
