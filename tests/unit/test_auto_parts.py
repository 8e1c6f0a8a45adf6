"""The models of the auto sampler: regression, the two sides of a rate, memory, and duration."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.records import HeatEntrant, Phase, Trial, TrialResult, TrialStatus, Turn, Value
from autotune.samplers.auto.features import DEVICE, WHOLE, Features, combined
from autotune.samplers.auto.memory import HEADROOM, MemoryModel
from autotune.samplers.auto.posterior import POOL, Offers, neighbours, observation
from autotune.samplers.auto.rates import Observation, Prior, RateModel, Regression
from autotune.samplers.sampler import EMPTIED_BYTES_PER_S, CostModel, Experience
from autotune.space import Lessons, key
from tests.support import make_measurement

from .test_search import BASELINE, choices, cpu_space


class TestRegression:
    RNG = np.random.default_rng(0)
    ROWS = np.column_stack([np.ones(6), RNG.normal(size=(6, 3))])
    SEEN = RNG.normal(size=6)
    WEIGHTS = np.array([1.0, 1.0, 0.25, 1.0, 1.0, 1.0])
    PRIOR = Prior(np.array([0.0, 0.3, 0.0, 0.1]), np.array([10.0, 0.3, 0.2, 0.05]), np.array([False] * 4))

    def fitted(self, left_out: int | None = None, noise_sd: float = 0.1):
        regression = Regression(self.PRIOR)
        for i in range(6):
            if i != left_out:
                regression.add(self.ROWS[i], self.SEEN[i], self.WEIGHTS[i])
        return regression.fit(noise_sd)

    def test_is_the_textbook_posterior(self) -> None:
        found = self.fitted()
        # Whatever factors were chosen, the rest must be consistent with its own noise: solve it directly.
        noise = found.noise_sd
        covariance = found.root @ found.root.T
        scaled = np.linalg.inv(covariance) - self.ROWS.T @ (self.ROWS * (self.WEIGHTS / noise**2)[:, None])
        prior_sd = 1 / np.sqrt(np.diag(scaled))
        assert prior_sd[0] == pytest.approx(10.0, rel=1e-3)
        factors = prior_sd[1:] / self.PRIOR.sd[1:]
        assert factors == pytest.approx([factors[0]] * 3, rel=1e-6)
        information = scaled @ self.PRIOR.mean + self.ROWS.T @ (self.WEIGHTS / noise**2 * self.SEEN)
        assert found.mean == pytest.approx(covariance @ information, rel=1e-6)

    def test_to_believe_what_is_expected_changes_no_expectation(self) -> None:
        regression = Regression(self.PRIOR)
        for i in range(5):
            regression.add(self.ROWS[i], self.SEEN[i], self.WEIGHTS[i])
        before, rows = regression.fit(0.1), self.ROWS[5:]
        expected, sd = before.predict(rows)
        after = regression.believing(rows, expected).fit(0.1)
        assert after.mean == pytest.approx(before.mean) and after.noise_sd == before.noise_sd
        assert (after.predict(rows)[1] < sd).all()
        assert regression.fit(0.1).predict(rows)[1] == pytest.approx(sd), "the regression itself has learnt nothing"

    def test_without_data_it_is_the_prior(self) -> None:
        found = Regression(self.PRIOR).fit(0.1)
        assert found.mean == pytest.approx(self.PRIOR.mean)
        mean, sd = found.predict(np.array([[0.0, 1.0, 0.0, 0.0]]))
        assert (mean[0], sd[0]) == pytest.approx((0.3, 0.3))

    def test_leave_one_out_equals_a_fit_without_the_observation(self) -> None:
        # Two observations are too few to choose factors, so leaving one out changes only the data.
        regression = Regression(self.PRIOR)
        alone = Regression(self.PRIOR)
        for i in (0, 1):
            regression.add(self.ROWS[i], self.SEEN[i], 1.0)
        alone.add(self.ROWS[1], self.SEEN[1], 1.0)
        mean, sd = regression.fit(0.1).left_out(self.ROWS[:1], self.SEEN[:1], np.ones(1))
        expected, spread = alone.fit(0.1).predict(self.ROWS[:1])
        assert mean[0] == pytest.approx(expected[0])
        assert sd[0] == pytest.approx(math.hypot(spread[0], 0.1))

    def test_an_effect_is_learnt(self) -> None:
        rng = np.random.default_rng(1)
        regression = Regression(self.PRIOR)
        truth = np.array([3.0, -0.4, 0.2, 0.1])
        for _ in range(200):
            row = np.concatenate([[1.0], rng.normal(size=3)])
            regression.add(row, float(row @ truth + rng.normal(0, 0.05)), 1.0)
        found = regression.fit(0.05)
        assert found.mean == pytest.approx(truth, abs=0.02)
        assert found.noise_sd == pytest.approx(0.05)


class TestFeatures:
    def test_the_baseline_has_no_effects(self) -> None:
        features = Features(cpu_space(), WHOLE)
        rows = features.of([BASELINE, {**BASELINE, "precision": "bf16"}])
        # No workers is the baseline's value, and also a value with an effect of its own.
        special = np.flatnonzero(rows[0])
        assert len(special) <= 2 and rows[0, 0] == 1.0
        assert (rows[1] != rows[0]).sum() >= 1
        assert rows.shape == (2, len(features.mean)) == (2, len(features.sd)) == (2, len(features.fine))

    def test_one_and_true_are_different_values(self) -> None:
        space = cpu_space(**{"workload.x": choices(1, True)})
        rows = Features(space, DEVICE).of([{**BASELINE, "workload.x": 1}, {**BASELINE, "workload.x": True}])
        assert (rows[0] != rows[1]).any()

    def test_larger_batches_that_bring_less_and_less_are_not_believed_to_go_on(self) -> None:
        """As on a GPU: twice as fast at twice the batch, and hardly faster at sixteen times that."""
        space = cpu_space()
        model = RateModel(space)
        for batch, rate in ((32, 1.0), (64, 1.9), (128, 2.6), (256, 2.8)):
            model.add(Observation({**BASELINE, "batch_size": batch}, math.log(rate)))
        fitted = model.fit(0.01)
        mean = fitted.mean(model.pool([{**BASELINE, "batch_size": batch} for batch in (256, 512)]))
        assert mean[1] - mean[0] < math.log(1.15)

    def test_of_no_configurations(self) -> None:
        features = Features(cpu_space(), WHOLE)
        assert features.of([]).shape == (0, len(features.mean))


rates = st.floats(1.0, 1e5)


class TestTwoSides:
    @given(rates, rates)
    def test_the_combined_rate_is_at_most_that_of_the_slower_side(self, device: float, loader: float) -> None:
        both = combined(np.log([device, device]), np.log([loader, loader]), np.array([False, True]))
        in_turns, overlapping = np.exp(both)
        assert in_turns == pytest.approx(1 / (1 / device + 1 / loader), rel=1e-6)
        assert 0.91 * min(device, loader) <= overlapping <= min(device, loader) * (1 + 1e-9)
        assert in_turns <= overlapping * (1 + 1e-9)

    def test_a_side_that_is_not_the_limit_is_learnt_too(self) -> None:
        model = RateModel(cpu_space())
        workers = {**BASELINE, "num_workers": 1, "prefetch_factor": 2, "persistent_workers": False}
        # The loader limits both to 30; the device could do 100, and 200 with bf16.
        for config, device in ((workers, 100.0), ({**workers, "precision": "bf16"}, 200.0)):
            model.add(Observation(config, math.log(30.0), math.log(device), math.log(30.0)))
        known = model.fit(0.03)
        more = [{**workers, "num_workers": 8}, {**workers, "num_workers": 8, "precision": "bf16"}]
        slow, fast = np.exp(known.mean(model.pool(more)))
        assert fast > 1.2 * slow > 1.2 * 60

    @pytest.mark.parametrize("overlaps", [True, False])
    def test_a_worker_helps_only_where_it_has_a_core(self, overlaps: bool) -> None:
        """As PyTorch's VAE example, which waits for 41 % of a step; its loader alone is no faster with workers."""
        model = RateModel(replace(cpu_space(), overlaps=overlaps))
        alone = {**BASELINE, "num_workers": 0}
        worker = {**BASELINE, "num_workers": 1, "prefetch_factor": 2, "persistent_workers": False}
        model.add(Observation(alone, math.log(7500.0), math.log(12_800.0), math.log(18_100.0)))
        model.add_heat("loader", [alone, worker], [0.0, -0.05], [0.02, 0.02])
        without, with_one = np.exp(model.fit(0.05).mean(model.pool([alone, worker])))
        assert (with_one > 1.15 * without) == overlaps
        assert overlaps or with_one < without


@pytest.mark.parametrize(("device", "known"), [(300.0, True), (41.0, False)])
def test_sides_that_take_longer_than_the_whole_are_not_believed(device: float, known: bool) -> None:
    measurement = make_measurement(29.0, batch_size=16, device_per_s=device, loader_capacity_per_s=33.0)
    result = TrialResult(launch="00000", status=TrialStatus.COMPLETE, measurement=measurement)
    found = observation(Trial(number=0, config={**BASELINE, "num_workers": 0}, result=result, score=29.0))
    assert found is not None and found.log_rate == pytest.approx(math.log(29.0))
    assert (found.log_device is not None, found.log_loader is not None) == (known, known)


def test_a_loader_is_no_faster_than_its_hand_over() -> None:
    """The workers make 40,000 samples a second, and 4,300 of them come: more workers would change nothing."""
    config = {**BASELINE, "num_workers": 4, "prefetch_factor": 2, "persistent_workers": False}

    def loading(handed: float) -> float:
        figures = {"device_per_s": 6000.0, "loader_capacity_per_s": 40_000.0, "loader_wait_fraction": 0.3}
        measurement = make_measurement(4300.0, batch_size=16, hand_over_fraction=handed, **figures)
        result = TrialResult(launch="00000", status=TrialStatus.COMPLETE, measurement=measurement)
        found = observation(Trial(number=0, config=config, result=result, score=4300.0))
        assert found is not None and found.log_loader is not None
        return math.exp(found.log_loader)

    assert loading(0.28) == pytest.approx(4300)
    assert loading(0.02) == pytest.approx(40_000)


@st.composite
def lines(draw: st.DrawFn) -> tuple[int, int]:
    return draw(st.integers(0, 2**33)), draw(st.integers(2**10, 2**28))


class TestMemory:
    @given(lines(), st.integers(0, 8), st.integers(0, 8), st.integers(2**20, 2**36))
    def test_a_configuration_predicted_to_fit_does_fit(
        self, line: tuple[int, int], first: int, second: int, capacity: int
    ) -> None:
        constant, each = line
        model = MemoryModel(cpu_space(), capacity)
        for power in (first, second):
            model.learn({**BASELINE, "batch_size": 2**power}, constant + each * 2**power)
        # A configuration that ran will run again, and so will smaller batches.
        for power in range(max(first, second) + 1, max(first, second) + 3):
            config = {**BASELINE, "batch_size": 2**power}
            if model.fits(config):
                assert constant + each * 2**power <= capacity

    def test_two_batches_determine_a_line(self) -> None:
        model = MemoryModel(cpu_space(), None)
        for batch in (16, 32, 64):
            model.learn({**BASELINE, "batch_size": batch}, 10_000 + 100 * batch)
        bound = model.bound({**BASELINE, "batch_size": 128})
        assert bound is not None and bound.expected == pytest.approx(22_800, rel=0.03)
        assert 22_800 < bound.upper < 1.2 * 22_800

    def test_one_batch_gives_an_upper_bound(self) -> None:
        model = MemoryModel(cpu_space(), None)
        model.learn(BASELINE, 1000)
        double, far = (model.bound({**BASELINE, "batch_size": b}) for b in (64, 1024))
        assert double is not None and far is not None
        assert 1400 < double.upper < 2200 and far.expected is None

    def test_other_combinations_teach_the_constant_part(self) -> None:
        def upper(model: MemoryModel) -> float:
            bound = model.bound({**BASELINE, "batch_size": 128})
            assert bound is not None
            return bound.upper

        model = MemoryModel(cpu_space(), None)
        model.learn(BASELINE, 1000)
        before = upper(model)
        for batch in (16, 32, 64):
            model.learn({**BASELINE, "optimizer_impl": "fused", "batch_size": batch}, 900 + 3 * batch)
        assert upper(model) < 0.7 * before

    def test_an_unseen_combination_is_predicted_less_precisely(self) -> None:
        model = MemoryModel(cpu_space(), None)
        for batch in (16, 32, 64):
            model.learn({**BASELINE, "batch_size": batch}, 500 + 15 * batch)
        known, other = (model.bound({**BASELINE, "precision": p, "batch_size": 64}) for p in ("fp32", "bf16"))
        assert known is not None and other is not None
        assert known.expected == pytest.approx(1460, rel=0.03)
        assert other.upper - (other.expected or 0) > known.upper - known.expected

    def test_a_combination_without_workers_is_separate(self) -> None:
        model = MemoryModel(cpu_space(), None)
        model.learn(BASELINE, 1000)
        loading = {**BASELINE, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
        assert model.batches(BASELINE) == [32] and model.batches(loading) == []

    def test_running_out_of_memory_is_learnt(self) -> None:
        model = MemoryModel(cpu_space(), 4000)
        for batch in (16, 32, 64):
            model.learn({**BASELINE, "batch_size": batch}, 1000 + 10 * batch)
        large = {**BASELINE, "batch_size": 256}
        before = model.bound(large)
        model.learn_oom(large)
        after = model.bound(large)
        assert before is not None and before.expected is not None and before.expected < 4000
        assert after is not None and after.expected is not None and after.expected > before.expected

    def test_a_configuration_that_ran_fits_however_close(self) -> None:
        model = MemoryModel(cpu_space(), 1000)
        model.learn(BASELINE, 995)
        assert model.fits(BASELINE) and model.fits({**BASELINE, "batch_size": 16})
        assert not model.fits({**BASELINE, "batch_size": 64}) and not model.may_fit({**BASELINE, "batch_size": 64})

    def test_headroom_is_kept(self) -> None:
        model = MemoryModel(cpu_space(), 10_000)
        for batch in (8, 16, 32):
            model.learn({**BASELINE, "batch_size": batch}, 100 * batch)
        # It would take 9,600 of the 10,000.
        assert not model.may_fit({**BASELINE, "batch_size": 98}) and HEADROOM < 0.04

    def test_without_a_limit_or_data_everything_fits(self) -> None:
        assert MemoryModel(cpu_space(), None).fits({**BASELINE, "batch_size": 2**20})
        assert MemoryModel(cpu_space(), 1).fits(BASELINE) and MemoryModel(cpu_space(), 1).bound(BASELINE) is None


def trial(config: dict[str, Value], wall_s: float, compile_s: float = 0.5, rate: float = 100.0, **changes: object):
    measurement = make_measurement(rate, batch_size=int(config["batch_size"]), compile_s=compile_s, **changes)
    return TrialResult(
        launch="x",
        status=TrialStatus.COMPLETE,
        measurement=measurement,
        wall_s=wall_s,
        phase_s={Phase.COMPILE: compile_s},
    )


class TestSeconds:
    def test_without_data_the_usual_duration_is_expected(self) -> None:
        assert CostModel().expected_s(BASELINE) == 0.0
        assert CostModel(usual_s=5.0).expected_s({**BASELINE, "compile_mode": "default"}) == 65.0

    def test_slow_steps_take_longer(self) -> None:
        costs = CostModel()
        for rate, wall_s in ((320.0, 6.4), (32.0, 10.0), (64.0, 8.0)):
            costs.learn(BASELINE, trial(BASELINE, wall_s, rate=rate))
        assert costs.expected_s(BASELINE, 320.0) == pytest.approx(6.4, abs=0.3)
        assert costs.expected_s(BASELINE, 16.0) == pytest.approx(14.0, abs=1.0)

    def test_a_graph_is_compiled_once(self) -> None:
        costs = CostModel()
        costs.learn(BASELINE, trial(BASELINE, 5.0))
        compiled = {**BASELINE, "compile_mode": "default"}
        assert costs.expected_s(compiled) == pytest.approx(65, abs=1)
        costs.learn(compiled, trial(compiled, 45.0, 40.0, compile_cache_warm=False))
        assert costs.expected_s({**compiled, "batch_size": 64}) == pytest.approx(45, abs=2)
        assert costs.expected_s(compiled) == pytest.approx(5 + 0.3 * 40, abs=2)
        # Workers do not affect the compiler.
        loading = {**compiled, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
        assert costs.expected_s(loading) == costs.expected_s(compiled)

    def test_compiling_that_ran_out_of_time_is_a_lower_bound(self) -> None:
        compiled = {**BASELINE, "compile_mode": "default"}
        ended = TrialResult(
            launch="x", status=TrialStatus.TIMEOUT, phase=Phase.COMPILE, phase_s={Phase.COMPILE: 150.1}, wall_s=155.0
        )
        costs = CostModel(usual_s=5.0, compile_limit_s=300.0)
        costs.learn(compiled, ended)
        assert costs.expected_s({**compiled, "batch_size": 64}) == pytest.approx(155.1)
        # In the same time it would not end again.
        limited = CostModel(usual_s=5.0, compile_limit_s=150.0)
        assert limited.expected_s(compiled) == 65.0
        limited.learn(compiled, ended)
        assert limited.expected_s({**compiled, "batch_size": 64}) == math.inf
        # Slow loading says nothing about the compiler.
        loading = CostModel(usual_s=5.0)
        loading.learn(compiled, ended.model_copy(update={"phase": Phase.WARMUP}))
        assert loading.expected_s(compiled) == 65.0

    def test_a_graph_that_was_compiled_in_time_will_be_again(self) -> None:
        compiled = {**BASELINE, "compile_mode": "default"}
        costs = CostModel(usual_s=5.0, compile_limit_s=150.0)
        costs.learn(compiled, trial(compiled, 145.0, 140.0, compile_cache_warm=False))
        ended = TrialResult(
            launch="x", status=TrialStatus.TIMEOUT, phase=Phase.COMPILE, phase_s={Phase.COMPILE: 150.1}, wall_s=155.0
        )
        costs.learn({**compiled, "batch_size": 64}, ended)
        assert costs.expected_s(compiled) < 60

    def test_a_mode_is_offered_only_where_it_is_expected_to_compile_in_time(self) -> None:
        tuned = {**BASELINE, "compile_mode": "max-autotune"}
        assert CostModel(compile_limit_s=150.0).expected_s(tuned) == math.inf
        assert CostModel(compile_limit_s=450.0).expected_s(tuned) == 300.0
        # What must be compiled is tried, because the guess may be wrong.
        assert CostModel(compile_limit_s=150.0, must_compile=True).expected_s(tuned) == 300.0

    def test_a_full_queue_takes_time(self) -> None:
        """39 GB of images, as 32 workers have them ready, are taken away one after the other before anything counts."""
        image_bytes, loading = 602_112, {**BASELINE, "batch_size": 512, "num_workers": 32, "prefetch_factor": 3}
        assert CostModel(usual_s=5.0).expected_s(loading) == 5.0
        costs = CostModel(usual_s=5.0, sample_bytes=image_bytes)
        assert costs.expected_s(BASELINE) == 5.0
        assert costs.expected_s(loading) == pytest.approx(5 + 32 * 4 * 512 * image_bytes / EMPTIED_BYTES_PER_S)
        # Workers that make 20 images a second have made few until a first step of half a second has ended.
        costs.learn(BASELINE, trial(BASELINE, 5.0, loader_capacity_per_s=20.0))
        made_s = 32 * 20 * 0.5 * image_bytes / EMPTIED_BYTES_PER_S
        assert costs.queue_s(loading) == pytest.approx(made_s)
        # While it compiles for how long nobody knows, they may fill the queue.
        assert costs.queue_s({**loading, "compile_mode": "default"}) > 19
        # What was taken away is no part of what every trial takes.
        fast = CostModel(sample_bytes=image_bytes)
        fast.learn(loading, trial(loading, 25.0, rate=5000.0, loader_capacity_per_s=1e6, warmup_s=18.0))
        assert fast.expected_s(BASELINE) < 8

    def test_in_a_script_that_trains_already_there_is_neither_a_start_nor_steps_that_nobody_sees(self) -> None:
        costs = CostModel()
        # Steps of three seconds, of which a launch of its own would take four more before anything is seen.
        costs.learn(
            BASELINE, trial(BASELINE, 15.0, rate=32 / 3.0, startup_s=2.0).model_copy(update={"within": "probe-1"})
        )
        assert costs.expected_s(BASELINE, 32 / 3.0) == pytest.approx(15.0 + 2.0 + 12.0)
        costs.follows = lambda config: True
        assert costs.expected_s(BASELINE, 32 / 3.0) == pytest.approx(15.0)

    def test_first_steps_of_entrants_are_learnt(self) -> None:
        """An entrant for which cuDNN tries its algorithms takes seconds before its first turn, of a tenth each."""
        costs = CostModel()
        assert costs.enters_s("off", "") == 0.0
        turns = (Turn(steps=2, samples=64, seconds=0.2), None)
        for first_step_s in (2.5, 0.5, 0.05):
            costs.learn_entrant(HeatEntrant(config=BASELINE, turns=turns, first_step_s=first_step_s))
        # One that failed at once has not shown it.
        costs.learn_entrant(HeatEntrant(config=BASELINE, status=TrialStatus.OOM, first_step_s=9.0))
        assert costs.enters_s("off", "") == pytest.approx((2.4 + 0.4 + 0.0) / 3)
        assert costs.enters_s("default", "a graph") == 60.0 and costs.expected_s(BASELINE) == 0.0

    def test_a_failed_trial_teaches_nothing(self) -> None:
        costs = CostModel()
        costs.learn(BASELINE, TrialResult(launch="x", status=TrialStatus.OOM, wall_s=1.0))
        assert costs.expected_s(BASELINE) == 0.0


class TestExperience:
    def test_a_trial_counts_once_however_often_it_is_entered(self) -> None:
        once, often = Experience(), Experience()
        for number, (rate, wall_s) in enumerate(((320.0, 6.4), (32.0, 10.0), (64.0, 8.0))):
            found = Trial(number=number, config=BASELINE, result=trial(BASELINE, wall_s, rate=rate))
            once.learn(found)
            for _ in range(3):
                often.learn(found)
        assert often.costs.line == once.costs.line and once.costs.line[0] > 0

    def test_a_failure_rules_out_unless_it_is_transient(self) -> None:
        large = {**BASELINE, "batch_size": 64}
        experience = Experience()
        failed = TrialResult(launch="x", status=TrialStatus.OOM)
        experience.learn(Trial(number=0, config={}, result=failed))
        experience.learn(Trial(number=1, config=large, result=failed.model_copy(update={"transient": True})))
        assert not experience.lessons.rule_out(large)
        experience.learn(Trial(number=2, config=large, result=failed))
        assert experience.lessons.rule_out(large) and not experience.lessons.rule_out(BASELINE)


class TestOffers:
    def test_a_small_space_is_offered_as_a_whole(self) -> None:
        space = cpu_space(num_workers=choices(0, 2), batch_size=choices(32, 64))
        offers = Offers(space, RateModel(space), 0)
        assert {key(c) for c in offers.pool.configs} == {key(c) for c in space.grid()} and offers.whole

    def test_in_a_large_space_candidates_near_the_best_are_added(self) -> None:
        space = cpu_space(**{f"workload.k{i}": choices(0, 1, 2) for i in range(3)})
        centre = {**BASELINE, **{f"workload.k{i}": 0 for i in range(3)}}
        offers = Offers(space, RateModel(space), 0)
        assert len(offers) == POOL and not offers.whole
        offers.surround([centre], set(), Lessons())
        known = {key(c) for c in offers.pool.configs}
        assert {key(c) for c in neighbours(space, centre)} <= known
        assert len(offers.open) == len(offers) == len(known)

    def test_offers_do_not_depend_on_the_history_of_the_search(self) -> None:
        space = cpu_space(**{f"workload.k{i}": choices(0, 1, 2) for i in range(3)})
        elsewhere = {**BASELINE, **{f"workload.k{i}": 2 for i in range(3)}, "num_workers": 0}
        centre = {**BASELINE, **{f"workload.k{i}": 0 for i in range(3)}}
        tried = {key(neighbours(space, centre)[0])}
        straight, roundabout = Offers(space, RateModel(space), 0), Offers(space, RateModel(space), 0)
        roundabout.surround([elsewhere], set(), Lessons())
        for offers in (straight, roundabout):
            offers.surround([centre], tried, Lessons())
        assert straight.pool.configs == roundabout.pool.configs
        assert (straight.open == roundabout.open).all() and not straight.open.all()

    def test_neighbours_differ_in_one_knob_and_are_legal(self) -> None:
        space = cpu_space()
        found = neighbours(space, BASELINE)
        assert len({key(c) for c in found}) == len(found)
        for config in found:
            assert space.refusal(config) is None
            changed = {n for n in config.keys() | BASELINE.keys() if config.get(n) != BASELINE.get(n)}
            assert len(changed - {"prefetch_factor", "persistent_workers"}) == 1


class TestRanking:
    def test_of_equals_the_simplest_comes_first(self) -> None:
        """Workers that a training does not wait for gain a hair, and cost memory and processes."""
        space = cpu_space()
        model = RateModel(space)
        working = {**BASELINE, "num_workers": 4, "prefetch_factor": 2, "persistent_workers": False}
        fast = {**BASELINE, "precision": "bf16"}
        for config, rate in ((BASELINE, 100.0), (fast, 150.0), ({**working, "precision": "bf16"}, 150.3)):
            model.add(Observation(config, math.log(rate), math.log(1.003 * rate), math.log(100_000.0)))
        found = model.fit(0.05)
        assert found.ranking([0, 1, 2], BASELINE, 0.005) == [1, 2, 0]
        assert found.ranking([0, 1, 2], BASELINE, 0.0)[-1] == 0
