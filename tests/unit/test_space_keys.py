"""Canonical keys, and the spelling of values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.errors import UnknownNameError, UsageError
from autotune.base.records import Value
from autotune.knobs import KNOBS, spell
from autotune.space import canonical, environment, key, parse_value

from .configurations import configs


class TestCanonicalKey:
    def test_without_workers_their_settings_are_dropped(self) -> None:
        config = {"num_workers": 0, "prefetch_factor": 4, "persistent_workers": True, "batch_size": 8}
        assert canonical(config) == {"batch_size": 8, "num_workers": 0}

    def test_with_workers_their_settings_are_kept(self) -> None:
        config = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
        assert canonical(config) == config

    def test_the_order_is_the_contracts_with_workload_knobs_last(self) -> None:
        shuffled: dict[str, Value] = {"workload.b": 1, "alloc_conf": "default", "workload.a": 1, "precision": "fp32"}
        assert list(canonical(shuffled)) == ["precision", "alloc_conf", "workload.a", "workload.b"]

    @given(configs, st.randoms(use_true_random=False))
    def test_keys_ignore_order_and_inactive_knobs(self, config: dict[str, Value], rng: Any) -> None:
        names = list(config)
        rng.shuffle(names)
        assert key({n: config[n] for n in names}) == key(config)
        assert key(canonical(config)) == key(config)
        assert canonical(canonical(config)) == canonical(config)

    @given(configs, configs)
    def test_keys_are_equal_only_for_configurations_that_run_the_same(
        self, a: dict[str, Value], b: dict[str, Value]
    ) -> None:
        assert (key(a) == key(b)) == (canonical(a) == canonical(b))

    def test_true_is_not_one(self) -> None:
        assert key({"workload.x": True}) != key({"workload.x": 1})


class TestParseValue:
    @pytest.mark.parametrize("name", KNOBS)
    def test_a_spelled_value_is_read_back(self, name: str) -> None:
        knob = KNOBS[name]
        for value in knob.values if knob.values is not None else (knob.minimum, 7, knob.maximum):
            found = parse_value(name, spell(value))
            assert found == value and type(found) is type(value)

    def test_an_unknown_knob_suggests_the_closest(self) -> None:
        with pytest.raises(UnknownNameError) as caught:
            parse_value("batchsize", "8")
        assert "batch_size" in caught.value.closest

    def test_an_unknown_value_lists_the_choices(self) -> None:
        with pytest.raises(UnknownNameError, match="precision") as caught:
            parse_value("precision", "fp8")
        assert all(v in str(caught.value.advice) for v in ("fp32", "tf32", "bf16", "fp16"))

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("batch_size", "0"),
            ("batch_size", "-4"),
            ("num_workers", "-1"),
            ("prefetch_factor", "0"),
            ("intra_op_threads", "0"),
            ("batch_size", "many"),
            ("batch_size", "8.5"),
            ("batch_size", ""),
        ],
    )
    def test_invalid_numbers(self, name: str, text: str) -> None:
        with pytest.raises(UsageError, match=name):
            parse_value(name, text)

    def test_a_workload_knob_stays_text_until_its_values_are_known(self) -> None:
        assert parse_value("workload.depth", "3") == "3"
        assert parse_value("workload.depth", "3", {"depth": (1, 3)}) == 3
        assert parse_value("workload.blur", "true", {"blur": (False, True)}) is True
        with pytest.raises(UnknownNameError):
            parse_value("workload.depth", "5", {"depth": (1, 3)})
        with pytest.raises(UnknownNameError) as caught:
            parse_value("workload.dept", "3", {"depth": (1, 3)})
        assert caught.value.closest == ("workload.depth",)
        assert parse_value("workload.blur", "True", {"blur": (False, True)}) is True
        with pytest.raises(UnknownNameError) as caught:
            parse_value("workload.depth", "3", {})
        assert caught.value.advice == "it declares none: KNOBS in its file would."


def test_the_allocator_is_set_by_both_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert environment({"batch_size": 8}) == environment({"alloc_conf": "default"}) == {}
    found = environment({"alloc_conf": "expandable_segments"})
    assert set(found.values()) == {"expandable_segments:True"} and len(found) == 2
