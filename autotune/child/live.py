"""Tunes a training while it goes on: ``autotune run --live``.

``python -P -m autotune.child.live SPEC COMMANDS`` stands beside a script that has the agent in it, with the pipe to the
agent at descriptor COMMANDS. Configurations take turns in the script's own loop, where each step trains, whoever's turn
it is; the surest of those that are faster stays in force, and this process ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from autotune import entering, stats
from autotune.child.asking import probe_of
from autotune.child.live_findings import Found, profile_of, sentences
from autotune.child.script import LOOK_S
from autotune.child.script_turns import ScriptTurns, TurnPlan
from autotune.child.surroundings import Watcher
from autotune.child.trail import SeenStep, Trail
from autotune.clock import Clock, SystemClock
from autotune.errors import AutotuneError
from autotune.files import write_atomic
from autotune.knobs import KNOBS, spell
from autotune.knobs.compile_mode import GUESS_S, mode_of
from autotune.layout import LaunchFiles, StudyFiles
from autotune.machine.gpu import Gpu, gpus
from autotune.machine.host import read_host
from autotune.profile import write
from autotune.racing import PRIORS, Contender, Rounds
from autotune.records import CommandRef, Config, Heat, HeatPlan, LiveSpec, Phase, Probe, Turn, Value
from autotune.space import Space, SpaceRequest, build_space, canonical, key

#: Fractions of the time that the training is expected to take, for which configurations are compared: one change each,
#: and then the best of them together.
FIRST, SECOND = 0.05, 0.05
#: What may be lost, as a fraction of the same. A compilation, during which nothing trains, is the one thing that loses
#: much at once.
LOSS = 0.01
#: What is not faster by this is not worth a change.
LEAST_GAIN = 1.01
#: Seconds of a turn: long beside the wait for the next command.
TURN_S = 0.5
#: A turn ends when it takes this many times as long as it should.
LIMIT = 3.0
#: Changes that are faster by themselves, of which all combinations of the best are tried.
MOST = 3


class ScriptEndedError(Exception):
    """The script has ended while it was tuned."""


class LiveScript:
    """A script that somebody else has started, with the agent in it.

    Args:
        pid: of its process, which must not be waited for: it is somebody else's child.
        path: of the file that the agent writes.
    """

    def __init__(self, pid: int, path: Path) -> None:
        self.trail = Trail(path)
        self.found: list[SeenStep] = []
        self.in_background = False
        self.rate_per_s: float | None = None
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    @property
    def has_ended(self) -> bool:
        """Whether the script has ended by itself."""
        if self._process is None:
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        return True

    def looks(self) -> Iterator[int]:
        """Yield the number of steps that an optimizer has taken, again and again.

        Raises:
            ScriptEndedError: the script has ended, or can be watched no longer.
        """
        while True:
            ended = self.has_ended
            self.found = self.trail.read()
            if self.trail.lost is not None:
                raise ScriptEndedError(f"the script can be watched no longer: {self.trail.lost}")
            yield max(self.trail.optimizer_steps.values(), default=0)
            if ended:
                raise ScriptEndedError("the script has ended before it was tuned")
            if not self.found:
                # While it is tuned the script waits for answers, so they come soon.
                time.sleep(LOOK_S if self.trail.own is None else LOOK_S / 10)


class Tuning:
    """Tunes one training.

    Args:
        commands: descriptor of the pipe on which the agent is told whose turn it is.
    """

    def __init__(self, spec: LiveSpec, commands: int, clock: Clock) -> None:
        self._spec, self._commands, self._clock = spec, commands, clock
        self._files = StudyFiles(Path(spec.folder))
        self._launch = LaunchFiles(Path(spec.folder))
        self._script = LiveScript(spec.pid, self._launch.trail)
        self._in_command = entering.places(spec.words)
        self._order = random.Random(0)
        self._heats: list[Heat] = []
        self._left_out: list[str] = []

    def run(self) -> None:
        """Wait until all that the script trains with has been seen, tune it, and leave a profile and a report."""
        began = self._clock.now()
        for _ in self._script.looks():
            if self._script.trail.own is not None:
                break
        host = read_host()
        command = CommandRef(words=self._spec.words, folder=os.getcwd(), samples_per_step=None)
        own = self._script.trail.own or {}
        if not own.get("optimizer") or own["machine"]["ranks"] > 1:
            why = "several ranks cannot be tuned while they train" if own.get("optimizer") else "no optimizer was seen"
            self._report([f"Not tuned: {why}."])
            return
        probe = probe_of(command, self._script.trail, own, self._in_command, self._spec.workload)
        space = build_space(probe, host, SpaceRequest())
        found = self._tune(space, probe)
        elapsed_s, trail = self._clock.now() - began, self._script.trail
        lines = sentences(found, space.baseline, elapsed_s=elapsed_s, steps_lost=trail.steps_lost)
        ends = lines[0]
        if found.config != space.baseline:
            card, peak = _card(probe), trail.reserved_bytes
            made = profile_of(found, self._spec, space, probe, host, card, peak_bytes=peak, elapsed_s=elapsed_s)
            write(made, self._files.profile)
            ends = f"{ends}; {self._files.profile}"
        turns = self._turns([found.config], probe)
        turns.settle(0, ends)
        self._report(lines)

    def _tune(self, space: Space, probe: Probe) -> Found:
        own = space.baseline
        changes = list(self._changes(space, probe))
        nothing = Found(own, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), self._heats, self._left_out, 0.0)
        if not changes:
            return nothing
        first = self._race([own, *changes], probe, FIRST * self._spec.expect_s)
        if first is None:
            return nothing
        better = [e for e in first.entrants[1:] if e.ratio and e.ratio_ci95 and e.ratio > LEAST_GAIN]
        better.sort(key=lambda e: -(e.ratio or 0.0))
        finalists = self._together(space, [e.config for e in better])
        if not finalists:
            return nothing
        second = self._race([own, *finalists], probe, SECOND * self._spec.expect_s)
        if second is None:
            return nothing
        # Figures of the second race alone: those by which its entrants were chosen flatter them.
        sure = [
            e for e in second.entrants[1:] if e.ratio and e.ratio_ci95 and e.ratio > LEAST_GAIN and e.ratio_ci95[0] > 1
        ]
        best = max(sure, key=lambda e: e.ratio or 0.0, default=second.entrants[0])
        number = second.entrants.index(best)
        rows = {
            i: [None if t is None else t.samples / (t.seconds + (t.wait_s or 0.0)) for t in e.turns]
            for i, e in enumerate(second.entrants)
            if i in (0, number) and any(e.turns)
        }
        compared = stats.compare_rounds(rows, prior=PRIORS["cpu" if probe.device == "cpu" else "cuda"], robust=True)
        rate = compared.rate(0)
        waits = [(t.wait_s or 0.0, t.seconds) for t in best.turns if t is not None]
        return Found(
            best.config,
            (best.ratio or 1.0, *(best.ratio_ci95 or (1.0, 1.0))),
            compared.ratio(number, 0),
            (rate.per_s, rate.low_per_s, rate.high_per_s),
            self._heats,
            self._left_out,
            sum(w for w, _ in waits) / sum(w + s for w, s in waits),
        )

    def _changes(self, space: Space, probe: Probe) -> Iterator[dict[str, Value]]:
        """Yield the script's own with one other value of one knob that it can be switched to between two steps."""
        own = space.baseline
        affordable_s = LOSS * self._spec.expect_s
        for name, value in own.items():
            knob = KNOBS.get(name)
            if knob is None or not knob.switchable or name not in space.choices or name in space.between_launches:
                continue
            for other in space.legal(name):
                config = canonical({**own, name: other})
                if other == value or space.why_apart(own, config) is not None:
                    continue
                if probe.device != "cpu" and other == "foreach":
                    # Its lists of temporaries are as large as the model, and a step of an optimizer is not repeated.
                    self._left_out.append(f"{knob.phrase(other)}: it needs more memory")
                    continue
                mode = mode_of(config)
                if knob.changes_maths and name not in self._spec.allow:
                    self._left_out.append(f"{knob.phrase(other)}: it changes the maths (`--allow {name}`)")
                elif mode != "off" and mode != mode_of(own) and GUESS_S[mode] > affordable_s:
                    # For as long as that, nothing would train.
                    self._left_out.append(
                        f"{knob.phrase(other)}: it may take {GUESS_S[mode]:.0f} s, in which nothing trains "
                        f"(`--expect {GUESS_S[mode] / LOSS / 3600:.1f}h` or longer allows that)"
                    )
                else:
                    yield config

    def _together(self, space: Space, better: Sequence[Config]) -> list[dict[str, Value]]:
        """Return the best changes, the fastest first, each by itself and together with those before it."""
        own = space.baseline
        found: dict[str, dict[str, Value]] = {}
        together = dict(own)
        for config in better[:MOST]:
            found.setdefault(key(config), dict(config))
            changed = {n: v for n, v in config.items() if own.get(n) != v}
            if any(together.get(n) != own.get(n) for n in changed):
                # Another value of the same knob is faster.
                continue
            more = canonical({**together, **changed})
            if space.refusal(more) is None and space.why_apart(own, more) is None:
                together = more
                found.setdefault(key(more), more)
        return list(found.values())

    def _race(self, entrants: Sequence[Config], probe: Probe, max_s: float) -> Heat | None:
        plan = HeatPlan(entrants=tuple(dict(c) for c in entrants), turn_s=TURN_S, max_s=max_s)
        heat = Rounds(plan, _Logged(self._turns(plan.entrants, probe)), self._clock, self._order).run(self._clock.now())
        if heat is not None:
            self._heats.append(heat)
        return heat

    def _turns(self, entrants: Sequence[Config], probe: Probe) -> ScriptTurns:
        how = TurnPlan(TURN_S, cuda=probe.device != "cpu", limit=LIMIT)
        around = Watcher(None, self._clock)
        return ScriptTurns(
            self._script, entrants, self._in_command, how, self._commands, around, _no_phase, self._clock
        )

    def _report(self, lines: Sequence[str]) -> None:
        text = "\n".join([f"# {self._files.name}: tuned while it trained", "", *lines])
        write_atomic(self._files.folder / "report.md", text)


class _Logged:
    """Turns, each with a line in this process's log."""

    def __init__(self, turns: ScriptTurns) -> None:
        self._turns = turns
        self.prior = turns.prior

    @property
    def switch_s(self) -> float:
        return self._turns.switch_s

    def take(self, entrant: Contender) -> Turn | None:
        turn = self._turns.take(entrant)
        values = " ".join(f"{n}={spell(v)}" for n, v in entrant.config.items())
        said = entrant.cause or "no turn" if turn is None else f"{turn.steps} steps, {turn.seconds:.3f} s"
        sys.stdout.write(f"{time.monotonic():.3f} {entrant.number}: {said} ({values})\n")
        sys.stdout.flush()
        return turn

    def leave(self, entrant: Contender) -> None:
        self._turns.leave(entrant)


def _card(probe: Probe) -> Gpu | None:
    cards = gpus() if probe.device != "cpu" else []
    return next((c for c in cards if c.uuid == probe.device_uuid), None) if isinstance(cards, list) else None


def _no_phase(phase: Phase) -> None:
    """Nobody waits for phases here."""


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
