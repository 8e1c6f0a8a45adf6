"""Trains without asking whether it is ``__main__``, where workers would be spawned."""

import logging
import multiprocessing

import torch
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger(__name__)
print("begins")
multiprocessing.set_start_method("spawn")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=8)
for (inputs,) in loader:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
print(loader.num_workers)
