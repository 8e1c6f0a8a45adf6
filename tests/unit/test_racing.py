"""Races in rounds: who drops out, who does not, and when they end."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from autotune.base.clock import VirtualClock
from autotune.base.records import Heat, HeatPlan, TrialStatus, Turn
from autotune.stats.racing import PRIORS, Contender, Rounds

NEVER = 1e-9


class Drawn:
    """Turns whose seconds are drawn: each entrant's own, times a round's, times noise.

    Args:
        seconds: of a turn of each entrant. noise_sd: of its logarithm. gone: who fails, in which of its turns.
    """

    def __init__(
        self,
        clock: VirtualClock,
        seconds: Sequence[float],
        noise_sd: float,
        seed: int,
        gone: Mapping[int, int] | None = None,
    ) -> None:
        self.prior, self.switch_s = PRIORS["cpu"], 0.0
        self.left: list[int] = []
        self._clock, self._seconds, self._noise_sd, self._gone = clock, seconds, noise_sd, gone or {}
        self._rng = random.Random(seed)
        self._rounds: dict[int, float] = {}

    def take(self, entrant: Contender) -> Turn | None:
        played = len(entrant.turns)
        if self._gone.get(entrant.number) == played:
            entrant.status, entrant.cause = TrialStatus.OOM, "no memory"
            return None
        slow = self._rounds.setdefault(played, math.exp(self._rng.gauss(0, 0.2)))
        seconds = self._seconds[entrant.number] * slow * math.exp(self._rng.gauss(0, self._noise_sd))
        self._clock.sleep(seconds)
        return Turn(steps=1, samples=32, seconds=seconds)

    def leave(self, entrant: Contender) -> None:
        self.left.append(entrant.number)


def race(
    seconds: Sequence[float],
    *,
    noise_sd: float = 0.05,
    seed: int = 0,
    gone: Mapping[int, int] | None = None,
    **plan: object,
) -> tuple[Heat, Drawn]:
    clock = VirtualClock()
    turns = Drawn(clock, seconds, noise_sd, seed, gone)
    asked = HeatPlan.model_validate({"entrants": [{"batch_size": n + 1} for n in range(len(seconds))], **plan})
    found = Rounds(asked, turns, clock, random.Random(seed)).run(clock.now())
    assert found is not None
    return found, turns


@pytest.mark.slow
def test_the_fastest_is_hardly_ever_lost_however_often_one_looks() -> None:
    races = [race([1.0] * 6, seed=seed, max_rounds=40, settled=NEVER, max_s=1e6)[0] for seed in range(40)]
    # Of equals, each is the fastest.
    lost = sum(e.status is TrialStatus.PRUNED for found in races for e in found.entrants[1:])
    assert lost <= 0.05 * 5 * len(races)


def test_who_is_clearly_slower_drops_out_early_and_the_others_go_on() -> None:
    found, turns = race([1.0, 1.0, 1.6, 1.0], max_rounds=10, settled=NEVER, max_s=1e6)
    slow = found.entrants[2]
    assert slow.status is TrialStatus.PRUNED and slow.cause is not None and "behind, by" in slow.cause
    assert sum(turn is not None for turn in slow.turns) <= 3 and turns.left == [2]
    assert len(found.entrants[0].turns) == 10 and found.ended == "10 rounds were taken"


def test_nobody_drops_out_where_all_turns_are_wanted() -> None:
    found, turns = race([1.0, 1.5, 3.0], max_rounds=6, all_rounds=True, max_s=1e6)
    assert [sum(t is not None for t in e.turns) for e in found.entrants] == [6, 6, 6] and not turns.left
    assert [e.status for e in found.entrants] == [TrialStatus.COMPLETE] * 3


def test_the_reference_is_in_every_round_however_slow_it_is() -> None:
    found, _ = race([3.0, 1.0, 1.0], max_rounds=6, settled=NEVER, max_s=1e6)
    assert None not in found.entrants[0].turns and found.entrants[0].status is TrialStatus.COMPLETE


@pytest.mark.parametrize(
    ("seconds", "plan", "ended"),
    [
        ([2.0, 1.0, 2.0], {}, "the best is known"),
        ([1.0, 1.0, 1.0], {"settled": 0.5}, "the rest are equal"),
        ([1.0, 1.0, 1.0], {"least_per_s": 1.0}, "more rounds are not worth their seconds"),
        ([1.0, 1.0, 1.0], {"max_s": 20.0}, "its time is up"),
        ([1.0, 1.0, 1.0], {"wall_s": 20.0}, "its time is up"),
    ],
)
def test_why_it_ends(seconds: list[float], plan: dict[str, float], ended: str) -> None:
    found, _ = race(seconds, **{"settled": NEVER, "max_s": 1e6, **plan})
    assert found.ended == ended and len(found.entrants[0].turns) >= 3


def test_who_fails_is_out_and_has_no_ratio() -> None:
    found, turns = race([1.0] * 4, gone={1: 2}, max_rounds=5, settled=NEVER, max_s=1e6)
    failed = found.entrants[1]
    assert (failed.status, failed.cause, failed.ratio) == (TrialStatus.OOM, "no memory", None)
    assert turns.left == [1] and len(found.entrants[2].turns) == 5


def test_where_all_others_fail_nobody_else_is_blamed() -> None:
    heat, _ = race([1.0, 1.0, 1.0], gone={1: 0, 2: 0})
    assert heat.ended == "nobody is left to compare"
    assert [e.status for e in heat.entrants] == [TrialStatus.COMPLETE, TrialStatus.OOM, TrialStatus.OOM]
    assert all(e.ratio is None for e in heat.entrants[1:])


def test_rounds_that_are_slow_for_all_cancel() -> None:
    found, _ = race([1.0, 0.8], noise_sd=0.005, max_rounds=8, all_rounds=True, max_s=1e6)
    assert found.entrants[1].ratio == pytest.approx(1.25, rel=0.02)
    assert found.noise_sd == pytest.approx(0.005, rel=1.0)


def test_without_any_comparison_there_is_no_result() -> None:
    class Busy(Drawn):
        def take(self, entrant: Contender) -> Turn | None:
            return None

    clock = VirtualClock()
    plan = HeatPlan(entrants=({"batch_size": 1}, {"batch_size": 2}), max_rounds=3)
    assert Rounds(plan, Busy(clock, [1.0, 1.0], 0.0, 0), clock, random.Random(0)).run(0.0) is None


def test_who_was_always_disturbed_is_waited_for() -> None:
    class Disturbed(Drawn):
        def take(self, entrant: Contender) -> Turn | None:
            found = super().take(entrant)
            return None if entrant.number == 2 and len(entrant.turns) < 4 else found

    clock = VirtualClock()
    plan = HeatPlan(entrants=({"batch_size": 1}, {"batch_size": 2}, {"batch_size": 3}), max_s=1e6, settled=NEVER)
    found = Rounds(plan, Disturbed(clock, [2.0, 1.0, 0.5], 0.02, 0), clock, random.Random(0)).run(0.0)
    assert found is not None and found.entrants[2].ratio == pytest.approx(4.0, rel=0.1)
