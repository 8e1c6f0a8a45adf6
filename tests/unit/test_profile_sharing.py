"""Profiles that machines share: copied by the hash of their content, and taken over by the rules of the store."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.base.errors import MachineError, UsageError
from autotune.profile.in_force import Store, pull, push

from .test_profile_store import FASTER, here, profile


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A shared folder, and a store that is no folder."""
    return str(tmp_path / "shared") if request.param == "folder" else f"memory://{uuid4().hex}/profiles"


def nothing_said(sentence: str) -> None:
    raise AssertionError(sentence)


def test_a_profile_reaches_other_machines(url: str, tmp_path: Path) -> None:
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    one.keep(profile())
    elsewhere, _ = other.keep(profile(values={"gpu_model": "NVIDIA A100"}))
    assert [found.changed for found in push(one, url)] == [True]
    assert [(found.changed, found.verdict) for found in push(one, url)] == [(False, "was there")]
    (found,) = pull(other, url, here(), nothing_said)
    assert found.changed and found.verdict == "the first for this training on this hardware"
    assert {kept.name for kept in other.all()} == {elsewhere, found.slot}
    assert other.one(found.slot).profile == one.all()[0].profile
    assert [(found.changed, found.verdict) for found in pull(other, url, here(), nothing_said)] == [(False, "was here")]


def test_only_what_is_better_replaces_what_is_in_force(url: str, tmp_path: Path) -> None:
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    one.keep(profile(60.0))
    other.keep(profile(90.0, configuration=FASTER))
    push(one, url)
    (found,) = pull(other, url, here(), nothing_said)
    assert not found.changed and found.verdict.startswith("not shown to be faster")
    assert other.all()[0].profile.configuration["batch_size"] == 128
    push(other, url)
    (back, better) = pull(one, url, here(), nothing_said)
    assert (back.verdict, better.changed) == ("was here", True)
    assert one.all()[0].profile == other.all()[0].profile


def test_what_was_altered_on_the_way_is_left_out(tmp_path: Path) -> None:
    one, other, shared = Store(tmp_path / "one"), Store(tmp_path / "other"), tmp_path / "shared"
    one.keep(profile())
    one.keep(profile(values={"cores": 8}))
    push(one, str(shared))
    damaged = sorted(shared.glob("*/*.yaml"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-20])
    (shared / "notes").mkdir()
    (shared / "notes" / "mine.yaml").write_text("a: 1\n")
    said: list[str] = []
    assert len(pull(other, str(shared), here(), said.append)) == 1
    assert len(said) == 2 and all("its content is not what was pushed" in sentence for sentence in said)
    # Pushed again, it is whole.
    assert [found.changed for found in push(one, str(shared))].count(True) == 1
    assert len(pull(other, str(shared), here(), said.append)) == 2


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    store = Store(tmp_path / "one")
    store.keep(profile())
    with pytest.raises(UsageError, match="is no place that can be reached"):
        push(store, "nosuch://bucket")
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be used"):
        push(store, str(tmp_path / "file" / "below"))
    with pytest.raises(MachineError, match="ftp://127.0.0.1:1/profiles cannot be used"):
        push(store, "ftp://127.0.0.1:1/profiles")
    assert pull(store, str(tmp_path / "empty"), here(), nothing_said) == []


def test_each_number_of_ranks_has_its_own_profile(tmp_path: Path) -> None:
    store = Store(tmp_path / "one")
    alone, _ = store.keep(profile())
    together, _ = store.keep(profile(conditions={"ranks": 2}))
    assert alone != together and len(store.all()) == 2


def test_another_machines_profile_replaces_nothing_that_was_measured_otherwise(tmp_path: Path) -> None:
    one, other, shared = Store(tmp_path / "one"), Store(tmp_path / "other"), str(tmp_path / "shared")
    one.keep(profile(30.0, values={"driver": "560.1"}))
    other.keep(profile(90.0))
    push(one, shared)
    (found,) = pull(other, shared, here(), nothing_said)
    assert not found.changed and found.verdict == "another machine's, which differs in driver"
    assert other.all()[0].profile.gives.samples_per_second == 90.0


def test_a_later_one_replaces_what_fits_here_no_better(tmp_path: Path) -> None:
    one, other, shared = Store(tmp_path / "one"), Store(tmp_path / "other"), str(tmp_path / "shared")
    later = {"provenance": {"created": "2099-01-01T00:00:00+00:00"}}
    one.keep(profile(30.0, values={"driver": "560.1"}, **later))
    other.keep(profile(90.0, values={"driver": "550.1"}))
    push(one, shared)
    for driver, replaced in (("550.1", False), ("560.1", True)):
        (found,) = pull(Store(copied(other, tmp_path / driver)), shared, here(driver=driver), nothing_said)
        assert found.changed == replaced, driver
    # Neither was measured with this driver.
    (found,) = pull(other, shared, here(driver="570.1"), nothing_said)
    assert found.changed and found.verdict == "measured later than the one before, which fits this machine no better"


def copied(store: Store, to: Path) -> Path:
    return Path(shutil.copytree(store.folder, to))


def test_a_profile_that_was_changed_by_hand_goes_nowhere(tmp_path: Path) -> None:
    store, shared = Store(tmp_path / "one"), str(tmp_path / "shared")
    sealed = profile().sealed()
    gives = sealed.gives.model_copy(update={"samples_per_second": 999.0})
    store.keep(sealed.model_copy(update={"gives": gives}))
    (found,) = push(store, shared)
    assert not found.changed and "changed by hand" in found.verdict
    assert pull(Store(tmp_path / "other"), shared, here(), nothing_said) == []
