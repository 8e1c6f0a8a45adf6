"""The report's pictures as numbers, and that there is none where nothing would be seen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import pytest
from matplotlib.figure import Figure

from autotune.base.records import (
    Bottleneck,
    Heat,
    HeatEntrant,
    KnobPart,
    Limit,
    Phase,
    StudyHeat,
    Trial,
    TrialResult,
    TrialStatus,
    Turn,
    Value,
)
from autotune.report import Material, drawing
from autotune.report.drawing import Chart, Intervals, Stacks, Waterfall
from autotune.report.full_report import best_so_far_line, by_merit
from autotune.report.pictures import course, intervals, pictures, rate_by_batch, rate_by_workers, stacks, waterfall
from autotune.space.requirements import Requirements
from tests.support import make_outcome, make_study_spec, make_trial

FOUND = make_outcome()
BASE = FOUND.baseline.config


def trial(number: int, rate: float, **config: Value) -> Trial:
    return make_trial(number, {**BASE, **config}, rate)


def burst(number: int, status: TrialStatus = TrialStatus.OOM, **config: Value) -> Trial:
    result = TrialResult(launch="x", status=status, phase=Phase.WARMUP, cause="no memory", wall_s=3.0)
    return Trial(number=number, config={**BASE, **config}, result=result)


def study(*trials: Trial, **changes: Any) -> Material:
    whole = Material("net-1", "net-1", PurePath("/x"), make_study_spec(), trials, FOUND)
    return replace(whole, **changes)


def heat(side: Any, *entrants: tuple[dict[str, Value], float], after: int = 1) -> StudyHeat:
    made = tuple(
        HeatEntrant(config={**BASE, **config}, turns=(None, Turn(steps=1, samples=64, seconds=64 / rate)), ratio=1.0)
        for config, rate in entrants
    )
    told = Heat(side=side, entrants=made, noise_sd=0.01, startup_s=1, switch_s=0, measured_s=4, ended="done")
    return StudyHeat(number=1, after=after, heat=told, wall_s=20.0)


def chart(picture: Any) -> Chart:
    assert picture is not None and isinstance(picture.plot, Chart)
    return picture.plot


def test_the_waterfall_says_what_no_knob_accounts_for() -> None:
    picture = waterfall(FOUND)
    assert picture is not None and isinstance(picture.plot, Waterfall)
    *known, rest = picture.plot.factors
    assert [factor.factor[0] for factor in known] == [1.62, 1.01] and rest.rest
    assert math.prod(f.factor[0] for f in picture.plot.factors) == pytest.approx(FOUND.best.speedup)
    assert "memory_format not measured apart" in rest.name and "1.62× (1.57–1.67)" in picture.about
    # Gains that build on each other may multiply to more than there is.
    both = tuple(
        KnobPart(knob=name, value=FOUND.best.config[name], baseline_value=BASE[name], gain=(1.8, 1.7, 1.9))
        for name in ("precision", "memory_format")
    )
    much = waterfall(make_outcome(ablation=both))
    assert much is not None and isinstance(much.plot, Waterfall) and much.plot.factors[-1].factor[0] < 1


def test_without_a_gain_or_a_winner_there_is_no_waterfall() -> None:
    assert waterfall(make_outcome(ablation=())) is None
    assert waterfall(make_outcome(best=FOUND.baseline)) is None
    assert waterfall(make_outcome(ablation=FOUND.ablation[2:])) is None


def test_rate_against_batch_joins_only_what_differs_in_nothing_else() -> None:
    same = [
        trial(i, rate, batch_size=b) for i, (b, rate) in enumerate([(8, 40.0), (16, 70.0), (32, 98.0), (64, 100.0)])
    ]
    other = trial(7, 300.0, batch_size=64, precision="bf16")
    picture = rate_by_batch(study(*same, other, burst(9, batch_size=128)))
    found = chart(picture)
    line = [s for s in found.panels[0].series if s.mark == "line"]
    assert [[x for x, _ in s.points] for s in line] == [[8, 16, 32, 64]]
    assert found.here == 32.0, "bf16 at batch 64 is another knob's doing"
    assert found.x.ticks == (8, 16, 32, 64, 128) and found.panels[1].y.title == "peak, GiB"
    (crosses,) = [s for s in found.panels[0].series if s.mark == "crosses"]
    assert [x for x, _ in crosses.points] == [128]
    assert picture is not None and picture.instead is not None
    assert [row[0] for row in picture.instead.rows] == ["8", "16", "32", "64", "128"]
    assert "Out of memory at batch 128." in picture.about and "The knee is at batch 32." in picture.about


def test_a_rate_that_still_rises_has_no_knee_and_one_batch_no_picture() -> None:
    rising = [trial(i, 10.0 * b, batch_size=b) for i, b in enumerate((8, 16, 32))]
    assert chart(rate_by_batch(study(*rising))).here is None
    assert rate_by_batch(study(trial(0, 30.0), trial(1, 60.0, precision="bf16"))) is None
    assert rate_by_batch(study()) is None


def test_the_memory_limit_is_drawn_where_it_is_near_and_told_where_it_is_far() -> None:
    trials = [trial(0, 30.0, batch_size=32), trial(1, 40.0, batch_size=64)]
    measured = trials[0].result.measurement
    assert measured is not None and measured.peak_bytes is not None
    near = study(*trials, spec=make_study_spec(memory_limit_bytes=2 * measured.peak_bytes))
    assert [level.name for level in chart(rate_by_batch(near)).panels[1].levels] == ["the memory limit"]
    far = chart(rate_by_batch(study(*trials, spec=make_study_spec(memory_limit_bytes=100 * measured.peak_bytes))))
    assert far.panels[1].levels == () and "the memory limit, far above these peaks" in far.note


def test_rate_against_workers_has_the_device_s_ceiling() -> None:
    trials = [trial(0, 30.0, num_workers=0), trial(1, 60.0, num_workers=4, prefetch_factor=2)]
    limit = Bottleneck(
        trial=FOUND.best.trial,
        limit=Limit.DEVICE,
        samples_per_s=60.0,
        device_only_per_s=(70.0, 68.0, 72.0),
        sentence="",
    )
    loader = heat("loader", ({"num_workers": 0}, 50.0), ({"num_workers": 8, "prefetch_factor": 2}, 400.0))
    picture = rate_by_workers(study(*trials, heats=[loader], outcome=make_outcome(bottlenecks=(limit,))))
    panel = chart(picture).panels[0]
    assert panel.levels[0].at == (70.0, 68.0, 72.0)
    assert [s.points for s in panel.series if s.mark == "rings"] == [((0, 50.0), (8, 400.0))]
    assert picture is not None and picture.instead is not None
    assert [row[0] for row in picture.instead.rows] == ["0", "4", "8"]
    assert rate_by_workers(study(trial(0, 30.0), trial(1, 60.0, precision="bf16"))) is None


def test_a_ceiling_is_of_the_winners_workers_although_it_keeps_its_trials_number() -> None:
    """Its useless knobs were set back, the number of workers among them."""
    trials = [trial(0, 30.0, num_workers=0), trial(4, 60.0, num_workers=4, prefetch_factor=2)]
    limit = Bottleneck(
        trial=FOUND.best.trial,
        limit=Limit.DEVICE,
        samples_per_s=FOUND.best.samples_per_second,
        loader_only_per_s=(400.0, 390.0, 410.0),
        sentence="",
    )
    assert FOUND.best.config["num_workers"] == 0
    picture = rate_by_workers(study(*trials, outcome=make_outcome(bottlenecks=(limit,))))
    assert [s.points for s in chart(picture).panels[0].series if s.mark == "rings"] == [((0, 400.0),)]


def test_the_search_as_it_went() -> None:
    trials = [trial(0, 30.0), burst(1), trial(2, 60.0), trial(3, 50.0), burst(4, TrialStatus.TIMEOUT)]
    picture = course(study(*trials, heats=[heat("device", ({}, 1.0), ({}, 2.0))]))
    found = chart(picture)
    hand, every, failed = found.panels[0].series
    assert [y for _, y in hand.points] == [30.0, 60.0, 60.0] and [y for _, y in every.points] == [30.0, 60.0, 50.0]
    assert failed.name == "failed: 1 oom · 1 timeout" and len(failed.points) == 2
    (span,) = found.spans
    assert span.begin == trials[0].result.wall_s and span.end - span.begin == 20.0
    total = 20.0 + sum(t.result.wall_s for t in trials)
    assert hand.points[-1][0] == pytest.approx(total)
    assert course(study(trial(0, 30.0))) is None and course(study(burst(0), burst(1))) is None


def test_the_best_in_hand_meets_what_is_required() -> None:
    spec = make_study_spec(require=("throughput<=55",))
    found = chart(course(study(trial(0, 30.0), trial(1, 60.0), trial(2, 50.0), spec=spec)))
    assert [y for _, y in found.panels[0].series[0].points] == [30.0, 50.0, 50.0]
    required = Requirements.parsed(spec.require, spec.goal)
    merit = by_merit([trial(0, 30.0), trial(1, 60.0), trial(2, 50.0)], required)
    assert [t.number for t in merit] == [2, 0, 1]
    line = best_so_far_line([trial(0, 60.0), trial(1, 70.0)], spec)
    assert line == "Nothing that was measured so far meets throughput<=55. Nothing is proven yet."


@pytest.mark.parametrize("scores", [(-100.0, -60.0), (-5.0, 20.0), (5.0, 20.0)])
def test_a_picture_has_its_points_in_it_whatever_their_sign(scores: tuple[float, float]) -> None:
    trials = [trial(number, 30.0).model_copy(update={"score": score}) for number, score in enumerate(scores)]
    panel = chart(course(study(*trials, spec=make_study_spec(objective="mine.py")))).panels[0]
    axes = Figure().subplots()
    drawing._panel(axes, panel)
    low, high = axes.get_ylim()
    assert low <= min(0.0, *scores) and high >= max(0.0, *scores)


def test_finalists_and_seconds() -> None:
    picture = intervals(FOUND, study())
    assert picture is not None and isinstance(picture.plot, Intervals)
    names = [row.name for row in picture.plot.rows]
    assert (
        names[0].startswith("baseline: ") and names[1].startswith("trial 4: ") and names[3].startswith("out, trial 9")
    )
    assert [row.faint for row in picture.plot.rows] == [False, False, False, True]
    spent = stacks(FOUND)
    assert spent is not None and isinstance(spent.plot, Stacks)
    assert sum(sum(values) for _, values in spent.plot.rows) == pytest.approx(598.0)
    assert intervals(make_outcome(best=FOUND.baseline, best_same_batch=FOUND.baseline, finalists=()), study()) is None
    assert stacks(make_outcome(ledger=())) is None
    assert pictures(study(outcome=None)) == []
