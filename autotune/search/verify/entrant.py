"""The entrants of the race, which are the finalists and the baseline, and what is known of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, mean, median

from autotune import stats
from autotune.base.errors import AutotuneError, MachineError
from autotune.base.records import Measurement, Standing, Trial, TrialResult, TrialStatus, Value
from autotune.samplers import WARM_COMPILE
from autotune.workload.scoring import Scorer
from autotune.space import Space, key

#: Number of best trials that are launched again in any case.
TOP = 3
#: With more entrants, there would be too few launches of each.
MOST = 6


@dataclass
class Entrant:
    """One configuration in the race.

    Attributes:
        trial: the search's trial; for a configuration made by the ablation, the winner's trial.
        rounds: the measurement in each round; ``None`` if it was not launched or not measured.
        out: why it dropped out of the race, if it did.
        label: distinguishes a configuration made by the ablation from the trial's own (``without precision``).
        expected_s: expected duration of the next launch.
    """

    config: dict[str, Value]
    trial: Trial
    rounds: list[Measurement | None] = field(default_factory=list)
    out: str | None = None
    expected_s: float = 0.0
    label: str = ""

    @property
    def name(self) -> str:
        """Name that is unique in the race, and the same on a resume."""
        label = self.label.replace("workload.", "own-").replace(" ", "-")
        return "-".join(filter(None, (f"{self.trial.number:05d}", label)))

    @property
    def title(self) -> str:
        """Name for people."""
        return f"trial {self.trial.number} {self.label}".rstrip()

    @property
    def again(self) -> list[Measurement]:
        """Measurements of the race."""
        return [m for m in self.rounds if m is not None]

    @property
    def launches(self) -> list[Measurement]:
        """All measurements of this configuration. They show its noise; for the rate, only those of the race count."""
        own = None if self.label else self.trial.result.measurement
        if self.rounds and self.rounds[0] is own:
            own = None
        return [*([own] if own is not None else []), *self.again]

    @property
    def seen(self) -> list[Measurement]:
        """Measurements of the race, or else the trial's own."""
        own = self.trial.result.measurement
        return self.again or ([own] if own is not None else [])


def entrant(trial: Trial) -> Entrant:
    """Make an entrant from a complete trial."""
    return Entrant(config=trial.config, trial=trial, expected_s=next_s(trial.result))


def next_s(result: TrialResult) -> float:
    """Estimate the duration of the next launch; the compiler's cache is warm by then."""
    seen = result.measurement
    saved_s = (1 - WARM_COMPILE) * seen.compile_s if seen is not None and seen.compile_cache_warm is False else 0.0
    return result.wall_s - saved_s


def wait_fraction(measurements: Iterable[Measurement]) -> float | None:
    """Return the fraction of a step spent waiting for the loader, the median of what is known; ``None`` if nothing
    is."""
    known = [m.loader_wait_fraction for m in measurements if m.loader_wait_fraction is not None]
    return median(known) if known else None


def ended_from_outside(result: TrialResult) -> bool:
    """Return whether a launch says nothing about its configuration: something else ended it, or the machine failed
    (full disk, lost store)."""
    faults = (MachineError.exit_code, AutotuneError.exit_code)
    return result.status in (TrialStatus.INTERRUPTED, TrialStatus.KILLED) or result.error_code in faults


def finalists(
    space: Space, complete: Sequence[Trial], noise: stats.LaunchNoise, leanest: Sequence[Trial] = ()
) -> list[Trial]:
    """Return the trials to launch again, most promising first and without the baseline.

    These are the best three, all within noise of the best, and the best two at the user's own batch size. Where the
    card's clock was lower than the best's, that may be what made the difference, too.

    Args:
        complete: complete trials, most promising first.
        leanest: those among which an objective chooses that is not the rate, best first.
        noise: noise of one launch. Launches of equals differ by less than its sd times √2 · t in 19 of 20 cases.
    """
    others = [t for t in complete if key(t.config) != key(space.baseline)]
    if not others:
        return []
    best = others[0]
    reach = 2**0.5 * stats.t_quantile(round(noise.degrees)) * noise.sd
    near = [t for t in others if (t.rate_per_s or 0.0) >= (best.rate_per_s or 0.0) * (1 - reach) * _clocks(t, best)]
    same = [t for t in others if space.same_training(t.config)]
    lean = [t for t in leanest if key(t.config) != key(space.baseline)]
    chosen = [*others[:1], *lean[:2], *same[:1], *others[:TOP], *same[1:2], *near]
    return list({t.number: t for t in chosen}.values())[:MOST]


def _clocks(one: Trial, other: Trial) -> float:
    mine, theirs = (None if m is None else m.sm_clock_mhz for m in (one.result.measurement, other.result.measurement))
    return stats.clocks_allow(mine, theirs)


def peak_bytes(measurements: Iterable[Measurement]) -> int | None:
    """Return the largest peak of device memory."""
    known = [m.peak_bytes for m in measurements if m.peak_bytes is not None]
    return max(known, default=None)


def clock_mhz(measurements: Sequence[Measurement]) -> float | None:
    """Return the mean of the card's SM clock over these launches; ``None`` if it is not known for every launch."""
    seen = [m.sm_clock_mhz for m in measurements]
    return fmean(clock for clock in seen if clock) if seen and all(seen) else None


def widened(noise: stats.LaunchNoise, measurements: Sequence[Measurement]) -> stats.LaunchNoise:
    """Return the noise, raised to at least the uncertainty within the measurements' own windows."""
    own = [m.relative_se for m in measurements if m.relative_se is not None]
    sd = math.sqrt(mean(se**2 for se in own)) if own else 0.0
    return stats.LaunchNoise(sd, noise.degrees, False) if stats.outdone(noise, sd) else noise


def rate_of(measurement: Measurement) -> stats.Rate:
    """Return a measurement's rate with its interval."""
    return stats.Rate(
        measurement.samples_per_s,
        *measurement.ci95_per_s,
        relative_se=measurement.relative_se,
        degrees=measurement.degrees,
    )


def _score(entrant: Entrant, scorer: Scorer, compile_s: float) -> float:
    """Return the mean score of the race's launches that have one, or else that of the search's own launch.

    Raises:
        UnscoredError: the objective lacks a figure of each.
    """
    own = entrant.trial.result.measurement
    for measurements in (entrant.seen, [own] if own is not None else []):
        cold = [m.model_copy(update={"compile_s": compile_s}) for m in measurements]
        known = [score for m in cold if (score := scorer.known(m)) is not None]
        if known:
            return mean(known)
    return scorer.score(entrant.seen[0])


def standing(
    entrant: Entrant, rate: stats.Rate, ratio: tuple[float, float, float], scorer: Scorer, compile_s: float
) -> Standing:
    """Return an entrant's figures of record.

    Args:
        compile_s: compile time with a cold cache, as in the user's training.

    Raises:
        UnscoredError: the objective lacks a figure of each of its launches.
    """
    measurements = entrant.seen
    turns = [m.epoch_turn_s for m in measurements if m.epoch_turn_s is not None]
    host = [m.host_memory_bytes for m in measurements if m.host_memory_bytes is not None]
    return Standing(
        config=entrant.config,
        trial=entrant.trial.number,
        launches=len(measurements),
        verified=bool(entrant.again),
        samples_per_second=rate.per_s,
        ci95=(rate.low_per_s, rate.high_per_s),
        speedup=ratio[0],
        speedup_ci95=ratio[1:],
        score=_score(entrant, scorer, compile_s),
        peak_memory_bytes=peak_bytes(measurements),
        host_memory_bytes=max(host, default=None),
        compile_s=compile_s,
        startup_s=median(m.startup_s for m in measurements),
        epoch_turn_s=median(turns) if turns else None,
        # Where no loader was seen, nothing tells how long a step waits for its batch.
        loader_wait_fraction=None if measurements[0].counts == "steps" else wait_fraction(measurements),
    )
