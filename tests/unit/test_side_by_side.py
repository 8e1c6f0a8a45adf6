"""Searches on several devices, in virtual time: what overlaps, what is alone, and what is left after faults."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.base.clock import SystemClock
from autotune.base.errors import InterruptedSearch, MachineError, WorkloadError
from autotune.base.layout import StudyFiles
from autotune.base.observer import Observer
from autotune.base.records import DataRef, LaunchKind, TrialResult, TrialSpec, TrialStatus, WorkloadRef
from autotune.launcher.lanes import ThreadLanes, VirtualLanes
from autotune.search import Environment, request, resume, search
from autotune.space import key
from autotune.study.budget import Budget
from autotune.study.history import dealt, read_launches
from autotune.study.launches import LaunchConditions, Place, RunningLaunches, once
from autotune.study.tables import read_trials
from tests.support import FakeClock, Play, ScriptedLauncher, make_probe, make_spec

from .world import World, plain

Script = Callable[[TrialSpec], Play]
FOUR = "cpu:0,cpu:1,cpu:2,cpu:3"


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "allowed_cores", lambda: frozenset(range(4)))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def env(world: World, script: Script, raise_at: dict[int, BaseException] | None = None) -> Environment:
    """As `World.env`, on as many devices as are asked for."""

    def launcher(mark: str, count: int) -> VirtualLanes:
        made = ScriptedLauncher(script, world.clock, probe=make_probe(cores=1), raise_at=raise_at)
        world.launchers.append(made)
        return VirtualLanes([made] * count, world.clock)

    return Environment(Observer(), world.clock, lambda: world.signal, launcher, lambda *_: None)


def spans(files: StudyFiles) -> list[tuple[float, float, TrialSpec]]:
    """Begin, end and spec of every launch, in the order of their beginnings."""
    found = [(r.began_s or 0.0, (r.began_s or 0.0) + r.wall_s, spec) for spec, r in read_launches(files)]
    return sorted(found, key=lambda span: span[0])


def overlapping(files: StudyFiles) -> set[tuple[str, str]]:
    return {
        (a.launch, b.launch) for (_, end, a), (begin, _, b) in itertools.combinations(spans(files), 2) if begin < end
    }


@pytest.mark.slow
def test_trials_and_heats_overlap_and_nothing_else_does(world: World) -> None:
    search(world.spec(devices=FOUR), world.folder, env(world, plain))
    together = overlapping(world.files)
    assert together
    launched = {spec.launch: spec for _, _, spec in spans(world.files)}
    for launch in set().union(*together):
        assert launched[launch].number is not None or launch.startswith("heat-"), launch
        assert launched[launch].number != 0, "the baseline's trial runs alone"
    assert {spec.cores for spec in launched.values()} == {(0,), (1,), (2,), (3,)}
    alone = [s for s in launched.values() if s.number is None and not s.launch.startswith("heat-")]
    assert {s.kind for s in alone} > {LaunchKind.PROBE, LaunchKind.MEASURE}
    assert {s.cores for s in alone} == {(0,)}
    # No two on one device at once.
    for a, b in together:
        assert launched[a].cores != launched[b].cores
    counted = Counter(key(t.config) for t in read_trials(world.files))
    assert max(counted.values()) == 1
    assert world.outcome.best.speedup > 1.5
    # Seconds count once: the launches together took longer than the search.
    launches_s = sum(row.seconds for row in world.outcome.ledger[:-1])
    assert world.outcome.elapsed_s < launches_s and world.outcome.devices == 4


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "grid"])
def test_the_same_number_of_trials_takes_less_time(world: World, sampler: str) -> None:
    took_s = {}
    for count, text in ((1, "cpu:0"), (4, FOUR)):
        name = f"on-{count}"
        spec = world.spec(name=name, devices=text, trials=13, budget_s=1e5, sampler=sampler)
        search(spec, world.folder, env(world, plain))
        files = StudyFiles(world.folder / name)
        trials = [(begin, end) for begin, end, spec in spans(files) if spec.number]
        assert len(read_trials(files)) == 13
        took_s[count] = max(end for _, end in trials) - min(begin for begin, _ in trials)
    assert took_s[4] < 0.5 * took_s[1]


def test_launches_side_by_side_read_other_samples(world: World) -> None:
    search(world.spec(devices=FOUR, sampler="random", trials=9), world.folder, env(world, plain))
    firsts = [spec.first_sample for _, _, spec in spans(world.files) if spec.number]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.slow
def test_a_training_that_waits_for_the_disk_is_never_beside_others(world: World) -> None:
    def waits(spec: TrialSpec) -> Play:
        one = plain(spec)
        assert one.measurement is not None
        cold = {"page_cache": "cold", "loader_wait_fraction": 0.5}
        return Play(one.rate_per_s, wall_s=one.wall_s, measurement=one.measurement.model_copy(update=cold))

    search(world.spec(devices=FOUR, trials=4), world.folder, env(world, waits))
    assert overlapping(world.files) == set()


@pytest.mark.slow
def test_a_signal_ends_all_that_runs_and_a_resume_goes_on(world: World) -> None:
    def stopping(spec: TrialSpec) -> Play:
        # Three others have begun.
        if spec.number == 8:
            world.signal = 2
        return plain(spec)

    spec = world.spec(devices=FOUR, sampler="random", trials=12)
    with pytest.raises(InterruptedSearch):
        search(spec, world.folder, env(world, stopping))
    before = {t.number: t.result.status for t in read_trials(world.files)}
    assert TrialStatus.INTERRUPTED in before.values() and set(before) == set(range(len(before)))
    world.signal = None
    resume(world.files, env(world, plain))
    trials = read_trials(world.files)
    assert {t.number: t.result.status for t in trials if t.number in before} == before
    known = Counter(key(t.config) for t in trials if t.result.status is not TrialStatus.INTERRUPTED)
    assert max(known.values()) == 1 and len(known) == 12


@pytest.mark.slow
@pytest.mark.parametrize("error", [MachineError("no process can be started"), KeyboardInterrupt()])
def test_an_error_on_one_device_ends_the_others_and_a_resume_goes_on(world: World, error: BaseException) -> None:
    spec = world.spec(devices=FOUR, sampler="random", trials=8)
    with pytest.raises(type(error)):
        search(spec, world.folder, env(world, plain, {5: error}))
    resume(world.files, env(world, plain))
    trials = read_trials(world.files)
    known = Counter(key(t.config) for t in trials if t.result.status is not TrialStatus.INTERRUPTED)
    assert max(known.values()) == 1 and len(known) == 8
    assert world.launchers[0].closed


class Slow:
    """A launcher whose launches last until they are released or told to stop."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.release = threading.Event()
        self.running = threading.Event()

    def run(self, spec: TrialSpec, *, on_beat: object, stop: Callable[[], bool]) -> TrialResult:
        self.threads.append(threading.get_ident())
        if spec.launch == "fails":
            raise MachineError("this device is gone")
        self.running.set()
        while not stop():
            if self.release.wait(0.01):
                return TrialResult(launch=spec.launch, status=TrialStatus.COMPLETE)
        return TrialResult(launch=spec.launch, status=TrialStatus.INTERRUPTED)

    def close(self) -> None:
        self.threads.append(threading.get_ident())


class TestThreads:
    """Launchers in threads of their own, in real time."""

    @pytest.fixture
    def launchers(self) -> list[Slow]:
        return []

    @pytest.fixture
    def lanes(self, launchers: list[Slow]) -> ThreadLanes:
        def make(says: Callable[[str], None]) -> Slow:
            launchers.append(Slow())
            return launchers[-1]

        return ThreadLanes(make, 2, SystemClock(), print)

    def begin(self, lanes: ThreadLanes, lane: int, folder: Path, stop: Callable[[], bool] = lambda: False) -> None:
        lanes.begin(lane, make_spec(folder), on_beat=lambda beat: None, stop=stop)

    def test_each_has_one_thread_from_its_first_launch_to_its_end(
        self, lanes: ThreadLanes, launchers: list[Slow], tmp_path: Path
    ) -> None:
        for name in ("a", "b"):
            for lane in (0, 1):
                launchers[lane].running.clear()
                self.begin(lanes, lane, tmp_path / f"{name}{lane}")
            assert all(launcher.running.wait(10) for launcher in launchers), "side by side"
            for lane in (1, 0):
                launchers[lane].release.set()
                ended, result = lanes.end()
                assert (ended, result.launch) == (lane, f"{name}{lane}")
                launchers[lane].release.clear()
        lanes.close()
        one, other = (set(launcher.threads) for launcher in launchers)
        assert len(one) == len(other) == 1 and one != other and threading.get_ident() not in one | other

    def test_a_stop_ends_all(self, lanes: ThreadLanes, tmp_path: Path) -> None:
        self.begin(lanes, 0, tmp_path / "a")
        self.begin(lanes, 1, tmp_path / "b", stop=lambda: True)
        assert {lanes.end()[1].status, lanes.end()[1].status} == {TrialStatus.INTERRUPTED}
        lanes.close()

    def test_an_error_comes_out_and_the_other_launch_goes_on(
        self, lanes: ThreadLanes, launchers: list[Slow], tmp_path: Path
    ) -> None:
        self.begin(lanes, 1, tmp_path / "a")
        self.begin(lanes, 0, tmp_path / "fails")
        with pytest.raises(MachineError, match="gone"):
            lanes.end()
        launchers[1].release.set()
        assert lanes.end()[1].status is TrialStatus.COMPLETE
        lanes.close()

    def test_what_is_abandoned_has_ended(self, lanes: ThreadLanes, launchers: list[Slow], tmp_path: Path) -> None:
        self.begin(lanes, 0, tmp_path / "a")
        self.begin(lanes, 1, tmp_path / "b")
        lanes.abandon()
        launchers[0].release.set()
        assert lanes.run(make_spec(tmp_path / "c"), on_beat=lambda beat: None, stop=lambda: False).launch == "c"
        lanes.close()


class TestWaiting:
    """The budget counts each second once, and none in which all devices are waited for."""

    def running(self, folder: Path, waits_s: dict[str, float], spent: list[float]) -> tuple[RunningLaunches, Budget]:
        clock, files = FakeClock(), StudyFiles(folder)
        budget = Budget(files, 1000.0, clock)
        launcher = ScriptedLauncher(lambda spec: Play(wall_s=10.0, waited_s=waits_s[spec.launch]), clock)
        lanes = VirtualLanes([launcher] * 2, clock)
        places = (Place(("cpu",), cores=(0,)), Place(("cpu",), cores=(1,)))
        return RunningLaunches(files, places, None, budget, lanes, Observer(), lambda: False), budget

    @pytest.mark.parametrize(
        ("waits_s", "spent_s", "waited_s"),
        [
            ({"a": 0.0, "b": 0.0}, 10.0, 0.0),
            ({"a": 60.0}, 10.0, 60.0),
            # The first one computes meanwhile.
            ({"a": 0.0, "b": 5.0}, 15.0, 0.0),
        ],
    )
    def test_waiting(self, tmp_path: Path, waits_s: dict[str, float], spent_s: float, waited_s: float) -> None:
        running, budget = self.running(tmp_path, waits_s, [])
        for name in waits_s:
            running.begin(name, once(make_spec(tmp_path / name)), lambda result: None)
        while running.number:
            running.end()
        assert (budget.spent_s, budget.waited_s) == (pytest.approx(spent_s), pytest.approx(waited_s))


def test_edited_code_ends_all_that_runs(tmp_path: Path) -> None:
    class Edited:
        #: Nothing is edited before both have begun.
        answers = iter((None, None))

        def edited(self) -> str | None:
            return next(self.answers, "net.py")

    clock, files = FakeClock(), StudyFiles(tmp_path)
    lanes = VirtualLanes([ScriptedLauncher(lambda spec: Play(), clock)] * 2, clock)
    places = (Place(("cpu",)), Place(("cpu",)))
    budget = Budget(files, 100.0, clock)
    running = RunningLaunches(files, places, Edited(), budget, lanes, Observer(), lambda: False)  # type: ignore[arg-type]
    ended: list[TrialResult] = []
    for name in ("a", "b"):
        running.begin(name, once(make_spec(tmp_path / name)), ended.append)
    with pytest.raises(WorkloadError, match=r"net\.py"):
        running.end()
    running.abandon()
    assert (running.number, ended) == (0, [])


def test_a_heat_is_dealt_out() -> None:
    entrants = [{"batch_size": n} for n in range(8)]
    assert dealt(entrants, 1) == [tuple(entrants)]
    for hands in (2, 3, 4):
        parts = dealt(entrants, hands)
        assert len(parts) == min(hands, 3)
        assert all(part[0] is entrants[0] and len(part) >= 3 for part in parts)
        assert sorted(c["batch_size"] for part in parts for c in part[1:]) == list(range(1, 8))
    assert dealt(entrants[:3], 4) == [tuple(entrants[:3])]


def test_conditions_know_all_places() -> None:
    conditions = LaunchConditions(
        workload=WorkloadRef(name="net", module="net"),
        data=DataRef(kind="none"),
        device="cuda:0",
        batch_size=8,
        image_size=None,
        seed=0,
        worker_start_method="fork",
        memory_limit_bytes=None,
        env={"CUDA_VISIBLE_DEVICES": "GPU-a"},
        cores=(0, 1),
        beside=(Place(("cuda:1",), {"CUDA_VISIBLE_DEVICES": "GPU-b"}, (2, 3)),),
    )
    assert [(p.devices, p.env["CUDA_VISIBLE_DEVICES"], p.cores) for p in conditions.places] == [
        (("cuda:0",), "GPU-a", (0, 1)),
        (("cuda:1",), "GPU-b", (2, 3)),
    ]
