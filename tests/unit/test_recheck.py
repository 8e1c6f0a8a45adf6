"""Rechecking the rate that a profile promises, in virtual time: real races, scripted launches."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.base.errors import InterruptedSearch, MachineError, UsageError, WorkloadError
from autotune.base.records import LaunchKind, Surroundings, TrialSpec, TrialStatus
from autotune.profile import Profile, read
from autotune.search import search
from autotune.search.recheck import Recheck, recheck, request_for
from autotune.space.formatting import interval_text
from tests.support import Play, make_measurement

from .world import FIXED, World

RANDOM = random.Random(1)


def playing(factor: float, noise: float = 0.005) -> Callable[[TrialSpec], Play]:
    """Script launches in which bf16 is ``factor`` times as fast as fp32."""

    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        return Play(rate_per_s=100 * (factor if bf16 else 1) * math.exp(RANDOM.gauss(0, noise)), wall_s=5.0)

    return script


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """The profile of a search in which bf16 is 1.5 times as fast."""
    return profile_of(World(tmp_path_factory.mktemp("promised")), 1.5)


def profile_of(world: World, factor: float) -> Profile:
    spec = world.spec(fixed=FIXED, narrowed={"precision": ("fp32", "bf16")})
    search(spec, world.folder, world.env(playing(factor)))
    return read(world.files.profile)


def check(world: World, profile: Profile, script: Callable[[TrialSpec], Play], budget_s: float = 200.0) -> Recheck:
    spec = request_for(profile, budget_s=budget_s)
    return recheck(profile, spec, world.env(script), world.folder / f"again-{len(world.launchers)}")


@pytest.mark.slow
def test_a_rate_that_is_confirmed(world: World, profile: Profile) -> None:
    kept = check(world, profile, playing(1.5))
    assert kept.ratio is not None and kept.speedup is not None and kept.rate is not None
    assert kept.ratio[1] <= 1.5 / profile.gives.speedup <= kept.ratio[2]
    assert kept.speedup[1] <= 1.5 <= kept.speedup[2]
    assert kept.rate.per_s == pytest.approx(150, rel=0.02)
    assert kept.verdict(0.95) is True and kept.differences == () and kept.launches >= 3
    specs = [s for s in world.launchers[-1].specs if s.kind is LaunchKind.MEASURE]
    assert [s.config["precision"] for s in specs[:4]] == ["fp32", "bf16", "bf16", "fp32"]
    assert {s.batch_size for s in specs} == {32} and all(s.config == profile.configuration for s in specs[1:3])


def test_a_rate_that_is_no_longer_reached(world: World, profile: Profile) -> None:
    kept = check(world, profile, playing(1.2))
    assert kept.ratio is not None and kept.ratio[0] == pytest.approx(0.8, abs=0.03)
    assert kept.verdict(0.95) is False and kept.verdict(0.5) is True


def test_launches_with_too_much_noise_leave_it_undecided(world: World, profile: Profile) -> None:
    shares = iter([1.0, 0.9, 1.1, 1.0] * 20)

    def script(spec: TrialSpec) -> Play:
        return Play(rate_per_s=100 * (1.3 if spec.config.get("precision") == "bf16" else 1) * next(shares), wall_s=60.0)

    kept = check(world, profile, script, budget_s=250.0)
    assert kept.ratio is not None and kept.ratio[0] < 0.95 < kept.ratio[2]
    assert kept.verdict(0.95) is None


def test_a_failing_configuration_refutes_the_profile_and_is_explained(world: World, profile: Profile) -> None:

    def script(spec: TrialSpec) -> Play:
        if spec.config.get("precision") == "bf16":
            return Play(status=TrialStatus.OOM, cause="CUDA out of memory", wall_s=3.0)
        return playing(1.5)(spec)

    kept = check(world, profile, script)
    assert kept.failed is not None and "oom" in kept.failed and "CUDA out of memory" in kept.failed
    assert kept.verdict(0.0) is False and kept.rate is None and kept.baseline is not None


def test_a_configuration_that_fails_now_and_then_is_not_kept(world: World, profile: Profile) -> None:
    runs = iter(range(100))

    def script(spec: TrialSpec) -> Play:
        bf16 = spec.config.get("precision") == "bf16"
        if bf16 and next(runs) == 2:
            return Play(status=TrialStatus.OOM, cause="CUDA out of memory", wall_s=3.0)
        return Play(rate_per_s=150.0 if bf16 else 100.0, wall_s=5.0)

    kept = check(world, profile, script)
    assert kept.launches == 2 and kept.failed is not None and "CUDA out of memory" in kept.failed
    assert kept.verdict(0.0) is False


def test_a_failing_baseline_is_a_workload_error(world: World, profile: Profile) -> None:

    def script(spec: TrialSpec) -> Play:
        if spec.config.get("precision") == "fp32":
            return Play(status=TrialStatus.USER_ERROR, cause="KeyError: 'label'", wall_s=3.0)
        return playing(1.5)(spec)

    with pytest.raises(WorkloadError, match="KeyError: 'label'"):
        check(world, profile, script)


def test_a_busy_machine_is_not_a_workload_error(world: World, profile: Profile) -> None:
    busy = Play(status=TrialStatus.INTERRUPTED, transient=True, cause="others used 1.8 of 2 cores", wall_s=3.0)
    with pytest.raises(MachineError, match="others used 1.8 of 2 cores"):
        check(world, profile, lambda spec: busy)


def test_a_profile_of_the_baseline_is_checked_by_its_rate(world: World) -> None:
    profile = profile_of(world, 0.7)
    assert profile.gives.speedup == 1.0
    kept = check(world, profile, playing(0.7))
    assert kept.speedup is None and kept.ratio is not None and kept.ratio[0] == pytest.approx(1.0, abs=0.02)
    assert kept.verdict(0.95) is True and kept.launches > 1
    slow = check(world, profile, lambda spec: Play(rate_per_s=60.0, wall_s=5.0))
    assert slow.verdict(0.95) is False


@pytest.mark.parametrize("ci95", [(0.0, 1e308), (-1e308, 1e308), (0.0, 0.0), (1e-300, 1e308)])
def test_a_promise_without_bounds_is_compared_all_the_same(world: World, ci95: tuple[float, float]) -> None:
    """Of a profile that is the baseline, the rate is compared, with the interval that the file states."""
    profile = profile_of(world, 1.0)
    gives = profile.gives.model_copy(update={"ci95": ci95})
    kept = check(world, profile.model_copy(update={"gives": gives}), playing(1.0))
    assert kept.ratio is not None and all(map(math.isfinite, kept.ratio))
    assert kept.ratio[0] == pytest.approx(1.0, abs=0.1) and len(interval_text(kept.ratio[1:])) < 40


def test_a_configuration_that_is_illegal_here_breaks_the_promise_with_the_reason(
    world: World, profile: Profile
) -> None:
    spec = request_for(profile, budget_s=60.0)
    # A CPU that emulates bf16.
    env = world.env(playing(1.5), native_bf16=False)
    kept = recheck(profile, spec, env, world.folder / "again")
    assert kept.verdict(0.95) is False and kept.failed is not None and "bf16" in kept.failed


def slowed(part: float, **around: Any) -> Callable[[TrialSpec], Play]:
    """Script launches on a machine on which everything is slower."""

    def script(spec: TrialSpec) -> Play:
        rate = 100 * (1.5 if spec.config.get("precision") == "bf16" else 1) * part * math.exp(RANDOM.gauss(0, 0.005))
        measured = make_measurement(rate, batch_size=spec.batch_size)
        windows = tuple(w.model_copy(update={"around": Surroundings(**around)}) for w in measured.windows)
        return Play(rate_per_s=rate, wall_s=5.0, measurement=measured.model_copy(update={"windows": windows}))

    return script


@pytest.mark.parametrize(
    ("around", "sentence"),
    [
        ({"stops": 7}, "something keeps stopping and continuing its processes (SIGSTOP, as cpulimit does)."),
        ({"stops": 0, "foreign_cores": 0.9}, "other processes, or the hypervisor, use 0.9 cores."),
        ({"clocks_event_reasons": 0x80}, "HW power brake holds the card's clocks down."),
        ({"foreign_cores": 0.02}, None),
    ],
)
def test_a_slower_machine_keeps_the_speedup_and_not_the_promise(
    around: dict[str, Any], sentence: str | None, world: World, profile: Profile
) -> None:
    kept = check(world, profile, slowed(0.5, **around))
    assert kept.ratio is not None and kept.ratio[0] == pytest.approx(1.0, abs=0.03)
    assert kept.rate_ratio is not None and kept.rate_ratio[0] == pytest.approx(0.5, abs=0.03)
    assert kept.verdict(0.95) is False and kept.verdict(0.4) is True
    machine = "the machine is slower: the baseline gives only 0.50× of its rate then, too."
    assert [*kept.causes] == ([sentence] if sentence else []) + [machine]


def test_days_differ_a_little(world: World, profile: Profile) -> None:
    kept = check(world, profile, slowed(0.88))
    assert kept.verdict(0.95) is True


def test_only_the_configuration_is_slower(world: World, profile: Profile) -> None:
    kept = check(world, profile, playing(1.1))
    assert kept.verdict(0.95) is False
    assert kept.causes == ("the machine is as fast as then, within the usual scatter: the baseline gives 1.00×.",)


def test_code_that_has_changed_is_another_training(world: World, profile: Profile) -> None:
    workload = {**profile.fingerprint.values, "workload_sha256": "f" * 64}
    other = profile.fingerprint.model_copy(update={"values": workload})
    changed = profile.model_copy(update={"fingerprint": other}).sealed()
    kept = check(world, changed, playing(1.5))
    assert kept.verdict(0.95) is False and kept.causes[0].startswith("the training differs")
    again = recheck(
        changed,
        request_for(changed, budget_s=200.0),
        world.env(playing(1.5)),
        world.folder / "named",
        any_code=True,
    )
    assert again.verdict(0.95) is True


def test_a_profile_that_was_changed_by_hand_is_no_promise(world: World, profile: Profile) -> None:
    batch = {**profile.configuration, "batch_size": 16}
    kept = check(world, profile.model_copy(update={"configuration": batch}), playing(1.5))
    assert kept.ratio is not None and kept.verdict(0.95) is False
    assert kept.causes[0].startswith("the profile has been changed since it was written")
    assert kept.differences == (("profile", "as written", "changed"),)


def test_differences_are_reported(world: World, profile: Profile) -> None:
    kept = recheck(
        profile,
        request_for(profile, budget_s=60.0),
        world.env(playing(1.5), torch_version="9.9"),
        world.folder / "again",
    )
    assert [(what, now) for what, _, now in kept.differences] == [("torch", "9.9")]


def test_a_signal_ends_the_check(world: World, profile: Profile) -> None:
    world.signal = 2
    with pytest.raises(InterruptedSearch):
        check(world, profile, playing(1.5))


def test_a_data_folder_must_be_given_again(profile: Profile) -> None:
    elsewhere = profile.model_copy(update={"conditions": profile.conditions.model_copy(update={"data": "folder"})})
    with pytest.raises(UsageError) as caught:
        request_for(elsewhere, budget_s=60.0)
    assert "--data DIR" in str(caught.value.advice)
    assert request_for(elsewhere, data="/somewhere", budget_s=60.0).data == "/somewhere"
