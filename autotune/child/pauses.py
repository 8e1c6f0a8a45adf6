"""Long pauses that come again and again between the steps of a script: rollouts, evaluations, checkpoints.

Windows that hold none of them, or one, have rates that differ by as much, and those with one look like disturbed ones.
So where pauses take much of the time, a window is from one of them to another.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from autotune.child.trail import SeenStep

#: A pause is in a step that takes this many times as long as usual, among so many before it.
LONG, _AMONG, _FEWEST = 5.0, 64, 4
#: Pauses that take less than this part of the time, all together, do not matter.
_MATTERS = 0.1
#: If there is none for this many times as long as from one to the next, they were no regular ones.
_GONE = 4.0


class Pauses:
    """Tells pauses, and whether they come regularly.

    Attributes:
        regular: they have come twice or more, and take much of the time.
        may_be: one has come that takes much of the time, and perhaps there will be others.
        period_s: from the last but one to the last. across: an epoch has ended between these two.
    """

    def __init__(self) -> None:
        self.regular = self.may_be = self.across = False
        self.period_s = 0.0
        self._turned = False
        self._recent: deque[float] = deque(maxlen=_AMONG)
        self._began_at: float | None = None
        self._at: list[float] = []
        self._seconds = 0.0
        self._gone = False

    def turn(self) -> None:
        """Note that an epoch has ended."""
        self._turned = True

    def add(self, step: SeenStep) -> bool:
        """Note a step in the middle of an epoch; return whether there was a pause in it."""
        if self._began_at is None:
            self._began_at = step.ended_at - step.seconds
        usual_s = median(self._recent) if len(self._recent) >= _FEWEST else step.seconds
        self._recent.append(step.seconds)
        paused = step.seconds > LONG * usual_s
        if paused:
            if self._at:
                self.period_s, self.across = step.ended_at - self._at[-1], self._turned
            self._turned = False
            self._at.append(step.ended_at)
            self._seconds += step.seconds - usual_s
        elif len(self._at) > 1 and step.ended_at - self._at[-1] > _GONE * (self._at[-1] - self._at[-2]):
            self._gone = True
        much = not self._gone and self._seconds > _MATTERS * (step.ended_at - self._began_at)
        self.regular, self.may_be = much and len(self._at) > 1, much and len(self._at) == 1
        return paused
