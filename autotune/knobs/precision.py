"""The number format of the training step.

``fp32`` keeps PyTorch's defaults: matrix products in full fp32, while cuDNN's convolutions may use TF32. ``tf32``
allows TF32 in matrix products, too (`torch.set_float32_matmul_precision("high")`). "medium" is not offered: PyTorch
computes it as "high" on CUDA, and on a CPU it speeds up matrix products alone, by 12 % on one EPYC. ``bf16`` and
``fp16`` run forward and loss under `torch.autocast`; weights and optimizer state stay in fp32, and fp16 adds a
GradScaler.

Helps: on GPUs with tensor cores, where matrix products are several times faster and activations take half the memory
and bandwidth; on CPUs with AMX or fast AVX-512 BF16.

Hurts: on CPUs with slow or emulated bf16 (on one Xeon with AVX-512 BF16 and no AMX, ResNet-50 ran at 28 images/s in
bf16 and 33 in fp32), and small models, where casts cost more than they save. fp16 overflows above 65504; a training
that diverges in fp16 may work in bf16.

Source: https://docs.pytorch.org/docs/stable/amp.html,
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.base.records import Value
from autotune.knobs.knob import NEEDS_CUDA, Door, Expected, Knob, Maths, OwnOption, Refusal, Scope, StepPlan

if TYPE_CHECKING:
    import torch
    from torch import nn


class Precision(Knob):
    name = "precision"
    about = "number format of the step"
    scope = Scope.STEP
    not_outside = "fp16 needs a gradient scaler in the script"
    place = 10
    values = ("fp32", "tf32", "bf16", "fp16")
    default = "fp32"
    said_always = True
    maths = Maths.CHANGED
    memory = True
    memory_slope = Expected(-0.1, 0.2)
    switchable = True
    own_options = (
        # Which format a switch called amp stands for, its name does not say.
        OwnOption(("bf16", "bfloat16", "amp_bf16"), like=r".*(bf16|bfloat16).*|(.*_)?amp(_.*)?", sets="bf16"),
        OwnOption(("fp16", "float16", "half"), like=r".*(fp16|float16|mixed_precision).*|(.*_)?amp(_.*)?", sets="fp16"),
        OwnOption(("tf32", "allow_tf32"), like=r".*tf32.*", sets="tf32"),
        OwnOption(
            ("precision", "mixed_precision", "amp"),
            like=r".*(precision|dtype).*|(.*_)?amp(_.*)?",
            choices={
                **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), "bf16"),
                **dict.fromkeys(("fp16", "float16", "half", "16-mixed"), "fp16"),
                "tf32": "tf32",
            },
        ),
    )
    refusals = (
        Refusal(NEEDS_CUDA.reason, NEEDS_CUDA.when, ("fp16", "tf32")),
        Refusal(
            "needs a CUDA device of compute capability 8.0 or above",
            lambda facts, value: not facts.probe.tf32,
            ("tf32",),
        ),
        Refusal("this device only emulates bf16", lambda facts, value: not facts.probe.native_bf16, ("bf16",)),
    )
    expected = {
        "device": {"tf32": Expected(0.15, 0.25), "bf16": Expected(0.35, 0.35), "fp16": Expected(0.35, 0.35)},
    }

    def phrase(self, value: Value) -> str:
        return str(value)

    def apply_process(self, value: Value) -> None:
        import torch

        if value == "tf32":
            # The only setting that all supported versions have, and that does not conflict with the newer per-backend
            # settings inside torch.compile.
            torch.set_float32_matmul_precision("high")

    def read_process(self) -> str | tuple[str, str]:
        import torch

        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            # It has been set by backend, which newer versions allow, and then they refuse to tell it as a whole.
            mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
            return torch.backends.cuda.matmul.fp32_precision, mkldnn.fp32_precision

    def restore_process(self, before: str | tuple[str, str]) -> None:
        import torch

        if isinstance(before, str):
            torch.set_float32_matmul_precision(before)
            return
        torch.set_float32_matmul_precision("highest")
        mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision, mkldnn.fp32_precision = before

    def is_in_force(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> bool:
        import torch

        return value != "tf32" or torch.get_float32_matmul_precision() == "high"

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        lower = {"bfloat16": "bf16", "float16": "fp16"}
        model = facts["model"]
        found = lower.get(str(model.get("autocast"))) or lower.get(str(model.get("dtype")))
        high = facts["device"] == "cuda" and facts["process"].get("matmul_precision") != "highest"
        return found or ("tf32" if high else "fp32")

    def not_beside(self, own: Mapping[str, Value], outside: dict[str, dict[str, str]]) -> None:
        """Complete the answers of a script's doors, each of which sees a part: autocast is seen at the model's, TF32 at
        the process's."""
        answers = outside.setdefault(self.name, {})
        if own.get(self.name) == "tf32":
            answers["fp32"] = "the script sets it itself"
        elif "fp32" in answers and own.get(self.name) != "fp32":
            answers["tf32"] = answers["fp32"]

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]] | None:
        if value == "fp16":
            return None
        if value == "tf32":
            return "process", {"matmul_precision": "high"}
        return "model", {"autocast": "bfloat16" if value == "bf16" else None}

    def is_refused(self, value: Value, message: str) -> bool:
        """Whether an error speaks of the lower precision."""
        return value in _NAMES and _NAMES[str(value)].search(message) is not None

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        import torch

        if value in ("bf16", "fp16"):
            plan.autocast = torch.bfloat16 if value == "bf16" else torch.float16
            plan.scale_loss = value == "fp16"


KNOB = Precision()
#: The dtypes of autocast as PyTorch's messages spell them.
_NAMES = {
    "bf16": re.compile(r"bfloat16|autocast", re.IGNORECASE),
    "fp16": re.compile(r"\bHalf\b|\bhalf precision|float16|autocast", re.IGNORECASE),
}
