"""Time limits of a launch, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.base.clock import VirtualClock
from autotune.base.records import PhaseLimits, TrialStatus
from autotune.launcher.watch import IMPORT_S, Watch
from tests.support import make_spec

IMPORTED = b'{"imported": true}\n'


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def watch(clock: VirtualClock, tmp_path: Path) -> Watch:
    spec = make_spec(tmp_path / "a", limits=PhaseLimits(total_s=10.0))
    watch = Watch(spec, clock, lambda beat: None, lambda: False)
    watch.begin()
    return watch


def test_imports_of_a_spawned_process_are_no_part_of_its_launch(watch: Watch, clock: VirtualClock) -> None:
    watch.spawned()
    clock.sleep(30.0)
    assert not watch.overdue()
    watch.feed(IMPORTED)
    clock.sleep(9.0)
    assert not watch.overdue() and watch.seconds == pytest.approx(9.0)
    clock.sleep(2.0)
    assert watch.overdue() and watch.ended is TrialStatus.TIMEOUT and "10 s it was given" in watch.cause


def test_imports_that_end_before_the_process_is_known_to_be_spawned(watch: Watch, clock: VirtualClock) -> None:
    """Both messages wait for a search that was stopped (Ctrl-Z), and may be read in either order."""
    watch.feed(IMPORTED)
    watch.spawned()
    clock.sleep(11.0)
    assert watch.overdue() and "10 s it was given" in watch.cause


def test_imports_have_a_limit(watch: Watch, clock: VirtualClock) -> None:
    watch.spawned()
    clock.sleep(IMPORT_S + 1)
    assert watch.overdue() and watch.ended is TrialStatus.TIMEOUT and "import of torch" in watch.cause


def test_a_launch_cannot_set_back_its_own_clock(watch: Watch, clock: VirtualClock) -> None:
    watch.feed(b'{"phase": "load"}\n')
    clock.sleep(9.0)
    watch.feed(IMPORTED)
    clock.sleep(2.0)
    assert watch.overdue() and watch.seconds == pytest.approx(11.0)
