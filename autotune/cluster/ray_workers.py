"""The nodes of a Ray cluster as workers."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock
from autotune.base.errors import SIGNALS, MachineError, UsageError
from autotune.base.records import Beat, StudySpec
from autotune.launcher import ProcessLauncher
from autotune.launcher.elsewhere import (
    Arrived,
    Errand,
    ErrandEnd,
    Gone,
    News,
    Reported,
    Returned,
    Said,
    WorkerFacts,
    Workers,
    Workplace,
    WorkplaceThread,
    folder_of_worker,
    own_code,
)
from autotune.machine.cpu_load import allowed_cores, equal_shares
from autotune.machine.host import read_host
from autotune.search.request import resolve_device
from autotune.space.formatting import listed

# What runs on a node of a Ray cluster: an actor that holds this project's own launcher. Ray makes it from this class.
#
# Its launcher has a thread of its own, so that the actor answers while a launch runs. Its processes die with that
# thread, and so with the actor, however that dies.

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


# The nodes of a Ray cluster as workers of a search: one actor for each free card, or for each node's cores.
#
# Ray places actors and notices what is lost. An actor is wanted on every node that has what is asked for, one for each
# card, until there are as many workers as the search uses, and again when one is lost.

#: How often nodes are looked at, and how long an actor waits for something to report before it answers.
NODES_S, REPORT_S = 2.0, 0.2
#: A node on which an actor could not be started is asked again after this time.
AGAIN_S = 10.0
_SAME = "all nodes need this version of autotune, and what it needs."
#: How long actors may take to end by themselves.
END_S = 10.0
#: The key of `on_resources` for a kind of card, and the resource by which nodes have it.
ACCELERATOR = "accelerator_type"


@dataclass(frozen=True)
class _Slot:
    """A place for one worker. ``cards``: of its node; 0: the node's cores are the device."""

    node: str
    number: int
    where: str
    cards: int
    cpus: float


@dataclass
class _Actor:
    """Attributes:
    handle: of the actor. pending: what it was asked last, and has not answered yet.
    arrived: it has told what it has.
    """

    slot: _Slot
    handle: Any
    pending: Any
    arrived: bool = False


class RayWorkers(Workers):
    """Workers on a Ray cluster.

    Args:
        spec: says which cluster (`on`), what a worker asks for (`on_resources`), and how many are used (`workers`).
        mark: of the search's processes.

    Raises:
        MachineError: Ray is not installed, the cluster cannot be reached, or no node has what is asked for.
        UsageError: the request names no cluster, or resources that are none.
    """

    def __init__(self, spec: StudySpec, mark: str) -> None:
        assert spec.on is not None
        self._resources, self._cpus = resources_of(spec)
        self._ray = _connected(spec.on)
        self.what = f"the Ray cluster at {spec.on}" if spec.on != "ray" else "the Ray cluster"
        self._mark = mark
        self._clock = SystemClock()
        self._actors: dict[str, _Actor] = {}
        self._news: deque[News] = deque()
        self._looked_s = -NODES_S
        #: Nodes that are not asked: for ever, or until a time.
        self._away: set[str] = set()
        self._later_s: dict[str, float] = {}
        self._made = 0
        self._on_cards = _wants_cards(spec, self._nodes())
        slots = self._slots()
        if not slots:
            asked = listed([*(["GPU"] if self._on_cards else ["CPU"]), *sorted(self._resources)])
            self.close()
            raise MachineError(f"no node of {self.what} has what is asked for ({asked})", advice="see `ray status`.")
        self.count = min(len(slots), spec.workers or len(slots))

    def news(self, wait_s: float) -> list[News]:
        if self._clock.now() - self._looked_s >= NODES_S:
            self._look_at_nodes()
        asked = {actor.pending: name for name, actor in self._actors.items()}
        if not self._news and not asked:
            self._clock.sleep(wait_s)
        elif asked:
            with self._lost_cluster():
                done, rest = self._ray.wait(list(asked), num_returns=1, timeout=0 if self._news else wait_s)
                done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
            for ref in done:
                self._take(asked[ref], self._actors[asked[ref]])
        found = list(self._news)
        self._news.clear()
        return found

    def send(self, worker: str, errand: Errand) -> None:
        if worker in self._actors:
            self._actors[worker].handle.begin.remote(errand.model_dump_json())

    def recall(self, worker: str) -> None:
        if worker in self._actors:
            self._actors[worker].handle.recall.remote()

    def dismiss(self, worker: str, *, keep_away: bool) -> None:
        actor = self._actors.pop(worker, None)
        if actor is None:
            return
        if keep_away:
            self._away.add(actor.slot.node)
        self._kill(actor)

    def close(self) -> None:
        actors = list(self._actors.values())
        self._actors.clear()
        if not self._ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # whatever the connection has come to
            ended = [actor.handle.close.remote() for actor in actors if actor.arrived]
            if ended:
                self._ray.wait(ended, num_returns=len(ended), timeout=END_S)
            for actor in actors:
                self._kill(actor)
            self._ray.shutdown()

    def _take(self, name: str, actor: _Actor) -> None:
        """Take what an actor has answered, and ask it again."""
        try:
            answer = self._ray.get(actor.pending)
        except Exception as error:  # Ray's, and whatever was raised there
            self._fail(name, actor, error)
            return
        if not actor.arrived:
            version, facts = answer
            if version != own_code():
                where = actor.slot.where
                self._refuse(name, actor, f"{where} has autotune {version}, and this is {own_code()}")
                return
            if sum(one.arrived for one in self._actors.values()) >= self.count:
                # Others were faster. It is not to keep a card that others could use.
                del self._actors[name]
                self._kill(actor)
                return
            actor.arrived = True
            self._news.append(Arrived(name, WorkerFacts.model_validate_json(facts)))
        else:
            self._news.extend(_read(name, kind, text) for kind, text in answer)
        actor.pending = actor.handle.news.remote(REPORT_S)

    def _fail(self, name: str, actor: _Actor, error: Exception) -> None:
        """Forget an actor that is lost, or could not be started."""
        if actor.arrived:
            del self._actors[name]
            self._later_s[actor.slot.node] = self._clock.now() + NODES_S
            full = isinstance(error, self._ray.exceptions.OutOfMemoryError)
            why = "Ray ended it for want of memory on its node" if full else "its node or its process died"
            self._news.append(Gone(name, why))
            self._kill(actor)
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if isinstance(error, self._ray.exceptions.RayTaskError) or "creation task" in str(error):
            # What was raised there comes last, after the name of its class.
            why = lines[-1].partition("Error: ")[2] or lines[-1]
            self._refuse(name, actor, f"{actor.slot.where} cannot be used: {why}")
            return
        del self._actors[name]
        self._later_s[actor.slot.node] = self._clock.now() + AGAIN_S
        self._kill(actor)

    def _refuse(self, name: str, actor: _Actor, sentence: str) -> None:
        del self._actors[name]
        self._away.add(actor.slot.node)
        self._kill(actor)
        if not self._slots():
            raise MachineError(sentence, advice=_SAME)
        self._news.append(Said(name, sentence))

    def _kill(self, actor: _Actor) -> None:
        with contextlib.suppress(Exception):  # it is gone
            self._ray.kill(actor.handle)

    def _look_at_nodes(self) -> None:
        """Want an actor wherever there is place for one, until there are enough, and no more then."""
        self._looked_s = self._clock.now()
        if sum(actor.arrived for actor in self._actors.values()) >= self.count:
            for name, actor in list(self._actors.items()):
                if not actor.arrived:
                    del self._actors[name]
                    self._kill(actor)
            return
        with self._lost_cluster():
            slots = self._slots()
        taken = {actor.slot for actor in self._actors.values()}
        for slot in slots:
            if slot not in taken and self._later_s.get(slot.node, 0.0) <= self._clock.now():
                self._start(slot)

    def _start(self, slot: _Slot) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._made += 1
        made = self._ray.remote(RayWorker).options(
            num_cpus=slot.cpus if self._cpus is None else self._cpus,
            num_gpus=1 if slot.cards else 0,
            resources=self._resources,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
            max_restarts=0,
        )
        device = "cuda" if slot.cards else "cpu"
        try:
            handle = made.remote(self._mark, slot.where, device, slot.cards, slot.number)
            self._actors[f"worker-{self._made}"] = _Actor(slot, handle, handle.facts.remote())
        except Exception as error:  # of the client, whose server has to import what an actor is made of
            raise MachineError(
                f"{self.what} makes no worker: {_words(error)}", advice=f"{_SAME} So does its head, for `ray://`."
            ) from error

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _slots(self) -> list[_Slot]:
        """Return the places for workers, on nodes that have what is asked for."""
        found: list[_Slot] = []
        nodes = self._nodes()
        hosts = Counter(node["NodeManagerHostname"] for node in nodes)
        for node in nodes:
            has = node["Resources"]
            cards, cpus = int(has.get("GPU", 0)), has.get("CPU", 0)
            each = max(1, cards) if self._on_cards else 1
            wanted = {"GPU" if self._on_cards else "CPU": 1.0, **self._resources, "CPU": self._cpus or 1.0}
            if node["NodeID"] in self._away or any(has.get(name, 0) < amount for name, amount in wanted.items()):
                continue
            host = node["NodeManagerHostname"]
            where = host if hosts[host] == 1 else f"{host} ({node['NodeID'][:6]})"
            found += [
                _Slot(node["NodeID"], number, where, cards if self._on_cards else 0, cpus // each)
                for number in range(each)
            ]
        return found

    @contextlib.contextmanager
    def _lost_cluster(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Ray has several, and the client others
            raise MachineError(
                f"{self.what} does not answer any more: {_words(error)}",
                advice="everything measured is kept: `autotune resume` goes on when it is back.",
            ) from error


def resources_of(spec: StudySpec) -> tuple[dict[str, float], float | None]:
    """Return what each worker asks for besides its device, and how many CPUs, if that is stated.

    Raises:
        UsageError: an amount is none.
    """
    found: dict[str, float] = {}
    for name, text in spec.on_resources.items():
        if name == ACCELERATOR:
            # Ray gives each node a whole one of it, of which any number of actors takes a little.
            found[f"{ACCELERATOR}:{text}"] = 0.001
            continue
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < float("inf"):
            raise UsageError(
                f"--on-resources {name}={text[:40]} is no amount", advice="--on-resources CPU=8,h100=1 asks for both."
            )
    return found, found.pop("CPU", None)


def _wants_cards(spec: StudySpec, nodes: list[dict[str, Any]]) -> bool:
    if spec.device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"--device {spec.device} names a card, and with --on Ray chooses it", advice="--device cuda asks for any."
        )
    return spec.device == "cuda" or (spec.device == "auto" and any(node["Resources"].get("GPU") for node in nodes))


def _connected(on: str) -> Any:
    """Import Ray and connect to a cluster; return the module."""
    address = "auto" if on == "ray" else on
    if on != "ray" and not on.startswith("ray://"):
        raise UsageError(f"--on {on[:60]!r} names no cluster", advice="--on ray://HOST:10001, or --on ray on a node.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MachineError(
            "Ray is not installed here, by which --on speaks to a cluster", advice="pip install 'autotune[ray]'."
        ) from None
    # Ray takes the signal by which a search is asked to end.
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with warnings.catch_warnings():
            # What the client warns of is in its error.
            warnings.simplefilter("ignore")
            ray.init(address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray has several, and the client others
        raise MachineError(
            f"no Ray cluster answers at {address}: {_words(error)}",
            advice="`ray status` on its head node says whether it runs; the client's port is 10001 by default; a "
            "cluster with authentication wants RAY_AUTH_MODE=token and its token (~/.ray/auth_token) here, too.",
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray


def _read(name: str, kind: str, text: str) -> News:
    if kind == "end":
        return Returned(name, ErrandEnd.model_validate_json(text))
    if kind == "said":
        return Said(name, text)
    return Reported(name, kind, Beat.model_validate_json(text))


def _words(error: BaseException) -> str:
    """Return the first line of what Ray says, or the last if that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (lines[-1] if lines[0].endswith(":") else lines[0]).rstrip(".")[:200]
