"""MobileNetV3 with gradients accumulated over four batches, under the script's own bf16 autocast.

python train_accumulating.py [--epochs 1000]
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import mobilenet_v3_small

EVERY = 4


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = mobilenet_v3_small(num_classes=10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, 3, 64, 64), torch.arange(1024) % 10)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    for epoch in range(options.epochs):
        for number, (images, labels) in enumerate(loader, 1):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = cross_entropy(model(images.to(device)), labels.to(device))
            (loss / EVERY).backward()
            if number % EVERY == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
