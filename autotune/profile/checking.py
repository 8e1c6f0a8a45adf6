"""Checks whether a profile is valid on this machine: compares fingerprints and explains each difference."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autotune.profile.schema import Profile, shown
from autotune.records import Fingerprint

#: What a difference means for the promised rate, worst first. A row belongs to the first entry that shares a word with
#: its name, or to the last entry if none does.
_MEANS = (
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
        {"cpu", "cores", "memory", "shm", "host", "worker"},
        "the host differs",
        "the loader may deliver more or less than promised, or its workers may not fit",
    ),
    (set[str](), "the machine differs", "the rate may be higher or lower than promised"),
)


def check(profile: Profile, fingerprint: Fingerprint) -> list[tuple[str, str, str]]:
    """Return rows ``(name, in the profile, on this machine)`` for everything that differs; empty if nothing does."""
    return profile.fingerprint.differences(fingerprint)


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
