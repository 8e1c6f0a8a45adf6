"""A ``ds_config.json`` for DeepSpeed, without comments.

The number format is told by ``torch_autocast``, which runs the engine's forward pass under autocast: compute the loss
inside the model to have it there too, as in the trials. DeepSpeed's own ``bf16`` and ``fp16`` would turn the weights
themselves into that format. A DeepSpeed that does not know ``torch_autocast`` ignores it and trains in fp32 (this is
written from the source of 0.19.8).

The loader, the optimizer and the compiler are your script's; a loader that DeepSpeed makes from ``training_data`` has
twice as many workers as there are GPUs, and no option for it.
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.precision import KNOB as PRECISION
from autotune.profile.export.format import Given, Told, ToolFormat, by_hand, by_knob, compiled, is_object_with

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_ALWAYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "dataloader_drop_last"}


def _precision(value: Value, given: Given) -> Told:
    if value not in _DTYPES:
        lack = by_hand(PRECISION.name, value, cuda=given.cuda) if value == "tf32" else None
        return Told({"torch_autocast.enabled": False}, lack)
    return Told({"torch_autocast.enabled": True, "torch_autocast.dtype": _DTYPES[str(value)]})


def _compile(value: Value, given: Given) -> Told:
    call = f'engine.compile(compile_kwargs={{"mode": "{value}"}}) after deepspeed.initialize'
    return compiled(value, given, call, {})


def _batch(value: Value, given: Given) -> Told:
    return Told({"train_batch_size": given.ranks * given.batch_size, "train_micro_batch_size_per_gpu": given.at_once})


class _DeepSpeed(ToolFormat):
    name = "deepspeed"
    about = "DeepSpeed"
    usage = "deepspeed.initialize(…, config=FILE)"
    place = 100
    start = "deepspeed --num_gpus {ranks}"
    flat = True
    knobs = by_knob(
        precision=_precision,
        compile_mode=_compile,
        batch_size=_batch,
        gradient_accumulation=lambda value, given: Told({"gradient_accumulation_steps": given.parts}),
    )

    def caution(self, given: Given) -> str:
        text = "Compute the loss inside the model: only there it runs under torch_autocast."
        return text if given.cuda else f"{text} DS_ACCELERATOR=cpu keeps DeepSpeed on the CPU where there is a GPU."

    def always(self, given: Given) -> dict[str, Any]:
        return {"gradient_accumulation_steps": 1, "dataloader_drop_last": True}

    def is_earlier(self, text: str) -> bool:
        return is_object_with(text, _ALWAYS, {"torch_autocast"})


FORMAT = _DeepSpeed()
