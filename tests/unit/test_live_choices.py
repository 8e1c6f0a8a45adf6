"""What is compared while a training goes on."""

import pytest

from autotune.base.records import Heat, HeatEntrant, LiveSpec, TrialStatus, Value, WorkloadRef
from autotune.child.live import changes, other_workers, surest_workers, together
from autotune.space import SpaceRequest, build_space
from tests.support import make_host, make_probe

SPACE = build_space(make_probe(), make_host(cores=8), SpaceRequest())
OWN = dict(SPACE.baseline)


def spec(*allow: str) -> LiveSpec:
    ref = WorkloadRef(name="train", module="")
    return LiveSpec(folder="/studies/live-1", pid=1, words=("python", "train.py"), workload=ref, allow=allow)


def test_what_changes_the_maths_must_be_allowed() -> None:
    found, left_out = changes(SPACE, OWN, "cpu", spec())
    assert all(config["precision"] == OWN["precision"] for config in found)
    assert any("bf16" in words and "--allow precision" in words for words in left_out)
    allowed, _ = changes(SPACE, OWN, "cpu", spec("precision"))
    assert {**OWN, "precision": "bf16"} in allowed


def test_a_script_that_compiles_is_compiled_again_only_where_that_is_affordable() -> None:
    own = {**OWN, "compile_mode": "default"}
    found, left_out = changes(SPACE, own, "cpu", spec())
    assert {name for config in found for name in config if config[name] != own[name]} <= {
        "optimizer_impl",
        "compile_mode",
    }
    assert any("channels_last" in words and "in which nothing trains" in words for words in left_out)
    long, _ = changes(SPACE, own, "cpu", spec().model_copy(update={"expect_s": 8 * 3600.0}))
    assert {**own, "memory_format": "channels_last"} in long


def test_what_gives_nothing_alone_is_tried_beside_the_fastest() -> None:
    bf16, last = {**OWN, "precision": "bf16"}, {**OWN, "memory_format": "channels_last"}
    both = {**bf16, "memory_format": "channels_last"}
    assert together(SPACE, OWN, [bf16], [last]) == [bf16, both]
    assert together(SPACE, OWN, [], [last]) == []
    # Another value of the same knob cannot be added.
    fused, foreach = {**OWN, "optimizer_impl": "fused"}, {**OWN, "optimizer_impl": "foreach"}
    assert together(SPACE, OWN, [fused], [foreach]) == [fused]


@pytest.mark.parametrize(("waits", "most"), [(0.5, 1), (0.8, 4)])
def test_numbers_of_workers_lie_around_what_the_device_needs(waits: float, most: int) -> None:
    counts = [config["num_workers"] for config in other_workers(SPACE, waits, make_host(cores=8))]
    assert most in counts and 0 not in counts and counts == sorted(counts)


def test_what_failed_in_a_worker_may_fail_in_the_next_one() -> None:
    def entrant(workers: int, ratio: float | None) -> HeatEntrant:
        config: dict[str, Value] = {**OWN, "num_workers": workers}
        if ratio is None:
            return HeatEntrant(config=config, status=TrialStatus.CRASHED)
        return HeatEntrant(
            config=config, status=TrialStatus.COMPLETE, ratio=ratio, ratio_ci95=(0.9 * ratio, 1.1 * ratio)
        )

    def best(*entrants: HeatEntrant) -> Value | None:
        heat = Heat(
            entrants=(entrant(0, 1.0), *entrants), noise_sd=0.1, startup_s=0, switch_s=0, measured_s=1, ended="enough"
        )
        found = surest_workers(heat)
        return None if found is None else found.config["num_workers"]

    assert best(entrant(2, 1.5), entrant(4, 2.5), entrant(8, 2.4)) == 4
    assert best(entrant(2, 1.5), entrant(4, None), entrant(8, 2.4)) == 2
    assert best(entrant(2, None), entrant(4, 2.5)) is None
