"""The configurations that could be tried next, with their invariant properties computed once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from autotune.base.records import Config, Value
from autotune.knobs.compile_mode import mode_of
from autotune.samplers.auto.features import Array, Bools
from autotune.samplers.auto.memory import MemoryModel, Table, part
from autotune.samplers.auto.pool import Pool
from autotune.samplers.auto.rates import RateModel
from autotune.samplers.sampler import CostModel, graph
from autotune.space import Lessons, Space, canonical, key, samples_at_once

_Name = TypeVar("_Name")
#: Spaces up to this size are searched completely. In larger ones, this many configurations are drawn at random, and the
#: neighbours of the best are added.
POOL = 2048
#: Maximum number of draws per configuration, for spaces in which few combinations are legal.
_PATIENCE = 20


class Offers:
    """A pool of legal configurations, and which of them are still open.

    Args:
        seed: for the random choice from a large space.

    Attributes:
        pool: the configurations with their features: the whole grid of the space, or a random sample of it, and the
            neighbours of the best. open: neither tried nor ruled out, shape ``(N,)``.
    """

    def __init__(self, space: Space, rates: RateModel, seed: int) -> None:
        self._space = space
        self._rates = rates
        found = list(islice(space.grid(), POOL + 1))
        #: Whether the pool is the whole grid.
        self.whole = len(found) <= POOL
        drawn = _Group(rates, found if self.whole else _drawn(space, random.Random(seed)))
        self._groups = [drawn]
        self._drawn = {key(config): i for i, config in enumerate(drawn.pool.configs)}
        self._around: dict[str, int] = {}
        self._centres: list[str] = []
        self._near: dict[str, dict[str, dict[str, Value]]] = {}
        self.pool = drawn.pool
        self.open: Bools = np.ones(len(self.pool), dtype=bool)
        #: Which have a value that is not on its knob's ladder, ``(N,)``.
        self.further: Bools = np.zeros(len(self.pool), dtype=bool)

    def __len__(self) -> int:
        return len(self.pool)

    def close(self, name: str) -> None:
        """Mark the configuration with this key as tried."""
        place = self._drawn.get(name, self._around.get(name))
        if place is not None:
            self.open[place] = False

    def without(self, names: Iterable[str]) -> Offers:
        """Return a copy in which the configurations with these keys are closed."""
        found = copy(self)
        found.open = self.open.copy()
        for name in names:
            found.close(name)
        return found

    def rule_out(self, lessons: Lessons) -> None:
        """Close the configurations that a failure has ruled out."""
        for i in np.flatnonzero(self.open):
            self.open[i] = not lessons.rule_out(self.pool.configs[i])

    def surround(self, centres: Sequence[Config], tried: set[str], lessons: Lessons) -> None:
        """Replace the neighbours in the pool by those of ``centres``: configurations that differ in one knob.

        Does nothing if the pool is all there is to try. The resulting pool does not depend on earlier centres.
        """
        names = [key(c) for c in centres]
        if (self.whole and not self._space.further) or self._centres == names:
            return
        self._centres = names
        drawn = self._groups[0]
        for name, centre in zip(names, centres, strict=True):
            if name not in self._near:
                self._near[name] = {key(c): c for c in neighbours(self._space, centre)}
        found = [item for name in names for item in self._near[name].items()]
        new = {name: config for name, config in found if name not in self._drawn}
        around = _Group(self._rates, list(new.values()))
        self._groups = [drawn, around]
        self._around = {name: len(drawn.pool) + i for i, name in enumerate(new)}
        self.pool = Pool.joined([drawn.pool, around.pool])
        off = [any(c.get(n) in values for n, values in self._space.further.items()) for c in new.values()]
        self.further = np.concatenate([np.zeros(len(drawn.pool), dtype=bool), np.array(off, dtype=bool)])
        still = [name not in tried and not lessons.rule_out(config) for name, config in new.items()]
        self.open = np.concatenate([self.open[: len(drawn.pool)], np.array(still, dtype=bool)])

    def seconds(self, costs: CostModel, rates_per_s: Array | None) -> Array:
        """Return the seconds each configuration would take to try, shape ``(N,)``.

        Args:
            rates_per_s: expected rate of each, ``(N,)``; ``None`` for the step time of the median trial.
        """
        fixed_s, steps = costs.line
        steps_s = np.full(len(self), costs.usual_step_s) if rates_per_s is None else self.pool.batches / rates_per_s
        starts_s = np.array([costs.starts_s(config) for config in self.pool.configs])
        fixed: Array = np.maximum(0.0, fixed_s - costs.startup_s + starts_s)
        found: Array = fixed + steps * steps_s + np.concatenate([g.compile_s(costs) for g in self._groups])
        return np.maximum(found, 0.5)

    def fits(self, memory: MemoryModel) -> Bools:
        """Return which configurations certainly fit into memory, shape ``(N,)``."""
        return np.concatenate([g.fits(memory) for g in self._groups])


class _Group:
    """A list of configurations with their invariant properties."""

    def __init__(self, rates: RateModel, configs: Sequence[dict[str, Value]]) -> None:
        self.pool = rates.pool(configs)
        self._graphs = _Kinds(configs, _compiled)
        self._memories = _Kinds(configs, lambda config: (part(config), samples_at_once(config)))
        self._table: Table | None = None

    def compile_s(self, costs: CostModel) -> Array:
        """Return the expected compile time of each, ``(N,)``."""
        found = np.array([costs.compile_s(mode, name) for mode, name in self._graphs.names], dtype=np.float64)
        return found[self._graphs.which]

    def fits(self, memory: MemoryModel) -> Bools:
        """Return which configurations certainly fit into memory, ``(N,)``."""
        if self._table is None:
            self._table = memory.table(self._memories.firsts)
        return memory.fit(self._table)[self._memories.which]


class _Kinds(Generic[_Name]):
    """Groups configurations that share a property, so that it is computed once per kind.

    Args:
        name: returns the name of a configuration's kind.

    Attributes:
        names: of the kinds. firsts: one configuration of each. which: the index of each configuration's kind, ``(N,)``.
    """

    def __init__(self, configs: Sequence[Config], name: Callable[[Config], _Name]) -> None:
        numbers: dict[_Name, int] = {}
        self.firsts: list[Config] = []
        which = []
        for config in configs:
            which.append(numbers.setdefault(name(config), len(numbers)))
            if which[-1] == len(self.firsts):
                self.firsts.append(config)
        self.names = list(numbers)
        self.which = np.array(which, dtype=np.int64)


def _compiled(config: Config) -> tuple[str, str]:
    """Return the compile mode, and the key of the graph in inductor's cache."""
    mode = mode_of(config)
    return mode, "" if mode == "off" else graph(config)


def neighbours(space: Space, config: Config) -> list[dict[str, Value]]:
    """Return every legal configuration that differs in one knob; knobs that become active take their first value.

    Values that are not on a ladder count only beside that of the configuration.
    """
    found = []
    for name in space.choices:
        for value in (*space.rungs(name), *space.beside(name, config.get(name))):
            if config.get(name) != value or isinstance(value, bool) != isinstance(config.get(name), bool):
                complete = {n: space.legal(n)[0] for n in space.choices} | dict(config) | {name: value}
                other = canonical(complete)
                if other != config and space.refusal(other) is None:
                    found.append(other)
    return found


def _drawn(space: Space, rng: random.Random) -> list[dict[str, Value]]:
    choices = {name: space.rungs(name) for name in space.choices}
    found: dict[str, dict[str, Value]] = {}
    for _ in range(_PATIENCE * POOL):
        config = canonical({name: rng.choice(values) for name, values in choices.items()})
        if space.combination_refusal(config) is None:
            found[key(config)] = config
        if len(found) == POOL:
            break
    return list(found.values())
