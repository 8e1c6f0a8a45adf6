"""The windows of one launch: which of them count, what went on around them, and when to stop measuring."""

from __future__ import annotations

import functools
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any, Self

from autotune import stats
from autotune.base.clock import Clock
from autotune.base.records import Measurement, MeasurePlan, Surroundings, TrialSpec, Window
from autotune.child.failure import Disturbed
from autotune.launcher.quiet import cards_of
from autotune.machine.cpu_load import CpuWatch, Rapl, Stops
from autotune.machine.gpu import LASTING_SLOWDOWN, SLOWDOWNS, CardReading, CardWatch


class Sharing:
    """Distinguishes this launch's processes on its card from others, by when they appeared.

    No pid is compared with one of our own. Inside a container a process does not know the pids by which the driver
    lists it, and a driver may list processes by the container's pids but report their use of the SMs by the host's.

    Args:
        present: pids that the driver lists before this launch uses the card; ``None`` if it lists none.
        computing: pids for which the driver reports use of the SMs before then.
    """

    def __init__(self, present: Iterable[int] | None, computing: Iterable[int] | None) -> None:
        self._before = None if present is None else frozenset(present)
        self._computed_before = frozenset(computing or ())
        self._listed: frozenset[int] | None = None
        self._recognized: frozenset[int] = frozenset()
        self._settled = False
        #: How many processes appeared beside ours during start-up, and cannot be distinguished from it.
        self._extra = 0
        self._last_percent: int | None = None

    def settle_in(self, present: Iterable[int] | None) -> None:
        """Note that this launch is on the card now: processes that have appeared since construction count as ours."""
        self._settled = True
        if present is not None and self._before is not None:
            # If nothing has appeared, the driver does not list this launch (but MPS's server, for example).
            self._listed = frozenset(present) - self._before or None
            # A launch has one process on its card.
            self._extra = max(0, len(self._listed or ()) - 1)

    def others(self, present: Iterable[int] | None) -> int | None:
        """Return how many of the listed processes are not ours; ``None`` if that is unknown."""
        if present is None or self._listed is None:
            return None
        return len(frozenset(present) - self._listed) + self._extra

    def others_percent(self, present: Iterable[int] | None, sm_percent: Mapping[int, int] | None) -> int | None:
        """Return the total use of the SMs by processes that are not ours; ``None`` if that is unknown.

        Args:
            sm_percent: use of the SMs by pid, during a time in which this launch computed.
        """
        if sm_percent is None or not self._settled or self._extra:
            return None
        if not sm_percent:
            # No process computed, or the driver, which may sample only once a second, has nothing new.
            return self._last_percent or 0
        listed = self._listed or frozenset()
        ours = listed & sm_percent.keys()
        if ours:
            self._recognized = ours
        elif not self._recognized:
            fresh = sm_percent.keys() - self._computed_before - (frozenset(present or ()) - listed)
            # If the pids are numbered differently, ours is the one that began to compute; a launch has one process on
            # its card.
            self._recognized = frozenset(fresh) if len(fresh) == 1 else frozenset()
        if not self._recognized:
            return None
        self._last_percent = sum(p for pid, p in sm_percent.items() if pid not in self._recognized | listed)
        return self._last_percent


#: Idle CPU time, in cores and as a fraction of all cores, above which other processes took nothing from the training.
FREE_CORES = 0.1
FREE_FRACTION = 0.1
#: Percentage of the time that others may use the card's SMs: a desktop draws now and then. The launcher considers a
#: card idle up to the same utilization.
FREE_SM_PERCENT = 5
#: Why a window with `LASTING_SLOWDOWN` is discarded, if there is no other reason and the slowdown does not last.
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
        # It is not known whether it computed.
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
    """Return what disturbed most of these windows, as a clause. There is at least one, and each has a reason from
    `reason_to_discard`."""
    loaded = [w for w in discarded if (w.discarded or "").startswith(_LOADED)]
    if 2 * len(loaded) >= len(discarded):
        foreign = mean(w.around.foreign_cores or 0.0 for w in loaded if w.around)
        return f"other processes kept using {foreign:.1f} of {cores} cores"
    reasons = Counter(w.discarded or "" for w in discarded if w not in loaded)
    return reasons.most_common(1)[0][0]


def card_of(spec: TrialSpec) -> str | None:
    """Return the UUID of a rank's card, or of a script's first card, as far as the spec gives it; ``None`` on a CPU."""
    cards = cards_of(spec)
    return cards[spec.rank] if spec.rank < len(cards) else None


class SurroundingsReader:
    """Reads the machine's state between windows. Create it before CUDA is initialized, to record foreign processes.

    With several cards, a window's surroundings record what holds up any of them: the processes of the card that others
    disturb most, the lowest clocks, the highest temperature, every reason; power and energy are summed.

    Args:
        cards: the UUIDs of the cards to watch; without any, only the CPU is.
        processors: the energy counters of the CPU, which are used where there is no card.
        root: the process whose descendants, itself included, are the launch; this one if ``None``.
    """

    def __init__(
        self, cards: Sequence[str], clock: Clock, processors: Rapl | None = None, *, root: int | None = None
    ) -> None:
        self._cpu = CpuWatch(root or os.getpid(), clock)
        self._cards = [CardWatch(uuid) for uuid in cards]
        self._sharing = [Sharing(card.processes(), card.sm_percent()) for card in self._cards]
        self._processors = processors or Rapl()
        self._stops = Stops()
        self._stopped = 0
        self._energy_j: float | None = None
        self.cores = self._cpu.cores

    @classmethod
    def of(cls, spec: TrialSpec, clock: Clock, *, cards: bool = True, root: int | None = None) -> Self:
        """Return the reader of a launch."""
        # Of a launch that is pinned to cores, the counters include what others do on the remaining cores.
        processors = Rapl(Path(os.devnull)) if spec.cores else Rapl()
        return cls(cards_of(spec) if cards else (), clock, processors, root=root)

    def settle_in(self) -> None:
        """Note that this launch is on its cards now; see `Sharing`."""
        for card, sharing in zip(self._cards, self._sharing, strict=True):
            sharing.settle_in(card.processes())

    def begin(self) -> None:
        """Start a window here instead of where the last one ended."""
        self._energy_j = self._energy([card.energy_j() for card in self._cards])

    def at_work(self) -> dict[str, int]:
        """Return those fields of `Surroundings` that change as soon as the card is idle, as far as they are known: the
        clock of its multiprocessors, and what holds it down."""
        readings = {
            "sm_clock_mhz": _of_known(min, [card.sm_clock_mhz() for card in self._cards]),
            "clocks_event_reasons": _any_of([card.clocks_event_reasons() for card in self._cards]),
        }
        return {name: value for name, value in readings.items() if value is not None}

    def read(self) -> tuple[Surroundings, float | None]:
        """Return the machine's activity since the last reading, and the joules used since then or since `begin`."""
        use = self._cpu.read()
        cards = [card.read() for card in self._cards]
        before, self._energy_j = self._energy_j, self._energy([card.energy_j for card in cards])
        stops = None if self._stops.count is None else self._stops.count - self._stopped
        self._stopped += stops or 0
        processes, percent = self._others(cards)
        around = Surroundings(
            foreign_cores=use.foreign_cores if use else None,
            idle_cores=use.idle_cores if use else None,
            stops=stops,
            foreign_processes=processes,
            foreign_sm_percent=percent,
            sm_clock_mhz=_of_known(min, [card.sm_clock_mhz for card in cards]),
            memory_clock_mhz=_of_known(min, [card.memory_clock_mhz for card in cards]),
            temperature_c=_of_known(max, [card.temperature_c for card in cards]),
            power_w=_sum([card.power_w for card in cards]),
            clocks_event_reasons=_any_of([card.clocks_event_reasons for card in cards]),
        )
        used = None if before is None or self._energy_j is None else self._energy_j - before
        return around, used

    def _energy(self, of_cards: Sequence[float | None]) -> float | None:
        return _sum(of_cards) if self._cards else self._processors.energy_j()

    def _others(self, cards: Sequence[CardReading]) -> tuple[int | None, int | None]:
        """Return how many foreign processes are on the card that they disturb most, and their use of its SMs in
        percent; ``None`` for what is not known."""
        others = [
            (sharing.others(card.processes), sharing.others_percent(card.processes, card.sm_percent))
            for card, sharing in zip(cards, self._sharing, strict=True)
        ]
        return max(others, key=_disturbance, default=(None, None))


def _disturbance(others: tuple[int | None, int | None]) -> tuple[int, int]:
    processes, percent = others
    # A process that may be computing counts as if it were.
    use = percent if percent is not None else 100 if processes else -1
    return use, processes or 0


def _of_known(choose: Callable[[list[int]], int], values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _any_of(masks: Sequence[int | None]) -> int | None:
    return _of_known(lambda known: functools.reduce(operator.or_, known), masks)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


#: With more steps than this, neighbouring steps are averaged before testing whether their times have settled.
LONGEST_HISTORY = 2000
#: See `Windows.clock_mhz`.
IDLE_FRACTION = 0.1


@dataclass(frozen=True)
class Timed:
    """One step of a closed window. Seconds; see `Measurement`.

    Attributes:
        handed_s: the part of `wait_s` in which a batch that had been made was handed over; ``None`` if unknown.
    """

    step_s: float
    wait_s: float
    device_s: float
    made_s: float
    loss: float | None = None
    handed_s: float | None = None


@dataclass(frozen=True)
class Block:
    """An undisturbed window with its steps.

    Attributes:
        enqueue_s: host time of the first step taken in it, which starts with an empty device queue.
        energy_j: energy the card used during the window; ``None`` if unknown.
    """

    window: Window
    steps: tuple[Timed, ...]
    enqueue_s: float = 0.0
    energy_j: float | None = None


class Windows:
    """Collects windows and decides when to stop measuring.

    Args:
        cores: number of cores this process may use, for messages about foreign load.

    Attributes:
        discarded: windows that do not count, each with its reason.
        settled: the step times have settled, as far as is known now.
        slow: the rate is certainly below the plan's threshold.
        rate_per_s: samples per second inside the windows that count; ``None`` before the first.
        whole_epochs: each window is an epoch, or lasts from one pause of a script to another. Its steps differ by their
            place in it, so whether the rate has settled is judged from epoch to epoch.
    """

    def __init__(self, plan: MeasurePlan, cores: int) -> None:
        self.plan = plan
        self.discarded: list[Window] = []
        self.settled = False
        self.slow = False
        self.rate_per_s: float | None = None
        self.whole_epochs = False
        self._cores = cores
        self._disturbed: list[Window] = []
        self._undisturbed: list[Block] = []
        self._slowed_count = True
        self._blocks: list[Block] = []
        self._cut = 0

    @property
    def kept(self) -> list[Block]:
        """The windows that count, in order."""
        return self._blocks[self._cut :]

    @property
    def cut(self) -> list[Block]:
        """The windows found to belong to the warm-up."""
        return self._blocks[: self._cut]

    @property
    def rate(self) -> stats.Rate:
        """The rate inside the windows that count, of which there must be one."""
        return stats.rate_of([block.window for block in self.kept])

    @property
    def enqueue_s(self) -> float:
        """Median host time of a step that nothing blocked, in the windows that count, of which there must be one."""
        return median(block.enqueue_s for block in self.kept)

    @property
    def energy_j(self) -> float | None:
        """Energy the card used in the windows that count; ``None`` if unknown."""
        known = [block.energy_j for block in self.kept if block.energy_j is not None]
        return sum(known) if known and len(known) == len(self.kept) else None

    @property
    def clock_mhz(self) -> float | None:
        """Median of the card's clock in the windows that count.

        ``None`` if it is unknown, or if the card waited for more than `IDLE_FRACTION` of the time: an idle card clocks
        down, which is then an effect of the low rate and not its cause.
        """
        steps = [step for block in self.kept for step in block.steps]
        if sum(step.wait_s for step in steps) > IDLE_FRACTION * sum(step.step_s for step in steps):
            return None
        clocks = [b.window.around.sm_clock_mhz for b in self.kept if b.window.around and b.window.around.sm_clock_mhz]
        return median(clocks) if clocks else None

    def measured(
        self,
        *,
        samples: float,
        epoch_samples: int,
        turn_s: float | None,
        has_turns: bool,
        warmup_steps: int,
        warmup_s: float,
        drained: bool,
        unsettled: str | None,
        **others: Any,
    ) -> Measurement:
        """Return the measurement of a launch, by the windows that count: the one place where it is put together.

        Args:
            samples: of a step. epoch_samples: 0 if an epoch's length is unknown.
            turn_s: extra seconds of an epoch turn; ``None`` if unknown. has_turns: the windows include them.
            warmup_steps, warmup_s: those before the first window.
            drained: whether the loader's queue had no head start any more. unsettled: why the rate had not settled.
            others: further fields of `Measurement`.
        """
        kept, steady = self.kept, self.rate
        steps = [step for block in kept for step in block.steps]
        windows = tuple(block.window for block in kept)
        device_s = fmean(step.device_s for step in steps)
        handed_s = [step.handed_s for step in steps if step.handed_s is not None]
        rate = steady
        if epoch_samples and not has_turns:
            rate = stats.with_epoch_turn(steady, turn_s, epoch_samples)
        return Measurement(
            samples_per_s=rate.per_s,
            ci95_per_s=(rate.low_per_s, rate.high_per_s),
            steady_per_s=steady.per_s,
            windows=windows,
            samples_per_step=sum(window.samples for window in windows) / sum(window.steps for window in windows),
            step_s=tuple(step.step_s for step in steps),
            wait_s=tuple(step.wait_s for step in steps),
            device_s=tuple(step.device_s for step in steps),
            device_per_s=samples / device_s if device_s else None,
            settled=drained and self.settled and unsettled is None,
            unsettled=unsettled,
            warmup_steps=1 + warmup_steps + sum(len(block.steps) for block in self.cut),
            relative_se=rate.relative_se,
            degrees=rate.degrees,
            autocorrelation=stats.autocorrelation(list(windows)),
            discarded=tuple(self.discarded),
            energy_j=self.energy_j,
            sm_clock_mhz=self.clock_mhz,
            warmup_s=warmup_s + sum(block.window.seconds for block in self.cut),
            measured_s=sum(window.seconds for window in windows),
            loader_wait_fraction=sum(step.wait_s for step in steps) / sum(step.step_s for step in steps),
            hand_over_fraction=sum(handed_s) / sum(step.step_s for step in steps) if handed_s else None,
            epoch_turn_s=turn_s,
            epoch_samples=epoch_samples,
            **others,
        )

    def add(self, block: Block) -> None:
        """Add a closed window. It counts unless it carries a reason to discard it.

        A slowdown that has lasted since the first window is how this card runs under this load, so its windows count.
        Once it has ended they do not, because the rate would not be that of a single state of the card.
        """
        if block.window.discarded in (None, LASTING):
            self._undisturbed.append(block)
        else:
            self._disturbed.append(block.window)
        self._count(slowed=self._slowed_count and is_slowed(block.window.around) is not False)

    def _count(self, *, slowed: bool) -> None:
        """Determine which windows count: with or without those during a slowdown that may last."""
        self._slowed_count = slowed
        self._blocks, self.discarded = [], [*self._disturbed]
        for block in self._undisturbed:
            if block.window.discarded is None:
                self._blocks.append(block)
            elif slowed:
                self._blocks.append(replace(block, window=block.window.model_copy(update={"discarded": None})))
            else:
                self.discarded.append(block.window)

    def over(self, elapsed_s: float) -> bool:
        """Return whether to stop measuring, ``elapsed_s`` after the start. Raises `Disturbed` if too many windows were
        disturbed for the rest to make a measurement."""
        self._find_steady_state()
        kept = self.kept
        if kept:
            self.rate_per_s = sum(b.window.samples for b in kept) / sum(b.window.seconds for b in kept)
        self.slow = self._surely_slow(elapsed_s)
        return self.slow or self._precise() or self._out_of_time(elapsed_s)

    def _find_steady_state(self) -> None:
        """Drop the windows that begin before the step times settle, but keep enough for an interval.

        Recomputed each time, because an apparent change may turn out to be noise and vice versa.
        """
        latest = max(0, len(self._blocks) - stats.FEWEST_WINDOWS)
        if self.whole_epochs:
            settling = stats.settled_at([block.window.seconds / block.window.steps for block in self._blocks])
            self.settled, self._cut = settling.settled, min(settling.steps, latest)
            return
        step_s = [step.step_s for block in self._blocks for step in block.steps]
        group = max(1, math.ceil(len(step_s) / LONGEST_HISTORY))
        settling = stats.settled_at([fmean(step_s[i : i + group]) for i in range(0, len(step_s), group)])
        self.settled = settling.settled
        self._cut = begins = 0
        for block in self._blocks[:latest]:
            if begins >= settling.steps * group:
                break
            begins += len(block.steps)
            self._cut += 1

    def _surely_slow(self, elapsed_s: float) -> bool:
        if not self._blocks or not self.plan.prune_below_per_s:
            return False
        first = self._blocks[0]
        fastest_per_s = first.window.samples / first.window.steps / min(step.step_s for step in first.steps)
        kept = [block.window for block in self.kept]
        below_per_s = self.plan.prune_below_per_s * stats.clocks_allow(self.clock_mhz, self.plan.prune_clock_mhz)
        return stats.surely_slow(self.plan, kept, len(self._blocks), fastest_per_s, elapsed_s, below_per_s=below_per_s)

    def _precise(self) -> bool:
        plan, kept = self.plan, self.kept
        if not self.settled or len(kept) < plan.min_windows:
            return False
        if sum(block.window.seconds for block in kept) < plan.min_measure_s:
            return False
        return self.rate.halfwidth <= plan.target_halfwidth

    def _out_of_time(self, elapsed_s: float) -> bool:
        most_s = self.plan.max_measure_s
        lost_s = sum(window.seconds for window in self.discarded)
        is_over = elapsed_s >= min(2 * most_s, most_s + lost_s)
        if is_over and len(self._blocks) < stats.FEWEST_WINDOWS:
            # A card that is slowed nearly all the time has no other rate to measure.
            self._count(slowed=True)
            self._find_steady_state()
        left = len(self._blocks)
        if left >= stats.FEWEST_WINDOWS or not is_over:
            return is_over
        # With long steps, measuring goes on until twice the number of windows has been tried.
        total = left + len(self.discarded)
        if self.discarded and total >= 2 * stats.FEWEST_WINDOWS:
            raise self.disturbed(elapsed_s)
        return False

    def disturbed(self, elapsed_s: float) -> Disturbed:
        """Return the error for too many disturbed windows, at least one, ``elapsed_s`` after the start."""
        left, total = len(self._blocks), len(self._blocks) + len(self.discarded)
        undisturbed = f"only {left} of {total} windows undisturbed" if left else "no undisturbed window"
        return Disturbed(f"{what_went_on(self.discarded, self._cores)}; {undisturbed} in {elapsed_s:.0f} s")
