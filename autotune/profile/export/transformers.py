"""``TrainingArguments`` of Hugging Face Transformers, as JSON without comments.

```python
(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(FILE)
```

The Trainer's own optimizer is AdamW; the file chooses its implementation by ``optim`` and does nothing for an
optimizer that you hand it. Where the Trainer compiles on a GPU it would turn TF32 on, so ``tf32`` is written out
there. The Trainer clips gradients at a norm of 1 (``max_grad_norm``), which the trials did not unless the workload
does. Models that take ``num_items_in_batch`` weigh accumulated parts by their tokens, not equally.
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.ddp_bucket_cap_mb import KNOB as BUCKETS
from autotune.knobs.pin_memory import KNOB as PINNED
from autotune.profile.export.format import Given, Told, ToolFormat, by_knob, compiling, is_object_with, of_loader

_LOADER = "dataloader_"


def _precision(value: Value, given: Given) -> Told:
    flags: dict[str, Any] = {"bf16": value == "bf16", "fp16": value == "fp16"}
    compiles = given.config.get(COMPILE.name, COMPILE.default) != COMPILE.default
    if value == "tf32":
        # The Trainer sets TF32 by backend, but the compiler asks for the overall precision when it chooses kernels.
        high = 'call torch.set_float32_matmul_precision("high") once TrainingArguments are made, or compiling may fail'
        return Told({**flags, "tf32": True}, high if compiles else None)
    if given.cuda and compiles:
        return Told(
            {**flags, "tf32": False},
            "tf32=false turns TF32 off in convolutions too, where the trials had it, and the Trainer turns it on in "
            "matrix products: torch.backends.cuda.matmul.allow_tf32 = False once the Trainer is made",
        )
    return Told(flags)


def _implementation(value: Value, given: Given) -> Told:
    optim = {"optim": "adamw_torch_fused" if value == "fused" else "adamw_torch"}
    # With adamw_torch, PyTorch chooses the implementation by itself.
    default = "foreach" if given.cuda else "for-loop"
    argument = {"fused": "fused=True", "foreach": "foreach=True"}.get(str(value), "foreach=False")
    lack = f"this is for the Trainer's own AdamW; give another optimizer {argument}"
    return Told(optim, lack if value in ("fused", default) else f"give your optimizer {argument} yourself")


_ALWAYS = {"output_dir", "per_device_train_batch_size", "use_cpu", f"{_LOADER}drop_last", f"{_LOADER}{PINNED.name}"}
_SOMETIMES = {"bf16", "fp16", "tf32", "torch_compile", "torch_compile_mode", "optim", "gradient_accumulation_steps"}
_SOMETIMES |= {BUCKETS.name, "ddp_broadcast_buffers"}
_SOMETIMES |= {"accelerator_config", f"{_LOADER}multiprocessing_context"}
_SOMETIMES |= {_LOADER + name for name in of_loader(_LOADER)}


class _Transformers(ToolFormat):
    name = "transformers"
    about = "Hugging Face Trainer"
    usage = "HfArgumentParser(TrainingArguments).parse_json_file(FILE)"
    place = 80
    flat = True
    knobs = of_loader(_LOADER) | by_knob(
        precision=_precision,
        compile_mode=compiling("torch_compile_mode", on={"torch_compile": True}, off={"torch_compile": False}),
        batch_size=lambda value, given: Told({"per_device_train_batch_size": given.at_once}),
        gradient_accumulation=lambda value, given: Told({"gradient_accumulation_steps": given.parts}),
        non_blocking=lambda value, given: Told({"accelerator_config.non_blocking": value}),
        optimizer_impl=_implementation,
        ddp_bucket_cap_mb=lambda value, given: Told({BUCKETS.name: value}),
        broadcast_buffers=lambda value, given: Told({"ddp_broadcast_buffers": value}),
    )

    def caution(self, given: Given) -> str:
        text = "Give it your output_dir. The Trainer clips gradients unless max_grad_norm is 0."
        if not given.cuda or given.ranks > 1:
            return text
        return f"{text} It trains on every GPU that it sees: set CUDA_VISIBLE_DEVICES to one."

    def always(self, given: Given) -> dict[str, Any]:
        loader = {f"{_LOADER}drop_last": True, f"{_LOADER}{PINNED.name}": False}
        return {"output_dir": "trainer_output", "use_cpu": not given.cuda, **loader}

    def is_earlier(self, text: str) -> bool:
        return is_object_with(text, _ALWAYS, _SOMETIMES)


FORMAT = _Transformers()
