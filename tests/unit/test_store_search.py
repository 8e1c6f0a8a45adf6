"""Searches over data behind a slow store, in virtual time: what limits them, and what each state of the data gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import ProfileError, UsageError
from autotune.base.records import LaunchKind, Limit, TrialSpec
from autotune.profile import read
from autotune.profile.in_force import Store
from autotune.search import search
from autotune.search.recheck import request_for
from autotune.study.history import read_launch
from tests.support import Play, make_measurement

from .world import FIXED, World, rate

FILES = 40
COLD = 4.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "studies")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for number in range(FILES):
        path = folder / "cats" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    return folder


def waits_for_its_store(spec: TrialSpec) -> Play:
    """The loader delivers what the training takes, and the device could take ten times as much."""
    store = spec.data.store
    per_s = rate(spec) / (1.0 if store is None or store.cached else COLD)
    idle = 0.9 if store is not None else 0.1
    by_kind = {LaunchKind.DEVICE_ONLY: 10 * per_s, LaunchKind.LOADER_ONLY: 1.02 * per_s}
    found = by_kind.get(spec.kind, per_s)
    measured = make_measurement(found, batch_size=spec.batch_size, loader_idle_fraction=idle, enqueue_s=None)
    return Play(rate_per_s=found, wall_s=15.0, measurement=measured)


def searched(world: World, photos: Path, **changes: Any) -> None:
    spec = world.spec(data=str(photos), budget_s=2400.0, fixed={**FIXED, "num_workers": "4"}, **changes)
    search(spec, world.folder, world.env(waits_for_its_store, wants_data="images"))


def test_the_verdict_names_the_store_and_what_a_local_copy_would_give(world: World, photos: Path) -> None:
    searched(world, photos, store_latency_s=0.08)
    found = next(b for b in world.outcome.bottlenecks if b.trial == world.outcome.best.trial)
    assert found.limit is Limit.LOADER and found.store_fraction == 0.9 and found.cold_per_s is None
    assert found.local_per_s is not None and found.local_per_s > 3 * found.samples_per_s
    assert "For 90 % of the time it takes, the loader's processes wait for files or the network" in found.sentence
    spec, _ = read_launch(world.files.trial(0))
    assert spec is not None and spec.data.store is not None
    assert (spec.data.store.latency_s, spec.data.store.cached) == (0.08, 0.0)


def test_with_a_cache_the_first_epoch_is_told_apart(world: World, photos: Path) -> None:
    searched(world, photos, store_latency_s=0.08, store_cache_bytes=FILES * 1000 // 4)
    found = next(b for b in world.outcome.bottlenecks if b.trial == world.outcome.best.trial)
    assert found.cold_per_s is not None
    assert found.cold_per_s[0] == pytest.approx(found.samples_per_s / COLD, rel=0.05)
    assert "the cache holds 25 % of the files" in found.sentence


def test_a_local_folder_is_not_said_to_wait(world: World, photos: Path) -> None:
    searched(world, photos)
    found = next(b for b in world.outcome.bottlenecks if b.trial == world.outcome.best.trial)
    assert found.limit is Limit.LOADER and found.local_per_s is None and "network" not in found.sentence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "synthetic", "store_latency_s": 0.1}, "there are no files for the slow store to hold"),
        ({"store_cache_bytes": 1000}, "--store-cache is in front of no store"),
    ],
)
def test_a_store_without_files_and_a_cache_without_a_store_are_refused(
    world: World, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        search(world.spec(**changes), world.folder, world.env(waits_for_its_store))


def test_a_profile_behind_a_simulated_store_is_kept_apart(world: World, photos: Path, tmp_path: Path) -> None:
    searched(world, photos, store_latency_s=0.08)
    profile = read(world.files.profile)
    assert profile.behind_store == "80 ms a file"
    with pytest.raises(ProfileError, match="behind a store that was put there"):
        Store(tmp_path / "kept").keep(profile)
    with pytest.raises(UsageError, match="behind a slow store that was put there"):
        request_for(profile, model="resnet18", budget_s=10.0)
