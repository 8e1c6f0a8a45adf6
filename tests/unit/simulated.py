"""Whole searches in virtual time on machines that are not nice: noise, drift, and others who come and go."""

import io
import math
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from autotune.base.errors import InfeasibleError, MachineError, NoVerdictError
from autotune.base.records import (
    Config,
    Finding,
    LaunchKind,
    Outcome,
    StudyHeat,
    TrainCheck,
    Trial,
    TrialSpec,
    TrialStatus,
    Value,
)
from autotune.profile import Profile, read
from autotune.report import best_table, read_material, report_on, to_markdown
from autotune.report.panel import PlainLines
from autotune.search import Environment, search, setup
from autotune.space import key
from autotune.study.tables import read_heats, read_trials
from tests.support import Play, ScriptedLauncher, make_host, make_probe

from .world import World

HOST = make_host(cores=2)
#: Standard deviations of one launch. The largest are what shared virtual cores have shown.
NOISES = (0.003, 0.02, 0.05, 0.1)
#: A speedup as it is printed.
TIMES = re.compile(r"\d[\d,.]*×")


@dataclass
class Machine:
    """A made-up training on a made-up machine, drawn from a seed.

    Attributes:
        effects: true effect of each value on the logarithm of the rate; 0 for a value that is not listed.
        busy: periods of virtual seconds in which others use the machine, and launches find no quiet window.
        drift: the rate rises and falls by this fraction within `drift_s`.
        wrong: values with which the loss diverges.
    """

    seed: int
    effects: dict[tuple[str, Value], float] = field(default_factory=dict)
    busy: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.noise = rng.choice(NOISES)
        self.drift, self.drift_s = rng.choice((0.0, 0.05, 0.15)), rng.uniform(100, 1500)
        self.launch_s = rng.choice((4.0, 10.0, 25.0))
        self.effects = {
            ("precision", "bf16"): rng.choice((-0.3, 0.0, 0.02, 0.4)),
            ("memory_format", "channels_last"): rng.choice((-0.1, 0.0, 0.15)),
            ("compile_mode", "default"): rng.choice((-1.0, 0.0, 0.2)),
            ("optimizer_impl", "foreach"): rng.choice((0.0, 0.01)),
            ("optimizer_impl", "fused"): rng.choice((0.0, 0.03)),
            ("batch_size", 64): rng.choice((-0.05, 0.0, 0.1)),
            ("batch_size", 128): rng.choice((-0.1, 0.0, 0.15)),
            ("num_workers", 2): rng.choice((-0.2, 0.0, 0.3)),
            ("num_workers", 4): rng.choice((-0.2, 0.0, 0.4)),
            ("num_workers", 8): rng.choice((-0.4, 0.0, 0.5)),
            ("workload.kernel", "b"): rng.choice((-0.1, 0.0, 0.2)),
        }
        self.wrong = rng.choice((None, None, ("precision", "bf16"), ("workload.kernel", "b")))
        at = 0.0
        while rng.random() < 0.6 and at < 2000:
            at += rng.expovariate(1 / 200)
            length = rng.expovariate(1 / rng.choice((20, 300)))
            self.busy.append((at, at + length))
            at += length

    def true_rate(self, config: Config) -> float:
        """Return the rate without noise, in samples per second."""
        return 40 * math.exp(sum(self.effects.get((name, value), 0.0) for name, value in config.items()))

    def play(self, spec: TrialSpec, now: float) -> Play:
        """Return what a launch that begins at virtual second ``now`` does."""
        compiled = spec.config["compile_mode"] != "off"
        wall_s = self.launch_s * (3 if compiled and spec.launch.isdigit() else 1)
        if any(begin <= now + part * wall_s <= end for begin, end in self.busy for part in (0.3, 0.6, 0.9)):
            cause = "others used 1.4 cores; no undisturbed window in 9 s"
            return Play(status=TrialStatus.INTERRUPTED, transient=True, cause=cause, wall_s=wall_s)
        if spec.kind is LaunchKind.TRAIN_CHECK and self.wrong is not None and self.wrong in spec.config.items():
            return Play(check=TrainCheck(losses=(2.3, 2.4), finite=False, changed=1.0), wall_s=wall_s)
        drifted = 1 + self.drift * math.sin(2 * math.pi * now / self.drift_s)
        rate = self.true_rate(spec.config) * drifted * math.exp(self.rng.gauss(0, self.noise))
        if spec.kind in (LaunchKind.DEVICE_ONLY, LaunchKind.LOADER_ONLY):
            rate *= 1.5
        return Play(rate_per_s=rate, wall_s=wall_s)


@dataclass(frozen=True)
class Searched:
    """A simulated search and all it said.

    Attributes:
        error: the message of the error it ended with, if it did.
        pinned: knobs that the user fixed.
        log: the plain lines of its progress. table: what it printed at its end. report: in Markdown.
    """

    machine: Machine
    world: World
    log: str
    pinned: tuple[str, ...]
    error: str | None = None
    outcome: Outcome | None = None
    profile: Profile | None = None
    trials: tuple[Trial, ...] = ()
    table: str = ""
    report: str = ""


def simulate(seed: int, folder: Path) -> Searched:
    """Draw a machine and a request, and search."""
    machine, world = Machine(seed), World(folder)
    rng = random.Random(f"request {seed}")
    lines = io.StringIO()
    probe = make_probe(
        workload_knobs={"kernel": ("a", "b")}, workload_maths=rng.choice(({}, {"kernel": False}, {"kernel": True}))
    )

    def launcher(mark: str, *_: object) -> ScriptedLauncher:
        made = ScriptedLauncher(lambda spec: machine.play(spec, world.clock.now()), world.clock, probe=probe)
        world.launchers.append(made)
        return made

    env = Environment(PlainLines(lines), world.clock, lambda: None, launcher, lambda *_: None)
    changes: dict[str, Any] = {
        "budget_s": rng.choice((30.0, 120.0, 300.0, 600.0, 900.0)),
        "trials": rng.choice((None, None, None, 2, 4, 8)),
        "seed": seed,
        "sampler": rng.choice(("auto", "auto", "auto", "random")),
    }
    if rng.random() < 0.3:
        changes["keep_batch_size"] = True
    if rng.random() < 0.3:
        changes["fixed"] = dict([rng.choice((("num_workers", "4"), ("precision", "bf16"), ("compile_mode", "off")))])
    if rng.random() < 0.3:
        changes["baseline"] = dict([rng.choice((("num_workers", "2"), ("memory_format", "channels_last")))])
    pinned = tuple(dict(changes.get("fixed", {})))
    try:
        # One seed, one search, on any machine.
        with patch.object(setup, "read_host", lambda: HOST):
            found = search(world.spec(**changes), folder, env)
    except (MachineError, InfeasibleError, NoVerdictError) as error:
        return Searched(
            machine, world, lines.getvalue(), pinned, error=str(error), trials=tuple(read_trials(world.files))
        )
    trials = tuple(read_trials(world.files))
    console = Console(file=io.StringIO(), width=200)
    console.print(best_table(found.outcome, trials))
    assert isinstance(console.file, io.StringIO)
    return Searched(
        machine,
        world,
        lines.getvalue(),
        pinned,
        outcome=found.outcome,
        profile=read(world.files.profile) if world.files.profile.exists() else None,
        trials=trials,
        table=console.file.getvalue(),
        report=_markdown(world),
    )


def _markdown(world: World) -> str:
    return to_markdown(report_on(read_material(world.files, world.outcome, typed="s", folder=world.folder)))


def contradictions(found: Searched) -> Iterator[str]:
    """Yield what is wrong with what a search said, one sentence each."""
    outcome = found.outcome
    said = (found.log, found.table, found.report)
    if outcome is None:
        assert found.error is not None
        if found.world.files.profile.exists():
            yield "a search that ended with an error left a profile"
        allowed = _heat_ratios(read_heats(found.world.files))
        yield from (f"a ratio without a race: {token}" for token in TIMES.findall(found.log) if token not in allowed)
        return
    yield from _unproven(outcome, found)
    yield from _useless(outcome, found.pinned)
    allowed = _ratios(outcome) | _heat_ratios(read_heats(found.world.files))
    # By what the learning rate follows the batch is no measurement.
    batches = int(outcome.best.config["batch_size"]) / int(outcome.baseline.config["batch_size"])
    allowed |= {f"{batches:.3g}×", f"{math.sqrt(batches):.3g}×"}
    for text in said:
        yield from (f"a ratio that nobody measured: {token}" for token in TIMES.findall(text) if token not in allowed)
    if found.profile is not None:
        yield from _disagreements(outcome, found.profile, found)


def _unproven(outcome: Outcome, found: Searched) -> Iterator[str]:
    own = key(outcome.baseline.config)
    for name, standing in (("best", outcome.best), ("own", outcome.best_same_batch)):
        if key(standing.config) == own:
            continue
        shared = _rounds(found, key(standing.config)) & _rounds(found, own)
        proven = standing.verified and len(shared) >= 2
        if outcome.finding is not Finding.LIKELY and not proven:
            yield f"{name} won without a proof: {len(shared)} rounds with the baseline"
        if standing.speedup_ci95[0] <= 1:
            yield f"{name} won with an interval from {standing.speedup_ci95[0]:.3f}"
    if outcome.finding is Finding.LIKELY:
        said = found.profile.gives.unproven if found.profile is not None else None
        labelled = all(
            "ikely" in text and "not proven" in text.lower() for text in (found.table, found.report, str(said))
        )
        if not labelled:
            yield "what is likely is not labelled"
    if (outcome.finding is Finding.OPEN) != (found.profile is None) or (outcome.profile is None) != (
        found.profile is None
    ):
        yield f"finding {outcome.finding} and profile {outcome.profile}"
    others = {
        key(t.config)
        for t in found.trials
        if t.result.status not in (TrialStatus.INTERRUPTED, TrialStatus.TIMEOUT) and key(t.config) != own
    }
    heats = read_heats(found.world.files)
    others |= {key(e.config) for h in heats for e in h.heat.entrants if e.ratio is not None} - {own}
    if outcome.finding is Finding.KEEP and len(others) < 5 and "tried" not in outcome.stopped:
        yield f"a verdict from {len(others)} comparisons"
    if outcome.finding is Finding.KEEP:
        reach = [s for s in outcome.finalists if s.speedup_ci95[1] > 1.05 and s.trial not in outcome.dropped]
        yield from (f"kept, and trial {s.trial} may run at {s.speedup_ci95[1]:.2f}" for s in reach)
    if outcome.finding is Finding.OPEN and "No verdict" not in found.table:
        yield "the table gives a verdict where there is none"


def _rounds(found: Searched, config: str) -> set[tuple[str, str]]:
    """Return the rounds in which a configuration was launched, each as what it was for and its number."""
    names = [s.launch.split("-") for world in found.world.launchers for s in world.specs if key(s.config) == config]
    return {(name[0], name[-1]) for name in names if len(name) > 2}


def _useless(outcome: Outcome, pinned: Collection[str]) -> Iterator[str]:
    if any(outcome.best.config.get(part.knob) != part.value for part in outcome.ablation):
        # Some were set back, and what the others give without these is not known.
        return
    for part in outcome.ablation:
        held = outcome.best.config.get(part.knob) == part.value and part.knob not in pinned
        # One launch without it shows nothing; there was no time, or no quiet, for another.
        if held and part.gain is not None and part.gain[2] < 1 and part.launches > 1:
            yield f"the winner holds {part.knob}={part.value}, which gave {part.gain}"


def _ratios(outcome: Outcome) -> set[str]:
    """Return every ratio between launches made in turns, as it may be printed."""
    ratios: list[tuple[float, ...]] = [(s.speedup, *s.speedup_ci95) for s in outcome.finalists]
    ratios += [p.gain for p in outcome.ablation if p.gain is not None]
    found = {f"{ratio[0]:,.{digits}f}×" for ratio in ratios for digits in (0, 1, 2, 3)} | {"1.00×"}
    for sentence in (outcome.tie, outcome.because):
        found.update(TIMES.findall(sentence or ""))
    # "The same number of epochs makes 2× fewer updates" is arithmetic on batch sizes.
    mine, theirs = (int(s.config["batch_size"]) for s in (outcome.best, outcome.baseline))
    return found | {f"{max(mine, theirs) / min(mine, theirs):.3g}×"}


def _heat_ratios(heats: Sequence[StudyHeat]) -> set[str]:
    ratios = [e.ratio for heat in heats for e in heat.heat.entrants if e.ratio is not None]
    return {f"{ratio:,.{digits}f}×" for ratio in ratios for digits in (0, 1, 2, 3)} | {"1.00×"}


def _disagreements(outcome: Outcome, profile: Profile, found: Searched) -> Iterator[str]:
    pairs = (
        ("rate", profile.gives.samples_per_second, outcome.best.samples_per_second),
        ("speedup", profile.gives.speedup, outcome.best.speedup),
        ("low", profile.gives.speedup_ci95[0], outcome.best.speedup_ci95[0]),
        ("baseline", profile.baseline.samples_per_second, outcome.baseline.samples_per_second),
    )
    for name, mine, theirs in pairs:
        if not math.isclose(mine, theirs, rel_tol=1e-3):
            yield f"{name}: the profile has {mine}, the outcome {theirs}"
    if key(profile.configuration) != key(outcome.best.config):
        yield "the profile has another configuration than the winner"
    launched = [s for launcher in found.world.launchers for s in launcher.specs if s.kind is LaunchKind.MEASURE]
    # If nothing else came near it, the baseline was not launched again.
    times = 2 if outcome.finding is Finding.FASTER else 1
    if sum(key(s.config) == key(profile.configuration) for s in launched) < times:
        yield "the profile's configuration was not itself measured"
    rates = [f"{outcome.baseline.samples_per_second:,.{d}f}" for d in (0, 1, 2, 3)]
    for name, text in (("table", found.table), ("report", found.report)):
        if not any(rate in text for rate in rates):
            yield f"the {name} lacks the baseline's rate"
