"""The user's profiles, one for each training on each machine, with their history and whether they are still valid.

A *slot* is a folder for one training (the workload, its arguments and data, the objective, the image size) on one kind
of hardware. Its ``profile.yaml`` is the profile in force, ``history/`` holds every profile received, in order, and
``slot.json`` records the decision on each. Only a profile proven faster replaces another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from autotune.catalog import find_workload, source_hash
from autotune.clock import timestamp
from autotune.errors import AutotuneError, MachineError, ProfileError, UnknownNameError
from autotune.files import exclusive_lock, write_atomic
from autotune.knobs import spell
from autotune.machine.cuda import torch_versions
from autotune.machine.gpu import Gpu, NvmlUnavailable, gpus, visible, with_instances
from autotune.machine.host import read_host
from autotune.profile import Profile, dump, read
from autotune.records import SCHEMA_VERSION, Fingerprint, Record, Value

#: Fingerprint values that define a slot. A change of any other value makes a profile stale.
HARDWARE = ("gpu_model", "gpu_memory_bytes", "mig", "cpu_model", "cores")
Row = tuple[str, str, str]


class Entry(Record):
    """One profile in a slot's history.

    Attributes:
        file: its name in ``history/``. verdict: the decision, as a clause.
        replaced: it replaced the profile in force.
    """

    file: str
    came: str
    replaced: bool
    verdict: str


class SlotState(Record):
    """``slot.json``.

    Attributes:
        stale: what has changed since the profile in force was measured: rows ``(what, then, now)``.
    """

    schema_version: int = SCHEMA_VERSION
    entries: tuple[Entry, ...] = ()
    stale: tuple[Row, ...] = ()
    checked: str | None = None


@dataclass(frozen=True)
class Slot:
    """A slot with the profile in force."""

    name: str
    profile: Profile
    state: SlotState
    path: Path


class Store:
    """The slots in one folder. Several processes may use it; each change is made under the folder's lock.

    Raises:
        MachineError: (from every method) the folder cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, profile: Profile, *, instead_of: str | None = None) -> tuple[str, Entry]:
        """Store a profile; return its slot and the decision.

        Args:
            instead_of: the slot whose configuration was this search's baseline. The search itself is then the
                comparison, made by interleaved launches on the machine as it is now.

        Raises:
            ProfileError: it was measured behind a slow store that was made for a search, as no training is.
        """
        if profile.behind_store is not None:
            raise ProfileError(
                f"it was measured behind a store that was put there for the search: {profile.behind_store}"
            )
        name = instead_of or slot_name(profile)
        slot = self.folder / name
        with self._locked():
            state = _read_state(slot)
            text = dump(profile)
            current = self._current(slot)
            last = state.entries[-1] if state.entries else None
            if current is not None and last is not None and _text_of(slot / "history" / last.file) == text:
                # An earlier call stored the profile and was killed before it returned.
                return name, last
            replaced, verdict = _verdict(current, profile, is_rematch=instead_of is not None)
            file = f"{len(state.entries) + 1:04d}.yaml"
            entry = Entry(file=file, came=timestamp(), replaced=replaced, verdict=verdict)
            (slot / "history").mkdir(parents=True, exist_ok=True)
            write_atomic(slot / "history" / file, text)
            if replaced:
                write_atomic(slot / "profile.yaml", text)
            stale = () if replaced else state.stale
            new = state.model_copy(update={"entries": (*state.entries, entry), "stale": stale})
            write_atomic(slot / "slot.json", new.model_dump_json(indent=1))
        return name, entry

    def all(self) -> list[Slot]:
        """Return every readable slot, sorted by name."""
        return list(self._slots())

    def one(self, name: str) -> Slot:
        """Return a slot.

        Raises:
            UnknownNameError: there is no such slot.
        """
        slots = {kept.name: kept for kept in self._slots()}
        if name not in slots:
            raise UnknownNameError("profile", name, slots, advice=None if slots else "`autotune search` makes one.")
        return slots[name]

    def note(self, name: str, stale: tuple[Row, ...]) -> None:
        """Record whether a slot's profile is still valid."""
        slot = self.folder / name
        with self._locked():
            state = _read_state(slot)
            if state.stale != stale:
                new = state.model_copy(update={"stale": stale, "checked": timestamp()})
                write_atomic(slot / "slot.json", new.model_dump_json(indent=1))

    def find(self, model: str, here: Fingerprint) -> tuple[Slot, list[Row]]:
        """Return the profile for a model on this machine, or the closest one, with its differences from this machine.

        Args:
            model: a name, a file or ``package.module:NAME``, as ``--model`` takes it.

        Raises:
            ProfileError: there is no profile for the model.
        """
        slots = self.all()
        # As the catalog writes the path of a file: without "..", with symbolic links.
        absolute = os.path.abspath(Path(model).expanduser())
        fitting = [k for k in slots if model in (k.profile.workload.name, k.profile.workload.module)]
        fitting += [k for k in slots if k.profile.workload.path == absolute and k not in fitting]
        if not fitting:
            known = sorted({kept.profile.workload.name for kept in slots})
            here_are = f" (there are those of {', '.join(known)})" if known else ""
            # The advice is part of the message, because a traceback shows nothing else.
            raise ProfileError(
                f"no profile of {model!r} is kept here{here_are}; `autotune search --model {model}` makes one"
            )
        ranked = [(differences(kept.profile, here), kept) for kept in fitting]
        # Different hardware outweighs any software; among equals the latest profile wins.
        ranked.sort(key=lambda pair: pair[1].profile.provenance.created, reverse=True)
        rows, kept = min(ranked, key=lambda pair: (sum(r[0] in HARDWARE for r in pair[0]), len(pair[0])))
        return kept, rows

    def _slots(self) -> Iterator[Slot]:
        for path in sorted(self.folder.glob("*/profile.yaml")):
            # A damaged profile must not hide the others.
            with contextlib.suppress(AutotuneError):
                yield Slot(path.parent.name, read(path), _read_state(path.parent), path)

    def _current(self, slot: Path) -> Profile | None:
        try:
            return read(slot / "profile.yaml") if (slot / "profile.yaml").exists() else None
        except AutotuneError:
            # An unreadable profile stays in the history and blocks nothing.
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(f"cannot make {self.folder}: {error.strerror}") from error
        with exclusive_lock(self.folder / ".lock", wait=True):
            yield


def _verdict(current: Profile | None, new: Profile, *, is_rematch: bool) -> tuple[bool, str]:
    if current is None:
        return True, "the first for this training on this hardware"
    if is_rematch:
        if new.configuration == current.configuration:
            return True, "the same configuration, measured again on the machine as it is now"
        if new.gives.speedup_ci95[0] > 1:
            return True, "proven faster than the one before, in turns with it"
        return False, "not shown to be faster than the one before"
    if new.fingerprint.differences(current.fingerprint):
        return True, "measured on the machine as it is now; the one before was not"
    if new.configuration == current.configuration:
        better = _width(new) <= _width(current)
        return better, f"the same configuration, known {'as well or better' if better else 'less well'}"
    if new.gives.ci95[0] > current.gives.ci95[1]:
        return True, "faster than the one before: their intervals lie apart"
    return False, "not shown to be faster than the one before: their intervals overlap, or it is slower"


def _width(profile: Profile) -> float:
    """Return the width of the rate's interval, relative to the rate."""
    low, high = profile.gives.ci95
    return (high - low) / profile.gives.samples_per_second


def slot_name(profile: Profile) -> str:
    """Return the slot of a profile: the workload's name, and a hash of everything that identifies the training."""
    w, f = profile.workload, profile.fingerprint.values
    identity = [
        *(w.module or w.path or w.name, sorted(w.args.items()), profile.provenance.objective),
        *(profile.conditions.device.split(":")[0], profile.conditions.image_size, profile.conditions.data),
        *(f.get(name) for name in HARDWARE),
    ]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", w.name)
    return f"{name}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]}"


def differences(profile: Profile, here: Fingerprint) -> list[Row]:
    """Return what differs on this machine, the workload's files included, as far as no process has to be started."""
    then = profile.fingerprint.values
    now = dict(here.values)
    if not profile.conditions.device.startswith("cuda"):
        now = {name: value for name, value in now.items() if name not in _OF_CARDS}
    else:
        # Without a card, or without an answer from the driver, this is not the same kind of machine.
        now.setdefault("gpu_model", "none")
    now["workload_sha256"] = _workload_now(profile)
    rows = [(n, _text(then[n]), _text(v)) for n, v in now.items() if n in then and v is not None and then[n] != v]
    return sorted(rows)


def stale_rows(profile: Profile, here: Fingerprint) -> list[Row]:
    """Return what has changed since a profile was measured on this hardware; empty on other hardware."""
    rows = differences(profile, here)
    return [] if any(name in HARDWARE for name, _, _ in rows) else rows


#: Values that concern only trainings on a card.
_OF_CARDS = ("gpu_model", "driver", "power_limit_w", "mig", "cuda")


def look_here(cards: Callable[[], list[Gpu] | NvmlUnavailable] = gpus, *, uuid: str | None = None) -> Fingerprint:
    """Return the part of the fingerprint that can be read without torch.

    Args:
        uuid: the card or MIG instance to describe; defaults to the first that CUDA shows this process.
    """
    host = read_host()
    card = _card(cards(), uuid)
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


def _card(found: list[Gpu] | NvmlUnavailable, uuid: str | None) -> Gpu | None:
    if isinstance(found, NvmlUnavailable):
        return None
    if uuid is not None:
        return next((device for device in with_instances(found) if device.uuid == uuid), None)
    shown = visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return (shown[0].instances or shown)[0] if shown else None


def rematch_baseline(profile: Profile) -> dict[str, str]:
    """Return the ``--baseline`` for a search that tests whether anything is faster than this profile."""
    return {name: spell(value) for name, value in profile.configuration.items()}


def _workload_now(profile: Profile) -> str | None:
    w = profile.workload
    if w.module is not None:
        # The file is not known without an import, which would run it.
        return None
    try:
        return source_hash(Path(w.path)) if w.path is not None else find_workload(w.name, w.args).sha256
    except AutotuneError:
        return "gone"


def _read_state(slot: Path) -> SlotState:
    try:
        return SlotState.model_validate_json((slot / "slot.json").read_text())
    except FileNotFoundError:
        return SlotState()
    except (OSError, ValidationError):
        # The profiles themselves hold all that matters; rebuild the list of entries without their verdicts.
        files = sorted(p.name for p in (slot / "history").glob("*.yaml"))
        unknown: list[Entry] = [Entry(file=f, came="", replaced=False, verdict="not known any more") for f in files]
        return SlotState(entries=tuple(unknown))


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _text(value: object) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text
