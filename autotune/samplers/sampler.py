"""Samplers, and what they learn from the trials."""

from __future__ import annotations

import math
import random
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.base.errors import UnknownNameError
from autotune.base.records import (
    INFEASIBLE,
    Config,
    Heat,
    HeatEntrant,
    Phase,
    Side,
    StudyHeat,
    Trial,
    TrialResult,
    TrialStatus,
    Value,
)
from autotune.base.records.launch import UNSEEN_STEPS
from autotune.knobs.compile_mode import GUESS_S, mode_of
from autotune.knobs.num_workers import workers_of
from autotune.space import Lessons, Space, canonical, device_part, distance, is_idle, key, queued_batches

# Converts between autotune's space and Optuna's: distributions, suggestions, and reported results.

#: Name of the constraint; Optuna treats values above zero as infeasible.
CONSTRAINT = "feasible"
#: Excess reported for an unknown figure: not infinity, which Optuna's storage does not accept.
_MOST_EXCESS = 1e3
#: Attribute of an Optuna trial that holds autotune's own record of it.
RECORD = "autotune"
#: Start of the names of an Optuna study's attributes that hold its heats.
HEAT = "autotune_heat_"
#: Attribute of an Optuna trial that holds its `Prediction`.
PREDICTED = "autotune_predicted"


def distributions(space: Space) -> dict[str, CategoricalDistribution]:
    """Return one categorical distribution per knob, over its legal values.

    The baseline's value is always included, even if ``--set`` excludes it: trial 0 uses it.
    """
    result = {}
    for name in space.choices:
        values = list(space.legal(name))
        baseline_value = space.baseline.get(name)
        if baseline_value is not None and not any(
            v == baseline_value and type(v) is type(baseline_value) for v in values
        ):
            values.insert(0, baseline_value)
        result[name] = CategoricalDistribution(values)
    return result


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Value]:
    """Suggest a configuration for a trial, without inactive knobs."""
    config: dict[str, Value] = {}
    for name, distribution in distributions(space).items():
        if is_idle(name, config):
            continue
        config[name] = trial.suggest_categorical(name, distribution.choices)  # type: ignore[assignment]
    return config


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    status: TrialStatus,
    *,
    scores: Sequence[float],
    rate_seen_per_s: float | None,
    excess: float = 0.0,
) -> None:
    """Report to Optuna how a trial ended.

    ``complete``: its scores, with a violated constraint if it does not meet what is required. Infeasible: PRUNED with a
    violated constraint, because TPE ignores FAIL. ``pruned``: PRUNED with the observed rate, so that TPE ranks it below
    complete trials. Anything else: FAIL, because it shows nothing about the configuration.

    Args:
        scores: one for each objective; empty if there is none.
        excess: by how much the trial fails to meet what is required, at most 0 if it meets it.
    """
    # If the process was killed between this and tell(), the constraint is set already; Optuna warns about a second one.
    if not trial.storage.get_trial(trial._trial_id).constraints:
        violated = 1.0 if status in INFEASIBLE else min(excess, _MOST_EXCESS)
        trial.set_constraint(CONSTRAINT, max(0.0, violated))
    if status is TrialStatus.COMPLETE and scores:
        study.tell(trial, list(scores))
    elif status in INFEASIBLE:
        study.tell(trial, state=TrialState.PRUNED)
    elif status is TrialStatus.PRUNED:
        if rate_seen_per_s is not None:
            trial.report(rate_seen_per_s, step=1)
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, state=TrialState.FAIL)


def heats_of(study: optuna.Study) -> list[StudyHeat]:
    attributes = study.user_attrs
    return [StudyHeat.model_validate(attributes[name]) for name in sorted(attributes) if name.startswith(HEAT)]


# Restricts any Optuna sampler to configurations that are legal, new and not known to fail.

SAMPLERS = ("auto", "tpe", "tpe-multivariate", "gp", "random", "grid")
#: How many proposals to request from the inner sampler before taking the nearest neighbour of the last one. Optuna
#: proposes duplicates by design. A Gaussian process is slow, and proposes the same configuration again.
_PROPOSALS, _PROPOSALS_OF_GP = 10, 1
NOTHING_LEFT = "everything legal that fits into the time left has been tried"
#: The grid may hold 10⁵ configurations; as a last resort, only this many are looked at.
_GRID_LOOK = 5000


def make_sampler(name: str, seed: int) -> BaseSampler | None:
    """Create one of Optuna's samplers by autotune's name for it, with Optuna's defaults.

    Args:
        seed: already mixed with the number of existing trials, so that a resumed search does not repeat them.

    Returns:
        ``None`` for ``grid``, which needs no proposals: Optuna's own grid sampler cannot handle knobs that are inactive
        for certain values of others.

    Raises:
        UnknownNameError: there is no such sampler.
    """
    if name == "grid":
        return None
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    if name in ("tpe", "tpe-multivariate"):
        multivariate = name == "tpe-multivariate"
        with warnings.catch_warnings():
            # `group` handles knobs that are active only in some trials; it is marked experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(multivariate=multivariate, group=multivariate, seed=seed)
    raise UnknownNameError("sampler", name, SAMPLERS)


@dataclass(frozen=True)
class HeatProposal:
    """Configurations to compare in a heat.

    Attributes:
        side: whether the device or the loader is compared.
        entrants: the first is the reference.
        least_per_s: what a second is worth elsewhere in the search: the improvement it brings, in natural logarithms of
            the objective.
        seconds: expected duration of the heat.
        gain: expected improvement of the best entrant over the best so far, in natural logarithms. more: by how much
            that exceeds the expected improvement of the single most promising entrant.
    """

    side: Side
    entrants: tuple[Config, ...]
    least_per_s: float
    seconds: float
    gain: float
    more: float


class Searcher(BaseSampler):
    """An Optuna sampler over one space that also decides when nothing more is worth trying."""

    def __init__(self, space: Space) -> None:
        self.space = space

    @abstractmethod
    def reason_to_end(self, study: optuna.Study) -> str | None:
        """Return why there is nothing more to propose, in one sentence, or ``None``."""

    @abstractmethod
    def propose(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        """Return the configuration to try next, without its inactive knobs."""

    def heat(self, study: optuna.Study) -> HeatProposal | None:
        """Return the heat to run before the next trial, or ``None`` if a trial is worth more. The default, for samplers
        that learn only from trials, is ``None``."""
        return None

    def fits(self, study: optuna.Study, config: Config) -> bool:
        """Return whether a configuration certainly fits into memory, according to the trials so far. The default, for
        samplers without a memory model, is True."""
        return True

    def ranking(self, study: optuna.Study) -> tuple[int, ...]:
        """Return the numbers of the complete trials, most promising first; empty if only their scores rank them."""
        return ()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(distributions(self.space))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        # Trials with their own parameters (enqueued ones) need no proposal.
        return {} if "fixed_params" in trial.system_attrs else self.propose(study, trial)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Called only for knobs that an enqueued trial leaves open: use the baseline's value if there is one.
        return self.space.baseline.get(param_name, self.space.legal(param_name)[0])


class LegalSampler(Searcher):
    """Queries another sampler until it proposes something acceptable.

    Args:
        inner: ``None`` for the order of the grid.
        acceptable: whether a canonical configuration may be tried now; called again for each proposal.
    """

    def __init__(
        self, inner: BaseSampler | None, space: Space, acceptable: Callable[[Config], bool], *, seed: int
    ) -> None:
        of_gp = isinstance(inner, optuna.samplers.GPSampler)
        super().__init__(space)
        self._proposals = 0 if inner is None else _PROPOSALS_OF_GP if of_gp else _PROPOSALS
        #: A Gaussian process learns only from complete trials.
        self._view = CompleteView(space) if of_gp else None
        self._inner = inner or optuna.samplers.RandomSampler(seed=seed)
        self._acceptable = acceptable
        self._rng = random.Random(seed)
        self._spare: dict[str, Value] | None = None

    def reason_to_end(self, study: optuna.Study) -> str | None:
        """Return why there is nothing more to propose, or ``None`` if an acceptable configuration is left. It is kept
        in case `proposal` finds none, because what is acceptable changes over time."""
        self._spare = next(self._untried(), None)
        return NOTHING_LEFT if self._spare is None else None

    def _untried(self) -> Iterator[dict[str, Value]]:
        return (config for config in self.space.grid() if self._acceptable(config))

    def propose(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        config: dict[str, Value] = {}
        for _ in range(self._proposals):
            config = canonical(self._ask(study, trial))
            if self._acceptable(config):
                return config
        remaining = list(islice(self._untried(), _GRID_LOOK if self._proposals else 1))
        self._rng.shuffle(remaining)
        # Closer to the inner sampler's intent than a random choice.
        return min(remaining, key=lambda c: distance(c, config), default=dict(self._spare or {}))

    def _ask(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Value]:
        if self._view is not None:
            study = self._view.of(study)
            trial = self._view.ask()
        inner_space = self._inner.infer_relative_search_space(study, trial)
        config: dict[str, Value] = self._inner.sample_relative(study, trial, inner_space)
        for name, distribution in distributions(self.space).items():
            if name not in config and not is_idle(name, config):
                config[name] = self._inner.sample_independent(study, trial, name, distribution)
        return config

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._inner.before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()


class CompleteView:
    """A copy of a study for a sampler that learns only from complete trials. Pruned trials are added with the observed
    rate, infeasible ones with the slowest rate so far. The study itself does not contain these scores."""

    def __init__(self, space: Space) -> None:
        self._offered: dict[str, BaseDistribution] = dict(distributions(space))
        self._study = optuna.create_study(direction="maximize")
        self._entered: set[int] = set()
        self._slowest = math.inf
        self._asked: optuna.Trial | None = None

    def of(self, study: optuna.Study) -> optuna.Study:
        finished = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
        for trial in finished:
            value = trial.value if trial.value is not None else trial.intermediate_values.get(1)
            infeasible = any(c > 0 for c in trial.constraints.values())
            if trial.number in self._entered or not trial.params or (value is None and not infeasible):
                continue
            self._entered.add(trial.number)
            self._slowest = min(self._slowest, math.inf if value is None else value)
            score = self._slowest if value is None else value
            if math.isfinite(score):
                self._study.add_trial(
                    optuna.trial.create_trial(
                        params=dict(trial.params),
                        distributions={n: self._offered[n] for n in trial.params},
                        value=score,
                    )
                )
        return self._study

    def ask(self) -> FrozenTrial:
        """Return a trial of the view, for a sampler that attaches data to its trials; it is never run."""
        if self._asked is not None:
            self._study.tell(self._asked, state=TrialState.FAIL)
        self._asked = self._study.ask()
        return self._study._storage.get_trial(self._asked._trial_id)


# Predicts the duration of a trial from those of earlier trials.

#: A graph that the study has compiled before comes from inductor's cache and takes this fraction of the time.
WARM_COMPILE = 0.3
#: Prior for the number of steps a trial needs however slow they are: the first, the warm-up and the minimum windows.
STEPS, STEPS_SD = 4.0, 4.0
#: Bytes a second at which a full queue is emptied before anything is measured, and given back at the end: one thread of
#: the training process maps and copies every batch (4,760 images of 602 KB a second on a Xeon beside an H200).
EMPTIED_BYTES_PER_S = 2e9


class CostModel:
    """Predicts the seconds of a trial.

    A trial takes a fixed time (start-up, and windows as long as the plan says) plus a number of steps: a line in the
    step time, fitted by least squares with a prior that keeps the number of steps near `STEPS`. Compile seconds are
    separate: the largest seen per mode with a cold cache, and a fraction of that if the same graph was compiled before.
    A trial that ran out of time while it compiled is a lower bound. Separate, too, are the seconds in which the batches
    are taken away that workers make before the first step has ended (see `queue_s`).

    Args:
        usual_s: duration of a trial without compiling, before one has been observed.
        sample_bytes: size of one sample's tensors; ``None`` if unknown.
        compile_limit_s: time limit of compiling; the expected time of anything longer is infinite.
        must_compile: every mode on offer compiles, so one is tried at least once, however long it is guessed to take.

    Attributes:
        startup_s: the shortest time from the start of a trial to its first step; 0 before the first trial.
        follows: returns whether a configuration currently needs no start of its own.
    """

    def __init__(
        self,
        usual_s: float = 0.0,
        *,
        compile_limit_s: float = math.inf,
        must_compile: bool = False,
        sample_bytes: int | None = None,
    ) -> None:
        self.startup_s = 0.0
        self.follows: Callable[[Config], bool] = lambda config: False
        self._usual_s = usual_s
        self._compile_limit_s = compile_limit_s
        self._must_compile = must_compile
        self._sample_bytes = sample_bytes or 0
        #: Samples a second that one process has made: a worker, or the training's own. And the longest first step of an
        #: eager trial.
        self._worker_per_s = self._alone_per_s = self._first_step_s = 0.0
        #: Seconds after which a time limit ended compiling in a mode.
        self._at_least_s: dict[str, float] = {}
        self._plain: list[tuple[float, float]] = []
        self._compile_s: dict[str, float] = {}
        self._compiled: set[str] = set()
        #: Of entrants of heats that did not compile: by how many seconds the first step exceeded a usual one.
        self._entered_s: list[float] = []
        self._line: tuple[float, float] | None = None

    def learn(self, config: Config, result: TrialResult) -> None:
        """Record the duration of a complete trial, the compile time of any trial that got past compiling, and how long
        a trial compiled that did not."""
        mode, compile_s = mode_of(config), result.phase_s.get(Phase.COMPILE, 0.0)
        if mode != "off" and result.status is TrialStatus.TIMEOUT and result.phase is Phase.COMPILE:
            self._at_least_s[mode] = max(compile_s, self._at_least_s.get(mode, 0.0))
        if mode != "off" and result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED):
            if graph(config) not in self._compiled:
                self._compile_s[mode] = max(compile_s, self._compile_s.get(mode, 0.0))
            self._compiled.add(graph(config))
        measurement = result.measurement
        if result.status is not TrialStatus.COMPLETE or measurement is None:
            return
        self.startup_s = min(self.startup_s or math.inf, measurement.startup_s)
        step_s = int(config["batch_size"]) / measurement.samples_per_s
        made_per_s, workers = measurement.loader_capacity_per_s or 0.0, workers_of(config)
        if workers:
            self._worker_per_s = max(self._worker_per_s, made_per_s / workers)
        else:
            self._alone_per_s = max(self._alone_per_s, made_per_s)
        if mode == "off":
            self._first_step_s = max(self._first_step_s, compile_s)
        # At most the warm-up's seconds: the rest belongs to the measuring.
        wall_s = result.alone_s - min(self.queue_s(config), measurement.warmup_s)
        wall_s = wall_s if mode == "off" else max(0.0, wall_s - compile_s)
        self._plain.append((wall_s, step_s))
        self._line = None

    def learn_entrant(self, entrant: HeatEntrant) -> None:
        """Record how long the first step of an entrant of a heat took, in which it compiles or tries algorithms."""
        mode, turns = mode_of(entrant.config), [turn for turn in entrant.turns if turn is not None]
        if not turns or entrant.first_step_s is None:
            return
        if mode != "off":
            self._compile_s[mode] = max(entrant.first_step_s, self._compile_s.get(mode, 0.0))
            self._compiled.add(graph(entrant.config))
        elif steps := sum(turn.steps for turn in turns):
            usual_s = sum(turn.seconds for turn in turns) / steps
            self._entered_s.append(max(0.0, entrant.first_step_s - usual_s))

    def expected_s(self, config: Config, rate_per_s: float | None = None) -> float:
        """Return the approximate duration of a trial; infinite if its compilation would exceed its limit.

        Args:
            rate_per_s: the rate it is expected to run at; ``None`` for the step time of the median trial.
        """
        return self.plain_s(config, rate_per_s) + self.compile_s(mode_of(config), graph(config))

    def plain_s(self, config: Config, rate_per_s: float | None = None) -> float:
        """Return the approximate duration of a trial without compiling; see `expected_s`."""
        fixed_s, steps = self.line
        if rate_per_s is None:
            step_s = median([step_s for _, step_s in self._plain] or [0.0])
        else:
            step_s = int(config["batch_size"]) / rate_per_s
        fixed_s = max(0.0, fixed_s - self.startup_s + self.starts_s(config))
        # A script that trains already takes fewer.
        steps = max(0.0, steps - UNSEEN_STEPS) if self.follows(config) else steps
        return fixed_s + steps * step_s + self.queue_s(config)

    def queue_s(self, config: Config) -> float:
        """Return how long it takes to empty the loader's queue, and to give its memory back: of a full queue, or of
        what the workers make until the first step has ended, as far as their rate is known; 0 if the size of a sample
        is unknown."""
        mode, workers = mode_of(config), workers_of(config)
        if not workers or not self._sample_bytes:
            return 0.0
        samples = float(queued_batches(config) * int(config["batch_size"]))
        if made_per_s := self._worker_per_s or self._alone_per_s:
            first_s = self._first_step_s + self._compile_s.get(mode, 0.0 if mode == "off" else math.inf)
            samples = min(samples, workers * made_per_s * first_s)
        return samples * self._sample_bytes / EMPTIED_BYTES_PER_S

    def starts_s(self, config: Config) -> float:
        """Return how long a launch takes until its first step."""
        return 0.0 if self.follows(config) else self.startup_s

    def compile_s(self, mode: str, name: str) -> float:
        """Return the expected compile time; infinite if it would exceed its limit.

        Args:
            name: the `graph`.
        """
        if mode == "off":
            return 0.0
        # Once something has compiled in this mode, a compilation that did not end in time says little about others.
        least_s = self._compile_s[mode] if mode in self._compile_s else self._at_least_s.get(mode, 0.0)
        guess_s = 0.0 if mode in self._compile_s else GUESS_S.get(mode, max(GUESS_S.values()))
        cold_s = max(least_s, guess_s)
        if name in self._compiled:
            return WARM_COMPILE * cold_s
        return math.inf if (least_s if self._must_compile else cold_s) >= self._compile_limit_s else cold_s

    def enters_s(self, mode: str, name: str) -> float:
        """Return by how many seconds the first step of an entrant of a heat is expected to exceed a usual one: it
        compiles, or tries algorithms, as earlier entrants did. See `compile_s`."""
        if mode != "off":
            return self.compile_s(mode, name)
        return fmean(self._entered_s) if self._entered_s else 0.0

    def has_compiled(self, mode: str) -> bool:
        """Return whether the compile time in the mode is known from a compilation rather than guessed."""
        return mode == "off" or mode in self._compile_s

    @property
    def line(self) -> tuple[float, float]:
        """Fixed seconds of a trial, and the number of steps it runs in addition."""
        points = self._plain
        if not points:
            return self._usual_s, 0.0
        if self._line is None:
            centre = sum(step_s for _, step_s in points) / len(points)
            walls_s = sum(wall_s for wall_s, _ in points) / len(points)
            # A ridge penalty towards STEPS, scaled to trials that scatter by a second.
            ridge = 1 / STEPS_SD**2
            covariance = sum((s - centre) * (w - walls_s) for w, s in points) + ridge * STEPS
            slope = max(0.0, covariance / (sum((s - centre) ** 2 for _, s in points) + ridge))
            # Outliers (disturbed trials) affect the fixed part only via a median.
            self._line = max(0.0, median(w - slope * s for w, s in points)), slope
        return self._line


def graph(config: Config) -> str:
    """Return the part of a configuration that inductor's cache depends on."""
    return key(device_part(config))


def cold_compiles(trials: Sequence[Trial], heats: Sequence[Heat]) -> dict[str, float]:
    """Return the longest first step, in seconds, of each `graph` that was compiled: the one with a cold cache.

    A later launch of the same graph meets a warm cache, even if it is the first of its configuration.
    """
    first_steps = [(t.config, t.result.measurement.compile_s) for t in trials if t.result.measurement is not None]
    first_steps += [(e.config, e.first_step_s or 0.0) for heat in heats for e in heat.entrants if any(e.turns)]
    longest: dict[str, float] = {}
    for config, seconds in first_steps:
        if mode_of(config) != "off":
            longest[graph(config)] = max(seconds, longest.get(graph(config), 0.0))
    return longest


# What finished trials teach a search and its sampler: configurations to avoid, and the duration of trials.

#: Failures of a heat's entrant that are due to the entrant itself, by the heat's side.
_LESSONS = {
    "device": (TrialStatus.OOM, TrialStatus.COMPILE_FAILED, TrialStatus.DIVERGED),
    "loader": (TrialStatus.SHM_EXHAUSTED,),
}


class Experience:
    """Lessons and costs from the trials of one study.

    A trial or a heat entered several times counts once, so that a search and its sampler can share an instance without
    coordination.

    Args:
        usual_s, costs: see `CostModel`.
    """

    def __init__(self, usual_s: float = 0.0, **costs: Any) -> None:
        self.lessons = Lessons()
        self.costs = CostModel(usual_s, **costs)
        self._entered: set[int] = set()
        self._heats: set[int] = set()
        #: Keys of the configurations that have completed a trial.
        self.ran: set[str] = set()

    def learn_heat(self, heat: StudyHeat) -> None:
        if heat.number in self._heats:
            return
        self._heats.add(heat.number)
        for entrant in heat.heat.entrants:
            # A configuration that has run in a process of its own will run there again, whatever happened among others;
            # and one that takes long among others, or much of the host's memory, may not do so alone.
            if key(entrant.config) not in self.ran and (
                entrant.status in _LESSONS[heat.heat.side] or entrant.refuses is not None
            ):
                self.lessons.learn(
                    entrant.status,
                    entrant.config,
                    cannot_compile=entrant.cannot_compile,
                    refuses=entrant.refuses,
                )
            self.costs.learn_entrant(entrant)

    def learn(self, trial: Trial) -> None:
        # A trial killed during its creation has no configuration; a transient failure shows nothing about its own.
        if trial.number in self._entered or not trial.config or trial.result.transient:
            return
        self._entered.add(trial.number)
        if trial.result.status is TrialStatus.COMPLETE:
            self.ran.add(key(trial.config))
        self.lessons.learn(
            trial.result.status,
            trial.config,
            cannot_compile=trial.result.cannot_compile,
            refuses=trial.result.refuses,
        )
        self.costs.learn(trial.config, trial.result)
