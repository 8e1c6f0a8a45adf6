"""Profiles as a grid, on terminals of several widths."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.base.errors import ProfileError
from autotune.profile.in_force import Store
from autotune.report.listing import GridTable, grid_of
from autotune.workload.catalog import find_workload
from tests.support import PROFILE_DATA

from .test_profile_store import here, profile

H100 = "NVIDIA H100 80GB HBM3"


def drawn(store: Store, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(GridTable(grid_of(store.all(), here())), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One training on this machine, where its driver has changed; at a batch size of its own also on another card."""
    found = Store(tmp_path)
    code = {"workload_sha256": find_workload("resnet50", {}).sha256}
    found.keep(profile(values={"driver": "570.1", **code}))
    kept: dict[str, Any] = {"keeps_batch_size": True}
    found.keep(profile(conditions=kept, values=code, configuration={**PROFILE_DATA["configuration"], "batch_size": 48}))
    other = {"conditions": {**kept, "device_name": H100}, "values": {"gpu_model": H100, **code}}
    found.keep(profile(configuration={**PROFILE_DATA["configuration"], "batch_size": 48}, **other))
    return found


def test_a_wide_terminal_has_a_line_for_each_training(store: Store) -> None:
    text = drawn(store, 120)
    head, anyone, fixed = text.splitlines()[:3]
    assert "H100 80GB HBM3" in head
    assert anyone.split()[:2] == ["resnet50", "any"] and "2.00× stale (1.90 to 2.10)  missing" in anyone
    assert fixed.split()[:2] == ["resnet50", "48"] and fixed.count("2.00× (1.90 to 2.10)") == 2
    assert "stale: driver was 570.1, is 580.95 (resnet50 on" in text


def test_a_narrow_terminal_cuts_nothing(store: Store) -> None:
    for width in (60, 40):
        text = drawn(store, width)
        assert text.count("1.90 to 2.10") == 3 and text.count("missing") == 1 and "…" not in text


def test_default_sizes_are_one_training_and_no_profile_hides_another(tmp_path: Path) -> None:
    store, code = Store(tmp_path), {"workload_sha256": find_workload("resnet50", {}).sha256}
    on_cpu = {"device": "cpu", "image_size": 96}
    store.keep(profile(conditions=on_cpu, values={**code, "gpu_model": None}))
    store.keep(profile(conditions={"image_size": 224}, values=code))
    grid = grid_of(store.all(), here())
    assert grid.rows == [("resnet50", "any", "")] and grid.counts() == "2 tuned"
    for folder in "ab":
        provenance = {"objective": f"/{folder}/mine.py"}
        store.keep(profile(conditions={"image_size": 224}, provenance=provenance, values=code))
    names = [kept.name for kept in store.all()]
    found = grid_of(store.all(), here())
    assert sorted(cell.kept.name for cell in found.cells.values() if cell.kept is not None) == sorted(names)
    assert len(set(found.rows)) == 3


def test_profiles_with_a_batch_size_of_their_own_live_beside_each_other(store: Store) -> None:
    assert len(store.all()) == 3
    # Free to choose, it is what a training gets that asks for nothing.
    found, _ = store.find("resnet50", here())
    assert not found.profile.conditions.keeps_batch_size
    found, _ = store.find("resnet50", here(), 48)
    assert found.profile.configuration["batch_size"] == 48 and found.profile.conditions.keeps_batch_size
    with pytest.raises(ProfileError, match="no profile of 'resnet50' with batch size 7"):
        store.find("resnet50", here(), 7)
