"""A configuration file for ``accelerate launch``.

It sets the number format, the compiler, the device and the number of processes, which are several only on GPUs,
because on a CPU ``accelerate launch`` needs MPI for that. The loader, the model's layout and the
optimizer are your script's. Under Accelerate only the model's forward pass runs in the lower precision, and its
outputs are turned into fp32: a loss that is computed outside the model runs in fp32, unless ``with
accelerator.autocast():`` is around it, as it was in the trials.
"""

from __future__ import annotations

from typing import Any

from autotune.base.errors import UsageError
from autotune.base.records import Value
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.profile.export.format import Given, Told, ToolFormat, by_knob, compiling

_DYNAMO = "dynamo_config.dynamo_"
_EXACT = "torch.backends.cuda.matmul.allow_tf32 = False"


def _precision(value: Value, given: Given) -> Told:
    if value in ("bf16", "fp16"):
        return Told({"mixed_precision": value})
    lack = 'torch.set_float32_matmul_precision("high") before training' if value == "tf32" else None
    if value == "fp32" and given.cuda and given.config.get(COMPILE.name, COMPILE.default) != COMPILE.default:
        # Accelerate turns TF32 on where it compiles and nothing is mixed.
        lack = f"{_EXACT} once the Accelerator is made, which turns TF32 on"
    return Told({"mixed_precision": "no"}, lack)


def _batch(value: Value, given: Given) -> Told:
    return Told(lack=f"give it to the training's DataLoader: batch_size={given.at_once}, drop_last=True")


def _accumulation(value: Value, given: Given) -> Told:
    if given.parts == 1:
        return Told()
    return Told(lack=f"Accelerator(gradient_accumulation_steps={value}), and `with accelerator.accumulate(model):`")


class _Accelerate(ToolFormat):
    name = "accelerate"
    about = "Hugging Face Accelerate"
    usage = "accelerate launch --config_file FILE train.py"
    place = 70
    start = "accelerate launch starts them"
    knobs = by_knob(
        precision=_precision,
        compile_mode=compiling(f"{_DYNAMO}mode", on={f"{_DYNAMO}backend": "INDUCTOR"}, off={f"{_DYNAMO}backend": "NO"}),
        batch_size=_batch,
        gradient_accumulation=_accumulation,
        intra_op_threads=lambda value, given: Told(lack=f"accelerate launch --num_cpu_threads_per_process {value}"),
    )

    def caution(self, given: Given) -> str:
        text = "A loss outside the model runs in fp32, unless it is under `with accelerator.autocast():`."
        if not given.cuda:
            return text
        return f"{text} Without --num_cpu_threads_per_process, launch sets OMP_NUM_THREADS to 1."

    def always(self, given: Given) -> dict[str, Any]:
        if given.ranks > 1 and not given.cuda:
            raise UsageError(
                f"accelerate launch would start one process on a CPU, and the profile is of {given.ranks} ranks",
                advice="under torchrun, `autotune.load_profile(FILE).prepare(…)` sets up each rank.",
            )
        processes = {"num_machines": 1, "num_processes": given.ranks, "machine_rank": 0}
        distributed = "NO" if given.ranks == 1 else "MULTI_GPU"
        environment = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": distributed,
            "use_cpu": not given.cuda,
        }
        return {**environment, **processes, "main_training_function": "main", "debug": False}


FORMAT = _Accelerate()
