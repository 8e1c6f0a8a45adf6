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
from autotune.launcher.remote import (
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

# What runs on a node of a Ray cluster: an actor with this project's own launcher. Ray creates it from this class.
#
# Its launcher has a thread of its own, so that the actor answers while a launch runs. The launcher's processes die with
# that thread, and thus with the actor, however the actor dies.

#: Ray starts its workers with this many threads for OpenMP, unless the node's own environment says otherwise.
_THREADS = "OMP_NUM_THREADS"


class RayWorker:
    """One worker of a search.

    Args:
        where: the node's name, for people.
        device: ``cpu``, or ``cuda`` for the card that Ray has chosen.
        cards: number of cards of the node, each of which gets an equal share of its cores. number: the share of this
            worker, unless Ray has numbered its card.
    """

    def __init__(self, mark: str, where: str, device: str, cards: int, number: int) -> None:
        undo_rays_settings()
        self._ends = contextlib.ExitStack()
        self._news: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        share = share_of_card(cards, number)
        self._thread = WorkplaceThread(lambda: self._open(mark, where, device, cards, share), self._tell)

    def _open(self, mark: str, where: str, device: str, cards: int, number: int) -> Workplace:
        clock = SystemClock()
        resolved = resolve_device(device)
        host = read_host()
        cores: tuple[int, ...] = ()
        if cards > 1:
            cores = equal_shares(allowed_cores(), cards)[number]
            host = host.part(cards)
        facts = WorkerFacts(where=where, host=host, device=resolved.name, gpu=resolved.gpu, cores=cores)
        launcher = ProcessLauncher(mark, clock, on_wait=lambda sentence: self._news.put(("said", sentence)))
        return Workplace(self._ends.enter_context(folder_of_worker()), facts, launcher, clock)

    def facts(self) -> tuple[str, str]:
        """Return what identifies the autotune here, and the worker's facts as JSON."""
        return own_code(), self._thread.facts.model_dump_json()

    def begin(self, text: str) -> None:
        """Begin an errand, passed as JSON."""
        self._thread.begin(Errand.model_validate_json(text))

    def _tell(self, errand: str, told: Beat | ErrandEnd) -> None:
        self._news.put(("end" if isinstance(told, ErrandEnd) else errand, told.model_dump_json()))

    def recall(self) -> None:
        """Make the errand end as interrupted."""
        self._thread.recall()

    def news(self, wait_s: float) -> list[tuple[str, str]]:
        """Return what there is to report, waiting at most ``wait_s`` for something.

        Each item is ``("end", ErrandEnd)``, ``("said", sentence)``, or an errand's name with a beat; records as JSON.
        """
        news: list[tuple[str, str]] = []
        with contextlib.suppress(queue.Empty):
            news.append(self._news.get(timeout=wait_s))
            while True:
                news.append(self._news.get_nowait())
        return news

    def close(self) -> None:
        """End whatever runs, and remove what it has left here."""
        self._thread.close()
        self._ends.close()


def share_of_card(cards: int, number: int) -> int:
    """Return which of a node's equal shares of cores belongs to the card that Ray gave this actor, so that two searches
    on a node do not share one; ``number`` if Ray reports no index below ``cards``."""
    if cards < 2:
        return number
    import ray

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    place = int(ids[0]) if len(ids) == 1 and ids[0].isdecimal() else cards
    return place if place < cards else number


def undo_rays_settings() -> None:
    """Let launches run here like a training that the node's owner starts: Ray limits the threads of its workers, and
    lowers their priority."""
    with contextlib.suppress(OSError):
        if f"\0{_THREADS}=" not in f"\0{Path(f'/proc/{os.getppid()}/environ').read_text(errors='replace')}":
            os.environ.pop(_THREADS, None)
    # Only root may undo this, and on an otherwise idle node it makes no difference.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))


# The nodes of a Ray cluster as workers of a search: one actor for each free card, or for each node's cores.
#
# Ray places actors and notices when they are lost. An actor is requested on every node that has the required resources,
# one for each card, until there are as many workers as the search uses, and again when one is lost.

#: How often nodes are listed, and how long an actor waits for something to report before it answers.
NODES_S, REPORT_S = 2.0, 0.2
#: A node on which an actor could not be started is tried again after this time.
AGAIN_S = 10.0
_SAME = "all nodes need this version of autotune, and what it needs."
#: How long actors may take to end by themselves.
END_S = 10.0
#: The key of `on_resources` for a kind of card, and the resource that stands for it on nodes.
ACCELERATOR = "accelerator_type"


@dataclass(frozen=True)
class _Slot:
    """A place for one worker. ``cards``: number of its node's cards; 0: the node's cores are the device."""

    node: str
    number: int
    where: str
    cards: int
    cpus: float


@dataclass
class _Actor:
    """Attributes:
    handle: Ray's handle of the actor. pending: the last request to it, not answered yet.
    arrived: it has reported its facts.
    """

    slot: _Slot
    handle: Any
    pending: Any
    arrived: bool = False


class RayWorkers(Workers):
    """Workers on a Ray cluster.

    Args:
        spec: says which cluster (`on`), what a worker requires (`on_resources`), and how many are used (`workers`).

    Raises:
        MachineError: Ray is not installed, the cluster cannot be reached, or no node has the required resources.
        UsageError: the request names no cluster, or invalid resources.
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
        #: Nodes that are not used: for good, or until a time.
        self._away: set[str] = set()
        self._later_s: dict[str, float] = {}
        self._made = 0
        self._on_cards = _wants_cards(spec, self._nodes())
        slots = self._slots()
        if not slots:
            requested = listed([*(["GPU"] if self._on_cards else ["CPU"]), *sorted(self._resources)])
            self.close()
            raise MachineError(
                f"no node of {self.what} has what is asked for ({requested})", advice="see `ray status`."
            )
        self.count = min(len(slots), spec.workers or len(slots))

    def news(self, wait_s: float) -> list[News]:
        if self._clock.now() - self._looked_s >= NODES_S:
            self._look_at_nodes()
        pending = {actor.pending: name for name, actor in self._actors.items()}
        if not self._news and not pending:
            self._clock.sleep(wait_s)
        elif pending:
            with self._lost_cluster():
                ready, rest = self._ray.wait(list(pending), num_returns=1, timeout=0 if self._news else wait_s)
                ready += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
            for ref in ready:
                self._take(pending[ref], self._actors[pending[ref]])
        news = list(self._news)
        self._news.clear()
        return news

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
        with contextlib.suppress(Exception):  # whatever state the connection is in
            closing = [actor.handle.close.remote() for actor in actors if actor.arrived]
            if closing:
                self._ray.wait(closing, num_returns=len(closing), timeout=END_S)
            for actor in actors:
                self._kill(actor)
            self._ray.shutdown()

    def _take(self, name: str, actor: _Actor) -> None:
        """Process an actor's answer, and request its next news."""
        try:
            answer = self._ray.get(actor.pending)
        except Exception as error:  # Ray's errors, and whatever was raised in the actor
            self._fail(name, actor, error)
            return
        if not actor.arrived:
            version, facts = answer
            if version != own_code():
                where = actor.slot.where
                self._refuse(name, actor, f"{where} has autotune {version}, and this is {own_code()}")
                return
            if sum(other.arrived for other in self._actors.values()) >= self.count:
                # Others were faster. This one must not keep a card that others could use.
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
            out_of_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
            why = "Ray ended it for want of memory on its node" if out_of_memory else "its node or its process died"
            self._news.append(Gone(name, why))
            self._kill(actor)
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if isinstance(error, self._ray.exceptions.RayTaskError) or "creation task" in str(error):
            # The error raised in the actor comes last, after the name of its class.
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
        """Request an actor for every free slot until enough have arrived; then drop the others."""
        self._looked_s = self._clock.now()
        if sum(actor.arrived for actor in self._actors.values()) >= self.count:
            for name, actor in list(self._actors.items()):
                if not actor.arrived:
                    del self._actors[name]
                    self._kill(actor)
            return
        with self._lost_cluster():
            slots = self._slots()
        occupied = {actor.slot for actor in self._actors.values()}
        for slot in slots:
            if slot not in occupied and self._later_s.get(slot.node, 0.0) <= self._clock.now():
                self._start(slot)

    def _start(self, slot: _Slot) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._made += 1
        device = "cuda" if slot.cards else "cpu"
        try:
            actor_class = self._ray.remote(RayWorker).options(
                num_cpus=slot.cpus if self._cpus is None else self._cpus,
                num_gpus=1 if slot.cards else 0,
                resources=self._resources,
                scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
                max_restarts=0,
            )
            handle = actor_class.remote(self._mark, slot.where, device, slot.cards, slot.number)
            self._actors[f"worker-{self._made}"] = _Actor(slot, handle, handle.facts.remote())
        except Exception as error:  # from the client, whose server has to import the actor's class
            raise MachineError(
                f"{self.what} makes no worker: {_words(error)}", advice=f"{_SAME} So does its head, for `ray://`."
            ) from error

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _slots(self) -> list[_Slot]:
        """Return the places for workers, on nodes that have the required resources."""
        slots: list[_Slot] = []
        nodes = self._nodes()
        hosts = Counter(node["NodeManagerHostname"] for node in nodes)
        for node in nodes:
            resources = node["Resources"]
            cards, cpus = int(resources.get("GPU", 0)), resources.get("CPU", 0)
            per_node = max(1, cards) if self._on_cards else 1
            required = {"GPU" if self._on_cards else "CPU": 1.0, **self._resources, "CPU": self._cpus or 1.0}
            if node["NodeID"] in self._away or any(
                resources.get(name, 0) < amount for name, amount in required.items()
            ):
                continue
            host = node["NodeManagerHostname"]
            where = host if hosts[host] == 1 else f"{host} ({node['NodeID'][:6]})"
            slots += [
                _Slot(node["NodeID"], number, where, cards if self._on_cards else 0, cpus // per_node)
                for number in range(per_node)
            ]
        return slots

    @contextlib.contextmanager
    def _lost_cluster(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Ray has several classes of errors, and its client others
            raise MachineError(
                f"{self.what} does not answer any more: {_words(error)}",
                advice="everything measured is kept: `autotune resume` goes on when it is back.",
            ) from error


def resources_of(spec: StudySpec) -> tuple[dict[str, float], float | None]:
    """Return what each worker requires besides its device, and how many CPUs, if stated.

    Raises:
        UsageError: an amount is invalid.
    """
    amounts: dict[str, float] = {}
    for name, text in spec.on_resources.items():
        if name == ACCELERATOR:
            # Ray gives each such node 1.0 of this resource, of which any number of actors can take a little.
            amounts[f"{ACCELERATOR}:{text}"] = 0.001
            continue
        try:
            amounts[name] = float(text)
        except ValueError:
            amounts[name] = 0.0
        if not 0 < amounts[name] < float("inf"):
            raise UsageError(
                f"--on-resources {name}={text[:40]} is no amount", advice="--on-resources CPU=8,h100=1 asks for both."
            )
    return amounts, amounts.pop("CPU", None)


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
    # Ray replaces the handlers of the signals that ask a search to end.
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with warnings.catch_warnings():
            # The client's error repeats its warnings.
            warnings.simplefilter("ignore")
            ray.init(address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray has several classes of errors, and its client others
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
    """Return the first line of an error of Ray's, or the last if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (lines[-1] if lines[0].endswith(":") else lines[0]).rstrip(".")[:200]
