"""The profiles in force: which of them hold on this machine, the user's own, and those of a shared place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.base.clock import timestamp
from autotune.base.errors import AutotuneError, MachineError, ProfileError, UnknownNameError, UsageError
from autotune.base.files import exclusive_lock, make_folder, write_atomic
from autotune.base.ranks import own_rank
from autotune.base.records import SCHEMA_VERSION, Fingerprint, Record, Value
from autotune.knobs import spell
from autotune.machine.gpu import Gpu, NvmlUnavailable, gpus, visible, with_instances
from autotune.machine.host import read_host, torch_versions
from autotune.profile import MAX_BYTES, Profile, altered, dump, parse, printable, read
from autotune.profile.yaml import CODE, PROFILE, brief
from autotune.workload.catalog import constants, find_workload, source_hash

# What of a profile holds on this machine, as far as it can be determined without torch and without a process.

#: Stands for the training's code if its files are not on this machine.
GONE = "gone"
#: Fingerprint values that define a slot. A change of any other value makes a profile stale.
HARDWARE = ("gpu_model", "gpu_memory_bytes", "mig", "cpu_model", "cores")
Row = tuple[str, str, str]
#: Values that matter only to trainings on a card.
_OF_CARDS = ("gpu_model", "driver", "power_limit_w", "mig", "cuda")


def differences(profile: Profile, here: Fingerprint) -> list[Row]:
    """Return what differs on this machine, including the workload's files, without starting a process."""
    then = profile.fingerprint.values
    now = dict(here.values)
    if not profile.conditions.device.startswith("cuda"):
        now = {name: value for name, value in now.items() if name not in _OF_CARDS}
    else:
        # Without a card, or if the driver does not answer, this is not the same kind of machine.
        now.setdefault("gpu_model", "none")
    now[CODE] = _workload_now(profile)
    rows = [(n, brief(then[n]), brief(v)) for n, v in now.items() if n in then and v is not None and then[n] != v]
    return [*altered(profile), *sorted(rows)]


def on_hardware(profile: Profile, here: Fingerprint) -> bool:
    """Return whether a profile was measured on hardware like this machine's."""
    return not _hardware_rows(differences(profile, here))


def stale_rows(profile: Profile, here: Fingerprint) -> list[Row]:
    """Return what has changed since a profile was measured on this hardware; empty on other hardware."""
    rows = differences(profile, here)
    return [] if _hardware_rows(rows) else rows


def _hardware_rows(rows: list[Row]) -> int:
    """Return how many rows are about the hardware."""
    return sum(name in HARDWARE for name, _, _ in rows)


def has_default_size(profile: Profile) -> bool:
    """Return whether a profile has its workload's default image size for its kind of device; False if that cannot be
    read from the workload's file."""
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
        index: of the card, among those that CUDA shows to this process.
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
    devices = visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if index >= len(devices):
        return None
    return devices[index].instances[0] if devices[index].instances else devices[index]


def _workload_now(profile: Profile) -> str | None:
    w = profile.workload
    if w.module is not None:
        # Finding the file would take an import, which would run it.
        return None
    try:
        return source_hash(Path(w.path)) if w.path is not None else find_workload(w.name, w.args).sha256
    except AutotuneError:
        return GONE


# A *slot* is a folder for one training (the workload, its arguments and data, the objective, the image size) on one
# kind of hardware. Its ``profile.yaml`` is the profile in force, ``history/`` holds every profile received, in order,
# and ``slot.json`` records the decision on each. Only a profile proven faster replaces another.


class Entry(Record):
    """One profile in a slot's history.

    Attributes:
        file: its name in ``history/``. verdict: the decision, as a clause.
        replaced: whether it replaced the profile in force.
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

    def stale(self, here: Fingerprint) -> list[Row]:
        """Return what has changed since the profile was measured, as far as this machine can tell: for other hardware,
        only what was noted there, and the training's code."""
        rows = differences(self.profile, here)
        if not _hardware_rows(rows):
            return rows
        certain = [row for row in rows if row[0] in (PROFILE, CODE) and row[2] != GONE]
        names = [name for name, _, _ in certain]
        return [*certain, *(row for row in self.state.stale if row[0] not in (*names, CODE))]


class Store:
    """The slots in one folder. Several processes may use it; each change is made under the folder's lock.

    Raises:
        MachineError: (from every method) the folder cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(
        self, profile: Profile, *, instead_of: str | None = None, foreign_to: Fingerprint | None = None
    ) -> tuple[str, Entry]:
        """Store a profile; return its slot and the decision.

        Args:
            instead_of: the slot whose configuration was this search's baseline. The search itself is then the
                comparison, made by interleaved launches on the machine as it is now.
            foreign_to: this machine, if the profile comes from another one of the slot's kind. If its conditions differ
                from those of the profile in force, it replaces that one only if it was measured later and fits this
                machine no worse.

        Raises:
            ProfileError: it was measured behind a slow store that was set up for a search, which no training has; or it
                is not proven.
        """
        if profile.gives.unproven is not None:
            raise ProfileError(f"it is not kept with the proven ones: {profile.gives.unproven}")
        if profile.behind_store is not None:
            raise ProfileError(
                f"it was measured behind a store that was put there for the search: {profile.behind_store}"
            )
        name = instead_of or slot_name(profile)
        slot = self.folder / name
        with self._locked():
            state = _read_state(slot)
            text = dump(profile)
            stored = _known(slot, state, text)
            current: Profile | None = None
            # There may be none. An unreadable one stays in the history and does not block others.
            with contextlib.suppress(AutotuneError):
                current = read(slot / "profile.yaml")
            if current is not None and stored is not None:
                # An earlier call stored the profile: either it was killed before it returned, or it came from the node
                # that measured the profile, and the folder is shared.
                return name, stored
            replaced, verdict = _verdict(current, profile, is_rematch=instead_of is not None, foreign_to=foreign_to)
            # One may lack where the list of entries was damaged.
            last = max((int(Path(e.file).stem) for e in state.entries if Path(e.file).stem.isdecimal()), default=0)
            file = f"{last + 1:04d}.yaml"
            entry = Entry(file=file, came=timestamp(), replaced=replaced, verdict=verdict)
            (slot / "history").mkdir(parents=True, exist_ok=True)
            write_atomic(slot / "history" / file, text)
            if replaced:
                write_atomic(slot / "profile.yaml", text)
            stale = () if replaced else state.stale
            new = state.model_copy(update={"entries": (*state.entries, entry), "stale": stale})
            write_atomic(slot / "slot.json", new.model_dump_json(indent=1))
        return name, entry

    def has(self, profile: Profile) -> bool:
        """Return whether a profile has been stored, whatever the decision on it was."""
        slot = self.folder / slot_name(profile)
        return _known(slot, _read_state(slot), dump(profile)) is not None

    def all(self, names: str = "*") -> list[Slot]:
        """Return every readable slot whose name has this pattern, sorted by name."""
        slots = []
        for path in sorted(self.folder.glob(f"{names}/profile.yaml")):
            # A damaged profile must not hide the others.
            with contextlib.suppress(AutotuneError):
                slots.append(Slot(path.parent.name, read(path), _read_state(path.parent), path))
        return slots

    def one(self, name: str) -> Slot:
        """Return a slot.

        Raises:
            UnknownNameError: there is no such slot.
        """
        slots = {slot.name: slot for slot in self.all()}
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

    def find(self, model: str, here: Fingerprint, batch_size: int | None = None) -> tuple[Slot, list[Row]]:
        """Return the profile for a model on this machine, or the closest one, with its differences from this machine.

        Args:
            model: a name, a file or ``package.module:NAME``, as ``--model`` takes it.
            batch_size: that the profile must have; ``None`` for any.

        Raises:
            ProfileError: there is no profile for the model, or none with this batch size.
        """
        # Slots are named after their workload: read only those that can match, as a store may hold many.
        names = {_name_of(word) for word in (model, Path(model).stem, model.rpartition(":")[2])}
        slots = [slot for name in sorted(names) for slot in self.all(f"{name}-*")]
        # Same form as the catalog's paths: without "..", symbolic links not resolved.
        absolute, stem = os.path.abspath(Path(model).expanduser()), Path(model).stem
        matches = [k for k in slots if model in (k.profile.workload.name, k.profile.workload.module)]
        matches += [k for k in slots if k.profile.workload.path == absolute and k not in matches]
        if not matches:
            workloads = sorted({slot.profile.workload.name for slot in self.all()})
            others = f" (there are those of {', '.join(workloads)})" if workloads else ""
            if any(k.profile.workload.is_script and k.profile.workload.name == stem for k in slots):
                raise ProfileError(
                    f"no profile of a workload {model!r} is kept here, but that of a script: model={stem!r}"
                )
            # The advice is part of the message, because a traceback shows nothing else.
            raise ProfileError(
                f"no profile of {model!r} is kept here{others}; `autotune search --model {model}` makes one"
            )
        sizes = sorted({int(slot.profile.configuration["batch_size"]) for slot in matches})
        if batch_size is not None:
            matches = [slot for slot in matches if slot.profile.configuration["batch_size"] == batch_size]
        if not matches:
            raise ProfileError(
                f"no profile of {model!r} with batch size {batch_size} is kept here (there are those with "
                f"{', '.join(map(str, sizes))}); `autotune search --model {model} --batch-size {batch_size} "
                "--keep-batch-size` makes one"
            )
        ranked = [(differences(slot.profile, here), slot) for slot in matches]
        # A different number of ranks outweighs different hardware, which outweighs a batch size that was not free to
        # choose, which outweighs any software. Among equals, the latest profile wins.
        ranked.sort(key=lambda pair: pair[1].profile.provenance.created, reverse=True)
        ranks = own_rank().count

        def distance(pair: tuple[list[Row], Slot]) -> tuple[bool, int, bool, int]:
            rows, slot = pair
            then = slot.profile.conditions
            return then.ranks != ranks, _hardware_rows(rows), then.keeps_batch_size, len(rows)

        rows, slot = min(ranked, key=distance)
        return slot, rows

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make_folder(self.folder, "AUTOTUNE_STATE_DIR names another folder.")
        with exclusive_lock(self.folder / ".lock", wait=True):
            yield


def _verdict(
    current: Profile | None, new: Profile, *, is_rematch: bool, foreign_to: Fingerprint | None
) -> tuple[bool, str]:
    if current is None:
        return True, "the first for this training on this hardware"
    if is_rematch:
        if new.configuration == current.configuration:
            return True, "the same configuration, measured again on the machine as it is now"
        if new.gives.speedup_ci95 is not None and new.gives.speedup_ci95[0] > 1:
            return True, "proven faster than the one before, in turns with it"
        return False, "not shown to be faster than the one before"
    rows = new.fingerprint.differences(current.fingerprint)
    if rows and foreign_to is not None:
        is_later = new.provenance.created > current.provenance.created
        if is_later and len(differences(new, foreign_to)) <= len(differences(current, foreign_to)):
            return True, "measured later than the one before, which fits this machine no better"
        return False, f"another machine's, which differs in {', '.join(name for name, _, _ in rows)}"
    if rows:
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
        *([profile.conditions.ranks] if profile.conditions.ranks > 1 else []),
        *(["batch", profile.configuration["batch_size"]] if profile.conditions.keeps_batch_size else []),
    ]
    return f"{_name_of(w.name)}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]}"


def _name_of(workload: str) -> str:
    """Return a workload's name in the form that begins the name of a slot."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", workload)


def rematch_baseline(profile: Profile) -> dict[str, str]:
    """Return the ``--baseline`` for a search that tests whether anything is faster than this profile."""
    return {name: spell(value) for name, value in profile.configuration.items()}


def _read_state(slot: Path) -> SlotState:
    try:
        return SlotState.model_validate_json((slot / "slot.json").read_text())
    except FileNotFoundError:
        return SlotState()
    except (OSError, ValidationError):
        # The profiles themselves hold all that matters: rebuild the list of entries without their verdicts.
        files = sorted(p.name for p in (slot / "history").glob("*.yaml"))
        entries: list[Entry] = [Entry(file=f, came="", replaced=False, verdict="not known any more") for f in files]
        return SlotState(entries=tuple(entries))


def _known(slot: Path, state: SlotState, text: str) -> Entry | None:
    """Return the last entry whose profile has this text."""
    for entry in reversed(state.entries):
        with contextlib.suppress(OSError):
            if (slot / "history" / entry.file).read_text() == text:
                return entry
    return None


# Profiles in a place that several machines can reach: a shared folder, or an object store that fsspec supports
# (``s3://…``).
#
# A profile's file there is named after its slot and the hash of its content, ``resnet50-1a2b3c4d/<sha256>.yaml``, and
# never changes. So pushes need no lock, a truncated or altered file can be recognised, and pulling a file twice changes
# nothing.


_NAME = re.compile(r"([0-9a-f]{64})\.yaml")


@dataclass(frozen=True)
class Exchanged:
    """What happened to one profile.

    Attributes:
        slot: its slot. changed: whether it was new there, or is in force here now. verdict: why, as a clause.
    """

    slot: str
    changed: bool
    verdict: str


def push(store: Store, url: str) -> list[Exchanged]:
    """Copy the profiles in force to a shared place.

    Raises:
        UsageError: the kind of place is unknown.
        MachineError: it cannot be written. What was copied before stays there.
    """
    place = _Place(url)
    results = []
    for slot in store.all():
        if slot.profile.altered:
            results.append(Exchanged(slot.name, False, "not copied: it was changed by hand since it was written"))
            continue
        data = dump(slot.profile).encode()
        name = f"{slot.name}/{hashlib.sha256(data).hexdigest()}.yaml"
        new = place.write(name, data)
        results.append(Exchanged(slot.name, new, "copied" if new else "was there"))
    return results


def pull(store: Store, url: str, here: Fingerprint, say: Callable[[str], None]) -> list[Exchanged]:
    """Store the profiles of a shared place. A profile in force is replaced only by one that `Store.keep` finds better.

    Args:
        here: this machine. say: called with a sentence about each file that is not what its name says; it is left out.

    Raises:
        UsageError: the kind of place is unknown.
        MachineError: it cannot be read, or the store cannot be written.
    """
    profiles: list[Profile] = []
    place = _Place(url)
    for path in place.files():
        data = place.read(path)
        try:
            profiles.append(_checked(data, path))
        except AutotuneError as error:
            say(f"{printable(path)} is left out: {error}")
    results = []
    # Oldest first, so that the history is in order.
    for profile in sorted(profiles, key=lambda profile: profile.provenance.created):
        try:
            if store.has(profile):
                results.append(Exchanged(slot_name(profile), False, "was here"))
                continue
            slot, entry = store.keep(profile, foreign_to=here)
        except (ProfileError, OSError) as error:
            say(f"the profile of {printable(profile.workload.name[:60])} is left out: {error}")
            continue
        results.append(Exchanged(slot, entry.replaced, entry.verdict))
    return results


def _checked(data: bytes, path: str) -> Profile:
    """Return the profile in ``data``, whose hash must be the one in its file name.

    Raises:
        AutotuneError: it is not, or the data is no profile.
    """
    name = _NAME.fullmatch(path.rsplit("/", 1)[-1])
    if name is None or hashlib.sha256(data).hexdigest() != name[1]:
        raise UsageError("its content is not what was pushed")
    profile = parse(data.decode(errors="replace"), path)
    if profile.altered:
        raise ProfileError("it was changed by hand since it was written, so nobody measured what it says")
    return profile


class _Place:
    """A folder that fsspec can reach.

    Raises:
        UsageError: its kind is unknown, or the package for it is not installed.
        MachineError: (from every method, too) it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self._url = url
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"{url!r} is no place that can be reached: {str(error).splitlines()[0]}",
                advice="name a folder, or an address such as s3://bucket/profiles; its package must be installed.",
            ) from error
        except Exception as error:
            # Some file systems connect at once.
            raise self._unusable(error) from error

    def files(self) -> list[str]:
        """Return the profiles' paths, sorted."""
        return sorted(self._tried(lambda: self._system.glob(f"{self._root}/*/*.yaml")))

    def read(self, path: str) -> bytes:
        data: bytes = self._tried(lambda: self._system.cat_file(path, end=MAX_BYTES + 1))
        return data

    def write(self, name: str, data: bytes) -> bool:
        """Write a file and return True; return False if it is already there."""
        path = f"{self._root}/{name}"

        def write() -> bool:
            if self._system.exists(path) and self._system.cat_file(path) == data:
                return False
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(path, data)
            return True

        return bool(self._tried(write))

    def _tried(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            # Each kind of file system raises errors of its own.
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> MachineError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return MachineError(f"{self._url} cannot be used: {reason}")
