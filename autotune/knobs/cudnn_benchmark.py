"""Whether cuDNN benchmarks its convolution algorithms and uses the fastest for each shape.

Otherwise cuDNN chooses by heuristics.

Helps: convolutional networks with constant input shapes. The first step takes a few seconds longer; later steps use
the fastest algorithm.

Hurts: images of varying shapes, because each new shape is benchmarked. A detector trained in this way spent 8 hours
warming up and ran at 0.03 times the rate. Therefore fifty batches are looked at, and where the shapes of their images
differ, only a user who states the value (`--baseline`, `--fix`) has it measured. Lists of boxes may vary. The fastest
algorithm may need more workspace memory, and the choice varies between runs. What has been chosen for a shape stays
chosen until the process ends, so a running training cannot switch.

Source: https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.torch.backends.cudnn.benchmark
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.base.records import Value
from autotune.knobs.knob import NEEDS_CUDA, Door, Expected, Knob, Maths, OwnOption, Refusal, Scope


class CudnnBenchmark(Knob):
    name = "cudnn_benchmark"
    about = "cuDNN tries its algorithms"
    scope = Scope.PROCESS
    place = 90
    values = (False, True)
    default = False
    own_options = (OwnOption(("cudnn_benchmark",), like=r".*benchmark.*", sets=True),)
    maths = Maths.KERNELS
    memory = True
    inactive = (NEEDS_CUDA,)
    refusals = (
        Refusal(
            "the search would run again for every new shape",
            lambda facts, value: facts.images_vary,
            (True,),
            unless_stated=True,
        ),
        Refusal(
            "its choice differs from run to run, and determinism is asked for",
            lambda facts, value: facts.pinned.get("deterministic") is True,
            (True,),
            unless_stated=True,
        ),
    )
    expected = {"device": {True: Expected(0.05, 0.15)}}

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        return bool(facts["process"].get("cudnn_benchmark"))

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        return "process", {"cudnn_benchmark": bool(value)}

    def apply_process(self, value: Value) -> None:
        import torch

        torch.backends.cudnn.benchmark = bool(value)

    def read_process(self) -> bool:
        import torch

        return torch.backends.cudnn.benchmark

    def restore_process(self, before: bool) -> None:
        import torch

        torch.backends.cudnn.benchmark = before


KNOB = CudnnBenchmark()
