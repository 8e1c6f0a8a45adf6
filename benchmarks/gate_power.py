"""Error rates of the does-it-train gate: many small trainings, some broken in known ways.

    python -m benchmarks.gate_power [--quick] [--seed N] [--markdown FILE]

Each training is run in eager fp32 with three seeds, in correct variants and in broken ones; `judgements.judge`
compares them. The thresholds were set with seeds from 0; the default seeds are different ones. Runs in this process, on
one CPU thread: seven minutes, or two with --quick.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autotune.base.clock import SystemClock
from autotune.base.records import Config, DataRef, Phase, TrainCheck
from autotune.child.launch import Beats
from autotune.child.train_check import changed_fraction, take_steps, trainable
from autotune.search.proof.train_check import judge
from autotune.training.step import build
from autotune.workload.contract import Context
from benchmarks.tables import ResultTable

STEPS, BATCHES = 24, 4
CLASSES, SIDE = 10, 8
PIXELS = 3 * SIDE * SIDE
#: Learning rates from too low to too high.
RATES = {"sgd": (0.003, 0.03, 0.1, 0.5), "adamw": (1e-4, 1e-3, 1e-2, 5e-2)}
RIGHT: dict[str, Config] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "channels_last": {"memory_format": "channels_last"},
    "bf16, channels_last, fused": {"precision": "bf16", "memory_format": "channels_last", "optimizer_impl": "fused"},
    "bf16, dropout draws otherwise": {"precision": "bf16"},
}
#: Changes to the gradients, of all tensors or of the first half.
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "no gradients in half of the tensors": lambda gradient: None,
    "gradients are zero": torch.zeros_like,
    "gradients of the wrong sign": torch.neg,
    "gradients are noise": lambda gradient: torch.randn_like(gradient) * gradient.std(unbiased=False),
    "gradients 10 times too large": lambda gradient: 10 * gradient,
    "gradients 10 times too small": lambda gradient: gradient / 10,
}
#: Changes to images and labels, or to the loss.
OTHERS = ("loss of twice its size", "labels shuffled", "images scrambled, always alike", "images are zero")
#: Classes by how much the loss of eager fp32 fell, relative to its first quarter.
FELL = ((-1e9, 0.02, "less than 2 %"), (0.02, 0.1, "2 to 10 %"), (0.1, 0.3, "10 to 30 %"), (0.3, 1e9, "more"))


class Patches(nn.Module):
    """A small transformer over 2 × 2 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(F.unfold(images, 2, stride=2).transpose(1, 2))
        scores: torch.Tensor = self.head(self.encoder(tokens).mean(1))
        return scores


def perceptron(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(PIXELS, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, CLASSES))


def convolutions() -> nn.Module:
    blocks: list[nn.Module] = []
    for inside, outside, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 1)):
        blocks += [nn.Conv2d(inside, outside, 3, stride, 1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def deep() -> nn.Module:
    hidden = [layer for _ in range(8) for layer in (nn.ReLU(), nn.Linear(32, 32))]
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 32), *hidden, nn.ReLU(), nn.Linear(32, CLASSES))


def regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 32), nn.Tanh(), nn.Linear(32, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "dropout": lambda: perceptron(0.5),
    "convolutions": convolutions,
    "transformer": Patches,
    "deep": deep,
    "regression": regression,
}


@dataclass(frozen=True)
class Training:
    """A workload for `training.build`; ``spoilt`` names what is broken, if anything."""

    name: str
    optimizer_name: str
    rate: float
    spoilt: str | None = None

    def model(self, ctx: Context) -> nn.Module:
        return MODELS[self.name]()

    def dataset(self, ctx: Context) -> Any:
        return []  # the training data comes from `batches`

    def optimizer(self, ctx: Context, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(model.parameters(), self.rate)
        return torch.optim.SGD(model.parameters(), self.rate, momentum=0.9, weight_decay=1e-4)

    def loss(self, ctx: Context, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        if self.spoilt == "images are zero":
            images = torch.zeros_like(images)
        if self.spoilt == "images scrambled, always alike":
            images = images.permute(0, 2, 3, 1).contiguous().view(images.shape)
        if self.spoilt == "labels shuffled":
            labels = labels[torch.randperm(len(labels))]
        scores = model(images)
        if self.name == "regression":
            value = F.mse_loss(scores.squeeze(1).float(), labels - 4.5)
        else:
            value = F.cross_entropy(scores, labels)
        return 2 * value if self.spoilt == "loss of twice its size" else value

    def after_backward(self, ctx: Context, model: nn.Module) -> None:
        spoil = GRADIENTS.get(self.spoilt or "")
        parameters = list(model.parameters())
        if self.spoilt == "no gradients in half of the tensors":
            parameters = parameters[: len(parameters) // 2]
        for parameter in parameters if spoil else []:
            parameter.grad = spoil(parameter.grad) if spoil and parameter.grad is not None else None


def batches(size: int, learnable: bool, seed: int) -> list[Any]:
    """``(images: (size, 3, SIDE, SIDE), labels: (size,))``; if learnable, each label has a pattern."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE, generator=draw)
    made = []
    for _ in range(BATCHES):
        labels = torch.randint(0, CLASSES, (size,), generator=draw)
        noise = torch.randn(size, 3, SIDE, SIDE, generator=draw)
        made.append(((0.7 if learnable else 0.0) * patterns[labels] + noise, labels))
    return made


def run(training: Training, given: list[Any], config: Config, weights_seed: int, dropout_seed: int) -> TrainCheck:
    """Run a train check in this process, without a launch."""
    ctx = Context("cpu", len(given[0][1]), SIDE, weights_seed, DataRef(kind="none"))
    step = build(training, ctx, config)
    before = trainable(step.model)
    torch.manual_seed(dropout_seed)
    descriptor = os.open(os.devnull, os.O_WRONLY)
    beats = Beats(descriptor, SystemClock())
    beats.enter(Phase.COMPILE)
    losses, finite, skips = take_steps(step, given, STEPS, beats)
    os.close(descriptor)
    changed = changed_fraction(before, step.model)
    return TrainCheck(losses=tuple(losses), finite=finite, changed=changed, scaler_skips=skips)


def trainings(quick: bool, first_seed: int) -> Iterator[tuple[Training, list[Any], int]]:
    """Yield each training with its batches and its seed."""
    sizes = (16,) if quick else (4, 16, 64)
    kinds = product(MODELS, RATES, sizes, (True, False))
    for seed, (name, optimizer, size, learnable) in enumerate(kinds, first_seed):
        for rate in RATES[optimizer]:
            yield Training(name, optimizer, rate), batches(size, learnable, seed), seed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    unfit = total = 0
    for training, given, seed in trainings(options.quick, options.seed):
        total += 1
        references = [run(training, given, {}, seed + other, seed + other) for other in range(3)]
        if judge(references[0], references).passed is None:
            unfit += 1
            continue
        quarter = STEPS // 4
        fell = min(1 - mean(r.losses[-quarter:]) / mean(r.losses[:quarter]) for r in references)
        column = next(label for low, high, label in FELL if low <= fell < high)
        for name, config in RIGHT.items():
            found = run(training, given, config, seed, seed + 77 if "otherwise" in name else seed)
            counts[f"right: {name}", column].append(judge(found, references).passed is False)
        for spoilt in (*OTHERS, *GRADIENTS):
            found = run(replace(training, spoilt=spoilt), given, {"precision": "bf16"}, seed, seed)
            counts[f"wrong: {spoilt}", column].append(judge(found, references).passed is False)
    labels = tuple(label for *_, label in FELL)
    table = ResultTable(f"What fails the gate, of {total - unfit} trainings by how far fp32's loss fell", ("", *labels))
    for name in dict.fromkeys(name for name, _ in counts):
        failed = [counts[name, label] for label in labels]
        table.add(name, *(f"{sum(f)} of {len(f)}" for f in failed))
    table.notes.append(f"In {unfit} more trainings eager fp32 itself fails or diverges, so nothing can be said.")
    table.show(options.markdown)


if __name__ == "__main__":
    main()
