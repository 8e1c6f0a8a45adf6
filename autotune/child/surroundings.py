"""Machine activity around a launch's windows (other processes, the card's clocks), and which windows to discard."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from statistics import mean

from autotune.clock import Clock
from autotune.machine.cpu_load import CpuWatch
from autotune.machine.gpu import SLOWDOWNS, CardReading, CardWatch
from autotune.records import Surroundings, TrialSpec, Window

#: Idle CPU time, in cores and as a fraction of all cores, above which other processes took nothing from the training.
FREE_CORES = 0.1
FREE_FRACTION = 0.1


_LOADED = "others used"


def reason_to_discard(around: Surroundings, cores: int, busy_cores: float | None) -> str | None:
    """Return why a window does not count, as a clause, or ``None`` if it does. Unknown readings count in its favour.

    Args:
        cores: number of cores this process may use.
        busy_cores: cores that other processes may use while none is idle; ``None`` for no limit.
    """
    if around.foreign_processes:
        return "another process is on the card"
    for bit, name in SLOWDOWNS.items():
        if (around.clocks_event_reasons or 0) & bit:
            return f"{name} held the card's clocks down"
    if busy_cores is None or around.foreign_cores is None or around.idle_cores is None:
        return None
    if around.foreign_cores > busy_cores and around.idle_cores < max(FREE_CORES, FREE_FRACTION * cores):
        return f"{_LOADED} {around.foreign_cores:.1f} of {cores} cores"
    return None


def what_went_on(discarded: Sequence[Window], cores: int) -> str:
    """Return what disturbed most of these windows, as a clause.

    Args:
        discarded: at least one window, each with the reason from `reason_to_discard`.
    """
    loaded = [w for w in discarded if (w.discarded or "").startswith(_LOADED)]
    if 2 * len(loaded) >= len(discarded):
        foreign = mean(w.around.foreign_cores or 0.0 for w in loaded if w.around)
        return f"other processes kept using {foreign:.1f} of {cores} cores"
    reasons = Counter(w.discarded or "" for w in discarded if w not in loaded)
    return reasons.most_common(1)[0][0]


def card_of(spec: TrialSpec) -> str | None:
    """Return the UUID of the card a launch runs on, as far as its spec tells; ``None`` on a CPU."""
    name = spec.devices[0]
    if name == "cpu":
        return None
    for uuid in (spec.env.get("CUDA_VISIBLE_DEVICES", ""), name.removeprefix("cuda:")):
        if uuid.startswith(("GPU-", "MIG-")) and "," not in uuid:
            return uuid
    return None


class Watcher:
    """Reads the machine's state between windows. Create it before CUDA is initialized, to record foreign processes.

    Args:
        card_uuid: the card to watch; ``None`` watches only the CPU.
    """

    def __init__(self, card_uuid: str | None, clock: Clock) -> None:
        self._cpu = CpuWatch(os.getpid(), clock)
        self._card = CardWatch(card_uuid) if card_uuid else None
        self._strangers = self._card.processes() if self._card else None
        self._ours: frozenset[int] | None = None
        self._energy_j: float | None = None
        self.cores = self._cpu.cores

    def settle_in(self) -> None:
        """Note that this launch is on the card now: processes that have appeared since construction count as ours.

        Inside a container a process does not know the pid under which the driver lists it.
        """
        present = self._card.processes() if self._card else None
        if present is not None and self._strangers is not None:
            self._ours = frozenset(present) - frozenset(self._strangers)

    def begin(self) -> None:
        """Start a window here instead of where the last one ended."""
        self._energy_j = self._card.energy_j() if self._card else None

    def sm_clock_mhz(self) -> int | None:
        """Return the clock of the card's multiprocessors now; ``None`` if unknown, or without a card."""
        return self._card.sm_clock_mhz() if self._card else None

    def read(self) -> tuple[Surroundings, float | None]:
        """Return the machine's activity since the last reading, and the joules used since then or since `begin`."""
        use = self._cpu.read()
        card = self._card.read() if self._card else CardReading()
        before, self._energy_j = self._energy_j, card.energy_j
        around = Surroundings(
            foreign_cores=use.foreign_cores if use else None,
            idle_cores=use.idle_cores if use else None,
            foreign_processes=self._foreign(card.processes),
            sm_clock_mhz=card.sm_clock_mhz,
            memory_clock_mhz=card.memory_clock_mhz,
            temperature_c=card.temperature_c,
            power_w=card.power_w,
            clocks_event_reasons=card.clocks_event_reasons,
        )
        used = None if before is None or card.energy_j is None else card.energy_j - before
        return around, used

    def _foreign(self, present: Sequence[int] | None) -> int | None:
        if present is None or self._ours is None:
            return None
        return len(frozenset(present) - self._ours)
