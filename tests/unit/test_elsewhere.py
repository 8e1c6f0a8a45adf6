"""Launches on workers that come and go: what is retried, refused and written back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.base.errors import MachineError
from autotune.base.layout import LaunchFiles
from autotune.base.records import CheckPlan, DataRef, LaunchKind, TrialSpec, TrialStatus
from autotune.launcher.remote import RemoteLanes, WorkerFacts
from autotune.study.history import read_launch
from autotune.workload.catalog import find_workload
from tests.support import FakeClock, Play, ScriptedLauncher, ScriptedWorkers, make_host, make_probe, make_spec


class Rig:
    """A study with workers elsewhere."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.clock = FakeClock()
        self.said: list[str] = []
        self.seen: list[TrialSpec] = []
        self.study = folder / "study"
        (folder / "net.py").write_text("import beside\n")
        (folder / "beside.py").write_text("# ä\n")
        self.ref = find_workload(str(folder / "net.py"), {})

        def play(spec: TrialSpec) -> Play:
            self.seen.append(spec)
            return Play()

        self.workers = ScriptedWorkers(
            folder / "there", self.clock, lambda name: ScriptedLauncher(play, self.clock, probe=make_probe()), count
        )
        self.lanes = RemoteLanes(self.workers, self.study, self.clock, self.said.append)

    def spec(self, name: str, **changes: object) -> TrialSpec:
        return make_spec(self.study / "launches" / name, workload=self.ref, **changes)

    def begin(self, lane: int, name: str, stop: Callable[[], bool] = lambda: False, **changes: object) -> TrialSpec:
        spec = self.spec(name, **changes)
        self.lanes.begin(lane, spec, on_beat=lambda beat: None, stop=stop)
        return spec

    def run(self, name: str, **changes: object) -> str:
        """Run a launch alone; return the worker that ran it last."""
        self.begin(0, name, **changes)
        lane, result = self.lanes.end()
        assert (lane, result.launch, result.status) == (0, name, TrialStatus.COMPLETE)
        return self.workers.sent[-1][0]

    def start(self) -> None:
        self.workers.arrive("one")
        self.lanes.first(lambda: None)
        self.run("probe-1", kind=LaunchKind.PROBE)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_launch_of_a_lost_worker_runs_again_elsewhere_under_its_name(rig: Rig) -> None:
    rig.start()
    spec = rig.begin(0, "verify-1")
    rig.workers.lose("one")
    rig.workers.arrive("two")
    lane, result = rig.lanes.end()
    assert (lane, result.status) == (0, TrialStatus.COMPLETE)
    # The new worker was looked at first.
    assert rig.workers.sent[1:] == [("one", "verify-1"), ("two", "probe-two"), ("two", "verify-1")]
    assert rig.said == ["one is lost (its node died); verify-1 runs again elsewhere"]
    written, found = read_launch(LaunchFiles(Path(spec.folder)))
    assert written == spec and found == result
    assert not (rig.study / "launches" / "probe-two").exists()
    # What runs alone stays there when the other is back.
    rig.workers.arrive("one")
    assert rig.run("verify-2") == "two"


def test_the_worker_has_code_and_folders_of_its_own(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    rig.begin(0, "00001", cache_folder=str(rig.study / "cache" / "inductor"))
    (tmp_path / "net.py").write_text("import other\n")
    assert rig.lanes.end()[1].status is TrialStatus.COMPLETE
    spec, there = rig.seen[-1], tmp_path / "there" / "one"
    assert spec.folder == str(there / "launches" / "00001")
    assert spec.cache_folder == str(there / "cache" / "inductor")
    path = Path(spec.workload.path or "")
    assert path.is_relative_to(there) and find_workload(str(path), {}).sha256 == rig.ref.sha256


def test_code_that_the_worker_sees_stays_where_it_is(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    rig.run("00001")
    # It may have files beside it that are no modules.
    assert rig.seen[-1].workload.path == str(tmp_path / "net.py")


def test_a_worker_that_is_refused_while_all_ends_holds_nothing_up(rig: Rig) -> None:
    rig.start()
    rig.begin(0, "00001", lambda: True, data=DataRef(kind="folder", identity="other", path="/nowhere/data"))
    assert rig.lanes.end()[1].status is TrialStatus.INTERRUPTED
    assert rig.workers.dismissed == ["one"] and "there is no folder /nowhere/data" in rig.said[-1]


def test_a_worker_that_does_not_end_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.start()
    rig.begin(0, "00001", lambda: True)
    monkeypatch.setattr(rig.workers, "_run", lambda worker, errand: None)
    assert rig.lanes.end()[1].status is TrialStatus.INTERRUPTED
    assert rig.workers.dismissed == ["one"]


def test_a_lost_launch_ends_at_last(rig: Rig) -> None:
    rig.start()
    rig.begin(0, "00001")
    for name, other in (("one", "two"), ("two", "three"), ("three", "four")):
        while rig.workers.sent[-1] != (name, "00001"):
            rig.lanes._look()
            rig.lanes._assign()
        rig.workers.lose(name)
        rig.workers.arrive(other)
    _, result = rig.lanes.end()
    assert result.status is TrialStatus.KILLED and "each of the 3 workers" in (result.cause or "")


def test_another_kind_of_machine_is_not_used(rig: Rig) -> None:
    rig.start()
    rig.workers.arrive("odd", WorkerFacts(where="odd", host=make_host(cores=64)))
    rig.begin(0, "00001")
    rig.begin(1, "00002")
    assert {rig.lanes.end()[0], rig.lanes.end()[0]} == {0, 1}
    assert [worker for worker, launch in rig.workers.sent if launch == "00002"] == ["one"]
    assert rig.said == ["odd is not used: its machine is of another kind (cores: 64 instead of 4)"]
    assert rig.workers.dismissed == ["odd"]


def test_the_only_worker_that_fails_later_ends_the_search(rig: Rig) -> None:
    rig.start()
    rig.begin(0, "00001", data=DataRef(kind="folder", identity="other", path="/nowhere/data"))
    with pytest.raises(MachineError, match="no worker can be used: .*there is no folder /nowhere/data"):
        rig.lanes.end()


def test_it_waits_for_a_worker_and_that_time_does_not_count(rig: Rig) -> None:
    rig.start()
    rig.begin(0, "00001")
    rig.workers.lose("one")
    asked: list[float] = []

    def stop() -> bool:
        asked.append(rig.clock.now())
        return len(asked) > 100

    rig.begin(1, "00002", stop)
    results = [rig.lanes.end()[1], rig.lanes.end()[1]]
    assert {r.status for r in results} == {TrialStatus.INTERRUPTED}
    assert rig.said[-1] == "there is no worker; waiting for one of the workers of this test"
    rig.workers.arrive("two")
    assert rig.run("00003") == "two"


def test_a_check_finds_what_it_starts_from(rig: Rig) -> None:
    rig.start()
    plan = CheckPlan(store=str(rig.study / "checks" / "a"), reference=True)
    rig.run("check-a-fp32-0", kind=LaunchKind.TRAIN_CHECK, check=plan)
    rig.workers.lose("one")
    rig.workers.arrive("two")
    for name in ("check-a-1", "check-a-2"):
        assert rig.run(name, kind=LaunchKind.TRAIN_CHECK, check=plan.model_copy(update={"reference": False})) == "two"
    # The saved weights are on the first worker, so the second makes them, once.
    ran = [spec.launch for spec in rig.seen]
    assert ran == ["check-a-fp32-0", "check-a-fp32-0", "check-a-1", "check-a-2"]


def test_data_that_is_not_there(rig: Rig, tmp_path: Path) -> None:
    rig.workers.arrive("one")
    rig.lanes.first(lambda: None)
    data = {"kind": "folder", "path": str(tmp_path / "nowhere"), "identity": ""}
    rig.begin(0, "probe-1", kind=LaunchKind.PROBE, data=data)
    with pytest.raises(MachineError, match="no worker can be used: one: there is no folder .*nowhere"):
        rig.lanes.end()
    rig.lanes.abandon()
