"""Real launches that train until memory has settled, evaluate, and run the largest sample."""

import json

import pytest

from autotune.base.records import DataRef, HoldPlan, LaunchKind, TrialStatus
from autotune.search.proof.ceilings import held

MIB = 2**20
PLAN = HoldPlan(min_s=0.05, max_s=20.0, settled_steps=20)


@pytest.fixture
def launch(launched):
    """``launch(file, config, plan=…, memory_limit_bytes=…, **args)``: the result, and what the workload recorded."""

    def run(file="growing.py", config=None, *, plan=PLAN, memory_limit_bytes=None, epoch_samples=None, **args):
        data = DataRef(kind="none", epoch_samples=epoch_samples)
        spec = {"kind": LaunchKind.HOLD, "data": data, "memory_limit_bytes": memory_limit_bytes, "hold": plan}
        result, files = launched(file, config, args, batch_size=4, status=None, **spec)
        return result, [json.loads(line) for line in files.stdout.read_text().splitlines()]

    return run


@pytest.fixture
def hold(launch):
    """``hold(…)``: the same for a launch that must complete."""

    def run(*args, **options):
        result, seen = launch(*args, **options)
        assert result.status is TrialStatus.COMPLETE, result.cause
        assert not result.unclean_exit
        return result.hold, seen

    return run


def test_memory_that_has_settled_holds(hold):
    found, seen = hold()
    assert found.settled and found.steps >= 20 and 0.05 <= found.seconds < 20
    assert 0 <= found.peak_bytes < 50 * MIB < found.capacity_bytes
    assert found.alloc_retries is None and found.first_step_bytes is None
    assert held(found, 0.08) is None
    assert found.evaluated == "eval"
    assert len(seen) > 2 and not any(line["training"] or line["bf16"] for line in seen)


def test_it_trains_for_as_long_as_it_is_told_at_least(hold):
    found, _ = hold(plan=PLAN.model_copy(update={"min_s": 1.0}))
    assert found.settled and found.seconds >= 1.0


def test_memory_that_goes_on_growing_never_settles(hold):
    found, _ = hold(plan=PLAN.model_copy(update={"max_s": 0.3}), leak_bytes=2 * MIB)
    assert not found.settled and found.seconds >= 0.3
    assert found.peak_bytes >= (found.steps - 1) * 2 * MIB * 0.9
    assert held(found, 0.0).startswith("its memory was still growing")


def test_steps_too_slow_to_take_many_settle_in_half_of_them(hold):
    endless = PLAN.model_copy(update={"max_s": 0.3, "settled_steps": 10**6})
    assert hold(plan=endless)[0].settled


@pytest.mark.slow
def test_memory_of_the_evaluation_counts(hold):
    found, seen = hold(config={"precision": "bf16"}, pass_bytes=100 * MIB)
    assert all(line["bf16"] for line in seen)
    assert 100 * MIB <= found.peak_bytes < 200 * MIB
    assert held(found, 1 - 90 * MIB / found.capacity_bytes) is not None


def test_a_model_without_losses_in_evaluation_mode_is_evaluated_in_training_mode(hold):
    found, seen = hold(silent="yes")
    assert found.evaluated == "train"
    assert [line["training"] for line in seen][:3] == [False, True, True]
    assert all(line["training"] for line in seen[3:])


def test_the_largest_sample_is_looked_for(hold):
    """One sample in 512 is larger, at an index that is inspected: a batch of it takes 40 MiB, more than any other."""
    found, _ = hold(longest=10 * MIB // 4)
    assert found.largest_bytes == 10 * MIB
    assert found.peak_bytes >= 40 * MIB


def test_what_the_workload_knows_is_used(hold):
    found, seen = hold("growing_and_known.py", {"precision": "bf16"}, longest=5 * MIB // 4, epoch_samples=5000)
    assert found.evaluated == "evaluate"
    passes = [line for line in seen if "bf16" in line]
    assert len(passes) > 2 and all(line["bf16"] and not line["training"] for line in passes)
    assert [line for line in seen if line not in passes] == [{"data set": "Texts"}]
    assert found.largest_bytes == 5 * MIB and found.peak_bytes >= 20 * MIB


def test_samples_of_one_shape_have_no_largest(hold):
    found, _ = hold("nan_under_bf16.py", flaw="no")
    assert found.largest_bytes is None and found.evaluated == "eval"


def test_an_evaluation_that_does_not_fit_is_out_of_memory(launch):
    result, seen = launch(memory_limit_bytes=256 * MIB, pass_bytes=1024 * MIB)
    assert result.status is TrialStatus.OOM and result.hold is None
    assert len(seen) == 1, "it is not tried again in training mode"


def test_a_largest_sample_that_does_not_fit_is_out_of_memory(launch):
    result, _ = launch(memory_limit_bytes=256 * MIB, longest=100 * MIB // 4)
    assert result.status is TrialStatus.OOM


def test_a_memory_limit_is_the_capacity(hold):
    found, _ = hold(memory_limit_bytes=512 * MIB)
    assert found.capacity_bytes == 512 * MIB
    assert found.headroom == 1 - found.peak_bytes / (512 * MIB)


@pytest.mark.parametrize("persistent", [True, False])
def test_it_goes_on_over_the_turns_of_epochs(hold, persistent):
    """Epochs have 8 batches, so there are many epoch turns."""
    found, _ = hold(
        config={"num_workers": 2, "prefetch_factor": 2, "persistent_workers": persistent}, samples=32, longest=300
    )
    assert found.settled and found.largest_bytes == 1200


def test_a_loss_that_is_not_finite_is_reported(launch):
    result, _ = launch("checked.py", nan_at=5)
    assert result.status is TrialStatus.DIVERGED


class TestAlone:
    """These have the machine to themselves."""

    def test_an_evaluation_is_timed_apart(self, hold):
        found, seen = hold()
        assert found.evaluation_per_s > 0 and 0.2 < found.inference_gain < 5
        # Two to see that it fits, and then turns of either mode on one batch.
        assert len(seen) % 2 == 0 and len({tuple(line["shape"]) for line in seen[2:]}) == 1
