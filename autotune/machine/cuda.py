"""Which CUDA torch was built with, and which CUDA NVIDIA's driver runs. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cuda:
    """Versions of CUDA for which wheels of torch support the same cards, from ``major.minor`` up.

    Attributes:
        driver: the oldest driver, by its major version. It runs all minor versions of this major one.
        oldest, newest: cards, by their compute capability; the newest is ``None`` if it is the newest there is.
        wheels: wheels of torch for these versions, by the names of their indexes.
    """

    major: int
    minor: int
    driver: int
    oldest: tuple[int, int]
    newest: tuple[int, int] | None
    wheels: str

    def supports(self, card: tuple[int, int] | None) -> bool:
        """Return whether the wheels have kernels for a card; for one that is not known they have."""
        return card is None or (self.oldest <= card and (self.newest is None or card <= self.newest))


#: The newest first. Drivers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
#: Cards: TORCH_CUDA_ARCH_LIST in https://github.com/pytorch/pytorch/blob/main/.ci/manywheel/build_cuda.sh
#: Wheels: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
VERSIONS = (
    Cuda(13, 0, 580, (7, 5), None, "cu132 or cu130"),
    # Of those for 12.8, some also have kernels for Volta (7.0), those of torch 2.8 to 2.10.
    Cuda(12, 8, 525, (7, 5), None, "cu128 up to torch 2.11"),
    Cuda(12, 0, 525, (5, 0), (9, 0), "cu126 up to torch 2.14"),
    Cuda(11, 0, 450, (3, 7), (9, 0), "cu118 up to torch 2.7"),
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


def trouble(
    cuda: str | None, driver: str, card: tuple[int, int] | None = None, *, library: tuple[int, int] | None = None
) -> str | None:
    """Return why torch cannot use a card with this driver, and what to install, in two sentences; ``None`` if it can.

    Args:
        cuda: the version that torch was built with; ``None``: torch was built without CUDA.
        driver: the driver's version, such as ``580.95.05``.
        card: its compute capability, if known, and if torch is one of PyTorch's own wheels.
        library: the version of CUDA that the library runs which torch will load (``libcuda``), if known. In containers
            it may be another than the driver outside comes with (NVIDIA's package cuda-compat).
    """
    found = fitting(driver, card, library)
    major = found[0].major if found else None
    fits = f"a torch wheel for CUDA {major} ({', or '.join(v.wheels for v in reversed(found))})" if found else None
    fits = fits or "no torch wheel"
    if cuda is None:
        return f"torch was built without CUDA. This driver runs {fits}."
    built = _of(cuda)
    if built is None:
        return None
    if not built.supports(card):
        assert card is not None
        return f"CUDA {cuda} has no kernels for compute capability {card[0]}.{card[1]}. This card runs {fits}."
    if library is not None and library[0] < built.major and _runs(driver, built, None):
        own = f"The CUDA library that is found here is for CUDA {library[0]}.{library[1]}, older than the driver"
        return f"CUDA {cuda} needs a newer one. {own}: look for an old cuda-compat in LD_LIBRARY_PATH."
    if _runs(driver, built, library) is False:
        return f"CUDA {cuda} needs driver {built.driver} or newer. Update the driver; this one runs {fits}."
    return None


def fitting(driver: str, card: tuple[int, int] | None, library: tuple[int, int] | None = None) -> list[Cuda]:
    """Return the versions of the newest CUDA that a driver (``580.95.05``) runs on a card; see `trouble`."""
    found = [v for v in VERSIONS if _runs(driver, v, library) and v.supports(card)]
    return [v for v in found if v.major == found[0].major]


def _of(cuda: str) -> Cuda | None:
    numbers = [int(part) for part in cuda.split(".")[:2] if part.isdigit()]
    major, minor = (*numbers, 0, 0)[:2]
    return next((v for v in VERSIONS if v.major == major and v.minor <= minor), None)


def _runs(driver: str, version: Cuda, library: tuple[int, int] | None) -> bool | None:
    """Return whether a driver runs a version; ``None`` if that is not known."""
    if library is not None:
        return library[0] >= version.major
    major = driver.partition(".")[0]
    return int(major) >= version.driver if major.isdigit() else None
