"""Profiles in a place that several machines reach: a shared folder, or an object store that fsspec knows (``s3://…``).

A profile's file there is named by its slot and the hash of its content, ``resnet50-1a2b3c4d/<sha256>.yaml``, and is
never changed. So pushes need no lock, a file that was cut short or altered is told from the others, and pulling one
twice changes nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.base.errors import AutotuneError, MachineError, ProfileError, UsageError
from autotune.profile import MAX_BYTES, Profile, dump, parse, printable
from autotune.profile.store import Store, slot_name
from autotune.base.records import Fingerprint

_NAME = re.compile(r"([0-9a-f]{64})\.yaml")


@dataclass(frozen=True)
class Exchanged:
    """What became of one profile.

    Attributes:
        slot: its slot. changed: it was new there, or is in force here now. verdict: why, as a clause.
    """

    slot: str
    changed: bool
    verdict: str


def push(store: Store, url: str) -> list[Exchanged]:
    """Copy the profiles in force to a shared place.

    Raises:
        UsageError: no such kind of place is known.
        MachineError: it cannot be written. What was copied before stays.
    """
    place = _Place(url)
    found = []
    for kept in store.all():
        if kept.profile.altered:
            found.append(Exchanged(kept.name, False, "not copied: it was changed by hand since it was written"))
            continue
        data = dump(kept.profile).encode()
        name = f"{kept.name}/{hashlib.sha256(data).hexdigest()}.yaml"
        new = place.write(name, data)
        found.append(Exchanged(kept.name, new, "copied" if new else "was there"))
    return found


def pull(store: Store, url: str, here: Fingerprint, say: Callable[[str], None]) -> list[Exchanged]:
    """Take over what a shared place has; what is in force is only replaced by what `Store.keep` finds better.

    Args:
        here: this machine. say: called with a sentence about each file that is not what its name says, and is left out.

    Raises:
        UsageError: no such kind of place is known.
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
    found = []
    # The oldest first, so that the history is in order.
    for profile in sorted(profiles, key=lambda profile: profile.provenance.created):
        try:
            if store.has(profile):
                found.append(Exchanged(slot_name(profile), False, "was here"))
                continue
            slot, entry = store.keep(profile, foreign_to=here)
        except (ProfileError, OSError) as error:
            say(f"the profile of {printable(profile.workload.name[:60])} is left out: {error}")
            continue
        found.append(Exchanged(slot, entry.replaced, entry.verdict))
    return found


def _checked(data: bytes, path: str) -> Profile:
    """Return a profile whose content is what its name says.

    Raises:
        AutotuneError: it is not, or is no profile.
    """
    name = _NAME.fullmatch(path.rsplit("/", 1)[-1])
    if name is None or hashlib.sha256(data).hexdigest() != name[1]:
        raise UsageError("its content is not what was pushed")
    return _unaltered(parse(data.decode(errors="replace"), path))


def _unaltered(profile: Profile) -> Profile:
    if profile.altered:
        raise ProfileError("it was changed by hand since it was written, so nobody measured what it says")
    return profile


class _Place:
    """A folder that fsspec reaches.

    Raises:
        UsageError: no such kind is known, or its package is not installed.
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
            # Some connect at once.
            raise self._unusable(error) from error

    def files(self) -> list[str]:
        """Return the profiles' paths, sorted."""
        return sorted(self._tried(lambda: self._system.glob(f"{self._root}/*/*.yaml")))

    def read(self, path: str) -> bytes:
        data: bytes = self._tried(lambda: self._system.cat_file(path, end=MAX_BYTES + 1))
        return data

    def write(self, name: str, data: bytes) -> bool:
        """Write a file, and return True, unless it is there."""
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
            # Each store has errors of its own.
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> MachineError:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return MachineError(f"{self._url} cannot be used: {why}")
