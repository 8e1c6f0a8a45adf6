"""A training whose loader and step have the durations given by its arguments. Prints how it was set up."""

import json
import time

import torch
from torch import nn

BATCH_SIZE = 8
#: Seconds that a sample, a step, the first step, and a new worker's first sample take; the number of samples per epoch.
#: Steps are ``early_s`` slower at first, decreasing to 0 over the first 15; each takes ``growth_s`` more than the last.
ARGS = {
    "sample_s": "0",
    "step_s": "0",
    "first_step_s": "0",
    "worker_start_s": "0",
    "samples": "4096",
    "early_s": "0",
    "growth_s": "0",
}
EARLY_STEPS = 15

_fresh = True
_told = False
_steps = 0


class Images(torch.utils.data.Dataset):
    def __init__(self, ctx):
        self.ctx = ctx
        self.image = torch.randn(3, 8, 8)

    def __len__(self):
        return int(self.ctx.arg("samples"))

    def __getitem__(self, index):
        global _fresh
        if _fresh and torch.utils.data.get_worker_info() is not None:
            _fresh = False
            time.sleep(float(self.ctx.arg("worker_start_s")))
        if float(self.ctx.arg("sample_s")):
            time.sleep(float(self.ctx.arg("sample_s")))
        return self.image, index % 4


def dataset(ctx):
    return Images(ctx)


def model(ctx):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def optimizer(ctx, model):
    made = torch.optim.SGD(model.parameters(), lr=0.01)
    model.seen_optimizer = [made]
    return made


def loss(ctx, model, batch):
    global _told, _steps
    images, labels = batch
    seconds = float(ctx.arg("step_s" if _told else "first_step_s"))
    seconds += float(ctx.arg("early_s")) * max(0.0, 1 - _steps / EARLY_STEPS) + float(ctx.arg("growth_s")) * _steps
    _steps += 1
    if seconds:
        time.sleep(seconds)
    scores = model(images)
    if not _told:
        _told = True
        group = model.seen_optimizer[0].param_groups[0]
        print(
            json.dumps(
                {
                    "threads": torch.get_num_threads(),
                    "shape": list(images.shape),
                    "channels_last": images.is_contiguous(memory_format=torch.channels_last),
                    "weights_channels_last": model[0].weight.is_contiguous(memory_format=torch.channels_last),
                    "scores": str(scores.dtype),
                    "weights": str(model[0].weight.dtype),
                    "fused": group["fused"],
                    "foreach": group["foreach"],
                    "cudnn_benchmark": torch.backends.cudnn.benchmark,
                    "matmul": torch.get_float32_matmul_precision(),
                }
            )
        )
    return nn.functional.cross_entropy(scores, labels)
