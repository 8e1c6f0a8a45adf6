"""A slow store in front of a folder, in the processes that read it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from autotune.base.records import DataRef, LaunchKind, MeasurePlan, SlowStore
from autotune.training.feed import behind_store, is_cached, slow_down

LATENCY_S = 0.02


class Reading(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.bin"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index].read_bytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "set"
    made.mkdir()
    for number in range(64):
        (made / f"{number:02}.bin").write_bytes(bytes(1000))
    return made


def seconds(work: Any) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def data(folder: Path, **store: float) -> DataRef:
    return DataRef(kind="folder", path=str(folder), identity="i", store=SlowStore(**store) if store else None)


def test_there_is_none_unless_one_is_asked_for(folder: Path) -> None:
    own = Reading(folder)
    assert behind_store(own, data(folder)) is own
    assert behind_store(own, DataRef(kind="synthetic", store=SlowStore(latency_s=1.0))) is own


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_wait_for_it_however_they_were_started(folder: Path, method: str) -> None:
    stored = behind_store(Reading(folder), data(folder, latency_s=LATENCY_S))
    loader: Any = DataLoader(stored, batch_size=16, num_workers=1, multiprocessing_context=method)
    batches = iter(loader)
    assert next(batches).tolist() == [1000] * 16
    assert seconds(lambda: list(batches)) >= (48 - 16 * loader.prefetch_factor) * LATENCY_S


def test_links_in_and_to_the_folder_are_slow_as_well(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.bin").write_bytes(b"")
    (folder / "linked.bin").symlink_to(tmp_path / "elsewhere.bin")
    (tmp_path / "set-by-a-link").symlink_to(folder)
    slow_down(str(tmp_path / "set-by-a-link"), SlowStore(latency_s=LATENCY_S))
    for path in (folder / "linked.bin", tmp_path / "set-by-a-link" / "00.bin", folder / "00.bin"):
        assert seconds(path.read_bytes) >= LATENCY_S, path


class TestAlone:
    """These have the machine to themselves."""

    def test_each_file_that_is_opened_takes_its_time(self, folder: Path, tmp_path: Path) -> None:
        own = Reading(folder)
        stored = behind_store(own, data(folder, latency_s=LATENCY_S, bytes_per_s=100_000))
        assert [stored[index] for index in range(3)] == [1000] * 3
        # 20 ms until it begins to come, and 10 ms for 1,000 bytes.
        assert seconds(lambda: [stored[index] for index in range(5)]) >= 5 * 0.03
        # In this process, until the end, whoever reads it; nothing else, and nothing that is written.
        assert seconds(lambda: own[0]) >= 0.03
        (tmp_path / "other.bin").write_bytes(b"")
        assert seconds(lambda: [(tmp_path / "other.bin").read_bytes() for _ in range(20)]) < 20 * 0.03
        assert seconds(lambda: [(folder / "new.txt").write_text("x") for _ in range(20)]) < 20 * 0.03
        with pytest.raises(FileNotFoundError):
            (folder / "gone").read_bytes()

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_launch_knows_that_it_waits_for_its_store(self, launched: Any, folder: Path, workers: int) -> None:
        """What workers do then is neither to run nor to wait for a core, and no estimate needs to know the store."""
        config = {"num_workers": workers, "prefetch_factor": 1} if workers else {}
        plan = MeasurePlan(target_halfwidth=0.2, max_measure_s=2.0)
        found = {}
        for name, ref in (("slow", data(folder, latency_s=LATENCY_S)), ("local", data(folder))):
            spec = {"kind": LaunchKind.LOADER_ONLY, "data": ref, "plan": plan, "batch_size": 4}
            found[name] = launched("files.py", config, folder=name, **spec)[0].measurement
        assert found["slow"].samples_per_s < max(1, workers) / LATENCY_S < found["local"].samples_per_s
        assert found["slow"].loader_idle_fraction > 0.8 and found["local"].loader_idle_fraction < 0.5

    def test_a_cache_holds_a_part_of_the_files_and_always_the_same(self, folder: Path) -> None:
        names = [path.name for path in sorted(folder.glob("*.bin"))]
        held = [is_cached(name, 0.5) for name in names]
        assert held == [is_cached(name, 0.5) for name in names] and 16 < sum(held) < 48
        assert all(is_cached(name, 1.0) for name in names) and not any(is_cached(name, 0.0) for name in names)
        stored = behind_store(Reading(folder), data(folder, latency_s=LATENCY_S, cached=0.5))
        took = [seconds(lambda index=index: stored[index]) for index in range(len(names))]
        assert [one >= LATENCY_S for one in took] == [not known for known in held]
