"""The search's side of a study on which several machines work: its own device, and workers that share its database."""

from __future__ import annotations

import contextlib
import queue
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from autotune.base.clock import Clock, SystemClock
from autotune.cluster.at_work import facts_of
from autotune.cluster.errand_table import LOOK_EVERY_S, LOST_S, ErrandRow, SearchSide, WorkerRow
from autotune.base.errors import UsageError
from autotune.launcher import ProcessLauncher
from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.launcher.workers import Arrived, Gone, News, Reported, Returned, Said, Workers
from autotune.launcher.workplace import Workplace, WorkplaceThread, own_code
from autotune.base.layout import StudyFiles
from autotune.base.records import Beat, StudySpec
from autotune.search.request import Device
from autotune.study.patience import PATIENCE_S, LostConnection
from autotune.study.shared import SharedStudy

#: The worker of this process.
HERE = "here"
_Change = Callable[[SearchSide], None]
_T = TypeVar("_T")


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
