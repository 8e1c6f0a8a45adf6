"""What a search asks of workers on other machines, and what they report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.base.records import Beat


@dataclass(frozen=True)
class Arrived:
    """A worker can be given errands."""

    worker: str
    facts: WorkerFacts


@dataclass(frozen=True)
class Gone:
    """A worker is lost, with all that it was doing. ``why``: a clause, such as "its node died"."""

    worker: str
    why: str


@dataclass(frozen=True)
class Reported:
    """The launch of a worker's errand reports progress."""

    worker: str
    errand: str
    beat: Beat


@dataclass(frozen=True)
class Said:
    """A worker has something to tell the user, if only why it cannot arrive."""

    worker: str
    sentence: str


@dataclass(frozen=True)
class Returned:
    """A worker has ended an errand, and can be given the next."""

    worker: str
    end: ErrandEnd


News = Arrived | Gone | Reported | Said | Returned


class Workers(ABC):
    """Workers on other machines. All calls are made in the search's own thread, and none of them raises for a worker
    that is lost: that is news.

    Attributes:
        count: how many are expected at a time; may change with the news.
        what: names them all for people, such as "the Ray cluster at ray://head:10001".
    """

    count: int
    what: str

    @abstractmethod
    def news(self, wait_s: float) -> list[News]:
        """Return what has happened since the last call, in order; wait for something so long at most.

        Raises:
            MachineError: no worker can be reached any more, and none will come.
        """

    @abstractmethod
    def send(self, worker: str, errand: Errand) -> None:
        """Give a worker an errand. It has one at a time."""

    @abstractmethod
    def recall(self, worker: str) -> None:
        """Ask a worker to end its errand, which then ends as interrupted."""

    @abstractmethod
    def dismiss(self, worker: str, *, keep_away: bool) -> None:
        """Use a worker no more, and end what it runs. It sends no more news.

        Args:
            keep_away: its machine is not fit for this search, so no other worker is wanted there.
        """

    def explain(self, worker: str, why: str) -> None:  # noqa: B027
        """Tell a worker why it is going to be dismissed for good, for those who look there. Need not do anything."""

    @abstractmethod
    def close(self) -> None:
        """Dismiss all, and release what is kept. May be called twice."""
