"""What must be known about a workload and this machine before the first trial."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch.utils.data import Dataset, IterableDataset

from autotune.agent.site.autotune_agent.facts import machine
from autotune.agent.site.autotune_agent.in_place import own_malloc
from autotune.base.clock import Clock
from autotune.base.errors import UsageError
from autotune.base.records import DataRef, Phase, Probe, TrialSpec
from autotune.child.launch import Beats, Launch, available_on
from autotune.child.windows import card_of
from autotune.knobs.alloc_conf import expands, limits_splitting
from autotune.knobs.memory_format import has_images, has_volumes, mixes_formats, shares_memory
from autotune.knobs.optimizer_impl import impls_offered, own_impl
from autotune.machine import host
from autotune.training.feed import length_of
from autotune.training.step import build, data_of, first_batch, open_loader
from autotune.workload import contract
from autotune.workload.catalog import source_hash
from autotune.workload.contract import Context, Workload

# Looks at batches: do the shapes of their images vary?
#
# cuDNN's benchmark and CUDA graphs prepare for one shape at a time, so images of varying shapes forbid them. Lists of
# boxes, labels and other tensors without an image's two long sides do not reach a convolution, and are left out.

#: Batches to look at, the largest number of samples in each, and the seconds that all may take.
LOOK_BATCHES, LOOK_SAMPLES, LOOK_S = 50, 32, 3.0
#: Both sides of an image have at least this many elements; the rows of a box list have four.
LEAST_SIDE = 8


def images_vary(
    dataset: Dataset[Any], collate: Callable[[list[Any]], Any], *, batch_size: int, seed: int, clock: Clock
) -> bool | None:
    """Return whether images at the same place in several batches differ in shape.

    Looks at `LOOK_BATCHES` random batches, or at as many as `LOOK_S` seconds allow.

    Returns:
        ``None`` if that is not known: there are no images, or fewer than two batches could be read.
    """
    deadline = clock.now() + LOOK_S
    shapes: dict[tuple[object, ...], tuple[int, ...]] = {}
    for looked, batch in enumerate(_random_batches(dataset, min(batch_size, LOOK_SAMPLES), seed)):
        samples = []
        for sample in batch:
            samples.append(sample)
            if clock.now() > deadline:
                return False if shapes and looked > 1 else None
        for place, part in leaves(collate(samples)):
            if isinstance(part, torch.Tensor) and part.dim() >= 3 and min(part.shape[-2:]) >= LEAST_SIDE:
                # ``(H, W)``, or ``(D, H, W)`` of volumes, without the number of samples, channels or masks.
                shape = tuple(part.shape[1:] if part.dim() == 3 else part.shape[2:])
                if shapes.setdefault(place, shape) != shape:
                    return True
    return False if shapes else None


def _random_batches(dataset: Dataset[Any], size: int, seed: int) -> Iterator[Iterator[Any]]:
    """Yield the samples of random batches; for a data set that can only be iterated, in their own order."""
    if isinstance(dataset, IterableDataset):
        samples = iter(dataset)
        for _ in range(LOOK_BATCHES):
            batch = list(itertools.islice(samples, size))
            if len(batch) < size:
                return
            yield iter(batch)
        return
    assert isinstance(dataset, Sized)
    rng = random.Random(seed)
    count = len(dataset)
    for _ in range(LOOK_BATCHES):
        yield (dataset[index] for index in rng.sample(range(count), min(size, count)))


def leaves(part: Any, place: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Yield what a batch or a sample consists of, with its place in dicts, tuples, lists and dataclasses."""
    inside: Iterable[tuple[object, Any]]
    if isinstance(part, dict):
        inside = part.items()
    elif isinstance(part, tuple | list):
        inside = enumerate(part)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        inside = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    else:
        yield place, part
        return
    for name, value in inside:
        yield from leaves(value, (*place, name))


def probe(spec: TrialSpec, beats: Beats) -> Probe:
    """Collect facts about torch, the device and the workload, without a training step.

    If the workload asks for one of our data sets, the data set is opened only after it has been checked or generated
    (it has an identity then).

    Raises:
        UsageError: data were given for the workload, but it does not use them.
    """
    launch = Launch(spec, beats)
    device, workload, ctx = launch.device, launch.workload, launch.ctx
    wants = getattr(workload, "DATA", None)
    own_size = getattr(workload, "IMAGE_SIZE", None)
    cpu_size = getattr(workload, "CPU_IMAGE_SIZE", None) or own_size
    size = ctx.image_size or (cpu_size if device.type == "cpu" else own_size)
    ctx = replace(ctx, image_size=size, data=_NotedData(**spec.data.model_dump()))
    # Only a GPU has knobs that depend on the shapes of images.
    wait, clock = wants and not spec.data.identity, beats.clock if device.type == "cuda" else None
    looked = {"sample_tensors": 0} if wait else _look_at_data(workload, ctx, clock)
    beats.enter(Phase.BUILD)
    step = build(workload, ctx, {})
    reason = None
    if wants is None and spec.data.kind == "synthetic":
        reason = "--data synthetic is for workloads on photographs"
    elif not wait and spec.data.kind == "folder" and not _NotedData.asked:
        reason = "it does not ask for ctx.data.path, so --data has no effect"
    if reason is not None:
        raise UsageError(f"{spec.workload.name} makes its own data: {reason}", advice="leave --data out.")
    knobs = getattr(workload, "KNOBS", {})
    declared = {str(name): getattr(values, "changes_maths", None) for name, values in knobs.items()}
    place = None
    if not spec.workload.sha256:
        place = inspect.getsourcefile(workload if inspect.ismodule(workload) else type(workload))
    source = None if place is None else Path(place).absolute()
    return Probe(
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda,
        device=str(device),
        # Read after the model was built, when the context and most libraries are loaded.
        device_free_bytes=available_on(device) if device.type == "cuda" else None,
        cores=torch.get_num_threads(),
        workload_sha256=spec.workload.sha256 or (source_hash(source) if source else ""),
        workload_file=str(source) if source else None,
        workload_name=spec.workload.name,
        default_batch_size=getattr(workload, "BATCH_SIZE", contract.DEFAULT_BATCH_SIZE),
        default_image_size=own_size,
        cpu_image_size=cpu_size,
        wants_data=wants,
        varying_shapes=bool(getattr(workload, "VARYING_SHAPES", False)),
        has_images=has_images(step.model),
        has_volumes=has_volumes(step.model),
        mixed_formats=mixes_formats(step.model),
        shared_memory=shares_memory(step.model),
        optimizer_impls=impls_offered(step.optimizer, device),
        own_optimizer_impl=own_impl(step.optimizer, device),
        malloc=own_malloc(),
        parameters=sum(p.numel() for p in step.model.parameters()),
        workload_knobs={str(name): tuple(values) for name, values in knobs.items()},
        workload_unasked=tuple(
            str(name) for name, values in knobs.items() if getattr(values, "searched", True) not in (True, device.type)
        ),
        own_exchange=contract.optional(workload, "parallel") is not None,
        workload_maths={name: changes for name, changes in declared.items() if changes is not None},
        **{**machine_fields(machine(device.type, device.index), card_of(spec)), **looked},
    )


def machine_fields(facts: Mapping[str, Any], uuid: str | None = None) -> dict[str, Any]:
    """Return the fields of `Probe` that say what PyTorch and the device can do.

    Args:
        facts: those of `autotune_agent.facts.machine`.
        uuid: of the card, if it is known: torch does not distinguish the UUID of a MIG instance from that of a card.
    """
    major = facts["capability"][0] if "capability" in facts else None
    compiler, compiler_lack = compiler_here(major)
    return {
        "torchvision_version": facts["vision"] or "",
        "python_version": facts["python"],
        "cudnn_version": facts.get("cudnn"),
        "device_name": facts.get("name", "cpu"),
        "device_memory_bytes": facts.get("memory"),
        "device_uuid": uuid or (f"GPU-{facts['uuid']}" if facts.get("uuid") else None),
        "native_bf16": native_bf16(facts.get("bf16")),
        "tf32": major is not None and major >= 8,
        "cudagraphs": major is not None,
        "compiler": compiler,
        "compiler_lack": compiler_lack,
        "worker_start_method": facts["start_method"],
        "multiprocessors": facts.get("multiprocessors"),
        "expandable_segments": expands(os.environ),
        "limits_splitting": limits_splitting(os.environ),
    }


class _NotedData(DataRef):
    """A `DataRef` that records whether its path has been read."""

    asked: ClassVar[bool] = False

    def __getattribute__(self, name: str) -> Any:
        if name == "path":
            _NotedData.asked = True
        return super().__getattribute__(name)


def _look_at_data(workload: Workload, ctx: Context, clock: Clock | None) -> dict[str, Any]:
    """Look at one sample and, if there is a clock, at the shapes of many for some seconds; return fields of `Probe`.

    The workload's own loader, if it has one, is opened to see whether it uses the data.
    """
    dataset, collate = data = data_of(workload, ctx)
    makes_batches: Any = collate
    if contract.optional(workload, "loader") is not None:
        loader = open_loader(workload, ctx, {"batch_size": ctx.batch_size}, worker_start_method="fork", data=data)
        makes_batches = getattr(loader, "collate_fn", None)
    streams = isinstance(dataset, IterableDataset)
    sample = first_batch(cast(Iterable[Any], dataset)) if streams else dataset[0]
    try:
        # Collate first: a label that is a plain number becomes a tensor.
        collated = collate([sample])
    except Exception:
        # Some collate functions mix samples and cannot take a single one. Count the sample itself then.
        collated = sample
    vary = None
    if clock is not None:
        # A sample that cannot be read ends a trial with its own message, but not the probe, which only looks at the
        # data.
        with contextlib.suppress(Exception):
            vary = images_vary(dataset, collate, batch_size=ctx.batch_size, seed=ctx.seed, clock=clock)
    return {
        "dataset_samples": length_of(dataset),
        "sample_bytes": sum(t.numel() * t.element_size() for _, t in leaves(sample) if isinstance(t, torch.Tensor)),
        "sample_tensors": sum(isinstance(part, torch.Tensor) for _, part in leaves(collated)),
        "images_vary": vary,
        "own_collate": makes_batches is not torch.utils.data.default_collate,
    }


def native_bf16(card: bool | None) -> bool:
    """Return whether bf16 is computed natively: by a card, as torch reports it; if ``None``, by this machine's CPU."""
    if card is not None:
        return card
    # AVX-512 BF16 and AMX on x86; the feature flag on Arm. On other CPUs oneDNN emulates bf16, slowly.
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            break
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def compiler_here(major: int | None) -> tuple[str | None, str | None]:
    """Return the compiler that torch.compile would use here, or ``None`` and what is missing.

    Header files are not searched for: a compiler may have its own places for them, and a first trial shows what it
    lacks.

    Args:
        major: of the card's compute capability; ``None`` for a CPU.
    """
    cuda = major is not None
    path = host.c_compiler(os.environ) if cuda else host.cxx_compiler(os.environ)
    if path is None:
        lack = host.NO_C_COMPILER if cuda else host.NO_CXX_COMPILER
        return None, f"{lack.what}: {lack.advice.rstrip('.')}"
    if major is None:
        return path, None
    try:
        import triton
    except ImportError:
        return None, "Triton is not installed"
    if major < 7:
        return None, "Triton needs a card of compute capability 7.0 or above"
    return f"triton {triton.__version__}", None
