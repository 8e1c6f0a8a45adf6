"""Selecting windows and deciding that there are enough, with windows made by hand."""

from __future__ import annotations

import random

import pytest

from autotune.base.records import MeasurePlan, Surroundings, Window
from autotune.child.failure import Disturbed
from autotune.child.windows import LASTING, LONGEST_HISTORY, Block, Timed, Windows

#: Windows of ten steps of a second with eight samples each, in virtual time.
PLAN = MeasurePlan(target_halfwidth=0.02, min_windows=4, max_measure_s=100.0)


def block(
    step_s: float,
    *,
    steps: int = 10,
    discarded: str | None = None,
    spread: float = 0.01,
    reasons: int | None = None,
    mhz: int | None = None,
    wait_s: float = 0.0,
) -> Block:
    rng = random.Random(f"{step_s} {steps}")
    timed = tuple(Timed(step_s * (1 + spread * rng.uniform(-1, 1)), wait_s, step_s, 0.0) for _ in range(steps))
    window = Window(
        steps=steps,
        samples=8 * steps,
        seconds=sum(t.step_s for t in timed),
        discarded=discarded,
        around=Surroundings(foreign_cores=1.3, idle_cores=0.0, clocks_event_reasons=reasons, sm_clock_mhz=mhz),
    )
    return Block(window, timed, enqueue_s=step_s / 2, energy_j=5.0)


def fill(windows: Windows, *blocks: Block) -> bool:
    """Add blocks until there are enough windows; return whether there are."""
    elapsed_s = 0.0
    for one in blocks:
        elapsed_s += one.window.seconds
        windows.add(one)
        if windows.over(elapsed_s):
            return True
    return False


def steady(count: int, step_s: float = 1.0) -> list[Block]:
    return [block(step_s * (1 + 0.001 * (i % 3))) for i in range(count)]


def test_a_narrow_interval_is_enough() -> None:
    windows = Windows(PLAN, 2)
    assert fill(windows, *steady(8))
    assert len(windows.kept) == 4 and windows.cut == []
    assert windows.settled and not windows.slow
    assert windows.rate.per_s == pytest.approx(8, rel=0.01)
    assert windows.enqueue_s == pytest.approx(0.5, rel=0.01)
    assert windows.energy_j == 20.0


def test_the_transient_is_cut_in_whole_windows() -> None:
    windows = Windows(PLAN, 2)
    assert fill(windows, block(3.0), block(2.0), *steady(20))
    assert [b.window.steps for b in windows.cut] == [10, 10]
    assert windows.rate.per_s == pytest.approx(8, rel=0.01)
    assert windows.settled


def test_measuring_continues_while_the_rate_still_changes() -> None:
    windows = Windows(PLAN.model_copy(update={"target_halfwidth": 10.0, "max_measure_s": 1e6}), 2)
    growing = [block(1.0 + i) for i in range(8)]
    assert not fill(windows, *growing)
    assert not windows.settled


def test_the_time_limit_ends_measuring_in_any_case() -> None:
    windows = Windows(PLAN.model_copy(update={"target_halfwidth": 1e-9}), 2)
    assert fill(windows, *steady(30))
    assert 9 <= len(windows.kept) <= 11


def test_slow_steps_get_enough_windows_for_an_interval() -> None:
    windows = Windows(PLAN.model_copy(update={"max_measure_s": 1.0}), 2)
    assert fill(windows, *steady(9))
    assert len(windows.kept) == 3


def test_long_histories_are_evaluated_in_groups() -> None:
    windows = Windows(PLAN.model_copy(update={"min_windows": 12, "max_measure_s": 1e6}), 2)
    slow, quick = [block(3.0, steps=500)] * 2, [block(1.0, steps=500)] * 12
    fill(windows, *slow, *quick)
    assert sum(b.window.steps for b in (*slow, *quick)) > LONGEST_HISTORY
    assert len(windows.cut) == 2 and len(windows.kept) == 12


def test_the_minimum_time_counts_kept_windows_only() -> None:
    windows = Windows(PLAN.model_copy(update={"min_measure_s": 65.0}), 2)
    spoiled = [block(1.0, discarded="others used 1.3 of 2 cores")] * 3
    assert fill(windows, *spoiled, *steady(20))
    assert len(windows.kept) == 7


def test_discarded_windows_do_not_count_and_are_repeated() -> None:
    windows = Windows(PLAN.model_copy(update={"target_halfwidth": 1e-9}), 2)
    spoiled = [block(9.0, steps=1, discarded="others used 1.3 of 2 cores")] * 3
    assert fill(windows, *spoiled, *steady(30))
    assert windows.discarded == [b.window for b in spoiled]
    # 100 seconds of undisturbed windows.
    assert 9 <= len(windows.kept) <= 11
    assert windows.rate.per_s == pytest.approx(8, rel=0.01)


def test_discarded_windows_extend_the_time_limit_at_most_twofold() -> None:
    windows = Windows(PLAN.model_copy(update={"target_halfwidth": 1e-9}), 2)
    spoiled = [block(1.0, discarded="others used 1.3 of 2 cores")] * 17
    assert fill(windows, *spoiled, *steady(30))
    assert len(windows.kept) == 3


def test_measuring_fails_without_an_undisturbed_window() -> None:
    spoiled = [block(1.0, discarded="others used 1.3 of 2 cores")] * 30
    with pytest.raises(
        Disturbed, match=r"^other processes kept using 1\.3 of 2 cores; no undisturbed window in 200 s$"
    ):
        fill(Windows(PLAN, 2), *spoiled)
    with pytest.raises(Disturbed, match=r"cores; only 2 of \d+ windows undisturbed in "):
        fill(Windows(PLAN, 2), *steady(2), *spoiled)


def test_slow_disturbed_steps_are_limited_by_windows_and_not_by_time() -> None:
    windows = Windows(PLAN.model_copy(update={"max_measure_s": 1.0}), 2)
    spoiled = block(1.0, discarded="another process is on the card")
    one, two, three = steady(3)
    assert fill(windows, spoiled, one, spoiled, two, three)


def test_a_launch_is_pruned_if_its_interval_is_below_the_limit() -> None:
    windows = Windows(PLAN.model_copy(update={"prune_below_per_s": 9.0, "target_halfwidth": 1e-9}), 2)
    assert fill(windows, *steady(20))
    assert windows.slow and len(windows.kept) == 3
    assert windows.rate.high_per_s < 9


@pytest.mark.parametrize(("mhz", "slow"), [(1980, True), (1975, True), (1700, False), (None, True)])
def test_a_launch_at_lower_clocks_is_pruned_only_if_it_is_slower_by_more_than_the_clocks(
    mhz: int | None, slow: bool
) -> None:
    # 8 samples/s against 8.5 at 1980 MHz; at 1700 MHz that may have been 7.3.
    plan = {"prune_below_per_s": 8.5, "prune_clock_mhz": 1980.0, "target_halfwidth": 1e-9}
    windows = Windows(PLAN.model_copy(update=plan), 2)
    assert fill(windows, *(block(1 + 0.001 * (i % 3), mhz=mhz) for i in range(20)))
    assert windows.slow is slow


def test_an_idle_card_clocks_down_which_is_no_reason_for_its_low_rate() -> None:
    plan = PLAN.model_copy(update={"prune_below_per_s": 8.5, "prune_clock_mhz": 1980.0, "target_halfwidth": 1e-9})
    windows = Windows(plan, 2)
    fill(windows, *(block(1 + 0.001 * (i % 3), mhz=600, wait_s=0.2) for i in range(20)))
    assert windows.slow and windows.clock_mhz is None
    windows = Windows(PLAN, 2)
    fill(windows, *(block(1.0, mhz=mhz, wait_s=0.05) for mhz in (1500, 1900, 1600, 1600)))
    assert windows.clock_mhz == 1600


def test_a_launch_is_not_pruned_if_its_interval_reaches_the_limit() -> None:
    windows = Windows(PLAN.model_copy(update={"prune_below_per_s": 8.2, "target_halfwidth": 0.1}), 2)
    assert fill(windows, *(block(0.95 if i % 2 else 1.05) for i in range(8)))
    assert not windows.slow


def test_two_windows_are_enough_without_time_for_three() -> None:
    windows = Windows(PLAN.model_copy(update={"prune_below_per_s": 10.0, "max_measure_s": 15.0}), 2)
    assert fill(windows, *steady(3))
    assert windows.slow and len(windows.kept) == 2


def test_a_hopeless_launch_is_pruned_after_one_window() -> None:
    windows = Windows(PLAN.model_copy(update={"prune_below_per_s": 20.0}), 2)
    assert fill(windows, block(1.0))
    assert windows.slow


def test_a_single_long_step_does_not_prune() -> None:
    stalled = block(1.0)
    steps = (Timed(100.0, 0.0, 100.0, 0.0), *stalled.steps[1:])
    window = stalled.window.model_copy(update={"seconds": 109.0})
    windows = Windows(PLAN.model_copy(update={"prune_below_per_s": 7.0, "max_measure_s": 500.0}), 2)
    windows.add(Block(window, steps))
    assert not windows.over(109.0)


def test_energy_is_unknown_if_one_window_lacks_it() -> None:
    windows = Windows(PLAN, 2)
    one = block(1.0)
    windows.add(one)
    windows.add(Block(one.window, one.steps))
    assert windows.energy_j is None


def hot(count: int) -> list[Block]:
    return [block(1.0 + 0.001 * (i % 3), discarded=LASTING, reasons=0x20) for i in range(count)]


def test_a_slowdown_that_never_ends_is_how_the_card_runs() -> None:
    windows = Windows(PLAN, 2)
    unread = block(1.0)
    # What else disturbs a window still discards it.
    other = block(1.0, discarded="another process computed on the card", reasons=0x20)
    assert fill(windows, *hot(2), unread, other, *hot(1))
    assert len(windows.kept) == 4 and windows.discarded == [other.window]
    assert all(b.window.discarded is None for b in windows.kept)
    assert windows.rate.per_s == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_slowdown_that_comes_and_goes_discards_its_windows(first: int) -> None:
    windows = Windows(PLAN, 2)
    cool = [block(0.8, reasons=0x4) for _ in range(6)]
    fill(windows, *hot(first), cool[0], *hot(2), *cool[1:])
    assert all(b.window.around is not None and b.window.around.clocks_event_reasons == 0x4 for b in windows.kept)
    assert [w.discarded for w in windows.discarded] == [LASTING] * (first + 2)
    assert windows.rate.per_s == pytest.approx(10, rel=0.01)


def test_a_slowdown_that_hardly_ever_ends_is_measured_rather_than_nothing() -> None:
    windows = Windows(PLAN.model_copy(update={"max_measure_s": 50.0}), 2)
    other = block(1.0, discarded="another process computed on the card", reasons=0x0)
    assert fill(windows, *hot(2), block(0.9, reasons=0x0), other, *hot(20))
    assert len(windows.kept) + len(windows.cut) == 10 and windows.discarded == [other.window]
    assert all(b.window.discarded is None for b in windows.kept)
