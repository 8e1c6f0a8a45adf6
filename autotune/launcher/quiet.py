"""Delays a launch until nothing of the previous one is left, neither its processes nor its memory on a card. The
daemon's rule is in `autotune.daemon.devices`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.base.clock import Clock
from autotune.base.errors import MachineError
from autotune.base.records import TrialResult, TrialSpec, TrialStatus
from autotune.launcher.watch import is_alive
from autotune.machine.gpu import Gpu, NvmlUnavailable, with_instances

#: A card within this distance of its idle level is idle: the driver's own use varies slightly.
IDLE_BYTES = 64 * 2**20
#: Number of consecutive readings that must show an idle card, and the seconds between them.
READINGS = 2
GAP_S = 0.1
#: For a busy card: the polling interval, and the time after which the user is notified.
ASK_EVERY_S = 1.0
SAY_AFTER_S = 2.0
#: A card that has not reported its memory use by then never does (it shares the host's memory).
UNTOLD_S = 10.0
#: Memory use that has not changed for this long belongs to someone who stays: a driver frees the memory of a killed
#: process, 100 GB and more, within a few seconds.
STEADY_S = 20.0
#: Utilization up to which a card counts as unused: a desktop draws now and then.
RESTING_PERCENT = 5
#: The varying amount of memory that a desktop with a browser uses; the driver does not list its processes. If more than
#: this is held by no listed process, one of our dead processes may have left it, and each further trial would lack it.
DESKTOP_BYTES = 2 * 2**30
#: Like `STEADY_S`, for more memory than that, if the driver does not report which processes are on the card.
UNTOLD_PROCESSES_S = 60.0
#: After this long, the search gives up on the card.
PATIENCE_S = 600.0
_MIB = 2**20


class Stopped(Exception):
    """The search was stopped while it waited, after ``waited_s`` seconds."""

    def __init__(self, waited_s: float) -> None:
        super().__init__()
        self.waited_s = waited_s


@dataclass(frozen=True)
class _Level:
    """The use of a card, unchanged since ``since_s`` of the wait."""

    since_s: float
    used_bytes: int
    processes: frozenset[int] | None


class Quiet:
    """Waits for a quiet machine before each launch of one search.

    A card's idle level is its memory use before the first launch, or a lower use seen later. A card is quarantined, so
    that no launch begins on it, until it is back at that level, and while it does not answer. Memory of others that
    stays in use while nobody computes on the card becomes part of the idle level after `STEADY_S`.

    Args:
        cards: returns the driver's current view of the cards.
        on_wait: called with one sentence on what is waited for, once per wait, and on what stays on a card, once each.
        alive: returns whether a process is still running.
    """

    def __init__(
        self,
        clock: Clock,
        cards: Callable[[], list[Gpu] | NvmlUnavailable],
        on_wait: Callable[[str], None],
        *,
        alive: Callable[[int], bool] = is_alive,
    ) -> None:
        #: Processes of earlier launches that could not be killed.
        self.stuck: list[int] = []
        self._clock = clock
        self._cards = cards
        self._on_wait = on_wait
        self._alive = alive
        self._idle_bytes: dict[str, int] = {}
        self._untold: set[str] = set()
        self._levels: dict[str, _Level] = {}
        #: Cards whose idle level includes memory of others.
        self._shared: set[str] = set()
        #: Processes on each card when the last launch began.
        self._present: dict[str, frozenset[int]] = {}

    def wait(self, uuids: Sequence[str], stop: Callable[[], bool], *, allow_busy: bool = False) -> float:
        """Wait until the cards are idle and no process is stuck; return the seconds waited.

        Args:
            allow_busy: others may compute on the cards, but their memory use must still be steady.

        Raises:
            Stopped: ``stop`` returned True.
            MachineError: the wait exceeded `PATIENCE_S`.
        """
        if not uuids and not self.stuck:
            return 0.0
        began = self._clock.now()
        quiet = 0
        notified = False
        self._levels.clear()
        while True:
            waited_s = self._clock.now() - began
            trouble, advice = self._trouble(uuids, waited_s, allow_busy=allow_busy)
            quiet = 0 if trouble else quiet + 1
            if quiet >= (READINGS if uuids else 1):
                return waited_s
            if stop():
                raise Stopped(waited_s)
            if trouble and waited_s >= PATIENCE_S:
                raise MachineError(f"waited {waited_s:.0f} s in vain: {trouble}", advice=advice)
            if trouble and waited_s >= SAY_AFTER_S and not notified:
                self._on_wait(f"waiting, because {trouble}.")
                notified = True
            self._clock.sleep(ASK_EVERY_S if notified else GAP_S)

    def _trouble(self, uuids: Sequence[str], waited_s: float, *, allow_busy: bool) -> tuple[str, str]:
        """Return what is waited for and what to do about it; empty strings if nothing."""
        self.stuck = [pid for pid in self.stuck if self._alive(pid)]
        if self.stuck:
            pids = ", ".join(map(str, self.stuck))
            return (
                f"a process of the last launch does not end (pid {pids}); it is stuck in the kernel",
                "a driver or a network file system that does not answer does this; a reboot ends it.",
            )
        if not uuids:
            return "", ""
        cards = self._cards()
        if isinstance(cards, NvmlUnavailable):
            # An unknown state does not count as idle.
            self._levels.clear()
            reason = cards.reason.rstrip(".")
            return f"the driver does not say whether the GPU is idle ({reason})", "see what `nvidia-smi` says."
        by_uuid = {card.uuid: card for card in with_instances(cards)}
        for uuid in uuids:
            trouble = self._occupied(uuid, by_uuid.get(uuid), waited_s, allow_busy=allow_busy)
            if trouble:
                return trouble, "end what else uses that card, or choose another one with --device."
        return "", ""

    def _occupied(self, uuid: str, card: Gpu | None, waited_s: float, *, allow_busy: bool) -> str:
        if card is None:
            self._levels.pop(uuid, None)
            return f"the driver does not list the GPU {uuid}"
        name, used = _name(card), card.memory_used_bytes
        if used is None:
            self._levels.pop(uuid, None)
            unknown = f"the driver does not tell how much memory of the GPU {name} is used"
            if uuid not in self._idle_bytes and uuid not in self._untold and waited_s >= UNTOLD_S:
                self._untold.add(uuid)
                self._on_wait(f"{unknown}: not waiting for it.")
            return "" if uuid in self._untold else unknown
        if uuid not in self._idle_bytes and card.processes:
            self._say_stays(card, used, allow_busy=allow_busy)
        idle = self._idle_bytes.setdefault(uuid, used)
        if used < idle - (DESKTOP_BYTES if uuid in self._shared else 0):
            idle = self._idle_bytes[uuid] = used
            self._shared.discard(uuid)
        if used > idle + IDLE_BYTES and self._stays(card, used, waited_s, allow_busy=allow_busy):
            self._say_stays(card, used, allow_busy=allow_busy)
            idle = self._idle_bytes[uuid] = used
            self._shared.add(uuid)
        if used <= idle + IDLE_BYTES:
            self._present[uuid] = frozenset(card.processes or ())
            return ""
        norm = f"{idle / _MIB:.0f} MiB were when it was idle"
        return f"{used / _MIB:.0f} MiB of the GPU {name} are in use{_by(card)}, and {norm}; nothing of this search runs"

    def _stays(self, card: Gpu, used: int, waited_s: float, *, allow_busy: bool) -> bool:
        """Return whether a card is occupied by somebody who stays there without computing.

        Then it is neither what one of our launches left, which goes away or has no process, nor a job, which ends.
        """
        processes = None if card.processes is None else frozenset(card.processes)
        if allow_busy:
            resting = True
        elif card.utilization_percent is not None:
            resting = card.utilization_percent <= RESTING_PERCENT
        else:
            # MIG instances, for example: no process has been added since.
            resting = processes is None or processes <= self._present.get(card.uuid, frozenset())
        is_held = bool(processes) or used - self._idle_bytes[card.uuid] <= DESKTOP_BYTES
        level = self._levels.get(card.uuid)
        if level is None or level.processes != processes or abs(used - level.used_bytes) > IDLE_BYTES or not resting:
            level = self._levels[card.uuid] = _Level(waited_s, used, processes)
        steady_s = waited_s - level.since_s
        return steady_s >= STEADY_S if is_held else processes is None and steady_s >= UNTOLD_PROCESSES_S

    def _say_stays(self, card: Gpu, used: int, *, allow_busy: bool) -> None:
        use = f"{used / _MIB:.0f} MiB of the GPU {_name(card)} stay in use{_by(card)}"
        consequence = "" if allow_busy else ", and windows in which others compute there are discarded"
        self._on_wait(f"{use}; that counts as idle{consequence}.")


def _name(card: Gpu) -> str:
    return f"{card.name} ({card.uuid})"


def _by(card: Gpu) -> str:
    return f" by process {', '.join(map(str, card.processes))}" if card.processes else ""


def stopped_waiting(spec: TrialSpec, waited_s: float, awaited: str = "a quiet machine") -> TrialResult:
    """Return the result of a launch that was stopped before it began."""
    return TrialResult(
        launch=spec.launch,
        status=TrialStatus.INTERRUPTED,
        cause=f"the search was ended while it waited for {awaited}",
        waited_s=waited_s,
    )


def cards_of(spec: TrialSpec) -> tuple[str, ...]:
    """Return the UUIDs of the cards or MIG instances that a launch sees, in the order of its ranks; empty on a CPU, or
    if the spec does not give them."""
    name = spec.devices[0]
    if name == "cpu":
        return ()
    for text in (spec.env.get("CUDA_VISIBLE_DEVICES", ""), name.removeprefix("cuda:")):
        uuids = tuple(text.split(","))
        if all(uuid.startswith(("GPU-", "MIG-")) for uuid in uuids):
            return uuids
    return ()
