"""Proposals of Optuna's samplers, restricted to legal and new configurations."""

from __future__ import annotations

from itertools import islice

import optuna
import pytest
from optuna.trial import TrialState

from autotune.base.errors import UnknownNameError
from autotune.base.records import Config, TrialStatus, Value
from autotune.samplers import LegalSampler, make_sampler
from autotune.samplers.sampler import CompleteView, distributions, suggest, tell
from autotune.space import Choice, Lessons, Space, canonical, key
from tests.support import PLAIN

#: Optuna's own samplers. Its GP takes seconds for a proposal.
OPTUNAS = ("tpe", "tpe-multivariate", "random")
#: Above this batch size, fp32 configurations run out of memory on the simulated machine.
FITS = 64
BASELINE: dict[str, Value] = {**PLAIN, "optimizer_impl": "for-loop", "intra_op_threads": 2}


def choices(*values: Value, **refused: str) -> tuple[Choice, ...]:
    return (*(Choice(v) for v in values), *(Choice(v, why) for v, why in refused.items()))


def cpu_space(**changes: tuple[Choice, ...]) -> Space:
    """A typical space on two cores, with about 2,000 configurations."""
    knobs = {
        "precision": choices("fp32", "bf16", fp16="needs a CUDA device", tf32="needs a CUDA device"),
        "compile_mode": choices("off", "default", **{"reduce-overhead": "needs a CUDA device"}),
        "batch_size": choices(16, 32, 64, 128, 2048),
        "memory_format": choices("contiguous", "channels_last"),
        "num_workers": choices(0, 1, 2, 4, 8),
        "prefetch_factor": choices(2, 4, 8),
        "persistent_workers": choices(False, True),
        "optimizer_impl": choices("for-loop", "foreach", "fused"),
        "intra_op_threads": choices(1, 2),
        **changes,
    }
    return Space(
        knobs,
        {"pin_memory": "needs a CUDA device"},
        BASELINE,
        dataset_samples=1024,
        sample_bytes=2**18,
        shm_bytes=2**30,
        memory_bytes=2**33,
    )


class Searched:
    """A search on a simulated machine that records the proposals."""

    def __init__(self, space: Space, sampler: str, seed: int = 0) -> None:
        self.space = space
        self.tried: set[str] = set()
        self.lessons = Lessons()
        self.sampler = LegalSampler(make_sampler(sampler, seed), space, self.acceptable, seed=seed)
        self.study = optuna.create_study(direction="maximize", sampler=self.sampler)

    def acceptable(self, config: Config) -> bool:
        return (
            key(config) not in self.tried and self.space.refusal(config) is None and not self.lessons.rule_out(config)
        )

    def ask(self) -> tuple[optuna.Trial, dict[str, Value]]:
        trial = self.study.ask()
        return trial, suggest(trial, self.space)

    def launch(self, trial: optuna.Trial, config: dict[str, Value]) -> TrialStatus:
        self.tried.add(key(config))
        if int(config["batch_size"]) > FITS and config["precision"] == "fp32":
            self.lessons.learn(TrialStatus.OOM, config)
            tell(self.study, trial, TrialStatus.OOM, scores=(), rate_seen_per_s=None)
            return TrialStatus.OOM
        tell(self.study, trial, TrialStatus.COMPLETE, scores=(rate(config),), rate_seen_per_s=None)
        return TrialStatus.COMPLETE


def rate(config: Config) -> float:
    gain = 1.6 if config["precision"] == "bf16" else 1.0
    gain *= 1.3 if config["memory_format"] == "channels_last" else 1.0
    return 30 * gain * (1 + 0.05 * int(config["num_workers"])) * int(config["intra_op_threads"])


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


class TestSampler:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", [*OPTUNAS, "grid"])
    def test_forty_asks_are_legal_new_and_never_ruled_out(self, name: str) -> None:
        searched = Searched(cpu_space(), name)
        ends = set()
        for _ in range(40):
            trial, config = searched.ask()
            assert canonical(config) == config
            assert searched.space.refusal(config) is None
            assert key(config) not in searched.tried
            assert not searched.lessons.rule_out(config)
            ends.add(searched.launch(trial, config))
        # Both kinds of failure occurred, so there was something to learn; the grid reaches large batches late.
        assert name == "grid" or ends == {TrialStatus.COMPLETE, TrialStatus.OOM}

    @pytest.mark.parametrize("name", [*OPTUNAS, "grid"])
    def test_a_space_is_exhausted_without_repeats(self, name: str) -> None:
        tiny = {
            "batch_size": choices(16, 32),
            "num_workers": choices(0, 1),
            "prefetch_factor": choices(2, 4),
            "precision": choices("fp32"),
            "memory_format": choices("contiguous"),
            "intra_op_threads": choices(2),
        }
        searched = Searched(Space(tiny, {}, {n: BASELINE[n] for n in tiny if n in BASELINE}), name)
        everything = {key(config) for config in searched.space.grid()}
        assert len(everything) == 2 * 3
        while searched.sampler.reason_to_end(searched.study) is None:
            assert len(searched.tried) < len(everything)
            trial, config = searched.ask()
            assert key(config) not in searched.tried
            searched.launch(trial, config)
        assert searched.tried == everything

    def test_the_only_legal_configuration_is_found(self) -> None:
        loader = {"num_workers": 4, "prefetch_factor": 8, "persistent_workers": True}
        wanted = key({**BASELINE, "precision": "bf16", **loader})
        space = cpu_space()
        sampler = LegalSampler(make_sampler("random", 0), space, lambda config: key(config) == wanted, seed=0)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        assert key(suggest(study.ask(), space)) == wanted

    def test_enqueued_configurations_come_first_and_unchanged(self) -> None:
        searched = Searched(cpu_space(), "tpe")
        wanted = {**BASELINE, "num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
        searched.study.enqueue_trial(BASELINE)
        searched.study.enqueue_trial(wanted)
        assert [searched.ask()[1] for _ in range(2)] == [BASELINE, wanted]

    def test_tpe_learns(self) -> None:
        def mean_of(name: str) -> float:
            searched = Searched(cpu_space(), name, seed=3)
            found = []
            for _ in range(60):
                trial, config = searched.ask()
                if searched.launch(trial, config) is TrialStatus.COMPLETE:
                    found.append(rate(config))
            return sum(found[-15:]) / 15

        assert mean_of("tpe-multivariate") > 1.3 * mean_of("random")

    @pytest.mark.parametrize("name", OPTUNAS)
    def test_proposals_depend_on_the_seed_only(self, name: str) -> None:
        def first(seed: int) -> list[dict[str, Value]]:
            searched = Searched(cpu_space(), name, seed)
            found = []
            for _ in range(4):
                trial, config = searched.ask()
                searched.launch(trial, config)
                found.append(config)
            return found

        assert first(1) == first(1) != first(2)

    def test_the_grid_is_searched_in_order(self) -> None:
        searched = Searched(cpu_space(batch_size=choices(16, 32)), "grid")
        found = []
        for _ in range(5):
            trial, config = searched.ask()
            searched.launch(trial, config)
            found.append(config)
        assert found == list(islice(searched.space.grid(), 5))

    @pytest.mark.slow
    def test_gaussian_process_proposals_are_legal(self) -> None:
        searched = Searched(cpu_space(), "gp")
        for _ in range(12):
            trial, config = searched.ask()
            assert searched.acceptable(config)
            searched.launch(trial, config)

    def test_a_sampler_of_complete_trials_learns_of_the_others_too(self) -> None:
        searched = Searched(cpu_space(), "random")
        view = CompleteView(searched.space)
        ends = [
            (TrialStatus.OOM, None, None),  # nothing has been measured that it could be as slow as
            (TrialStatus.COMPLETE, 50.0, None),
            (TrialStatus.PRUNED, None, 20.0),
            (TrialStatus.OOM, None, None),
            (TrialStatus.CRASHED, None, None),
            (TrialStatus.COMPLETE, 60.0, None),
        ]
        for status, score, seen in ends:
            trial, _ = searched.ask()
            tell(searched.study, trial, status, scores=() if score is None else (score,), rate_seen_per_s=seen)
            view.of(searched.study)
        told = view.of(searched.study).get_trials()
        assert [t.value for t in told] == [50.0, 20.0, 20.0, 60.0]
        assert {t.state for t in told} == {TrialState.COMPLETE}
        assert [t.params for t in told] == [searched.study.trials[i].params for i in (1, 2, 3, 5)]
        assert searched.study.trials[3].values is None

    def test_an_unknown_sampler(self) -> None:
        with pytest.raises(UnknownNameError, match="sampler") as caught:
            make_sampler("tpee", 0)
        assert "tpe" in caught.value.closest


class TestTranslate:
    def test_a_baseline_outside_the_space_can_be_reported(self) -> None:
        space = cpu_space(batch_size=choices(64, 128), precision=choices("bf16"))
        found = distributions(space)
        assert found["batch_size"].choices == (32, 64, 128)
        assert found["precision"].choices == ("fp32", "bf16")
        assert "fp16" not in distributions(cpu_space())["precision"].choices

    def test_true_and_one_are_different_values(self) -> None:
        space = Space({"workload.x": choices(1, 2)}, {}, {"workload.x": True})
        assert [type(v) for v in distributions(space)["workload.x"].choices] == [bool, int, int]

    def test_inactive_knobs_are_not_suggested(self) -> None:
        searched = Searched(cpu_space(), "random")
        searched.study.enqueue_trial(BASELINE)
        trial, config = searched.ask()
        assert not {"prefetch_factor", "persistent_workers"} & (config.keys() | trial.params.keys())

    @pytest.mark.parametrize("status", TrialStatus)
    def test_every_status_has_a_state(self, status: TrialStatus) -> None:
        searched = Searched(cpu_space(), "random")
        trial, _ = searched.ask()
        score = 5.0 if status is TrialStatus.COMPLETE else None
        tell(
            searched.study,
            trial,
            status,
            scores=() if score is None else (score,),
            rate_seen_per_s=2.5 if status is TrialStatus.PRUNED else None,
        )
        (frozen,) = searched.study.get_trials()
        told = {
            "complete": TrialState.COMPLETE,
            **dict.fromkeys(("pruned", "oom", "host_oom", "shm_exhausted"), TrialState.PRUNED),
            **dict.fromkeys(("compile_failed", "diverged", "timeout", "hang"), TrialState.PRUNED),
            **dict.fromkeys(("crashed", "killed", "loader_worker_died"), TrialState.FAIL),
            **dict.fromkeys(("interrupted", "user_error"), TrialState.FAIL),
        }
        assert frozen.state is told[status]
        violated = told[status] is TrialState.PRUNED and status is not TrialStatus.PRUNED
        assert [v > 0 for v in frozen.constraints.values()] == [violated]
        assert frozen.intermediate_values == ({1: 2.5} if status is TrialStatus.PRUNED else {})
        # No sentinel: only complete trials have a value.
        assert (frozen.values is not None) == (status is TrialStatus.COMPLETE) or status is TrialStatus.PRUNED
