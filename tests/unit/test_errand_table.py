"""What a search and its workers tell each other by a database: nobody is believed after having been given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from autotune.base.clock import SystemClock
from autotune.base.layout import StudyFiles
from autotune.base.records import Beat, Phase, StudySpec, TrialResult, TrialStatus
from autotune.cluster.database_workers import (
    HERE,
    LOST_S,
    DatabaseWorkers,
    SearchSide,
    WorkerSide,
    search_of,
    workers_of,
)
from autotune.launcher.elsewhere import Arrived, Gone, News, Reported, Returned, Said
from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.launcher.workplace import Workplace
from autotune.search.request import Device
from autotune.study.database import LostConnection
from autotune.study.schema import prepare
from tests.support import FakeClock, Play, ScriptedLauncher, make_host, make_probe, make_spec

FACTS = WorkerFacts(where="node1", host=make_host())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/shared.db")
    with engine.begin() as connection:
        prepare(connection, upgrade=False)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.begin() as connection:
        yield connection


def errand(tmp_path: Path, name: str) -> Errand:
    return Errand(name=name, study=str(tmp_path), spec=make_spec(tmp_path / "trials" / "00001", number=1))


def ended(name: str) -> ErrandEnd:
    return ErrandEnd(errand=name, result=TrialResult(launch="00001", status=TrialStatus.OOM))


def silence(connection: Connection, table: str, seconds: float) -> None:
    """Let time have passed since anybody in a table was last heard of."""
    connection.execute(text(f"update {table} set beat_at = datetime(beat_at, '-{seconds} seconds')"))


def test_an_errand_goes_to_its_worker_and_comes_back(connection: Connection, tmp_path: Path) -> None:
    search, one, two = (
        SearchSide(connection, "s", "a:1"),
        WorkerSide(connection, "s", "1"),
        WorkerSide(connection, "s", "2"),
    )
    assert search.begin("code", "a") is None
    for worker in (one, two):
        worker.arrive(FACTS)
    assert [(row.worker, row.facts) for row in search.workers()] == [(w, FACTS.model_dump_json()) for w in ("1", "2")]
    for _ in range(2):  # an answer may be lost
        search.send("1", errand(tmp_path, "e"))
    assert one.next_errand() == errand(tmp_path, "e") and two.next_errand() is None
    beat = Beat(phase=Phase.WARMUP)
    assert one.report("e", beat) is False and two.report("e", beat) is None
    search.recall("1")
    assert one.report("e", None) is True
    assert one.end(ended("e")) and one.end(ended("e")) and not two.end(ended("e"))
    assert one.next_errand() is None
    ((name, worker, told, end),) = search.errands()
    assert (name, worker, told) == ("e", "1", beat.model_dump_json())
    assert ErrandEnd.model_validate_json(end or "") == ended("e")
    search.take("e")
    assert search.errands() == []


def test_a_result_that_comes_late_is_refused(connection: Connection, tmp_path: Path) -> None:
    search, worker = SearchSide(connection, "s", "a:1"), WorkerSide(connection, "s", "1")
    search.begin("code", "a")
    worker.arrive(FACTS)
    search.send("1", errand(tmp_path, "e"))
    silence(connection, "autotune_workers", LOST_S + 1)
    (row,) = search.workers()
    assert row.age_s > LOST_S
    search.give_up("1")
    assert not worker.end(ended("e")) and worker.report("e", None) is None and not worker.beat(None)
    assert search.errands() == [] and search.workers() == []


def test_why_a_worker_is_not_used_is_told(connection: Connection, tmp_path: Path) -> None:
    search, worker = SearchSide(connection, "s", "a:1"), WorkerSide(connection, "s", "1")
    search.begin("code", "a")
    worker.arrive(FACTS)
    search.refuse("1", "cores: 4 instead of 2")
    search.give_up("1")
    assert worker.beat(None) and worker.refused() == "cores: 4 instead of 2" and search.workers() == []


def test_one_search_runs_at_a_time(connection: Connection, tmp_path: Path) -> None:
    first, second = SearchSide(connection, "s", "a:1"), SearchSide(connection, "s", "b:1")
    first.begin("code", "a")
    worker = WorkerSide(connection, "s", "1")
    worker.arrive(FACTS)
    first.send("1", errand(tmp_path, "e"))
    running = second.begin("code", "b")
    assert running is not None and running.search == "a:1" and first.beat()
    # The same folder has been resumed: its earlier search is no more.
    again = SearchSide(connection, "s", "a:2")
    assert again.begin("code", "a") is None and not first.beat() and again.beat()
    assert worker.report("e", None) is None and [row.worker for row in again.workers()] == ["1"]
    # It has not been heard of for long.
    silence(connection, "autotune_searches", LOST_S + 1)
    found = search_of(connection, "s")
    assert found is not None and not found.runs
    assert second.begin("code", "b") is None and not again.beat()
    second.end(is_done=True)
    found = search_of(connection, "s")
    assert found is not None and found.is_done and not found.runs and second.workers() == []


class Shared:
    """A study in a database that may not answer."""

    def __init__(self, engine: Engine) -> None:
        self.database = SimpleNamespace(address="postgresql://tuner@host/tunings")
        self.answers = self.has_it = True
        self._engine = engine

    def is_there(self) -> bool:
        return self.has_it

    def at_once(self, act: Callable[[Connection, str], Any]) -> Any:
        assert self.has_it
        if not self.answers:
            raise LostConnection("server closed the connection unexpectedly")
        with self._engine.begin() as connection:
            return act(connection, "s")


class Rig:
    """The workers of a search: this process's, and one that comes by the database."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.clock = FakeClock()
        self.shared = Shared(engine)
        launcher = ScriptedLauncher(lambda spec: Play(), self.clock, probe=make_probe())
        self.workers = DatabaseWorkers(
            self.shared,  # type: ignore[arg-type]
            lambda says: Workplace(folder / "here", FACTS, launcher, self.clock),
            3,
            "folder",
            self.clock,
            lambda: False,
        )

    def there(self, act: Callable[[WorkerSide], Any]) -> Any:
        with self.shared._engine.begin() as connection:
            return act(WorkerSide(connection, "s", "1"))

    def silence(self) -> None:
        with self.shared._engine.begin() as connection:
            silence(connection, "autotune_workers", LOST_S + 1)

    def news(self) -> list[News]:
        self.clock.advance(1.0)
        return self.workers.news(0.0)


@pytest.fixture
def rig(engine: Engine, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(engine, tmp_path)
    assert rig.news() == [Arrived(HERE, FACTS)]
    rig.there(lambda worker: worker.arrive(FACTS))
    assert rig.news() == [Arrived("1", FACTS)] and rig.workers.count == 2
    yield rig
    rig.workers.close()


def test_a_search_hears_of_its_workers(rig: Rig, tmp_path: Path) -> None:
    rig.workers.send("1", errand(tmp_path, "e"))
    assert rig.there(WorkerSide.next_errand) == errand(tmp_path, "e")
    beat = Beat(phase=Phase.WARMUP)
    rig.there(lambda worker: (worker.report("e", beat), worker.beat("it waits for a quiet device")))
    assert rig.news() == [Said("1", "it waits for a quiet device"), Reported("1", "e", beat)]
    assert rig.there(lambda worker: worker.end(ended("e")))
    assert rig.news() == [Returned("1", ended("e"))] and rig.news() == []
    rig.there(lambda worker: worker.leave("it was ended by signal 15"))
    assert rig.news() == [Gone("1", "it was ended by signal 15")] and rig.workers.count == 1


def test_why_this_machine_is_not_used_needs_no_database(engine: Engine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path)
    # The first probe runs before the database has the study.
    rig.shared.has_it = False
    assert rig.news() == [Arrived(HERE, FACTS)]
    rig.workers.explain(HERE, "no space left on device")
    rig.workers.dismiss(HERE, keep_away=True)
    assert rig.news() == []
    rig.workers.close()


def test_workers_are_looked_for_while_the_clock_of_the_search_stands(engine: Engine, tmp_path: Path) -> None:
    clock, spec = SystemClock(), StudySpec(name="s", mark="m", created="c", model="resnet50", workers=2)
    shared: Any = Shared(engine)
    with closing(workers_of(shared, StudyFiles(tmp_path), spec, Device("cpu"), "m", clock)) as workers:

        def news() -> list[News]:
            began_s = clock.now()
            found = workers.news(0.05)
            clock.skip_stop(began_s, 0.0)
            return found

        (here,) = news()
        assert isinstance(here, Arrived) and here.worker == HERE
        with engine.begin() as connection:
            WorkerSide(connection, "s", "1").arrive(FACTS)
        deadline_s = time.monotonic() + 20.0
        while not (found := news()) and time.monotonic() < deadline_s:
            pass
        assert found == [Arrived("1", FACTS)]


def test_while_the_database_does_not_answer_nobody_counts_as_lost(rig: Rig, tmp_path: Path) -> None:
    rig.shared.answers = False
    rig.workers.send("1", errand(tmp_path, "e"))
    assert rig.news() == []
    rig.silence()
    rig.shared.answers = True
    # What was to be told has waited, and the worker has had no time yet to show itself.
    assert rig.news() == [] and rig.there(WorkerSide.next_errand) == errand(tmp_path, "e")
    rig.clock.advance(LOST_S)
    (gone,) = rig.news()
    assert isinstance(gone, Gone) and "nothing was heard of it for 1" in gone.why
    assert not rig.there(lambda worker: worker.end(ended("e")))


def test_workers_are_given_up_with_a_database_that_stays_away(rig: Rig, tmp_path: Path) -> None:
    rig.workers.send("1", errand(tmp_path, "e"))
    rig.shared.answers = False
    assert rig.news() == []
    # A search that is to end waits less.
    rig.workers.recall("1")
    rig.clock.advance(LOST_S)
    assert rig.news() == [Gone("1", "the database does not answer")]
