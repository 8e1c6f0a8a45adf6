"""What a search and its workers tell each other through the tables of a database that they share.

A search hands out errands, and workers write back how they ended. An errand belongs to one worker, and is removed when
that worker is given up: what the worker writes then changes no row. Ages are by the database's clock alone. Every
statement may be executed twice, because an answer may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.base.records import Beat
from autotune.study.schema import ERRANDS, SEARCHES, STUDIES, WORKERS

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
