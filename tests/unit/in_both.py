"""Trains in one way as a workload does and as a script does that the agent is in, and prints what was in force."""

import json
import sys

import torch
from autotune_agent.models import ModelDoor
from autotune_agent.optimizers import OptimizerDoor
from autotune_agent.setting import Setting
from torch import nn

from autotune.knobs import KNOBS
from autotune.training.step import Step, apply_model, apply_optimizer


class Net(nn.Module):
    def __init__(self, dimensions):
        super().__init__()
        self.first = (nn.Conv2d if dimensions == 4 else nn.Conv3d)(3, 4, 3)
        self.register_buffer("mask", torch.ones(2, 4, *[6] * (dimensions - 2)))

    def forward(self, held):
        return (self.first(held["image"]) * self.mask).square().mean()


def seen_of(net, optimizer, inputs):
    weight = net.first.weight
    return {
        "weight": weight.stride(),
        "gradient": weight.grad.stride(),
        "buffer": net.mask.stride(),
        "inputs": [tensor.stride() for tensor in inputs],
        "state": {n: list(t.stride()) for n, t in optimizer.state[weight].items() if t is not None and t.dim()},
        "flags": {n: optimizer.param_groups[0].get(n) for n in ("foreach", "fused")},
        "scales": bool(getattr(optimizer, "_step_supports_amp_scaling", False)),
    }


def main(config, kind, dimensions):
    def anew():
        torch.manual_seed(0)
        net, inputs = Net(dimensions), []
        net.first.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        momentum = {"momentum": 0.9} if kind == "SGD" else {}
        return net, getattr(torch.optim, kind)(net.parameters(), lr=0.1, **momentum), inputs

    batches = [{"image": torch.randn(2, 3, *[8] * (dimensions - 2))} for _ in range(2)]
    net, optimizer, inputs = anew()
    net = apply_model(net, config, "cpu")
    step = Step(net, apply_optimizer(optimizer, config), lambda m, batch: m(batch), config, "cpu")
    for batch in batches:
        step(batch)
    workload = seen_of(net, optimizer, inputs)

    net, optimizer, inputs = anew()
    settings = [
        Setting(knob=n, words=n, door=d, arguments=a) for n, v in config.items() for d, a in [KNOBS[n].script_door(v)]
    ]
    models = ModelDoor([s for s in settings if s.door == "model"], lambda: True)
    models.install()
    OptimizerDoor([s for s in settings if s.door == "optimizer"], lambda: True, lambda *told: None).install()
    for batch in batches:
        optimizer.zero_grad()
        net(batch).backward()
        optimizer.step()
    models.remove()
    return [workload, seen_of(net, optimizer, inputs), [s.why_not for s in settings]]


if __name__ == "__main__":
    print(json.dumps([main(**case) for case in json.loads(sys.argv[1])]))
