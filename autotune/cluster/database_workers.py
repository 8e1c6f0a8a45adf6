"""Machines that share a database as workers."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from autotune.base.clock import Clock, SystemClock
from autotune.base.errors import InterruptedSearch, MachineError, UnknownNameError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import Beat, StudySpec
from autotune.launcher import ProcessLauncher
from autotune.launcher.elsewhere import Arrived, Gone, News, Reported, Returned, Said, Workers
from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.launcher.workplace import Workplace, WorkplaceThread, own_code
from autotune.machine.host import read_host
from autotune.search.request import Device, resolve_device
from autotune.study.database import PATIENCE_S, LostConnection, Patience, SharedDatabase, SharedStudy
from autotune.study.schema import ERRANDS, SEARCHES, STUDIES, WORKERS

# What a search and its workers tell each other through the tables of a database that they share.
#
# A search hands out errands, and workers write back how they ended. An errand belongs to one worker, and is removed
# when that worker is given up: what the worker writes then changes no row. Ages are by the database's clock alone.
# Every statement may be executed twice, because an answer may be lost.

#: How often a search and its workers show that they are there, and look what is new; and after how long without a sign
#: they count as lost.
LOOK_EVERY_S, LOST_S = 0.5, 15.0


@dataclass(frozen=True)
class WorkerRow:
    """A worker as the table has it.

    Attributes:
        age_s: seconds since it was last heard of. left: why it goes. refused: why it is not used.
    """

    worker: str
    facts: str
    age_s: float
    said: str | None
    left: str | None
    refused: str | None


class ErrandRow(NamedTuple):
    """An errand that is out, with what its worker has last written, as JSON: a `Beat`, and an `ErrandEnd`."""

    errand: str
    worker: str
    beat: str | None
    ended: str | None


@dataclass(frozen=True)
class SearchRow:
    """The search of a study. ``age_s``: seconds since it was last heard of; ``None`` if it has said that it ends."""

    search: str
    code: str
    age_s: float | None
    is_done: bool

    @property
    def runs(self) -> bool:
        return self.age_s is not None and self.age_s < LOST_S


def _age(now: datetime, then: datetime | None) -> float | None:
    return None if then is None else (now - then).total_seconds()


class SearchSide:
    """What a search does in a transaction.

    Args:
        study: its name. search: unique to this run of it.
    """

    def __init__(self, connection: Connection, study: str, search: str) -> None:
        self._connection = connection
        self._do = connection.execute
        self._study = study
        self._search = search

    def begin(self, code: str, folder: str) -> SearchRow | None:
        """Take over a study, with all that an earlier search has left; return the search that runs it already, if any.

        Args:
            folder: what the names of all searches from the same folder begin with. They cannot run at the same time.
        """
        found = search_of(self._connection, self._study, lock=True)
        if found is not None and found.runs and not found.search.startswith(folder):
            return found
        if found is None or found.search != self._search:
            self._do(delete(ERRANDS).where(ERRANDS.c.study == self._study))
            self._do(delete(WORKERS).where(WORKERS.c.study == self._study, WORKERS.c.refused.is_not(None)))
            self._do(delete(SEARCHES).where(SEARCHES.c.study == self._study))
            row = {"study": self._study, "search": self._search, "code": code, "beat_at": func.now(), "is_done": False}
            self._do(insert(SEARCHES).values(row))
        return None

    def beat(self) -> bool:
        """Show that the search is there; return whether it still has the study."""
        return self._do(update(SEARCHES).where(*self._own).values(beat_at=func.now())).rowcount > 0

    def end(self, *, is_done: bool) -> None:
        """Let the study go. ``is_done``: workers need not wait for it any more."""
        if self._do(update(SEARCHES).where(*self._own).values(beat_at=None, is_done=is_done)).rowcount:
            self._do(delete(ERRANDS).where(ERRANDS.c.study == self._study))
            if is_done:
                self._do(delete(WORKERS).where(WORKERS.c.study == self._study))

    def workers(self) -> list[WorkerRow]:
        """Return all workers of the study that have not been refused."""
        w = WORKERS.c
        asked = select(w.worker, w.facts, func.now(), w.beat_at, w.said, w.left, w.refused)
        rows = self._do(asked.where(w.study == self._study, w.refused.is_(None)).order_by(w.worker)).all()
        return [
            WorkerRow(worker, facts, _age(now, beat_at) or 0.0, said, left, refused)
            for worker, facts, now, beat_at, said, left, refused in rows
        ]

    def errands(self) -> list[ErrandRow]:
        """Return the errands that are out."""
        e = ERRANDS.c
        rows = self._do(select(e.errand, e.worker, e.beat, e.ended).where(e.study == self._study)).all()
        return [ErrandRow(*row) for row in rows]

    def send(self, worker: str, errand: Errand) -> None:
        """Hand out an errand."""
        row = {"errand": errand.name, "study": self._study, "worker": worker, "is_recalled": False}
        if self._do(select(ERRANDS.c.errand).where(ERRANDS.c.errand == errand.name)).first() is None:
            self._do(insert(ERRANDS).values(**row, request=errand.model_dump_json()))

    def recall(self, worker: str) -> None:
        """Ask a worker to end its errand."""
        self._do(update(ERRANDS).where(ERRANDS.c.worker == worker).values(is_recalled=True))

    def take(self, errand: str) -> None:
        """Remove an errand whose end has been read."""
        self._do(delete(ERRANDS).where(ERRANDS.c.errand == errand))

    def give_up(self, worker: str) -> None:
        """Take a worker's errands back. What it still writes changes nothing."""
        self._do(delete(ERRANDS).where(ERRANDS.c.worker == worker))
        self._do(delete(WORKERS).where(WORKERS.c.worker == worker, WORKERS.c.refused.is_(None)))

    def refuse(self, worker: str, why: str) -> None:
        """Tell a worker why it is not used."""
        self._do(update(WORKERS).where(WORKERS.c.worker == worker).values(refused=why))

    @property
    def _own(self) -> tuple[ColumnElement[bool], ...]:
        return SEARCHES.c.study == self._study, SEARCHES.c.search == self._search


class WorkerSide:
    """What a worker does in a transaction."""

    def __init__(self, connection: Connection, study: str, worker: str) -> None:
        self._do = connection.execute
        self._study = study
        self._worker = worker

    def arrive(self, facts: WorkerFacts) -> None:
        """Offer to work."""
        if not self.beat(None):
            row = {"worker": self._worker, "study": self._study, "facts": facts.model_dump_json()}
            self._do(insert(WORKERS).values(**row, beat_at=func.now()))

    def beat(self, said: str | None) -> bool:
        """Show that the worker is there; return whether the search still counts on it."""
        told: dict[str, Any] = {} if said is None else {"said": said}
        return self._do(update(WORKERS).where(*self._own).values(beat_at=func.now(), **told)).rowcount > 0

    def refused(self) -> str | None:
        """Return why the worker is not used, if so."""
        found: str | None = self._do(select(WORKERS.c.refused).where(*self._own)).scalar_one_or_none()
        return found

    def leave(self, why: str) -> None:
        """Give back what the worker has, and say why it goes."""
        self._do(update(WORKERS).where(*self._own).values(left=why))

    def next_errand(self) -> Errand | None:
        """Return an errand of this worker that has not ended."""
        e = ERRANDS.c
        found = self._do(select(e.request).where(e.worker == self._worker, e.ended.is_(None))).scalars().first()
        return None if found is None else Errand.model_validate_json(found)

    def report(self, errand: str, beat: Beat | None) -> bool | None:
        """Report progress; return whether the errand is recalled, or ``None`` if it has been taken back."""
        if beat is not None:
            self._do(update(ERRANDS).where(*self._of(errand)).values(beat=beat.model_dump_json()))
        found: bool | None = self._do(select(ERRANDS.c.is_recalled).where(*self._of(errand))).scalar_one_or_none()
        return found

    def end(self, end: ErrandEnd) -> bool:
        """Write how an errand ended; return whether it still was this worker's."""
        ended = update(ERRANDS).where(*self._of(end.errand)).values(ended=end.model_dump_json())
        return self._do(ended).rowcount > 0

    @property
    def _own(self) -> tuple[ColumnElement[bool], ...]:
        return (WORKERS.c.worker == self._worker,)

    def _of(self, errand: str) -> tuple[ColumnElement[bool], ...]:
        return ERRANDS.c.errand == errand, ERRANDS.c.worker == self._worker


def search_of(connection: Connection, study: str, *, lock: bool = False) -> SearchRow | None:
    """Return the search of a study; ``None`` if there has never been one that takes workers.

    Args:
        lock: nobody else changes it in this transaction.
    """
    s = SEARCHES.c
    asked = select(s.search, s.code, func.now(), s.beat_at, s.is_done).where(s.study == study)
    found = connection.execute(asked.with_for_update() if lock else asked).first()
    if found is None:
        return None
    search, code, now, beat_at, is_done = found
    return SearchRow(search, code, _age(now, beat_at), is_done)


def request_of(connection: Connection, study: str) -> str | None:
    """Return the request of a study, as JSON; ``None`` if there is no such study."""
    found: str | None = connection.execute(
        select(STUDIES.c.request).where(STUDIES.c.study == study)
    ).scalar_one_or_none()
    return found


# The worker's side of a study on which several machines work: runs here what the search hands out.


_T = TypeVar("_T")


@dataclass
class _State:
    """What the two threads of a worker tell each other.

    Attributes:
        running: name of the errand that runs. ending: it is to end. withdrawn: it is not this worker's any more.
        beat: of its launch, if there is a new one. said: the last sentence of its launcher.
        errand: the next one. search: the study's, when it was last looked at; has_looked: whether it has been.
        lost: the search does not count on this worker any more. refused: why it never will.
        failed: what has ended the second thread.
    """

    running: str | None = None
    ending: bool = False
    withdrawn: bool = False
    beat: Beat | None = None
    said: str | None = None
    errand: Errand | None = None
    search: SearchRow | None = None
    has_looked: bool = False
    lost: bool = False
    refused: str | None = None
    failed: Exception | None = None
    closed: threading.Event = field(default_factory=threading.Event)


def work(
    database: SharedDatabase,
    study: str,
    device: str | None,
    folder: Path,
    clock: SystemClock,
    *,
    says: Callable[[str], None],
    stop: Callable[[], int | None],
) -> None:
    """Run what the search of a study hands out, until the study is done.

    Args:
        device: ``None`` for what the study asks for.
        folder: for everything that this leaves here.
        says: receives sentences for the user.
        stop: returns the number of the signal that ends it, or ``None``. A launch that runs then goes back.

    Raises:
        UnknownNameError: the database has no such study.
        UsageError: its search takes no workers.
        MachineError: this machine or its autotune differs from the search's, or the database does not answer.
        InterruptedSearch: a signal came.
    """
    again = "start it again once it answers; what it ran goes to another worker."
    patience = Patience(database.address, clock, says=says, stop=stop, who="this worker", advice=again)
    worker = _Worker(database, study, patience)
    spec, search = worker.look_up()
    if search is not None and search.is_done:
        says(f"study {study!r} is done")
        return
    where = resolve_device(device or spec.device)
    facts = facts_of(where, socket.gethostname())
    launcher = ProcessLauncher(f"worker-{worker.name}", clock, on_wait=worker.say)
    place = Workplace(folder, facts, launcher, clock)
    watch = threading.Thread(target=worker.keep_in_touch, name="in-touch", daemon=True)
    try:
        worker.arrive(facts)
        says(f"working on {study!r} with {facts.device} of {facts.where}")
        watch.start()
        worker.run(place, says, stop, clock)
    finally:
        worker.state.closed.set()
        if watch.ident is not None:
            watch.join()
        place.close()


def facts_of(device: Device, where: str) -> WorkerFacts:
    """Return what this machine offers with a device.

    Args:
        where: names the machine for people.
    """
    host = read_host()
    if device.cores:
        host = host.model_copy(update={"cores": min(len(device.cores), host.cores)})
    return WorkerFacts(where=where, host=host, device=device.name, gpu=device.gpu, cores=device.cores)


class _Worker:
    """A worker. Its second thread does all that is asked and told while the first one runs a launch."""

    def __init__(self, database: SharedDatabase, study: str, patience: Patience) -> None:
        self.name = uuid.uuid4().hex
        self.state = _State()
        self._database = database
        self._study = study
        self._patience = patience

    def look_up(self) -> tuple[StudySpec, SearchRow | None]:
        """Return what was asked of the study, and its search, if one has begun."""
        names = self._database.names()
        if self._study not in names:
            raise UnknownNameError("study", self._study, names, advice=None if names else "the database has none yet.")

        def asked(_again: bool) -> tuple[str | None, SearchRow | None]:
            if not self._database.is_made:
                return None, None  # a study of somebody else's
            with self._database.engine.begin() as connection:
                return request_of(connection, self._study), search_of(connection, self._study)

        request, search = self._patience.until_answered(asked)
        spec = None if request is None else StudySpec.model_validate_json(request)
        if spec is None or spec.workers is None:
            raise UsageError(
                f"the search of {self._study!r} takes no workers", advice="start it with --workers N, N in all."
            )
        _refuse_other_code(search)
        return spec, search

    def arrive(self, facts: WorkerFacts) -> None:
        """Offer to work."""
        self._facts = facts
        self._ask(lambda side: side.arrive(facts))

    def say(self, sentence: str) -> None:
        """Have the search tell its user something."""
        self.state.said = sentence

    def run(self, place: Workplace, says: Callable[[str], None], stop: Callable[[], int | None], clock: Clock) -> None:
        """Run errands until the study is done. See `work`."""
        state = self.state
        waits = False
        while True:
            number = stop()
            if number is not None:
                self._leave(f"it was ended by signal {number}")
                raise InterruptedSearch(number, advice="what it ran goes back to the search.")
            if state.failed is not None:
                raise state.failed
            if state.refused is not None:
                raise MachineError(
                    f"the search of {self._study!r} does not use this machine: {state.refused}",
                    advice="a study is for equal machines.",
                )
            search = state.search
            if search is not None and search.is_done:
                says(f"study {self._study!r} is done")
                self._leave("the study is done")
                return
            if state.lost:
                # Counted as lost meanwhile: it comes again, as another one.
                self.name = uuid.uuid4().hex
                self.arrive(self._facts)
                state.lost = False
            if state.errand is None:
                idle = state.has_looked and (search is None or not search.runs)
                if idle and not waits:
                    says(f"no search of {self._study!r} runs; waiting for one")
                waits = idle
                clock.sleep(LOOK_EVERY_S / 5)
                continue
            self._do(place, state.errand, says, stop)

    def _do(
        self, place: Workplace, errand: Errand, says: Callable[[str], None], stop: Callable[[], int | None]
    ) -> None:
        state = self.state
        says(f"{errand.spec.launch} begins")
        state.ending = state.withdrawn = False
        state.beat, state.running = None, errand.name

        def report(beat: Beat) -> None:
            state.beat = beat

        def ends() -> bool:
            return state.ending or state.withdrawn or stop() is not None

        end = place.run(errand, on_beat=report, stop=ends)
        state.running = None
        if stop() is None and not (not state.withdrawn and self._ended(end)):
            says(f"{errand.spec.launch} has gone to another worker")
        state.errand = None

    def _ended(self, end: ErrandEnd) -> bool:
        return self._ask(lambda side: side.end(end))

    def _leave(self, why: str) -> None:
        self._ask(lambda side: side.leave(why))

    def _ask(self, ask: Callable[[WorkerSide], _T]) -> _T:
        return self._patience.until_answered(lambda _again: self._once(ask))

    def _once(self, ask: Callable[[WorkerSide], _T]) -> _T:
        with self._database.engine.begin() as connection:
            return ask(WorkerSide(connection, self._study, self.name))

    def keep_in_touch(self) -> None:
        """Show that the worker is there, report what runs, and look what is new, until the worker ends."""
        state = self.state
        while not state.closed.wait(LOOK_EVERY_S):
            try:
                self._look()
            except LostConnection:
                continue  # the launch that runs goes on
            except Exception as error:  # in a thread nobody would see it
                state.failed, state.ending = error, True
                return

    def _look(self) -> None:
        state = self.state
        running, beat, said = state.running, state.beat, state.said
        name = self.name
        with self._database.engine.begin() as connection:
            side = WorkerSide(connection, self._study, name)
            there = side.beat(said)
            state.refused = side.refused()
            recalled = False if running is None else side.report(running, beat)
            search = search_of(connection, self._study)
            waiting = side.next_errand() if running is None and state.errand is None else None
        if name != self.name:
            return  # it has come again meanwhile, as another one
        state.lost = not there
        if running is not None and running == state.running:
            state.withdrawn = recalled is None
            state.ending = bool(recalled) or state.refused is not None
        _refuse_other_code(search)
        state.search, state.errand, state.has_looked = search, state.errand or waiting, True


def _refuse_other_code(search: SearchRow | None) -> None:
    here = own_code()
    if search is not None and search.runs and search.code != here:
        raise MachineError(
            f"the search runs another autotune ({search.code}) than this worker ({here})",
            advice="install the same version on all machines.",
        )


# The search's side of a study on which several machines work: its own device, and workers that share its database.

#: The worker of this process.
HERE = "here"
_Change = Callable[[SearchSide], None]


@dataclass
class _Seen:
    """What has been told of a worker: the last sentence, and the last beat."""

    facts: WorkerFacts
    said: str | None = None
    beat: str | None = None


class DatabaseWorkers(Workers):
    """The worker of this process, and those that come by the database.

    While the database does not answer, this process works on. What is to be told to workers waits, and none of them
    counts as lost until it could have been heard of again.

    Args:
        place: makes this process's workplace, given the function that receives its sentences.
        most: how many workers are used at a time, this one included.
        folder: unique to the study's folder: what the name of this search begins with there.
        is_done: returns whether the search has come to its end, so that workers need not wait for it any more.
    """

    def __init__(
        self,
        shared: SharedStudy,
        place: Callable[[Callable[[str], None]], Workplace],
        most: int,
        folder: str,
        clock: Clock,
        is_done: Callable[[], bool],
    ) -> None:
        self.count = 1
        self.what = f"those who work on the study with `autotune work --storage {shared.database.address}`"
        self._shared = shared
        self._most = most
        self._folder = folder
        self._search = f"{folder}:{uuid.uuid4().hex}"
        self._clock = clock
        self._is_done = is_done
        self._told: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._here: WorkplaceThread | None = WorkplaceThread(
            lambda: place(lambda sentence: self._told.put(Said(HERE, sentence))), self._tell
        )
        self._told.put(Arrived(HERE, self._here.facts))
        self._seen: dict[str, _Seen] = {}
        #: What the database is still to be told, in order.
        self._changes: list[_Change] = []
        self._has_begun = False
        self._looked_at_s = -LOOK_EVERY_S
        #: Before this, no worker counts as lost.
        self._lenient_until_s = 0.0
        #: When the database was last heard of, and how long workers are kept without it: not for long once they are to
        #: end what they do.
        self._heard_at_s = clock.now()
        self._patience_s = PATIENCE_S

    def news(self, wait_s: float) -> list[News]:
        # This process's own worker is the first, so that it is the one that makes what runs alone.
        found = self._own_news(0.0)
        if self._clock.now() - self._looked_at_s >= LOOK_EVERY_S:
            found += self._look()
            self._looked_at_s = self._clock.now()
        if not found:
            found = self._own_news(wait_s)
        self.count = max(1, min(self._most, len(self._seen) + (self._here is not None)))
        return found

    def _tell(self, errand: str, told: Beat | ErrandEnd) -> None:
        """Pass on what the worker of this process reports, from its thread."""
        self._told.put(Returned(HERE, told) if isinstance(told, ErrandEnd) else Reported(HERE, errand, told))

    def _own_news(self, wait_s: float) -> list[News]:
        """Return what the worker of this process reports; wait for something so long at most."""
        found: list[News] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._told.get(timeout=wait_s))
            while True:
                found.append(self._told.get_nowait())
        return found

    def send(self, worker: str, errand: Errand) -> None:
        if worker != HERE:
            self._change(lambda side: side.send(worker, errand))
        elif self._here is not None:
            self._here.begin(errand)

    def recall(self, worker: str) -> None:
        if worker != HERE:
            self._patience_s = LOST_S
            self._change(lambda side: side.recall(worker))
        elif self._here is not None:
            self._here.recall()

    def explain(self, worker: str, why: str) -> None:
        if worker != HERE:
            self._change(lambda side: side.refuse(worker, why))

    def dismiss(self, worker: str, *, keep_away: bool) -> None:
        if worker != HERE:
            self._seen.pop(worker, None)
            self._change(lambda side: side.give_up(worker))
        elif self._here is not None:
            self._here.close()
            self._here = None

    def close(self) -> None:
        if self._here is not None:
            self._here.close()
            self._here = None
        if self._has_begun:
            self._has_begun = False
            is_done = self._is_done()
            self._changes.append(lambda side: side.end(is_done=is_done))
            # Workers that are not told find out by themselves.
            with contextlib.suppress(LostConnection):
                self._flush()

    def _change(self, change: _Change) -> None:
        """Tell the database something now, or as soon as it answers."""
        self._changes.append(change)
        with contextlib.suppress(LostConnection):
            self._flush()

    def _flush(self) -> None:
        while self._changes:
            self._at_once(self._changes[0])
            del self._changes[0]

    def _at_once(self, ask: Callable[[SearchSide], _T]) -> _T:
        return self._shared.at_once(lambda connection, study: ask(SearchSide(connection, study, self._search)))

    def _look(self) -> list[News]:
        """Look what is new in the database."""
        try:
            if not self._has_begun and not self._begin():
                return []
            self._flush()
            workers, errands = self._at_once(_read)
        except LostConnection:
            # Workers could not be heard of meanwhile either.
            now_s = self._clock.now()
            self._lenient_until_s = now_s + LOST_S
            gone = list(self._seen) if now_s - self._heard_at_s > self._patience_s else []
            for worker in gone:
                self.dismiss(worker, keep_away=False)
            return [Gone(worker, "the database does not answer") for worker in gone]
        self._heard_at_s = self._clock.now()
        return [*self._news_of_workers(workers), *self._news_of_errands(errands)]

    def _begin(self) -> bool:
        """Take the study over, as soon as the database has it; return whether that is so."""
        if not self._shared.is_there():
            return False
        code = own_code()
        other = self._at_once(lambda side: side.begin(code, self._folder))
        if other is not None:
            raise UsageError("the study is running already, on another machine", advice="wait for it, or end it.")
        self._has_begun = True
        return True

    def _news_of_workers(self, rows: list[WorkerRow]) -> list[News]:
        found: list[News] = []
        lenient = self._clock.now() < self._lenient_until_s
        for row in rows:
            seen = self._seen.get(row.worker)
            lost = row.age_s > LOST_S and not lenient
            if row.left is not None or lost:
                if seen is not None:
                    why = row.left or f"nothing was heard of it for {row.age_s:.0f} s"
                    found.append(Gone(row.worker, why))
                    del self._seen[row.worker]
                self._change(partial(SearchSide.give_up, worker=row.worker))
            elif seen is None:
                facts = WorkerFacts.model_validate_json(row.facts)
                self._seen[row.worker] = _Seen(facts)
                found.append(Arrived(row.worker, facts))
            elif row.said is not None and row.said != seen.said:
                seen.said = row.said
                found.append(Said(row.worker, row.said))
        for worker in self._seen.keys() - {row.worker for row in rows}:
            # Somebody has removed it.
            del self._seen[worker]
            found.append(Gone(worker, "its row was removed"))
        return found

    def _news_of_errands(self, rows: list[ErrandRow]) -> list[News]:
        found: list[News] = []
        for errand, worker, beat, ended in rows:
            seen = self._seen.get(worker)
            if seen is None:
                continue
            if beat is not None and beat != seen.beat:
                seen.beat = beat
                found.append(Reported(worker, errand, Beat.model_validate_json(beat)))
            if ended is not None:
                found.append(Returned(worker, ErrandEnd.model_validate_json(ended)))
                self._change(partial(SearchSide.take, errand=errand))
        return found


def workers_of(
    shared: SharedStudy, files: StudyFiles, spec: StudySpec, device: Device, mark: str, clock: Clock
) -> DatabaseWorkers:
    """Return the workers of a study: this process with its device, and those that come."""
    assert isinstance(clock, SystemClock) and spec.workers is not None

    def place(on_wait: Callable[[str], None]) -> Workplace:
        launcher = ProcessLauncher(mark, clock, on_wait=on_wait)
        return Workplace(files.workplace, facts_of(device, "this machine"), launcher, clock)

    # A clock of its own: the search's does not go on while there is no worker, which is when one is looked for.
    return DatabaseWorkers(shared, place, spec.workers, mark, SystemClock(), files.outcome.exists)


def _read(side: SearchSide) -> tuple[list[WorkerRow], list[ErrandRow]]:
    if not side.beat():
        raise UsageError("another search of the study has begun", advice="one of them is enough.")
    return side.workers(), side.errands()
