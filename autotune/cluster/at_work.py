"""The worker's side of a study on which several machines work: runs here what the search hands out."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autotune.base.clock import Clock, SystemClock
from autotune.cluster.errand_table import LOOK_EVERY_S, SearchRow, WorkerSide, request_of, search_of
from autotune.base.errors import InterruptedSearch, MachineError, UnknownNameError, UsageError
from autotune.launcher import ProcessLauncher
from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.launcher.workplace import Workplace, own_code
from autotune.machine.host import read_host
from autotune.base.records import Beat, StudySpec
from autotune.search.request import Device, resolve_device
from autotune.study.patience import LostConnection, Patience
from autotune.study.shared import SharedDatabase

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
