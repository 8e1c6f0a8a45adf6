"""The finalists against the baseline, launched again and interleaved: what the profile promises is measured here.

The trial that won a search was picked because it looked best, so its own figure is too good on average (the
winner's curse). The figures of record come from fresh launches, in an order that lets baseline and finalists share
the machine's drift: forth, back, forth (A B C, C B A, …).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from autotune import stats
from autotune.errors import InterruptedSearch
from autotune.observer import Observer
from autotune.records import Measurement, Standing, Trial, TrialStatus
from autotune.scoring import Scorer
from autotune.space import Space, key
from autotune.study.launches import Launches
from autotune.wording import rate_text

#: A proof is worth running over the budget by this much; the figures would rest on the search's own launches.
FIRST_ROUND_GRACE_S = 15.0
#: Rounds beyond this narrow the interval by little.
MAX_ROUNDS = 4


@dataclass
class _Entrant:
    trial: Trial
    again: list[Measurement] = field(default_factory=list)
    failed: bool = False
    #: What its last launch took. The first one of a compiled configuration met a cold cache, the next do not.
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        self.wall_s = self.trial.result.wall_s


@dataclass(frozen=True)
class Verified:
    """The figures of record of the baseline and of the two winners."""

    baseline: Standing
    best: Standing
    best_same_batch: Standing


def verify(
    space: Space,
    complete: Sequence[Trial],
    baseline: Trial,
    launches: Launches,
    scorer: Scorer,
    observer: Observer,
    stop: Callable[[], int | None],
) -> Verified:
    """Launch baseline and finalists in turns while the budget lasts, and say who won.

    With no time for a single round the search's own figures stand, each resting on one launch. A finalist that
    fails when launched again is out. If nothing beats the baseline, the baseline is the winner.

    Args:
        complete: complete trials, the best score first.

    Raises:
        InterruptedSearch: a signal came.
    """
    entrants = [_Entrant(baseline)]
    for finalist in _finalists(space, complete):
        if all(key(finalist.config) != key(e.trial.config) for e in entrants):
            entrants.append(_Entrant(finalist))
    racing = list(entrants)
    while racing and _round_s(racing, 1, launches) > launches.budget.left_s + FIRST_ROUND_GRACE_S:
        # Rather two proven than four not; the least promising goes first, and alone the baseline proves nothing.
        racing = racing[:-1] if len(racing) > 2 else []
    for number in range(1, MAX_ROUNDS + 1) if len(racing) > 1 else ():
        if number > 1 and _round_s(racing, number, launches) > launches.budget.left_s:
            break
        for entrant in racing if number % 2 else reversed(racing):
            if not entrant.failed:
                _launch(entrant, number, launches, observer, stop)
    found = _standings([e for e in entrants if not e.failed or e.trial is baseline], scorer)
    # Fresh figures beat the search's own, which are too good on average: only among equals is the best chosen.
    fresh = [s for s in found if s.verified]
    same = [s for s in found if space.same_batch(s.config)]
    fresh_same = [s for s in fresh if space.same_batch(s.config)]
    return Verified(
        baseline=found[0],
        best=_best(fresh if len(fresh) > 1 else found),
        best_same_batch=_best(fresh_same if len(fresh_same) > 1 else same),
    )


def _best(standings: Sequence[Standing]) -> Standing:
    return max(standings, key=lambda s: s.score)


def _finalists(space: Space, complete: Sequence[Trial]) -> list[Trial]:
    """The best, the best that trains at the baseline's batch, and the runner-up."""
    same = [t for t in complete if space.same_batch(t.config)]
    return [*complete[:1], *same[:1], *complete[1:2]]


def _round_s(entrants: Sequence[_Entrant], number: int, launches: Launches) -> float:
    """About how long a round takes; launches that an earlier run of the study finished take no time."""
    return sum(
        e.wall_s for e in entrants if not e.failed and launches.finished(_name(e, number), e.trial.config) is None
    )


def _name(entrant: _Entrant, number: int) -> str:
    return f"verify-{entrant.trial.number:05d}-{number}"


def _launch(
    entrant: _Entrant, number: int, launches: Launches, observer: Observer, stop: Callable[[], int | None]
) -> None:
    config = entrant.trial.config
    result = launches.finished(_name(entrant, number), config)
    if result is None:
        title = f"verifying trial {entrant.trial.number}, launch {number}"
        result = launches.measure(_name(entrant, number), title, config)
    signal_number = stop()
    if signal_number is not None:
        raise InterruptedSearch(signal_number)
    entrant.wall_s = result.wall_s
    if result.status is TrialStatus.COMPLETE and result.measurement is not None:
        entrant.again.append(_cold(result.measurement, entrant.trial.result.measurement))
        again = rate_text(result.measurement.samples_per_s, result.measurement.ci95_per_s)
        observer.says(f"trial {entrant.trial.number} again: {again} samples/s")
    elif result.status is not TrialStatus.INTERRUPTED:
        entrant.failed = True
        observer.says(f"trial {entrant.trial.number} did not hold: {result.status}, {result.cause}")


def _cold(again: Measurement, first: Measurement | None) -> Measurement:
    """A measurement with the compile seconds of the trial before it, which met a cold cache as a training will."""
    return again if first is None else again.model_copy(update={"compile_s": max(again.compile_s, first.compile_s)})


def _standings(entrants: Sequence[_Entrant], scorer: Scorer) -> list[Standing]:
    """Figures for each entrant, the baseline's first."""
    seen = [e.again or [m for m in (e.trial.result.measurement,) if m is not None] for e in entrants]
    noise = stats.launch_noise([[m.samples_per_s for m in ms] for ms in seen])
    rates = [stats.mean_rate([rate_of(m) for m in ms], noise) for ms in seen]
    standings = []
    for entrant, measurements, rate in zip(entrants, seen, rates, strict=True):
        ratio, low, high = stats.speedup(rate, rates[0])
        if entrant is entrants[0]:
            ratio, low, high = 1.0, 1.0, 1.0
        standing = Standing(
            config=entrant.trial.config,
            trial=entrant.trial.number,
            launches=len(measurements),
            verified=bool(entrant.again),
            samples_per_second=rate.per_s,
            ci95=(rate.low_per_s, rate.high_per_s),
            speedup=ratio,
            speedup_ci95=(low, high),
            score=mean(scorer.score(m) for m in measurements),
            peak_memory_bytes=_largest(m.peak_allocated_bytes for m in measurements),
            host_memory_bytes=_largest(m.host_memory_bytes for m in measurements),
            compile_s=median(m.compile_s for m in measurements),
            startup_s=median(m.startup_s for m in measurements),
            epoch_turn_s=_median(m.epoch_turn_s for m in measurements),
            loader_wait_fraction=median(m.loader_wait_fraction for m in measurements),
        )
        standings.append(standing)
    return standings


def rate_of(measurement: Measurement) -> stats.Rate:
    """A measurement's rate with its interval."""
    return stats.Rate(measurement.samples_per_s, *measurement.ci95_per_s)


def _largest(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return max(known, default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None
