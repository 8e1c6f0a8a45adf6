"""``autotune doctor``: what this machine can do, and what limits it. Does not import torch or start a process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import platformdirs
import typer
from rich.text import Text

from autotune.base.errors import MORE_SHM, MachineError
from autotune.base.records import SCHEMA_VERSION, Host
from autotune.cli.options import Json
from autotune.cli.output import plain_table, print_json, print_rich
from autotune.machine import host
from autotune.machine.gpu import Gpu, NvmlUnavailable, cuda_version, gpus, has_nvidia_card
from autotune.machine.host import read_host, torch_versions, trouble

_GIB = 2**30
#: 8 workers that each prefetch 2 batches of 256 float32 images of 224 px use 2.3 GiB of ``/dev/shm``.
_SHM_ENOUGH_BYTES = 2 * _GIB
#: Tensors pass between processes as open files. The usual soft limit of 1024 is too low for a loader with many workers.
_FILES_ENOUGH = 4096
_ESSENTIAL = ("torch", "torchvision", "optuna")


class State(StrEnum):
    OK = "ok"
    #: It works, but makes trainings slower or smaller than necessary.
    LIMIT = "limit"
    MISSING = "missing"


_MARKS = {State.OK: ("✓ ok", "green"), State.LIMIT: ("! limit", "yellow"), State.MISSING: ("✗ missing", "red")}


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis.

    Attributes:
        value: the finding, in a few words.
        sentence: its consequence, or what to do about it.
        essential: whether no search can run without it.
    """

    name: str
    state: State
    value: str
    sentence: str
    essential: bool = False


def doctor(json_output: bool) -> int:
    """Print the diagnosis on stdout: as a table, or with `json_output` as one JSON object.

    Returns:
        0, or 5 (environment) when something essential is missing.
    """
    checks = diagnose()
    healthy = not any(check.essential and check.state is State.MISSING for check in checks)
    if json_output:
        print_json({"schema_version": SCHEMA_VERSION, "ok": healthy, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    return 0 if healthy else MachineError.exit_code


def _print(checks: list[Check]) -> None:
    table = plain_table("", "what", "found", "what follows", wrap=("found", "what follows"))
    for check in checks:
        mark, colour = _MARKS[check.state]
        # Text, because names of cards and paths may contain square brackets, which rich treats as markup.
        table.add_row(Text(mark, style=colour), check.name, Text(check.value), Text(check.sentence))
    print_rich(table)


def diagnose(system: str | None = None) -> list[Check]:
    """Run all checks, the most important first.

    Args:
        system: the platform, as in ``sys.platform``; ``None`` means this one. On any platform but Linux there are no
            further checks.
    """
    system = system or sys.platform
    if system != "linux":
        return [Check("platform", State.MISSING, system, "autotune runs on Linux only.", essential=True)]
    try:
        host = read_host()
    except MachineError as error:
        return [Check("platform", State.MISSING, system, f"{error}; {error.advice}", essential=True)]
    cards = gpus()
    return [
        Check("platform", State.OK, f"linux {platform.machine()}", host.cpu_model),
        Check("python", State.OK, platform.python_version(), sys.executable),
        *(_distribution(name) for name in _ESSENTIAL),
        *_devices(cards),
        *_cuda(cards, *torch_versions()),
        *_compilers(os.environ),
        *_host(host, os.cpu_count() or host.cores),
        _folder("studies folder", Path("studies"), "choose another one with --studies-dir."),
        _folder("cache folder", platformdirs.user_cache_path("autotune"), "set XDG_CACHE_HOME to a writable folder."),
    ]


def _distribution(name: str) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        advice = f"install it: pip install {name}"
        return Check(name, State.MISSING, "not installed", f"{advice}.", essential=True)
    return Check(name, State.OK, version, "installed.")


def _devices(found: list[Gpu] | NvmlUnavailable) -> list[Check]:
    """Describe the GPUs, each followed by its MIG instances."""
    if isinstance(found, NvmlUnavailable):
        if found.driver_present:
            advice = "Until it answers, --device cuda cannot work; try nvidia-smi here."
            return [Check("gpu", State.MISSING, "unknown", f"{_sentence(found.reason)} {advice}")]
        reason = "There is an NVIDIA card, but no driver for it." if has_nvidia_card() else _sentence(found.reason)
        return [Check("gpu", State.LIMIT, "none", f"{reason} Searches run on the CPU.")]
    if not found:
        return [Check("gpu", State.LIMIT, "none", "The NVIDIA driver shows no card here. Searches run on the CPU.")]
    return [
        check
        for card in found
        for check in (
            _gpu(f"gpu {card.index}", card),
            *(_gpu(f"gpu {card.index}.{instance.index}", instance) for instance in card.instances),
        )
    ]


def _cuda(found: list[Gpu] | NvmlUnavailable, torch: str | None, cuda: str | None) -> list[Check]:
    """Compare the CUDA that torch was built with to driver and cards; without a card there is nothing to compare."""
    if isinstance(found, NvmlUnavailable) or not found or torch is None:
        return []
    library = cuda_version()
    for card in found:
        # Builds of torch not from PyTorch (conda-forge, NVIDIA's containers) are for other cards.
        capability = card.compute_capability if cuda is None or "+cu" in torch else None
        why_not = trouble(cuda, card.driver_version, capability, library=library)
        if why_not is not None:
            return [Check("cuda", State.MISSING, cuda or "none", f"torch cannot use GPU {card.index}: {why_not}")]
    driver = found[0].driver_version
    if trouble(cuda, driver) is not None:
        newer = f"Driver {driver} is too old, but the CUDA library here is newer (cuda-compat)."
        return [Check("cuda", State.LIMIT, cuda or "none", f"{newer} That works on data-centre cards only.")]
    runs = f"Driver {driver} runs the CUDA that torch was built with."
    return [Check("cuda", State.OK, cuda or "none", runs)]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _gpu(name: str, card: Gpu) -> Check:
    memory = "" if card.memory_bytes is None else f", {_gib(card.memory_bytes)}"
    used = "" if card.memory_used_bytes is None else f" ({_gib(card.memory_used_bytes)} in use)"
    state = State.OK
    if card.mig:
        state = State.LIMIT
        sentence = "Split by MIG: a search takes one instance, the first if none is named."
        if not card.instances:
            sentence = "Split by MIG, and it has no instance that may be used here."
    elif card.processes:
        here = f"{len(card.processes)} process(es) run on it now{used}"
        state, sentence = State.LIMIT, f"{here}; a search discards what it measures while they compute."
    elif card.processes is None:
        sentence = f"The driver does not tell who uses it{used}."
    else:
        sentence = f"No process runs on it{used}."
    value = f"{card.name}{memory}, driver {card.driver_version}"
    return Check(name, state, value, f"{sentence} --device cuda:{card.uuid}")


def _compilers(env: Mapping[str, str]) -> list[Check]:
    """Check what torch.compile needs: a C++ compiler on the CPU, a C compiler on a GPU, Python's headers on both."""
    rows = (
        ("c++ compiler", host.cxx_compiler(env), "the CPU", host.NO_CXX_COMPILER),
        ("c compiler", host.c_compiler(env), "a GPU", host.NO_C_COMPILER),
        ("python headers", host.python_header(env), "the CPU and a GPU", host.no_python_header()),
    )
    return [
        Check(name, State.OK, str(path), f"For compile_mode on {device}.")
        if path
        else Check(name, State.LIMIT, "none", f"compile_mode stays off on {device}: {lack.what}; {lack.advice}")
        for name, path, device, lack in rows
    ]


def _host(host: Host, machine_cores: int) -> list[Check]:
    if host.cores < machine_cores:
        sentence = f"The machine has {machine_cores}; affinity or a container's quota allows {host.cores}."
        cores = Check("cores", State.LIMIT, str(host.cores), sentence)
    else:
        cores = Check("cores", State.OK, str(host.cores), "All of the machine's cores may be used.")
    memory = Check("memory", State.OK, _gib(host.memory_bytes), f"{_gib(host.available_bytes)} of it is free now.")
    if host.shm_bytes == 0:
        sentence = "Loader workers hand over batches through it: mount one, or only num_workers 0 works."
        shm = Check("/dev/shm", State.MISSING, "none", sentence)
    elif host.shm_free_bytes < _SHM_ENOUGH_BYTES:
        sentence = (
            f"{_gib(host.shm_free_bytes)} free: large batches run out of it; give the container 8 GiB ({MORE_SHM})."
        )
        shm = Check("/dev/shm", State.LIMIT, _gib(host.shm_bytes), sentence)
    else:
        shm = Check("/dev/shm", State.OK, _gib(host.shm_bytes), f"{_gib(host.shm_free_bytes)} of it is free now.")
    if host.open_files < _FILES_ENOUGH:
        sentence = f"Many loader workers need more: ulimit -n {_FILES_ENOUGH * 4}."
        files = Check("open files", State.LIMIT, str(host.open_files), sentence)
    else:
        files = Check("open files", State.OK, str(host.open_files), "Enough for many loader workers.")
    return [cores, memory, shm, files]


def _folder(name: str, folder: Path, advice: str) -> Check:
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check(name, State.OK, str(folder.absolute()), "Can be written.")
    return Check(name, State.LIMIT, str(folder.absolute()), f"Cannot be written; {advice}")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"


def command(as_json: Json = False) -> None:
    """Say what this machine can do, and what limits it."""
    raise typer.Exit(doctor(as_json))
