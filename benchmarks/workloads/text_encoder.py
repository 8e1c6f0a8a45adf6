"""A small transformer that classifies texts, which are cut into tokens by Python code as they are read.

No convolution, no photographs: what it has in common with the other workloads here is only that it trains.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from autotune import Context

BATCH_SIZE = 32
LENGTH, VOCABULARY, WIDTH, LAYERS, CLASSES = 128, 8192, 192, 4, 20
#: Characters of a text.
CHARACTERS = 2400

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens (N, LENGTH) int64, labels (N,) int64


class Texts(Dataset[tuple[torch.Tensor, int]]):
    """Texts made of a few letters at random, cut at blanks; each word's token is a hash of its letters."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        letters = torch.randint(0, 12, (64, CHARACTERS), generator=generator).tolist()
        self.texts = ["".join("abcdefgh    "[i] for i in row) for row in letters]

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        tokens = []
        for word in self.texts[index % len(self.texts)].split():
            token = 7
            for letter in word:
                token = (token * 31 + ord(letter)) % VOCABULARY
            tokens.append(token)
        tokens = (tokens + [0] * LENGTH)[:LENGTH]
        return torch.tensor(tokens), index % CLASSES


class Encoder(nn.Module):
    """Token and place embeddings, some layers of attention, the mean of what comes out, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, CLASSES)`` of tokens ``(N, LENGTH)``."""
        hidden = self.layers(self.tokens(tokens) + self.places)
        logits: torch.Tensor = self.head(hidden.mean(dim=1))
        return logits


def model(ctx: Context) -> nn.Module:
    torch.manual_seed(ctx.seed)
    return Encoder()


def dataset(ctx: Context) -> Dataset[Any]:
    return Texts(ctx.seed)


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, labels = batch
    return nn.functional.cross_entropy(model(tokens), labels)
