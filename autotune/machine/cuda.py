"""Which CUDA torch was built with, and which CUDA NVIDIA's driver runs. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cuda:
    """A major version of CUDA. All its minor versions run on its oldest driver.

    Attributes:
        driver: the oldest driver, by its major version.
        wheels: wheels of torch for this version by the name of their index, the newest first.
    """

    major: int
    driver: int
    wheels: str


#: The newest first. Drivers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
#: Wheels: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
VERSIONS = (
    Cuda(13, 580, "cu132 or cu130"),
    Cuda(12, 525, "cu126 up to torch 2.14, or for Blackwell cards cu128 up to torch 2.11"),
    Cuda(11, 450, "cu118 up to torch 2.7"),
)


def torch_versions() -> tuple[str | None, str | None]:
    """Return the versions of the installed torch and of the CUDA it was built with, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None, None
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    return version[1] if version else None, cuda[1] if cuda else None


def trouble(cuda: str | None, driver: str) -> str | None:
    """Return why torch cannot use this driver, and what to install, in one or two sentences; ``None`` if it can.

    Args:
        cuda: the version that torch was built with; ``None``: torch was built without CUDA.
        driver: the driver's version, such as ``580.95.05``.
    """
    runs = newest_cuda(driver)
    fits = f"a torch wheel for CUDA {runs.major} ({runs.wheels})" if runs else "no torch wheel"
    if cuda is None:
        return f"torch was built without CUDA. This driver runs {fits}."
    needed = oldest_driver(cuda)
    major = driver.partition(".")[0]
    if needed is None or not major.isdigit() or int(major) >= needed:
        return None
    return f"CUDA {cuda} needs driver {needed} or newer. Update the driver; this one runs {fits}."


def oldest_driver(cuda: str) -> int | None:
    """Return the major version of the oldest driver that runs this version of CUDA; ``None`` if not known."""
    return next((version.driver for version in VERSIONS if str(version.major) == cuda.partition(".")[0]), None)


def newest_cuda(driver: str) -> Cuda | None:
    """Return the newest CUDA that a driver (``580.95.05``) runs, or ``None`` if it is too old for all or not known."""
    major = driver.partition(".")[0]
    return next((version for version in VERSIONS if major.isdigit() and int(major) >= version.driver), None)
