"""Choosing the winner, from rounds for which it is known."""

from collections.abc import Callable, Collection
from types import SimpleNamespace

import pytest

from autotune.base.observer import Observer
from autotune.base.records import Config, Goal, KnobPart, Measurement, MeasurePlan, TrainVerdict, TrialResult
from autotune.search.proof.ceilings import takeover_fits, takeover_rounds
from autotune.search.proof.race import Comparison, Entrant, Race, entrant
from autotune.search.proof.winner import Contest, set_back_useless, tie_between, winner_among
from autotune.space import Space, build_space
from autotune.space.building import SpaceRequest
from autotune.space.requirements import ANYTHING, Requirements
from tests.support import make_host, make_measurement, make_probe, make_trial

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
    required = Requirements.parsed([require] if require else [], Goal())
    judging = {"by_rate": by_rate, "rate_within": rate_within, "required": required}
    context = SimpleNamespace(device="cpu", space=space, scorer=scorer, **judging)
    compared = Comparison(context, entrants)  # type: ignore[arg-type]
    winner, leader = winner_among(context, compared, compared.contenders())  # type: ignore[arg-type]
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
    context = SimpleNamespace(device="cpu", scorer=scorer, by_rate=True, required=ANYTHING)
    compared = Comparison(context, [own, fast, other, *variants])  # type: ignore[arg-type]
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


def test_one_launch_of_each_is_said_to_be_one() -> None:
    winner, tie = won(raced(0, BASELINE, 100), raced(3, COMPILED, 250))
    assert winner.trial.number == 0
    assert tie is not None and "2.500× the baseline in one launch of each" in tie and "luck" not in tie


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


class Launched:
    """Launches of ten seconds, with the rate of each configuration; an earlier run has made those named in ``kept``.

    Attributes:
        names: the launches that were made, in order.
    """

    plan = MeasurePlan()

    def __init__(self, rate: Callable[[Config], float], left_s: float, kept: Collection[str] = ()) -> None:
        self._rate, self._kept = rate, kept
        self.budget = SimpleNamespace(left_s=left_s, spent_s=0.0)
        self.names: list[str] = []

    def finished(self, name: str, config: Config) -> TrialResult | None:
        return make_trial(0, dict(config), self._rate(config)).result if name in self._kept else None

    def run_outside(self, kind: object, name: str, title: str, config: Config, plan: object) -> TrialResult:
        self.names.append(name)
        self.budget.left_s -= 10.0
        return make_trial(0, dict(config), self._rate(config)).result


def race_of(space: Space, launches: Launched, winner: Config) -> tuple[Race, Entrant]:
    """Return a race in which the winner has been launched twice, in turns with the baseline."""
    context = SimpleNamespace(
        device="cpu",
        space=space,
        launches=launches,
        observer=SimpleNamespace(says=lambda sentence: None),
        raise_if_stopped=lambda: None,
        scorer=None,
        required=ANYTHING,
        compiled_s={},
        by_rate=True,
        rate_within=0.0,
    )
    one = entrant(make_trial(1, dict(winner)))
    race = Race(context, [entrant(make_trial(0, dict(space.baseline))), one])  # type: ignore[arg-type]
    for _ in range(2):
        race.round(race.entrants)
    launches.names.clear()
    return race, one


def test_a_variant_that_is_known_to_be_faster_comes_before_a_simpler_one_that_is_not_slower() -> None:
    space = build_space(make_probe(), make_host(), SpaceRequest())
    winner = {**space.baseline, "precision": "bf16", "memory_format": "channels_last", "optimizer_impl": "fused"}

    def rate(config: Config) -> float:
        """channels_last costs a tenth; the optimizer's gain shows only without it."""
        if config["precision"] != "bf16":
            return 100.0
        if config["memory_format"] == "channels_last":
            return 200.0
        return 220.0 if config["optimizer_impl"] == "fused" else 202.0

    race, one = race_of(space, Launched(rate, 1000.0), winner)
    parts = [
        KnobPart(knob="memory_format", value="channels_last", baseline_value="contiguous", gain=(0.91, 0.9, 0.92)),
        KnobPart(knob="optimizer_impl", value="fused", baseline_value="for-loop", gain=(1.0, 0.99, 1.01)),
    ]
    found = set_back_useless(race, one, parts)
    assert (found.config["memory_format"], found.config["optimizer_impl"]) == ("contiguous", "fused")


def test_a_takeover_that_an_earlier_run_has_launched_takes_no_time() -> None:
    space = build_space(make_probe(), make_host(), SpaceRequest())
    winner = {**space.baseline, "precision": "bf16", "memory_format": "channels_last"}
    config = {**winner, "memory_format": "contiguous"}
    name = "00001-without-memory_format"
    for kept, fits in (
        ((), False),
        # Those of the ablation are others.
        ((f"ablate-{name}-3", f"ablate-{name}-4"), False),
        ((f"simpler-{name}-3", f"simpler-{name}-4"), True),
    ):
        race, one = race_of(space, Launched(lambda config: 100.0, 40.0, kept), winner)
        assert race.context.launches.budget.left_s == 0
        race.purpose = "ablate"
        variant = Entrant(config, one.trial, expected_s=10.0, label="without memory_format")
        assert [len(racing) for racing in takeover_rounds(race, one, variant)] == [3, 3]
        assert takeover_fits(race, one, variant) == fits
    race, one = race_of(space, Launched(lambda config: 100.0, 200.0), winner)
    variant = Entrant(config, one.trial, expected_s=10.0, label="without memory_format")
    assert takeover_fits(race, one, variant)
    race.round([one, variant])
    race.round([one, variant])
    # With the winner it has been compared.
    assert [len(racing) for racing in takeover_rounds(race, one, variant)] == [2, 2]


@pytest.mark.parametrize(
    ("rate", "checked", "wins"), [(160, False, "safe"), (160, True, "changed"), (200, False, "changed")]
)
def test_what_may_train_otherwise_wins_if_it_was_checked_or_pays(rate: float, checked: bool, wins: str) -> None:
    fp32: Config = {**BASELINE, "precision": "fp32"}
    own, safe = raced(0, fp32, *around(100)), raced(3, {**fp32, "num_workers": 2}, *around(150))
    changed = raced(4, {**fp32, "precision": "bf16"}, *around(rate))
    space = build_space(make_probe(), make_host(), SpaceRequest())
    scorer = SimpleNamespace(score=lambda measurement: 0.0)
    judging = {"by_rate": True, "rate_within": 0.0, "required": ANYTHING}
    context = SimpleNamespace(device="cpu", space=space, scorer=scorer, **judging)
    compared = Comparison(context, [own, safe, changed])  # type: ignore[arg-type]
    contest = Contest.__new__(Contest)
    contest.race = SimpleNamespace(context=context, baseline=own)  # type: ignore[assignment]
    verdict = TrainVerdict(trials=(4,), config=dict(changed.config), passed=True if checked else None)
    contest.checks, contest._data = [verdict], {}
    contest.passes = lambda one: True  # type: ignore[method-assign]
    winner, leader = contest._checked_or_safe((changed, changed), compared, lambda one: True)
    assert winner is {"safe": safe, "changed": changed}[wins] and leader is changed
    said = contest.tie(compared, leader, winner)
    assert (said is None) == (winner is changed)
    assert said is None or said.endswith("but there was no time to check how it trains.")


@pytest.mark.parametrize(
    ("other", "may_win"),
    [({"precision": "bf16"}, False), ({"memory_format": "channels_last"}, True), ({"precision": "tf32"}, True)],
)
def test_what_computes_like_one_that_trains_wrongly_may_not_win_unchecked(
    other: dict[str, str], may_win: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp32: Config = {**BASELINE, "precision": "fp32", "memory_format": "default"}
    one = raced(5, {**fp32, **other}, *around(150))
    context = SimpleNamespace(space=SimpleNamespace(baseline=fp32), observer=Observer())
    context.space.changed_maths = lambda config: Space.changed_maths(context.space, config)
    context.space.same_maths = lambda config: Space.same_maths(context.space, config)
    contest = Contest.__new__(Contest)
    contest.race = SimpleNamespace(context=context)  # type: ignore[assignment]
    wrong = {**fp32, "precision": "bf16", "memory_format": "channels_last"}
    contest.checks = [TrainVerdict(trials=(4,), config=wrong, passed=False, reason="its loss differs")]
    contest._doubted = []
    # There is no time for a check of its own.
    monkeypatch.setattr(Contest, "_knows_training", lambda self, one: True)
    assert contest._trains(one) == may_win
    assert (one.out is None) == may_win and contest.doubted.keys() == (set() if may_win else {5})
