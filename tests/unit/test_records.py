"""Records that cross process boundaries: they survive JSON unchanged, and refuse anything else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.base.records import (
    INFEASIBLE,
    DataRef,
    Fingerprint,
    LaunchKind,
    Measurement,
    Phase,
    PhaseLimits,
    Probe,
    Record,
    StudySpec,
    Trial,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Window,
    WorkloadRef,
)

MEASUREMENT = Measurement(
    batch_size=32,
    samples_per_s=61.5,
    ci95_per_s=(60.0, 63.0),
    steady_per_s=61.6,
    windows=(Window(steps=2, samples=64, seconds=1.04),),
    step_s=(0.5, 0.54),
    wait_s=(0.01, 0.02),
    device_s=(0.49, 0.52),
    startup_s=1.0,
    compile_s=0.7,
    warmup_s=1.1,
    measured_s=1.04,
    loader_wait_fraction=0.03,
    epoch_samples=1024,
)
SPEC = TrialSpec(
    kind=LaunchKind.MEASURE,
    launch="00003",
    number=3,
    folder="/studies/s/trials/00003",
    workload=WorkloadRef(name="net", path="/net.py", module="net"),
    data=DataRef(kind="none"),
    config={"batch_size": 32, "num_workers": 0},
    batch_size=32,
)
RESULT = TrialResult(launch="00003", status=TrialStatus.COMPLETE, measurement=MEASUREMENT, phase_s={"load": 0.5})
STUDY = StudySpec(name="s", mark="m", created="2026-01-01T00:00:00+00:00", model="net.py")
RECORDS: list[Record] = [
    MEASUREMENT,
    SPEC,
    RESULT,
    STUDY,
    Trial(number=3, config=SPEC.config, result=RESULT, score=61.5),
]

finite = st.floats(allow_nan=False, allow_infinity=False)
knob_values = st.booleans() | st.integers(-(10**12), 10**12) | finite | st.text(max_size=8)
configs = st.dictionaries(st.text(min_size=1, max_size=8), knob_values, max_size=6)


def same(a: object, b: object) -> bool:
    """Equal, with equal types at every level: ``True`` is not ``1``."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
class TestEveryRecord:
    def test_survives_json(self, record: Record) -> None:
        assert type(record).model_validate_json(record.model_dump_json()) == record

    def test_is_frozen(self, record: Record) -> None:
        name = next(iter(type(record).model_fields))
        with pytest.raises(ValidationError):
            setattr(record, name, getattr(record, name))

    def test_refuses_an_unknown_key(self, record: Record) -> None:
        with pytest.raises(ValidationError, match="surprise"):
            type(record).model_validate({**record.model_dump(), "surprise": 1})

    def test_refuses_a_truncated_file(self, record: Record) -> None:
        text = record.model_dump_json()
        for length in range(0, len(text), max(1, len(text) // 40)):
            with pytest.raises(ValidationError):
                type(record).model_validate_json(text[:length])

    def test_refuses_a_missing_field(self, record: Record) -> None:
        for name, info in type(record).model_fields.items():
            if info.is_required():
                with pytest.raises(ValidationError, match=name):
                    type(record).model_validate({k: v for k, v in record.model_dump().items() if k != name})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinite_numbers_and_nan_are_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        Measurement.model_validate({**MEASUREMENT.model_dump(), "samples_per_s": value})
    text = MEASUREMENT.model_dump_json().replace("61.5", json.dumps(value), 1)
    with pytest.raises(ValidationError):
        Measurement.model_validate_json(text)


@given(configs)
def test_a_configuration_keeps_its_types(config: dict[str, Any]) -> None:
    spec = SPEC.model_copy(update={"config": config})
    assert same(TrialSpec.model_validate_json(spec.model_dump_json()).config, config)


def test_every_phase_has_a_limit() -> None:
    limits = PhaseLimits(load_s=1, build_s=2, compile_s=3, warmup_s=4, measure_s=5)
    assert [limits.of(phase) for phase in Phase] == [1, 2, 3, 4, 5]


def test_a_transient_status_is_not_infeasible() -> None:
    others = set(TrialStatus) - INFEASIBLE
    assert others == {
        TrialStatus.COMPLETE,
        TrialStatus.PRUNED,
        TrialStatus.CRASHED,
        TrialStatus.KILLED,
        TrialStatus.LOADER_WORKER_DIED,
        TrialStatus.INTERRUPTED,
        TrialStatus.USER_ERROR,
    }


@pytest.mark.parametrize("change", [{"budget_s": 0}, {"trials": 0}, {"batch_size": 0}, {"memory_limit_bytes": 0}])
def test_a_request_with_a_zero_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        StudySpec.model_validate({**STUDY.model_dump(), **change})


def test_a_trials_rate_is_measured_or_seen_or_unknown() -> None:
    def rate(result: TrialResult) -> float | None:
        return Trial(number=0, config={}, result=result).rate_per_s

    assert rate(RESULT) == 61.5
    assert rate(TrialResult(launch="x", status=TrialStatus.PRUNED, rate_seen_per_s=12.0)) == 12.0
    assert rate(TrialResult(launch="x", status=TrialStatus.OOM)) is None


class TestFingerprint:
    def test_ignores_order_and_which_card_of_a_model_it_is(self) -> None:
        one = Fingerprint(values={"cores": 2, "gpu": "A"}, device_uuid="GPU-1")
        two = Fingerprint(values={"gpu": "A", "cores": 2}, device_uuid="GPU-2")
        assert one.differences(two) == [] and one.values == two.values
        assert one.model_dump_json(exclude={"device_uuid"}) == two.model_dump_json(exclude={"device_uuid"})

    def test_names_both_sides_of_each_difference(self) -> None:
        one = Fingerprint(values={"cores": 2, "driver": None, "torch": "2.15"})
        two = Fingerprint(values={"cores": 4, "torch": "2.15", "mig": True})
        assert one.differences(two) == [("cores", "2", "4"), ("driver", "None", "absent"), ("mig", "absent", "True")]

    @given(configs, configs)
    def test_is_symmetric(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        one, two = Fingerprint(values=a), Fingerprint(values=b)
        assert [(n, y, x) for n, x, y in one.differences(two)] == two.differences(one)
        assert bool(one.differences(two)) == (one.values != two.values)
        assert Fingerprint.model_validate_json(one.model_dump_json()).differences(one) == []


def test_a_probe_keeps_the_types_of_workload_knobs() -> None:
    fields = {name: None for name, info in Probe.model_fields.items() if info.is_required()}
    texts = dict.fromkeys(fields, "x")
    flags = dict.fromkeys(("native_bf16", "tf32", "cudagraphs", "varying_shapes", "has_images"), False)
    numbers = dict.fromkeys(
        (
            *("device_memory_bytes", "cores", "default_batch_size", "default_image_size", "cpu_image_size"),
            *("parameters", "dataset_samples", "sample_bytes"),
        ),
        1,
    )
    knobs = {"mixed": (False, 1, 1.0, "off")}
    data = {**texts, **flags, **numbers, "optimizer_impls": ("fused",), "workload_knobs": knobs}
    probe = Probe.model_validate(data)
    back = Probe.model_validate_json(probe.model_dump_json())
    assert [type(v) for v in back.workload_knobs["mixed"]] == [bool, int, float, str]
