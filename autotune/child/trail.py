"""What the agent in a script has written (see `autotune_agent.watching`), turned into steps of a training.

A step of the training ends with a step of that optimizer which takes the fewest: with one per batch or one per several
batches (gradient accumulation), and with several optimizers (a GAN's). Its samples are those of the batches that came
since the last one. Steps during which an epoch ended, began, or anything was evaluated are told apart: their time is
not that of a step.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.records import Value

#: Steps of one optimizer after which all have been seen. A GAN may train one network five times before the other.
SEEN_AFTER = 6

_FACTS = ("arguments", "ahead", "batches", "kind")


@dataclass(frozen=True)
class SeenStep:
    """One step of a script's training.

    Attributes:
        ended_at: on the host's monotonic clock. seconds: since the last one ended; on CUDA by the device's clock.
        wait_s: how long the script waited for its batches, on the host's clock.
        samples: in its batches; ``None`` if that is not known.
        whole: it trained on batches in the middle of an epoch, and nothing else was seen in it.
        turned: an epoch of the loader that trains began in it, and nothing else was seen.
    """

    ended_at: float
    seconds: float
    wait_s: float
    samples: int | None
    whole: bool
    turned: bool


@dataclass
class SeenLoader:
    """A loader that was iterated over with gradients on; see `torch.utils.data.DataLoader`.

    Attributes:
        arguments: of its class, as they are in force. ahead: batches that its workers make in advance.
        batches: of an epoch; ``None`` if that is not known. kind: class of its data set.
        steps: number of steps that it has delivered batches for. taken: of the current epoch's batches.
    """

    arguments: dict[str, Value | None]
    ahead: int
    batches: int | None
    kind: str
    steps: int = 0
    taken: int = 0

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch; ``None`` if that is not known."""
        found = self.arguments["batch_size"]
        return None if found is None else int(found)


class Trail:
    """Reads the agent's file while it grows.

    Args:
        path: of the file; it need not exist yet.

    Attributes:
        torch_version, cuda: of the script's own PyTorch, once it has been imported.
        began_at: when it first called a model to train it, or took a step, on the host's monotonic clock.
        loaders: by number, those that were iterated over with gradients on.
        optimizer_steps: number of steps that each optimizer has taken.
        own: once all has been seen, facts about the script's own, as the agent tells them.
        raised: the chain of an exception that nobody caught, the last first; see `autotune_agent.watching`.
        peak_bytes: CUDA: the most memory that the script's allocator reserved.
    """

    def __init__(self, path: Path) -> None:
        self.torch_version: str | None = None
        self.cuda: str | None = None
        self.began_at: float | None = None
        self.loaders: dict[int, SeenLoader] = {}
        self.optimizer_steps: Counter[int] = Counter()
        self.own: dict[str, Any] | None = None
        self.raised: list[list[Any]] | None = None
        self.peak_bytes: int | None = None
        self._path = path
        self._descriptor: int | None = None
        self._rest = b""
        self._held: list[dict[str, Any]] = []
        self._unit: int | None = None
        self._since: _Since | None = None

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def loader(self) -> SeenLoader | None:
        """The loader that has delivered batches for most steps; ``None`` if none has delivered any.

        An evaluation may take more batches, but takes them between two steps.
        """
        found = max(self.loaders.values(), key=lambda loader: loader.steps, default=None)
        return found if found is not None and found.steps else None

    def read(self, *, decide: bool = False) -> list[SeenStep]:
        """Return the steps that have ended since the last time, in order, but for the very first.

        Args:
            decide: all optimizers have been seen, however few steps they have taken. Otherwise steps are held back
                until one has taken `SEEN_AFTER`.
        """
        for event in self._events():
            match event["e"]:
                case "torch":
                    self.torch_version, self.cuda = event["version"], event["cuda"]
                case "begin":
                    self.began_at = event["at"]
                case "own":
                    self.own = event
                case "memory":
                    self.peak_bytes = max(self.peak_bytes or 0, event["reserved"])
                case "raised":
                    self.raised = event["chain"]
                case "loader":
                    self.loaders[event["l"]] = SeenLoader(**{name: event[name] for name in _FACTS})
                case kind:
                    self._held.append(event)
                    if kind == "step":
                        self.optimizer_steps[event["o"]] += 1
        counts = self.optimizer_steps
        if self._unit is None and counts and (decide or max(counts.values()) >= SEEN_AFTER):
            # Of several with as many, the one that was seen last ends a step.
            self._unit = min(counts, key=lambda number: (counts[number], -number))
        if self._unit is None:
            return []
        held, self._held = self._held, []
        return [step for event in held if (step := self._note(event)) is not None]

    def _events(self) -> Iterator[dict[str, Any]]:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
        while data := os.read(self._descriptor, 2**20):
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def _note(self, event: dict[str, Any]) -> SeenStep | None:
        if event["e"] == "epoch":
            number = event["l"]
            if number is not None:
                self.loaders[number].taken = 0
            if self._since is not None:
                self._since.began.append(number)
            return None
        for number, samples, wait_s in event["batches"]:
            self._take(number, samples, wait_s)
        if event["o"] != self._unit:
            return None
        since, self._since = self._since, _Since(event["at"], event.get("device"))
        return None if since is None else self._ended(since, self._since)

    def _take(self, number: int, samples: int | None, wait_s: float) -> None:
        loader, since = self.loaders[number], self._since
        loader.taken += 1
        if since is None:
            return
        loader.steps += number not in since.by
        since.wait_s += wait_s
        since.samples = None if samples is None or since.samples is None else since.samples + samples
        since.by.add(number)
        # The last batch of an epoch may have fewer samples than it is said to have.
        since.last = since.last or loader.taken == loader.batches

    def _ended(self, since: _Since, now: _Since) -> SeenStep:
        seconds = now.at - since.at
        if now.device is not None and since.device is not None:
            seconds = now.device - since.device
        trains = {number for number, loader in self.loaders.items() if loader is self.loader}
        others = not since.by <= trains
        return SeenStep(
            ended_at=now.at,
            seconds=seconds,
            wait_s=min(since.wait_s, seconds),
            samples=since.samples if since.by else None,
            whole=not others and not since.began and not since.last,
            turned=not others and set(since.began) == trains and not since.last,
        )


@dataclass
class _Since:
    """What has been seen since the last step ended: batches of loaders, beginnings of epochs."""

    at: float
    device: float | None
    wait_s: float = 0.0
    samples: int | None = 0
    last: bool = False
    by: set[int] = field(default_factory=set)
    began: list[int | None] = field(default_factory=list)
