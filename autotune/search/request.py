"""Checks of a request before any process is started, and the devices that it names."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from autotune.base.errors import ImpossibleError, MachineError, UnknownNameError, UsageError
from autotune.base.records import StudySpec, Value, WorkloadRef
from autotune.knobs import KNOBS
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.machine.cpu_load import allowed_cores, cores_text, equal_shares, parse_cores
from autotune.machine.gpu import CardWatch, Gpu, NvmlUnavailable, gpus, has_nvidia_card, visible, with_instances
from autotune.profile import Profile, printable
from autotune.samplers.sampler import SAMPLERS
from autotune.search.study_folders import STUDY_NAME, absolute, require_utf8
from autotune.search.subject import Subject
from autotune.space import SpaceRequest, parse_value
from autotune.space.formatting import count, memory_text
from autotune.workload.catalog import declared_knobs, find_objective, find_workload, is_named

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
    declared = declared_knobs(Path(ref.path)) if ref.path is not None else None
    # If the knobs cannot be determined from the workload's file, their names are checked after the probe.
    choices = [*KNOBS, *(f"workload.{name}" for name in declared or ())]
    for name in [*spec.narrowed, *spec.fixed, *spec.baseline]:
        if declared is not None and name not in choices:
            advice = f"did you mean workload.{name}?" if name in declared else None
            raise UnknownNameError("knob", name, choices, advice=advice)
    request_for_space(spec, None)
    if not _DEVICE.fullmatch(spec.device):
        raise UsageError(
            f"unknown device {spec.device!r}", advice="choices: auto, cpu, cuda, cuda:N, cuda:GPU-…, cuda:MIG-…."
        )
    return ref


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

    @property
    def card(self) -> Gpu:
        """Its description by NVML; it is no CPU."""
        assert self.gpu is not None
        return self.gpu


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
    if asked == "auto" and (cpu := _cpu_instead(cards, variable)) is not None:
        return cpu
    if isinstance(cards, NvmlUnavailable):
        raise MachineError(f"the GPU does not answer: {cards.reason}", advice="--device cpu leaves it alone.")
    name = "cuda:0" if asked in ("auto", "cuda") else asked
    wanted = name.removeprefix("cuda:")
    # If the variable is set, a number is an index into its list.
    entries = [wanted] if variable is None else variable.split(",")
    # NVML numbers cards by position on the bus. CUDA puts the fastest first, unless CUDA_DEVICE_ORDER says otherwise.
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.name for card in cards}) <= 1
    if not by_bus and any(part.strip().isdigit() for part in entries):
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


def _cpu_instead(cards: list[Gpu] | NvmlUnavailable, variable: str | None) -> Device | None:
    """Return the CPU if there is no card to choose; ``None`` if there is one."""
    if isinstance(cards, NvmlUnavailable):
        why = "there is an NVIDIA card, but no driver for it" if has_nvidia_card() else None
        return None if cards.driver_present else Device("cpu", remark=why)
    if cards and (variable is None or variable.split(",")[0].strip() not in _NONE):
        return None
    hidden = f"CUDA_VISIBLE_DEVICES={variable!r} hides the GPU"
    return Device("cpu", remark=hidden if cards else "the NVIDIA driver lists no GPU")


# The devices of a search: one, or several equal ones, on which its trials run side by side.
#
# A device is a card with an equal share of the cores that this process may use, or a set of cores. Launches are pinned
# to the cores of their device, so that no two devices share any.

_CPU = "cpu:"
_CARD = re.compile(r"\d+|(GPU|MIG)-[0-9a-fA-F-]+|MIG-GPU-[0-9a-fA-F-]+/\d+/\d+")
_HOW = "write cards as 0,1,2,3 or all, and sets of cores as cpu:0-7,cpu:8-15."


def resolve_devices(spec: StudySpec) -> tuple[Device, ...]:
    """Return the requested devices; what runs alone runs on the first.

    Raises:
        UsageError: they cannot be distinguished, may not be used, or are not equal.
        MachineError: see `resolve_device`.
    """
    if spec.devices is None:
        return (resolve_device(spec.device),)
    names = _named(spec.devices)
    on_cpu = [name.startswith(_CPU) for name in names]
    if all(on_cpu):
        return _core_sets(names)
    if any(on_cpu):
        raise UsageError("--devices names cards and cores of the CPU, and a search is on one kind", advice=_HOW)
    return _cards(names)


def _named(text: str) -> list[str]:
    """Return the devices that an option names. Commas separate devices, and also cores within a list of cores."""
    names: list[str] = []
    for part in (part.strip().removeprefix("cuda:") for part in text.split(",")):
        if names and names[-1].startswith(_CPU) and part[:1].isdigit():
            names[-1] += f",{part}"
        else:
            names.append(part)
    if not all(names):
        raise UsageError(f"--devices {text[:60]!r} names nothing between its commas", advice=_HOW)
    return names


def _core_sets(named: Sequence[str]) -> tuple[Device, ...]:
    allowed = allowed_cores()
    devices: list[Device] = []
    taken: dict[int, str] = {}
    for name in named:
        try:
            cores = parse_cores(name.removeprefix(_CPU))
        except ValueError as error:
            raise UsageError(f"--devices {name[:60]!r} names no cores: {error}", advice=_HOW) from None
        outside = [core for core in cores if core not in allowed]
        if outside:
            raise UsageError(
                f"{name} has cores that may not be used here: {cores_text(outside)}",
                advice=f"this process may use {cores_text(sorted(allowed))}.",
            )
        shared = [core for core in cores if core in taken]
        if shared:
            raise UsageError(
                f"{taken[shared[0]]} and {name} have core {shared[0]} in common",
                advice="each core belongs to one device.",
            )
        taken |= dict.fromkeys(cores, name)
        devices.append(Device("cpu", cores=cores))
    for (first_name, first), (second_name, second) in pairwise(zip(named, devices, strict=True)):
        if len(first.cores) != len(second.cores):
            raise UsageError(
                f"{first_name} has {count(len(first.cores), 'core')} and {second_name} has {len(second.cores)}",
                advice="the devices of a search must be equal.",
            )
    return tuple(devices)


def _cards(named: Sequence[str]) -> tuple[Device, ...]:
    for name in named:
        if name != "all" and not _CARD.fullmatch(name):
            raise UsageError(f"--devices {name[:60]!r} is neither a card nor a set of cores", advice=_HOW)
    if "all" in named and len(named) > 1:
        raise UsageError("--devices all leaves nothing to be named besides", advice=_HOW)
    devices = [resolve_device(f"cuda:{name}") for name in (_every() if named == ["all"] else named)]
    by_uuid: dict[str, Device] = {}
    for device in devices:
        other = by_uuid.setdefault(device.card.uuid, device)
        if other is not device:
            raise UsageError(f"{other.name} and {device.name} are the same card", advice="name it once.")
    _refuse_unequal(devices, "their figures would not compare: name equal cards, or search on one with --device.")
    allowed = allowed_cores()
    if len(allowed) < len(devices):
        raise UsageError(
            f"{len(devices)} cards would share {count(len(allowed), 'core')}", advice="each needs one at least."
        )
    shares = equal_shares(allowed, len(devices))
    return tuple(replace(device, cores=cores) for device, cores in zip(devices, shares, strict=True))


def _refuse_unequal(devices: Sequence[Device], advice: str) -> None:
    for first, second in pairwise(devices):
        if _kind(first.card) != _kind(second.card):
            differences = f"{_words(first.card)}; {_words(second.card)}"
            raise UsageError(f"{first.name} and {second.name} differ: {differences}", advice=advice)


def cards_for(device: Device, ranks: int) -> list[str]:
    """Return the UUIDs of the cards for a training, one for each rank: the device's own and those after it.

    Raises:
        ImpossibleError: there are not enough whole cards.
        UsageError: the cards differ.
    """
    if device.gpu is None:
        return []
    first = device.gpu.uuid
    uuids = _every() if ranks > 1 else [first]
    chosen = uuids[uuids.index(first) :][:ranks] if first in uuids else []
    if len(chosen) < ranks:
        raise ImpossibleError(
            f"{count(ranks, 'rank')} need as many cards, and from {device.name} on there are {len(chosen)}",
            advice="`autotune doctor` lists them.",
        )
    if ranks > 1 and any(uuid.startswith("MIG-") for uuid in chosen):
        # CUDA shows a process only the first of several instances, and NCCL does not work on them.
        raise ImpossibleError(
            "the ranks of a training need whole cards, and these are MIG instances",
            advice="search with one rank, or have the administrator turn MIG off.",
        )
    others = [resolve_device(f"cuda:{uuid}") for uuid in chosen[1:]]
    _refuse_unequal([device, *others], "the slowest would be measured: name equal cards in CUDA_VISIBLE_DEVICES.")
    return chosen


def cards_from(device: Device) -> int:
    """Return how many cards a process sees, counting from the device's own; one if that is a MIG instance."""
    uuids = [] if device.card.profile else _every()
    return len(uuids) - uuids.index(device.card.uuid) if device.card.uuid in uuids else 1


def require_energy_counters(cards: Sequence[str]) -> None:
    """Check that each of these cards or MIG instances reports the energy that it uses.

    Raises:
        ImpossibleError: one does not.
    """
    for uuid in cards:
        watch = CardWatch(uuid)
        try:
            if watch.energy_j() is not None:
                continue
        finally:
            watch.close()
        why = (
            f"{uuid} is a MIG instance, and its card's counter tells what all instances use"
            if uuid.startswith("MIG-")
            else f"the driver tells no energy of {uuid}"
        )
        raise ImpossibleError(f"--objective energy is not possible here: {why}", advice="choose another objective.")


def _every() -> list[str]:
    """Return the UUIDs of all cards, or of the instances of those that are split by MIG."""
    cards = gpus()
    if isinstance(cards, NvmlUnavailable):
        return ["0"]  # resolving this device says why there is no list
    shown = visible(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
    uuids = [device.uuid for card in shown for device in (card.instances if card.mig else (card,))]
    if not uuids:
        raise UsageError("--devices all means all cards, and there is none to be seen", advice=_HOW)
    return uuids


def _kind(card: Gpu) -> tuple[object, ...]:
    return card.name, card.memory_bytes, card.power_limit_w, card.mig_in_force


def _words(card: Gpu) -> str:
    parts = [card.profile, None if card.memory_bytes is None else memory_text(card.memory_bytes)]
    power = None if card.power_limit_w is None else f"{card.power_limit_w:.0f} W"
    return ", ".join(part for part in (card.name, *parts, power) if part)


def devices_text(devices: Sequence[Device]) -> str:
    """Return where a search runs, as a clause: ``cpu, 2 devices side by side: cores 0-7 | 8-15``."""
    first = devices[0]
    remark = f" ({first.remark})" if first.remark else ""
    cores = " | ".join(cores_text(device.cores) for device in devices)
    if len(devices) == 1:
        return f"{first.name}{remark}" + (f", cores {cores}" if first.cores else "")
    names = "" if first.gpu is None else ", ".join(device.name for device in devices) + " with "
    return f"{'cpu' if first.gpu is None else 'cuda'}, {len(devices)} devices side by side: {names}cores {cores}"
