"""A launcher that replays recorded launches in virtual time and starts no process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median

from autotune import stats
from autotune.base.clock import Clock
from autotune.knobs.compile_mode import compiles
from autotune.launcher.watch import Watch
from autotune.base.records import Beat, Config, HeatPlan, LaunchKind, Phase, TrialResult, TrialSpec, TrialStatus
from autotune.search.replay.heats import replay_heat
from autotune.search.replay.rows import PARTS, Row, ShownEntrant
from autotune.search.replay.surface import Surface
from autotune.space import device_part, key, loader_part

_CEILINGS = {LaunchKind.DEVICE_ONLY: device_part, LaunchKind.LOADER_ONLY: loader_part}


class ReplayLauncher:
    """A `Launcher` that replays a surface.

    Each launch replays one recorded for its configuration and takes as long as that one did. Recorded launches are
    drawn without replacement, and reshuffled when all have been used. The measurement is the recorded one, whatever
    the spec's plan says about windows; pruning, limits and ``stop`` work as in a real launch. In a heat the entrants
    race with their recorded turns (`replay_heat`). Compilation takes the recorded cold-cache time the first time a
    graph is compiled and the warm-cache time after that. Train checks and hold launches are not recorded, so they
    cannot be replayed.

    Args:
        clock: advanced by sleeping on it.
        seed: determines the order of a configuration's launches.
    """

    def __init__(self, surface: Surface, clock: Clock, *, seed: int = 0) -> None:
        self._surface = surface
        self._clock = clock
        self._seed = seed
        self._left: dict[tuple[LaunchKind, str], list[Row]] = {}
        self._drawn: dict[tuple[LaunchKind, str], random.Random] = {}
        #: When each graph is compiled: launches may run side by side.
        self._compiled_at: dict[str, float] = {}

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        """Replay one launch.

        Raises:
            LookupError: no matching launch was recorded.
        """
        began = self._clock.now()
        watch = Watch(spec, self._clock, on_beat, stop)
        if spec.heat is None:
            row = self._draw(spec)
            result = self._play(spec, row, watch)
            watch.finish()
            # The time after the last phase (teardown, a forced epoch turn) counts too.
            rest_s = row.wall_s - sum(row.phase_s.values())
            if result.status in (TrialStatus.COMPLETE, row.status) and rest_s > 0:
                self._clock.sleep(rest_s)
        else:
            result = self._replay_heat(spec, spec.heat, watch)
            watch.finish()
        times = {"phase_s": watch.phase_s, "began_s": began, "wall_s": self._clock.now() - began}
        return result.model_copy(update=times)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _draw(self, spec: TrialSpec) -> Row:
        if spec.kind in _CEILINGS:
            name = (spec.kind, key(_CEILINGS[spec.kind](spec.config)))
            rows = self._surface.ceilings.get(name, ())
        else:
            name = (spec.kind, key(spec.config))
            rows = self._surface.launches.get(name[1], ()) if spec.kind is LaunchKind.MEASURE else ()
        if not rows:
            raise LookupError(f"{self._surface.heading.name} holds no {spec.kind} launch of {name[1]}")
        if not self._left.get(name):
            # Seeded by name, so that other launches do not change the order of these.
            rng = self._drawn.setdefault(name, random.Random(f"{self._seed} {name}"))
            self._left[name] = rng.sample(rows, len(rows))
        return self._left[name].pop()

    def _replay_heat(self, spec: TrialSpec, plan: HeatPlan, watch: Watch) -> TrialResult:
        failed = self._surface.failed
        parts = {key(PARTS[plan.side](config)) for config in plan.entrants} - failed.keys()
        rows = [row for row in self._surface.heats.get(plan.side, ()) if parts <= row.shown.keys()]
        if not rows:
            cause = f"no heat of the {plan.side} with all these entrants was recorded"
            return TrialResult(launch=spec.launch, status=TrialStatus.INTERRUPTED, cause=cause)
        rng = random.Random(f"{self._seed} {spec.launch}")
        return replay_heat(spec, plan, rng.choice(rows), watch, self._clock, rng, self._first_step_s, failed)

    def _play(self, spec: TrialSpec, row: Row, watch: Watch) -> TrialResult:
        for name in Phase:
            if name.value not in row.phase_s:
                continue
            watch.beat(Beat(phase=name))
            if name is Phase.MEASURE:
                pruned = self._measure(spec, row, watch)
                if pruned is not None:
                    return pruned
            else:
                self._clock.sleep(self._compile_s(row) if name is Phase.COMPILE else row.phase_s[name])
            if watch.overdue():
                status = watch.ended or TrialStatus.INTERRUPTED
                return TrialResult(launch=spec.launch, status=status, phase=name, cause=watch.cause, exit_code=-9)
        return TrialResult(
            launch=spec.launch,
            status=row.status,
            phase=row.phase,
            cause=row.cause,
            exit_code=0 if row.status is TrialStatus.COMPLETE else 1,
            peak_bytes=row.peak_bytes,
            measurement=row.measurement(),
        )

    def _compile_s(self, row: Row) -> float:
        """Return the seconds of the first step of a launch."""
        return self._compiled_s(row.config, row.phase_s.get(Phase.COMPILE, 0.0), warm=row.cache_warm)

    def _first_step_s(self, entrant: ShownEntrant) -> float:
        """Return the seconds of the first step of an entrant of a heat. A recording begins with an empty cache."""
        return self._compiled_s(entrant.config, entrant.first_step_s or 0.0, warm=False)

    def _compiled_s(self, config: Config, recorded_s: float, *, warm: bool | None) -> float:
        """Return the seconds of a first step.

        If the recorded cache state differs from the replayed one, use the median of launches of the same graph with the
        right cache state.
        """
        if not compiles(config):
            return recorded_s
        graph, now = key(device_part(config)), self._clock.now()
        now_warm = self._compiled_at.get(graph, math.inf) <= now
        alike = self._surface.compile_seconds.get((graph, now_warm), ())
        seconds = recorded_s if warm is None or now_warm == warm or not alike else median(alike)
        self._compiled_at[graph] = min(now + seconds, self._compiled_at.get(graph, math.inf))
        return seconds

    def _measure(self, spec: TrialSpec, row: Row, watch: Watch) -> TrialResult | None:
        """Replay the measure phase; return a result if the launch is pruned."""
        windows = row.timed
        elapsed_s = 0.0
        for count, window in enumerate(windows, 1):
            self._clock.sleep(window.seconds)
            elapsed_s += window.seconds
            rate = window.samples / window.seconds
            watch.beat(Beat(phase=Phase.MEASURE, step=count, rate_per_s=rate))
            below_per_s = spec.plan.prune_below_per_s
            if stats.surely_slow(spec.plan, windows[:count], count, rate, elapsed_s, below_per_s=below_per_s):
                seen = stats.rate_of(windows[:count])
                return TrialResult(
                    launch=spec.launch,
                    status=TrialStatus.PRUNED,
                    phase=Phase.MEASURE,
                    cause=f"ran at {seen.per_s:.4g} samples/s, and is too slow to be the best",
                    exit_code=0,
                    rate_seen_per_s=seen.per_s,
                    measurement=row.measurement(seen, windows[:count]) if count > 1 else None,
                )
        self._clock.sleep(max(0.0, row.phase_s[Phase.MEASURE] - elapsed_s))
        return None
