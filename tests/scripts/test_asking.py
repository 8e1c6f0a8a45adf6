"""What a script does itself, and what could be set from outside: ``autotune space -- python train.py``."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from .conftest import SCRIPTS, Runner

#: What asks for the space of a script launches it.
pytestmark = pytest.mark.usefixtures("searching_here")


@pytest.fixture
def space(run: Runner):
    """``space(options, script, …)``: what the command prints, as an object."""

    def asked(*words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        ran = run.typed("space", "--json", *options, "--", *words)
        assert ran.code == 0, ran.stderr
        found = json.loads(ran.stdout)
        assert isinstance(found, dict)
        return found

    return asked


def script(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(SCRIPTS / name), *options)


def refused(found: dict[str, Any], knob: str) -> dict[Any, str | None]:
    return {choice["value"]: choice["refused"] for choice in found["knobs"][knob]["choices"]}


@pytest.mark.slow
def test_a_plain_script_can_be_set(space: Any) -> None:
    found = space(*script("train.py", "--workers", "3"))
    own = found["baseline"]
    assert (own["precision"], own["compile_mode"], own["memory_format"]) == ("fp32", "off", "contiguous")
    assert (own["batch_size"], own["num_workers"], own["prefetch_factor"]) == (8, 3, 2)
    assert (own["persistent_workers"], own["optimizer_impl"]) == (False, "for-loop")
    workers = refused(found, "num_workers")
    assert {0, 1, 2, 3, 4} <= workers.keys() and set(workers.values()) == {None}
    formats = refused(found, "memory_format")
    assert (formats["contiguous"], formats["channels_last"]) == (None, None)
    assert "no 5-dimensional weights" in formats["channels_last_3d"]
    assert refused(found, "optimizer_impl") == {"for-loop": None, "foreach": None, "fused": None}
    batches = refused(found, "batch_size")
    assert batches.pop(8) is None
    assert set(batches.values()) == {"the script's own is 8; put {batch_size} into its command"}
    modes = refused(found, "compile_mode")
    assert modes["default"] is None and modes["max-autotune"] is not None


@pytest.mark.slow
def test_what_a_script_does_itself_is_its_own(space: Any) -> None:
    found = space(*script("train.py", "--autocast", "--compile", "--stream", "--optimizer", "Adadelta"))
    own = found["baseline"]
    assert (own["precision"], own["compile_mode"], own["num_workers"]) == ("bf16", "default", 0)
    assert refused(found, "precision")["fp32"] == "the script uses autocast itself"
    assert refused(found, "precision")["bf16"] is None
    assert refused(found, "compile_mode")["off"] == "the script compiles itself"
    assert refused(found, "num_workers")[2] == (
        "an iterable data set may share its samples out by the number of workers"
    )
    assert refused(found, "num_workers")[0] is None
    assert "fused" in refused(found, "optimizer_impl") and refused(found, "optimizer_impl")["fused"] is not None


@pytest.mark.slow
def test_what_has_a_place_in_the_command_can_be_anything(space: Any) -> None:
    words = script("train.py", "--batch-size", "{batch_size}")
    found = space(*words, options=("--batch-size", "16"))
    assert found["baseline"]["batch_size"] == 16
    assert set(refused(found, "batch_size").values()) == {None}


@pytest.mark.slow
def test_a_launcher_that_asks_for_one_thread_does_not_pin_them(space: Any) -> None:
    found = space("env", "OMP_NUM_THREADS=1", *script("train.py"))
    threads = refused(found, "intra_op_threads")
    assert found["baseline"]["intra_op_threads"] == 1 and max(threads) == torch.get_num_threads()
    assert set(threads.values()) == {None}


@pytest.mark.slow
def test_samples_can_be_told(space: Any) -> None:
    found = space(*script("gan.py"), options=("--samples-per-step", "16"))
    assert found["baseline"]["batch_size"] == 16


@pytest.mark.slow
def test_what_a_script_lacks_is_inactive(space: Any) -> None:
    found = space(*script("gan.py"))
    assert found["inactive"]["num_workers"] == "no loader was seen"
    assert refused(found, "precision").keys() >= {"fp32"} and "num_workers" not in found["baseline"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "resnet50", "--", "python", "train.py"), "both --model and a command say what to train"),
        (("--data", "/tmp", "--", "python", "train.py"), "--data is for workloads"),
        (("--model", "resnet50", "--samples-per-step", "2"), "--samples-per-step is for training scripts"),
        (("--", sys.executable, "nowhere.py"), "there is no file"),
        (("--", "python", "-c", "{batch_size}"), "nothing says what {batch_size} is today"),
        (("--", sys.executable, "-c", "pass"), "the script ended and has not imported torch"),
        (("--", sys.executable, "-c", "import torch"), "no optimizer of PyTorch has taken a step"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(run: Runner, words: tuple[str, ...], message: str) -> None:
    ran = run.typed("space", *words)
    assert ran.code in (2, 4) and message in ran.stderr and "Traceback" not in ran.stderr
