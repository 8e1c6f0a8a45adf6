"""What is likely where nothing is proven: its label, its checks, and how it goes on to a proof."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotune import stats
from autotune.base.errors import InterruptedSearch, ProfileError, UsageError
from autotune.base.parsing import duration_s
from autotune.base.records import Config, Finding, Heat, HeatEntrant, LaunchKind, TrainCheck, TrialSpec, Turn
from autotune.profile import Profile, read
from autotune.profile.in_force import Store
from autotune.report import headline_of
from autotune.search import resume, search
from autotune.search.proof.likely import _by_heats, _by_launches
from autotune.search.proof.race import Comparison, entrant
from autotune.search.ranking import profile_from
from autotune.space.requirements import ANYTHING
from autotune.study.tables import read_trials
from tests.support import Play, make_measurement, make_trial

from .answered import Case, Launcher, Training, answer
from .world import FIXED, World, plain

#: By the rate, whatever else.
JUDGING = cast(Any, SimpleNamespace(device="cpu", by_rate=True, required=ANYTHING))
#: No time for a launch of each in turns.
SCARCE = Case(seed=0, noise=0.05, launch_s=10.0, launches=4.0, script=False)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def longer(world: World, command: str | None) -> float:
    """Return by how many seconds a command lengthens a study."""
    found = re.fullmatch(r"autotune resume \S+ --budget \+(\d+s)", str(command))
    assert found is not None
    return duration_s(found[1])


def test_it_is_labelled_wherever_it_is_shown(tmp_path: Path) -> None:
    found = answer(SCARCE, tmp_path / "s")
    outcome = found.outcome
    assert outcome is not None and outcome.found is Finding.LIKELY
    assert outcome.evidence == "turns within one process and one launch of each"
    low, high = outcome.best.speedup_ci95
    assert 1 < low <= found.true_ratio <= high
    headline = headline_of(outcome)
    assert headline.startswith("Likely ") and headline.endswith("Not proven yet.") and "Not checked:" in headline
    profile = read(Path(str(outcome.profile)))
    assert profile.gives.unproven == f"likely, by {outcome.evidence}; not proven"
    assert "not proven" in Path(str(outcome.profile)).read_text().split("format")[0]
    with pytest.raises(ProfileError, match="not kept with the proven ones"):
        Store(tmp_path / "store").keep(profile)


@pytest.mark.slow
def test_it_goes_on_to_its_proof_with_what_was_measured(world: World) -> None:
    training = Training(SCARCE)

    def launcher(*_: object) -> Launcher:
        made = Launcher(training, world, {})
        world.launchers.append(made)
        return made

    env = replace(world.env(training.play), launcher=launcher)
    outcome = search(world.spec(budget_s=SCARCE.budget_s), world.folder, env).outcome
    assert outcome.found is Finding.LIKELY and world.files.profile.exists()
    trials = read_trials(world.files)
    with pytest.raises(UsageError, match="is 40s already"):
        resume(world.files, env, lambda before_s: before_s)
    more_s = longer(world, outcome.again)
    proven = resume(world.files, env, lambda before_s: before_s + more_s).outcome
    assert proven.found is Finding.FASTER and proven.evidence is None and proven.again is None
    assert proven.best.trial == outcome.best.trial and read(world.files.profile).gives.unproven is None
    assert read_trials(world.files)[: len(trials)] == trials
    again = [s.launch for s in world.launchers[-1].specs if s.kind is LaunchKind.MEASURE]
    assert not set(again) & {s.launch for s in world.launchers[0].specs}, "nothing is measured twice"
    assert proven.elapsed_s <= SCARCE.budget_s + more_s + 5


@pytest.mark.slow
def test_ctrl_c_leaves_the_profile_of_what_is_likely(world: World) -> None:
    training = Training(SCARCE)

    def interrupted(spec: TrialSpec) -> Play:
        if spec.launch.startswith("verify"):
            world.signal = 2
        return training.play(spec)

    launcher = Launcher(training, world, {})
    launcher._script = interrupted
    env = replace(world.env(interrupted), launcher=lambda *_: launcher)
    with pytest.raises(InterruptedSearch) as raised:
        search(world.spec(budget_s=400), world.folder, env)
    assert str(raised.value.so_far).startswith("Likely ") and str(world.files.profile) in str(raised.value.so_far)
    profile = read(world.files.profile)
    assert profile.gives.unproven is not None
    with pytest.raises(UsageError, match="not finished, and has the profile of trial"):
        profile_from(world.files, None, profile.provenance.trial + 1)
    world.signal = None
    launcher._script = training.play
    outcome = resume(world.files, env).outcome
    assert outcome.found is Finding.FASTER and read(world.files.profile).gives.unproven is None


def test_what_trains_wrongly_is_not_likely(world: World) -> None:
    """bf16 is faster, and its loss diverges; nothing else is faster."""

    def wrong(spec: TrialSpec) -> Play:
        if spec.kind is LaunchKind.TRAIN_CHECK and spec.config["precision"] == "bf16":
            return Play(check=TrainCheck(losses=(2.3, 9.0), finite=False, changed=1.0), wall_s=3.0)
        return plain(spec)

    outcome = search(world.spec(fixed=FIXED, budget_s=600), world.folder, world.env(wrong)).outcome
    assert outcome.found is not Finding.LIKELY and outcome.best.config["precision"] == "fp32"


def test_a_candidate_of_a_search_without_a_verdict_can_be_taken(world: World) -> None:
    made: list[str] = []

    def equal(spec: TrialSpec) -> Play:
        made.append(spec.launch)
        other = 1.02 if spec.config["precision"] == "bf16" else 1.0
        return Play(rate_per_s=100.0 * other * (1.08 if len(made) % 3 else 0.92), wall_s=15.0)

    outcome = search(world.spec(fixed=FIXED, budget_s=100), world.folder, world.env(equal)).outcome
    assert outcome.found is Finding.OPEN and not world.files.profile.exists() and world.files.usual.exists()
    with pytest.raises(UsageError, match="no verdict") as raised:
        profile_from(world.files, outcome, None)
    assert "--trial N" in str(raised.value.advice)
    taken: Profile = profile_from(world.files, outcome, 1)
    assert taken.configuration["precision"] == "bf16" and taken.provenance.trial == 1
    assert taken.gives.unproven == "a candidate that was chosen by hand, and not proven"
    own = profile_from(world.files, outcome, 0)
    assert own.gives.unproven is None


@pytest.mark.parametrize(("waits", "workers", "told"), [(0.2, 0, 1 / (0.2 + 0.8 / 2)), (0.2, 4, None), (0.4, 0, None)])
def test_waits_for_the_loader_belong_to_the_training(waits: float, workers: int, told: float | None) -> None:
    """A device that is twice as fast does not make a training twice as fast that waits a fifth of its time."""
    baseline = make_trial(0, config={"precision": "fp32", "batch_size": 32, "num_workers": workers})
    faster = make_trial(1, config={**baseline.config, "precision": "bf16"})
    waiting = make_measurement(100.0, loader_wait_fraction=waits)
    trials = [
        t.model_copy(update={"result": t.result.model_copy(update={"measurement": waiting})})
        for t in (baseline, faster)
    ]
    turn = Turn(steps=1, samples=32, seconds=1.0)
    rows = [
        HeatEntrant(config=baseline.config, turns=(turn,), ratio=1.0, ratio_ci95=(1.0, 1.0)),
        HeatEntrant(config=faster.config, turns=(turn,), ratio=2.0, ratio_ci95=(1.8, 2.2)),
    ]
    heat = Heat(entrants=tuple(rows), noise_sd=0.01, startup_s=0.0, switch_s=0.0, measured_s=2.0, ended="as told")

    class Of:
        def __init__(self) -> None:
            self.baseline = baseline.config

        def is_as_in_heats(self, config: Config) -> bool:
            return True

    own, one = (entrant(trial) for trial in trials)
    found = list(_by_heats(one, own, Of(), [heat]))  # type: ignore[arg-type]
    assert [math.exp(view.log) for view in found] == ([] if told is None else [pytest.approx(told)])


def test_rounds_are_as_many_as_a_gain_takes() -> None:
    noise = stats.PRIORS["cpu"]
    assert stats.rounds_to_show(math.log(2.0), noise) == 2
    assert stats.rounds_to_show(math.log(1.1), noise) > stats.rounds_to_show(math.log(1.2), noise)
    assert stats.rounds_to_show(1e-9, noise, most=7) == 7


def test_a_slow_launch_of_the_baseline_is_no_evidence_beside_its_others() -> None:
    """Shared images of 38 MB a batch: trial 2 was 1.32 times as fast as the baseline's first launch, which was not
    repeated."""
    own, kept, other = (
        entrant(make_trial(number, {"batch_size": 64, "num_workers": number}, rate))
        for number, rate in ((0, 780.0), (1, 1086.0), (2, 1028.0))
    )
    prior = stats.PRIORS["cpu"]
    space = SimpleNamespace(baseline=own.config)

    def views() -> list[tuple[float, float, str]]:
        compared = Comparison(JUDGING, [own, kept, other])
        shown = _by_launches(other, compared, space, prior)  # type: ignore[arg-type]
        return [(math.exp(v.log), v.se * stats.t_quantile(v.degrees), v.words) for v in shown]

    ((ratio, half, words),) = views()
    assert ratio == pytest.approx(1.318, abs=1e-3) and math.exp(half) > ratio
    assert words == "one launch of each"
    own.rounds, kept.rounds = [make_measurement(1038.0)], [make_measurement(1045.0)]
    ((ratio, half, words),) = views()
    assert ratio == pytest.approx(1028 / math.sqrt(780 * 1038)) and math.exp(half) > ratio
    assert words == "launches at different times"
    # Nor does one launch in turns say more than all of them.
    other.rounds = [make_measurement(1040.0)]
    ((ratio, half, words),) = views()
    assert ratio == pytest.approx(math.sqrt(1028 * 1040) / math.sqrt(780 * 1038)) and math.exp(half) > ratio
    assert words == "launches at different times"


def test_windows_that_scatter_add_to_an_assumed_noise_between_launches() -> None:
    def error(spread: float) -> float:
        own, other = (
            entrant(make_trial(n, {"num_workers": n}, measurement=make_measurement(rate, spread=spread)))
            for n, rate in ((0, 1000.0), (1, 1500.0))
        )
        prior = stats.PRIORS["cpu"]
        compared = Comparison(JUDGING, [own, other])
        (view,) = _by_launches(other, compared, SimpleNamespace(baseline=own.config), prior)  # type: ignore[arg-type]
        return view.se

    assert error(0.01) == pytest.approx(0.05 * math.sqrt(2)) and error(0.3) > 1.5 * error(0.01)
