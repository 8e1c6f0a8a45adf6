"""Turns on a card that is made up: what is counted, and what is not. In virtual time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autotune.base.records import Phase, Surroundings, Turn
from autotune.child.script_turns import ScriptTurns, TurnPlan
from autotune.child.trail import SeenStep
from autotune.child.workload_turns import _DeviceTurns
from autotune.stats.racing import Contender
from tests.support import FakeClock

from .fake_card import FakeCard, FakeLoss

#: `FakeCard` takes this for a step, the very first one takes much longer, and one whose memory must be allocated too.
STEP_S, FIRST_S, ALLOCATING_S = 0.02, 5.0, 0.3
#: No multiple of it.
TURN_S = 0.19


class Around:
    """Surroundings about which nothing is known, except what holds the clocks of a card down while it is at work."""

    cores = 2

    def __init__(self, held_by: int = 0) -> None:
        self._held_by = held_by

    def settle_in(self) -> None: ...

    def begin(self) -> None: ...

    def at_work(self) -> dict[str, int]:
        return {"clocks_event_reasons": self._held_by}

    def read(self) -> tuple[Surroundings, None]:
        return Surroundings(clocks_event_reasons=0), None


class AllocatingCard(FakeCard):
    """A card whose allocator is slow to fill. It writes down what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.happened: list[str] = []
        self.filled = self.has_begun = False
        card, event = self, torch.cuda.Event

        class Event(event):  # type: ignore[misc, valid-type]
            def record(self) -> None:
                card.happened.append("mark")
                super().record()

        monkeypatch.setattr(torch.cuda, "Event", Event)

    def begin_turn(self) -> None:
        """Empty the allocator's cache, as `DeviceMemory` does."""
        self.happened.append("empty")
        self.filled = False

    def work(self, batch: object) -> FakeLoss:
        self.happened.append("step")
        time.sleep((0.0 if self.has_begun else FIRST_S) + (0.0 if self.filled else ALLOCATING_S))
        self.filled = self.has_begun = True
        return super().work(batch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def on(card: AllocatingCard, clock: FakeClock) -> _DeviceTurns:
    """Return the turns of one entrant on a card, whose training is the card's work."""
    turns = _DeviceTurns.__new__(_DeviceTurns)
    memory = SimpleNamespace(begin_turn=card.begin_turn, peak_reserved_bytes=1, peak_bytes=1)
    for name, value in {
        "clock": clock,
        "cuda": True,
        "around": Around(),
        "beats": SimpleNamespace(enter=lambda phase: None, step=lambda number, rate_per_s: None),
        "launch": SimpleNamespace(memory=memory, workload=SimpleNamespace()),
        "spec": SimpleNamespace(plan=SimpleNamespace(busy_cores=None)),
        "plan": SimpleNamespace(turn_s=TURN_S),
        "contexts": [SimpleNamespace(batch_size=8)],
        "batches": {8: None},
        "switch": SimpleNamespace(to=lambda config: None),
        "switch_s": 0.0,
        "_steps": {0: card.work},
        "_settled": False,
    }.items():
        setattr(turns, name, value)
    return turns


def as_long_as_asked(turn: Turn | None) -> bool:
    """Whether a turn holds steps of `STEP_S` and nothing else, and as many as were asked for."""
    return turn is not None and turn.seconds == pytest.approx(turn.steps * STEP_S) and turn.seconds >= 0.9 * TURN_S


def test_no_turn_counts_the_step_that_fills_the_allocator(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    card, entrant = AllocatingCard(monkeypatch), Contender(0, {})
    turns = on(card, clock)
    for number in range(3):
        card.happened.clear()
        turn = turns.take(entrant)
        entrant.turns.append(turn)
        assert as_long_as_asked(turn), f"turn {number}: {turn}"
        assert re.search(f"empty step mark (step ){{{turn.steps}}}mark$", " ".join(card.happened)), card.happened
    assert entrant.first_step_s == pytest.approx(FIRST_S + ALLOCATING_S + STEP_S, abs=0.01)


def test_a_turn_in_which_heat_holds_the_clocks_down_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    turns, entrant = on(AllocatingCard(monkeypatch), clock), Contender(0, {})
    turns.around = Around(held_by=64)
    assert turns.take(entrant) is None
    turns.around = Around()
    assert turns.take(entrant) is not None


class ScriptOnACard:
    """A script whose agent empties the allocator's cache at the beginning of each turn."""

    in_background, rate_per_s, has_ended = False, None, False

    def __init__(self, first_s: float, filling_s: float) -> None:
        self.trail: Any = SimpleNamespace(
            turns=0, over=0, turn_at=0.0, unswitched=None, failed=None, reserved_bytes=1, loader=None
        )
        self.found: list[SeenStep] = []
        self.asked: list[int] = []
        self._first_s, self._filling_s = first_s, filling_s

    def enter(self, phase: Phase) -> None: ...

    def tell(self, *, steps: int, doors: object) -> None:
        self.asked.append(steps)

    def looks(self) -> Iterator[int]:
        while True:
            self.trail.turns += 1
            taken = [self._filling_s] + [STEP_S] * (self.asked[-1] - 1)
            if self.trail.turns == 1:
                taken[0] += self._first_s
            self.found = [SeenStep(0.0, s, s, 0.0, 8, True, False, self.trail.turns) for s in taken]
            self.trail.over = self.trail.turns
            yield len(self.asked)


def in_a_script(*, cuda: bool, filling_s: float) -> tuple[list[Turn | None], list[int]]:
    """Return three turns of one entrant in a script, and how many steps the agent was asked for."""
    script, how = ScriptOnACard(FIRST_S, filling_s), TurnPlan(TURN_S, cuda=cuda)
    around, entrant = cast(Any, Around()), Contender(0, {})
    turns = ScriptTurns(cast(Any, script), [{}], set(), how, around, FakeClock())
    return [turns.take(entrant) for _ in range(3)], script.asked


def test_nor_does_a_turn_in_a_script() -> None:
    found, asked = in_a_script(cuda=True, filling_s=ALLOCATING_S)
    assert all(map(as_long_as_asked, found)), found
    assert asked == [2, 11, 11, 11]


def test_on_a_cpu_the_first_turn_in_a_script_is_one_step() -> None:
    found, asked = in_a_script(cuda=False, filling_s=STEP_S)
    assert [turn and turn.steps for turn in found] == [1, 10, 10]
    assert asked == [1, 1, 11, 11]
