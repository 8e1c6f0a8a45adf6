"""Heats of the loader: numbers of workers in turns in one real child, with faults in any of them."""

import pytest

from autotune.base.records import HeatPlan, LaunchKind, TrialStatus
from tests.support import run_heat

BASE = {"precision": "fp32", "compile_mode": "off", "batch_size": 4, "num_workers": 0, "intra_op_threads": 1}


def workers(*counts):
    """The base with each number of workers; the first is the reference."""
    with_any = {"prefetch_factor": 2, "persistent_workers": False}
    return [{**BASE, "num_workers": n, **(with_any if n else {})} for n in counts]


@pytest.fixture
def heats(launched):
    """``heats(entrants, plan changes, **args)``: the heat, and the results of the launches that it took."""

    def run(entrants, plan=None, **args):
        results = []

        def launch(number, plan):
            spec = {"kind": LaunchKind.HEAT, "heat": plan, "folder": f"heat-{number}", "batch_size": 4}
            results.append(launched("waiting.py", plan.entrants[0], args, status=None, **spec)[0])
            return results[-1]

        quick = {"side": "loader", "turn_s": 0.3, "min_rounds": 2, "max_rounds": 2, "settled": 1e-9}
        return run_heat(launch, HeatPlan(entrants=tuple(entrants), **{**quick, **(plan or {})})), results

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "at", "status"),
    [
        ("raises", 0, TrialStatus.USER_ERROR),
        ("raises", 2, TrialStatus.USER_ERROR),
        ("exits", 2, TrialStatus.LOADER_WORKER_DIED),
        ("killed", 3, TrialStatus.LOADER_WORKER_DIED),
    ],
)
def test_what_goes_wrong_is_charged_to_who_did_it_and_the_others_are_measured(heats, fault, at, status):
    heat, results = heats(workers(0, 2, 3), fault=fault, at=at, wait_ms=1)
    guilty = next(row for row in heat.entrants if row.config["num_workers"] == at)
    assert guilty.status is status and guilty.cause, guilty
    others = [row for row in heat.entrants if row is not guilty]
    assert {row.status for row in others} <= {TrialStatus.COMPLETE, TrialStatus.PRUNED}
    assert all(row.ratio is not None for row in others)
    assert len(results) == 2


def test_entrants_that_differ_in_more_than_their_loaders_are_refused(heats):
    _, results = heats([*workers(0), {**workers(2)[0], "batch_size": 8}, {**BASE, "precision": "bf16"}])
    assert results[0].status is TrialStatus.USER_ERROR and "more than their loaders" in results[0].cause


@pytest.mark.slow
def test_batches_may_lie_in_slots(heats):
    """Which has no effect on small ones that are waited for, and changes none of them."""
    slots = {**workers(2)[0], "batch_memory": "slots"}
    heat, results = heats([*workers(0, 2), slots], wait_ms=1)
    assert [row.status for row in heat.entrants] == [TrialStatus.COMPLETE] * 3 and len(results) == 1
    assert heat.entrants[2].config["batch_memory"] == "slots" and heat.entrants[2].ratio > 1


class TestAlone:
    """These have the machine to themselves."""

    @pytest.mark.slow
    def test_workers_that_wait_side_by_side_deliver_in_proportion_to_their_number(self, heats):
        """Nothing is built and nothing trained: the workload's model would raise."""
        heat, results = heats(workers(1, 2, 4, 8), {"max_rounds": 3}, wait_ms=10)
        assert [r.status for r in results] == [TrialStatus.COMPLETE] and heat.side == "loader"
        ratios = [row.ratio for row in heat.entrants]
        assert ratios == sorted(ratios) and ratios[0] == 1.0
        assert ratios[1] == pytest.approx(2, rel=0.3) and ratios[3] > 3.5
        assert all(row.first_step_s is None and row.peak_bytes is None for row in heat.entrants)
        # Each turn counts equally many batches of each worker.
        for row in heat.entrants:
            assert all(turn.steps % row.config["num_workers"] == 0 for turn in row.turns if turn)
        # Starting the workers and using up their queue is not counted.
        assert heat.switch_s > 0 and all(
            turn.samples == 4 * turn.steps for row in heat.entrants for turn in row.turns if turn
        )
