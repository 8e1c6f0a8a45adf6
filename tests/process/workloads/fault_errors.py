"""Errors as PyTorch, CUDA and the system raise them: real ones if a CPU can cause them, otherwise with the exact type
and text."""

import contextlib
import os
import signal
import sysconfig
import threading
from multiprocessing import shared_memory

import numpy as np
import torch
from torch.utils.data import DataLoader

_BLOCK_BYTES = 32 * 2**20
_ASK_CUDA = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
    " incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
#: Older versions of PyTorch have no type of their own for what the driver reports.
_DriverError = getattr(torch, "AcceleratorError", RuntimeError)
_SAID = {
    "allocator": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.06 GiB is"
        " free. Process 4711 has 138.73 GiB memory in use."
    ),
    "driver": _DriverError("CUDA error: out of memory" + _ASK_CUDA),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    "engine": RuntimeError("GET was unable to find an engine to execute this computation"),
    "address": _DriverError("CUDA error: an illegal memory access was encountered" + _ASK_CUDA),
    "shm": RuntimeError(
        "unable to allocate shared memory(shm) for file </torch_4711_123_4>: No space left on device (28)"
    ),
    "bus": RuntimeError(
        "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out"
        " of shared memory. Please try to raise your shared memory limit."
    ),
    "reset": ConnectionResetError(104, "Connection reset by peer"),
}


def of_the_users_own(ctx):
    raise ValueError("the labels are wrong")


def raised(ctx, name):
    raise _SAID[name]


def while_compiling(ctx, name):
    """Raise an error as torch.compile passes it on."""
    inner = _SAID[name]
    raise wrapped_by_the_compiler(inner).with_traceback(inner.__traceback__) from None


def wrapped_by_the_compiler(inner):
    """Return an error as torch.compile raises it; older versions of PyTorch have no InductorError."""
    try:
        from torch._inductor.exc import InductorError
    except ImportError:
        from torch._dynamo.exc import BackendCompilerFailed

        return BackendCompilerFailed(wrapped_by_the_compiler, inner)
    return InductorError(inner, None)


def no_triton_configs(ctx):
    from torch._inductor.runtime import triton_heuristics

    # Older versions raise the same text without a type of its own.
    inner = getattr(triton_heuristics, "NoTritonConfigsError", RuntimeError)(
        "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 262144 Hardware limit:232448"
        " Reducing block sizes or `num_stages` may help. out of resource: shared memory"
    )
    raise wrapped_by_the_compiler(inner)


def broken_graph(ctx):
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(broken, fullgraph=True, backend="eager")(torch.ones(2))


def out_of_memory_in_a_pass(ctx):
    """A real error inside inductor, which wraps it."""

    def no_room(graph):
        raise _SAID["allocator"]

    torch._inductor.config.post_grad_custom_pre_pass = no_room
    torch.compile(lambda x: x.sin() + 1)(torch.ones(4))


def hoard_tensors(ctx):
    _hoard(lambda: torch.ones(_BLOCK_BYTES // 4))


def hoard_bytes(ctx):
    _hoard(lambda: b"x" * _BLOCK_BYTES)


def hoard_arrays(ctx):
    _hoard(lambda: np.ones(_BLOCK_BYTES // 8))


def hoard_threads(ctx):
    """Thread stacks take memory too."""
    threading.stack_size(_BLOCK_BYTES)
    stop = threading.Event()
    try:
        _hoard(lambda: threading.Thread(target=stop.wait, daemon=True).start())
    finally:
        stop.set()


def _hoard(block):
    kept = [block() for _ in range(16)]
    raise AssertionError(f"{len(kept)} blocks fitted: there is no limit")


def prefetch_without_workers(ctx):
    DataLoader([0], num_workers=0, prefetch_factor=2)


def persistent_workers_without_workers(ctx):
    DataLoader([0], num_workers=0, persistent_workers=True)


def mixed_tf32_switches(ctx):
    """The newer switch is set, then the older one read, as torch.compile does."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cuda.matmul.allow_tf32  # noqa: B018


def index_out_of_range_on_the_card(ctx):
    """An assertion in a kernel, after which the process cannot use the card any more."""
    table = torch.ones(4, device=ctx.device)
    table[torch.tensor([2**20], device=ctx.device)] += 1
    torch.cuda.synchronize()


def kill_all_workers(ctx):
    """Called from the leader's own step, while the workers hold batches."""
    for pid in _children():
        os.kill(pid, signal.SIGKILL)


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children") as stream:
        return [int(pid) for pid in stream.read().split()]


def nan(ctx):
    return float("nan")


def infinity(ctx):
    return float("-inf")


def samples_of_2_mib(ctx):
    """Batches of 16 MiB, for a /dev/shm smaller than one."""
    return [(torch.ones(2**19), 0)] * 256


def touch_shared_memory_that_is_not_there(ctx):
    """Allocating more than the file system holds succeeds, and touching it raises a bus error."""
    block = shared_memory.SharedMemory(create=True, size=64 * 2**20)
    block.buf[:] = bytes(block.size)


def compiler_that_fails(ctx):
    torch._inductor.config.cpp.cxx = ("/bin/false",)
    torch.compile(lambda x: x.sin() + 1)(torch.ones(4))


def compile_without_a_compiler(ctx):
    os.environ["PATH"] = "/nowhere"
    torch.compile(lambda x: x.sin() + 1)(torch.ones(4))


def compile_without_headers(ctx):
    """As without the package that has Python's headers."""
    known = sysconfig.get_path
    sysconfig.get_path = lambda name, *args, **more: "/nowhere" if name == "include" else known(name, *args, **more)
    # Trying vector instructions and precompiling headers would take many seconds.
    torch._inductor.config.cpp.vec_isa_ok = False
    torch._inductor.config.cpp_cache_precompile_headers = False
    torch.compile(lambda x: x.sin() + 1)(torch.ones(4))


class _Numbers(torch.utils.data.Dataset):
    """Samples whose batch is shared only when it is sent, by the thread of the worker's queue."""

    def __len__(self):
        return 80_000

    def __getitem__(self, index):
        with open(f"/dev/shm/torch_{os.getpid()}_0_0", "ab", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(2**16))
        return index


def batches_shared_when_sent(ctx):
    return _Numbers()
