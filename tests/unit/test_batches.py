"""Batches that are split into parts, and the gradients that the parts add up to."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune.base.errors import WorkloadError
from autotune.base.records import Config
from autotune.child.trail import _Tail
from autotune.training.step import Step, split
from autotune.training.whole_training.course import _samples_of

Pair = namedtuple("Pair", ["images", "labels"])


@dataclass
class Speech:
    sounds: torch.Tensor
    lengths: list[int]
    rate: int = 16_000


IMAGES, LABELS = torch.arange(12.0).reshape(4, 3), torch.arange(4)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        (IMAGES, IMAGES[2:]),
        ([IMAGES, LABELS], [IMAGES[2:], LABELS[2:]]),
        (Pair(IMAGES, LABELS), Pair(IMAGES[2:], LABELS[2:])),
        ({"x": IMAGES, "of": {"y": LABELS}, "scale": 2.0}, {"x": IMAGES[2:], "of": {"y": LABELS[2:]}, "scale": 2.0}),
        # A detector's: images of any size, and as many boxes in each.
        (
            (list(IMAGES), [{"boxes": torch.ones(n, 4)} for n in range(4)]),
            (list(IMAGES[2:]), [{"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(3, 4)}]),
        ),
        ((IMAGES, ["a", "b", "c", "d"], None, torch.tensor(7)), (IMAGES[2:], ["c", "d"], None, torch.tensor(7))),
    ],
)
def test_a_part_has_its_samples_of_everything(batch: Any, second: Any) -> None:
    first, found = split(batch, 4, 2)
    assert same(found, second) and not same(first, second)


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        # Two tensors of two samples, as the default collate function makes them, and two samples of any shape.
        ([IMAGES[:2], LABELS[:2]], [IMAGES[1:2], LABELS[1:2]]),
        ([IMAGES[0], IMAGES[1]], [IMAGES[1]]),
        # A detector's batch of two, and one in which the samples' sizes are as many as there are samples.
        (([IMAGES[0], IMAGES[1]], [{"n": 1}, {"n": 2}]), ([IMAGES[1]], [{"n": 2}])),
        (([torch.ones(2), torch.ones(5)], LABELS[:2]), ([torch.ones(5)], LABELS[1:2])),
    ],
)
def test_two_samples_are_told_from_two_batches(batch: Any, second: Any) -> None:
    assert same(split(batch, 2, 2)[1], second)


def test_a_dataclass_stays_one() -> None:
    parts = split(Speech(IMAGES, [1, 2, 3, 4]), 4, 4)
    assert [part.lengths for part in parts] == [[1], [2], [3], [4]] and parts[3].rate == 16_000
    assert torch.equal(parts[3].sounds, IMAGES[3:])


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ((IMAGES, torch.ones(5, 4)), r"it holds a Tensor of shape \(5, 4\)"),
        ((IMAGES, object()), "it holds a object"),
        ((torch.tensor(1.0), 3), "nothing in it has one item per sample"),
    ],
)
def test_what_cannot_be_split_is_named(batch: Any, what: str) -> None:
    with pytest.raises(WorkloadError, match=f"a batch of 4 samples cannot be split: {what}"):
        split(batch, 4, 2)


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))


def trained(config: Config, steps: int = 20) -> tuple[nn.Module, list[float], list[float]]:
    """Train; return the model, its losses, and the norms of the gradients when they were complete."""
    model, norms = network(), []
    step = Step(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda m, batch: functional.cross_entropy(m(batch[0]), batch[1]),
        {"batch_size": 24, **config},
        "cpu",
        after_backward=lambda m: norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.5))),
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(24, 6, generator=generator)
        losses.append(float(step((inputs, inputs[:, :3].argmax(dim=1)))))
    return model, losses, norms


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 3, 24])
def test_weights_are_those_of_the_plain_loop(parts: int) -> None:
    """20 steps of AdamW with clipping in fp32: the same function, added up in another order."""
    plain, losses, norms = trained({})
    found, in_parts, their_norms = trained({"gradient_accumulation": parts})
    assert in_parts == pytest.approx(losses, rel=1e-4) and their_norms == pytest.approx(norms, rel=1e-4)
    assert len(norms) == 20, "hooks after the backward pass are called once for all parts"
    for one, other in zip(plain.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    # The test would see a learning rate that is off by a percent.
    start = network()
    assert any((a - b).abs().max() > 0.05 for a, b in zip(start.parameters(), plain.parameters(), strict=True))


def test_a_scaled_loss_adds_up_as_well() -> None:
    _, losses, norms = trained({"precision": "fp16"})
    _, in_parts, their_norms = trained({"precision": "fp16", "gradient_accumulation": 4})
    assert in_parts == pytest.approx(losses, rel=0.02) and their_norms == pytest.approx(norms, rel=0.05)


def test_batch_norm_sees_the_statistics_of_a_part() -> None:
    """The caveat in the knob's page."""
    seen = []
    for parts in (1, 2):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        config: Config = {"batch_size": 4, "gradient_accumulation": parts}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Step(model, optimizer, lambda m, x: m(x).square().mean(), config, "cpu")(torch.arange(8.0).reshape(4, 2))
        seen.append(model[0].running_var.tolist())
    assert seen[0] != seen[1]


def test_a_batch_of_a_tokenizer_is_split_into_its_own_kind() -> None:
    """As transformers' `BatchEncoding`, which is a mapping and no dictionary."""
    first, second = split(UserDict({"ids": torch.arange(8).reshape(4, 2), "mask": torch.ones(4)}), 4, 2)
    assert isinstance(first, UserDict) and first["ids"].tolist() == [[0, 1], [2, 3]] and len(second["mask"]) == 2


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4)), 4),
        (((torch.zeros(4, 3), torch.zeros(4, 5)), torch.zeros(4)), 4),
        # Images of different shapes, and what is in them.
        (([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [{"boxes": torch.zeros(n, 4)} for n in (5, 1)]), 2),
        ({"ids": torch.zeros(6, 2)}, 6),
        ((torch.zeros(4, 3), torch.zeros(5)), None),
        ("text", None),
    ],
)  # fmt: skip
def test_how_many_samples_a_batch_has_is_told_by_what_all_agree_in(batch: Any, samples: int | None) -> None:
    assert _samples_of(batch) == samples


def test_a_line_that_was_cut_is_not_joined_to_another(tmp_path: Path) -> None:
    """A log is cut when it grows long, also in the middle of a line."""
    path = tmp_path / "log"
    path.write_bytes(b"")
    tail = _Tail(path, is_log=True)
    assert list(tail.lines()) == []
    path.write_bytes(b"one 1 images/s\ntwo 12")
    assert list(tail.lines()) == ["one 1 images/s"]
    path.write_bytes(b"")
    assert list(tail.lines()) == []
    path.write_bytes(b"3 images/s\n")
    assert list(tail.lines()) == ["3 images/s"]
    tail.close()
