"""Checkpoints that are damaged, and intact ones that cannot be loaded here."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from autotune.errors import MachineError
from autotune.whole_training.checkpoints import Checkpoints, load_checkpoint


def test_an_intact_checkpoint_that_cannot_be_loaded_here_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("of_a_workload")
    exec("class Kept: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "of_a_workload", module)
    said: list[str] = []
    kept = Checkpoints(tmp_path, said.append)
    path = kept.save({"workload": module.Kept()})
    monkeypatch.delitem(sys.modules, "of_a_workload")
    with pytest.raises(MachineError, match="is intact, and cannot be loaded here: ModuleNotFoundError"):
        load_checkpoint(path)
    assert path.exists() and said == []
    monkeypatch.setitem(sys.modules, "of_a_workload", module)
    assert kept.newest() == path and load_checkpoint(path).keys() == {"workload"}


def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Checkpoints(tmp_path, said.append)
    first, second = kept.save({"steps": 1}), kept.save({"steps": 2})
    second.write_bytes(second.read_bytes()[:-20])
    assert kept.newest() == first and load_checkpoint(first) == {"steps": 1}
    assert not second.exists() and (tmp_path / f"damaged-{second.name}").exists() and len(said) == 1
