"""A plain training script, read by `test_init`. Nothing imports it."""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 2048
CLASSES = 10


class Blobs(Dataset):
    """Vectors around one centre for each class."""

    def __init__(self, samples, width, train=True):
        generator = torch.Generator().manual_seed(0 if train else 1)
        self.labels = torch.randint(0, CLASSES, (samples,), generator=generator)
        self.inputs = torch.randn(samples, width, generator=generator) + self.labels[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Net(nn.Module):
    def __init__(self, width, hidden=128):
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.last = nn.Linear(hidden, CLASSES)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


def evaluate(model, loader, device):
    model.eval()
    hits = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    return hits / len(loader.dataset)


def train_one_epoch(net, loader, criterion, optimizer, scaler, device, amp):
    net.train()
    total = 0.0
    for step, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, enabled=amp):
            outputs = net(inputs)
            loss = criterion(outputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
        if step % 10 == 0:
            print(step, total / (step + 1))
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", "-b", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = Blobs(SAMPLES, args.width)
    test_set = Blobs(SAMPLES // 4, args.width, train=False)
    test_loader = DataLoader(test_set, batch_size=256)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=2)
    model = Net(args.width)
    model.last = nn.Linear(128, CLASSES)
    model = model.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler(enabled=args.amp)
    for epoch in range(args.epochs):
        began = time.time()
        train_one_epoch(model, train_loader, criterion, optimizer, scaler, device, args.amp)
        scheduler.step()
        print(epoch, evaluate(model, test_loader, device), time.time() - began)
    torch.save(model.state_dict(), os.path.join(".", "model.pt"))


if __name__ == "__main__":
    main()
