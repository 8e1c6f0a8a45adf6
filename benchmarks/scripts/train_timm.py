"""A ResNet-18 by timm: its factories make the model, the optimizer and the loader.

python train_timm.py [--epochs 1000]
"""

import argparse

import timm
import torch
from timm.data import create_loader
from timm.optim import create_optimizer_v2
from torch.nn.functional import cross_entropy
from torchvision.datasets import FakeData


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = timm.create_model("resnet18", num_classes=10).to(device)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
    loader = create_loader(
        FakeData(1024, (3, 96, 96), 10),
        input_size=(3, 64, 64),
        batch_size=32,
        is_training=True,
        num_workers=1,
        use_prefetcher=False,
    )
    for epoch in range(options.epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
