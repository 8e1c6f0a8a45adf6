"""Tunes a training while it runs: ``autotune run --live``.

``python -P -m autotune.child.live SPEC COMMANDS`` runs beside a script that has the agent in it, with the pipe to the
agent at descriptor COMMANDS. Configurations take turns in the script's own loop, where every step trains, whichever
configuration's turn it is; the fastest of those that are surely faster stays in force, and this process ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune import stats
from autotune.base.clock import Clock, SystemClock, timestamp
from autotune.base.errors import AutotuneError
from autotune.base.files import write_atomic
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import (
    CommandRef,
    Config,
    DataRef,
    Deliveries,
    DeliveryPlan,
    Heat,
    HeatEntrant,
    HeatPlan,
    Host,
    LiveSpec,
    Probe,
    TrialStatus,
    Turn,
    Value,
)
from autotune.base.version import __version__
from autotune.child.script_launches import probe_of
from autotune.child.script_process import LOOK_S, Watched
from autotune.child.script_turns import ScriptTurns, TurnPlan
from autotune.child.trail import DeliveryLog, Trail, told_deliveries
from autotune.child.windows import SurroundingsReader
from autotune.knobs import KNOBS, Scope, spell
from autotune.knobs.compile_mode import GUESS_S, mode_of
from autotune.knobs.num_workers import WORKERS, workers_of
from autotune.launcher import script_entry
from autotune.machine.gpu import Gpu, NvmlUnavailable, gpus, with_instances
from autotune.machine.host import fingerprint, read_host
from autotune.profile import Conditions, Gives, Measured, Profile, ProfileWorkload, Provenance, Versions, write
from autotune.space import Space, SpaceRequest, build_space, canonical, key
from autotune.space.formatting import describe
from autotune.stats.racing import PRIORS, Contender, Rounds

#: How much a single change may cost, as a fraction of the expected training time. Compilation, during which nothing
#: trains, is the one that costs much at once.
LOSS = 0.01
#: A change that gains less than this is not worth making.
LEAST_GAIN = 1.01
#: A change whose own ratio is below this is not tried together with a faster one.
HOPELESS = 0.8
#: How many of the changes that are faster by themselves are combined, and how many of those that are not.
MOST = 3
#: How many numbers of workers are tried, and the most host memory that one worker is expected to need.
MOST_WORKERS, WORKER_BYTES = 4, 2**28


def changes(space: Space, own: Config, device: str, spec: LiveSpec) -> tuple[list[dict[str, Value]], list[str]]:
    """Return the configurations that change one knob and can be switched to between two steps, and a description of
    each change that is left out, with the reason.

    Args:
        device: ``cpu``, or the name of a card.
    """
    changed: list[dict[str, Value]] = []
    left_out: list[str] = []
    affordable_s = LOSS * spec.expect_s
    for name, value in own.items():
        knob = KNOBS.get(name)
        if knob is None or not knob.switchable or name not in space.choices or name in space.between_launches:
            continue
        for other in space.legal(name):
            config = canonical({**own, name: other})
            if other == value or space.why_apart(own, config) is not None:
                continue
            if device != "cpu" and other == "foreach":
                # Its temporaries are as large as the model, and an optimizer step that fails cannot be repeated.
                left_out.append(f"{knob.phrase(other)}: it needs more memory")
                continue
            # A compiled model, whoever compiles it, is compiled again for another layout, number format or number of
            # threads.
            mode = mode_of(config) if knob.scope is not Scope.OPTIMIZER else "off"
            if knob.changes_maths and name not in spec.allow:
                left_out.append(f"{knob.phrase(other)}: it changes the maths (`--allow {name}`)")
            elif mode != "off" and GUESS_S[mode] > affordable_s:
                # Nothing would train for that long.
                left_out.append(
                    f"{knob.phrase(other)}: it may take {GUESS_S[mode]:.0f} s, in which nothing trains "
                    f"(`--expect {GUESS_S[mode] / LOSS / 3600:.1f}h` or longer allows that)"
                )
            else:
                changed.append(config)
    return changed, left_out


def together(
    space: Space, own: Config, better: Sequence[Config], others: Sequence[Config] = ()
) -> list[dict[str, Value]]:
    """Return the best changes of a configuration, the fastest first, each by itself and combined with those before it;
    and the fastest combined with changes that gained nothing by themselves: channels_last may help only under bf16.

    Args:
        better: configurations with one change that makes them faster, the fastest first. others: those with one change
            that makes them neither faster nor much slower.
    """
    configs: dict[str, dict[str, Value]] = {}
    added = dict(own)
    for config in better[:MOST]:
        configs.setdefault(key(config), dict(config))
        more = _with_change(space, own, config, added)
        if more is not None:
            added = more
            configs.setdefault(key(more), more)
    for config in others[:MOST] if better else ():
        more = _with_change(space, own, config, better[0])
        if more is not None:
            configs.setdefault(key(more), more)
    return list(configs.values())


def _with_change(space: Space, own: Config, config: Config, other: Config) -> dict[str, Value] | None:
    """Return `other` with the change that `config` makes to `own` as well; ``None`` if that is not allowed, or `other`
    has already changed the same knob."""
    changed = {n: v for n, v in config.items() if own.get(n) != v}
    if any(other.get(n) != own.get(n) for n in changed):
        return None
    merged = canonical({**other, **changed})
    return merged if space.refusal(merged) is None and space.why_apart(own, merged) is None else None


def other_workers(space: Space, waits: float, host: Host) -> list[dict[str, Value]]:
    """Return the script's own configuration with other numbers of workers, around the number that keeps the device
    busy, given the fraction of the time that the script waits for its loader."""
    own = space.baseline
    workers = workers_of(own)
    # Without workers, the loader works only while the device waits; with workers, all the time.
    needed = max(1.0, (workers or waits) / max(1.0 - waits, 0.01))
    affordable = int(host.available_bytes / 2 // WORKER_BYTES)
    counts = [int(n) for n in space.legal(WORKERS) if 0 < int(n) <= affordable and n != workers]
    counts.sort(key=lambda n: abs(math.log(n / needed)))
    others = [space.completed({**own, WORKERS: n}) for n in sorted(counts[:MOST_WORKERS])]
    return [config for config in others if space.refusal(config) is None]


def surest_workers(heat: Heat) -> HeatEntrant | None:
    """Return the fastest entrant that is surely faster than the reference and has fewer workers than any that failed:
    what fails in one worker may fail in another, later."""
    failed = [workers_of(e.config) for e in heat.entrants[1:] if e.status is TrialStatus.CRASHED]
    return surest(heat, [e for e in heat.entrants[1:] if not failed or workers_of(e.config) < min(failed)])


def surest(heat: Heat, among: Sequence[HeatEntrant] | None = None) -> HeatEntrant | None:
    """Return the fastest entrant, of some or of all, that is surely faster than the reference."""
    faster = [
        e
        for e in (heat.entrants[1:] if among is None else among)
        if e.ratio and e.ratio_ci95 and e.ratio > LEAST_GAIN and e.ratio_ci95[0] > 1
    ]
    return max(faster, key=lambda e: e.ratio or 0.0, default=None)


@dataclass(frozen=True)
class Raced:
    """One race.

    Attributes:
        title: what was compared. waits: fraction of the time that the script waited for its loader, by entrant. whole:
            that wait counts towards the rate.
    """

    title: str
    heat: Heat
    waits: Sequence[float]
    whole: bool


@dataclass(frozen=True)
class Found:
    """The result of tuning.

    Attributes:
        config: the configuration that stays in force. whole: ``(ratio, low, high)`` of its rate to that of the script's
            own configuration, as the last race shows, including the wait for the loader. own_per_s: rate of the
            script's own configuration, ``(rate, low, high)``, including that wait.
        wait: fraction of the time that the script waited for its loader under ``config``.
        epoch_turn_s: seconds that the beginning of an epoch takes under ``config``, included in ``whole``; ``None`` if
            it was not observed.
    """

    config: Config
    whole: tuple[float, float, float] = (1.0, 1.0, 1.0)
    own_per_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    wait: float = 0.0
    epoch_turn_s: float | None = None


#: Fractions of the expected training time spent on comparing configurations: first with one change each, then with the
#: best changes combined.
FIRST, SECOND = 0.05, 0.05
#: Another such fraction for numbers of workers, used if the script waits for its loader for more than `WAITS` of the
#: time.
LOADER, WAITS = 0.05, 0.1
#: Seconds of a turn: long compared with the wait for the next command.
TURN_S = 0.5
#: A turn is ended once it has taken this many times as long as it should.
LIMIT = 3.0
#: What `Tuning._with_epochs` returns where epochs were not observed.
_SAME = (1.0, 1.0, None)


class ScriptEndedError(Exception):
    """The script has ended while it was tuned."""


class LiveScript(Watched):
    """A script that another process has started, with the agent in it.

    Args:
        pid: of its process, which must not be waited for, because it is another process's child.
        path: of the file that the agent writes.
    """

    def __init__(self, pid: int, path: Path, commands: int) -> None:
        super().__init__(Trail(path), commands)
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    @property
    def has_ended(self) -> bool:
        if self._process is None:
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        return True

    def looks(self) -> Iterator[int]:
        # Raises `ScriptEndedError` once the script has ended, or can no longer be watched.
        while True:
            ended = self.has_ended
            self.found = self.trail.read()
            if self.trail.lost is not None:
                raise ScriptEndedError(f"the script can be watched no longer: {self.trail.lost}")
            yield max(self.trail.optimizer_steps.values(), default=0)
            if ended:
                raise ScriptEndedError("the script has ended before it was tuned")
            if not self.found:
                # While it is being tuned the script waits for commands, so look more often.
                time.sleep(LOOK_S if self.trail.own is None else LOOK_S / 10)


class Tuning:
    """Tunes one training.

    Args:
        commands: see `Watched`.
    """

    _probe: Probe
    _space: Space

    def __init__(self, spec: LiveSpec, commands: int, clock: Clock) -> None:
        self._spec, self._clock = spec, clock
        self._files = StudyFiles(Path(spec.folder))
        self._launch = LaunchFiles(Path(spec.folder))
        self._script = LiveScript(spec.pid, self._launch.trail, commands)
        self._in_command = script_entry.places(spec.words)
        self._order = random.Random(0)
        self._races: list[Raced] = []
        self._left_out: list[str] = []

    def run(self) -> None:
        """Wait until everything that the script trains with has been observed, tune it, and write a profile and a
        report."""
        began = self._clock.now()
        self._script.wait_for_all()
        host = read_host()
        command = CommandRef(words=self._spec.words, folder=os.getcwd(), samples_per_step=None)
        facts = self._script.trail.own or {}
        if not facts.get("optimizer") or facts["machine"]["ranks"] > 1:
            why = (
                "several ranks cannot be tuned while they train" if facts.get("optimizer") else "no optimizer was seen"
            )
            self._report([f"Not tuned: {why}."])
            return
        self._probe = probe_of(command, self._script.trail, facts, self._in_command, self._spec.workload)
        self._space = build_space(self._probe, host, SpaceRequest())
        found = self._tune()
        elapsed_s = self._clock.now() - began
        lines = self._sentences(found, elapsed_s)
        sentence = lines[0]
        if found.config != self._own:
            write(self._profile(found, host, elapsed_s), self._files.profile)
            sentence = f"{sentence}; {self._files.profile}"
        self._turns([found.config]).settle(0, sentence)
        self._report(lines)

    @property
    def _own(self) -> Config:
        """The script's own configuration."""
        return self._space.baseline

    def _tune(self) -> Found:
        own, space = self._own, self._space
        base = self._with_workers()
        changed, left_out = changes(space, base, self._probe.device, self._spec)
        self._left_out += left_out
        first = self._race("One change each", [base, *changed], FIRST) if changed else None
        measured = [] if first is None else [e for e in first.heat.entrants[1:] if e.ratio is not None]
        measured.sort(key=lambda e: -(e.ratio or 0.0))
        better = [e.config for e in measured if (e.ratio or 0.0) > LEAST_GAIN]
        others = [e.config for e in measured if HOPELESS < (e.ratio or 0.0) <= LEAST_GAIN]
        finalists = together(space, base, better, others)
        if base != own:
            finalists = [dict(base), *finalists]
        # Use the figures of the last race alone: those by which its entrants were chosen are biased in their favour.
        second = self._race("Together", [own, *finalists], SECOND, whole=base != own) if finalists else None
        if second is None:
            return Found(own)
        best = surest(second.heat) or second.heat.entrants[0]
        number = second.heat.entrants.index(best)
        rows = {
            i: [None if t is None else t.samples / (t.seconds + (t.wait_s or 0.0)) for t in e.turns]
            for i, e in enumerate(second.heat.entrants)
            if i in (0, number) and any(e.turns)
        }
        prior = PRIORS["cpu" if self._probe.device == "cpu" else "cuda"]
        compared = stats.compare_rounds(rows, prior=prior, robust=True)
        rate, ratio = compared.rate(0), compared.ratio(number, 0)
        turns = [t for t in second.heat.entrants[0].turns if t is not None]
        samples = sum(t.samples for t in turns) / sum(t.steps for t in turns)
        step_s = samples / rate.per_s, samples / rate.per_s / ratio[0]
        whole, own_part, turn_s = self._with_epochs([own, best.config], samples, step_s) if number else _SAME
        if _times(ratio, whole)[1] <= 1:
            # Nothing is surely faster; or epochs are short, and their beginnings cost what it gains inside them.
            return Found(own, wait=second.waits[0])
        own_per_s = _times((rate.per_s, rate.low_per_s, rate.high_per_s), own_part)
        return Found(best.config, _times(ratio, whole), own_per_s, second.waits[number], turn_s)

    def _with_epochs(
        self, entrants: Sequence[Config], samples: float, step_s: tuple[float, float]
    ) -> tuple[float, float, float | None]:
        """Let two configurations train until an epoch begins. Return the factors by which the beginnings of epochs
        change the ratio of the second to the first, and the rate of the first, and the seconds that one takes under the
        second; ``None`` if it was not observed.

        Args:
            samples: of a step. step_s: seconds of a step inside an epoch, under each.
        """
        turns, most_s = self._turns(entrants, whole=True), SECOND * self._spec.expect_s
        all_turns_s = [turns.epoch_turn_s(number, samples, seconds, most_s) for number, seconds in enumerate(step_s)]
        steps = turns.epoch_steps(samples)
        known_s = [turn_s for turn_s in all_turns_s if turn_s is not None]
        if steps is None or len(known_s) < len(all_turns_s):
            return _SAME
        first, second = (
            steps * seconds / (steps * seconds + turn_s) for seconds, turn_s in zip(step_s, known_s, strict=True)
        )
        return second / first, first, known_s[1]

    def _with_workers(self) -> Config:
        """Return the script's own configuration, with another number of workers if it waits for its loader and that is
        surely faster."""
        own, space = self._own, self._space
        turns = self._turns([own], whole=True)
        entrant = Contender(0, own)
        # Needed even without a loader: if something fails, the agent goes back to its very first turn, and races
        # shuffle the order.
        for _ in range(2):
            turns.take(entrant)
        if WORKERS not in own or WORKERS not in space.choices:
            return own
        waited_s, seconds = turns.waited[0]
        if not seconds or waited_s / seconds < WAITS:
            return own
        others = other_workers(space, waited_s / seconds, read_host())
        if not others:
            return own
        accepted = self._delivering_the_same(own, others)
        if not accepted:
            return own
        race = self._race("Workers", [own, *accepted], LOADER, whole=True)
        best = None if race is None else surest_workers(race.heat)
        return own if best is None else best.config

    def _delivering_the_same(self, own: Config, others: Sequence[Config]) -> list[Config]:
        """Return the configurations whose workers deliver what a single worker, or the script's own workers, deliver.
        Why the others are left out is noted.

        A single worker makes the batches one after the other, as a script without workers does.
        """
        reference = self._noted({**own, WORKERS: max(1, workers_of(own))}, DeliveryPlan())
        if isinstance(reference, str):
            self._left_out.append(f"workers: {reference}")
            return []
        plan = stats.plan_beside(reference)
        accepted = []
        for config in others:
            deliveries = self._noted(config, plan or DeliveryPlan())
            comparison = deliveries if isinstance(deliveries, str) else stats.compare_data(reference, deliveries)
            if not isinstance(comparison, str) and comparison.passed:
                accepted.append(config)
            else:
                why = comparison if isinstance(comparison, str) else comparison.reason
                self._left_out.append(f"{KNOBS[WORKERS].phrase(config[WORKERS])}: {why}")
        return accepted

    def _noted(self, config: Config, plan: DeliveryPlan) -> Deliveries | str:
        """Return what the workers of a configuration deliver, or the reason why that is not known."""
        arguments = script_entry.door_arguments(config, in_command=self._in_command).get("loader", {})
        arguments.pop("batch_size", None)
        wanted = self._script.trail.loads + 1
        self._script.tell(deliver={"arguments": arguments, "noted": told_deliveries(plan, self._launch)})
        for _ in self._script.looks():
            if self._script.trail.loads == wanted:
                break
        event = self._script.trail.load
        if event.get("raised"):
            name, _, message, _ = event["raised"][0]
            if "Original Traceback" in message:
                # It ends with what the worker raised.
                return f"{message.strip().splitlines()[-1]} (in a worker)"
            return f"{name.rpartition('.')[2]}: {message}"
        if event.get("refused"):
            return str(event["refused"])
        return DeliveryLog(plan, self._launch).found() or "nothing was noted"

    def _profile(self, found: Found, host: Host, elapsed_s: float) -> Profile:
        """Return the result of tuning as a profile."""
        probe, space, card = self._probe, self._space, _card(self._probe)
        cpu = probe.device == "cpu"
        rate, low, high = found.own_per_s
        ratio, ratio_low, ratio_high = found.whole
        turns = [t for race in self._races for e in race.heat.entrants for t in e.turns if t is not None]
        return Profile(
            workload=ProfileWorkload(name=self._spec.workload.name, sha256=self._spec.workload.sha256),
            configuration=dict(found.config),
            gives=Gives(
                samples_per_second=rate * ratio,
                ci95=(low * ratio, high * ratio),
                speedup=ratio,
                speedup_ci95=(ratio_low, ratio_high),
                peak_memory_bytes=self._script.trail.reserved_bytes,
                peak_memory_is="host" if cpu else "device",
                compile_seconds=0.0,
                startup_seconds=0.0,
                loader_wait_fraction=found.wait if WORKERS in space.baseline else None,
                epoch_turn_seconds=found.epoch_turn_s,
                launches=1,
                same_batch=True,
            ),
            baseline=Measured(configuration=dict(space.baseline), samples_per_second=rate, ci95=(low, high)),
            conditions=Conditions(
                device=probe.device,
                device_name=host.cpu_model if cpu else probe.device_name,
                image_size=None,
                data="none",
                epoch_samples=probe.dataset_samples,
                worker_start_method="fork",
                seed=0,
                allow_busy=True,
                counts="samples" if WORKERS in space.baseline else "steps",
            ),
            fingerprint=fingerprint(probe, host, card, DataRef(kind="none")),
            versions=Versions(
                autotune=__version__,
                torch=probe.torch_version,
                torchvision=probe.torchvision_version,
                python=probe.python_version,
                cuda=probe.cuda_version,
                cudnn=probe.cudnn_version,
                driver=None if card is None else card.driver_version,
            ),
            provenance=Provenance(
                study=self._files.name,
                trial=0,
                objective="throughput",
                trials={},
                measured_seconds=sum(t.seconds for t in turns),
                elapsed_seconds=elapsed_s,
                created=timestamp(),
            ),
        ).sealed()

    def _sentences(self, found: Found, elapsed_s: float) -> list[str]:
        """Return the lines of the report, the first of which says what is in force now."""
        own = self._own
        tried = len({key(e.config) for race in self._races for e in race.heat.entrants} - {key(own)})
        if found.config == own:
            first = (
                f"live: nothing was surely faster than the script as it stands, of {tried} changes in {elapsed_s:.0f} s"
            )
        else:
            ratio, low, high = found.whole
            what = describe(found.config, own)
            first = f"live: {what} from now on, {ratio:.2f}× ({low:.2f} to {high:.2f}) as fast"
            if found.epoch_turn_s is None and workers_of(found.config) != workers_of(own):
                first += ", without the starts of its epochs, which were not measured"
        lines = [first, ""]
        for race in self._races:
            heat = race.heat
            beside = heat.reference.config
            than = "" if beside == own else f", beside {describe(beside, own)}"
            lines += [f"{race.title}, {heat.measured_s:.0f} s of turns{than}; {heat.ended}:"]
            for entrant in heat.entrants[1:]:
                if entrant.ratio is not None and entrant.ratio_ci95 is not None:
                    low, high = entrant.ratio_ci95
                    rate = f"{entrant.ratio:.3f}× ({low:.3f} to {high:.3f}){'' if race.whole else ' without loading'}"
                else:
                    rate = f"no figure: {entrant.cause}"
                lines.append(f"- {describe(entrant.config, own)}: {rate}")
            lines.append("")
        if self._left_out:
            lines += ["Not tried:", *(f"- {words}" for words in self._left_out), ""]
        if lost := self._script.trail.steps_lost:
            lines += [f"Steps with gradients of zero, because a configuration failed in them: {lost}", ""]
        if found.wait:
            lines += [f"Waiting for the loader: {100 * found.wait:.0f} % of the time", ""]
        return lines

    def _race(self, title: str, entrants: Sequence[Config], part: float, *, whole: bool = False) -> Raced | None:
        """Let configurations race for a part of the expected training time."""
        max_s = part * self._spec.expect_s
        plan = HeatPlan(entrants=tuple(dict(c) for c in entrants), turn_s=TURN_S, max_s=max_s)
        turns = self._turns(plan.entrants, whole=whole)
        heat = Rounds(plan, turns, self._clock, self._order).run(self._clock.now())
        if heat is None:
            return None
        waits = tuple(waited_s / seconds if seconds else 0.0 for waited_s, seconds in turns.waited)
        self._races.append(Raced(title, heat, waits, whole))
        return self._races[-1]

    def _turns(self, entrants: Sequence[Config], *, whole: bool = False) -> ScriptTurns:
        how = TurnPlan(TURN_S, cuda=self._probe.device != "cpu", limit=LIMIT, whole=whole)
        around = SurroundingsReader((), self._clock)
        return _LoggedTurns(self._script, entrants, self._in_command, how, around, self._clock, self._own)

    def _report(self, lines: Sequence[str]) -> None:
        text = "\n".join([f"# {self._files.name}: tuned while it trained", "", *lines])
        write_atomic(self._files.folder / "report.md", text)


def _times(figures: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    return figures[0] * factor, figures[1] * factor, figures[2] * factor


class _LoggedTurns(ScriptTurns):
    """Turns of which each writes a line to this process's log."""

    def take(self, entrant: Contender) -> Turn | None:
        turn = super().take(entrant)
        values = " ".join(f"{n}={spell(v)}" for n, v in entrant.config.items())
        outcome = entrant.cause or "no turn" if turn is None else f"{turn.steps} steps, {turn.seconds:.3f} s"
        sys.stdout.write(f"{time.monotonic():.3f} {entrant.number}: {outcome} ({values})\n")
        sys.stdout.flush()
        return turn


def _card(probe: Probe) -> Gpu | None:
    cards = gpus() if probe.device != "cpu" else []
    if isinstance(cards, NvmlUnavailable) or probe.device_uuid is None:
        return None
    # torch does not distinguish the UUID of a MIG instance from that of a card.
    bare = probe.device_uuid.removeprefix("GPU-")
    return next((c for c in with_instances(cards) if c.uuid.removeprefix("GPU-").removeprefix("MIG-") == bare), None)


def main() -> int:
    """Tune the training of a `LiveSpec`."""
    spec = LiveSpec.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        Tuning(spec, int(sys.argv[2]), SystemClock()).run()
    except (AutotuneError, ScriptEndedError) as error:
        write_atomic(Path(spec.folder) / "report.md", f"# Not tuned\n\n{error}\n")
        sys.stdout.write(f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
