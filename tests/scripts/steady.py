"""A training of known speed that knows nothing of autotune, and ends as it is told."""

import argparse
import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class OwnError(Exception):
    def __init__(self, what, number):
        super().__init__(f"{what} is odd")


class Slow(Dataset):
    def __init__(self, load_s, kill_worker, samples=320):
        self.load_s = load_s
        self.kill_worker = kill_worker
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if self.kill_worker and get_worker_info() is not None and index > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.load_s)
        return torch.zeros(4), index % 2


class Again:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        while True:
            yield from self.inner


class Endless(DataLoader):
    """Keeps its workers for all epochs, and makes its one iterator in a way of its own, as detectors' loaders do."""

    kept = None

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))

    def __iter__(self):
        if self.kept is None:
            self.kept = self._get_iterator()
        for _ in range(len(self.batch_sampler)):
            yield next(self.kept)


def fail(how):
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "torch.OutOfMemoryError":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if how == "MemoryError":
        raise MemoryError
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise OwnError("the loss", 1) from error


def main():
    parser = argparse.ArgumentParser()
    for name in ("step-s", "load-s", "evaluate-s"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--nan-at", type=int, default=0)
    parser.add_argument("--raise-at", type=int, default=0)
    parser.add_argument("--error", default="")
    parser.add_argument("--background", default="")
    for name in ("stubborn", "kill-worker", "scale", "endless"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.background:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        with open(options.background, "w") as file:
            file.write(str(child.pid))
        print("begins")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = Endless if options.endless else DataLoader
    loader = kind(Slow(options.load_s, options.kill_worker, options.samples), batch_size=8)
    scaler = torch.amp.GradScaler("cpu", enabled=options.scale)
    taken = 0
    for _ in range(options.epochs):
        for number, (inputs, labels) in enumerate(loader, 1):
            time.sleep(options.step_s)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss * float("nan") if taken + 1 == options.nan_at else loss).backward()
            if number % options.accumulate:
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            taken += 1
            if taken == options.raise_at:
                fail(options.error)
            if taken == options.steps:
                return
        if options.evaluate_s:
            with torch.no_grad():
                for inputs, _ in DataLoader(Slow(0.0, False), batch_size=64):
                    model(inputs)
            time.sleep(options.evaluate_s)


if __name__ == "__main__":
    main()
