"""Which profile is in force, which one a machine gets, and which one is outdated."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.base.errors import ProfileError, UsageError
from autotune.base.layout import find_daemon
from autotune.base.records import Fingerprint
from autotune.machine.gpu import Gpu, NvmlUnavailable
from autotune.profile import Profile
from autotune.profile.in_force import Store, differences, look_here, rematch_baseline, slot_name, stale_rows
from tests.support import PROFILE_DATA, make_profile

HERE: dict[str, Any] = {
    "gpu_model": "NVIDIA H200",
    "driver": "580.95",
    "torch": "2.15.0",
    "cpu_model": "AMD EPYC",
    "cores": 16,
    "memory_gib": 128,
}


def profile(
    rate: float = 60.0, half: float = 1.0, *, speedup: tuple[float, float] = (1.9, 2.1), **changes: Any
) -> Profile:
    """A profile of a training on `HERE`, with a rate known to ``± half``."""
    values = {**HERE, "workload_sha256": "9f" * 32, **changes.pop("values", {})}
    gives = {
        "samples_per_second": rate,
        "ci95": [rate - half, rate + half],
        "speedup": sum(speedup) / 2,
        "speedup_ci95": list(speedup),
    }
    conditions = {"device": "cuda:0", **changes.pop("conditions", {})}
    return make_profile(**{"gives": gives, "conditions": conditions, "fingerprint": {"values": values}, **changes})


def here(**changes: Any) -> Fingerprint:
    return Fingerprint(values={**HERE, **changes})


FASTER = {**PROFILE_DATA["configuration"], "batch_size": 128}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "profiles")


class TestKeeping:
    def test_the_first_profile_is_in_force(self, store: Store) -> None:
        name, entry = store.keep(profile())
        assert entry.replaced and name.startswith("resnet50-")
        assert store.one(name).profile == profile()

    @pytest.mark.parametrize(
        ("new", "replaced"),
        [
            (profile(70.0, configuration=FASTER), True),
            (profile(61.5, configuration=FASTER), False),
            (profile(50.0, configuration=FASTER), False),
            (profile(62.0), True),
            (profile(58.0, half=9.0), False),
        ],
    )
    def test_only_a_profile_proven_faster_replaces_it(self, store: Store, new: Profile, replaced: bool) -> None:
        name, _ = store.keep(profile())
        again, entry = store.keep(new)
        assert (again, entry.replaced) == (name, replaced)
        kept = store.one(name)
        assert (kept.profile == new) is replaced
        # Both are kept in any case.
        assert [e.file for e in kept.state.entries] == ["0001.yaml", "0002.yaml"]
        assert len(list((store.folder / name / "history").iterdir())) == 2

    @pytest.mark.parametrize(
        ("configuration", "speedup", "replaced"),
        [(FASTER, (1.02, 1.2), True), (FASTER, (0.97, 1.2), False), (PROFILE_DATA["configuration"], (1.0, 1.0), True)],
    )
    def test_a_rematch_is_decided_by_its_own_ratio(
        self, store: Store, configuration: Any, speedup: tuple[float, float], replaced: bool
    ) -> None:
        """With another driver the old rate does not count; the ratio measured in turns does."""
        name, _ = store.keep(profile(60.0))
        store.note(name, (("driver", "580.95", "590.1"),))
        new = profile(45.0, speedup=speedup, configuration=configuration, values={"driver": "590.1"})
        again, entry = store.keep(new, instead_of=name)
        assert (again, entry.replaced) == (name, replaced)
        assert bool(store.one(name).state.stale) is not replaced

    def test_a_profile_stored_twice_is_kept_once(self, store: Store) -> None:
        name, entry = store.keep(profile())
        assert store.keep(profile()) == (name, entry)
        better = profile(speedup=(1.1, 1.2), configuration=FASTER)
        assert store.keep(better, instead_of=name) == store.keep(better, instead_of=name)
        assert [e.file for e in store.one(name).state.entries] == ["0001.yaml", "0002.yaml"]

    def test_other_trainings_and_other_hardware_have_separate_slots(self) -> None:
        others = [
            profile(),
            profile(values={"gpu_model": "NVIDIA A100"}),
            profile(values={"cores": 8}),
            profile(conditions={"image_size": 160}),
            profile(conditions={"device": "cpu"}),
            profile(workload={"args": {"classes": "10"}}),
            profile(workload={"path": "/home/me/resnet50.py"}),
        ]
        assert len({slot_name(p) for p in others}) == len(others)
        assert slot_name(profile(values={"driver": "1", "torch": "3"})) == slot_name(profile(99.0))

    def test_a_damaged_profile_hides_no_other_and_is_replaced(self, store: Store) -> None:
        first, _ = store.keep(profile())
        second, _ = store.keep(profile(values={"cores": 8}))
        (store.folder / first / "profile.yaml").write_text("no profile")
        (store.folder / first / "slot.json").write_text("{")
        assert [kept.name for kept in store.all()] == [second]
        _, entry = store.keep(profile())
        assert (entry.replaced, entry.file) == (True, "0002.yaml")
        assert len(store.all()) == 2

    def test_a_list_rebuilt_with_a_gap_writes_over_no_profile(self, store: Store) -> None:
        for rate in (60.0, 90.0, 140.0):
            name, _ = store.keep(profile(rate))
        slot = store.folder / name
        (slot / "history" / "0001.yaml").unlink()
        (slot / "slot.json").write_text("{")
        kept = (slot / "history" / "0003.yaml").read_text()
        _, entry = store.keep(profile(200.0))
        assert entry.file == "0004.yaml" and (slot / "history" / "0003.yaml").read_text() == kept


class TestStale:
    @pytest.mark.parametrize(("name", "now"), [("driver", "590.1"), ("torch", "2.16.0"), ("memory_gib", 64)])
    def test_a_relevant_change_makes_it_stale(self, name: str, now: Any) -> None:
        found = [row for row in stale_rows(profile(), here(**{name: now})) if row[0] != "workload_sha256"]
        assert found == [(name, str(HERE[name]), str(now))]

    def test_a_change_of_the_workloads_own_file_makes_it_stale(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text("A = 1\n")
        workload = {"name": "mine", "path": str(file), "sha256": "9f" * 32}
        assert [row[0] for row in stale_rows(profile(workload=workload), here())] == ["workload_sha256"]
        file.unlink()
        assert stale_rows(profile(workload=workload), here())[0][2] == "gone"

    def test_a_profile_of_other_hardware_is_not_stale(self) -> None:
        assert stale_rows(profile(), here(cores=8, driver="1")) == []

    def test_cards_do_not_matter_to_a_training_on_the_cpu(self) -> None:
        found = stale_rows(profile(conditions={"device": "cpu"}), here(driver="1", gpu_model="other"))
        assert [row[0] for row in found] == ["workload_sha256"]

    def test_works_without_torch(self) -> None:
        """In a separate process, because this one may have imported torch."""
        code = (
            "import sys; from autotune.profile.in_force import look_here as look; "
            "print(look().values['torch'], 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        import torch

        assert done.stdout.split() == [str(torch.__version__), "False"]

    def test_only_the_card_in_use_matters(self) -> None:
        cards = [Gpu(i, f"GPU-{i}", f"card {i}", f"driver {i}", mig=False) for i in range(2)]
        assert look_here(lambda: cards).values["gpu_model"] == "card 0"
        assert look_here(lambda: cards, uuid="GPU-1").values["driver"] == "driver 1"
        assert "driver" not in look_here(lambda: NvmlUnavailable("it is gone", True)).values

    @pytest.mark.parametrize(
        ("visible", "uuid", "model", "mig"),
        [
            (None, None, "card 0", False),
            ("1", None, "card 1 MIG 1g.18gb", "1g.18gb"),
            ("MIG-b", None, "card 1 MIG 2g.35gb", "2g.35gb"),
            ("", None, None, None),
            (None, "MIG-b", "card 1 MIG 2g.35gb", "2g.35gb"),
        ],
    )
    def test_it_is_the_card_that_cuda_shows(self, monkeypatch, visible, uuid, model, mig) -> None:
        instances = tuple(
            Gpu(i, f"MIG-{'ab'[i]}", f"card 1 MIG {size}", "580", mig=False, profile=size)
            for i, size in enumerate(("1g.18gb", "2g.35gb"))
        )
        cards = [
            Gpu(0, "GPU-0", "card 0", "580", mig=False),
            Gpu(1, "GPU-1", "card 1", "580", mig=True, instances=instances),
        ]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = look_here(lambda: cards, uuid=uuid).values
        assert (found.get("gpu_model"), found.get("mig")) == (model, mig)


class TestFinding:
    def test_the_profile_of_this_machine_or_the_nearest(self, store: Store) -> None:
        ours, _ = store.keep(profile())
        store.keep(profile(values={"gpu_model": "NVIDIA A100", "driver": "1"}))
        kept, rows = store.find("resnet50", here())
        assert (kept.name, {r[0] for r in rows}) == (ours, {"workload_sha256"})
        kept, rows = store.find("resnet50", here(driver="590.1"))
        assert (kept.name, {r[0] for r in rows}) == (ours, {"workload_sha256", "driver"})
        kept, rows = store.find("resnet50", here(gpu_model="NVIDIA L4", driver="1"))
        assert "gpu_model" in {r[0] for r in rows}

    def test_by_file(self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mine.py").write_text("A = 1\n")
        store.keep(profile(workload={"name": "mine", "path": str(tmp_path / "mine.py"), "sha256": "9f" * 32}))
        monkeypatch.chdir(tmp_path)
        assert store.find("mine.py", here())[0].name == store.find("mine", here())[0].name

    def test_by_a_relative_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(tmp_path / "state"))
        (tmp_path / "mine.py").write_text("A = 1\n")
        (tmp_path / "runs").mkdir()
        mine = {"name": "mine", "path": str(tmp_path / "mine.py"), "sha256": "9f" * 32}
        Store(find_daemon().profiles).keep(profile(workload=mine))
        monkeypatch.chdir(tmp_path / "runs")
        for path in ("../mine.py", Path("..") / "mine.py", "../runs/../mine.py"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = autotune.load_profile(model=path, device="cpu")
            assert found.profile.workload.name == "mine"

    def test_what_is_loaded_prints_in_one_short_line(self) -> None:
        applied = autotune.Applied(profile(), "cpu")
        assert repr(applied).startswith("<Applied profile of resnet50 (resnet50-3) on cpu: bf16, ")
        assert "samples/s" in repr(applied) and "the baseline (1.90 to 2.10)>" in repr(applied)
        for shown in (repr(applied), repr(applied.profile), str(applied.profile)):
            assert "\n" not in shown and len(shown) < 500 and "precision=bf16" in repr(applied.profile)

    def test_an_unknown_profile(self, store: Store) -> None:
        with pytest.raises(ProfileError, match="autotune search --model resnet50"):
            store.find("resnet50", here())
        store.keep(profile())
        with pytest.raises(ProfileError, match="no profile of 'resnet5' is kept here .there are those of resnet50."):
            store.find("resnet5", here())

    def test_load_profile_by_model_warns_of_what_is_different(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AUTOTUNE_STATE_DIR", str(tmp_path))
        Store(find_daemon().profiles).keep(profile())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = autotune.load_profile(model="resnet50", device="cpu")
        said = " ".join(str(w.message) for w in caught)
        assert "the device differs" in said and "the training differs" in said
        assert all(w.filename == __file__ for w in caught)
        assert found.config["precision"] == "bf16"
        with pytest.raises(UsageError, match="path of a profile, or model"):
            autotune.load_profile()
        with pytest.raises(ProfileError):
            autotune.load_profile(model="vit")


def test_the_profile_in_force_is_the_baseline_of_a_rematch() -> None:
    found = rematch_baseline(profile())
    assert found["persistent_workers"] == "true" and found["batch_size"] == "64" and found["precision"] == "bf16"


def test_differences_cover_only_values_known_on_both_sides() -> None:
    found = differences(profile(), Fingerprint(values={"unheard_of": 1, "torch": None}))
    # A machine that reports no card is not one with this card.
    assert [row[0] for row in found] == ["gpu_model", "workload_sha256"]
