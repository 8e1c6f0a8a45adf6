"""Settings of the whole process, and that they are undone. Over all knobs: a new one that is not undone fails here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autotune import Applied
from autotune.knobs import KNOBS, Knob
from autotune.space import environment
from autotune.training.process_settings import process
from tests.support import make_profile

#: The switches of PyTorch that any knob might set.
SWITCHES = {
    "threads": torch.get_num_threads,
    "matmul": torch.get_float32_matmul_precision,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "environment": lambda: dict(os.environ),
}
BEFORE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTORCH_ALLOC_CONF": "backend:native"}


def state(knob: Knob) -> dict[str, Any]:
    return {**{name: read() for name, read in SWITCHES.items()}, knob.name: knob.read_process()}


def other_values(knob: Knob) -> list[Any]:
    return list(knob.values or (1, torch.get_num_threads() + 1))


@pytest.fixture(autouse=True)
def _environment_of_a_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in BEFORE.items():
        monkeypatch.setenv(name, value)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("knob", KNOBS.values(), ids=KNOBS)
def test_every_knob_leaves_the_process_as_it_was(knob: Knob) -> None:
    before, changed = state(knob), False
    for value in other_values(knob):
        with process({knob.name: value}):
            changed |= state(knob) != before
        assert state(knob) == before
    acts = type(knob).apply_process is not Knob.apply_process
    assert acts == (type(knob).restore_process is not Knob.restore_process)
    assert acts == (type(knob).read_process is not Knob.read_process)
    assert changed == (acts or any(environment({knob.name: value}) for value in other_values(knob)))


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="switches by backend came with PyTorch 2.9")
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_precision_that_the_user_has_set_by_backend_is_kept(precision: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        found = KNOBS["precision"].read_process()
        with process({"precision": precision}):
            assert KNOBS["precision"].is_in_force(torch.nn.Module(), None, precision)  # type: ignore[arg-type]
        assert KNOBS["precision"].read_process() == found
        assert matmul.fp32_precision == "tf32" and torch.backends.mkldnn.matmul.fp32_precision == found[1]
    finally:
        matmul.fp32_precision = before


def test_without_with_it_stays() -> None:
    threads = torch.get_num_threads()
    set_ = process({"intra_op_threads": threads + 1, "deterministic": True})
    assert torch.get_num_threads() == threads + 1
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_.restore()
    assert torch.get_num_threads() == threads and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_what_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(KNOBS["alloc_conf"], "apply_process", lambda value: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        process({"intra_op_threads": threads + 1, "alloc_conf": "expandable_segments"})
    assert torch.get_num_threads() == threads and os.environ["PYTORCH_ALLOC_CONF"] == "backend:native"


def test_a_profile_of_a_training_that_fails_is_undone_too() -> None:
    threads = torch.get_num_threads()
    config = {"batch_size": 8, "intra_op_threads": threads + 1}
    applied = Applied(make_profile(configuration=config), "cpu")
    with contextlib.suppress(ZeroDivisionError), applied.process():
        assert torch.get_num_threads() == threads + 1
        _ = 1 / 0
    assert torch.get_num_threads() == threads
