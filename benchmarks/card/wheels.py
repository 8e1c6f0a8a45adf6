"""The wheels that autotune needs on a machine that has little more than torch and cannot reach a package index."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata

from benchmarks.card.stage import ROOT

#: What is there, with all that it requires.
THERE = ("torch", "torchvision", "nvidia-ml-py", "rich", "pip")
#: Not required, but a part is skipped without it.
USEFUL = ("pytest",)
#: The Python there, and the platforms whose wheels it takes.
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
FOLDER = ".whl"


def wheels(there: Sequence[str] = THERE) -> list[str]:
    """Return ``name==version`` of each distribution to bring: autotune's requirements and theirs, as installed here,
    less what is there.

    Raises:
        SystemExit: one is not installed here.
    """
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    missing = _closure([*wanted, *USEFUL]) - _closure(there)
    return [f"{name}=={metadata.version(name)}" for name in sorted(missing)]


def _closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of these requirements and of all that those require on the other machine."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    target = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        one, extra = waiting.pop()
        if one.marker is not None and not one.marker.evaluate({**target, "extra": extra}):
            continue
        name = canonicalize_name(one.name)
        if name in found and not one.extras:
            continue
        found.add(name)
        try:
            further = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            raise SystemExit(f"{name} is not installed here; --wheels needs a complete installation") from None
        waiting += [(Requirement(text), asked) for text in further for asked in ("", *one.extras)]
    return found


def told(found: Sequence[str]) -> str:
    """Return the wheels, and the commands that fetch them here and install them there."""
    platforms = " ".join(f"--platform {name}_x86_64" for name in PLATFORMS)
    return "\n".join(
        [
            *found,
            "",
            "# Here, in the root of the checkout:",
            f"python3 -m pip download --no-deps --only-binary=:all: --python-version {PYTHON} --implementation cp "
            f"{platforms} -d {FOLDER} {' '.join(found)}",
            "# There, with that folder beside the checkout's files:",
            "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "
            f"{FOLDER}/*.whl && export PYTHONPATH=$PWD:/tmp/site",
        ]
    )
