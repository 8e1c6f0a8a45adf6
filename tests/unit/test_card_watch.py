"""One card watched, through the real binding and a compiled stand-in for the driver's library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

STUB = Path(__file__).parents[1] / "nvml" / "stub.c"
TWO_CARDS = """driver 580.95.05
cards 2
0.uuid GPU-a
1.uuid GPU-b
1.processes 4711
1.sm_clock 1830
1.memory_clock 2619
1.temperature 61
1.power 400500
1.energy 7000250
1.reasons 0x40
"""
#: Reads once per line of its input, with a watcher that is made when the first line comes.
ASKS = """
import dataclasses, json, sys
from autotune.clock import SystemClock
from autotune.device import CardWatch
from autotune.trial.surroundings import Watcher
card, watcher = CardWatch("GPU-b"), Watcher("GPU-b", SystemClock())
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    if line == "settle in\\n":
        watcher.settle_in()
    if line == "begin\\n":
        watcher.begin()
    around, energy_j = watcher.read() if line == "around\\n" else (None, None)
    if line == "close\\n":
        card.close()
        card.close()
    reading = dataclasses.asdict(card.read()) if around is None else around.model_dump()
    print(json.dumps({**reading, "used_j": energy_j}), flush=True)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to compile the stand-in for the driver's library")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", STUB], check=True)
    return folder


class Card:
    """The stand-in's card as a test sets it up, and a process that watches it."""

    def __init__(self, driver: Path, state: Path, text: str = TWO_CARDS) -> None:
        self.state = state
        self.set(text)
        env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "NVML_STUB_STATE": str(state)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", ASKS], env=env, stdin=pipe, stdout=pipe, text=True)
        assert self._answer() == "ready"

    def set(self, text: str) -> None:
        self.state.write_text(text)

    def ask(self, what: str = "read") -> dict[str, Any]:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(f"{what}\n")
        stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def card(driver: Path, tmp_path: Path) -> Iterator[Card]:
    made = Card(driver, tmp_path / "state")
    yield made
    made.process.communicate()


def test_a_card_is_read_by_its_uuid(card: Card) -> None:
    found = card.ask()
    assert found["processes"] == [4711]
    assert (found["sm_clock_mhz"], found["memory_clock_mhz"], found["temperature_c"]) == (1830, 2619, 61)
    assert (found["power_w"], found["energy_j"]) == (400.5, 7000.25)
    assert found["clocks_event_reasons"] == 0x40


def test_the_order_of_cards_does_not_matter(card: Card) -> None:
    card.ask()
    swapped = TWO_CARDS.replace("0.", "x.").replace("1.", "0.").replace("x.", "1.")
    assert "0.uuid GPU-b" in swapped
    card.set(swapped)
    # A handle is a card's for as long as the driver runs; a new watcher finds it in its new place.
    card.ask("close")
    assert card.ask()["temperature_c"] == 61


def test_what_fails_is_unknown_and_the_rest_is_known(card: Card) -> None:
    card.set(TWO_CARDS + "1.fail.nvmlDeviceGetPowerUsage 999\n1.fail.nvmlDeviceGetComputeRunningProcesses_v3 999\n")
    found = card.ask()
    assert (found["power_w"], found["processes"], found["temperature_c"]) == (None, None, 61)


def test_a_driver_that_fails_for_a_while_is_asked_again(driver: Path, tmp_path: Path) -> None:
    card = Card(driver, tmp_path / "state", TWO_CARDS + "fail.* 999\n")
    assert set(card.ask().values()) == {None}
    card.set(TWO_CARDS)
    assert card.ask()["temperature_c"] == 61
    card.process.communicate()


def test_no_driver_is_unknown_too(driver: Path, tmp_path: Path) -> None:
    card = Card(driver, tmp_path / "state")
    card.state.unlink()
    assert set(card.ask().values()) == {None}
    card.process.communicate()


def test_who_was_there_before_or_came_later_is_foreign(card: Card) -> None:
    # Before CUDA wakes 4711 is there; our own process appears under a number that only the driver's host knows.
    card.set(TWO_CARDS.replace("4711", "4711 99"))
    assert card.ask("around")["foreign_processes"] is None
    card.ask("settle in")
    assert card.ask("around")["foreign_processes"] == 1
    card.set(TWO_CARDS.replace("4711", "99"))
    assert card.ask("around")["foreign_processes"] == 0
    card.set(TWO_CARDS.replace("4711", "99 100 101"))
    assert card.ask("around")["foreign_processes"] == 2
    card.set(TWO_CARDS + "fail.nvmlDeviceGetComputeRunningProcesses_v3 999\n")
    assert card.ask("around")["foreign_processes"] is None


def test_energy_is_counted_from_where_a_window_begins(card: Card) -> None:
    assert card.ask("around")["used_j"] is None
    card.set(TWO_CARDS.replace("7000250", "7005250"))
    assert card.ask("around")["used_j"] == 5.0
    card.set(TWO_CARDS.replace("7000250", "7105250"))
    card.ask("begin")
    card.set(TWO_CARDS.replace("7000250", "7107250"))
    assert card.ask("around")["used_j"] == 2.0


def test_what_is_known_of_a_card_is_kept_with_the_window(card: Card) -> None:
    found = card.ask("around")
    assert (found["sm_clock_mhz"], found["memory_clock_mhz"], found["temperature_c"]) == (1830, 2619, 61)
    assert (found["power_w"], found["clocks_event_reasons"]) == (400.5, 0x40)
    assert found["foreign_cores"] >= 0 and found["idle_cores"] >= 0
