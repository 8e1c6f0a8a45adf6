"""Virtual time."""

from __future__ import annotations

from autotune.base.clock import VirtualClock

#: Alias for tests.
FakeClock = VirtualClock
