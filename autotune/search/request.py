"""Checks of a request before any process is started, and the device that it names."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.records import StudySpec, Value, WorkloadRef
from autotune.knobs import KNOBS
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.machine.gpu import Gpu, NvmlUnavailable, gpus, has_nvidia_card, visible, with_instances
from autotune.profile import Profile, printable
from autotune.samplers.sampler import SAMPLERS
from autotune.search.study_folders import STUDY_NAME, absolute, require_utf8
from autotune.search.subject import Subject
from autotune.space import SpaceRequest, parse_value
from autotune.workload.catalog import (
    declared_knobs,
    find_objective,
    find_workload,
    is_named,
)

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+|:(GPU|MIG)-[0-9a-fA-F-]+|:MIG-GPU-[0-9a-fA-F-]+/\d+/\d+)?")


def check_request(spec: StudySpec) -> WorkloadRef:
    """Check a request before a folder is made or a process started, and return its workload.

    Raises:
        UsageError: a name is unknown, or a value is invalid on every machine.
        WorkloadError: the data folder does not exist or is not a folder.
    """
    ref = Subject.of(spec).checked()
    for path in (ref.path, spec.data, *map(find_objective, spec.objectives)):
        if path is not None:
            require_utf8(absolute(path))
    if spec.sampler not in SAMPLERS:
        raise UnknownNameError("sampler", spec.sampler, SAMPLERS)
    if spec.on is None and spec.on_resources:
        raise UsageError("--on-resources is for a cluster", advice="--on ray://HOST:10001 names it.")
    if spec.on is not None and (spec.devices is not None or spec.ranks > 1):
        raise UsageError(
            "--on searches for a training on one device of a cluster, which Ray chooses",
            advice="leave --devices and --nproc-per-node out.",
        )
    if len(spec.objectives) > 1 and spec.sampler == "gp":
        raise UsageError("--sampler gp takes one objective", advice="leave it out: several take tpe.")
    _check_knob_names(spec, ref)
    request_for_space(spec, None)
    if not _DEVICE.fullmatch(spec.device):
        raise UsageError(
            f"unknown device {spec.device!r}", advice="choices: auto, cpu, cuda, cuda:N, cuda:GPU-…, cuda:MIG-…."
        )
    return ref


def _check_knob_names(spec: StudySpec, ref: WorkloadRef) -> None:
    """Raise `UnknownNameError` for a knob that is neither autotune's nor declared in the workload's file.

    If the knobs cannot be determined from the file, their names are checked after the probe.
    """
    declared = declared_knobs(Path(ref.path)) if ref.path is not None else None
    if declared is None:
        return
    choices = [*KNOBS, *(f"workload.{name}" for name in declared)]
    for name in [*spec.narrowed, *spec.fixed, *spec.baseline]:
        if name in declared and name not in KNOBS:
            raise UnknownNameError("knob", name, choices, advice=f"did you mean workload.{name}?")
        if name not in choices:
            raise UnknownNameError("knob", name, choices)


def request_for_space(spec: StudySpec, knobs: Mapping[str, tuple[Value, ...]] | None) -> SpaceRequest:
    """Return the values of ``--set``, ``--fix`` and ``--baseline``, parsed.

    Args:
        knobs: the workload's own knobs; ``None`` before the probe, when their values stay text.

    Raises:
        UsageError: a knob or a value is unknown.
    """
    rank_batch, baseline = spec.rank_batch, {n: parse_value(n, text, knobs) for n, text in spec.baseline.items()}
    if rank_batch is not None and spec.batch_size is not None:
        baseline[ACCUMULATION.name] = rank_batch // spec.batch_size
    return SpaceRequest(
        narrowed={
            n: tuple(dict.fromkeys(parse_value(n, text, knobs) for text in texts)) for n, texts in spec.narrowed.items()
        },
        fixed={n: parse_value(n, text, knobs) for n, text in spec.fixed.items()},
        baseline=baseline,
        batch_size=rank_batch or spec.batch_size,
        keep_batch_size=spec.keep_batch_size or rank_batch is not None,
        global_batch=rank_batch,
        told=Subject.of(spec).told(),
    )


def require_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise MachineError(
            f"autotune runs on Linux only, and this is {sys.platform}",
            advice="tune on the Linux machine that you train on; profiles can be read anywhere.",
        )


def model_of(profile: Profile, typed: str) -> str:
    """Return the model to train with a profile: the one that the user named, or the profile's own.

    A profile may come from anybody, so it must not choose by itself which code is run: its file must still be what was
    measured, and a module cannot be compared without importing it.

    Raises:
        UsageError: no model is named, and the profile's is not known to be what was measured.
    """
    model, model_text = profile.workload.model, printable(profile.workload.model)
    if typed or is_named(model):
        return typed or model
    if profile.workload.path is None and profile.workload.module is None and STUDY_NAME.fullmatch(model):
        raise UsageError(
            f"the profile is for a training script, {model_text}",
            advice="`autotune run` and `autotune verify` take its command behind --.",
        )
    advice = f"say which code to train: --model {shlex.quote(model_text)}, if you trust it."
    if not model.endswith(".py"):
        raise UsageError(
            f"the profile names code that cannot be compared with what was measured: {model_text}", advice=advice
        )
    if find_workload(model, {}).sha256 != profile.workload.sha256:
        raise UsageError(f"{model_text} has changed since the profile was measured, or is another file", advice=advice)
    return model


@dataclass(frozen=True)
class Device:
    """The device of a search.

    Attributes:
        name: its name in records, such as ``cpu`` or ``cuda:0``.
        gpu: its description by NVML; ``None`` for a CPU.
        remark: what the name does not tell, as a clause: why the CPU was chosen although there is a card, or which MIG
            instance this is.
        cores: the cores that its launches are pinned to, ascending; empty if they are not pinned.
    """

    name: str
    gpu: Gpu | None = None
    remark: str | None = None
    cores: tuple[int, ...] = ()


def resolve_device(asked: str) -> Device:
    """Return the requested device.

    ``auto`` selects the first GPU if there is one. The probe finds out whether torch can use it; if it cannot, there is
    no silent fallback to the CPU. If a card is split by MIG, its first instance is taken, as CUDA does.

    Raises:
        MachineError: the requested GPU does not exist, NVML does not answer, or the number is ambiguous.
    """
    if asked == "cpu":
        return Device("cpu")
    # Device files say less than NVML: under WSL2 there are none.
    cards = gpus()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked == "auto" and _is_without_card(cards, variable):
        return Device("cpu", remark=_why_cpu(cards, variable))
    if isinstance(cards, NvmlUnavailable):
        raise MachineError(f"the GPU does not answer: {cards.reason}", advice="--device cpu leaves it alone.")
    name = "cuda:0" if asked in ("auto", "cuda") else asked
    wanted = name.removeprefix("cuda:")
    # If the variable is set, a number is an index into its list.
    entries = [wanted] if variable is None else variable.split(",")
    if _numbers_are_unclear(cards) and any(part.strip().isdigit() for part in entries):
        unclear = "which card is" if wanted.isdigit() else "whether CUDA_VISIBLE_DEVICES shows"
        raise MachineError(
            f"{unclear} {name} depends on CUDA_DEVICE_ORDER here, because the cards differ",
            advice="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name cards by UUID, in CUDA_VISIBLE_DEVICES too; "
            "`autotune doctor` lists them.",
        )
    shown = visible(cards, variable)
    if wanted.isdigit():
        gpu = shown[int(wanted)] if int(wanted) < len(shown) else None
    else:
        gpu = next((d for d in with_instances(shown) if wanted in (d.uuid, d.old_uuid)), None)
    if gpu is None:
        restricted = f" with CUDA_VISIBLE_DEVICES={variable}" if variable is not None else ""
        raise MachineError(f"there is no {name}{restricted}", advice="`autotune doctor` lists the cards.")
    if gpu.mig and not gpu.instances:
        raise MachineError(
            f"{name} is split by MIG, and has no instance that may be used here",
            advice="make one (nvidia-smi mig -cgi … -C), or turn MIG off.",
        )
    gpu = gpu.instances[0] if gpu.mig else gpu
    return Device(name, gpu, remark=f"MIG {gpu.profile}" if gpu.profile else None)


#: First entries of CUDA_VISIBLE_DEVICES by which people and Slurm hide all cards.
_NONE = ("", "-1", "NoDevFiles")


def _is_without_card(cards: list[Gpu] | NvmlUnavailable, variable: str | None) -> bool:
    if isinstance(cards, NvmlUnavailable):
        return not cards.driver_present
    return not cards or (variable is not None and variable.split(",")[0].strip() in _NONE)


def _why_cpu(cards: list[Gpu] | NvmlUnavailable, variable: str | None) -> str | None:
    if isinstance(cards, NvmlUnavailable):
        return "there is an NVIDIA card, but no driver for it" if has_nvidia_card() else None
    return f"CUDA_VISIBLE_DEVICES={variable!r} hides the GPU" if cards else "the NVIDIA driver lists no GPU"


def _numbers_are_unclear(cards: list[Gpu]) -> bool:
    """Return whether CUDA may number the GPUs differently from NVML.

    NVML numbers them by position on the bus. CUDA puts the fastest first, unless CUDA_DEVICE_ORDER says otherwise.
    """
    return os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({card.name for card in cards}) > 1
