"""Machine activity around a launch's windows (other processes, the card's clocks), and which windows to discard."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from autotune.child.sharing import Sharing
from autotune.clock import Clock
from autotune.machine.cpu_load import CpuWatch
from autotune.machine.gpu import LASTING_SLOWDOWN, SLOWDOWNS, CardReading, CardWatch
from autotune.machine.rapl import Rapl
from autotune.machine.stops import Stops
from autotune.records import Surroundings, TrialSpec, Window

#: Idle CPU time, in cores and as a fraction of all cores, above which other processes took nothing from the training.
FREE_CORES = 0.1
FREE_FRACTION = 0.1
#: Per cent of the time in which others may use the card's SMs: a desktop draws now and then. The launcher takes a card
#: for idle up to the same utilization.
FREE_SM_PERCENT = 5
#: Why a window with `LASTING_SLOWDOWN` is discarded, if nothing else speaks against it and the slowdown does not last.
LASTING = f"{SLOWDOWNS[LASTING_SLOWDOWN]} held the card's clocks down"

_LOADED = "others used"
_STOPPED = "its processes were stopped and continued again (SIGSTOP, as cpulimit does)"


def reason_to_discard(around: Surroundings, cores: int, busy_cores: float | None) -> str | None:
    """Return why a window does not count, as a clause, or ``None`` if it does. Unknown readings count in its favour.

    Args:
        cores: number of cores this process may use.
        busy_cores: cores that other processes may use while none is idle; ``None`` lets them use cores and card.
    """
    slowed = around.clocks_event_reasons or 0
    for bit, name in SLOWDOWNS.items():
        if slowed & bit and bit != LASTING_SLOWDOWN:
            return f"{name} held the card's clocks down"
    if busy_cores is not None:
        by_others = _used_by_others(around, cores, busy_cores)
        if by_others is not None:
            return by_others
    return LASTING if slowed & LASTING_SLOWDOWN else None


def _used_by_others(around: Surroundings, cores: int, busy_cores: float) -> str | None:
    if around.stops:
        return _STOPPED
    if around.foreign_sm_percent is None:
        # Whether it computed is not known.
        if around.foreign_processes:
            return "another process is on the card"
    elif around.foreign_sm_percent > FREE_SM_PERCENT:
        return "another process computed on the card"
    if around.foreign_cores is None or around.idle_cores is None:
        return None
    if around.foreign_cores > busy_cores and around.idle_cores < max(FREE_CORES, FREE_FRACTION * cores):
        return f"{_LOADED} {around.foreign_cores:.1f} of {cores} cores"
    return None


def is_slowed(around: Surroundings | None) -> bool | None:
    """Return whether a window has `LASTING_SLOWDOWN`; ``None`` if that is not known."""
    if around is None or around.clocks_event_reasons is None:
        return None
    return bool(around.clocks_event_reasons & LASTING_SLOWDOWN)


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
    visible = spec.env.get("CUDA_VISIBLE_DEVICES", "")
    if spec.ranks > 1:
        visible = visible.split(",")[spec.rank]
    for uuid in (visible, name.removeprefix("cuda:")):
        if uuid.startswith(("GPU-", "MIG-")) and "," not in uuid:
            return uuid
    return None


def processors_of(spec: TrialSpec) -> Rapl:
    """Return the energy counters of a launch's processors: none for one that is pinned to cores, because the counters
    count what others do on the rest, too."""
    return Rapl(Path(os.devnull)) if spec.cores else Rapl()


class Watcher:
    """Reads the machine's state between windows. Create it before CUDA is initialized, to record foreign processes.

    Args:
        card_uuid: the card to watch; ``None`` watches only the CPU.
        processors: the energy counters of the CPU, which count where there is no card.
        root: the process whose descendants, itself included, are the launch; this one if ``None``.
    """

    def __init__(
        self, card_uuid: str | None, clock: Clock, processors: Rapl | None = None, *, root: int | None = None
    ) -> None:
        self._cpu = CpuWatch(root or os.getpid(), clock)
        self._card = CardWatch(card_uuid) if card_uuid else None
        self._sharing = Sharing(self._processes(), self._card.sm_percent() if self._card else None)
        self._processors = processors or Rapl()
        self._stops = Stops()
        self._stopped = 0
        self._energy_j: float | None = None
        self.cores = self._cpu.cores

    def settle_in(self) -> None:
        """Note that this launch is on the card now; see `Sharing`."""
        self._sharing.settle_in(self._processes())

    def begin(self) -> None:
        """Start a window here instead of where the last one ended."""
        self._energy_j = self._card.energy_j() if self._card else self._processors.energy_j()

    def at_work(self) -> dict[str, int]:
        """Return those fields of `Surroundings` that are others as soon as the card is idle, as far as they are known:
        the clock of its multiprocessors, and what holds it down."""
        if self._card is None:
            return {}
        found = {
            "sm_clock_mhz": self._card.sm_clock_mhz(),
            "clocks_event_reasons": self._card.clocks_event_reasons(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def read(self) -> tuple[Surroundings, float | None]:
        """Return the machine's activity since the last reading, and the joules used since then or since `begin`."""
        use = self._cpu.read()
        card = self._card.read() if self._card else CardReading()
        before, self._energy_j = self._energy_j, card.energy_j if self._card else self._processors.energy_j()
        stops = None if self._stops.count is None else self._stops.count - self._stopped
        self._stopped += stops or 0
        around = Surroundings(
            foreign_cores=use.foreign_cores if use else None,
            idle_cores=use.idle_cores if use else None,
            stops=stops,
            foreign_processes=self._sharing.others(card.processes),
            foreign_sm_percent=self._sharing.others_percent(card.processes, card.sm_percent),
            sm_clock_mhz=card.sm_clock_mhz,
            memory_clock_mhz=card.memory_clock_mhz,
            temperature_c=card.temperature_c,
            power_w=card.power_w,
            clocks_event_reasons=card.clocks_event_reasons,
        )
        used = None if before is None or self._energy_j is None else self._energy_j - before
        return around, used

    def _processes(self) -> tuple[int, ...] | None:
        return self._card.processes() if self._card else None
