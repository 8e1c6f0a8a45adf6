"""Virtual time."""

from __future__ import annotations

from autotune.clock import VirtualClock

#: By the name that tests know it by.
FakeClock = VirtualClock
