"""What runs on a node of a Ray cluster: an actor that holds this project's own launcher. Ray makes it from this class.

Its launcher has a thread of its own, so that the actor answers while a launch runs. Its processes die with that thread,
and so with the actor, however that dies.
"""

from __future__ import annotations

import contextlib
import os
import queue
from pathlib import Path

from autotune.base.clock import SystemClock
from autotune.launcher import ProcessLauncher
from autotune.launcher.errands import Errand, ErrandEnd, WorkerFacts
from autotune.launcher.workplace import Workplace, WorkplaceThread, folder_of_worker, own_code
from autotune.machine.cores import allowed_cores, equal_shares
from autotune.machine.host import read_host
from autotune.base.records import Beat
from autotune.search.request import resolve_device

#: Ray starts its workers with this many threads for OpenMP, unless the node's own environment says otherwise.
_THREADS = "OMP_NUM_THREADS"


class RayWorker:
    """One worker of a search.

    Args:
        mark: of the search's processes.
        where: names the node for people.
        device: ``cpu``, or ``cuda`` for the card that Ray has chosen.
        cards: number of cards of the node, each of which has an equal share of its cores. number: which share this has,
            unless Ray has numbered its card.
    """

    def __init__(self, mark: str, where: str, device: str, cards: int, number: int) -> None:
        undo_rays_settings()
        self._ends = contextlib.ExitStack()
        self._news: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        share = share_of_card(cards, number)
        self._thread = WorkplaceThread(lambda: self._open(mark, where, device, cards, share), self._tell)

    def _open(self, mark: str, where: str, device: str, cards: int, number: int) -> Workplace:
        clock = SystemClock()
        found = resolve_device(device)
        host = read_host()
        cores: tuple[int, ...] = ()
        if cards > 1:
            cores = equal_shares(allowed_cores(), cards)[number]
            host = host.part(cards)
        facts = WorkerFacts(where=where, host=host, device=found.name, gpu=found.gpu, cores=cores)
        launcher = ProcessLauncher(mark, clock, on_wait=lambda sentence: self._news.put(("said", sentence)))
        return Workplace(self._ends.enter_context(folder_of_worker()), facts, launcher, clock)

    def facts(self) -> tuple[str, str]:
        """Return which autotune is here, and what there is, as JSON."""
        return own_code(), self._thread.facts.model_dump_json()

    def begin(self, text: str) -> None:
        """Begin an errand, which is given as JSON."""
        self._thread.begin(Errand.model_validate_json(text))

    def _tell(self, errand: str, told: Beat | ErrandEnd) -> None:
        self._news.put(("end" if isinstance(told, ErrandEnd) else errand, told.model_dump_json()))

    def recall(self) -> None:
        """Have the errand end as interrupted."""
        self._thread.recall()

    def news(self, wait_s: float) -> list[tuple[str, str]]:
        """Return what there is to report, or wait for something so long at most.

        Each is ``("end", ErrandEnd)``, ``("said", sentence)`` or the name of an errand with a beat; records as JSON.
        """
        found: list[tuple[str, str]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._news.get(timeout=wait_s))
            while True:
                found.append(self._news.get_nowait())
        return found

    def close(self) -> None:
        """End what runs, and remove what is left here."""
        self._thread.close()
        self._ends.close()


def share_of_card(cards: int, number: int) -> int:
    """Return which of a node's equal shares of cores goes with the card that Ray gave this actor, so that two searches
    on a node do not meet on one; ``number`` if Ray tells no place among ``cards``."""
    if cards < 2:
        return number
    import ray

    given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    place = int(given[0]) if len(given) == 1 and given[0].isdecimal() else cards
    return place if place < cards else number


def undo_rays_settings() -> None:
    """Let launches run here as a training that the node's owner starts: Ray limits the threads of its workers, and has
    them give way to other processes."""
    with contextlib.suppress(OSError):
        if f"\0{_THREADS}=" not in f"\0{Path(f'/proc/{os.getppid()}/environ').read_text(errors='replace')}":
            os.environ.pop(_THREADS, None)
    # Only root may take it back, and on a node that is otherwise idle it makes no difference.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
