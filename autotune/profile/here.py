"""What of a profile holds on this machine, as far as it can be told without torch and without a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from autotune.workload.catalog import constants, find_workload, source_hash
from autotune.base.errors import AutotuneError
from autotune.machine.cuda import torch_versions
from autotune.machine.gpu import Gpu, NvmlUnavailable, gpus, visible, with_instances
from autotune.machine.host import read_host
from autotune.profile import Profile, altered
from autotune.profile.checking import CODE, brief
from autotune.base.records import Fingerprint, Value

#: What stands for the code of the training where its files are not here.
GONE = "gone"
#: Fingerprint values that define a slot. A change of any other value makes a profile stale.
HARDWARE = ("gpu_model", "gpu_memory_bytes", "mig", "cpu_model", "cores")
Row = tuple[str, str, str]
#: Values that concern only trainings on a card.
_OF_CARDS = ("gpu_model", "driver", "power_limit_w", "mig", "cuda")


def differences(profile: Profile, here: Fingerprint) -> list[Row]:
    """Return what differs on this machine, the workload's files included, as far as no process has to be started."""
    then = profile.fingerprint.values
    now = dict(here.values)
    if not profile.conditions.device.startswith("cuda"):
        now = {name: value for name, value in now.items() if name not in _OF_CARDS}
    else:
        # Without a card, or without an answer from the driver, this is not the same kind of machine.
        now.setdefault("gpu_model", "none")
    now[CODE] = _workload_now(profile)
    rows = [(n, brief(then[n]), brief(v)) for n, v in now.items() if n in then and v is not None and then[n] != v]
    return [*altered(profile), *sorted(rows)]


def on_hardware(profile: Profile, here: Fingerprint) -> bool:
    """Return whether a profile was measured on hardware like this machine's."""
    return not any(name in HARDWARE for name, _, _ in differences(profile, here))


def stale_rows(profile: Profile, here: Fingerprint) -> list[Row]:
    """Return what has changed since a profile was measured on this hardware; empty on other hardware."""
    rows = differences(profile, here)
    return [] if any(name in HARDWARE for name, _, _ in rows) else rows


def has_default_size(profile: Profile) -> bool:
    """Return whether a profile has the image size that its workload has if none is asked for, on a device like its own;
    not if that cannot be read in the workload's file."""
    w, then = profile.workload, profile.conditions
    if then.image_size is None or w.module is not None:
        return then.image_size is None
    try:
        path = w.path or find_workload(w.name, w.args).path
        sizes = {} if path is None else constants(Path(path), ("IMAGE_SIZE", "CPU_IMAGE_SIZE"))
    except AutotuneError:
        return False
    on_card = sizes.get("IMAGE_SIZE")
    return then.image_size == (sizes.get("CPU_IMAGE_SIZE", on_card) if then.device == "cpu" else on_card)


def look_here(
    cards: Callable[[], list[Gpu] | NvmlUnavailable] = gpus, *, uuid: str | None = None, index: int = 0
) -> Fingerprint:
    """Return the part of the fingerprint that can be read without torch.

    Args:
        uuid: the card or MIG instance to describe; defaults to that of ``index``.
        index: of the card, among those that CUDA shows this process.
    """
    host = read_host()
    card = _card(cards(), uuid, index)
    torch, cuda = torch_versions()
    values: dict[str, Value | None] = {
        "cpu_model": host.cpu_model,
        "cores": host.cores,
        "memory_gib": round(host.memory_bytes / 2**30),
        "torch": torch,
        "cuda": cuda,
    }
    if card is not None:
        values |= {
            "gpu_model": card.name,
            "driver": card.driver_version,
            "power_limit_w": card.power_limit_w,
            "mig": card.mig_in_force,
        }
    return Fingerprint(values=values, device_uuid=card.uuid if card else None)


def _card(found: list[Gpu] | NvmlUnavailable, uuid: str | None, index: int) -> Gpu | None:
    if isinstance(found, NvmlUnavailable):
        return None
    if uuid is not None:
        return next((device for device in with_instances(found) if device.uuid == uuid), None)
    shown = visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if index >= len(shown):
        return None
    return shown[index].instances[0] if shown[index].instances else shown[index]


def _workload_now(profile: Profile) -> str | None:
    w = profile.workload
    if w.module is not None:
        # The file is not known without an import, which would run it.
        return None
    try:
        return source_hash(Path(w.path)) if w.path is not None else find_workload(w.name, w.args).sha256
    except AutotuneError:
        return GONE
