"""Choosing the winner, from rounds for which it is known."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from autotune import stats
from autotune.base.records import Config, Goal, Measurement
from autotune.search.proof.race import Comparison, Entrant, entrant
from autotune.search.proof.winner import tie_between, winner_among
from autotune.space.requirements import Requirements
from tests.support import make_measurement, make_trial

BASELINE: Config = {"batch_size": 32, "compile_mode": "off", "num_workers": 0}
COMPILED = {**BASELINE, "compile_mode": "default"}
WORKERS = {**BASELINE, "num_workers": 2}


def raced(number: int, config: Config, *rates: float) -> Entrant:
    made = entrant(make_trial(number, dict(config), rates[0]))
    made.rounds += [make_measurement(rate, relative_se=0.001) for rate in rates]
    return made


def around(rate: float) -> tuple[float, ...]:
    """Rounds on a quiet machine."""
    return rate, 1.001 * rate, 0.999 * rate, rate


def won(
    *entrants: Entrant,
    by_rate: bool = True,
    rate_within: float = 0.0,
    score: Callable[[Measurement], float] = lambda measurement: -measurement.samples_per_s,
    require: str = "",
) -> tuple[Entrant, str | None]:
    scorer, space = SimpleNamespace(score=score, known=score), SimpleNamespace(baseline=BASELINE)
    final = SimpleNamespace(device="cpu", space=space, scorer=scorer, by_rate=by_rate, rate_within=rate_within)
    required = Requirements.parsed([require] if require else [], Goal())
    compared = Comparison(entrants, prior=stats.PRIORS["cpu"], scorer=scorer, by_rate=by_rate, required=required)  # type: ignore[arg-type]
    winner, leader = winner_among(final, compared, compared.contenders())  # type: ignore[arg-type]
    return winner, tie_between(compared, leader, winner)


def test_a_shown_win_needs_no_explanation() -> None:
    fast = raced(3, COMPILED, *around(150))
    assert won(raced(0, BASELINE, *around(100)), fast, raced(4, WORKERS, *around(120))) == (fast, None)


def test_variants_that_were_made_to_learn_gains_were_candidates_for_nothing() -> None:
    own, fast, other = raced(0, BASELINE, 100, 104), raced(3, COMPILED, 160, 151), raced(4, WORKERS, 120, 110)
    variants = [Entrant(WORKERS, fast.trial, label=f"without knob {i}") for i in range(20)]
    for one in variants:
        one.rounds += [make_measurement(rate, relative_se=0.001) for rate in (150, 149)]
    scorer = SimpleNamespace(score=lambda measurement: 0.0)
    compared = Comparison([own, fast, other, *variants], prior=stats.PRIORS["cpu"], scorer=scorer, by_rate=True)  # type: ignore[arg-type]
    assert len(compared.contenders()) == 23
    assert compared.rivals(fast) == 2 and compared.rivals(variants[0]) == 3


def at_clock(mhz: int, one: Entrant) -> Entrant:
    for number, found in enumerate(one.again):
        one.rounds[number] = found.model_copy(update={"sm_clock_mhz": float(mhz)})
    return one


@pytest.mark.parametrize(("mhz", "wins"), [(1500, True), (1510, True), (1700, False), (1300, True)])
def test_a_win_at_higher_clocks_has_to_be_larger_than_the_clocks_difference(mhz: int, wins: bool) -> None:
    own, fast = at_clock(1500, raced(0, BASELINE, *around(100))), at_clock(mhz, raced(3, COMPILED, *around(105)))
    assert (won(own, fast)[0] is fast) == wins


def test_the_baseline_wins_if_nothing_is_shown_to_be_faster() -> None:
    own = raced(0, BASELINE, 100, 90, 110)
    winner, tie = won(own, raced(3, COMPILED, 112, 93, 104))
    assert winner is own and tie is not None
    assert tie.startswith("Trial 3 ran at 1.0") and tie.endswith(
        "no proof of being faster, and the baseline is simpler."
    )
    assert won(own) == (own, None)


def test_the_simplest_of_the_fastest_wins_and_the_tie_is_explained() -> None:
    simple = raced(4, WORKERS, 150, 152, 149, 151)
    winner, tie = won(raced(0, BASELINE, *around(100)), raced(3, COMPILED, 151, 150, 152, 150), simple)
    assert winner is simple and tie is not None
    assert tie.startswith("Trial 3 ran at 1.002× trial 4 (95 %: 0.") and tie.endswith("and trial 4 is simpler.")


def test_a_simpler_but_slower_configuration_does_not_win() -> None:
    fast = raced(3, COMPILED, *around(151))
    assert won(raced(0, BASELINE, *around(100)), fast, raced(4, WORKERS, *around(149)))[0] is fast


@pytest.mark.parametrize(("ratio", "shown"), [(1.03, False), (1.06, True)])
def test_the_best_of_several_may_seem_faster_by_luck(ratio: float, shown: bool) -> None:
    own = raced(0, BASELINE, 100, 102, 99)
    scatter = [(101, 99, 100), (99, 101, 101), (100, 100, 102), (102, 99, 100)]
    others = [raced(n, {**WORKERS, "num_workers": n}, *rates) for n, rates in enumerate(scatter, 4)]
    best = raced(3, COMPILED, 101 * ratio, 100 * ratio, 100 * ratio)
    winner, tie = won(own, best, *others)
    assert winner is (best if shown else own)
    assert (tie is None) == shown
    # Alone it would have been called faster.
    assert shown or "(95 %: 1.006 to 1.055 for it alone, and one of 5 may seem so by luck)" in str(tie)


@pytest.mark.parametrize("fast", [90.0, 110.0])
def test_another_objective_chooses_its_best_at_any_rate(fast: float) -> None:
    own, other = raced(0, BASELINE, *around(100)), raced(3, COMPILED, *around(fast))
    assert won(own, other, by_rate=False) == (other if fast < 100 else own, None)


def of_memory(peak_gib: float, one: Entrant) -> Entrant:
    for number, found in enumerate(one.again):
        one.rounds[number] = found.model_copy(update={"peak_allocated_bytes": round(peak_gib * 2**30)})
    return one


def least_memory(measurement: Measurement) -> float:
    return 1 / (measurement.peak_bytes or 1)


def test_what_does_not_meet_what_is_required_does_not_win() -> None:
    own = of_memory(4, raced(0, BASELINE, *around(100)))
    fast, other = of_memory(9, raced(3, COMPILED, *around(150))), of_memory(7, raced(4, WORKERS, *around(120)))
    assert won(own, fast, other, require="peak_memory<=8GiB")[0] is other
    assert won(own, fast, other, require="peak_memory<=5GiB")[0] is own
    assert won(own, fast, require="throughput>=200")[0] is own


def test_where_the_baseline_does_not_meet_it_the_best_that_does_wins_even_if_it_is_slower() -> None:
    own = of_memory(9, raced(0, BASELINE, *around(100)))
    slow, slower = of_memory(4, raced(3, COMPILED, *around(80))), of_memory(3, raced(4, WORKERS, *around(60)))
    assert won(own, slow, slower, require="memory<=5GiB")[0] is slow
    assert won(own, slow, slower, require="memory<=3.5GiB")[0] is slower


def test_the_leanest_of_about_the_fastest_wins() -> None:
    own = of_memory(4, raced(0, BASELINE, *around(100)))
    fast, lean = of_memory(9, raced(3, COMPILED, *around(150))), of_memory(6, raced(4, WORKERS, *around(148.5)))
    assert won(own, fast, lean, rate_within=0.02, score=least_memory)[0] is lean
    assert won(own, fast, lean, rate_within=0.005, score=least_memory)[0] is fast
    # The baseline is as fast as anything.
    assert won(of_memory(4, raced(0, BASELINE, *around(149))), fast, lean, rate_within=0.02, score=least_memory)[
        0
    ].config == dict(BASELINE)
