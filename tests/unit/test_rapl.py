"""The processor's energy counters, in made-up folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.child.windows import SurroundingsReader
from autotune.machine.cpu_load import Rapl
from tests.support import FakeClock


def counter(folder: Path, zone: str, name: str, energy_uj: int, range_uj: int = 10_000_000) -> Path:
    (folder / zone).mkdir(parents=True, exist_ok=True)
    for file, value in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", range_uj)):
        (folder / zone / file).write_text(f"{value}\n")
    return folder / zone / "energy_uj"


def test_packages_and_memory_are_added_up_and_what_counts_them_again_is_not(tmp_path: Path) -> None:
    first = counter(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = counter(tmp_path, "intel-rapl:1", "package-1", 9_000_000)
    memory = counter(tmp_path, "intel-rapl:0:1", "dram", 0)
    core = counter(tmp_path, "intel-rapl:0:0", "core", 0)
    machine = counter(tmp_path, "intel-rapl:2", "psys", 0)
    counter(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    rapl = Rapl(tmp_path)
    assert rapl.refused is None and rapl.energy_j() == 0.0
    for path, energy_uj in (
        (first, 6_500_000),
        (second, 9_250_000),
        (memory, 125_000),
        (core, 10**6),
        (machine, 10**6),
    ):
        path.write_text(f"{energy_uj}\n")
    assert rapl.energy_j() == 1.875


def test_a_counter_that_wraps_around_goes_on(tmp_path: Path) -> None:
    path = counter(tmp_path, "intel-rapl:0", "package-0", 9_000_000)
    rapl = Rapl(tmp_path)
    path.write_text("1000000\n")
    assert rapl.energy_j() == 2.0
    path.write_text("2000000\n")
    assert rapl.energy_j() == 3.0


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_text("none\n"), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.with_name("name").write_text("psys\n"), "has no energy counter"),
    ],
)
def test_without_a_figure_the_reason_is_told(tmp_path: Path, damage, why: str) -> None:  # type: ignore[no-untyped-def]
    path = counter(tmp_path, "intel-rapl:0", "package-0", 1)
    damage(path)
    rapl = Rapl(tmp_path)
    assert rapl.energy_j() is None and rapl.refused is not None and why in rapl.refused
    assert Rapl(tmp_path / "nowhere").energy_j() is None


def test_a_counter_that_stops_to_answer_gives_no_figure(tmp_path: Path) -> None:
    path = counter(tmp_path, "intel-rapl:0", "package-0", 1)
    rapl = Rapl(tmp_path)
    path.unlink()
    assert rapl.energy_j() is None and rapl.energy_j() is None
    assert rapl.refused == "the processor's energy counter cannot be read any more"


def test_a_window_on_the_cpu_has_the_energy_that_the_processors_used_in_it(tmp_path: Path) -> None:
    path = counter(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    watcher = SurroundingsReader((), FakeClock(), Rapl(tmp_path))
    path.write_text("2000000\n")
    # What came before the first window is not counted.
    watcher.begin()
    path.write_text("4500000\n")
    assert watcher.read()[1] == 2.5
    path.write_text("5000000\n")
    assert watcher.read()[1] == 0.5


def test_without_a_counter_a_window_has_no_energy(tmp_path: Path) -> None:
    watcher = SurroundingsReader((), FakeClock(), Rapl(tmp_path))
    watcher.begin()
    assert watcher.read()[1] is None
