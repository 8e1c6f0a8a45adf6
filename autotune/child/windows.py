"""The windows of one launch: which of them count, what they say, and when there are enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from autotune import stats
from autotune.child.failure import Disturbed
from autotune.child.surroundings import what_went_on
from autotune.records import MeasurePlan, Window

#: Where there are more steps than this, neighbours are averaged before asking whether their times have settled.
LONGEST_HISTORY = 2000


@dataclass(frozen=True)
class Timed:
    """One step of a window that is over. Seconds; see `Measurement`."""

    step_s: float
    wait_s: float
    device_s: float
    made_s: float
    loss: float | None = None


@dataclass(frozen=True)
class Block:
    """A window that nobody disturbed, with its steps.

    Attributes:
        enqueue_s: host time of its first step, before which the device had nothing left to do.
        energy_j: what the card used in it; ``None`` is unknown.
    """

    window: Window
    steps: tuple[Timed, ...]
    enqueue_s: float = 0.0
    energy_j: float | None = None


class Windows:
    """Takes window after window and says when to end.

    Args:
        cores: allowed here, for what is said of others' load.

    Attributes:
        discarded: windows that do not count, each with its reason.
        settled: the step times have settled, as far as can be told now.
        slow: it is surely below the plan's threshold.
        rate_per_s: samples per second inside the windows that count; ``None`` before the first.
    """

    def __init__(self, plan: MeasurePlan, cores: int) -> None:
        self.plan = plan
        self.discarded: list[Window] = []
        self.settled = False
        self.slow = False
        self.rate_per_s: float | None = None
        self._cores = cores
        self._blocks: list[Block] = []
        self._cut = 0

    @property
    def kept(self) -> list[Block]:
        """The windows that count, in order."""
        return self._blocks[self._cut :]

    @property
    def cut(self) -> list[Block]:
        """The windows that turned out to belong to the warm-up."""
        return self._blocks[: self._cut]

    @property
    def rate(self) -> stats.Rate:
        """The rate inside the windows that count.

        Raises:
            ValueError: there is none.
        """
        return stats.rate_of([block.window for block in self.kept])

    @property
    def enqueue_s(self) -> float:
        """Median host time of a step that nothing held up.

        Raises:
            StatisticsError: there is no window.
        """
        return median(block.enqueue_s for block in self.kept)

    @property
    def energy_j(self) -> float | None:
        """What the card used in the windows that count; ``None`` is unknown."""
        known = [block.energy_j for block in self.kept if block.energy_j is not None]
        return sum(known) if known and len(known) == len(self.kept) else None

    def add(self, block: Block) -> None:
        """A window is over; it counts unless it says why it does not."""
        if block.window.discarded is None:
            self._blocks.append(block)
        else:
            self.discarded.append(block.window)

    def over(self, elapsed_s: float) -> bool:
        """Whether measuring ends here, ``elapsed_s`` after it began.

        Raises:
            Disturbed: others spoiled so many windows that the rest does not make a measurement.
        """
        self._find_steady_state()
        kept = self.kept
        if kept:
            self.rate_per_s = sum(b.window.samples for b in kept) / sum(b.window.seconds for b in kept)
        self.slow = self._surely_slow(elapsed_s)
        return self.slow or self._precise() or self._out_of_time(elapsed_s)

    def _find_steady_state(self) -> None:
        """Cut the windows that begin before the step times settle; as many are left as an interval needs.

        Cut anew each time: what looked like a change may turn out to be noise, and the other way round.
        """
        step_s = [step.step_s for block in self._blocks for step in block.steps]
        group = max(1, math.ceil(len(step_s) / LONGEST_HISTORY))
        settling = stats.settled_at([fmean(step_s[i : i + group]) for i in range(0, len(step_s), group)])
        self.settled = settling.settled
        self._cut = begins = 0
        for block in self._blocks[: max(0, len(self._blocks) - stats.FEWEST_WINDOWS)]:
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
        return stats.surely_slow(self.plan, kept, len(self._blocks), fastest_per_s, elapsed_s)

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
        left = len(self._blocks)
        if left >= stats.FEWEST_WINDOWS or not up:
            return up
        # Long steps are given as many windows again, instead of as much time.
        total = left + len(self.discarded)
        if self.discarded and total >= 2 * stats.FEWEST_WINDOWS:
            undisturbed = f"only {left} of {total} windows undisturbed" if left else "no undisturbed window"
            raise Disturbed(f"{what_went_on(self.discarded, self._cores)}; {undisturbed} in {elapsed_s:.0f} s")
        return False
