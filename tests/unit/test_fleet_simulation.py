"""The simulated fleet of `benchmarks.fleet`, where its figures can be told by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.fleet_week import WEEK_S, Assumptions, Fleet, Policy, Search, Seen

#: One card, one training, of which nothing changes and nobody is preempted.
PLAIN = Assumptions(
    kinds="A=1@1", trainings=1, runs=2, length=1000.0, spread=0.0, preemption=1e9, fixed=True, start=10.0,
    search_start=5.0, requeue=20.0, checkpoint=100.0, code_changes=0.0, driver_changes=0.0, torch_changes=0.0,
)  # fmt: skip
#: Four launches of 30 s, which find twice the rate.
TWICE = {"surface": [Search((30.0,) * 4, 2.0)]}
NOBODY, EACH = Policy("nobody", "never"), Policy("each", "each")
ONCE, ANEW = Policy("once", "once"), Policy("anew", "once", resumes=False)


def week(asked: Assumptions, policy: Policy, seed: int = 0) -> Seen:
    return Fleet(asked, policy, TWICE, seed).week()


def test_runs_come_one_after_another_and_searches_before_them() -> None:
    assert week(PLAIN, NOBODY).makespan_s == 2 * (10 + 1000)
    # A search of 125 s, and then runs at twice the rate.
    assert week(PLAIN, ONCE).makespan_s == 125 + 2 * (10 + 500)
    assert week(PLAIN, EACH).makespan_s == 2 * (125 + 10 + 500)
    assert week(replace(PLAIN, kinds="A=1@4"), NOBODY).makespan_s == 2 * (10 + 250)


def test_a_preempted_run_goes_on_from_its_last_checkpoint() -> None:
    # Of each 260 s, 10 are the start and 50 are lost; 20 s later it goes on: five times 200, the last one wholly.
    seen = week(replace(PLAIN, runs=1, preemption=260.0), NOBODY)
    assert seen.makespan_s == 4 * (260 + 20) + 10 + 200
    assert seen.lost_training_s == 4 * 50 and seen.starts == 5


def test_a_resumed_search_repeats_the_launch_that_was_cut_off() -> None:
    # Two launches in 80 s, of which 5 are the start and 15 are cut off; then the other two.
    asked = replace(PLAIN, preemption=80.0, checkpoint=1.0)
    seen = week(asked, ONCE)
    assert (seen.searching_s, seen.lost_search_s, seen.searches) == (80 + 5 + 60, 15 + 5, 1)
    asked = replace(asked, preemption=100.0, fixed=False)
    anew, resumed = ([week(asked, policy, seed) for seed in range(20)] for policy in (ANEW, ONCE))
    assert sum(s.lost_search_s for s in anew) > 2 * sum(s.lost_search_s for s in resumed) > 0


@pytest.mark.parametrize(("fresh", "expected"), [(False, 0.0), (True, 1.0)])
def test_a_stale_profile_is_searched_for_again_only_if_that_is_wanted(fresh: bool, expected: float) -> None:
    asked = replace(PLAIN, torch_changes=20.0)
    weeks = [week(asked, replace(ONCE, fresh=fresh), seed) for seed in range(3)]
    assert math.fsum(one.fresh for one in weeks) / 3 == expected
    assert all((one.searches > 1) == fresh for one in weeks) and max(one.makespan_s for one in weeks) < WEEK_S
