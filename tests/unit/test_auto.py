"""The auto sampler: its proposals are legal, new, fit, and depend only on the seed; and what it learns."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from autotune.base.records import Config, Measurement, Phase, Trial, TrialResult, TrialStatus, Value
from autotune.knobs import KNOBS
from autotune.samplers import AutoSampler, Experience
from autotune.samplers.auto.posterior import POOL
from autotune.samplers.sampler import RECORD, distributions, suggest, tell
from autotune.space import Lessons, Space, canonical, key
from autotune.study.history import finished
from tests.support import make_measurement

from .test_search import BASELINE, choices, cpu_space

Script = Callable[[Config], tuple[TrialStatus, Measurement | None]]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def some_of(*values: Value) -> st.SearchStrategy[list[Value]]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True)


offers = st.fixed_dictionaries(
    {
        "precision": some_of("fp32", "tf32", "bf16", "fp16"),
        "compile_mode": some_of("off", "default", "reduce-overhead", "max-autotune"),
        "batch_size": some_of(8, 16, 32, 64, 4096),
        "memory_format": some_of("contiguous", "channels_last"),
        "num_workers": some_of(0, 1, 2, 4, 64),
        "prefetch_factor": some_of(2, 4, 8),
        "persistent_workers": some_of(False, True),
        "optimizer_impl": some_of("for-loop", "foreach", "fused"),
    },
    optional={
        "intra_op_threads": some_of(1, 2, 4),
        "pin_memory": some_of(False, True),
        "cudnn_benchmark": some_of(False, True),
        "workload.depth": some_of(1, 2, 3),
    },
)


def space_of(offered: dict[str, list[Value]]) -> Space:
    # In the order of real spaces.
    order = list(KNOBS)
    offered = dict(sorted(offered.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    base = canonical({n: BASELINE.get(n, vs[0]) for n, vs in offered.items()})
    return Space(
        {n: choices(*vs) for n, vs in offered.items()},
        {},
        base,
        dataset_samples=1024,
        sample_bytes=2**18,
        shm_bytes=2**28,
        memory_bytes=2**33,
    )


def measured(config: Config, rate: float, *, loader: float = 1e6, device: float | None = None) -> Measurement:
    batch = int(config["batch_size"])
    return make_measurement(
        rate,
        batch_size=batch,
        loader_capacity_per_s=loader,
        device_per_s=device or rate,
        peak_allocated_bytes=memory(batch),
    )


def memory(batch: int) -> int:
    """A linear function of the batch size, for every combination of the other knobs."""
    return 2**27 + batch * 2**21


class Search:
    """The sampler on a simulated machine, called as in the search loop."""

    def __init__(self, space: Space, script: Script, seed: int = 0, **options: object) -> None:
        self.space, self.script, self.seed, self.options = space, script, seed, options
        self.study = optuna.create_study(direction="maximize")
        self.again()
        self.asked: list[dict[str, Value]] = []

    def again(self) -> None:
        """Start a new process: only the study is kept."""
        self.sampler = AutoSampler(self.space, seed=self.seed, **self.options)  # type: ignore[arg-type]
        self.study.sampler = self.sampler

    def one(self, config: Config | None = None) -> TrialStatus:
        if config is not None:
            self.study.enqueue_trial(dict(config))
        trial = self.study.ask()
        found = suggest(trial, self.space)
        self.asked.append(found)
        status, measurement = self.script(found)
        result = TrialResult(
            launch=f"{trial.number:05d}",
            status=status,
            measurement=measurement,
            phase_s={Phase.COMPILE: 40.0 if found.get("compile_mode", "off") != "off" else 0.5},
            wall_s=45.0 if found.get("compile_mode", "off") != "off" else 5.0,
        )
        score = measurement.samples_per_s if measurement and status is TrialStatus.COMPLETE else None
        record = Trial(number=trial.number, config=found, result=result, score=score)
        trial.set_user_attr(RECORD, record.model_dump(mode="json"))
        tell(self.study, trial, status, scores=() if score is None else (score,), rate_seen_per_s=None)
        return status

    def run(self, trials: int) -> None:
        """Run the baseline, and then proposals until the sampler stops."""
        if not self.asked:
            self.one(self.space.baseline)
        while len(self.asked) < trials and self.sampler.reason_to_end(self.study) is None:
            self.one()


def lucky(seed: int) -> Script:
    """Make a script in which any configuration may have any, but always the same, status. The first one, the baseline,
    is complete."""
    first: list[str] = []

    def script(config: Config) -> tuple[TrialStatus, Measurement | None]:
        first.append(key(config))
        rng = random.Random(f"{seed} {key(config)}")
        ends = (TrialStatus.OOM, TrialStatus.COMPILE_FAILED, TrialStatus.SHM_EXHAUSTED, TrialStatus.TIMEOUT)
        if key(config) != first[0] and rng.random() < 0.3:
            return rng.choice(ends), None
        return TrialStatus.COMPLETE, measured(config, rng.uniform(10, 100), loader=rng.uniform(10, 1000))

    return script


class TestWhatItProposes:
    @pytest.mark.slow
    @settings(max_examples=25)
    @given(offers, st.integers(0, 99))
    def test_proposals_are_legal_new_and_never_ruled_out(self, offered: dict[str, list[Value]], seed: int) -> None:
        search = Search(space_of(offered), lucky(seed), seed)
        search.run(25)
        lessons = Lessons()
        for number, config in enumerate(search.asked):
            assert canonical(config) == config
            assert config == search.space.baseline or search.space.refusal(config) is None
            assert key(config) not in {key(c) for c in search.asked[:number]}
            assert not lessons.rule_out(config), "dominated by what failed before"
            lessons.learn(search.script(config)[0], config)

    @pytest.mark.slow
    @settings(max_examples=6)
    @given(offers, st.integers(0, 99))
    def test_proposals_depend_on_the_seed_only_after_any_interruption(
        self, offered: dict[str, list[Value]], seed: int
    ) -> None:
        whole = Search(space_of(offered), lucky(seed), seed)
        whole.run(12)
        cut = Search(space_of(offered), lucky(seed), seed)
        for trials in range(1, 13):
            cut.run(trials)
            cut.again()
        assert cut.asked == whole.asked

    @pytest.mark.slow
    def test_proposals_depend_on_the_seed_only_in_a_large_space_too(self) -> None:
        offered: dict[str, list[Value]] = {f"workload.k{i}": [0, 1, 2] for i in range(4)}
        offered |= {"precision": ["fp32", "bf16", "fp16"], "batch_size": [8, 16, 32, 64]}
        offered |= {"memory_format": ["contiguous", "channels_last"], "num_workers": [0, 1, 2]}
        space = space_of(offered)
        assert len(list(space.grid())) > POOL
        whole = Search(space, lucky(0), 0)
        whole.run(15)
        cut = Search(space, lucky(0), 0)
        for trials in range(1, 16):
            cut.run(trials)
            cut.again()
        assert cut.asked == whole.asked

    def test_another_seed_gives_other_proposals(self) -> None:
        first, second = (Search(cpu_space(), lucky(0), seed) for seed in (1, 2))
        first.run(8)
        second.run(8)
        assert first.asked != second.asked

    def test_a_small_space_is_searched_completely(self) -> None:
        offered: dict[str, list[Value]] = {
            **{n: [v] for n, v in BASELINE.items()},
            "precision": ["fp32", "bf16"],
            "batch_size": [16, 32],
        }
        # Random rates: nothing can be predicted, so nothing is given up.
        search = Search(space_of(offered), lucky(3))
        search.run(100)
        assert len(search.asked) <= 4
        assert search.sampler.reason_to_end(search.study) is not None

    def test_an_interrupted_trial_changes_nothing(self) -> None:
        whole = Search(cpu_space(), lucky(5))
        whole.run(5)
        cut = Search(cpu_space(), lucky(5))
        cut.run(3)
        usual = cut.script
        cut.script = lambda config: (TrialStatus.INTERRUPTED, None)
        cut.one()
        cut.script = usual
        cut.one(cut.asked.pop())
        cut.run(5)
        assert cut.asked == whole.asked


def device_bound(config: Config) -> tuple[TrialStatus, Measurement | None]:
    """Only bf16, channels_last and two threads affect the rate; the loader never does."""
    gain = 1.7 if config["precision"] == "bf16" else 1.0
    gain *= 1.3 if config["memory_format"] == "channels_last" else 1.0
    rate = 15 * gain * int(config["intra_op_threads"])
    return TrialStatus.COMPLETE, measured(config, rate, loader=5000.0, device=rate)


def loader_bound(config: Config) -> tuple[TrialStatus, Measurement | None]:
    """Each worker delivers 30 samples/s, and the device could use 400 in any configuration."""
    workers = int(config["num_workers"])
    loader = 30.0 * max(1, workers)
    rate = min(loader, 400.0) if workers else 1 / (1 / loader + 1 / 400)
    return TrialStatus.COMPLETE, measured(config, rate, loader=loader, device=400.0)


class TestWhatRunsBeside:
    def test_it_is_never_proposed_again_and_something_else_is(self) -> None:
        search = Search(cpu_space(), lucky(0))
        search.run(5)
        running = []
        for _ in range(6):
            assert search.sampler.reason_to_end(search.study) is None
            running.append(suggest(search.study.ask(), search.space))
        every = [key(config) for config in (*search.asked, *running)]
        assert len(set(every)) == len(every)
        assert all(search.space.refusal(config) is None for config in running)

    def test_nothing_is_left_of_what_was_believed(self) -> None:
        search = Search(cpu_space(), lucky(0))
        search.run(5)
        alone = search.sampler.look(search.study).proposal
        trial = search.study.ask()
        suggest(trial, search.space)
        beside = search.sampler.look(search.study).proposal
        assert alone is not None and beside is not None and key(beside.config) != key(alone.config)
        search.study.tell(trial, state=TrialState.FAIL)
        found = search.sampler.look(search.study)
        search.again()
        assert found == search.sampler.look(search.study)


class TestWhatItLearns:
    def test_if_the_device_is_the_limit(self) -> None:
        search = Search(cpu_space(), device_bound)
        search.run(8)
        best = max(search.asked, key=lambda c: device_bound(c)[1].samples_per_s)  # type: ignore[union-attr]
        assert (best["precision"], best["memory_format"], best["intra_op_threads"]) == ("bf16", "channels_last", 2)

    def test_if_the_loader_is_the_limit(self) -> None:
        search = Search(cpu_space(), loader_bound)
        search.run(6)
        assert max(int(c["num_workers"]) for c in search.asked) == 8
        # A compiler cannot help a device that waits, and takes the most time.
        assert all(c["compile_mode"] == "off" for c in search.asked)

    def test_it_stops_if_nothing_can_be_gained(self) -> None:
        few = {"compile_mode": choices("off"), "num_workers": choices(0), "optimizer_impl": choices("for-loop")}
        search = Search(cpu_space(**few), device_bound)
        search.run(200)
        assert len(search.asked) < sum(1 for _ in search.space.grid()) == 32
        assert "expected to gain" in str(search.sampler.reason_to_end(search.study))

    def test_if_the_two_sides_explain_nothing_they_are_not_used(self) -> None:
        def crossed(config: Config) -> tuple[TrialStatus, Measurement | None]:
            # The rates of the sides are unrelated to the whole rate.
            rng = random.Random(key(config))
            _, found = device_bound(config)
            assert found is not None
            sides = {"device_per_s": rng.uniform(1, 1000), "loader_capacity_per_s": rng.uniform(1, 1000)}
            return TrialStatus.COMPLETE, found.model_copy(update=sides)

        told, crossed_ = Search(cpu_space(), device_bound), Search(cpu_space(), crossed)
        told.run(12)
        crossed_.run(12)
        assert told.sampler.belief > 0.5 > crossed_.sampler.belief
        best = max(crossed_.asked, key=lambda c: device_bound(c)[1].samples_per_s)  # type: ignore[union-attr]
        assert (best["precision"], best["intra_op_threads"]) == ("bf16", 2)

    def test_a_configuration_that_may_not_fit_is_not_tried(self) -> None:
        limit = int(1.25 * memory(64))

        def limited(config: Config) -> tuple[TrialStatus, Measurement | None]:
            batch = int(config["batch_size"])
            return (
                (TrialStatus.OOM, None)
                if memory(batch) > limit
                else (
                    TrialStatus.COMPLETE,
                    measured(config, 10 * batch**0.5),
                )
            )

        search = Search(cpu_space(), limited, capacity_bytes=limit)
        search.run(40)
        assert {limited(c)[0] for c in search.asked} == {TrialStatus.COMPLETE}
        # A configuration that just fits is found.
        assert max(int(c["batch_size"]) for c in search.asked) == 64

    def test_a_compilation_that_cannot_finish_in_time_is_not_started(self) -> None:
        search = Search(cpu_space(), device_bound, left_s=lambda: 30.0, limit_s=1000.0)
        search.run(30)
        assert {c["compile_mode"] for c in search.asked} == {"off"}

    def test_scores_that_are_not_rates(self) -> None:
        # Joules cannot be split into two sides.
        search = Search(cpu_space(), device_bound, splits=False)
        search.run(15)
        assert search.sampler.belief == 0
        best = max(search.asked, key=lambda c: device_bound(c)[1].samples_per_s)  # type: ignore[union-attr]
        assert (best["precision"], best["intra_op_threads"]) == ("bf16", 2)

    def test_a_space_of_a_hundred_thousand(self) -> None:
        wide = {f"workload.k{i}": choices(0, 1, 2) for i in range(6)}
        base = {**BASELINE, **dict.fromkeys(wide, 0)}
        space = replace(cpu_space(**wide), baseline=base)
        search = Search(space, device_bound)
        search.run(10)
        best = max(search.asked, key=lambda c: device_bound(c)[1].samples_per_s)  # type: ignore[union-attr]
        assert (best["precision"], best["memory_format"], best["intra_op_threads"]) == ("bf16", "channels_last", 2)

    def test_in_a_large_space_what_was_good_by_itself_is_combined(self) -> None:
        """Of a random sample of it, none has all that is good."""
        wide = {f"workload.k{i}": choices(0, 1, 2) for i in range(6)}
        space = replace(cpu_space(**wide), baseline={**BASELINE, **dict.fromkeys(wide, 0)})

        def each_helps(config: Config) -> tuple[TrialStatus, Measurement | None]:
            better = sum(config[name] == 1 for name in wide)
            worse = sum(config[name] == 2 for name in wide)
            return TrialStatus.COMPLETE, measured(config, 100 * 1.2**better * 0.8**worse)

        search = Search(space, each_helps)
        search.one(space.baseline)
        for name in wide:
            for value in (1, 2):
                search.one({**space.baseline, name: value})
        search.one()
        assert [search.asked[-1][name] for name in wide] == [1] * len(wide)


def test_works_as_an_optuna_sampler() -> None:
    space = cpu_space()

    def objective(trial: optuna.Trial) -> float:
        _, found = device_bound(suggest(trial, space))
        assert found is not None
        return found.samples_per_s

    study = optuna.create_study(direction="maximize", sampler=AutoSampler(space))
    study.enqueue_trial(dict(space.baseline))
    study.optimize(objective, n_trials=12)
    assert study.best_value > 2 * study.trials[0].value
    assert len({key(t.params) for t in study.trials}) == 12


def test_proposes_the_same_if_another_sampler_learns_its_trials() -> None:
    alone = Search(cpu_space(), device_bound)
    alone.run(10)
    shared = Experience()
    watched = Search(cpu_space(), device_bound, experience=shared)
    for trials in range(1, 11):
        watched.run(trials)
        for trial in finished(watched.study.get_trials()):
            shared.learn(trial)
    assert watched.asked == alone.asked
    own = Experience()
    for trial in finished(alone.study.get_trials()):
        own.learn(trial)
    assert shared.costs.line == own.costs.line


def test_configurations_given_to_try_first_are_checked_for_memory() -> None:
    limit = int(1.25 * memory(64))
    search = Search(cpu_space(), device_bound, capacity_bytes=limit)
    search.one(search.space.baseline)
    search.one({**search.space.baseline, "batch_size": 16})
    # In a process that has not proposed anything yet, as after an interruption.
    search.again()
    assert search.sampler.fits(search.study, {**search.space.baseline, "batch_size": 64})
    assert not search.sampler.fits(search.study, {**search.space.baseline, "batch_size": 2048})


@pytest.mark.parametrize("splits", [True, False])
def test_trials_of_other_samplers_that_failed_or_have_little_data(splits: bool) -> None:
    space = cpu_space()
    offered = distributions(space)
    study = optuna.create_study(direction="maximize", sampler=AutoSampler(space, splits=splits))
    partial = {"precision": "bf16"}
    told = {n: offered[n] for n in partial}
    study.add_trial(optuna.trial.create_trial(params=partial, distributions=told, value=-3.0))
    for score in (50.0, -2.0, None, None):
        trial = study.ask()
        config = suggest(trial, space)
        if score is None:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, score)
        # A failed configuration is not proposed again and again.
        assert key(suggest(study.ask(), space)) != key(config)
