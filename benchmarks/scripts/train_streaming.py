"""A text encoder on an iterable data set that shares its stream out among workers.

python train_streaming.py [--steps 100000]
"""

import argparse
import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WORDS, LENGTH = 1000, 64


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Random lines, without an end."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in itertools.count(first, every):
            generator = torch.Generator().manual_seed(number)
            yield torch.randint(0, WORDS, (LENGTH,), generator=generator), number % 10


class Encoder(nn.Module):
    """Two layers of a transformer, and the mean over a line."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores (N, 10) of token numbers (N, L)."""
        found: torch.Tensor = self.out(self.layers(self.words(tokens)).mean(1))
        return found


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(), batch_size=32)
    for step, (tokens, labels) in enumerate(itertools.islice(loader, options.steps), 1):
        loss = cross_entropy(model(tokens.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
