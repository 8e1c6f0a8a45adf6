"""Classifying a failure by the exception alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError

from autotune.base.records import TrialSpec, TrialStatus
from autotune.child.failure import classify
from tests.support import make_spec

BUS = (
    "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)


@pytest.fixture
def spec(tmp_path: Path) -> TrialSpec:
    return make_spec(tmp_path / "a")


def no_space(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_a_full_disk_is_not_a_failure_of_the_configuration(spec: TrialSpec) -> None:
    verdict = classify(no_space("/data/cache/0001.npy"), spec)
    assert verdict.status is TrialStatus.CRASHED
    assert "the disk is full" in verdict.cause and "/data/cache/0001.npy" in verdict.cause and verdict.advice


def test_a_full_compiler_cache_is_not_a_compile_failure(spec: TrialSpec) -> None:
    inductor = pytest.importorskip("torch._inductor.exc")
    if not hasattr(inductor, "InductorError"):
        pytest.skip("this PyTorch has no InductorError")
    error = inductor.InductorError(no_space("/studies/a/cache"), None)
    assert classify(error, spec).status is TrialStatus.CRASHED


def test_full_shared_memory_is_a_different_failure(spec: TrialSpec) -> None:
    verdict = classify(no_space("/dev/shm/pym-1-x"), spec)
    assert verdict.status is TrialStatus.SHM_EXHAUSTED
    assert "MiB are free now" in verdict.cause and "/dev/shm/pym-1-x" in verdict.cause


def test_a_workers_bus_error_is_classified_by_pytorchs_message_without_other_evidence(spec: TrialSpec) -> None:
    verdict = classify(RuntimeError(BUS), spec)
    assert verdict.status is TrialStatus.SHM_EXHAUSTED and "SIGBUS" in verdict.cause


def test_a_worker_whose_end_the_thread_that_pins_memory_has_not_survived(spec: TrialSpec) -> None:
    error = RuntimeError("Pin memory thread exited unexpectedly")
    verdict = classify(error, spec)
    assert verdict.status is TrialStatus.LOADER_WORKER_DIED and str(error) in verdict.cause


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        RuntimeError("received 0 items of ancdata"),
        RuntimeError("Too many open files. Communication with the workers is no longer possible."),
    ],
    ids=["the system's", "multiprocessing's", "PyTorch's"],
)
def test_too_many_open_files_name_the_limit(spec: TrialSpec, error: Exception) -> None:
    verdict = classify(error, spec)
    assert verdict.status is TrialStatus.USER_ERROR and "ulimit -n" in str(verdict.advice)
    assert classify(ValueError("another"), spec).advice is None


def alone(error: Exception) -> Exception:
    return error


def by_the_compiler(error: Exception) -> Exception:
    try:
        from torch._inductor.exc import InductorError
    except ImportError:  # older versions of PyTorch
        from torch._dynamo.exc import BackendCompilerFailed

        return BackendCompilerFailed(by_the_compiler, error)  # type: ignore[call-arg]
    return InductorError(error, None)


def raised_from(error: Exception) -> Exception:
    """As a user's own code may wrap it."""
    outer = ValueError("the step failed")
    outer.__cause__ = error
    return outer


WRAPPERS = [alone, by_the_compiler, raised_from]
ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.mark.parametrize("wrapped", WRAPPERS)
@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory" + ASYNCHRONOUS,
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`",
    ],
)
def test_all_ways_to_say_that_the_cards_memory_is_full(
    spec: TrialSpec, text: str, wrapped: Callable[[Exception], Exception]
) -> None:
    verdict = classify(wrapped(RuntimeError(text)), spec)
    assert verdict.status is TrialStatus.OOM
    assert text.splitlines()[0] in verdict.cause and "smaller batch" in str(verdict.advice)


@pytest.mark.parametrize(
    "last", ["Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'", "Failed to CUDA calloc 6291456 bytes"]
)
def test_what_nccl_lacked_is_the_cards_memory(spec: TrialSpec, last: str) -> None:
    """Its buffers are not PyTorch's, and are made after the model."""
    words = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
    call = "ncclUnhandledCudaError: Call to CUDA function failed."
    verdict = classify(DistBackendError(f"{words}\n{call}\nLast error:\n{last}"), spec)
    assert (verdict.status, verdict.cause) == (TrialStatus.OOM, last)
    other = classify(DistBackendError(f"{words}\n{call}\nLast error:\nCuda failure 1 'other'"), spec)
    assert other.status is TrialStatus.USER_ERROR


@pytest.mark.parametrize("typed", [True, False], ids=["AcceleratorError", "without it"])
@pytest.mark.parametrize("wrapped", [alone, raised_from])
@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered" + ASYNCHRONOUS,
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`",
        "CUDA driver error: unknown error",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "Triton Error [CUDA]: misaligned address",
    ],
)
def test_an_error_of_the_driver_or_its_libraries_is_not_the_users(
    spec: TrialSpec, monkeypatch: pytest.MonkeyPatch, text: str, wrapped: Callable[[Exception], Exception], typed: bool
) -> None:
    """Most have no type of their own; before PyTorch 2.8, none has."""
    if not typed:
        monkeypatch.delattr("torch.AcceleratorError", raising=False)
    verdict = classify(wrapped(RuntimeError(text)), spec)
    assert (verdict.status, verdict.cause) == (TrialStatus.CRASHED, f"RuntimeError: {text.splitlines()[0]}")


class Speechless(ValueError):
    def __str__(self) -> str:
        raise AttributeError("no message")


def test_an_error_whose_message_cannot_be_shown(spec: TrialSpec) -> None:
    verdict = classify(Speechless(), spec)
    assert verdict.status is TrialStatus.USER_ERROR
    assert verdict.cause == "Speechless: (its message cannot be shown: AttributeError)"


class Spectrum(torch.nn.Module):
    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(signal).abs()


class Rotation(torch.nn.Module):
    def forward(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(parts).abs()


def _frames(dtype: torch.dtype) -> torch.Tensor:
    frames, lengths = torch.randn(5, 2, 4, dtype=dtype), torch.tensor([2, 2])
    loss: torch.Tensor = torch.nn.CTCLoss()(frames, torch.ones(2, 2, dtype=torch.long), torch.tensor([5, 5]), lengths)
    return loss


LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("precision", "layer", "fails"),
    [
        ("bf16", "Spectrum", lambda dtype: Spectrum()(torch.randn(2, 16, dtype=dtype))),
        ("bf16", "Rotation", lambda dtype: Rotation()(torch.randn(2, 4, 2, dtype=dtype))),
        ("bf16", "CTCLoss", _frames),
        ("fp16", "CTCLoss", _frames),
        ("bf16", "Linear", lambda dtype: torch.nn.Linear(2, 2)(torch.randn(2, 2, dtype=dtype))),
        ("fp16", "Linear", lambda dtype: torch.nn.Linear(2, 2)(torch.randn(2, 2, dtype=dtype))),
        ("bf16", None, lambda dtype: torch.randn(2, dtype=dtype).numpy()),
    ],
)
def test_what_refuses_a_precision_is_named(
    spec: TrialSpec, precision: str, layer: str | None, fails: Callable[[torch.dtype], object]
) -> None:
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)) as raised:
        fails(LOWER[precision])
    lower = spec.model_copy(update={"config": {**spec.config, "precision": precision}})
    verdict = classify(raised.value, lower)
    assert verdict.status is TrialStatus.USER_ERROR and verdict.refuses == "precision"
    by = f" by {layer}" if layer else ""
    assert verdict.cause.startswith(f"{precision} is refused{by}: {type(raised.value).__name__}: "), verdict.cause
    # The same in full precision is the training's own fault, and so is anything else in a lower one.
    assert classify(raised.value, spec).refuses is None
    assert classify(RuntimeError("shapes cannot be multiplied"), lower).refuses is None
