"""Judging training and holding, on curves for which the correct verdict is known."""

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.records import Hold, TrainCheck, TrainVerdict
from autotune.search.proof.ceilings import held
from autotune.search.proof.train_check import Judgement, covers, is_told_by, judge
from autotune.space import maths_part

STEPS = 24
GIB = 2**30


def check(losses, *, finite=True, changed=1.0, scaler_skips=0):
    return TrainCheck(losses=tuple(losses), finite=finite, changed=changed, scaler_skips=scaler_skips)


def curve(start=2.3, end=1.4, *, noise=0.0, seed=0, steps=STEPS):
    """Make a loss that falls linearly from ``start`` to ``end``, with some noise."""
    draw = random.Random(seed)
    return [start + (end - start) * i / (steps - 1) + draw.gauss(0, noise) for i in range(steps)]


def references(start=2.3, end=1.4, *, scatter=0.05, noise=0.01):
    return [
        check(curve(start, end, noise=noise, seed=1)),
        check(curve(start + scatter, end + scatter, noise=noise, seed=2)),
        check(curve(start - scatter, end - scatter, noise=noise, seed=3)),
    ]


class TestPasses:
    def test_beside_a_single_run_as_it_is_the_same(self):
        found = judge(check(curve(2.3, 1.41)), references()[:1])
        assert found.passed is True and 0 < found.distance < found.tolerance

    def test_the_same_curve(self):
        found = judge(references()[0], references())
        assert found == Judgement(True, None, found.tolerance, 0.0)
        assert found.tolerance > 0

    @given(st.integers(0, 1000), st.sampled_from([0.5, 1.0, 1.4, 2.25]))
    def test_a_curve_within_rounding_of_it(self, seed, end):
        """bf16 has 8 significant bits."""
        draw = random.Random(seed)
        rounded = [loss * (1 + draw.uniform(-(2**-8), 2**-8)) for loss in references(end=end)[0].losses]
        assert judge(check(rounded), references(end=end)).passed is True

    def test_a_curve_as_far_away_as_other_seeds(self):
        assert judge(check(curve(2.37, 1.47, noise=0.01)), references(scatter=0.1)).passed is True
        assert judge(check(curve(2.8, 1.9, noise=0.01)), references(scatter=0.1)).passed is False

    def test_negative_curves(self):
        likelihoods = references(-1.0, -2.0)
        assert judge(likelihoods[0], likelihoods).passed is True
        assert judge(check(curve(-1.0, -1.0)), likelihoods).passed is False

    def test_a_loss_that_hardly_falls_in_few_steps(self):
        slow = references(2.3, 2.29)
        assert judge(check(curve(2.3, 2.3, noise=0.01, seed=9)), slow).passed is True

    def test_noise_from_dropout_in_another_kernel(self):
        noisy = references(2.3, 2.2, scatter=0.02, noise=0.15)
        assert all(judge(check(curve(2.3, 2.2, noise=0.15, seed=s)), noisy).passed for s in range(10, 60))

    def test_nothing_falls_where_eager_fp32_does_not(self):
        """Recorded: ResNet-50 at its usual learning rate, batch 32, and the same in bf16."""
        eager = [6.836, 6.511, 4.488, 5.994, 6.046, 9.166, 9.000, 7.351, 7.417]
        bf16 = [6.829, 6.428, 4.616, 6.115, 6.497, 10.195, 9.310, 8.430, 8.677]
        other_seed = [6.9, 6.4, 5.0, 5.6, 6.9, 8.2, 9.3, 8.0, 7.2]
        assert judge(check(bf16), [check(eager), check(other_seed)]).passed is True

    def test_a_first_loss_after_skipped_scaler_steps(self):
        assert judge(check(references()[0].losses, scaler_skips=6), references()).passed is True


class TestFails:
    def test_a_loss_that_is_nan(self):
        found = judge(check([2.3, 2.2], finite=False), references())
        assert (found.passed, found.reason) == (False, "the loss became infinite or no number at step 3")
        assert found.tolerance is not None and found.distance is not None

    def test_a_loss_that_is_nan_from_the_start(self):
        found = judge(check([], finite=False), references())
        assert found.passed is False and found.distance is None
        assert found.reason.endswith("at step 1")

    def test_a_constant_loss(self):
        found = judge(check(curve(2.3, 2.29)), references())
        assert found.passed is False
        assert found.reason.startswith("its loss does not fall as it should: 2.299 → 2.291")
        assert "where eager fp32 went 2.2" in found.reason

    def test_a_rising_loss(self):
        assert judge(check(curve(2.3, 3.2)), references()).passed is False

    def test_a_doubled_loss(self):
        found = judge(check([2 * loss for loss in references()[0].losses]), references())
        assert found.passed is False
        assert found.reason.startswith("its first loss is 4.6") and "eager fp32 has 2.3" in found.reason

    def test_a_loss_that_falls_too_little(self):
        found = judge(check(curve(2.3, 2.0)), references())
        assert found.passed is False and "does not fall as it should" in found.reason

    def test_a_curve_with_another_shape(self):
        dip = [loss - (0.9 if 4 <= i < 20 else 0.0) for i, loss in enumerate(references()[0].losses)]
        found = judge(check(dip), references())
        assert found.passed is False
        assert "% off eager fp32's from the same weights" in found.reason
        assert found.distance > found.tolerance

    def test_unchanged_parameters(self):
        found = judge(check(references()[0].losses, changed=0.0), references())
        assert (found.passed, found.reason) == (False, "no parameter changed")

    def test_some_unchanged_parameters(self):
        found = judge(check(references()[0].losses, changed=0.5), references())
        assert found.passed is False
        assert found.reason == "only 50 % of the trainable tensors changed, in eager fp32 100 %"

    def test_a_scaler_that_never_finds_a_scale(self):
        found = judge(check(references()[0].losses, scaler_skips=7), references())
        assert found.passed is False
        assert found.reason == "GradScaler left out 7 of 31 steps because of overflows"
        assert judge(check([], scaler_skips=24), references()).passed is False


class TestCannotBeSaid:
    @pytest.mark.parametrize(
        ("spoilt", "why"),
        [
            (check([2.3], finite=False), "no number at step 2"),
            (check(curve(), changed=0.0), "changes no parameter"),
            (check(curve(2.3, 500.0)), "diverges on the saved batches"),
        ],
    )
    @pytest.mark.parametrize("which", [0, 2])
    def test_if_eager_fp32_itself_fails(self, spoilt, why, which):
        runs = references()
        runs[which] = spoilt
        found = judge(references()[0], runs)
        assert found.passed is None and found.tolerance is None
        assert "eager fp32 itself" in found.reason and why in found.reason

    @pytest.mark.parametrize("other", [check(curve(2.8, 1.9)), check(curve(2.3, 2.29)), check(curve(), changed=0.5)])
    def test_if_nothing_shows_the_scatter(self, other):
        found = judge(other, references()[:1])
        assert found.passed is None and "one run of eager fp32 only" in found.reason

    @pytest.mark.parametrize(
        "broken", [check([2.3], finite=False), check([], scaler_skips=24), check(curve(), changed=0)]
    )
    def test_not_if_it_is_broken(self, broken):
        assert judge(broken, references()[:1]).passed is False

    def test_tensors_that_change_in_only_some_references_are_not_required(self):
        runs = references()
        runs[1] = check(runs[1].losses, changed=0.9)
        assert judge(check(runs[0].losses, changed=0.95), runs).passed is True

    def test_missing_references_raise(self):
        with pytest.raises(ValueError, match="reference"):
            judge(check(curve()), [])

    def test_curves_of_different_lengths_raise(self):
        with pytest.raises(ValueError, match="number of steps"):
            judge(check(curve(steps=12)), references())


@given(
    st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.floats(0.5, 1.0)), min_size=3, max_size=3),
    st.tuples(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1), st.floats(0.5, 1.0)),
    st.floats(0.0, 0.5),
    st.one_of(st.none(), st.lists(st.sampled_from([0.0, 0.5, 0.52, 0.9]), min_size=4, max_size=4)),
)
def test_what_passes_beside_the_first_reference_passes_beside_all(ends, apart, off, noise, metrics):
    """Each further reference only widens what is accepted, or shows that none can serve as a yardstick."""
    start, end = ends
    runs = [check(curve(start + a, end + b, noise=noise, seed=i), changed=c) for i, (a, b, c) in enumerate(apart)]
    (a, b, _), (da, db, changed) = apart[0], off
    candidate = check(curve(start + a + da, end + b + db, noise=noise, seed=0), changed=changed)
    if metrics is not None:
        candidate, *runs = [
            one.model_copy(update={"metric": metric}) for one, metric in zip([candidate, *runs], metrics, strict=True)
        ]
    alone, whole = judge(candidate, runs[:1]), judge(candidate, runs)
    if alone.passed is not None:
        assert whole.passed is alone.passed or "eager fp32 itself" in whole.reason


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=STEPS, max_size=STEPS),
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=STEPS, max_size=STEPS), min_size=2, max_size=4),
)
def test_there_is_a_reason_unless_it_passed(losses, others):
    found = judge(check(losses), [check(other) for other in others])
    assert (found.reason is None) == (found.passed is True)
    assert found.tolerance is None or math.isfinite(found.tolerance)


def memory(**changes):
    fields = {"steps": 50, "seconds": 6.0, "settled": True, "peak_bytes": 9 * GIB, "capacity_bytes": 10 * GIB}
    return Hold(**{**fields, **changes})


class TestHeld:
    def test_enough_free_memory_holds(self):
        assert held(memory(), 0.08) is None
        assert held(memory(alloc_retries=0), 0.08) is None

    def test_too_little_free_memory_does_not_hold(self):
        assert held(memory(), 0.2) == "it leaves 10.0 % of 10.0 GiB free, and 20 % is wanted"

    def test_an_allocator_retry_does_not_hold(self):
        assert "num_alloc_retries" in held(memory(alloc_retries=2), 0.08)

    def test_memory_that_never_settled_does_not_hold(self):
        assert held(memory(settled=False), 0.08) == "its memory was still growing after 6 s (50 steps)"


CONFIG = {
    "precision": "bf16",
    "compile_mode": "default",
    "batch_size": 64,
    "memory_format": "channels_last",
    "num_workers": 4,
    "prefetch_factor": 2,
    "pin_memory": True,
    "persistent_workers": True,
    "cudnn_benchmark": True,
    "optimizer_impl": "fused",
    "intra_op_threads": 2,
    "alloc_conf": "default",
    "workload.width": 16,
}


class TestMathsKey:
    def test_knobs_that_determine_the_losses_are_included(self):
        assert maths_part(CONFIG) == {
            "precision": "bf16",
            "compile_mode": "default",
            "memory_format": "channels_last",
            "cudnn_benchmark": True,
            "optimizer_impl": "fused",
            "workload.width": 16,
        }

    @pytest.mark.parametrize(("knob", "value"), [("num_workers", 0), ("batch_size", 8), ("intra_op_threads", 1)])
    def test_finalists_that_differ_in_the_loader_share_a_check(self, knob, value):
        assert maths_part({**CONFIG, knob: value}) == maths_part(CONFIG)

    @pytest.mark.parametrize(("knob", "value"), [("precision", "fp32"), ("workload.width", 32)])
    def test_finalists_that_differ_in_other_knobs_do_not(self, knob, value):
        assert maths_part({**CONFIG, knob: value}) != maths_part(CONFIG)


def scored(metric, losses=None):
    return check(losses or curve()).model_copy(update={"metric": metric})


YARDSTICK = [r.model_copy(update={"metric": m}) for r, m in zip(references(), (0.70, 0.66, 0.72), strict=True)]


class TestMetric:
    @pytest.mark.parametrize("metric", [0.70, 0.62, 0.78])
    def test_one_within_what_seeds_do_passes(self, metric):
        assert judge(scored(metric), YARDSTICK).passed is True

    @pytest.mark.parametrize("metric", [0.1, 0.95])
    def test_one_beyond_fails_although_the_losses_agree(self, metric):
        found = judge(scored(metric), YARDSTICK)
        assert found.passed is False
        assert found.reason.startswith("its losses are as they should be, and its metric is") and "0.7 " in found.reason

    def test_a_wrong_loss_is_what_is_told(self):
        assert "metric" not in judge(scored(0.1, curve(2.3, 2.3)), YARDSTICK).reason

    @pytest.mark.parametrize("metric", [0.0, 0.1])
    def test_one_that_is_the_same_for_each_seed_says_nothing(self, metric):
        same = [r.model_copy(update={"metric": metric}) for r in references()]
        assert judge(scored(metric + 0.02), same).passed is True

    def test_a_workload_without_one_is_judged_by_its_losses(self):
        assert judge(scored(None), references()).passed is True


@pytest.mark.parametrize("by_command", [False, True])
def test_a_verdict_is_on_what_trains_as_it_was_checked(by_command):
    """A winner without one of its knobs has its trial's number."""
    baseline = {"precision": "fp32", "compile_mode": "off", "batch_size": 32, "num_workers": 0}
    trained = {**baseline, "precision": "bf16", "compile_mode": "default", "batch_size": 64, "num_workers": 4}
    context = SimpleNamespace(space=SimpleNamespace(baseline=baseline), by_command=by_command)

    def entrant(number=4, **changes):
        return SimpleNamespace(config={**trained, **changes}, trial=SimpleNamespace(number=number))

    verdict = TrainVerdict(trials=(4,), config={**trained, "batch_size": 32, "num_workers": 0}, passed=True)
    assert covers(verdict, entrant()) and covers(verdict, entrant(batch_size=32, num_workers=0))
    assert not covers(verdict, entrant(number=5)) and not covers(verdict, entrant(precision="fp32"))
    assert not covers(verdict, entrant(compile_mode="off"))
    eager = verdict.model_copy(update={"config": {**verdict.config, "compile_mode": "off"}})
    assert covers(eager, entrant()) and covers(eager, entrant(compile_mode="off"))
    assert is_told_by(context, verdict, entrant())
