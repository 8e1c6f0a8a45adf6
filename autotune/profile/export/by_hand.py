"""What a user does about a knob that a tool can't be told: one clause for each knob."""

from __future__ import annotations

from collections.abc import Callable

from autotune.knobs import KNOBS, Scope, spell
from autotune.knobs.alloc_conf import KNOB as ALLOCATOR
from autotune.knobs.alloc_conf import setting_of
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.cudnn_benchmark import KNOB as BENCHMARK
from autotune.knobs.deterministic import KNOB as DETERMINISTIC
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.knobs.gradient_compression import KNOB as COMPRESSION
from autotune.knobs.intra_op_threads import KNOB as THREADS
from autotune.knobs.memory_format import KNOB as FORMAT
from autotune.knobs.non_blocking import KNOB as NON_BLOCKING
from autotune.knobs.optimizer_impl import KNOB as OPTIMIZER
from autotune.knobs.precision import KNOB as PRECISION
from autotune.base.records import Value

#: The allocator's variable, by PyTorch's older name and its newer one.
ALLOCATOR_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"


def by_hand(name: str, value: Value, *, cuda: bool) -> str:
    """Return what to do in one's own code or shell to have a knob's value, as a clause."""
    knob = KNOBS.get(name)
    if knob is None:
        return "a knob of the workload, to be set in its code"
    if name in _CLAUSES:
        return _CLAUSES[name](value, cuda)
    options = knob.loader_options(value)
    if options or knob.scope is Scope.LOADER:
        return f"give it to the training's DataLoader: {', '.join(f'{n}={v!r}' for n, v in options.items())}"
    exchange = knob.exchange_options(value)
    if exchange:
        return f"give it to DistributedDataParallel: {', '.join(f'{n}={v!r}' for n, v in exchange.items())}"
    return "not known to this format; autotune.load_profile() applies it"


#: Its fused kernels spoil the momentum in a step that overflows (see `set_implementation`).
SCALED_SGD = "SGD needs optimizer._step_supports_amp_scaling = False"


def _precision(value: Value, cuda: bool) -> str:
    if value == "tf32":
        return 'torch.set_float32_matmul_precision("high") before training'
    if value == "fp32":
        return "no autocast, and PyTorch's own switches for TF32"
    dtype = "bfloat16" if value == "bf16" else "float16"
    scaler = ", with a torch.amp.GradScaler" if value == "fp16" else ""
    return f'forward and loss under torch.autocast("{"cuda" if cuda else "cpu"}", dtype=torch.{dtype}){scaler}'


def _layout(value: Value, cuda: bool) -> str:
    if value == FORMAT.default:
        return "model and images stay as they are"
    return f"model.to(memory_format=torch.{value}), and the images of each batch alike"


def _implementation(value: Value, cuda: bool) -> str:
    wanted = {"fused": "fused=True", "foreach": "foreach=True"}.get(str(value), "foreach=False, fused=False")
    scaled = f"; with a GradScaler, {SCALED_SGD}" if value == "fused" and cuda else ""
    return f"give it to the training's optimizer: {wanted}{scaled}"


def _allocator(value: Value, cuda: bool) -> str:
    if value == ALLOCATOR.default:
        return f"no such setting in {ALLOCATOR_VARIABLES}"
    return f"{ALLOCATOR_VARIABLES} are to be {setting_of(value)} in the environment"


def _determinism(value: Value, cuda: bool) -> str:
    if not value:
        return "torch.use_deterministic_algorithms(False), as PyTorch has it"
    return "torch.use_deterministic_algorithms(True), and CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"


def _accumulation(value: Value, cuda: bool) -> str:
    return "each batch in one piece" if value == 1 else f"each batch in {value} parts, with one step for all of them"


_CLAUSES: dict[str, Callable[[Value, bool], str]] = {
    PRECISION.name: _precision,
    COMPILE.name: lambda value, cuda: (
        "the model is not compiled" if value == COMPILE.default else f'model.compile(mode="{value}") before training'
    ),
    ACCUMULATION.name: _accumulation,
    FORMAT.name: _layout,
    NON_BLOCKING.name: lambda value, cuda: f"batches go to the device by tensor.to(device, non_blocking={bool(value)})",
    BENCHMARK.name: lambda value, cuda: f"torch.backends.cudnn.benchmark = {bool(value)} before training",
    DETERMINISTIC.name: _determinism,
    OPTIMIZER.name: _implementation,
    THREADS.name: lambda value, cuda: f"torch.set_num_threads({spell(value)}), or OMP_NUM_THREADS={spell(value)}",
    ALLOCATOR.name: _allocator,
    COMPRESSION.name: lambda value, cuda: (
        "no hook of DistributedDataParallel"
        if value == COMPRESSION.default
        else f"model.register_comm_hook(None, {value}_compress_hook), of torch.distributed.algorithms.ddp_comm_hooks"
    ),
}
