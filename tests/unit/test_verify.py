"""The proof in virtual time: real verification, scripted launches."""

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.base.records import (
    CommandRef,
    Finding,
    Hold,
    LaunchKind,
    Outcome,
    Phase,
    TrainCheck,
    TrialSpec,
    TrialStatus,
)
from autotune.profile import read
from autotune.report.sentences import trains_line
from autotune.search import resume, search
from autotune.space import key
from autotune.study.loop import StudyLoop
from autotune.study.tables import read_trials
from tests.support import Play, make_measurement

from .world import FIXED, World, plain


class NoisyWorld(World):
    """Searches over two precisions, with launches that vary by ``noise``."""

    def __init__(self, folder: Path, noise: float = 0.005, seed: int = 1) -> None:
        super().__init__(folder)
        self.noise, self.random = noise, random.Random(seed)
        self.raise_at: dict[int, BaseException] = {}

    def rate(self, per_s: float) -> float:
        return per_s * math.exp(self.random.gauss(0, self.noise))

    def run(self, script: Callable[[TrialSpec], Play], **changes: object) -> Outcome:
        fields: dict[str, object] = {"fixed": FIXED, "narrowed": {"precision": ("fp32", "bf16")}}
        search(self.spec(**{**fields, **changes}), self.folder, self.env(script, self.raise_at))
        return self.outcome

    def launched(self, kind: LaunchKind) -> list[TrialSpec]:
        return [s for launcher in self.launchers for s in launcher.specs if s.kind is kind]


@pytest.fixture
def world(tmp_path: Path) -> NoisyWorld:
    return NoisyWorld(tmp_path)


#: Precision and workers can be chosen.
WITH_WORKERS = {
    "precision": ("fp32", "bf16"),
    "num_workers": ("0", "4"),
    "prefetch_factor": ("2",),
    "persistent_workers": ("true",),
}


def faster_by(factor: float, world: NoisyWorld, wall_s: float = 10.0) -> Callable[[TrialSpec], Play]:
    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        return Play(rate_per_s=world.rate(100 * (factor if bf16 else 1)), wall_s=wall_s)

    return script


def by_factors(
    world: NoisyWorld, wall_s: float = 4.0, waits: float = 0.1, **factors: float
) -> Callable[[TrialSpec], Play]:
    """Script launches in which each named value multiplies the rate by its factor.

    Those that wait much for their loader have the gains of their knobs measured by launches, not in a heat.
    """

    def script(spec: TrialSpec) -> Play:
        rate = 100.0
        for value in spec.config.values():
            rate *= factors.get(str(value), 1.0)
        rate = world.rate(rate)
        batch = int(spec.config["batch_size"])
        measurement = make_measurement(rate, batch_size=batch, loader_wait_fraction=waits)
        return Play(rate_per_s=rate, wall_s=wall_s, measurement=measurement)

    return script


def test_a_faster_configuration_wins_and_its_interval_contains_the_truth(world: NoisyWorld) -> None:
    outcome = world.run(faster_by(1.5, world))
    assert outcome.best.config["precision"] == "bf16"
    assert outcome.best.speedup_ci95[0] <= 1.5 <= outcome.best.speedup_ci95[1]
    low, high = outcome.best.speedup_ci95
    assert (high - low) / 2 <= 0.03 * outcome.best.speedup
    assert outcome.tie is None
    assert [s.trial for s in outcome.finalists] == [0, outcome.best.trial]
    assert all(s.verified for s in outcome.finalists)


def test_rounds_alternate_their_order(world: NoisyWorld) -> None:
    world.noise = 0.03
    world.run(faster_by(1.5, world))
    order = [s.launch for s in world.launched(LaunchKind.MEASURE) if s.launch.startswith("verify")]
    assert order[:4] == ["verify-00000-1", "verify-00001-1", "verify-00001-2", "verify-00000-2"]


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [120, 130])
def test_a_second_round_of_fewer_takes_the_place_of_none(world: NoisyWorld, budget_s: float) -> None:
    """Launches of the race take longer than the trials did, so that a second round of all does not fit."""

    def slower_again(spec: TrialSpec) -> Play:
        again = spec.launch.startswith("verify")
        return Play(rate_per_s=world.rate(plain(spec).rate_per_s), wall_s=14.0 if again else 6.0)

    outcome = world.run(slower_again, fixed={"compile_mode": "off"}, narrowed={}, budget_s=budget_s)
    rounds = [s.launch for s in world.launched(LaunchKind.MEASURE) if s.launch.startswith("verify")]
    first, second = ([name for name in rounds if name.endswith(f"-{n}")] for n in (1, 2))
    assert len(second) < len(first) and second[-1] == "verify-00000-2"
    assert outcome.best.speedup > 1.5 and outcome.best.launches == 2


@pytest.mark.slow
def test_what_nothing_else_needs_makes_the_winners_figure_surer(world: NoisyWorld) -> None:
    world.noise = 0.06
    outcome = world.run(faster_by(1.5, world, wall_s=4.0), budget_s=120)
    more = [s.launch for s in world.launched(LaunchKind.MEASURE) if s.launch.startswith("narrow")]
    assert more and len(more) % 2 == 0 and outcome.best.launches > len(more) // 2
    low, high = outcome.best.speedup_ci95
    # Until it is known well enough, or no time is left for another round and the ceilings.
    assert (high - low) / 2 < 0.03 * outcome.best.speedup or outcome.elapsed_s > 0.8 * 120


def test_a_winner_that_fails_in_its_last_rounds_is_none(world: NoisyWorld) -> None:
    world.noise = 0.06
    healthy = faster_by(1.5, world, wall_s=4.0)

    def script(spec: TrialSpec) -> Play:
        return Play(status=TrialStatus.OOM) if spec.launch.startswith("narrow-00001") else healthy(spec)

    outcome = world.run(script, budget_s=120)
    assert any(s.launch.startswith("narrow-00001") for s in world.launched(LaunchKind.MEASURE))
    assert key(outcome.best.config) == key(outcome.baseline.config) and outcome.best.speedup == 1.0


def test_a_tie_is_not_a_win(world: NoisyWorld) -> None:
    world.noise, world.random = 0.02, random.Random(2)
    outcome = world.run(faster_by(1.01, world))
    assert key(outcome.best.config) == key(outcome.baseline.config)
    profile = read(world.files.profile)
    assert profile.configuration["precision"] == "fp32" and profile.gives.speedup == 1.0
    # The candidate was slightly ahead, and the report says why that is not enough.
    assert outcome.tie is not None and "no proof of being faster" in outcome.tie


def test_among_equals_the_simplest_wins(world: NoisyWorld) -> None:
    def script(spec: TrialSpec) -> Play:
        fast = 1.5 if spec.config["precision"] == "bf16" else 1.0
        more_workers = 1.001 ** int(spec.config["num_workers"])
        return Play(rate_per_s=100 * fast * more_workers, wall_s=5.0)

    fixed = {n: v for n, v in FIXED.items() if n != "num_workers"}
    noisy = script
    world.noise = 0.01
    outcome = world.run(
        lambda s: Play(rate_per_s=world.rate(noisy(s).rate_per_s), wall_s=5.0), fixed=fixed, narrowed=WITH_WORKERS
    )
    assert outcome.best.config["precision"] == "bf16"
    assert outcome.best.config["num_workers"] == 0


@pytest.mark.slow
def test_a_slower_configuration_does_not_win_by_being_simpler(tmp_path: Path) -> None:
    fixed = {n: v for n, v in FIXED.items() if n != "num_workers"} | {"batch_memory": "fresh"}
    unsettled = 0
    for seed in range(6):
        world = NoisyWorld(tmp_path / str(seed), noise=0.06, seed=seed)
        factors = {"bf16": 1.8, "4": 1.12}
        # Few rounds on a noisy machine: two finalists, and it is undecided which is faster.
        outcome = world.run(
            by_factors(world, wall_s=8.0, **factors), fixed=fixed, narrowed=WITH_WORKERS, budget_s=200.0
        )
        proven = [s for s in outcome.finalists if s.verified and s.speedup_ci95[0] > 1]
        assert outcome.best.trial in [s.trial for s in proven]
        fastest = max(proven, key=lambda s: s.samples_per_second)
        assert outcome.best.samples_per_second > 0.96 * fastest.samples_per_second
        unsettled += len(proven) > 1
    assert unsettled


@pytest.mark.stress
def test_a_shown_win_is_not_traded_for_a_simpler_configuration(tmp_path: Path) -> None:
    """The faster of two is just shown to be faster than the baseline; the simpler one is not."""
    fixed = {n: v for n, v in FIXED.items() if n != "num_workers"}
    contested = 0
    for seed in range(12):
        world = NoisyWorld(tmp_path / str(seed), noise=0.012, seed=seed)
        factors = {"bf16": 1.015, "4": 1.03}
        outcome = world.run(
            by_factors(world, wall_s=4.0, **factors), fixed=fixed, narrowed=WITH_WORKERS, budget_s=240.0
        )
        shown = [s for s in outcome.finalists if s.speedup_ci95[0] > 1]
        won = key(outcome.best.config) != key(outcome.baseline.config)
        # A winner is shown to be faster. If there is none although one alone seems to be faster, the tie explains it.
        assert not won or outcome.best.speedup_ci95[0] > 1
        assert won or not shown or "may seem so by luck" in str(outcome.tie)
        contested += won and len(shown) < len(outcome.finalists) - 1
    assert contested


@pytest.mark.slow
def test_a_false_winner_is_rare(tmp_path: Path) -> None:
    won = 0
    for seed in range(12):
        world = NoisyWorld(tmp_path / str(seed), noise=0.02, seed=seed)
        outcome = world.run(faster_by(0.97, world), budget_s=300.0)
        won += outcome.best.config["precision"] == "bf16"
    assert won <= 1


def test_fast_but_wrong_is_dropped_and_named(world: NoisyWorld) -> None:
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
    # A configuration that trains wrong does not race.
    assert not [s for s in world.launched(LaunchKind.MEASURE) if s.launch.startswith(f"verify-{trial:05d}")]


def test_the_check_runs_at_the_users_batch_with_the_users_loader(world: NoisyWorld) -> None:
    fixed = {n: v for n, v in FIXED.items() if n != "batch_size"}
    world.run(faster_by(1.5, world), fixed=fixed, narrowed={"precision": ("fp32", "bf16"), "batch_size": ("32", "64")})
    specs = world.launched(LaunchKind.TRAIN_CHECK)
    assert {s.config["batch_size"] for s in specs} == {32} and {s.config["num_workers"] for s in specs} == {0}
    references = [s for s in specs if s.check is not None and s.check.reference]
    assert [s.check.seed for s in references if s.check] == [0], "whoever passes beside one run passes beside three"
    assert {s.config["precision"] for s in references} == {"fp32"}
    # One reference, and one check shared by all finalists in bf16.
    assert len(specs) == 2


def off_by_8_percent(world: NoisyWorld) -> Callable[[TrialSpec], Play]:
    """bf16 lies 8 % off the first run of fp32: more than rounding does, less than the other seeds."""

    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        seed, steps = (spec.check.seed, spec.check.steps) if spec.check else (0, 1)
        off = 1.08 if bf16 else 1 + 0.1 * seed
        losses = tuple(off * (2.3 - 1.5 * step / steps) for step in range(steps))
        return Play(
            rate_per_s=world.rate(150 if bf16 else 100),
            wall_s=5.0,
            check=TrainCheck(losses=losses, finite=True, changed=1.0),
        )

    return script


def test_who_does_not_pass_beside_one_reference_is_judged_by_three(world: NoisyWorld) -> None:
    outcome = world.run(off_by_8_percent(world))
    specs = world.launched(LaunchKind.TRAIN_CHECK)
    assert [s.check.seed for s in specs if s.check is not None and s.check.reference] == [0, 1, 2]
    assert not outcome.dropped and outcome.best.config["precision"] == "bf16"
    (checked,) = outcome.checks
    assert checked.passed and checked.distance is not None and 0.05 * 1.55 < checked.distance < checked.tolerance


def test_without_time_for_the_others_it_is_not_known_how_it_trains(world: NoisyWorld) -> None:
    outcome = world.run(off_by_8_percent(world), budget_s=80.0)
    assert len(world.launched(LaunchKind.TRAIN_CHECK)) == 2
    (checked,) = outcome.checks
    assert checked.passed is None
    assert checked.reason == "it differs from one run of eager fp32, and there was no time for others beside it"
    assert outcome.finding is Finding.OPEN and outcome.profile is None
    assert outcome.because == f"trial {checked.trials[0]} may be faster, and is out: {checked.reason}"
    resume(world.files, world.env(off_by_8_percent(world)), lambda before_s: 300.0)
    assert world.outcome.checks[0].passed and world.outcome.finding is Finding.FASTER


def test_a_winner_without_headroom_is_dropped(world: NoisyWorld) -> None:
    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        tight = Hold(steps=50, seconds=5.0, settled=True, peak_bytes=95, capacity_bytes=100, alloc_retries=0)
        return Play(rate_per_s=world.rate(150 if bf16 else 100), wall_s=5.0, hold=tight if bf16 else None)

    outcome = world.run(script)
    assert key(outcome.best.config) == key(outcome.baseline.config)
    assert outcome.hold is not None and outcome.hold.passed is False
    assert "did not hold" in next(iter(outcome.dropped.values()))


def test_oom_while_holding_is_a_failure(world: NoisyWorld) -> None:
    def script(spec: TrialSpec) -> Play:
        if spec.kind is LaunchKind.HOLD:
            return Play(status=TrialStatus.OOM, cause="CUDA out of memory", wall_s=3.0)
        return faster_by(1.5, world)(spec)

    outcome = world.run(script)
    assert key(outcome.best.config) == key(outcome.baseline.config)
    assert outcome.hold is not None and "oom" in str(outcome.hold.reason)


@pytest.mark.parametrize("kind", [LaunchKind.TRAIN_CHECK, LaunchKind.HOLD])
@pytest.mark.parametrize(
    ("status", "passed"), [(TrialStatus.CRASHED, False), (TrialStatus.KILLED, None)], ids=["crashed", "killed"]
)
def test_a_crash_is_an_answer_and_a_kill_is_not(
    world: NoisyWorld, kind: LaunchKind, status: TrialStatus, passed: bool | None
) -> None:
    def script(spec: TrialSpec) -> Play:
        if spec.kind is kind and spec.config.get("precision") == "bf16":
            return Play(status=status, wall_s=3.0)
        return faster_by(1.5, world)(spec)

    outcome = world.run(script)
    found = outcome.checks[0] if kind is LaunchKind.TRAIN_CHECK else outcome.hold
    assert found is not None and found.passed is passed
    assert status.value in str(found.reason)
    won = key(outcome.best.config) != key(outcome.baseline.config)
    assert won == (passed is None)
    asked = [s for s in world.launched(kind) if s.config.get("precision") == "bf16"]
    assert len(asked) == 3 and len({s.launch for s in asked}) == 1


@pytest.mark.parametrize("kind", [LaunchKind.TRAIN_CHECK, LaunchKind.HOLD])
def test_what_failed_in_the_proof_is_not_forgotten_where_there_is_no_time_to_see_it_again(
    world: NoisyWorld, kind: LaunchKind
) -> None:
    def script(spec: TrialSpec) -> Play:
        if spec.kind is kind and spec.config.get("precision") == "bf16":
            return Play(status=TrialStatus.OOM, cause="CUDA out of memory", wall_s=3.0)
        return faster_by(1.5, world)(spec)

    before = world.run(script)
    asked = len(world.launched(kind))
    # It was killed before it wrote what it had found, when its budget was nearly over.
    world.files.outcome.unlink()
    world.files.spent.write_text(f'{{"spent_s": {world.spec().budget_s - 1}}}')
    resume(world.files, world.env(script))
    after = world.outcome
    assert before.finding is after.finding is Finding.OPEN or before.finding is after.finding is Finding.KEEP
    assert after.best.config == after.baseline.config and after.dropped == before.dropped != {}
    assert len(world.launched(kind)) == asked


def test_where_the_winner_fails_at_last_another_that_is_proven_wins(world: NoisyWorld) -> None:
    """Two are far ahead of the baseline, and the one that won runs out of memory once the race is over."""
    world.noise = 0.03

    def script(spec: TrialSpec) -> Play:
        held = [s.config for s in world.launched(LaunchKind.HOLD)]
        if held and spec.kind is LaunchKind.MEASURE and spec.config == held[0]:
            return Play(status=TrialStatus.OOM, cause="CUDA out of memory", wall_s=3.0)
        return by_factors(world, bf16=1.5, **{"4": 1.2})(spec)

    fixed = {name: value for name, value in FIXED.items() if name != "num_workers"}
    outcome = world.run(script, fixed=fixed, narrowed=WITH_WORKERS, budget_s=1000.0)
    (failed,) = outcome.dropped
    assert "oom" in outcome.dropped[failed]
    assert outcome.finding is Finding.FASTER and outcome.best.config["precision"] == "bf16"
    assert outcome.best.trial != failed and outcome.best_same_batch.trial == outcome.best.trial
    assert outcome.hold is not None and outcome.hold.trial == outcome.best.trial


BOTH_WAYS = "turns within one process and launches at different times"


def test_without_a_baseline_launched_again_nothing_is_proven(world: NoisyWorld) -> None:
    def script(spec: TrialSpec) -> Play:
        if spec.launch.startswith("verify-00000"):
            return Play(status=TrialStatus.KILLED, cause="killed by somebody", wall_s=3.0)
        return by_factors(world, bf16=1.5, channels_last=0.985)(spec)

    narrowed = {"precision": ("fp32", "bf16"), "memory_format": ("contiguous", "channels_last")}
    outcome = world.run(script, fixed={n: v for n, v in FIXED.items() if n not in narrowed}, narrowed=narrowed)
    # The candidate was launched several times, and the baseline once.
    assert outcome.found is Finding.LIKELY and outcome.evidence == BOTH_WAYS
    assert "could not be launched again in turns with the baseline" in str(outcome.because)
    assert "as well" not in str(outcome.because)
    assert outcome.best.config["precision"] == "bf16" and outcome.best.launches > 1
    assert outcome.best.speedup_ci95[0] <= 1.5 <= outcome.best.speedup_ci95[1]
    # The others ran in turns with each other, but no ratio to the baseline is known.
    assert {key(s.config) for s in outcome.finalists} == {key(outcome.baseline.config), key(outcome.best.config)}
    assert read(world.files.profile).gives.unproven == f"likely, by {BOTH_WAYS}; not proven"


def test_a_failing_variant_is_reported_and_the_others_are_measured(world: NoisyWorld) -> None:
    """Without channels_last it runs out of memory; the gain of bf16 is known all the same."""

    def script(spec: TrialSpec) -> Play:
        if spec.launch.startswith("ablate") and spec.config.get("memory_format") == "contiguous":
            return Play(status=TrialStatus.OOM, cause="no memory", wall_s=3.0)
        return by_factors(world, waits=0.5, bf16=1.5, channels_last=1.3)(spec)

    narrowed = {"precision": ("fp32", "bf16"), "memory_format": ("contiguous", "channels_last")}
    outcome = world.run(script, fixed={n: v for n, v in FIXED.items() if n not in narrowed}, narrowed=narrowed)
    parts = {p.knob: p for p in outcome.ablation}
    assert parts["memory_format"].gain is None and "oom" in str(parts["memory_format"].why_not)
    gain = parts["precision"].gain
    assert gain is not None and gain[1] <= 1.5 <= gain[2]
    asked = [s for s in world.launched(LaunchKind.MEASURE) if "without-memory_format" in s.launch]
    assert len(asked) == 1


def test_each_changed_knob_has_a_gain(world: NoisyWorld) -> None:
    narrowed = {
        "precision": ("fp32", "bf16"),
        "memory_format": ("contiguous", "channels_last"),
        "optimizer_impl": ("for-loop", "fused"),
    }
    fixed = {n: v for n, v in FIXED.items() if n not in narrowed}
    script = by_factors(world, bf16=1.5, channels_last=1.25, fused=1.001)
    outcome = world.run(script, fixed=fixed, narrowed=narrowed)
    parts = {p.knob: p for p in outcome.ablation}
    assert parts["precision"].gain is not None and parts["memory_format"].gain is not None
    # They come from a heat, and a tenth of the winner's time is waiting, which no knob of the device shortens.
    assert all(parts[name].in_heat for name in ("precision", "memory_format"))
    assert parts["precision"].gain[1] <= 0.9 * 1.5 + 0.1 <= parts["precision"].gain[2]
    assert parts["memory_format"].gain[1] <= 0.9 * 1.25 + 0.1 <= parts["memory_format"].gain[2]
    assert outcome.best.config["optimizer_impl"] == "for-loop"


def test_a_knob_of_no_use_is_removed_everywhere(world: NoisyWorld) -> None:
    """The search had no time to try the winner without the knob."""
    narrowed = {"precision": ("fp32", "bf16"), "memory_format": ("contiguous", "channels_last")}
    fixed = {n: v for n, v in FIXED.items() if n not in narrowed}
    world.noise = 0.001
    # A heat tells that channels_last is good for the device, and it is not for the training.
    found, misled = by_factors(world, waits=0.3, bf16=1.5), by_factors(world, waits=0.3, bf16=1.5, channels_last=1.2)

    def script(spec: TrialSpec) -> Play:
        return (misled if spec.kind is LaunchKind.HEAT else found)(spec)

    outcome = world.run(script, fixed=fixed, narrowed=narrowed, trials=2)
    tried = read_trials(world.files)[outcome.best.trial].config
    assert (tried["memory_format"], outcome.best.config["memory_format"]) == ("channels_last", "contiguous")
    # The winner has the user's own batch size, so it is the best of that kind, too.
    assert key(outcome.best_same_batch.config) == key(outcome.best.config)


@pytest.mark.parametrize(("more_bytes", "held"), [(2**28, 1), (2**33, 2)])
def test_what_is_set_back_is_held_again_only_if_it_takes_much_more(
    world: NoisyWorld, more_bytes: int, held: int
) -> None:
    """Of 16 GiB the winner leaves 15 free; without its useless knob it takes more memory in its own launches."""
    narrowed = {"precision": ("fp32", "bf16"), "memory_format": ("contiguous", "channels_last")}
    fixed = {n: v for n, v in FIXED.items() if n not in narrowed}
    world.noise = 0.001

    def script(spec: TrialSpec) -> Play:
        misled = spec.kind is LaunchKind.HEAT
        found = by_factors(world, waits=0.3, bf16=1.5, channels_last=1.2 if misled else 1.0)(spec)
        peak = 2**30 + (more_bytes if spec.config["memory_format"] == "contiguous" else 0)
        assert found.measurement is not None
        return replace(found, measurement=found.measurement.model_copy(update={"peak_allocated_bytes": peak}))

    outcome = world.run(script, fixed=fixed, narrowed=narrowed, trials=2)
    assert outcome.best.config["memory_format"] == "contiguous" and outcome.hold is not None
    assert len(world.launched(LaunchKind.HOLD)) == held


@pytest.mark.parametrize("declared", [None, False, True])
def test_the_yardstick_is_the_users_own_training(world: NoisyWorld, declared: bool | None) -> None:
    """Only a knob that is declared to change the training on purpose is checked against itself."""
    probe = {"workload_knobs": {"kernel": ("a", "b")}}
    if declared is not None:
        probe["workload_maths"] = {"kernel": declared}  # type: ignore[dict-item]
    search(
        world.spec(fixed=FIXED, narrowed={"precision": ("fp32", "bf16")}),
        world.folder,
        world.env(by_factors(world, b=1.5, bf16=1.2), **probe),
    )
    checks = world.launched(LaunchKind.TRAIN_CHECK)
    kernels = {s.config["workload.kernel"] for s in checks if s.check is not None and s.check.reference}
    assert ("b" in kernels) == (declared is True)
    outcome = world.outcome
    assert outcome.best.config["workload.kernel"] == "b"
    # A knob that changes only the speed is the same training.
    assert (outcome.best_same_batch.config["workload.kernel"] == "b") == (declared is False)
    if declared is not True:
        assert len([s for s in checks if s.check is not None and s.check.reference]) == 1


def test_other_weights_are_no_failure_of_a_knob_that_says_nothing(world: NoisyWorld) -> None:
    def script(spec: TrialSpec) -> Play:
        if spec.kind is LaunchKind.TRAIN_CHECK and spec.config["workload.depth"] == 3:
            return Play(status=TrialStatus.USER_ERROR, cause="the model has other weights", error_code=4, wall_s=2.0)
        return by_factors(world, **{"3": 1.5})(spec)

    search(world.spec(fixed=FIXED), world.folder, world.env(script, workload_knobs={"depth": (2, 3)}))
    checks = [c for c in world.outcome.checks if c.config["workload.depth"] == 3]
    assert checks and {c.passed for c in checks} == {None}
    assert "autotune.knob(..., changes_maths=True)" in str(checks[0].reason)
    assert world.outcome.best.config["workload.depth"] == 3


def test_the_ablation_has_its_part_of_the_budget_and_what_is_left(world: NoisyWorld) -> None:
    narrowed = {"precision": ("fp32", "bf16"), "memory_format": ("contiguous", "channels_last")}
    fixed = {n: v for n, v in FIXED.items() if n not in narrowed}
    script = by_factors(world, wall_s=3.0, waits=0.5, bf16=1.5, channels_last=1.25)
    world.run(script, budget_s=200.0, fixed=fixed, narrowed=narrowed)
    rows = {r.purpose: r for r in world.outcome.ledger}
    assert rows["ablation"].seconds > 0.1 * 200 and "ceilings" in rows
    assert world.outcome.elapsed_s <= 200


def test_the_ledger_is_consistent(world: NoisyWorld) -> None:
    # Long enough for all the times in a scripted measurement.
    outcome = world.run(faster_by(1.5, world, wall_s=40.0), budget_s=2400.0)
    assert math.isclose(sum(r.seconds for r in outcome.ledger), outcome.elapsed_s, abs_tol=0.5)
    for row in outcome.ledger:
        parts = row.start_s + row.compile_s + row.warmup_s + row.kept_s + row.rest_s
        assert parts == pytest.approx(row.seconds, abs=1e-6)
    assert {"probing", "searching", "checking that it trains", "verifying", "holding", "ceilings"} <= {
        r.purpose for r in outcome.ledger
    }


MANY = {
    "precision": ("fp32", "bf16"),
    "memory_format": ("contiguous", "channels_last"),
    "optimizer_impl": ("for-loop", "foreach", "fused"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_an_interrupted_race_continues_with_the_same_entrants_in_a_new_round(world: NoisyWorld, rounds: int) -> None:
    """Killed in the middle of a round. Finished launches must not make room for more entrants, and must not be compared
    with launches made later."""
    fixed = {n: v for n, v in FIXED.items() if n not in MANY}

    def search_in(one: NoisyWorld) -> None:
        script = by_factors(one, wall_s=12.0, bf16=1.2)
        # Without heats, so that there are many trials to choose from.
        one.run(script, fixed=fixed, narrowed=MANY, budget_s=560.0, sampler="random")

    def raced(one: NoisyWorld, run: int) -> list[tuple[str, str]]:
        names = [s.launch.split("-") for s in one.launchers[run].specs if s.launch.startswith("verify-")]
        return [(trial, number) for _, trial, number in names]

    world.noise = 0.03
    search_in(world)
    first = [trial for trial, number in raced(world, 0) if number == "1"]
    assert len(first) > 3
    names = [s.launch for s in world.launchers[0].specs]
    other = NoisyWorld(world.folder / "killed", noise=0.03)
    other.raise_at = {names.index(f"verify-{first[1] if rounds % 2 else first[-2]}-{rounds}") + 1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        search_in(other)
    other.raise_at = {}
    resume(other.files, other.env(by_factors(other, wall_s=12.0, bf16=1.2)))
    before, after = raced(other, 0), raced(other, 1)
    assert {trial for trial, number in after if number == after[0][1]} == set(first)
    assert before[-1][1] == str(rounds) and {number for _, number in before}.isdisjoint(n for _, n in after)
    assert other.outcome.best.verified


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["check-", "verify-", "hold-", "device-"])
def test_after_a_kill_in_the_proof_nothing_is_launched_twice(world: NoisyWorld, cut: str) -> None:
    """One uninterrupted run shows the launches; another is killed in the middle of one of each kind, and resumed."""
    world.run(faster_by(1.5, world))
    names = [s.launch for s in world.launchers[0].specs]
    at = next(i for i, name in enumerate(names) if name.startswith(cut))
    other = NoisyWorld(world.folder / "killed")
    other.raise_at = {at: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        other.run(faster_by(1.5, other))
    other.raise_at = {}
    resume(other.files, other.env(faster_by(1.5, other)))
    first, second = ([s.launch for s in launcher.specs] for launcher in other.launchers)
    # The probe is repeated, and so is the launch that was cut.
    assert set(first) & set(second) == {"probe-1", names[at]}
    assert names[at] == first[-1] and len(set(second)) == len(second)
    assert other.outcome.best.config == world.outcome.best.config and other.outcome.best.verified
    # By then the proof has used time, so the reason would be another one.
    assert other.outcome.stopped == world.outcome.stopped
    assert len(read_trials(other.files)) == sum(world.outcome.trials.values())


def test_a_gain_needs_less_time_than_a_winner_without_the_knob(world: NoisyWorld) -> None:
    """There is no time for rounds with the baseline, in which the winner could lose a knob."""
    narrowed = {"precision": ("fp32", "bf16"), "memory_format": ("contiguous", "channels_last")}
    fixed = {n: v for n, v in FIXED.items() if n not in narrowed}
    outcome = world.run(
        by_factors(world, wall_s=3.0, waits=0.5, bf16=1.5, channels_last=1.25),
        budget_s=41.0,
        fixed=fixed,
        narrowed=narrowed,
    )
    again = [s for s in world.launched(LaunchKind.MEASURE) if s.launch.startswith("ablate")]
    assert again and key(outcome.baseline.config) not in {key(s.config) for s in again}
    gains = {p.knob: p.gain for p in outcome.ablation}
    for knob, factor in {"precision": 1.5, "memory_format": 1.25}.items():
        gain = gains[knob]
        assert gain is not None and gain[1] <= factor <= gain[2]
    assert outcome.elapsed_s <= 41


def compiling_in(seconds: float, world: NoisyWorld) -> Callable[[TrialSpec], Play]:
    """Script launches of which the compiled are twice as fast, and compile for each batch size in ``seconds``. At the
    user's own batch size none is measured."""

    def script(spec: TrialSpec) -> Play:
        compiled = spec.config["compile_mode"] != "off"
        if compiled and spec.config["batch_size"] == 32 and spec.kind is LaunchKind.MEASURE:
            return Play(status=TrialStatus.HANG, phase=Phase.WARMUP)
        rate = 100 * (1.5 if spec.config["precision"] == "bf16" else 1) * (2 if compiled else 1)
        rate = world.rate(rate * (int(spec.config["batch_size"]) / 32) ** 0.5)
        compile_s = seconds if compiled else 0.5
        measurement = make_measurement(
            rate, batch_size=int(spec.config["batch_size"]), compile_s=compile_s, compile_cache_warm=False
        )
        return Play(rate_per_s=rate, measurement=measurement, wall_s=5.0 + compile_s)

    return script


@pytest.mark.parametrize(("compile_s", "instead"), [(60.0, True), (4.0, False)])
def test_a_winner_that_compiles_too_slowly_at_the_own_batch_is_checked_without_compiling(
    world: NoisyWorld, compile_s: float, instead: bool
) -> None:
    fixed = {n: v for n, v in FIXED.items() if n not in ("batch_size", "compile_mode")} | {"precision": "bf16"}
    only = {"batch_size": ("32", "64"), "compile_mode": ("off", "default")}
    outcome = world.run(compiling_in(compile_s, world), budget_s=600.0, fixed=fixed, narrowed=only)
    assert outcome.best.config["compile_mode"] == "default" and outcome.best.config["batch_size"] == 64
    (verdict,) = [c for c in outcome.checks if outcome.best.trial in c.trials]
    assert verdict.passed and verdict.losses
    modes = {s.config["compile_mode"] for s in world.launched(LaunchKind.TRAIN_CHECK) if not s.check.reference}
    said = str(trains_line(verdict))
    assert said.startswith("The winner trains as eager fp32 does") and said.endswith(".")
    if instead:
        assert modes == {"off"} and verdict.config["compile_mode"] == "off"
        assert "checked without compiling, because compiling for batch 32" in said
        # Finalists that are eager themselves share the check.
        assert len(world.launched(LaunchKind.TRAIN_CHECK)) == 2
    else:
        assert "default" in modes and "without" not in said


def test_a_winner_that_only_compiles_has_no_eager_twin_to_check(world: NoisyWorld) -> None:
    fixed = {n: v for n, v in FIXED.items() if n not in ("batch_size", "compile_mode")} | {"precision": "fp32"}
    only = {"batch_size": ("32", "64"), "compile_mode": ("off", "default")}
    outcome = world.run(compiling_in(90.0, world), budget_s=600.0, fixed=fixed, narrowed=only)
    (verdict,) = outcome.checks
    assert verdict.passed is None and "no time" in str(verdict.reason)


def of_a_script(world: NoisyWorld, script: Callable[[TrialSpec], Play], **changes: object) -> Outcome:
    """Search over a script, which is launched anew for each run of a check."""
    path = world.folder / "train.py"
    path.write_text("")
    command = CommandRef(words=(sys.executable, str(path)), folder=str(world.folder))
    return world.run(script, command=command, model="train", data="generated", **{"budget_s": 200.0, **changes})


def test_a_script_that_nothing_makes_faster_is_not_checked(world: NoisyWorld) -> None:
    outcome = of_a_script(world, faster_by(1.0, world))
    assert outcome.best.config == outcome.baseline.config and outcome.checks == ()
    assert world.launched(LaunchKind.TRAIN_CHECK) == []


@pytest.mark.parametrize(("budget_s", "early"), [(200.0, True), (90.0, False)])
def test_the_winner_of_a_script_is_checked_once_and_early_if_there_is_time(
    world: NoisyWorld, budget_s: float, early: bool
) -> None:
    def script(spec: TrialSpec) -> Play:
        rate = world.rate(150 if spec.config.get("precision") == "bf16" else 100)
        return Play(measurement=make_measurement(rate, startup_s=6.0), wall_s=9.0)

    outcome = of_a_script(world, script, budget_s=budget_s)
    assert outcome.best.config["precision"] == "bf16" and outcome.checks[0].passed
    launches = [s.launch for launcher in world.launchers for s in launcher.specs]
    checks = [n for n, name in enumerate(launches) if name.startswith("check-")]
    assert len(checks) == 2 and (checks[0] < launches.index("verify-00000-2")) == early


def test_a_script_that_trains_wrongly_does_not_win(world: NoisyWorld) -> None:
    def script(spec: TrialSpec) -> Play:
        wrong = spec.config.get("precision") == "bf16"
        flat = TrainCheck(losses=(2.3,) * (spec.check.steps if spec.check else 1), finite=True, changed=0.0)
        return Play(rate_per_s=world.rate(200 if wrong else 100), wall_s=5.0, check=flat if wrong else None)

    outcome = of_a_script(world, script)
    assert outcome.best.config == outcome.baseline.config
    assert all(why.startswith("fast but wrong") for why in outcome.dropped.values()) and outcome.dropped


@pytest.mark.parametrize(
    ("budget_s", "trains", "found"),
    [
        (32.0, True, Finding.FASTER),
        (40.0, True, Finding.LIKELY),
        (40.0, False, Finding.KEEP),
        (55.0, True, Finding.FASTER),
    ],
)
def test_how_a_script_trains_is_checked_before_its_rate_is_proven_if_there_is_no_time_for_both(
    world: NoisyWorld, monkeypatch: pytest.MonkeyPatch, budget_s: float, trains: bool, found: Finding
) -> None:
    monkeypatch.setattr(StudyLoop, "counts_as_round", lambda *_: True)

    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        flat = TrainCheck(losses=(2.3,) * (spec.check.steps if spec.check else 1), finite=True, changed=0.0)
        measurement = make_measurement(world.rate(200 if bf16 else 100), startup_s=6.0)
        return Play(measurement=measurement, wall_s=8.0, check=flat if bf16 and not trains else None)

    outcome = of_a_script(world, script, budget_s=budget_s)
    kinds = [s.kind for launcher in world.launchers for s in launcher.specs][3:]
    assert outcome.finding is found
    assert outcome.checks[0].passed is {32.0: None}.get(budget_s, trains)
    assert (kinds[0] is LaunchKind.TRAIN_CHECK) == (budget_s == 40.0)


@pytest.mark.parametrize("stopped_at", [None, "verify-00000-2", "check-"])
def test_the_only_candidate_needs_one_launch_more(
    world: NoisyWorld, monkeypatch: pytest.MonkeyPatch, stopped_at: str | None
) -> None:
    """Its launches are not in turns in virtual time, which the database knows nothing of."""
    monkeypatch.setattr(StudyLoop, "counts_as_round", lambda *_: True)
    whole = NoisyWorld(world.folder / "whole", noise=0.0)
    whole.folder.mkdir()
    found = of_a_script(whole, faster_by(1.5, whole))
    names = [s.launch for s in whole.launched(LaunchKind.MEASURE) if s.launch.startswith("verify")]
    assert names[:2] == ["verify-00001-2", "verify-00000-2"] and found.best.launches == 1 + len(names) // 2
    if stopped_at is None:
        return
    world.noise = 0.0
    launches = [s.launch for launcher in whole.launchers for s in launcher.specs]
    at = next(i for i, name in enumerate(launches) if name.startswith(stopped_at)) + 1
    world.raise_at = {at: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        of_a_script(world, faster_by(1.5, world))
    world.raise_at = {}
    resume(world.files, world.env(faster_by(1.5, world)))
    assert world.outcome.best.config == found.best.config and world.outcome.checks[0].passed
    again = [s.launch for launcher in world.launchers for s in launcher.specs if s.launch.startswith("verify")]
    # What was interrupted is launched once more, and nothing else.
    assert len(again) - len(set(again)) == (launches[at] in again) and "verify-00000-1" not in again


def doubtful(world: NoisyWorld, rates: dict[int, float], **late: Play) -> Callable[[TrialSpec], Play]:
    """A script that is faster in bf16, whose losses lie 8 % off the first run of the script as it stands.

    Args:
        rates: that of bf16 by the number of workers. late: what other runs of the script for comparison do instead.
    """
    checks = off_by_8_percent(world)

    def script(spec: TrialSpec) -> Play:
        bf16, play = spec.config.get("precision") == "bf16", checks(spec)
        if spec.check is not None and spec.check.seed and "other_seeds" in late:
            return late["other_seeds"]
        rate = rates.get(int(spec.config["num_workers"]), 250.0) if bf16 else 100.0
        measurement = make_measurement(world.rate(rate), startup_s=5.0)
        return replace(play, measurement=measurement, wall_s=8.0)

    return script


SEVERAL = {"precision": ("fp32", "bf16"), "num_workers": ("0", "1", "2", "4"), "prefetch_factor": ("2",)}


@pytest.mark.parametrize(
    ("budget_s", "found"),
    [(60.0, Finding.OPEN), (70.0, Finding.FASTER), (95.0, Finding.OPEN), (125.0, Finding.FASTER)],
)
def test_what_is_not_known_to_train_is_promised_by_no_other_trial_either(
    world: NoisyWorld, budget_s: float, found: Finding
) -> None:
    script = doubtful(world, {0: 405.0, 1: 395.0, 2: 400.0, 4: 250.0})
    fixed = {name: value for name, value in FIXED.items() if name not in SEVERAL}
    outcome = of_a_script(world, script, budget_s=budget_s, fixed=fixed, narrowed=SEVERAL)
    (checked,) = outcome.checks
    assert outcome.finding is found and checked.passed is (True if found is Finding.FASTER else None)
    if found is Finding.OPEN:
        because = "may be faster, and is out: it differs from one run of the script as it stands"
        assert checked.differs and because in str(outcome.because)
        assert outcome.profile is None and outcome.again is not None


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_search_goes_on_without_what_trains_wrongly(world: NoisyWorld, interrupted: bool) -> None:
    def script(spec: TrialSpec) -> Play:
        bf16, workers = spec.config.get("precision") == "bf16", int(spec.config["num_workers"])
        flat = TrainCheck(losses=(2.3,) * (spec.check.steps if spec.check else 1), finite=True, changed=0.0)
        rate = (200.0 if bf16 else 100.0) * (1.3 if workers else 1.0)
        return Play(measurement=make_measurement(world.rate(rate)), wall_s=5.0, check=flat if bf16 else None)

    def launched() -> list[tuple[LaunchKind, object]]:
        return [(s.kind, s.config.get("precision")) for launcher in world.launchers for s in launcher.specs]

    fixed = {name: value for name, value in FIXED.items() if name not in SEVERAL}
    if interrupted:
        # In the trial after the check.
        world.raise_at = {5: KeyboardInterrupt()}
        with pytest.raises(KeyboardInterrupt):
            of_a_script(world, script, budget_s=240.0, fixed=fixed, narrowed=SEVERAL)
        assert (LaunchKind.TRAIN_CHECK, "bf16") in launched()
        world.raise_at = {}
        resume(world.files, world.env(script))
    else:
        of_a_script(world, script, budget_s=240.0, fixed=fixed, narrowed=SEVERAL)
    kinds, outcome = launched(), world.outcome
    assert kinds.count((LaunchKind.TRAIN_CHECK, "bf16")) == 1
    assert (LaunchKind.MEASURE, "bf16") not in kinds[kinds.index((LaunchKind.TRAIN_CHECK, "bf16")) :]
    assert outcome.best.config["precision"] == "fp32" and outcome.finding is Finding.FASTER
    (verdict,) = outcome.checks
    assert verdict.passed is False and outcome.dropped[verdict.trials[0]].startswith("fast but wrong")


def test_a_reference_that_fails_after_a_first_difference_proves_nothing(world: NoisyWorld) -> None:
    hang = Play(status=TrialStatus.TIMEOUT, wall_s=5.0, cause="it took too long")
    outcome = of_a_script(world, doubtful(world, {0: 200.0}, other_seeds=hang))
    assert outcome.checks[0].differs and outcome.checks[0].passed is None
    assert outcome.finding is Finding.OPEN and outcome.profile is None
