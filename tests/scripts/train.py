"""A training script that knows nothing of autotune. It prints, in JSON, what it has seen of itself."""

import argparse
import contextlib
import copy
import io
import json
import os
import subprocess
import sys
import time

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


def sample(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 8, 8, generator=generator), index % 10


class Pictures(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return *sample(index), 0 if get_worker_info() is None else os.getpid()


class Stream(IterableDataset):
    def __iter__(self):
        return ((*sample(i), 0) for i in range(48))


class Network(nn.Sequential):
    """Computes its first part again in the backward pass, if wanted."""

    again = False

    def forward(self, images):
        if not self.again:
            return super().forward(images)
        return self[3:](torch.utils.checkpoint.checkpoint(self.part, images, use_reentrant=False))

    def part(self, images):
        return self[:3](images)


def network():
    return Network(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def main():  # noqa: PLR0915
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--accumulate", type=int, default=1)
    for flag in ("autocast", "compile", "stream", "ddp", "spawn", "kill", "checkpoint", "look", "grads"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    seen = {name: set() for name in ("inside", "evaluated", "copied_inside", "outputs", "loaded_by")}
    seen["samples"] = 0
    model = network()
    model.again = options.checkpoint
    if options.compile:
        model = torch.compile(model, backend="eager", fullgraph=True)
    if options.ddp:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    inner = model.module if options.ddp else getattr(model, "_orig_mod", model)
    where = "inside"
    inner[0].register_forward_hook(lambda m, inputs, output: seen[where].add(str(output.dtype)))
    average = copy.deepcopy(inner)
    optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=0.01)
    context = "spawn" if options.spawn and options.workers else None
    data = Stream() if options.stream else Pictures()
    loader = DataLoader(data, options.batch_size, num_workers=options.workers, multiprocessing_context=context)
    if options.look:
        next(iter(loader))
    after = None
    losses = []
    for _ in range(options.epochs):
        model.train()
        for number, (images, labels, worker) in enumerate(loader, 1):
            seen["loaded_by"].update(worker.tolist())
            seen["samples"] += len(images)
            lower = torch.autocast("cpu", dtype=torch.bfloat16) if options.autocast else contextlib.nullcontext()
            with lower:
                outputs = model(images)
            seen["outputs"].add(str(outputs.dtype))
            loss = nn.functional.cross_entropy(outputs.float(), labels)
            loss.backward()
            losses.append(float(loss.detach()))
            if number % options.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            if after is None:
                after = copy.deepcopy(inner)
                if options.kill:
                    print("training", flush=True)
                    # Not `signal.pause`, which would miss a signal that comes just before it.
                    while True:
                        time.sleep(0.05)
        where = "evaluated"
        model.eval()
        with torch.set_grad_enabled(options.grads):
            for images, _, _ in DataLoader(Pictures(), 16):
                model(images)
            if options.grads:
                torch.jit.trace(model, images)
        where = "inside"
    # A copy is a model of its own, and a pickle needs nothing but PyTorch.
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.zero_()
    where = "copied_inside"
    copied = float(after(images).detach().abs().sum())
    held = io.BytesIO()
    if not options.ddp:
        inner[0]._forward_hooks.clear()
        torch.save(inner, held)
    names = [sys.executable, "-c", "import sys; print(sorted(sys.modules))"]
    child = subprocess.run(names, capture_output=True, text=True, check=True)
    weight = inner[0].weight
    group = optimizer.param_groups[0]
    found = {
        **{name: sorted(value) if isinstance(value, set) else value for name, value in seen.items()},
        "workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "batch_size": loader.batch_size,
        "threads": torch.get_num_threads(),
        "channels_last": weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous(),
        "fused": group.get("fused"),
        "foreach": group.get("foreach"),
        "keys": sorted(model.state_dict()),
        "average": type(average).__name__,
        "copied": copied,
        "pickle": b"autotune" in held.getvalue(),
        "child": "autotune" in child.stdout,
        "environment": "AUTOTUNE_AGENT" in os.environ,
        "path": os.environ.get("PYTHONPATH"),
        "losses": losses,
        "call": nn.Module.__call__.__module__,
    }
    if options.ddp:
        rank = torch.distributed.get_rank()
        torch.distributed.destroy_process_group()
        if rank:
            return
    print(json.dumps(found))


if __name__ == "__main__":
    main()
