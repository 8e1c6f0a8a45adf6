"""A file for timm's ``train.py -c``.

The names are those of the script in timm's repository that has ``--device`` and ``--torchcompile-mode`` (timm 1.0). A
recent script warns of keys that it does not know, an older one ignores them. Options on the command line go before the
file.

On a GPU the script turns on cuDNN's benchmark and TF32 for matrix products by itself, and its workers always stay
alive between epochs. Its prefetcher copies batches asynchronously. ``--lr-base`` is scaled with the batch, ``--lr`` is
not.
"""

from __future__ import annotations

from typing import Any

from autotune.base.records import Value
from autotune.knobs.memory_format import KNOB as LAYOUT
from autotune.knobs.precision import KNOB as PRECISION
from autotune.profile.export.format import SCALED_SGD, Given, Told, ToolFormat, by_hand, by_itself, by_knob, compiling

_NAMED = "timm:"
_AMP = {"bf16": "bfloat16", "fp16": "float16"}


def _precision(value: Value, given: Given) -> Told:
    if value in _AMP:
        return Told({"amp": True, "amp_dtype": _AMP[str(value)]})
    if value == "fp32" and given.cuda:
        return Told({"amp": False}, "train.py allows TF32 in matrix products: take that line out of it")
    return Told({"amp": False})


def _layout(value: Value, given: Given) -> Told:
    if value == "channels_last_3d":
        return Told(lack=by_hand(LAYOUT.name, value, cuda=given.cuda))
    return Told({"channels_last": value == "channels_last"})


def _implementation(value: Value, given: Given) -> Told:
    needs_flag = value == "fused" and given.config.get(PRECISION.name) == "fp16"
    lack = f"under fp16 {SCALED_SGD}, after train.py has made it" if needs_flag else None
    return Told({f"opt_kwargs.{name}": value == name for name in ("foreach", "fused")}, lack)


class _Timm(ToolFormat):
    name = "timm"
    about = "timm's train.py"
    usage = "python train.py -c FILE --data-dir DATA"
    place = 60
    knobs = by_knob(
        precision=_precision,
        compile_mode=compiling("torchcompile_mode", on={"torchcompile": "inductor"}, off={"torchcompile": None}),
        batch_size=lambda value, given: Told({"batch_size": given.at_once}),
        gradient_accumulation=lambda value, given: Told({"grad_accum_steps": given.parts}),
        memory_format=_layout,
        num_workers=lambda value, given: Told({"workers": value}),
        pin_memory=lambda value, given: Told({"pin_mem": value}),
        non_blocking=by_itself("train.py copies asynchronously, unless it is run with --no-prefetcher"),
        persistent_workers=by_itself("train.py keeps its workers, which costs their memory between epochs"),
        cudnn_benchmark=by_itself("train.py turns it on: take that line out of it"),
        optimizer_impl=_implementation,
    )

    def caution(self, given: Given) -> str:
        return "train.py scales --lr-base with the batch by itself; --lr stays as it is written."

    def always(self, given: Given) -> dict[str, Any]:
        model = {"model": given.model.removeprefix(_NAMED)} if given.model.startswith(_NAMED) else {}
        return {**model, "device": "cuda" if given.cuda else "cpu", "pin_mem": False, "grad_accum_steps": 1}


FORMAT = _Timm()
