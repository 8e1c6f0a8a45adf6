"""Effects of knobs on single objects, which a whole launch would hide."""

import pytest
import torch
from torch import nn

from autotune.knobs.optimizer_impl import impls_offered, own_impl
from autotune.training import Step, apply_optimizer, loader_options, move


def sgd(**options) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9, **options)


@pytest.mark.parametrize(
    ("options", "impl"),
    [({}, "for-loop"), ({"fused": True}, "fused"), ({"foreach": True}, "foreach"), ({"foreach": False}, "for-loop")],
)
def test_an_optimizers_own_implementation_is_detected(options, impl):
    assert own_impl(sgd(**options), "cpu") == impl


def test_pytorch_picks_foreach_on_a_card():
    assert own_impl(sgd(), "cuda:0") == "foreach"


@pytest.mark.parametrize("made", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("impl", ["for-loop", "foreach", "fused"])
def test_every_implementation_takes_the_same_step(made, impl):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = apply_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **made), {"optimizer_impl": impl}
    )
    step = Step(model, optimizer, lambda m, x: m(x).square().mean(), {"optimizer_impl": impl}, "cpu")
    for _ in range(3):
        step(torch.ones(2, 4))
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        reference.zero_grad()
        plain(torch.ones(2, 4)).square().mean().backward()
        reference.step()
    assert torch.allclose(model.weight, plain.weight)
    # GradScaler would pass its scale to kernels that assert there is none.
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == (impl == "fused")


def test_an_optimizer_without_flags_supports_one_implementation():
    assert impls_offered(torch.optim.LBFGS(nn.Linear(2, 2).parameters()), "cpu") == ("for-loop",)


def test_a_loader_without_workers_has_no_worker_options():
    options = loader_options({"batch_size": 4, "num_workers": 0}, worker_start_method="fork")
    torch.utils.data.DataLoader(list(range(8)), **options)
    assert options.keys() == {"batch_size", "num_workers"}


def test_only_images_change_their_layout():
    batch = {
        "images": torch.ones(2, 3, 4, 4),
        "boxes": [torch.ones(3, 4)],
        "ids": torch.ones(2, 3, 4, 4).long(),
        "n": 1,
    }
    moved = move(batch, torch.device("cpu"), non_blocking=False, channels_last=True)
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)
    assert moved["ids"].is_contiguous()
    assert moved["boxes"][0].is_contiguous()
    assert moved["n"] == 1


def test_a_packed_sequence_moves_itself():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    moved = move(packed, torch.device("cpu"), non_blocking=False, channels_last=False)
    assert isinstance(moved, nn.utils.rnn.PackedSequence)
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
