"""The configurations that could be tried next, with what never changes about them computed once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from autotune.records import Config, Value
from autotune.search.auto.features import Array, Bools
from autotune.search.auto.memory import MemoryModel, Part, Table, part
from autotune.search.auto.rates import Pool, RateModel
from autotune.search.cost import CostModel, graph
from autotune.space import Lessons, Space, canonical, key

#: Spaces up to this size are looked through as a whole. Of larger ones so many configurations, drawn at random, and
#: then all that come near the best.
POOL = 4096
#: Draws for each configuration wanted of a space in which few combinations are legal.
_PATIENCE = 20


class Offers:
    """A pool of legal configurations and which of them are still open.

    Args:
        seed: of the choice from a large space.

    Attributes:
        pool: the configurations with their features; grows where the space is larger than what was drawn of it.
        open: new and not ruled out, shape ``(N,)``.
    """

    def __init__(self, space: Space, rates: RateModel, seed: int) -> None:
        self._space = space
        self._rates = rates
        found = list(islice(space.grid(), POOL + 1))
        #: The pool is the whole space.
        self.whole = len(found) <= POOL
        configs = found if self.whole else _drawn(space, random.Random(seed))
        self.pool = rates.pool([])
        self.open: Bools = np.ones(0, dtype=bool)
        self._index: dict[str, int] = {}
        self._batches: list[int] = []
        #: Of those that compile: where they are, their mode, and what they share with others.
        self._compiled: list[tuple[int, str, str]] = []
        #: Of each combination that memory depends on one that has it, and for each configuration which it has.
        self._memory_places: dict[tuple[Part, int], int] = {}
        self._memory_rows: list[int] = []
        self._memory_table: Table | None = None
        self._add(configs)

    def __len__(self) -> int:
        return len(self.pool)

    def close(self, tried: Iterable[str]) -> None:
        """These keys are not new any more."""
        for name in tried:
            if name in self._index:
                self.open[self._index[name]] = False

    def rule_out(self, lessons: Lessons) -> None:
        """Close what a failure has ruled out."""
        for i in np.flatnonzero(self.open):
            self.open[i] = not lessons.rule_out(self.pool.configs[i])

    def grow(self, centres: Sequence[Config], tried: set[str], lessons: Lessons) -> None:
        """Add what differs from these in one knob, where the pool is not the whole space."""
        if self.whole:
            return
        found: dict[str, dict[str, Value]] = {}
        for centre in centres:
            for config in neighbours(self._space, centre):
                name = key(config)
                if name not in self._index and name not in tried and not lessons.rule_out(config):
                    found[name] = config
        self._add(list(found.values()))

    def seconds(self, costs: CostModel, rates_per_s: Array | None) -> Array:
        """What each would take to try, shape ``(N,)``.

        Args:
            rates_per_s: at which each is expected to run, ``(N,)``; ``None``: steps as long as the median trial's.
        """
        fixed_s, steps = costs.line
        batches = np.array(self._batches)
        steps_s = np.full(len(self), costs.usual_step_s) if rates_per_s is None else batches / rates_per_s
        compiling = np.zeros(len(self))
        for i, mode, name in self._compiled:
            compiling[i] = costs.compile_s(mode, name)
        found: Array = fixed_s + steps * steps_s + compiling
        return np.maximum(found, 0.5)

    def fits(self, memory: MemoryModel) -> Bools:
        """Which surely fit into memory, shape ``(N,)``."""
        if memory.capacity_bytes is None:
            return np.ones(len(self), dtype=bool)
        if self._memory_table is None:
            self._memory_table = memory.table([self.pool.configs[i] for i in self._memory_places.values()])
        known = memory.fit(self._memory_table)
        found: Bools = known[self._memory_rows]
        return found

    def _add(self, configs: Sequence[dict[str, Value]]) -> None:
        if not configs:
            return
        memory_row = {name: i for i, name in enumerate(self._memory_places)}
        self._memory_table = None
        for config in configs:
            if config.get("compile_mode", "off") != "off":
                self._compiled.append((len(self._index), str(config["compile_mode"]), graph(config)))
            self._index[key(config)] = len(self._index)
            self._batches.append(int(config["batch_size"]))
            name = (part(config), int(config["batch_size"]))
            self._memory_places.setdefault(name, len(self._batches) - 1)
            self._memory_rows.append(memory_row.setdefault(name, len(memory_row)))
        self.pool = Pool.joined([self.pool, self._rates.pool(configs)])
        self.open = np.concatenate([self.open, np.ones(len(configs), dtype=bool)])


def neighbours(space: Space, config: Config) -> list[dict[str, Value]]:
    """Every legal configuration that differs in one knob; knobs that become active take the first value."""
    found = []
    for name in space.choices:
        for value in space.legal(name):
            if config.get(name) != value or isinstance(value, bool) != isinstance(config.get(name), bool):
                complete = {n: space.legal(n)[0] for n in space.choices} | dict(config) | {name: value}
                other = canonical(complete)
                if other != config and space.refusal(other) is None:
                    found.append(other)
    return found


def _drawn(space: Space, rng: random.Random) -> list[dict[str, Value]]:
    choices = {name: space.legal(name) for name in space.choices}
    found: dict[str, dict[str, Value]] = {}
    for _ in range(_PATIENCE * POOL):
        config = canonical({name: rng.choice(values) for name, values in choices.items()})
        if space.combination_refusal(config) is None:
            found[key(config)] = config
        if len(found) == POOL:
            break
    return list(found.values())
