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
        card: the oldest card, by its compute capability.
        wheels: wheels of torch for this version by the name of their index, the newest first.
    """

    major: int
    driver: int
    card: tuple[int, int]
    wheels: str


#: The newest first. Drivers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
#: Cards: https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/ (13.0 ends Maxwell, Pascal and Volta)
#: Wheels: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
VERSIONS = (
    Cuda(13, 580, (7, 5), "cu132 or cu130"),
    Cuda(12, 525, (5, 0), "cu126 up to torch 2.14, or for Blackwell cards cu128 up to torch 2.11"),
    Cuda(11, 450, (3, 5), "cu118 up to torch 2.7"),
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


def trouble(cuda: str | None, driver: str, card: tuple[int, int] | None = None) -> str | None:
    """Return why torch cannot use a card with this driver, and what to install, in two sentences; ``None`` if it can.

    Args:
        cuda: the version that torch was built with; ``None``: torch was built without CUDA.
        driver: the driver's version, such as ``580.95.05``.
        card: its compute capability, if known.
    """
    runs = newest_cuda(driver, card)
    fits = f"a torch wheel for CUDA {runs.major} ({runs.wheels})" if runs else "no torch wheel"
    if cuda is None:
        return f"torch was built without CUDA. This driver runs {fits}."
    built = next((version for version in VERSIONS if str(version.major) == cuda.partition(".")[0]), None)
    major = driver.partition(".")[0]
    if built is None or not major.isdigit():
        return None
    if card is not None and card < built.card:
        return f"CUDA {cuda} does not support compute capability {card[0]}.{card[1]}. This card runs {fits}."
    if int(major) < built.driver:
        return f"CUDA {cuda} needs driver {built.driver} or newer. Update the driver; this one runs {fits}."
    return None


def newest_cuda(driver: str, card: tuple[int, int] | None = None) -> Cuda | None:
    """Return the newest CUDA that a driver (``580.95.05``) runs on a card, or ``None`` if none is known."""
    major = driver.partition(".")[0]
    if not major.isdigit():
        return None
    fitting = (v for v in VERSIONS if int(major) >= v.driver and (card is None or card >= v.card))
    return next(fitting, None)
