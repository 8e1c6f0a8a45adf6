"""The order in which launches read their samples."""

import json

import pytest
import torch

from autotune.base.records import CheckPlan, DataRef, HoldPlan, LaunchKind, MeasurePlan
from autotune.training import step as training
from autotune.workload.catalog import find_workload
from autotune.workload.contract import Context, load

PLAN = MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.01, max_measure_s=1.0)


@pytest.fixture
def first_batch(launched):
    """``first_batch(name, **spec)``: the numbers of the samples in the first batch of a launch of this name."""
    count = 0

    def run(name, **changes):
        nonlocal count
        count += 1
        spec = {"plan": PLAN, "folder": f"{count}/{name}", "launch": name, **changes}
        return launched("numbered.py", **spec)[1].stdout.read_text().splitlines()[0]

    return run


def test_a_launch_reads_on_where_the_one_before_has_ended(first_batch):
    """Otherwise the first one would bring into the page cache what all others read."""
    hold = {"kind": LaunchKind.HOLD, "hold": HoldPlan(min_s=0.0, settled_steps=1)}
    found = [
        first_batch("00000"),
        first_batch("00001", first_sample=8),
        first_batch("00002", first_sample=4096),
        first_batch("00000", seed=1),
        first_batch("hold-00000", first_sample=16, **hold),
    ]
    assert len(set(found)) == len(found)
    one, two, *_, held = (set(json.loads(line)) for line in found)
    assert not one & two and not one & held and not two & held
    assert first_batch("00000") == found[0], "a launch can be repeated"


def test_a_launch_tells_how_many_samples_it_has_read(launched):
    result, _ = launched("numbered.py", {"num_workers": 2, "prefetch_factor": 2}, plan=PLAN)
    steps = result.measurement.warmup_steps + len(result.measurement.step_s)
    # With those that the queue was emptied of, those in it at the end, and those in that of an epoch that was begun to
    # see how long that takes.
    assert 8 * steps <= result.samples_drawn <= 8 * (steps + 3 * 6)


def test_checks_of_the_training_read_the_same_batches(first_batch, tmp_path):
    def check(name):
        plan = CheckPlan(store=str(tmp_path / f"store-{name}"), steps=1, reference=True)
        return first_batch(name, kind=LaunchKind.TRAIN_CHECK, check=plan)

    assert check("check-1") == check("check-2")


def test_a_training_of_the_users_own_reads_by_its_seed_alone(workloads):
    numbers = find_workload(str(workloads / "numbered.py"), {})
    ctx = Context(device="cpu", batch_size=8, image_size=None, seed=5, data=DataRef(kind="none"))
    loader = training.open_loader(load(numbers), ctx, {"batch_size": 8, "num_workers": 0}, worker_start_method="fork")
    plain = torch.utils.data.DataLoader(
        loader.dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(next(iter(loader)), next(iter(plain)))
