"""The rate that a card holds for longer than the windows of a launch."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotune.base.records import Hold, HoldPlan, HoldVerdict, TrialResult, TrialStatus
from autotune.child.hold import HoldRun
from autotune.report.document import Facts
from autotune.report.sections import holds
from autotune.report.sentences import proof_line
from autotune.search.outcome import _gives
from autotune.search.proof.ceilings import check_holding
from autotune.search.proof.race import entrant
from autotune.space.formatting import rate_text
from autotune.space.requirements import ANYTHING
from tests.support import FakeClock, make_measurement, make_outcome, make_spec, make_standing, make_trial

from .fake_card import FakeCard

EPOCH = 10
TURN_S = 0.3
CONFIG = {"batch_size": 32, "num_workers": 0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def batches() -> Iterator[None]:
    while True:
        time.sleep(TURN_S)
        yield from [None] * EPOCH


def test_a_card_trains_on_without_a_pause_between_steps(monkeypatch, tmp_path, clock) -> None:
    card = FakeCard(monkeypatch)
    beats = SimpleNamespace(step=lambda number, loss=None: None, clock=clock)
    ctx = SimpleNamespace(batch_size=1)
    launch = SimpleNamespace(spec=make_spec(tmp_path), beats=beats, memory=None, workload=SimpleNamespace(), ctx=ctx)
    run = HoldRun(cast(Any, launch), cast(Any, card.work))
    run.card = cast(Any, SimpleNamespace(sm_clock_mhz=lambda: 1305 if card.busy_until_s > time.monotonic() else 300))
    loader = batches()
    for _ in range(7):
        next(loader)
        run.steps += 1
    found = run.sustain(loader, 5.0, EPOCH)
    assert found.per_s == pytest.approx(50), "turns of epochs, pauses and the empty queue do not count"
    assert found.seconds == pytest.approx(5, rel=0.1)
    assert found.clock_mhz == 1305
    assert run.steps > 100
    assert run.sustain(loader, 0.0, EPOCH).per_s is None


def holding(device: str, sustained_per_s: float | None) -> tuple[HoldVerdict, HoldPlan]:
    """Check a winner that ran at 100 samples/s inside windows, and at 90 with the turns of epochs."""
    plans = []

    def launch(*_: object, hold: HoldPlan, **__: object) -> TrialResult:
        plans.append(hold)
        room = {"peak_bytes": 2**30, "capacity_bytes": 2**34}
        longer = {"sustained_per_s": sustained_per_s, "sustained_s": 20.0, "sm_clock_mhz": 1305}
        held = Hold.model_validate({"steps": 50, "seconds": 5.0, "settled": True, **room, **longer})
        return TrialResult(launch="hold", status=TrialStatus.COMPLETE, hold=held)

    launches = SimpleNamespace(budget=SimpleNamespace(left_s=100.0), finished=lambda *_: None, run_outside=launch)
    context = SimpleNamespace(
        device=device,
        by_command=False,
        launches=launches,
        required=ANYTHING,
        compiled_s={},
        raise_if_stopped=lambda: None,
        observer=None,
    )
    winner = entrant(make_trial(4, CONFIG, measurement=make_measurement(100.0, samples_per_s=90.0)))
    return check_holding(cast(Any, context), winner, 80.0), plans[0]


def test_a_card_trains_longer_to_show_the_rate_that_it_holds() -> None:
    verdict, plan = holding("cuda", 80.0)
    assert (plan.sustain_s, plan.min_s) == (20.0, 5.0) and plan.max_s + plan.sustain_s <= 80
    assert verdict.sustained_per_s == pytest.approx(80 * 0.9)
    verdict, plan = holding("cpu", None)
    assert plan.sustain_s == 0 and verdict.sustained_per_s is None


@pytest.mark.parametrize(("per_s", "falls"), [(80.0, True), (99.0, False), (104.0, False), (None, False)])
def test_a_rate_below_the_proven_interval_is_said(per_s: float | None, falls: bool) -> None:
    verdict, _ = holding("cuda", None if per_s is None else per_s / 0.9)
    best = make_standing(4, CONFIG, 100.0, 2.0, halfwidth=0.02)
    outcome = make_outcome(best=best, hold=verdict)
    said = "its rate fell to 80.0 samples/s, with the card at 1,305 MHz, below the 100 ± 2 of the short launches"
    assert (said in (proof_line(outcome) or "")) == falls
    (section,) = holds(outcome)
    rows = dict(next(part for part in section.parts if isinstance(part, Facts)).rows)
    assert rows.get("sustained rate") == (
        None if per_s is None else f"{rate_text(per_s)} samples/s over 20 s, at 1,305 MHz"
    )
    assert _gives(outcome, []).sustained_samples_per_second == (None if per_s is None else pytest.approx(per_s))
