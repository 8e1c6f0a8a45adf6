"""A launcher that starts no process: each launch follows a script, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autotune.base.clock import Clock
from autotune.base.files import write_atomic
from autotune.base.records import (
    TRANSIENT,
    Beat,
    Config,
    Heat,
    HeatEntrant,
    HeatPlan,
    Hold,
    LaunchKind,
    Measurement,
    Phase,
    Probe,
    Side,
    TrainCheck,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Turn,
)
from autotune.knobs.compile_mode import compiles
from autotune.launcher.quiet import ASK_EVERY_S, stopped_waiting
from autotune.launcher.watch import Watch, open_folder
from autotune.space import key
from autotune.study.history import heat_steps
from tests.support.makers import make_measurement, make_probe

#: Interval in virtual seconds at which a launch takes a step, calls ``stop`` and checks its limits.
TICK_S = 0.25
#: Fraction of a launch's time spent in each phase.
_SHARES = {Phase.LOAD: 0.1, Phase.BUILD: 0.1, Phase.COMPILE: 0.2, Phase.WARMUP: 0.2, Phase.MEASURE: 0.4}
_MEASURING = (LaunchKind.MEASURE, LaunchKind.DEVICE_ONLY, LaunchKind.LOADER_ONLY)
_AMPLE = Hold(
    steps=50, seconds=5.0, settled=True, peak_bytes=2**30, capacity_bytes=2**34, alloc_retries=0, evaluated="eval"
)
_STEPPING = (Phase.COMPILE, Phase.WARMUP, Phase.MEASURE)
#: Of a heat: virtual seconds of a turn, and its rounds. Who is this much slower than the fastest drops out after one.
_TURN_S, _ROUNDS, _BEHIND = 0.1, 4, 0.8
#: How an entrant of a heat fails without ending the process. Others end it.
_OWN_FAILURES = (TrialStatus.OOM, TrialStatus.COMPILE_FAILED, TrialStatus.DIVERGED, TrialStatus.USER_ERROR)
#: Exit code of a launch by its status; 1 for all others.
_EXIT_CODES = {
    TrialStatus.COMPLETE: 0,
    TrialStatus.PRUNED: 0,
    TrialStatus.CRASHED: -11,
    TrialStatus.KILLED: -9,
    TrialStatus.HOST_OOM: -9,
    TrialStatus.INTERRUPTED: -9,
    TrialStatus.TIMEOUT: -9,
    TrialStatus.HANG: -9,
}


@dataclass(frozen=True)
class Play:
    """The script of one launch.

    Attributes:
        rate_per_s: samples per second, for statuses that have a rate.
        status: how the launch ends unless it is stopped earlier.
        wall_s: virtual seconds from start to end. A failing launch takes the time of the phases it entered.
        phase: phase in which a failing launch ends.
        cause: the failure, in one sentence.
        measurement: replaces the measurement made from ``rate_per_s``. A pruned launch has one only if it is given.
        transient: the failure may not recur. Not needed for statuses that are always transient.
        waited_s: virtual seconds that the launch waits for a quiet machine before it starts.
        cannot_compile: the machine is why a compilation failed.
        error_code: exit code of the error that the launch reports itself, if any.
        check, hold: results of launches of those kinds; by default healthy training in ample memory.
    """

    rate_per_s: float = 100.0
    status: TrialStatus = TrialStatus.COMPLETE
    wall_s: float = 5.0
    phase: Phase = Phase.MEASURE
    cause: str = "as scripted"
    measurement: Measurement | None = None
    transient: bool = False
    cannot_compile: bool = False
    waited_s: float = 0.0
    check: TrainCheck | None = None
    hold: Hold | None = None
    error_code: int | None = None


class ScriptedLauncher:
    """A `Launcher` that follows a script in virtual time.

    In a heat, the play of each entrant is that of a launch of its configuration: its rate is what it shows, or in a
    heat of the loader the capacity of its measurement's, without noise, and its status how it fails. A turn takes a
    tenth of a second, and compiling as much as in a launch.

    It writes the same files as the real launcher, ``spec.json`` first and ``result.json`` last, and applies limits,
    ``stop`` and pruning by the same rules.

    Args:
        script: the `Play` of each launch: a function of its spec, or a mapping from the configuration's canonical key
            (`autotune.space.key`). It is not used for probes.
        clock: the clock that launches sleep on; a `FakeClock` in most tests.
        probe: result of probe launches; `make_probe()` by default.
        raise_at: errors by launch number, counted from 0 including probes. Such a launch raises in the middle, after
            writing its spec and without a result, as if the whole search was killed.

    Attributes:
        specs: the spec of every launch started, in order.
        closed: number of calls of `close`.
    """

    def __init__(
        self,
        script: Callable[[TrialSpec], Play] | Mapping[str, Play],
        clock: Clock,
        *,
        probe: Probe | None = None,
        raise_at: Mapping[int, BaseException] | None = None,
    ) -> None:
        self.specs: list[TrialSpec] = []
        self.closed = 0
        self._script = script
        self._clock = clock
        self._probe = probe or make_probe()
        self._raise_at = dict(raise_at or {})

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        """Play one launch.

        Raises:
            LookupError: the mapping has no entry for the configuration.
            MachineError: the launch's folder cannot be used.
        """
        # The script says what happens in a heat entrant by entrant.
        play = Play() if spec.heat is not None else self._play(spec)
        error = self._raise_at.get(len(self.specs))
        self.specs.append(spec)
        files = open_folder(spec)
        waited_s = self._wait(play.waited_s, stop)
        if waited_s < play.waited_s:
            result = stopped_waiting(spec, waited_s)
            write_atomic(files.result, result.model_dump_json())
            return result
        began = self._clock.now()
        watch = Watch(spec, self._clock, on_beat, stop)
        result = self._act(play, watch, error) if spec.heat is None else self._take_turns(spec.heat, watch, error)
        watch.finish()
        # A launch ended by a limit or by `stop` is not transient, because the reason would not go away.
        transient = watch.ended is None and (play.transient or result.status in TRANSIENT)
        result = result.model_copy(
            update={
                "phase_s": watch.phase_s,
                "began_s": began,
                "wall_s": self._clock.now() - began,
                "waited_s": waited_s,
                "transient": transient,
            }
        )
        write_atomic(files.result, result.model_dump_json())
        return result

    def close(self) -> None:
        self.closed += 1

    def _wait(self, seconds: float, stop: Callable[[], bool]) -> float:
        """Wait until the time is over or ``stop`` returns true; return the seconds waited."""
        waited_s = 0.0
        while waited_s < seconds and not stop():
            step_s = min(ASK_EVERY_S, seconds - waited_s)
            self._clock.sleep(step_s)
            waited_s += step_s
        return waited_s

    def _play(self, spec: TrialSpec) -> Play:
        if spec.kind is LaunchKind.PROBE:
            return Play(wall_s=1.0, phase=Phase.BUILD)
        if callable(self._script):
            return self._script(spec)
        try:
            return self._script[key(spec.config)]
        except KeyError:
            raise LookupError(f"the script has no row for {key(spec.config)}") from None

    def _take_turns(self, plan: HeatPlan, watch: Watch, error: BaseException | None) -> TrialResult:
        spec = watch.spec
        plays = [self._play(spec.model_copy(update={"config": dict(config)})) for config in plan.entrants]
        if plan.side == "loader":
            # What fails on the device, or is compiled for it, is not reached.
            plays = [
                replace(p, status=TrialStatus.COMPLETE, cannot_compile=False) if p.status in _OWN_FAILURES else p
                for p in plays
            ]
        first_s = [_first_step_s(play, config, plan.side) for play, config in zip(plays, plan.entrants, strict=True)]
        shown = [_shown_per_s(play, plan.side) for play in plays]
        rates = [rate for rate, play in zip(shown, plays, strict=True) if play.status is TrialStatus.COMPLETE]
        turns: list[list[Turn | None]] = [[] for _ in plays]
        out: dict[int, TrialStatus] = {}
        for played in range(_ROUNDS):
            for i, play in enumerate(plays):
                if i in out:
                    turns[i].append(None)
                    continue
                phase = Phase.COMPILE if not played and plan.side == "device" else Phase.MEASURE
                watch.beat(Beat(phase=phase, turn=i, step=played + 1, rate_per_s=shown[i]))
                self._clock.sleep(_TURN_S if played else _TURN_S + (first_s[i] or 0.0))
                if watch.overdue():
                    ended = _end(spec, watch.ended or TrialStatus.INTERRUPTED, phase, watch.cause)
                    return ended.model_copy(update={"turn": i})
                if play.status in _OWN_FAILURES and i:
                    out[i] = play.status
                elif play.status is not TrialStatus.COMPLETE:
                    return _end(spec, play.status, play.phase, play.cause).model_copy(
                        update={"turn": i, "cannot_compile": play.cannot_compile}
                    )
                elif shown[i] < _BEHIND * max(rates) and i:
                    out[i] = TrialStatus.PRUNED
                seconds = spec.batch_size / shown[i]
                failed = out.get(i, TrialStatus.PRUNED) is not TrialStatus.PRUNED
                turns[i].append(None if failed else Turn(steps=1, samples=spec.batch_size, seconds=seconds))
            if error is not None:
                raise error
        rows = []
        for i, (play, config) in enumerate(zip(plays, plan.entrants, strict=True)):
            status = out.get(i, TrialStatus.COMPLETE)
            ratio = shown[i] / shown[0] if any(turns[i]) else None
            rows.append(
                HeatEntrant(
                    config=config,
                    status=status,
                    cause=None if status is TrialStatus.COMPLETE else play.cause,
                    cannot_compile=play.cannot_compile,
                    turns=tuple(turns[i]),
                    ratio=ratio,
                    ratio_ci95=None if ratio is None else (ratio * 0.97, ratio * 1.03) if i else (1.0, 1.0),
                    first_step_s=first_s[i],
                    peak_bytes=2**28,
                )
            )
        measured_s = _TURN_S * sum(turn is not None for row in turns for turn in row)
        found = Heat(
            side=plan.side,
            entrants=tuple(rows),
            noise_sd=0.01,
            startup_s=0.0,
            switch_s=0.0,
            measured_s=measured_s,
            ended="as scripted",
        )
        return _end(spec, TrialStatus.COMPLETE, Phase.MEASURE, None, heat=found)

    def _act(self, play: Play, watch: Watch, error: BaseException | None) -> TrialResult:
        spec = watch.spec
        complete = play.status is TrialStatus.COMPLETE
        measured = complete and spec.kind in _MEASURING
        last = Phase.MEASURE if complete and spec.kind is not LaunchKind.PROBE else play.phase
        step = 0
        for phase in Phase:
            watch.beat(Beat(phase=phase))
            left_s = play.wall_s * _SHARES[phase]
            while left_s > 0:
                self._clock.sleep(min(TICK_S, left_s))
                left_s -= TICK_S
                if watch.overdue():
                    return _end(spec, watch.ended or TrialStatus.INTERRUPTED, phase, watch.cause)
                if phase in _STEPPING:
                    step += 1
                    rate = play.rate_per_s if phase is Phase.MEASURE else None
                    watch.beat(Beat(phase=phase, step=step, rate_per_s=rate, loss=2.0, memory_bytes=2**28))
                if phase is Phase.MEASURE and measured and play.rate_per_s < spec.plan.prune_below_per_s:
                    cause = f"ran at {play.rate_per_s:.4g} samples/s, and is too slow to be the best"
                    return _end(spec, TrialStatus.PRUNED, phase, cause, rate_seen_per_s=play.rate_per_s)
            if error is not None and phase is Phase.BUILD:
                raise error
            if phase is last:
                break
        if spec.kind is LaunchKind.PROBE:
            return _end(spec, TrialStatus.COMPLETE, last, None, probe=self._probe)
        if complete and spec.kind is LaunchKind.TRAIN_CHECK:
            return _end(spec, TrialStatus.COMPLETE, last, None, check=play.check or _healthy(spec))
        if complete and spec.kind is LaunchKind.HOLD:
            return _end(spec, TrialStatus.COMPLETE, last, None, hold=play.hold or _AMPLE)
        if measured:
            made = play.measurement or make_measurement(play.rate_per_s, batch_size=spec.batch_size)
            return _end(spec, TrialStatus.COMPLETE, last, None, measurement=made)
        if play.status is TrialStatus.PRUNED:
            return _end(
                spec, play.status, last, play.cause, rate_seen_per_s=play.rate_per_s, measurement=play.measurement
            )
        return _end(spec, play.status, last, play.cause).model_copy(
            update={"error_code": play.error_code, "cannot_compile": play.cannot_compile}
        )


def _shown_per_s(play: Play, side: Side) -> float:
    """Return the rate that a heat shows of a play."""
    capacity = play.measurement.loader_capacity_per_s if play.measurement is not None else None
    return play.rate_per_s if side == "device" or capacity is None else capacity


def _first_step_s(play: Play, config: Config, side: Side) -> float | None:
    if side == "loader":
        return None
    return play.wall_s * _SHARES[Phase.COMPILE] if compiles(config) else _TURN_S


def _healthy(spec: TrialSpec) -> TrainCheck:
    """Make a check whose loss decreases, slightly differently for each seed."""
    seed, steps = (spec.check.seed, spec.check.steps) if spec.check else (0, 1)
    return TrainCheck(losses=tuple(2.3 * (1 + 0.01 * seed) * 0.97**i for i in range(steps)), finite=True, changed=1.0)


def _end(
    spec: TrialSpec,
    status: TrialStatus,
    phase: Phase,
    cause: str | None,
    *,
    rate_seen_per_s: float | None = None,
    measurement: Measurement | None = None,
    probe: Probe | None = None,
    check: TrainCheck | None = None,
    hold: Hold | None = None,
    heat: Heat | None = None,
) -> TrialResult:
    return TrialResult(
        launch=spec.launch,
        status=status,
        phase=phase,
        cause=cause,
        exit_code=_EXIT_CODES.get(status, 1),
        rate_seen_per_s=rate_seen_per_s,
        measurement=measurement,
        probe=probe,
        check=check,
        hold=hold,
        heat=heat,
    )


def run_heat(launch: Callable[[int, HeatPlan], TrialResult], plan: HeatPlan) -> Heat:
    """Run a heat and return what is known about each entrant, in the order of the plan.

    Args:
        launch: runs one launch of a heat, given its number, counted from 1, and its plan; see `heat_steps`.
    """
    steps = heat_steps(plan)
    result = None
    while True:
        try:
            number, part = next(steps) if result is None else steps.send(result)
        except StopIteration as ended:
            heat: Heat = ended.value
            return heat
        result = launch(number, part)
