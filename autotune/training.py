"""Every knob, applied. The trial and the user's full training both come through here, and nothing else sets one.

`process` acts on the whole process and must come before CUDA wakes. `open_loader`, `apply_model`,
`apply_optimizer` and `Step` act on one object each; `build` strings them together for a workload.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune import workload as contract
from autotune.errors import UsageError, WorkloadError
from autotune.records import Config
from autotune.space import CUDAGRAPH_MODES, environment
from autotune.workload import Context, Workload

Collate = Callable[[list[Any]], Any]
#: Puts something around a data set and its collate function.
Wrap = Callable[[Dataset[Any], Collate], tuple[Dataset[Any], Collate]]

#: What a value of ``precision`` has autocast do.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def process(config: Config) -> None:
    """Apply what acts on the whole process: threads, allocator, cuDNN, TF32.

    Raises:
        UsageError: the allocator was asked for, and CUDA is already awake.
    """
    wanted = environment(config)
    if wanted and torch.cuda.is_initialized() and any(os.environ.get(k) != v for k, v in wanted.items()):
        raise UsageError(
            "alloc_conf cannot be applied any more: CUDA is already initialized",
            advice="call process() before anything touches the GPU.",
        )
    os.environ.update(wanted)
    if wanted:
        # libc10 may have read the variables when torch was loaded, so it is told as well.
        # PyTorch 2.9 renamed this too.
        names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
        tell = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
        tell(wanted["PYTORCH_ALLOC_CONF"])
    if "intra_op_threads" in config:
        torch.set_num_threads(int(config["intra_op_threads"]))
    if "cudnn_benchmark" in config:
        torch.backends.cudnn.benchmark = bool(config["cudnn_benchmark"])
    if config.get("precision") == "tf32":
        # The one spelling that all supported versions know, and that does not clash with the newer
        # per-backend switches inside torch.compile. cuDNN's convolutions may use TF32 already.
        torch.set_float32_matmul_precision("high")


class Repeated(Dataset[Any]):
    """A data set dealt again and again until a stated epoch length is full.

    A generated set of 1,024 files stands for ImageNet's 1.28 million: batches of any size exist, and an epoch
    ends as seldom as it would in the real training.
    """

    def __init__(self, inner: Dataset[Any], length: int) -> None:
        self.inner = inner
        self.length = length
        self._size = len(inner)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.inner[index % self._size]


def loader_options(config: Config, *, worker_start_method: str) -> dict[str, Any]:
    """The knobs of a loader as keyword arguments of ``torch.utils.data.DataLoader``."""
    workers = int(config.get("num_workers", 0))
    options: dict[str, Any] = {
        "batch_size": int(config["batch_size"]),
        "num_workers": workers,
        "pin_memory": bool(config.get("pin_memory", False)),
    }
    if workers:
        options["prefetch_factor"] = int(config.get("prefetch_factor", 2))
        options["persistent_workers"] = bool(config.get("persistent_workers", False))
        options["multiprocessing_context"] = worker_start_method
    return options


def open_loader(
    workload: Workload,
    ctx: Context,
    config: Config,
    *,
    worker_start_method: str,
    wrap: Wrap | None = None,
) -> DataLoader[Any]:
    """The workload's loader under a configuration; its workers start with the first ``iter``.

    Shuffled from ``ctx.seed``, incomplete last batches dropped (their other shape would recompile).

    Args:
        wrap: lets the trial put its stopwatch around data set and collate function.

    Raises:
        WorkloadError: the data set does not fill one batch.
    """
    dataset = workload.dataset(ctx)
    size = len(dataset)  # type: ignore[arg-type]
    if size == 0:
        raise WorkloadError("the data set is empty", advice="look at what dataset(ctx) returns for this --data.")
    if ctx.data.epoch_samples is not None and size < ctx.data.epoch_samples:
        dataset = Repeated(dataset, ctx.data.epoch_samples)
    make_collate = contract.optional(workload, "collate")
    collate: Collate = make_collate(ctx) if make_collate else torch.utils.data.default_collate
    if wrap is not None:
        dataset, collate = wrap(dataset, collate)
    loader = DataLoader(
        dataset,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(ctx.seed),
        **loader_options(config, worker_start_method=worker_start_method),
    )
    if len(loader) == 0:
        raise WorkloadError(f"the data set does not fill one batch of {loader.batch_size}")
    return loader


def apply_model(model: nn.Module, config: Config, device: torch.device | str) -> nn.Module:
    """Move a model to the device in the configuration's memory format, and compile it there.

    The model is compiled in place (`nn.Module.compile`), so that its ``state_dict`` keeps its keys.
    """
    if config.get("memory_format") == "channels_last":
        model = model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        model = model.to(device)
    mode = str(config.get("compile_mode", "off"))
    if mode != "off":
        model.compile(mode=mode)
    return model


def apply_optimizer(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.Optimizer:
    """Choose how the optimizer visits parameters, before its first step.

    PyTorch's optimizers read ``foreach`` and ``fused`` from their parameter groups at every step, so both
    are set there: rebuilding the optimizer would need its constructor's signature.
    """
    impl = config.get("optimizer_impl")
    if impl is None:
        return optimizer
    for group in (optimizer.defaults, *optimizer.param_groups):
        for name, wanted in (("foreach", impl == "foreach"), ("fused", impl == "fused")):
            if name in group:
                group[name] = wanted
    # GradScaler hands scale and overflow flag to optimizers that say they take them: fused ones do, others assert.
    if impl == "fused" or hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = impl == "fused"  # type: ignore[attr-defined]
    return optimizer


def own_optimizer_impl(optimizer: torch.optim.Optimizer, device: torch.device | str) -> str:
    """The value of ``optimizer_impl`` that an optimizer runs with as its owner made it.

    Where neither flag is given PyTorch picks foreach on CUDA, and the plain loop on a CPU.
    """
    defaults = optimizer.defaults
    if defaults.get("fused"):
        return "fused"
    if defaults.get("foreach") is None:
        return "foreach" if torch.device(device).type == "cuda" and "foreach" in defaults else "for-loop"
    return "foreach" if defaults["foreach"] else "for-loop"


def optimizer_impls(optimizer: torch.optim.Optimizer, device: torch.device | str) -> tuple[str, ...]:
    """Which values of ``optimizer_impl`` this optimizer offers on this device."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    offered = ["for-loop"]
    if "foreach" in optimizer.defaults:
        offered.append("foreach")
    if "fused" in optimizer.defaults and torch.device(device).type in _get_fused_kernels_supported_devices():
        offered.append("fused")
    return tuple(offered)


def move(batch: Any, device: torch.device, *, non_blocking: bool, channels_last: bool) -> Any:
    """A batch with all its tensors on the device; ``(N, C, H, W)`` floats in channels_last where asked.

    Follows tuples (named ones too), lists, dicts and dataclasses; whatever has a ``to`` of its own is asked.
    """
    if isinstance(batch, torch.Tensor):
        if channels_last and batch.dim() == 4 and batch.is_floating_point():
            return batch.to(device, non_blocking=non_blocking, memory_format=torch.channels_last)
        return batch.to(device, non_blocking=non_blocking)

    def again(part: Any) -> Any:
        return move(part, device, non_blocking=non_blocking, channels_last=channels_last)

    if hasattr(batch, "to"):  # a PackedSequence is a tuple too, and knows better which of its parts to move
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: again(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(again, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(again, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: again(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch


class Step:
    """One training step under a configuration: move the batch, forward, backward, update.

    Call it with a batch as the loader made it; it returns the loss, shape ``()``, detached and still on the
    device (reading it would wait for the device).

    Args:
        loss: ``loss(model, batch) -> Tensor`` of shape ``()``, run under autocast where precision says so.
        after_backward: called with the model when gradients are complete and unscaled.
        after_step: called with the model when the weights have changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        config: Config,
        device: torch.device | str,
        *,
        after_backward: Callable[[nn.Module], None] | None = None,
        after_step: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device(device)
        self._loss = loss
        self._after_backward = after_backward
        self._after_step = after_step
        self._non_blocking = bool(config.get("pin_memory", False))
        self._channels_last = config.get("memory_format") == "channels_last"
        self._dtype = AUTOCAST.get(str(config.get("precision")))
        self._cudagraphs = config.get("compile_mode") in CUDAGRAPH_MODES
        scaled = self._dtype is torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type) if scaled else None

    def __call__(self, batch: Any) -> torch.Tensor:
        batch = move(batch, self.device, non_blocking=self._non_blocking, channels_last=self._channels_last)
        if self._cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=self._dtype) if self._dtype else nullcontext():
            loss = self._loss(self.model, batch)
        if self.scaler is None:
            loss.backward()
            if self._after_backward is not None:
                self._after_backward(self.model)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            if self._after_backward is not None:
                self.scaler.unscale_(self.optimizer)
                self._after_backward(self.model)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self._after_step is not None:
            self._after_step(self.model)
        # A CUDA graph's output is overwritten by the next replay; the caller keeps losses for longer.
        return loss.detach().clone() if self._cudagraphs else loss.detach()


def build(workload: Workload, ctx: Context, config: Config) -> Step:
    """The workload's model and optimizer on ``ctx.device`` under a configuration, as a `Step`.

    Raises:
        WorkloadError: ``model`` or ``optimizer`` returned something else.
    """
    torch.manual_seed(ctx.seed)
    made = workload.model(ctx)
    if not isinstance(made, nn.Module):
        raise WorkloadError(f"model(ctx) must return a torch.nn.Module, not {type(made).__name__}")
    model = apply_model(made.train(), config, ctx.device)
    visiting = workload.optimizer(ctx, model)
    if not isinstance(visiting, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer(ctx, model) must return an optimizer, not {type(visiting).__name__}")
    optimizer = apply_optimizer(visiting, config)
    after_backward = contract.optional(workload, "after_backward")
    after_step = contract.optional(workload, "after_step")

    return Step(
        model,
        optimizer,
        lambda m, batch: workload.loss(ctx, m, batch),
        config,
        ctx.device,
        after_backward=(lambda m: after_backward(ctx, m)) if after_backward else None,
        after_step=(lambda m: after_step(ctx, m)) if after_step else None,
    )


def samples_in(workload: Workload, ctx: Context, batch: Any) -> int:
    """How many samples a batch holds."""
    count = contract.optional(workload, "samples")
    return int(count(ctx, batch)) if count else ctx.batch_size


def workload_knobs(workload: Workload, config: Config) -> dict[str, Any]:
    """The workload's own knobs under its own names: a configuration's values, else the first it declares."""
    prefix = "workload."
    declared = {name: values[0] for name, values in getattr(workload, "KNOBS", {}).items()}
    return declared | {name.removeprefix(prefix): v for name, v in config.items() if name.startswith(prefix)}


def has_images(model: nn.Module) -> bool:
    """Whether the model has 4-dimensional weights, so that channels_last means something."""
    parameters: Sequence[torch.Tensor] = list(model.parameters())
    return any(p.dim() == 4 for p in parameters)
