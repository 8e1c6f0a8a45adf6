"""A training that prints, in JSON, what is in force in it: as a script, or as a profile prepares it.

usage: both_paths.py DIMENSIONS [PROFILE]
"""

import json
import os
import resource
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, dataloader

import autotune

DIMENSIONS = int(sys.argv[1])
LAST = torch.channels_last if DIMENSIONS == 4 else torch.channels_last_3d
SEEN = {}


class Pictures(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((3, *[4] * (DIMENSIONS - 2)), float(index)), index % 10


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = (nn.Conv2d if DIMENSIONS == 4 else nn.Conv3d)(3, 8, 3, padding=1)
        self.last = nn.Linear(8, 10)

    def forward(self, images):
        hidden = self.first(images)
        SEEN["compiled"] = torch.compiler.is_compiling()
        SEEN["computes in"] = str(hidden.dtype)
        SEEN["images"] = images.is_contiguous(memory_format=LAST) and not images.is_contiguous()
        return self.last(hidden.flatten(2).mean(2))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def note_loaders():
    init = dataloader._BaseDataLoaderIter.__init__

    def noted(self, loader):
        names = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "batch_size")
        SEEN["loader"] = {name: getattr(loader, name) for name in names}
        SEEN["collate"] = loader.collate_fn.__name__
        init(self, loader)

    dataloader._BaseDataLoaderIter.__init__ = noted


def keeps_memory():
    """Return whether 128 MiB that were freed are there again without page faults, in one of some times: what else is
    allocated may come to lie in the place."""
    faults = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**25)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults[1:]) < 2**6


def main():
    torch.manual_seed(0)
    note_loaders()
    model = Network()
    if len(sys.argv) > 2:
        profile = autotune.load_profile(sys.argv[2])
        optimizer = optimizer_of(model)
        loader, step = profile.prepare(model, optimizer, Pictures(), loss_of, shuffle=True, drop_last=True)
        for _ in range(2):
            for batch in loader:
                step(batch)
    else:
        optimizer = optimizer_of(model)
        loader = DataLoader(Pictures(), batch_size=8, shuffle=True, drop_last=True)
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
    weight = model.first.weight
    momentum = optimizer.state[weight]["momentum_buffer"]
    group = optimizer.param_groups[0]
    SEEN["weights"], SEEN["momentum"] = (t.is_contiguous(memory_format=LAST) for t in (weight, momentum))
    SEEN["optimizer"] = [bool(group["foreach"]), bool(group["fused"])]
    SEEN["threads"] = torch.get_num_threads()
    SEEN["cudnn"] = [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic]
    SEEN["matmul"] = torch.get_float32_matmul_precision()
    SEEN["deterministic"] = torch.are_deterministic_algorithms_enabled()
    SEEN["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    SEEN["keeps memory"] = keeps_memory()
    print(json.dumps(SEEN))


if __name__ == "__main__":
    main()
