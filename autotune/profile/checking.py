"""Checks whether a profile is valid on this machine: compares fingerprints and explains each difference."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autotune.profile.schema import Profile, shown
from autotune.records import Fingerprint

#: The name of the row that says whether the profile itself is as it was written.
PROFILE = "profile"
#: What a difference means for the promised rate, worst first. A row belongs to the first entry that shares a word with
#: its name, or to the last entry if none does.
_MEANS = (
    (
        {PROFILE},
        "the profile has been changed since it was written",
        "nobody measured what it says now, so export it again from its study",
    ),
    (
        {"workload"},
        "the training's code differs",
        "what was measured is not what would be trained, so search again",
    ),
    (
        {"device", "gpu", "mig", "power"},
        "the device differs",
        "the rate was never seen on it and the batch may not fit, so search again here",
    ),
    (
        {"data", "dataset"},
        "the data differs",
        "reading and decoding it may be slower or faster than promised",
    ),
    (
        {"torch", "torchvision", "cuda", "cudnn", "driver", "python"},
        "the software differs",
        "kernels and compiled code differ, so the rate may be higher or lower than promised",
    ),
    (
        {"ranks"},
        "the number of ranks differs",
        "they share cores, memory, links and the loader's source, so the rate of each will be another",
    ),
    (
        {"cpu", "cores", "memory", "shm", "host", "worker"},
        "the host differs",
        "what computes or loads there may be faster or slower than promised, or its workers may not fit",
    ),
    (set[str](), "the machine differs", "the rate may be higher or lower than promised"),
)


def check(profile: Profile, fingerprint: Fingerprint) -> list[tuple[str, str, str]]:
    """Return rows ``(name, in the profile, on this machine)`` for everything that differs; empty if nothing does."""
    rows = profile.fingerprint.differences(fingerprint)
    return [*altered(profile), *((name, brief(then), brief(now)) for name, then, now in rows)]


def brief(value: object) -> str:
    """Return a fingerprint's value as text: of a hash, some digits show that there are two."""
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text


def altered(profile: Profile) -> list[tuple[str, str, str]]:
    """Return the row of a profile that was changed after it was written; empty for any other."""
    return [(PROFILE, "as written", "changed")] if profile.altered else []


def warnings_for(differences: Iterable[tuple[str, str, str]]) -> list[str]:
    """Explain the rows of `check` in terms of the promised rate: one sentence per kind of difference, worst first."""
    grouped: list[list[str]] = [[] for _ in _MEANS]
    for name, promised, here in differences:
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        kind = next((i for i, (those, _, _) in enumerate(_MEANS) if those & words), len(_MEANS) - 1)
        grouped[kind].append(
            f"{shown(name, quoted=False)} {shown(promised, quoted=False)}, here {shown(here, quoted=False)}"
        )
    return [
        f"{what} ({'; '.join(rows)}): {means}." for rows, (_, what, means) in zip(grouped, _MEANS, strict=True) if rows
    ]
