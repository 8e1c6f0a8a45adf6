"""Checks whether a profile is valid on this machine: compares fingerprints and explains each difference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autotune.profile.schema import Profile, shown
from autotune.base.records import Fingerprint, WorkloadRef

#: The names of the rows that say whether the profile itself is as it was written, and the workload's code as it was.
PROFILE, CODE = "profile", "workload_sha256"
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
        "the training differs",
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


def unlike(profile: Profile, ref: WorkloadRef, chosen: str, args: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return rows, as of `check`, for what another training has that is not the profile's.

    Args:
        ref: the training, which ``chosen``, a value of ``--model``, and ``args`` have led to.
    """
    own = profile.workload
    # Many models of the catalog have one file. What a module holds is not known before it is imported.
    same_code = ref.sha256 == own.sha256 if ref.sha256 else chosen == own.module
    code = (own.sha256, ref.sha256) if ref.sha256 else (own.model, chosen)
    rows = {
        CODE: None if same_code else code,
        "workload": None if ref.name == own.name else (own.name, ref.name),
        "workload arguments": None if dict(args) == own.args else (_listed(own.args), _listed(args)),
    }
    return [(name, brief(row[0]), brief(row[1])) for name, row in rows.items() if row is not None]


def _listed(args: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(args.items())) or "none"


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
