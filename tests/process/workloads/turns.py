"""A small convolutional training that says in every step how it is run, and misbehaves for one batch size."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

BATCH_SIZE = 8
#: `fault` happens in the step number `step` of the batch size `at`. `once`: a file whose absence lets it happen.
#: `complex`: outputs become parts of complex numbers, of which there are none in bf16.
ARGS = {"fault": "", "at": "0", "step": "1", "once": "", "slow": "", "complex": ""}

_steps = {}
_optimizer = None


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % 4


def dataset(ctx):
    return Images()


def model(ctx):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )


def optimizer(ctx, model):
    global _optimizer
    _optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return _optimizer


def loss(ctx, m, batch):
    inputs, labels = batch
    weight = m[0].weight
    group = _optimizer.param_groups[0]
    moments = [state["exp_avg"] for state in _optimizer.state.values() if state["exp_avg"].dim() == 4]
    seen = {
        "batch_size": ctx.batch_size,
        "samples": len(inputs),
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "channels_last": weight.is_contiguous(memory_format=torch.channels_last),
        "input_channels_last": inputs.is_contiguous(memory_format=torch.channels_last),
        "compiled": m._compiled_call_impl is not None,
        "finite": bool(torch.isfinite(weight).all()),
        "weight": float(weight.double().sum()),
        "gradients": m[0].weight.grad is not None,
        "moments_channels_last": [m.is_contiguous(memory_format=torch.channels_last) for m in moments],
        "foreach": bool(group["foreach"]),
        "fused": bool(group["fused"]),
    }
    print(json.dumps(seen), flush=True)
    outputs = m(inputs)
    if ctx.arg("complex"):
        torch.complex(outputs, outputs)
    value = nn.functional.cross_entropy(outputs, labels)
    if ctx.arg("slow") == str(ctx.batch_size):
        time.sleep(0.02)
    return value * _fault(ctx)


def _fault(ctx):
    if not ctx.arg("fault") or ctx.batch_size != int(ctx.arg("at")):
        return 1.0
    _steps[ctx.batch_size] = _steps.get(ctx.batch_size, 0) + 1
    if _steps[ctx.batch_size] != int(ctx.arg("step")):
        return 1.0
    if ctx.arg("once"):
        if Path(ctx.arg("once")).exists():
            return 1.0
        Path(ctx.arg("once")).touch()
    match ctx.arg("fault"):
        case "nan":
            return float("nan")
        case "raises":
            raise ValueError("not with this batch size")
        case "oom":
            torch.empty(2**34)
        case "large":
            torch.empty(700 * 2**20, dtype=torch.uint8)
        case "exits":
            os._exit(0)
        case "hangs":
            time.sleep(600)
        case "waits":
            time.sleep(4)
        case name:
            os.kill(os.getpid(), signal.Signals[name])
    return 1.0
