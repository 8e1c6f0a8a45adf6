"""Tells a launch's own processes on a card from others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Sharing:
    """Tells this launch's processes on its card from others, by when they came.

    No pid is compared with one of our own. Inside a container a process does not know the pids by which the driver
    lists it, and a driver may list processes by the container's pids and report their use of the SMs by the host's.

    Args:
        present: pids that the driver lists before this launch uses the card; ``None`` if it lists none.
        computing: pids for which the driver reports use of the SMs before that.
    """

    def __init__(self, present: Iterable[int] | None, computing: Iterable[int] | None) -> None:
        self._before = None if present is None else frozenset(present)
        self._computed_before = frozenset(computing or ())
        self._listed: frozenset[int] | None = None
        self._recognized: frozenset[int] = frozenset()
        self._settled = False
        #: Processes that came during start-up beside ours, and cannot be told from it.
        self._extra = 0
        self._last_percent: int | None = None

    def settle_in(self, present: Iterable[int] | None) -> None:
        """Note that this launch is on the card now: processes that have appeared since construction count as ours.

        Args:
            present: pids that the driver lists now.
        """
        self._settled = True
        if present is not None and self._before is not None:
            # If nothing has appeared, the driver does not list this launch (but MPS's server, for example).
            self._listed = frozenset(present) - self._before or None
            # A launch has one process on its card.
            self._extra = max(0, len(self._listed or ()) - 1)

    def others(self, present: Iterable[int] | None) -> int | None:
        """Return how many of the listed processes are not ours; ``None`` if that cannot be told."""
        if present is None or self._listed is None:
            return None
        return len(frozenset(present) - self._listed) + self._extra

    def others_percent(self, present: Iterable[int] | None, sm_percent: Mapping[int, int] | None) -> int | None:
        """Return the use of the SMs by processes that are not ours, added up; ``None`` if that cannot be told.

        Args:
            sm_percent: use of the SMs by pid, during a time in which this launch computed.
        """
        if sm_percent is None or not self._settled or self._extra:
            return None
        if not sm_percent:
            # Nobody computed, or the driver, which samples once in up to a second, has nothing new.
            return self._last_percent or 0
        listed = self._listed or frozenset()
        ours = listed & sm_percent.keys()
        if ours:
            self._recognized = ours
        elif not self._recognized:
            fresh = sm_percent.keys() - self._computed_before - (frozenset(present or ()) - listed)
            # Under another numbering ours is the one that began to compute; a launch has one process on its card.
            self._recognized = frozenset(fresh) if len(fresh) == 1 else frozenset()
        if not self._recognized:
            return None
        self._last_percent = sum(p for pid, p in sm_percent.items() if pid not in self._recognized | listed)
        return self._last_percent
