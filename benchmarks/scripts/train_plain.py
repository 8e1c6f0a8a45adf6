"""ResNet-18 in a plain loop, on images that are cropped as they are loaded.

python train_plain.py [--epochs 1000] [--batch-size 32] [--latency 0]
"""

import argparse
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18
from torchvision.transforms import v2


class Images(Dataset):  # type: ignore[type-arg]
    """Random images, cropped and flipped."""

    held = torch.randint(0, 256, (64, 3, 96, 96), dtype=torch.uint8)
    change = v2.Compose(
        [v2.RandomResizedCrop(64, antialias=True), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    )
    #: Seconds that each sample is waited for, as from a store.
    latency = 0.0

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.latency)
        return self.change(self.held[index % 64]), index % 10


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds that each sample is waited for")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = Images()
    images.latency = options.latency / 1000
    loader = DataLoader(images, options.batch_size, shuffle=True, drop_last=True)
    for epoch in range(options.epochs):
        total = 0.0
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.3f}", flush=True)


if __name__ == "__main__":
    main()
