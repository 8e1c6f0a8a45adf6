"""The devices of a search: one, or several equal ones, on which its trials run side by side.

A device is a card with an equal share of the cores that this process may use, or a set of cores. Launches are pinned to
the cores of their device, so that no two devices share any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autotune.base.errors import ImpossibleError, UsageError
from autotune.base.records import StudySpec
from autotune.machine.cpu_load import allowed_cores, cores_text, equal_shares, parse_cores
from autotune.machine.gpu import CardWatch, Gpu, NvmlUnavailable, gpus, visible
from autotune.search.request import Device, resolve_device
from autotune.space.formatting import count, memory_text

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
        card = _card(device)
        if card.uuid in by_uuid:
            raise UsageError(f"{by_uuid[card.uuid].name} and {device.name} are the same card", advice="name it once.")
        by_uuid[card.uuid] = device
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
        if _kind(_card(first)) != _kind(_card(second)):
            raise UsageError(
                f"{first.name} and {second.name} differ: {_words(_card(first))}; {_words(_card(second))}", advice=advice
            )


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
    assert device.gpu is not None
    uuids = [] if device.gpu.profile else _every()
    return len(uuids) - uuids.index(device.gpu.uuid) if device.gpu.uuid in uuids else 1


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


def _card(device: Device) -> Gpu:
    assert device.gpu is not None
    return device.gpu


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
