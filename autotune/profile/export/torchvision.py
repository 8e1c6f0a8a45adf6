"""Options of torchvision's reference scripts, on one line: classification, detection and segmentation.

All three have the same options for what they can set (read in torchvision 0.21); the profile's model says which script
it is. Their only lower precision is fp16 (``--amp``), so a profile in bf16 is refused. The loaders of classification
pin memory and those of the others do not; classification also keeps an incomplete last batch. Classification and
segmentation turn cuDNN's benchmark on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.records import Value
from autotune.knobs.deterministic import KNOB as DETERMINISTIC
from autotune.profile.export.format import Given, Told, ToolFormat, are_words_with, as_words, by_knob
from autotune.workload.catalog import torchvision_task

_ALWAYS = {"--device", "--batch-size", "--workers"}
_SOMETIMES = {"--model", "--amp", "--use-deterministic-algorithms"}


def _precision(value: Value, given: Given) -> Told:
    if value == "bf16":
        raise UsageError(
            "torchvision's reference scripts have no bf16: their --amp is fp16",
            advice="export with --format python, or search again with --set precision=fp32,fp16.",
        )
    if value == "tf32":
        return Told(lack='torch.set_float32_matmul_precision("high") in the script')
    return Told({"--amp": None} if value == "fp16" else {})


def _accumulation(value: Value, given: Given) -> Told:
    if given.parts == 1:
        return Told()
    return Told(lack=f"the scripts take {given.batch_size} samples in one piece, which needs more memory")


def _as_in_script(value: Value, is_on: bool, place: str) -> Told:
    return Told() if value == is_on else Told(lack=f"the script has it {'on' if is_on else 'off'}: change {place}")


def _pinned(value: Value, given: Given) -> Told:
    return _as_in_script(value, torchvision_task(given.model) in ("classification", None), "its DataLoader")


def _benchmark(value: Value, given: Given) -> Told:
    benchmarks = torchvision_task(given.model) != "detection" and not given.config.get(DETERMINISTIC.name)
    return _as_in_script(value, benchmarks, "that line")


class _Torchvision(ToolFormat):
    name = "torchvision"
    about = "torchvision references"
    usage = "python train.py --data-path DATA $(cat FILE)"
    place = 110
    flat = True
    knobs = by_knob(
        precision=_precision,
        batch_size=lambda value, given: Told({"--batch-size": given.batch_size}),
        gradient_accumulation=_accumulation,
        num_workers=lambda value, given: Told({"--workers": value}),
        pin_memory=_pinned,
        cudnn_benchmark=_benchmark,
        deterministic=lambda value, given: Told({"--use-deterministic-algorithms": None} if value else {}),
    )

    def caution(self, given: Given) -> str:
        task = torchvision_task(given.model)
        if task is None:
            return "For references/classification, detection or segmentation: which of them, the profile does not say."
        last = " It trains with an incomplete last batch, too, which the trials dropped."
        return f"For references/{task}.{last if task == 'classification' else ''}"

    def always(self, given: Given) -> dict[str, Any]:
        model = {} if torchvision_task(given.model) is None else {"--model": given.model}
        return {**model, "--device": "cuda" if given.cuda else "cpu"}

    def render(self, options: Mapping[str, Any], given: Given) -> str:
        return as_words([w for name, v in options.items() for w in (name, str(v))[: 1 + (v is not None)]])[0]

    def is_earlier(self, text: str) -> bool:
        return are_words_with(text, _ALWAYS, _SOMETIMES.__contains__)


FORMAT = _Torchvision()
