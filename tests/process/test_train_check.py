"""Real launches of correct trainings, and of fast but wrong ones, judged as in a search."""

import os
from pathlib import Path

import pytest
import torch

from autotune.base.errors import MachineError
from autotune.base.records import CheckPlan, LaunchKind, TrialStatus
from autotune.search.proof.train_check import judge

BF16 = {"precision": "bf16"}
CHANNELS_LAST = {"memory_format": "channels_last"}


@pytest.fixture
def launch(launched, tmp_path):
    """``launch(file, config, reference=…, seed=…, **args)``: the result of one launch of the check."""
    count = 0

    def run(file, config=None, *, reference=False, seed=0, steps=24, image_size=None, **args):
        nonlocal count
        count += 1
        plan = CheckPlan(store=str(tmp_path / "store"), steps=steps, reference=reference, seed=seed)
        spec = {"kind": LaunchKind.TRAIN_CHECK, "check": plan, "image_size": image_size, "batch_size": 16}
        return launched(file, config, args, folder=f"check-{count}", status=None, **spec)[0]

    return run


@pytest.fixture
def check(launch):
    """``check(…)``: the same for a launch that must complete."""

    def run(*args, **options):
        result = launch(*args, **options)
        assert result.status is TrialStatus.COMPLETE, result.cause
        return result.check

    return run


@pytest.fixture
def verdicts(check):
    """``verdicts(file, configs, **args)``: verdicts against three reference runs of the same workload."""

    def run(file, configs, **args):
        references = [check(file, reference=True, seed=seed, **args) for seed in range(3)]
        return [judge(check(file, config, **args), references) for config in configs]

    return run


def test_right_trainings_pass_in_every_precision_and_layout(verdicts):
    for found in verdicts("nan_under_bf16.py", [BF16, {"optimizer_impl": "fused"}], flaw="no"):
        assert found.passed is True and found.reason is None
        assert found.distance < found.tolerance / 3


def test_a_loss_that_is_no_number_under_bf16_fails(verdicts):
    [fp32, bf16] = verdicts("nan_under_bf16.py", [{}, BF16])
    assert fp32.passed is True
    assert bf16.passed is False
    assert bf16.reason == "the loss became infinite or no number at step 1"


def test_a_loss_that_is_no_number_later_fails_as_well(verdicts):
    [bf16] = verdicts("nan_under_bf16.py", [BF16], after=10)
    assert bf16.passed is False
    assert bf16.reason == "the loss became infinite or no number at step 11"


def test_a_training_that_learns_nothing_under_channels_last_fails(verdicts):
    wrong, both, right = verdicts(
        "scrambled_by_channels_last.py", [CHANNELS_LAST, {**CHANNELS_LAST, **BF16}, BF16], image_size=24
    )
    assert wrong.passed is False and "does not fall" in wrong.reason
    assert both.passed is False
    assert right.passed is True


def test_its_healthy_twin_passes_under_channels_last(verdicts):
    [right] = verdicts("scrambled_by_channels_last.py", [{**CHANNELS_LAST, **BF16}], image_size=24, flaw="no")
    assert right.passed is True and right.distance < right.tolerance / 3


def test_all_begin_with_the_same_weights_batches_and_dropout(check):
    reference = check("checked.py", reference=True)
    assert check("checked.py").losses == reference.losses
    assert check("checked.py", reference=True, seed=1).losses[0] != reference.losses[0]
    assert len(reference.losses) == 24 and reference.finite
    assert reference.changed == 1.0 and reference.scaler_skips == 0


def test_repeated_references_begin_where_the_others_did(check, tmp_path):
    first = check("checked.py", reference=True)
    [saved] = (tmp_path / "store").iterdir()
    inode = saved.stat().st_ino
    assert check("checked.py", reference=True).losses == first.losses
    assert [p.stat().st_ino for p in (tmp_path / "store").iterdir()] == [inode]


def test_the_saved_batches_stay_as_they_are(check):
    """The loss function clears each batch after use. The weights do not change, so all passes are equal."""
    losses = check("checked.py", reference=True, lr=0, dropout=0, steps=8).losses
    assert losses[:4] == losses[4:]
    assert len({*losses}) == 4


def test_a_loss_that_is_not_finite_ends_the_check_and_is_its_answer(check):
    check("checked.py", reference=True)
    found = check("checked.py", nan_at=4)
    assert not found.finite and len(found.losses) == 3


def test_tensors_that_stay_as_they_are_are_noticed(check):
    check("checked.py", reference=True)
    assert check("checked.py", frozen=1).changed == 0.75
    assert check("checked.py", lr=0).changed == 0.0


def test_steps_that_gradscaler_leaves_out_are_taken_again(check):
    """A loss scaled by 200 overflows fp16 at GradScaler's initial scale, and at some scales after it."""
    reference = check("checked.py", reference=True, loss_scale=200, lr=0.001)
    found = check("checked.py", {"precision": "fp16"}, loss_scale=200, lr=0.001)
    assert found.scaler_skips >= 3
    assert len(found.losses) == 24
    assert found.losses[0] == pytest.approx(reference.losses[0], rel=0.3)
    assert found.changed == 1.0


def test_nothing_saved_to_begin_with_is_said(launch, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".tmp-half").write_bytes(b"half a store")
    result = launch("checked.py")
    assert result.status is TrialStatus.USER_ERROR
    assert "no weights and batches" in result.cause and result.error_code == 70


@pytest.mark.parametrize("how", ["of another user", "a symbolic link", "a second name"])
def test_a_start_that_the_study_has_not_written_is_not_loaded(launch, tmp_path, how):
    if how == "of another user" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    made, elsewhere, start = tmp_path / "made", tmp_path / "downloaded", tmp_path / "store" / "start.pt"

    class Code:
        def __reduce__(self):
            return (open, (str(made), "w"))

    start.parent.mkdir()
    torch.save({"weights": {}, "batches": [Code()]}, elsewhere)
    if how == "a symbolic link":
        start.symlink_to(elsewhere)
    else:
        start.hardlink_to(elsewhere)
    if how == "of another user":
        elsewhere.unlink()
        os.chown(start, 12345, 12345)
    result = launch("checked.py", reference=True)
    assert result.error_code == MachineError.exit_code, result.cause
    assert f"{start}, which checks start from, was not written by this study: it " in result.cause
    assert not made.exists()


def test_weights_of_another_shape_are_said(launch):
    assert launch("checked.py", reference=True).status is TrialStatus.COMPLETE
    result = launch("checked.py", {"workload.width": 32})
    assert result.status is TrialStatus.USER_ERROR
    assert "other weights" in result.cause and "changes_maths=True" in result.advice


def test_a_check_goes_through_the_phases_of_a_training(launch):
    result = launch("checked.py", reference=True)
    assert list(result.phase_s) == ["load", "build", "compile", "measure"]
    assert result.measurement is None and Path(result.launch).name == "check-1"


def test_a_configuration_whose_loss_is_right_and_whose_metric_is_not_fails(verdicts):
    fp32, bf16 = verdicts("measured.py", [{}, BF16], flaw="evaluation")
    assert fp32.passed is True
    assert bf16.passed is False and "its losses are as they should be, and its metric is" in bf16.reason
    assert bf16.distance < bf16.tolerance


def test_its_healthy_twin_passes(verdicts):
    [bf16] = verdicts("measured.py", [BF16])
    assert bf16.passed is True


@pytest.mark.parametrize(
    ("flaw", "what"), [("always nan", "returned nan after 24 steps"), ("text", "must return a number, not str")]
)
def test_a_metric_that_is_no_number_is_told(launch, flaw, what):
    result = launch("measured.py", reference=True, flaw=flaw)
    assert result.status is TrialStatus.USER_ERROR
    assert f"metric(ctx, model) {what}" in result.cause


def test_a_helper_called_metric_does_not_turn_the_check_off(check):
    found = check("measured.py", reference=True, flaw="raises", steps=8)
    assert len(found.losses) == 8 and found.metric is None
    assert found.metric_lacks == "metric(ctx, model) raised KeyError: 'target'"


def test_a_batch_in_parts_trains_as_in_one_piece(verdicts):
    [parts] = verdicts("measured.py", [{"gradient_accumulation": 4}])
    assert parts.passed is True and parts.distance < 1e-3
