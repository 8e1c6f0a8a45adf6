"""The proof, in virtual time: real verification, scripted launches."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from autotune.layout import StudyFiles
from autotune.observer import Silent
from autotune.profile import read
from autotune.records import (
    Hold,
    LaunchKind,
    Limit,
    Outcome,
    StudySpec,
    TrainCheck,
    TrialSpec,
    TrialStatus,
)
from autotune.space import Space, build_space, key
from autotune.space.building import SpaceRequest
from autotune.study.history import read_trials
from autotune.testing import FakeClock, Play, ScriptedLauncher, make_host, make_measurement, make_probe, make_trial
from autotune.tuning import Environment, load_outcome, resume, search
from autotune.verify.ablation import variants_of
from autotune.verify.ceilings import verdict
from autotune.verify.entrant import Entrant, entrant, simplicity
from autotune.verify.race import Race

#: One loader knob, one knob of maths, everything else fixed.
FIXED = {
    "compile_mode": "off",
    "memory_format": "contiguous",
    "optimizer_impl": "for-loop",
    "batch_size": "32",
    "intra_op_threads": "4",
    "num_workers": "0",
}


class World:
    """Searches over two precisions, whose launches scatter by ``noise``."""

    def __init__(self, folder: Path, noise: float = 0.005, seed: int = 1) -> None:
        self.folder, self.clock, self.noise, self.random = folder, FakeClock(), noise, random.Random(seed)
        self.launchers: list[ScriptedLauncher] = []

    def rate(self, per_s: float) -> float:
        return per_s * math.exp(self.random.gauss(0, self.noise))

    def run(self, script: Callable[[TrialSpec], Play], **changes: object) -> Outcome:
        fields: dict[str, object] = {
            **{"name": "s", "mark": uuid4().hex, "created": "2026-01-01T00:00:00+00:00", "model": "resnet18"},
            **{"data": "synthetic", "fixed": FIXED, "narrowed": {"precision": ("fp32", "bf16")}, "budget_s": 600.0},
        }
        self.script = script
        search(StudySpec.model_validate({**fields, **changes}), self.folder, self.env())
        return self.outcome

    def env(self) -> Environment:
        def launcher(mark: str) -> ScriptedLauncher:
            self.launchers.append(ScriptedLauncher(self.script, self.clock, probe=make_probe()))
            return self.launchers[-1]

        return Environment(Silent(), self.clock, lambda: None, launcher)

    @property
    def files(self) -> StudyFiles:
        return StudyFiles(self.folder / "s")

    @property
    def outcome(self) -> Outcome:
        found = load_outcome(self.files)
        assert found is not None
        return found

    def launched(self, kind: LaunchKind) -> list[TrialSpec]:
        return [s for launcher in self.launchers for s in launcher.specs if s.kind is kind]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def faster_by(factor: float, world: World) -> Callable[[TrialSpec], Play]:
    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        return Play(rate_per_s=world.rate(100 * (factor if bf16 else 1)), wall_s=10.0)

    return script


def test_what_is_faster_wins_and_its_interval_holds_the_truth(world: World) -> None:
    outcome = world.run(faster_by(1.5, world))
    assert outcome.best.config["precision"] == "bf16"
    assert outcome.best.speedup_ci95[0] <= 1.5 <= outcome.best.speedup_ci95[1]
    low, high = outcome.best.speedup_ci95
    assert (high - low) / 2 <= 0.03 * outcome.best.speedup
    assert outcome.tie is None
    assert [s.trial for s in outcome.finalists] == [0, outcome.best.trial]
    assert all(s.verified for s in outcome.finalists)


def test_rounds_go_forth_and_back(world: World) -> None:
    world.noise = 0.03
    world.run(faster_by(1.5, world))
    order = [s.launch for s in world.launched(LaunchKind.MEASURE) if s.launch.startswith("verify")]
    assert order[:4] == ["verify-00000-1", "verify-00001-1", "verify-00001-2", "verify-00000-2"]


def test_a_tie_is_no_win(world: World) -> None:
    outcome = world.run(faster_by(1.002, world))
    assert key(outcome.best.config) == key(outcome.baseline.config)
    profile = read(world.files.profile)
    assert profile.configuration["precision"] == "fp32" and profile.gives.speedup == 1.0
    if outcome.tie is not None:
        assert "no proof" in outcome.tie


def test_among_equals_the_simpler_one_wins(world: World) -> None:
    def script(spec: TrialSpec) -> Play:
        fast = 1.5 if spec.config["precision"] == "bf16" else 1.0
        more_workers = 1.001 ** int(spec.config["num_workers"])
        return Play(rate_per_s=100 * fast * more_workers, wall_s=5.0)

    fixed = {n: v for n, v in FIXED.items() if n != "num_workers"}
    narrowed = {
        "precision": ("fp32", "bf16"),
        "num_workers": ("0", "4"),
        "prefetch_factor": ("2",),
        "persistent_workers": ("true",),
    }
    noisy = script
    world.noise = 0.01
    outcome = world.run(
        lambda s: Play(rate_per_s=world.rate(noisy(s).rate_per_s), wall_s=5.0), fixed=fixed, narrowed=narrowed
    )
    assert outcome.best.config["precision"] == "bf16"
    assert outcome.best.config["num_workers"] == 0


def test_a_false_winner_is_rare(tmp_path: Path) -> None:
    won = 0
    for seed in range(12):
        world = World(tmp_path / str(seed), noise=0.02, seed=seed)
        outcome = world.run(faster_by(0.97, world), budget_s=300.0)
        won += outcome.best.config["precision"] == "bf16"
    assert won <= 1


def test_two_rounds_on_a_noisy_machine_know_that_it_is(world: World) -> None:
    """What is assumed of a CPU would call 1.12× a win; the launches of the search say how much they differ here."""

    def of(number: int, *rates: float) -> Entrant:
        trial, *again = [make_measurement(r, relative_se=0.01) for r in rates]
        made = entrant(make_trial(number, {"batch_size": 32, "n": number}, measurement=trial))
        made.rounds += again
        return made

    noisy = [of(0, 115.0, 100.0, 88.0), of(1, 90.0, 111.0, 99.0)]
    final = SimpleNamespace(device="cpu")
    compared = Race(final, noisy).compared()  # type: ignore[arg-type]
    ratio, low, high = compared.ratio(noisy[1], noisy[0])
    assert ratio == pytest.approx(1.12, abs=0.01)
    assert compared.noise.learnt and compared.noise.sd > 0.1
    assert low < 1 < high


def test_fast_but_wrong_is_dropped_and_named(world: World) -> None:
    def script(spec: TrialSpec) -> Play:
        wrong = spec.config.get("precision") == "bf16"
        flat = TrainCheck(losses=(2.3,) * (spec.check.steps if spec.check else 1), finite=True, changed=0.0)
        return Play(rate_per_s=world.rate(200 if wrong else 100), wall_s=5.0, check=flat if wrong else None)

    outcome = world.run(script)
    assert key(outcome.best.config) == key(outcome.baseline.config)
    (trial,) = outcome.dropped
    assert outcome.dropped[trial].startswith("fast but wrong")
    (checked,) = outcome.checks
    assert checked.passed is False and checked.trials == (trial,) and checked.losses and checked.reference
    # What trains wrong is not worth proving.
    assert not [s for s in world.launched(LaunchKind.MEASURE) if s.launch.startswith(f"verify-{trial:05d}")]


def test_the_check_runs_at_the_users_batch_with_the_users_loader(world: World) -> None:
    fixed = {n: v for n, v in FIXED.items() if n != "batch_size"}
    world.run(faster_by(1.5, world), fixed=fixed, narrowed={"precision": ("fp32", "bf16"), "batch_size": ("32", "64")})
    specs = world.launched(LaunchKind.TRAIN_CHECK)
    assert {s.config["batch_size"] for s in specs} == {32} and {s.config["num_workers"] for s in specs} == {0}
    references = [s for s in specs if s.check is not None and s.check.reference]
    assert [s.check.seed for s in references if s.check] == [0, 1, 2]
    assert {s.config["precision"] for s in references} == {"fp32"}
    # Three references, and one check for all finalists in bf16.
    assert len(specs) == 4


def test_a_winner_without_headroom_is_dropped(world: World) -> None:
    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        tight = Hold(steps=50, seconds=5.0, settled=True, peak_bytes=95, capacity_bytes=100, alloc_retries=0)
        return Play(rate_per_s=world.rate(150 if bf16 else 100), wall_s=5.0, hold=tight if bf16 else None)

    outcome = world.run(script)
    assert key(outcome.best.config) == key(outcome.baseline.config)
    assert outcome.hold is not None and outcome.hold.passed is False
    assert "did not hold" in next(iter(outcome.dropped.values()))


def test_oom_while_holding_is_not_holding(world: World) -> None:
    def script(spec: TrialSpec) -> Play:
        if spec.kind is LaunchKind.HOLD:
            return Play(status=TrialStatus.OOM, cause="CUDA out of memory", wall_s=3.0)
        return faster_by(1.5, world)(spec)

    outcome = world.run(script)
    assert key(outcome.best.config) == key(outcome.baseline.config)
    assert outcome.hold is not None and "oom" in str(outcome.hold.reason)


def test_each_changed_knob_has_its_part(world: World) -> None:
    factors = {"bf16": 1.5, "channels_last": 1.25, "fused": 1.001}

    def script(spec: TrialSpec) -> Play:
        rate = 100.0
        for value in spec.config.values():
            rate *= factors.get(str(value), 1.0)
        return Play(rate_per_s=world.rate(rate), wall_s=4.0)

    narrowed = {
        "precision": ("fp32", "bf16"),
        "memory_format": ("contiguous", "channels_last"),
        "optimizer_impl": ("for-loop", "fused"),
    }
    fixed = {n: v for n, v in FIXED.items() if n not in narrowed}
    outcome = world.run(script, fixed=fixed, narrowed=narrowed)
    parts = {p.knob: p for p in outcome.ablation}
    assert parts["precision"].gain is not None and parts["memory_format"].gain is not None
    assert parts["precision"].gain[1] <= 1.5 <= parts["precision"].gain[2]
    assert parts["memory_format"].gain[1] <= 1.25 <= parts["memory_format"].gain[2]
    assert outcome.best.config["optimizer_impl"] == "for-loop"


def test_the_ablation_stays_within_its_part_of_the_budget(world: World) -> None:
    world.run(faster_by(1.5, world), budget_s=200.0, fixed={}, narrowed={"precision": ("fp32", "bf16")})
    rows = {r.purpose: r for r in world.outcome.ledger}
    if "ablation" in rows:
        assert rows["ablation"].seconds <= 0.15 * 200 + 1e-6
    assert world.outcome.elapsed_s <= 220


def test_the_ledger_adds_up(world: World) -> None:
    outcome = world.run(faster_by(1.5, world))
    assert math.isclose(sum(r.seconds for r in outcome.ledger), outcome.elapsed_s, abs_tol=0.5)
    for row in outcome.ledger:
        parts = row.start_s + row.compile_s + row.warmup_s + row.kept_s + row.rest_s
        assert parts >= row.seconds - 1e-6
    assert {"probing", "searching", "checking that it trains", "verifying", "holding", "ceilings"} <= {
        r.purpose for r in outcome.ledger
    }


def test_killed_in_the_proof_nothing_is_launched_twice(world: World) -> None:
    world.run(faster_by(1.5, world))
    before = world.outcome
    world.files.outcome.unlink()
    resume(world.files, world.env())
    kinds = {s.kind for s in world.launchers[-1].specs}
    assert kinds <= {LaunchKind.PROBE}
    assert world.outcome.best == before.best and world.outcome.ablation == before.ablation
    assert len(read_trials(world.files)) == sum(before.trials.values())


@pytest.mark.parametrize(
    ("rate", "device", "loader", "workers", "limit"),
    [
        (100, 105, 400, 4, Limit.DEVICE),
        (100, 400, 105, 4, Limit.LOADER),
        (100, 104, 107, 4, Limit.BALANCED),
        (50, 100, 100, 0, Limit.BALANCED),
        (80, 400, 100, 0, Limit.LOADER),
    ],
)
def test_the_lower_ceiling_is_the_limit(rate: float, device: float, loader: float, workers: int, limit: Limit) -> None:
    found, sentence = verdict(
        {"num_workers": workers}, rate, 0.3, make_measurement(device, enqueue_s=None), make_measurement(loader)
    )
    assert found is limit
    assert sentence.startswith(limit) and f"{device:.4g}" in sentence and f"{loader:.4g}" in sentence


def test_a_device_that_waits_for_the_host_is_launch_bound() -> None:
    device = make_measurement(105, batch_size=32, enqueue_s=0.95 * 32 / 105)
    assert verdict({"num_workers": 2}, 100, 0.0, device, make_measurement(400))[0] is Limit.LAUNCH


def test_without_ceilings_the_wait_decides() -> None:
    assert verdict({}, 100, 0.8, None, None)[0] is Limit.LOADER
    assert verdict({}, 100, 0.02, None, make_measurement(100))[0] is Limit.DEVICE


def space_of(**request: object) -> Space:
    return build_space(make_probe(), make_host(), SpaceRequest(**request))  # type: ignore[arg-type]


def test_a_loader_knob_goes_back_with_its_workers() -> None:
    space = space_of()
    winner = {**space.baseline, "num_workers": 4, "prefetch_factor": 4, "persistent_workers": True}
    (one,) = variants_of(space, entrant(make_trial(1, winner)))
    assert one.knob == "num_workers" and one.entrant.config == dict(space.baseline)
    assert set(one.with_it) == {"prefetch_factor", "persistent_workers"}


def test_each_knob_of_a_loader_goes_back_alone_where_the_baseline_has_workers() -> None:
    space = space_of(baseline={"num_workers": 2})
    winner = {**space.baseline, "num_workers": 4, "prefetch_factor": 4}
    variants = {v.knob: v.entrant.config for v in variants_of(space, entrant(make_trial(1, winner)))}
    assert set(variants) == {"num_workers", "prefetch_factor"}
    assert variants["num_workers"]["prefetch_factor"] == 4 and variants["num_workers"]["num_workers"] == 2


def test_the_simpler_sorts_first() -> None:
    baseline = {"batch_size": 32, "compile_mode": "off", "num_workers": 4}
    eager = {**baseline, "batch_size": 64}
    compiled = {**baseline, "compile_mode": "default", "num_workers": 0}
    lean, hungry = simplicity(eager, baseline, 10), simplicity(eager, baseline, 20)
    assert simplicity(baseline, baseline, 99) < lean < hungry < simplicity(compiled, baseline, 1)
