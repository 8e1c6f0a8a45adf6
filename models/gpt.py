"""A GPT on blocks of tokens. Its samples are tokens, so that all rates are in tokens per second.

Stresses the device: attention, compilation and checkpointing decide, and loading costs next to nothing.

Model: GPT-2 (Radford et al. 2019), with biases, learned positions and tied embeddings, initialized as in its paper;
optimizer: AdamW as in Brown et al. 2020 (arXiv:2005.14165, appendix B). Attention: PyTorch's
`scaled_dot_product_attention`, or its formula written out (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).
Checkpointing: each block's activations are computed again in the backward pass (Chen et al. 2016, arXiv:1604.06174).
`--data DIR` reads the tokens in `DIR/train.bin`, unsigned 16-bit numbers in the machine's order; without it, tokens
are drawn by Zipf's law.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from autotune import Context, knob

BATCH_SIZE = 8
#: GPT-2's smallest. `--arg depth=4 --arg width=256 --arg heads=4 --arg vocabulary=8192` fits a CPU.
ARGS = {"depth": "12", "width": "768", "heads": "12", "block": "256", "vocabulary": "50257"}
KNOBS = {
    "attention": knob("fused", "written out", changes_maths=False),
    "checkpointing": knob(False, True, changes_maths=False),
}

TOKENS = 10_000_000  # of a generated text

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and the next ones, each (N, block) int64


class Blocks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A text's blocks of tokens, one after the other, each with the tokens that follow."""

    def __init__(self, tokens: Any, block: int) -> None:
        self.tokens = tokens
        self.block = block

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.block
        part = torch.from_numpy(self.tokens[start : start + self.block + 1].astype(np.int64))
        return part[:-1], part[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        inner = 4 * width
        self.network = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attend(self.before_attention(states))
        found: torch.Tensor = states + self.network(self.before_network(states))
        return found

    def attend(self, states: torch.Tensor) -> torch.Tensor:
        count, length, width = states.shape
        parts = self.inward(states).view(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind()
        if self.fused:
            mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            scores = queries @ keys.transpose(-2, -1) / (width // self.heads) ** 0.5
            future = torch.ones(length, length, dtype=torch.bool, device=states.device).triu(1)
            mixed = scores.masked_fill(future, float("-inf")).softmax(-1).to(values.dtype) @ values
        found: torch.Tensor = self.outward(mixed.transpose(1, 2).reshape(count, length, width))
        return found


class GPT(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, block: int, vocabulary: int, ctx: Context) -> None:
        super().__init__()
        self.checkpointed = bool(ctx.knob("checkpointing"))
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        fused = ctx.knob("attention") == "fused"
        self.blocks = nn.ModuleList(Block(width, heads, fused=fused) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The sum of as many residuals grows with their number.
                last = name.endswith(("outward.weight", "network.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if last else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            states = checkpoint(block, states, use_reentrant=False) if self.checkpointed else block(states)
        return functional.linear(self.norm(states), self.tokens.weight)


def model(ctx: Context) -> nn.Module:
    depth, width, heads, block, vocabulary = (int(ctx.arg(name)) for name in ARGS)
    if width % heads:
        raise ValueError(f"width={width} cannot be divided among heads={heads}")
    return GPT(depth, width, heads, block, vocabulary, ctx)


def dataset(ctx: Context) -> Dataset[Any]:
    vocabulary, block = int(ctx.arg("vocabulary")), int(ctx.arg("block"))
    if ctx.data.kind == "folder":
        path = Path(str(ctx.data.path), "train.bin")
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}, which would hold the tokens as unsigned 16-bit numbers")
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        # A text that does not fit would end as an index error on the device.
        if int(tokens[: 2**20].max(initial=0)) >= vocabulary:
            raise ValueError(f"{path} has tokens beyond vocabulary={vocabulary}: give --arg vocabulary=…")
        return Blocks(tokens, block)
    rng = np.random.default_rng(ctx.seed)
    chances = 1 / np.arange(1, vocabulary + 1)
    drawn = np.searchsorted(np.cumsum(chances / chances.sum()), rng.random(TOKENS, dtype=np.float32))
    return Blocks(np.minimum(drawn, vocabulary - 1).astype(np.uint16), block)


def samples(ctx: Context, batch: Batch) -> int:
    return batch[0].numel()


def optimizer(ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


def loss(ctx: Context, model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, following = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def after_backward(ctx: Context, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
