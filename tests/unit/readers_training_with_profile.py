"""A plain training of sixty lines, as a reader of the README has one. Prints each epoch's loss."""

import argparse

import torch
from torch import nn
from torch.utils import data

import autotune


class Waves(data.Dataset):
    """Noisy sine waves, of as many kinds as there are frequencies."""

    def __init__(self, samples, length=64):
        self.samples, self.length = samples, length

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        wave = torch.sin(torch.arange(self.length) * (1 + index % 4) / 4)
        return (wave + 0.5 * torch.randn(self.length, generator=generator))[None], index % 4


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Conv1d(1, width, 5, padding=2)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.relu(self.first(x)).mean(2)
        return self.last(self.drop(x))


def compute_loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    dataset = Waves(512)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    profile = autotune.load_profile("profile.yaml")
    loader, step = profile.prepare(model, optimizer, dataset, compute_loss, shuffle=True, drop_last=True)
    for _ in range(args.epochs):
        for batch in loader:
            loss = step(batch)
        scheduler.step()
        print(loss.item().hex())


if __name__ == "__main__":
    main()
