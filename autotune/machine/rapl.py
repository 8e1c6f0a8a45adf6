"""The energy that the processors use, from their own counters (RAPL, read by way of Linux' powercap).

https://docs.kernel.org/power/powercap/powercap.html. Since Linux 5.10, only root may read them, unless the
administrator allows it (CVE-2020-8694).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: Where Linux has the counters. Those of AMD's processors have Intel's name, too.
POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:\d+")
_PART = re.compile(r"intel-rapl:\d+:\d+")


@dataclass
class _Zone:
    """One counter. last_uj: its reading before; range_uj: where it begins at zero again."""

    path: Path
    range_uj: int
    last_uj: int


class Rapl:
    """Adds up the energy of all processor packages, and of the memory where it has a counter of its own.

    The counters wrap around after some minutes of full load: call `energy_j` at least once a minute.

    Args:
        folder: of the counters.

    Attributes:
        refused: why there is no figure, as a clause; ``None`` if there is one.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.refused: str | None = None
        self._joules = 0.0
        self._zones: list[_Zone] = []
        try:
            for path in sorted(folder.iterdir()):
                # A part of a package is counted in it; memory is not. What is called psys counts everything twice.
                name = _text(path / "name") if _PACKAGE.fullmatch(path.name) or _PART.fullmatch(path.name) else ""
                if (_PACKAGE.fullmatch(path.name) and name.startswith("package")) or name == "dram":
                    range_uj = int(_text(path / "max_energy_range_uj"))
                    self._zones.append(_Zone(path, range_uj, int(_text(path / "energy_uj"))))
        except PermissionError:
            self._refuse("only root may read the processor's energy counter")
        except (OSError, ValueError):
            self._refuse("the processor's energy counter cannot be read")
        if not self._zones and self.refused is None:
            self._refuse("this machine has no energy counter of its processor")

    def energy_j(self) -> float | None:
        """Return the joules used since this object was made; ``None`` if they are not known.

        A counter that wraps around more than once between two calls cannot be told from one that does so once.
        """
        if self.refused is not None:
            return None
        try:
            for zone in self._zones:
                now_uj = int(_text(zone.path / "energy_uj"))
                used_uj = now_uj - zone.last_uj
                self._joules += (used_uj if used_uj >= 0 else used_uj + zone.range_uj) / 1e6
                zone.last_uj = now_uj
        except (OSError, ValueError):
            self._refuse("the processor's energy counter cannot be read any more")
            return None
        return self._joules

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._zones = []


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
