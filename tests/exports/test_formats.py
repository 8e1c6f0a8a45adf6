"""The catalog of formats: what every export says, refuses and recognises, and the page."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

import autotune
from autotune.base.errors import UsageError
from autotune.base.records import Value
from autotune.knobs import KNOBS, Knob, Scope
from autotune.profile.export import FORMATS, Format, ToolFormat
from autotune.profile.export.__main__ import page
from autotune.profile.export.format import Given

from .profiles import CPU, CUDA, profile_with

FP16: dict[str, Value] = {**CUDA, "gradient_accumulation": 1}
TOOLS = {name: made for name, made in FORMATS.items() if isinstance(made, ToolFormat)}
every_format = pytest.mark.parametrize("made", FORMATS.values(), ids=FORMATS)


def said_by(made: Format, config: dict[str, Value]) -> str:
    exported = made.export(profile_with(config))
    return "\n".join((exported.text, *exported.notes))


def test_the_page_is_up_to_date() -> None:
    written = (Path(autotune.__file__).parent.parent / "docs" / "exports.md").read_text()
    assert written == page(), "write it anew: python -m autotune.profile.export > docs/exports.md"
    assert "```python" in written and "\n``python" not in written


@every_format
def test_every_format_is_described(made: Format) -> None:
    assert made.about and made.usage
    assert len(inspect.getdoc(import_module(f"autotune.profile.export.{made.name}")) or "") > 40


@pytest.mark.parametrize("made", [m for n, m in FORMATS.items() if n != "json"], ids=lambda m: m.name)
def test_every_export_says_where_it_comes_from_and_what_becomes_of_the_learning_rate(made: Format) -> None:
    said = said_by(made, FP16)
    assert "net-3" in said and "trial 17" in said and "Some device" in said and "62.3" in said
    assert "The learning rate of 0.1 usually follows: 0.3 in proportion (SGD) or 0.173 with the square root" in said
    assert "usually follows" not in said_by(made, {**FP16, "batch_size": 32})


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "lightning", "timm", "python"])
def test_fused_sgd_under_fp16_is_told_to_leave_overflows_to_the_scaler(name: str) -> None:
    assert "_step_supports_amp_scaling" in said_by(FORMATS[name], FP16)


@pytest.mark.parametrize("made", TOOLS.values(), ids=TOOLS)
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_every_value_is_told_or_named_with_what_to_do(made: Format, cuda: bool) -> None:
    for knob in KNOBS.values():
        for value in knob.values or (max(1, knob.minimum), 4):
            given = Given({"batch_size": 16, knob.name: value}, cuda)
            try:
                told = made.told(knob.name, value, given)
            except UsageError:
                continue
            assert told.lack is None or (len(told.lack) > 10 and "not known to this format" not in told.lack)


@pytest.mark.parametrize("made", [made for name, made in TOOLS.items() if name != "python"], ids=lambda m: m.name)
def test_slots_which_no_argument_of_a_loader_sets_are_named(made: Format) -> None:
    assert "batch_memory=slots" in said_by(made, {**FP16, "batch_memory": "slots"})


@every_format
def test_a_knob_that_was_added_later_is_named(made: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    class Added(Knob):
        name, about, scope, values, default = "added", "made up", Scope.PROCESS, (False, True), False

    monkeypatch.setitem(KNOBS, "added", Added())  # type: ignore[arg-type]
    said = said_by(made, {**FP16, "added": True, "workload.depth": 3})
    assert "added" in said.lower() and "depth" in said.lower()
    if made.name in TOOLS:
        assert "added=true: not known to this format; autotune.load_profile() applies it" in said
        assert "workload.depth=3: a knob of the workload" in said


@pytest.mark.parametrize("made", TOOLS.values(), ids=TOOLS)
def test_text_from_outside_stays_in_its_line(made: Format) -> None:
    exported = made.export(profile_with({**FP16, "workload.x": "a\nimport os\r\x1b[31m"}))
    assert not any(line.startswith("import os\r") or "\x1b" in line for line in exported.text.splitlines())
    if not made.flat and made.name != "python":
        assert "\nimport os" not in exported.text
    assert not any("\n" in note or "\x1b" in note for note in exported.notes)


@pytest.mark.parametrize("name", ["timm", "accelerate", "transformers", "lightning", "deepspeed", "composer"])
def test_cuda_graphs_and_accumulation_are_refused(name: str) -> None:
    config: dict[str, Value] = {**CUDA, "compile_mode": "reduce-overhead"}
    with pytest.raises(UsageError, match="overwrite the gradients") as caught:
        FORMATS[name].export(profile_with(config))
    assert "--format python" in str(caught.value.advice)
    said = said_by(FORMATS[name], {**config, "gradient_accumulation": 1})
    assert "replays CUDA graphs: clone" in said


@pytest.mark.parametrize("made", [m for n, m in FORMATS.items() if n != "json"], ids=lambda m: m.name)
def test_several_ranks_are_several_processes_or_refused(made: Format) -> None:
    profile = profile_with({**CUDA, "compile_mode": "off"})
    profile = profile.model_copy(update={"conditions": profile.conditions.model_copy(update={"ranks": 2})})
    if made.name == "python":
        with pytest.raises(UsageError, match="2"):
            made.export(profile)
        return
    exported = made.export(profile)
    said = "\n".join([*exported.notes, exported.text])
    if made.name == "yaml":
        assert "ranks: 2" in said
        return
    assert "2 ranks, a process each, train together" in said
    options = {
        "accelerate": ['distributed_type: "MULTI_GPU"', "num_processes: 2"],
        "lightning": ["devices: 2", 'strategy: "ddp"'],
        "deepspeed": ['"train_batch_size": 192', '"train_micro_batch_size_per_gpu": 32', "deepspeed --num_gpus 2"],
    }
    for option in options.get(made.name, ["-n 2" if made.name == "composer" else "torchrun --nproc-per-node=2"]):
        assert option in said


@pytest.mark.parametrize("name", ["python", "timm", "transformers", "lightning", "deepspeed", "composer"])
def test_a_batch_that_does_not_divide_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="96 does not divide into 7"):
        FORMATS[name].export(profile_with({**CUDA, "gradient_accumulation": 7}))


@every_format
def test_an_earlier_export_is_recognised_and_nothing_else_is(made: Format) -> None:
    for config in (FP16, {**CPU, "precision": "fp32"}):
        text = made.export(profile_with(config)).text
        assert any(one.is_earlier(text) for one in FORMATS.values())
    for text in (
        *("{}", "[]", '{"per_device_train_batch_size": 8, "bf16": true}', '{"train_batch_size": 8}', "hello"),
        *(
            "--batch-size 64 --mine",
            "-b 64\n",
            "import torch\n",
            "# autotune\n",
            "data.batch_size=4",
            "export A=1\n",
            "",
        ),
    ):
        assert not made.is_earlier(text), text
