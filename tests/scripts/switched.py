"""A training that notes at each step how it computes, and takes twice as long in fp32 as under autocast."""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sleep(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def forward(self, outputs):
        lower = outputs.dtype == torch.bfloat16
        if lower and self.fails:
            raise ArithmeticError("no training with so few digits")
        time.sleep(0.01 if lower else 0.02)
        return outputs


def layout(tensor):
    return "channels_last" if tensor.is_contiguous(memory_format=torch.channels_last) else "contiguous"


def flattened(model):
    parts = list(model.parameters())
    memory = torch.cat([part.detach().reshape(-1) for part in parts])
    for part, own in zip(parts, memory.split([part.numel() for part in parts]), strict=True):
        part.data = own.view(part.shape)
    return memory


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--no-sleep", action="store_true")
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--flat", type=int, help="after so many steps, weights become views of one tensor")
    options = parser.parse_args()
    torch.manual_seed(0)
    sleep = nn.Identity() if options.no_sleep else Sleep(options.fails)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), sleep, nn.Flatten(), nn.Linear(288, 10))
    optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(96, 3, 8, 8), torch.arange(96)), batch_size=8, shuffle=True)
    seen, memory, before = {}, None, None
    model[0].register_forward_hook(lambda m, inputs, output: seen.update(dtype=str(output.dtype)))
    taken = 0
    with open(options.log, "a") as log:
        while True:
            order = []
            for images, numbers in loader:
                order += numbers.tolist()
                loss = nn.functional.cross_entropy(model(images), numbers % 10)
                optimizer.zero_grad()
                loss.backward()
                group, state = optimizer.param_groups[0], optimizer.state.get(model[0].weight, {})
                seen.update(
                    weights=layout(model[0].weight),
                    gradients=layout(model[0].weight.grad),
                    state=layout(state.get("exp_avg", model[0].weight)),
                    optimizer="fused" if group.get("fused") else "foreach" if group.get("foreach") else "for-loop",
                    threads=torch.get_num_threads(),
                    compiled=model._compiled_call_impl is not None,
                )
                optimizer.step()
                if memory is not None:
                    parts = list(model.parameters())
                    seen["in_place"] = torch.equal(memory, torch.cat([p.detach().reshape(-1) for p in parts]))
                    seen["moves"] = not torch.equal(before, parts[0].detach())
                    before = parts[0].detach().clone()
                log.write(json.dumps({**seen, "loss": loss.item()}) + "\n")
                log.flush()
                taken += 1
                if taken == options.flat:
                    memory, before = flattened(model), model[0].weight.detach().clone()
                if taken == options.steps:
                    return
            assert sorted(order) == list(range(96))


if __name__ == "__main__":
    main()
