"""Heats: configurations that train in turns in one real child, with faults in any of them."""

import json
from pathlib import Path

import pytest

from autotune.base.records import HeatPlan, LaunchKind, MeasurePlan, PhaseLimits, TrialStatus
from autotune.launcher import ProcessLauncher
from autotune.workload.catalog import find_workload
from tests.support import PLAIN, make_spec, run_heat

BASE = {**PLAIN, "batch_size": 8, "optimizer_impl": "for-loop", "intra_op_threads": 1}
SIZES = (8, 12, 16, 20)


class Launches:
    """Runs the launches of heats as a study does, with nothing stored."""

    def __init__(self, launcher: ProcessLauncher, folder: Path, workload, **changes) -> None:
        self.launcher, self.folder, self.workload, self.changes = launcher, folder, workload, changes
        self.results = []

    def launch(self, number, plan):
        spec = make_spec(
            self.folder / f"heat-{number}",
            kind=LaunchKind.HEAT,
            workload=self.workload,
            config=plan.entrants[0],
            batch_size=8,
            heat=plan,
            plan=MeasurePlan(),
            **self.changes,
        )
        self.results.append(self.launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False))
        return self.results[-1]


@pytest.fixture
def heats(process_launcher, workloads, tmp_path):
    """``heats(entrants, plan changes, spec changes, **args)``: the entrants' rows, and the launches that it took."""

    def run(entrants, plan=None, spec=None, file="turns.py", **args):
        workload = find_workload(str(workloads / file), {name: str(value) for name, value in args.items()})
        launches = Launches(process_launcher, tmp_path, workload, **(spec or {}))
        quick = {"turn_s": 0.01, "max_rounds": 3, "settled": 1e-9, "max_s": 60.0}
        heat = HeatPlan(entrants=tuple(entrants), **{**quick, **(plan or {})})
        return run_heat(launches.launch, heat).entrants, launches

    return run


def sizes(*, reference=8):
    """The base with each batch size, one of them as the reference."""
    return [{**BASE, "batch_size": size} for size in sorted(SIZES, key=lambda size: size != reference)]


def said(folder):
    return [json.loads(line) for line in (folder / "stdout.log").read_text().splitlines() if line.startswith("{")]


def test_every_switch_is_flipped_at_every_turn(heats, tmp_path):
    changes = [
        {},
        {"precision": "bf16"},
        {"memory_format": "channels_last"},
        {"optimizer_impl": "foreach"},
        {"optimizer_impl": "fused", "memory_format": "channels_last", "precision": "bf16", "intra_op_threads": 2},
        {"intra_op_threads": 2},
    ]
    # The batch size tells whose step it is.
    entrants = [{**BASE, **change, "batch_size": 8 + 2 * i} for i, change in enumerate(changes)]
    rows, launches = heats(entrants, {"max_rounds": 4, "min_rounds": 4})
    assert launches.results[0].status is TrialStatus.COMPLETE, launches.results[0].cause
    assert {row.status for row in rows} <= {TrialStatus.COMPLETE, TrialStatus.PRUNED}
    assert rows[0].ratio == 1.0 and len(rows[0].turns) >= 2
    by_size = {int(e["batch_size"]): e for e in entrants}
    steps = said(tmp_path / "heat-1")
    assert {s["batch_size"] for s in steps} == set(by_size)
    weights = {round(s["weight"], 4) for s in steps}
    assert len(weights) == 1, "the weights stay as they are"
    for step in steps:
        config = by_size[step["batch_size"]]
        last = config["memory_format"] == "channels_last"
        assert step["samples"] == step["batch_size"] and not step["gradients"] and not step["compiled"]
        assert step["threads"] == config["intra_op_threads"]
        assert step["autocast"] == (config["precision"] == "bf16")
        assert step["channels_last"] == step["input_channels_last"] == last
        assert set(step["moments_channels_last"]) <= {last}
        assert (step["foreach"], step["fused"]) == tuple(config["optimizer_impl"] == i for i in ("foreach", "fused"))


def test_what_the_workload_sets_itself_is_in_force_for_all_who_set_nothing_else(heats, tmp_path):
    """As in their trials. The first one's TF32 is nobody else's, nor are the threads that the last one has."""
    plain = {"precision": "fp32", "batch_size": 12, "num_workers": 0}
    tf32, threads = {**plain, "precision": "tf32", "batch_size": 8}, {**plain, "intra_op_threads": 1, "batch_size": 16}
    _, launches = heats([tf32, plain, threads], {"all_rounds": True, "min_rounds": 4}, file="settled_itself.py")
    assert launches.results[0].status is TrialStatus.COMPLETE, launches.results[0].cause
    seen = {(s["batch_size"], s["products"], s["threads"]) for s in said(tmp_path / "heat-1")}
    assert seen == {(8, "high", 3), (12, "medium", 3), (16, "medium", 1)}


def test_it_ends_where_more_rounds_are_not_worth_their_seconds(heats):
    # What a second is worth elsewhere: everything.
    rows, launches = heats([BASE, BASE, BASE], {"settled": 1e-9, "max_rounds": 30, "least_per_s": 1e3})
    # Of equals, too, one may seem to be certainly behind.
    if not any(row.status is TrialStatus.PRUNED for row in rows):
        assert launches.results[0].heat.ended == "more rounds are not worth their seconds"
    assert len(rows[0].turns) <= HeatPlan(entrants=(BASE, BASE)).min_rounds


def test_whose_turn_did_not_come_was_only_interrupted(heats):
    rows, launches = heats([BASE] * 4, {"wall_s": 1e-3})
    assert launches.results[0].status is TrialStatus.COMPLETE and any(rows[0].turns)
    assert [row.status for row in rows] == [TrialStatus.COMPLETE] + [TrialStatus.INTERRUPTED] * 3
    assert all(row.ratio is None and "had a turn" in row.cause for row in rows[1:])


@pytest.mark.parametrize(("at", "step"), [(8, 1), (12, 2), (20, 1)], ids=["reference", "middle", "last"])
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("raises", TrialStatus.USER_ERROR),
        ("nan", TrialStatus.DIVERGED),
        ("SIGSEGV", TrialStatus.CRASHED),
        ("exits", TrialStatus.CRASHED),
    ],
)
def test_what_goes_wrong_is_charged_to_who_did_it_and_the_others_are_measured(heats, tmp_path, fault, status, at, step):
    rows, launches = heats(sizes(), {"max_rounds": 4, "min_rounds": 4}, fault=fault, at=at, step=step)
    assert [row.config["batch_size"] for row in rows] == list(SIZES)
    guilty = next(row for row in rows if row.config["batch_size"] == at)
    assert guilty.status is status and guilty.cause, (guilty, launches.results[-1].cause)
    others = [row for row in rows if row is not guilty]
    assert {row.status for row in others} <= {TrialStatus.COMPLETE, TrialStatus.PRUNED}
    assert all(any(row.turns) and row.ratio is not None for row in others)
    in_process = fault in ("raises", "nan") and at != 8
    assert len(launches.results) == (1 if in_process else 2)
    # A step with gradients that are not finite spoils the weights, and nobody after it sees them.
    assert all(s["finite"] or s["batch_size"] == at for s in said(tmp_path / f"heat-{len(launches.results)}"))


def test_running_out_of_memory_is_charged_to_who_did_it_and_the_others_run_again(heats):
    rows, launches = heats(sizes(), spec={"memory_limit_bytes": 2**30}, fault="oom", at=12)
    assert rows[1].status is TrialStatus.OOM
    assert [(r.status, r.turn) for r in launches.results] == [(TrialStatus.OOM, 1), (TrialStatus.COMPLETE, None)]
    assert all(row.ratio is not None for row in rows if row is not rows[1])


@pytest.mark.parametrize(("limit_bytes", "status"), [(2**29, TrialStatus.COMPLETE), (2**28, TrialStatus.OOM)])
def test_what_others_leave_behind_has_room(heats, limit_bytes, status):
    rows, launches = heats(sizes(), spec={"memory_limit_bytes": limit_bytes}, fault="large", at=12)
    assert launches.results[0].status is status
    assert all(row.ratio is not None for row in rows if row is not rows[1])


@pytest.mark.slow
def test_a_hang_ends_the_launch_and_the_others_run_again(heats):
    limits = PhaseLimits(silence_s=8.0, compile_s=8.0, measure_s=60.0)
    rows, launches = heats(sizes(), spec={"limits": limits}, fault="hangs", at=16, step=2)
    assert rows[2].status in (TrialStatus.HANG, TrialStatus.TIMEOUT)
    assert len(launches.results) == 2 and launches.results[0].turn == 2
    assert all(row.ratio is not None for i, row in enumerate(rows) if i != 2)


def test_who_is_killed_from_outside_is_not_charged(heats, tmp_path):
    rows, launches = heats(sizes(), fault="SIGKILL", at=16, step=2, once=tmp_path / "happened")
    assert [result.status for result in launches.results] == [TrialStatus.KILLED, TrialStatus.COMPLETE]
    assert all(row.ratio is not None for row in rows)


def test_what_cannot_be_switched_is_refused(heats):
    rows, launches = heats([BASE, {**BASE, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}])
    assert {row.status for row in rows} == {TrialStatus.INTERRUPTED}
    assert "num_workers cannot be switched" in launches.results[0].cause


class TestAlone:
    """These have the machine to themselves."""

    def test_the_slower_one_is_known_and_drops_out(self, heats):
        rows, launches = heats(sizes(), {"turn_s": 0.05, "max_rounds": 8}, slow=16)
        slow = next(row for row in rows if row.config["batch_size"] == 16)
        assert slow.status is TrialStatus.PRUNED and "behind" in slow.cause
        assert slow.ratio < 0.8 and slow.ratio_ci95[1] < 1
        assert len([turn for turn in slow.turns if turn]) < len([turn for turn in rows[0].turns if turn]) or (
            launches.results[0].heat.ended == "the best is known"
        )

    @pytest.mark.slow
    def test_a_heat_whose_time_is_up_tells_what_it_knows(self, heats):
        late = {"max_rounds": 1000, "min_rounds": 1000, "max_s": 100.0, "wall_s": 4.0}
        rows, launches = heats([BASE, {**BASE, "batch_size": 16}, BASE, BASE], late, fault="waits", at=16, step=4)
        heat = launches.results[0].heat
        assert heat.ended == "its time is up" and len(launches.results) == 1
        assert {len(row.turns) for row in rows} == {len(rows[0].turns)} and len(rows[0].turns) < 1000
        assert all(row.ratio is not None for row in rows)


def test_a_precision_that_is_refused_is_tried_once(heats, tmp_path):
    lower = {**BASE, "precision": "bf16"}
    refused = [{**lower, **more} for more in ({}, {"memory_format": "channels_last"}, {"optimizer_impl": "fused"})]
    rows, launches = heats([BASE, *refused, {**BASE, "optimizer_impl": "foreach"}], complex=True)
    assert len(launches.results) == 1 and rows[4].ratio is not None
    assert all(row.refuses == "precision" and row.status is TrialStatus.USER_ERROR for row in rows[1:4])
    (cause,) = {row.cause for row in rows[1:4]}
    assert cause.startswith("bf16 is refused: RuntimeError: Expected both inputs to be ") and "turns.py:" in cause
    assert len([step for step in said(tmp_path / "heat-1") if step["autocast"]]) == 1
