"""The windows of one launch: which of them count, their rate, and when to stop measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean, median

from autotune import stats
from autotune.base.records import MeasurePlan, Window
from autotune.child.failure import Disturbed
from autotune.child.surroundings import LASTING, is_slowed, what_went_on

#: With more steps than this, neighbouring steps are averaged before testing whether their times have settled.
LONGEST_HISTORY = 2000
#: See `Windows.clock_mhz`.
IDLE_FRACTION = 0.1


@dataclass(frozen=True)
class Timed:
    """One step of a closed window. Seconds; see `Measurement`."""

    step_s: float
    wait_s: float
    device_s: float
    made_s: float
    loss: float | None = None


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
        settled: the step times have settled, as far as can be told now.
        slow: the rate is certainly below the plan's threshold.
        rate_per_s: samples per second inside the windows that count; ``None`` before the first.
        whole_epochs: each window is an epoch, or from one pause of a script to another. Its steps differ by their place
            in it, so whether the rate has settled is told from epoch to epoch.
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
        """The rate inside the windows that count.

        Raises:
            ValueError: no window counts yet.
        """
        return stats.rate_of([block.window for block in self.kept])

    @property
    def enqueue_s(self) -> float:
        """Median host time of a step that nothing blocked.

        Raises:
            StatisticsError: no window counts yet.
        """
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
        seen = [b.window.around.sm_clock_mhz for b in self.kept if b.window.around and b.window.around.sm_clock_mhz]
        return median(seen) if seen else None

    def add(self, block: Block) -> None:
        """Add a closed window. It counts unless it carries a reason to discard it.

        A slowdown that has lasted since the first window is how this card runs under this load, so its windows count.
        Once it has ended they do not, because the rate would not be that of one state of the card.
        """
        if block.window.discarded in (None, LASTING):
            self._undisturbed.append(block)
        else:
            self._disturbed.append(block.window)
        self._count(slowed=self._slowed_count and is_slowed(block.window.around) is not False)

    def _count(self, *, slowed: bool) -> None:
        """Sort out which windows count: with or without those during a slowdown that may last."""
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
        """Return whether to stop measuring, ``elapsed_s`` after the start.

        Raises:
            Disturbed: too many windows were disturbed for the rest to make a measurement.
        """
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
        up = elapsed_s >= min(2 * most_s, most_s + lost_s)
        if up and len(self._blocks) < stats.FEWEST_WINDOWS:
            # A card that is slowed nearly all the time has no other rate.
            self._count(slowed=True)
            self._find_steady_state()
        left = len(self._blocks)
        if left >= stats.FEWEST_WINDOWS or not up:
            return up
        # With long steps, measuring goes on until twice the number of windows has been tried.
        total = left + len(self.discarded)
        if self.discarded and total >= 2 * stats.FEWEST_WINDOWS:
            raise self.disturbed(elapsed_s)
        return False

    def disturbed(self, elapsed_s: float) -> Disturbed:
        """Return the error for windows of which too many were disturbed, ``elapsed_s`` after the start.

        Raises:
            IndexError: none was.
        """
        left, total = len(self._blocks), len(self._blocks) + len(self.discarded)
        undisturbed = f"only {left} of {total} windows undisturbed" if left else "no undisturbed window"
        return Disturbed(f"{what_went_on(self.discarded, self._cores)}; {undisturbed} in {elapsed_s:.0f} s")
