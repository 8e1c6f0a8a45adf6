"""A DCGAN: two networks and two optimizers, each of which takes a step a batch.

python train_gan.py [--epochs 1000]
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset


def generator() -> nn.Sequential:
    """Return a network from noise (N, 64, 1, 1) to images (N, 3, 32, 32)."""
    return nn.Sequential(
        nn.ConvTranspose2d(64, 128, 4, 1, 0), nn.BatchNorm2d(128), nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Sequential:
    """Return a network from images (N, 3, 32, 32) to scores (N, 1)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4, 1, 0), nn.Flatten(),
    )  # fmt: skip


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made, judge = generator().to(device), discriminator().to(device)
    of_made = torch.optim.Adam(made.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(torch.rand(2048, 3, 32, 32) * 2 - 1), batch_size=64, shuffle=True)
    for epoch in range(options.epochs):
        for (images,) in loader:
            real = images.to(device)
            fake = made(torch.randn(len(real), 64, 1, 1, device=device))
            loss = softplus(-judge(real)).mean() + softplus(judge(fake.detach())).mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            of_made.zero_grad()
            softplus(-judge(fake)).mean().backward()
            of_made.step()
        print(f"epoch {epoch}: loss of the discriminator {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
