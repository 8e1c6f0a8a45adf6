"""Lessons of a failure: a configuration that is ruled out has no difference that could help."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.records import INFEASIBLE, Config, TrialStatus, Value
from autotune.knobs import KNOBS, Scope
from autotune.space import Lessons

from .configurations import configs

LOADER: Mapping[str, Value] = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": False}
FAILED: Mapping[str, Value] = {
    "precision": "bf16",
    "compile_mode": "default",
    "batch_size": 64,
    "memory_format": "contiguous",
    **LOADER,
    "optimizer_impl": "for-loop",
    "intra_op_threads": 2,
    "workload.depth": 2,
}
OTHER: dict[str, Value] = {
    "precision": "fp32",
    "compile_mode": "off",
    "memory_format": "channels_last",
    "optimizer_impl": "fused",
    "workload.depth": 3,
}


def rules_out(status: TrialStatus, failed: Config, config: Config) -> bool:
    lessons = Lessons()
    lessons.learn(status, failed)
    return lessons.rule_out(config)


def teaches(status: TrialStatus, **changes: Value) -> bool:
    return rules_out(status, FAILED, {**FAILED, **changes})


@pytest.mark.parametrize("status", sorted(INFEASIBLE))
@given(config=configs)
def test_an_infeasible_configuration_rules_itself_out(status: TrialStatus, config: dict[str, Value]) -> None:
    assert rules_out(status, config, config)


@pytest.mark.parametrize("status", [s for s in TrialStatus if s not in INFEASIBLE])
@given(config=configs)
def test_a_failure_with_another_cause_teaches_nothing(status: TrialStatus, config: dict[str, Value]) -> None:
    assert not rules_out(status, config, config)


@pytest.mark.parametrize("status", [TrialStatus.TIMEOUT, TrialStatus.HANG])
def test_a_timeout_rules_out_only_itself(status: TrialStatus) -> None:
    for name, value in {**OTHER, "batch_size": 128, "num_workers": 4, "intra_op_threads": 1}.items():
        assert not teaches(status, **{name: value})


@given(st.lists(st.tuples(st.sampled_from([*INFEASIBLE]), configs), max_size=6), configs)
def test_several_failures_rule_out_what_each_of_them_does(
    failures: list[tuple[TrialStatus, dict[str, Value]]], config: dict[str, Value]
) -> None:
    lessons = Lessons()
    for status, failed in failures:
        lessons.learn(status, failed)
    assert lessons.rule_out(config) == any(rules_out(status, failed, config) for status, failed in failures)


class TestOutOfMemory:
    def test_a_larger_batch_with_any_loader_is_ruled_out(self) -> None:
        assert teaches(TrialStatus.OOM, batch_size=65)
        assert teaches(TrialStatus.OOM, num_workers=0, intra_op_threads=1)

    def test_a_smaller_batch_may_fit(self) -> None:
        assert not teaches(TrialStatus.OOM, batch_size=63)

    @pytest.mark.parametrize("name", OTHER)
    def test_a_change_that_affects_memory_may_fit(self, name: str) -> None:
        assert not teaches(TrialStatus.OOM, **{name: OTHER[name], "batch_size": 128})

    def test_fewer_workers_may_fit_into_host_memory(self) -> None:
        assert teaches(TrialStatus.HOST_OOM, num_workers=4) and teaches(TrialStatus.HOST_OOM, batch_size=128)
        assert not teaches(TrialStatus.HOST_OOM, num_workers=1)
        assert not teaches(TrialStatus.HOST_OOM, prefetch_factor=2)

    @given(configs, configs, st.integers(1, 64))
    def test_a_larger_batch_never_helps(self, failed: dict[str, Value], config: dict[str, Value], more: int) -> None:
        for status in (TrialStatus.OOM, TrialStatus.HOST_OOM, TrialStatus.COMPILE_FAILED, TrialStatus.SHM_EXHAUSTED):
            if rules_out(status, failed, config) and int(config.get("num_workers", 0)):
                assert rules_out(status, failed, {**config, "batch_size": int(config["batch_size"]) + more})


class TestSharedMemory:
    """2 workers with 3 + 1 batches of 64 samples did not fit: 512 samples."""

    @pytest.mark.parametrize(
        ("workers", "prefetch", "batch", "hopeless"),
        [
            (2, 3, 64, True),
            (4, 3, 64, True),
            (4, 3, 32, True),  # a smaller batch with more workers gives an equal queue
            (1, 7, 64, True),
            (4, 3, 31, False),
            (2, 2, 64, False),
            (1, 3, 64, False),
            (1, 3, 128, True),
        ],
    )
    def test_depends_on_workers_times_prefetch_times_batch(
        self, workers: int, prefetch: int, batch: int, hopeless: bool
    ) -> None:
        changes: dict[str, Value] = {"num_workers": workers, "prefetch_factor": prefetch, "batch_size": batch}
        assert teaches(TrialStatus.SHM_EXHAUSTED, **changes) is hopeless

    def test_does_not_depend_on_the_device(self) -> None:
        assert teaches(TrialStatus.SHM_EXHAUSTED, precision="fp32", compile_mode="off", optimizer_impl="fused")

    def test_without_workers_there_is_no_queue(self) -> None:
        assert not teaches(TrialStatus.SHM_EXHAUSTED, num_workers=0, batch_size=4096)

    def test_other_samples_may_be_smaller(self) -> None:
        assert not teaches(TrialStatus.SHM_EXHAUSTED, **{"workload.depth": 3})


class TestCompiler:
    def test_no_loader_helps_and_no_larger_batch(self) -> None:
        assert teaches(TrialStatus.COMPILE_FAILED, num_workers=8, prefetch_factor=2, persistent_workers=True)
        assert teaches(TrialStatus.COMPILE_FAILED, intra_op_threads=1, optimizer_impl="fused")
        assert teaches(TrialStatus.COMPILE_FAILED, batch_size=128)

    @pytest.mark.parametrize(
        "change", [{n: OTHER[n]} for n in ("precision", "compile_mode", "memory_format", "workload.depth")]
    )
    def test_another_model_to_the_compiler_may_work(self, change: dict[str, Value]) -> None:
        assert not teaches(TrialStatus.COMPILE_FAILED, **change)

    @pytest.mark.parametrize("change", [{n: OTHER[n]} for n in ("precision", "memory_format", "workload.depth")])
    def test_nothing_compiles_on_a_machine_that_cannot(self, change: dict[str, Value]) -> None:
        lessons = Lessons()
        lessons.learn(TrialStatus.COMPILE_FAILED, FAILED, cannot_compile=True)
        assert lessons.rule_out({**FAILED, **change, "compile_mode": "max-autotune", "batch_size": 1})
        assert not lessons.rule_out({**FAILED, "compile_mode": "off"})

    def test_smaller_kernels_may_work(self) -> None:
        assert not teaches(TrialStatus.COMPILE_FAILED, batch_size=32)


class TestDiverged:
    def test_the_loader_and_the_process_do_not_change_the_arithmetic(self) -> None:
        for name, knob in KNOBS.items():
            if knob.scope in (Scope.LOADER, Scope.PROCESS):
                assert teaches(TrialStatus.DIVERGED, **{name: knob.values[-1] if knob.values else 7})

    def test_arithmetic_that_has_trained_is_not_the_cause(self) -> None:
        lessons = Lessons()
        lessons.learn(TrialStatus.COMPLETE, FAILED)
        lessons.learn(TrialStatus.DIVERGED, {**FAILED, "num_workers": 7})
        assert lessons.rule_out({**FAILED, "num_workers": 7}) and not lessons.rule_out({**FAILED, "num_workers": 6})

    @pytest.mark.parametrize("change", [*({n: v} for n, v in OTHER.items()), {"batch_size": 65}, {"batch_size": 63}])
    def test_other_arithmetic_may_train(self, change: dict[str, Value]) -> None:
        assert not teaches(TrialStatus.DIVERGED, **change)


def test_what_trains_wrongly_rules_out_all_that_compute_alike() -> None:
    wrong = {"precision": "bf16", "memory_format": "channels_last", "batch_size": 32, "num_workers": 0}
    lessons = Lessons()
    lessons.learn_wrong(wrong)
    for alike in ({"batch_size": 64}, {"num_workers": 4}, {}):
        assert lessons.is_wrong({**wrong, **alike}) and lessons.rule_out({**wrong, **alike})
    for other in ({"precision": "fp32"}, {"memory_format": "contiguous"}, {"workload.kernel": "b"}):
        assert not lessons.rule_out({**wrong, **other})


#: Other than what failed in all but the workload's own knobs.
OTHERWISE = {**OTHER, "workload.depth": FAILED["workload.depth"]}


@pytest.mark.parametrize("knob", ["precision", "memory_format"])
def test_a_refused_value_rules_out_all_that_have_it(knob: str) -> None:
    lessons = Lessons()
    failed = {**FAILED, "memory_format": "channels_last"}
    lessons.learn(TrialStatus.USER_ERROR, failed, refuses=knob)
    assert lessons.rule_out({**OTHERWISE, "batch_size": 8, knob: failed[knob]})
    assert not lessons.rule_out({**OTHERWISE, "batch_size": 8, knob: "fp32" if knob == "precision" else "contiguous"})
    assert not lessons.rule_out({**failed, "workload.depth": 3})


def test_what_has_run_is_not_refused() -> None:
    lessons = Lessons()
    laid_out = {**FAILED, "memory_format": "channels_last"}
    lessons.learn(TrialStatus.COMPLETE, laid_out)
    lessons.learn(TrialStatus.USER_ERROR, {**laid_out, **OTHERWISE}, refuses="memory_format")
    lessons.learn(TrialStatus.USER_ERROR, {**laid_out, "precision": "fp32"}, refuses="memory_format")
    assert not lessons.rule_out({**laid_out, "batch_size": 16})
