"""What to expect of configurations, after all trials and heats so far."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import islice
from typing import TypeVar

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from autotune.base.records import ATTEMPTS, Config, Measurement, Side, StudyHeat, Trial, TrialStatus, Value
from autotune.knobs.compile_mode import mode_of
from autotune.knobs.num_workers import workers_of
from autotune.samplers.auto.features import Array, Bools, Pool
from autotune.samplers.auto.memory import MemoryModel, Table, part
from autotune.samplers.auto.rates import MeetingModel, Observation, RateModel, ScoreModel
from autotune.samplers.sampler import RECORD, CostModel, Experience, graph, heats_of
from autotune.space import Lessons, Space, canonical, delivery_part, device_part, key, samples_at_once

# The configurations that could be tried next; properties that never change are computed once.

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
        configs = list(islice(space.grid(), POOL + 1))
        #: The pool is the whole grid.
        self.whole = len(configs) <= POOL
        drawn = _Group(rates, configs if self.whole else _drawn(space, random.Random(seed)))
        self._groups = [drawn]
        self._drawn = {key(config): i for i, config in enumerate(drawn.pool.configs)}
        self._around: dict[str, int] = {}
        self._centres: list[str] = []
        self._near: dict[str, dict[str, dict[str, Value]]] = {}
        self.pool = drawn.pool
        self.open: Bools = np.ones(len(self.pool), dtype=bool)
        #: The lessons (and the size of the pool) by which configurations were last ruled out.
        self._ruled_by: tuple[Lessons, int, int] | None = None
        #: Configurations with a value that is not on its knob's ladder, ``(N,)``.
        self.further: Bools = np.zeros(len(self.pool), dtype=bool)

    def __len__(self) -> int:
        return len(self.pool)

    def close(self, name: str) -> None:
        """Mark the configuration with this key as tried."""
        index = self._drawn.get(name, self._around.get(name))
        if index is not None:
            self.open[index] = False

    def without(self, names: Iterable[str]) -> Offers:
        """Return a copy in which the configurations with these keys are closed."""
        reduced = copy(self)
        reduced.open = self.open.copy()
        for name in names:
            reduced.close(name)
        return reduced

    def rule_out(self, lessons: Lessons) -> None:
        """Close the configurations that a failure has ruled out."""
        state = lessons, lessons.learned, len(self)
        if state == self._ruled_by:
            return
        self._ruled_by = state
        for i in np.flatnonzero(self.open):
            self.open[i] = not lessons.rule_out(self.pool.configs[i])

    def surround(self, centres: Sequence[Config], tried: set[str], lessons: Lessons) -> None:
        """Replace the neighbours in the pool by those of ``centres``: configurations that differ in one knob.

        Does nothing if the pool already holds everything. The resulting pool does not depend on earlier centres.
        """
        names = [key(c) for c in centres]
        if (self.whole and not self._space.further) or self._centres == names:
            return
        self._centres = names
        drawn = self._groups[0]
        for name, centre in zip(names, centres, strict=True):
            if name not in self._near:
                self._near[name] = {key(c): c for c in neighbours(self._space, centre)}
        items = [item for name in names for item in self._near[name].items()]
        new = {name: config for name, config in items if name not in self._drawn}
        around = _Group(self._rates, list(new.values()))
        self._groups = [drawn, around]
        self._around = {name: len(drawn.pool) + i for i, name in enumerate(new)}
        self.pool = Pool.joined([drawn.pool, around.pool])
        off_ladder = [any(c.get(n) in values for n, values in self._space.further.items()) for c in new.values()]
        self.further = np.concatenate([np.zeros(len(drawn.pool), dtype=bool), np.array(off_ladder, dtype=bool)])
        still_open = [name not in tried and not lessons.rule_out(config) for name, config in new.items()]
        self.open = np.concatenate([self.open[: len(drawn.pool)], np.array(still_open, dtype=bool)])

    def seconds(self, costs: CostModel, rates_per_s: Array | None) -> Array:
        """Return the seconds that a trial of each configuration would take, shape ``(N,)``.

        Args:
            rates_per_s: expected rate of each, ``(N,)``; ``None`` to assume the step time of the median trial.
        """
        rates = [None] * len(self) if rates_per_s is None else rates_per_s.tolist()
        plain_s = [costs.plain_s(config, rate) for config, rate in zip(self.pool.configs, rates, strict=True)]
        return np.maximum(np.array(plain_s) + self.compile_s(costs), 0.5)

    def compile_s(self, costs: CostModel) -> Array:
        """Return the seconds of each trial that are for compiling, shape ``(N,)``; infinite beyond the limit."""
        return np.concatenate([g.compile_s(costs) for g in self._groups])

    def fits(self, memory: MemoryModel) -> Bools:
        """Return which configurations certainly fit into memory, shape ``(N,)``."""
        return np.concatenate([g.fits(memory) for g in self._groups])


class _Group:
    """A list of configurations with properties that never change."""

    def __init__(self, rates: RateModel, configs: Sequence[dict[str, Value]]) -> None:
        self.pool = rates.pool(configs)
        #: By compile mode, and the key of the graph in inductor's cache.
        self._graphs = _kinds(configs, lambda c: (mode_of(c), "" if mode_of(c) == "off" else graph(c)))
        self._memories = _kinds(configs, lambda c: (part(c), samples_at_once(c)))
        self._table: Table | None = None

    def compile_s(self, costs: CostModel) -> Array:
        graphs, which = self._graphs
        return np.array([costs.compile_s(mode, name) for mode, name in graphs], dtype=np.float64)[which]

    def fits(self, memory: MemoryModel) -> Bools:
        memories, which = self._memories
        if self._table is None:
            self._table = memory.table(list(memories.values()))
        return memory.fit(self._table)[which]


def _kinds(configs: Sequence[Config], name: Callable[[Config], _Name]) -> tuple[dict[_Name, Config], NDArray[np.int64]]:
    """Group configurations that share a property, so that it is computed once per kind: return the first configuration
    of each kind, by the kind's name, and the index of each configuration's kind, ``(N,)``."""
    firsts: dict[_Name, Config] = {}
    numbers: dict[_Name, int] = {}
    which = []
    for config in configs:
        kind = name(config)
        firsts.setdefault(kind, config)
        which.append(numbers.setdefault(kind, len(numbers)))
    return firsts, np.array(which, dtype=np.int64)


def neighbours(space: Space, config: Config) -> list[dict[str, Value]]:
    """Return every legal configuration that differs in one knob; knobs that become active take their first value.

    Values that are not on a ladder are included only next to the configuration's own value.
    """
    configs = []
    for name in space.choices:
        for value in (*space.rungs(name), *space.beside(name, config.get(name))):
            if config.get(name) != value or isinstance(value, bool) != isinstance(config.get(name), bool):
                changed = {n: space.legal(n)[0] for n in space.choices} | dict(config) | {name: value}
                neighbour = canonical(changed)
                if neighbour != config and space.refusal(neighbour) is None:
                    configs.append(neighbour)
    return configs


def _drawn(space: Space, rng: random.Random) -> list[dict[str, Value]]:
    choices = {name: space.rungs(name) for name in space.choices}
    configs: dict[str, dict[str, Value]] = {}
    for _ in range(_PATIENCE * POOL):
        config = canonical({name: rng.choice(values) for name, values in choices.items()})
        if space.combination_refusal(config) is None:
            configs[key(config)] = config
        if len(configs) == POOL:
            break
    return list(configs.values())


# The knowledge from the finished trials of a study: rates, memory, durations, and what not to try again.

#: By how much the two sides of a trial without workers may contradict its rate, in natural logarithms.
CONTRADICTION = 0.25
#: Maximum number of heats that a configuration takes part in, except as the reference.
ENOUGH_HEATS = 2
_HARMLESS = (TrialStatus.COMPLETE, TrialStatus.PRUNED, TrialStatus.INTERRUPTED, TrialStatus.KILLED)
#: Weight of a pruned trial, which has fewer windows than a complete one.
PRUNED_WEIGHT = 0.25


class Knowledge:
    """Everything the sampler has learnt from the trials. It can be rebuilt from the Optuna study alone.

    Args:
        capacity_bytes, splits, experience, excess, judge: see `AutoSampler`.
        seed: of the sample from a large space.

    Attributes:
        rates, memory, costs: the models.
        offers: candidate configurations. lessons: configurations ruled out by failures.
        numbers: trial number of each observation. complete: indices of the observations from complete trials.
        tried: keys of the configurations tried. compared: number of entrants that heats of the device measured.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        capacity_bytes: int | None,
        splits: bool,
        experience: Experience,
        excess: Callable[[Measurement], float] | None = None,
        judge: Callable[[Measurement], float] | None = None,
    ) -> None:
        self.space = space
        self.splits = splits
        self.rates = RateModel(space, splits=splits)
        self.memory = MemoryModel(space, capacity_bytes)
        #: The model of what is required; ``None`` if nothing is.
        self.meeting = None if excess is None else MeetingModel(self.rates.prior)
        #: The model of the objective that chooses among the fastest; ``None`` if the fastest wins.
        self.scores = None if judge is None else ScoreModel(self.rates.prior)
        self._excess, self._judge = excess, judge
        #: Numbers of the trials that do not meet what is required.
        self.beyond: set[int] = set()
        self.costs = experience.costs
        self.lessons = experience.lessons
        self.offers = Offers(space, self.rates, seed)
        self.numbers: list[int] = []
        self.complete: list[int] = []
        self.tried: set[str] = set()
        self._heats: set[int] = set()
        self.compared = 0
        #: Number of trials that had ended when each heat began.
        self._after: list[int] = []
        #: The values that have been measured, by knob.
        self._values: set[tuple[str, Value]] = set()
        self._experience = experience
        self._learnt: set[int] = set()
        #: How often each part of a configuration has been compared in a heat; at least `ENOUGH_HEATS` if it failed
        #: there.
        self._entered: Counter[tuple[Side, str]] = Counter()
        #: The first score, if scores are not rates; other scores are taken relative to it.
        self._reference = 1.0
        #: Number of transient failures of each configuration.
        self._failures: Counter[str] = Counter()

    @property
    def right(self) -> list[int]:
        """The elements of `complete` that are not known to train wrongly; the baseline is always among them."""
        return [i for i in self.complete if not self.lessons.is_wrong(self.rates.seen[i].config)]

    @property
    def learnt(self) -> int:
        return len(self._learnt)

    def learn(self, study: optuna.Study) -> None:
        """Learn the trials that have finished since the last call."""
        for frozen in study.get_trials(deepcopy=False):
            if frozen.number in self._learnt or not frozen.state.is_finished():
                continue
            self._learnt.add(frozen.number)
            record = frozen.user_attrs.get(RECORD)
            if record is not None:
                self._enter(Trial.model_validate(record))
            elif frozen.params:
                self._enter_foreign(frozen)

        for heat in heats_of(study):
            if heat.number not in self._heats:
                self._heats.add(heat.number)
                self._enter_heat(heat)

    def believing(self, running: Sequence[tuple[int, Config]], noise_sd: float) -> Knowledge:
        """Return the knowledge as if the running trials had ended as expected, so that what is proposed beside them
        adds to it (the kriging believer: Ginsbourger, Le Riche & Carraro, "Kriging is well-suited to parallelize
        optimization", in Computational Intelligence in Expensive Optimization Problems, 2010).

        Args:
            running: the numbers and configurations of the running trials.
            noise_sd: standard deviation of the logarithm of one launch's rate.
        """
        if not running:
            return self
        believed = copy(self)
        names = [key(config) for _, config in running]
        believed.offers, believed.tried = self.offers.without(names), self.tried.union(names)
        if self.complete:
            pool = self.rates.pool([config for _, config in running])
            believed.rates = self.rates.believing(self.rates.fit(noise_sd).expected(pool))
            believed.complete = [*self.complete, *range(len(self.numbers), len(self.numbers) + len(running))]
            believed.numbers = [*self.numbers, *(number for number, _ in running)]
        return believed

    @property
    def heats(self) -> int:
        return len(self._heats)

    @property
    def heats_in_a_row(self) -> int:
        """Number of heats since the last trial."""
        return self._after.count(self.learnt)

    def trust(self, configs: Sequence[Config], least: float) -> Array:
        """Return how far the expected gain of each configuration is trusted, ``(N,)``: 1 if it has a value that nothing
        measured has had, and else the less, the more trials and heats have found nothing faster.

        What is left to hope of values that are known is that they are better together. Laplace's rule of succession
        gives the chance that this is found now, after so many attempts that have not.

        Args:
            least: gains that differ by no more than this count as equal.
        """
        rates = {i: self.rates.seen[i].log_rate for i in self.right}
        best = max(rates.values())
        first = next(i for i in sorted(rates) if rates[i] >= best - least)
        fruitless = len(self.numbers) - 1 - first + sum(ended > self.numbers[first] for ended in self._after)
        known = [all(value in self._values for value in config.items()) for config in configs]
        return np.where(known, 1 / (1 + fruitless), 1.0)

    def may_enter(self, config: Config, side: Side) -> bool:
        """Return whether a configuration may take part in a heat: not ruled out, certain to fit into memory, and not
        compared often enough already."""
        return (
            self._entered[side, part_of(config, side)] < ENOUGH_HEATS
            and not self.lessons.rule_out(config)
            and self.memory.fits(config)
        )

    def _enter_heat(self, heat: StudyHeat) -> None:
        self._experience.learn_heat(heat)
        side = heat.heat.side
        self._after.append(heat.after)
        measured = [e for e in heat.heat.entrants if e.ratio is not None]
        self.compared += len(measured) if side == "device" else 0
        for entrant in heat.heat.entrants:
            # An entrant that was only interrupted may take part again, but not forever.
            failed = entrant.status not in _HARMLESS
            self._entered[side, part_of(entrant.config, side)] += ENOUGH_HEATS if failed else 1
            if (
                side == "device"
                and entrant.status is TrialStatus.OOM
                and key(entrant.config) not in self._experience.ran
            ):
                self.memory.learn_oom(entrant.config)
        self._values |= {value for e in measured for value in e.config.items()}
        if len(measured) > 1 and self.splits:
            turns = [sum(turn is not None for turn in e.turns) for e in measured]
            self.rates.add_heat(
                side,
                [e.config for e in measured],
                [math.log(e.ratio or 1.0) for e in measured],
                [heat.heat.noise_sd / math.sqrt(max(1, n)) for n in turns],
            )

    def may_try(self, config: Config) -> bool:
        return (
            key(config) not in self.tried
            and self.space.refusal(config) is None
            and not self.lessons.rule_out(config)
            and self.memory.fits(config)
        )

    def rate_per_s(self, seen: float) -> float:
        """Convert an observed value back to a rate or score."""
        return math.exp(seen) if self.splits else self._reference + seen * abs(self._reference)

    def _enter(self, trial: Trial) -> None:
        config, result = trial.config, trial.result
        self._experience.learn(trial)
        # A trial killed during its creation has no configuration; an interrupted one shows nothing about its own.
        if not config or (result.status is TrialStatus.INTERRUPTED and not result.transient):
            return
        if result.transient:
            self._failures[key(config)] += 1
            if self._failures[key(config)] >= ATTEMPTS:
                self._close(config)
            return
        measurement = result.measurement
        if result.status is TrialStatus.OOM:
            self.memory.learn_oom(config)
        if measurement is not None and measurement.peak_bytes:
            self.memory.learn(config, measurement.peak_bytes)
        if trial.score is not None:
            self._refer_to(trial.score)
        observed = observation(trial, None if self.splits else self._reference)
        if observed is None:
            self._close(config)
            return
        if measurement is not None:
            row = self.rates.pool([config]).whole[0]
            if self.meeting is not None and self._excess is not None:
                excess = self._excess(measurement)
                self.meeting.learn(row, excess)
                self.beyond |= {trial.number} if excess > 0 else set()
            if self.scores is not None and self._judge is not None:
                self.scores.learn(trial.number, row, self._judge(measurement))
        self._observe(trial.number, observed, complete=result.status is TrialStatus.COMPLETE)

    def _enter_foreign(self, frozen: FrozenTrial) -> None:
        """Learn a trial that autotune did not run; it has at most a score."""
        config = canonical(frozen.params)
        score = frozen.value if frozen.state is TrialState.COMPLETE else None
        if score is None or (self.splits and score <= 0):
            self._close(config)
            return
        self._refer_to(score)
        seen = math.log(score) if self.splits else relative(score, self._reference)
        self._observe(frozen.number, Observation(config, seen), complete=True)

    def _refer_to(self, score: float) -> None:
        if not self.splits and not self.complete:
            self._reference = score or 1.0

    def _observe(self, number: int, seen: Observation, *, complete: bool) -> None:
        if complete:
            self.complete.append(len(self.numbers))
        self.numbers.append(number)
        self._values |= set(seen.config.items())
        self.rates.add(seen)
        self._close(seen.config)

    def _close(self, config: Config) -> None:
        self.tried.add(key(config))
        self.offers.close(key(config))


def relative(score: float, reference: float) -> float:
    """Return the difference of a score from a reference, in units of the reference."""
    return (score - reference) / abs(reference)


def observation(trial: Trial, reference: float | None = None) -> Observation | None:
    """Return a trial's observation of its configuration's rate; ``None`` if the trial failed.

    Args:
        reference: a score that others are taken relative to, if scores are not rates and may be negative.
    """
    complete = trial.result.status is TrialStatus.COMPLETE
    if reference is not None:
        if not complete or trial.score is None:
            return None
        return Observation(trial.config, relative(trial.score, reference))
    score = trial.score if complete else trial.rate_per_s
    if score is None or score <= 0 or not (complete or trial.result.status is TrialStatus.PRUNED):
        return None
    measurement = trial.result.measurement
    weight = 1.0 if complete else PRUNED_WEIGHT
    device = measurement.device_per_s if measurement else None
    loader = measurement.loader_capacity_per_s if measurement else None
    if not device or not loader:
        return Observation(trial.config, math.log(score), weight=weight)
    if measurement is not None and measurement.waits_for_hand_over:
        # The workers make more than the training's process receives.
        loader = min(loader, score)
    # Without workers, a step takes the sum of the times of both sides, and each epoch its turn besides. If the two take
    # longer than the whole, one of them is wrong.
    if not workers_of(trial.config) and math.log(score / device + score / loader) > CONTRADICTION:
        return Observation(trial.config, math.log(score), weight=weight)
    return Observation(trial.config, math.log(score), math.log(device), math.log(loader), weight)


def part_of(config: Config, side: Side) -> str:
    """Return the key of the part of a configuration that a heat of one side shows."""
    return key(device_part(config) if side == "device" else delivery_part(config))
