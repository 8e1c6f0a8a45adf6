"""ResNet-18 in a loop with accelerate.

python train_accelerate.py [--epochs 1000]        accelerate launch train_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()
    model = resnet18(num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, 3, 64, 64), torch.arange(1024) % 10)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    for epoch in range(options.epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
