"""Effects of knobs on single objects, which a whole launch would hide."""

import os
import pickle
import time

import pytest
import torch
from torch import nn
from torch._dynamo.mutation_guard import GenerationTracker
from torch.optim.optimizer import _device_dtype_check_for_fused

from autotune.base.records import DataRef, SlowStore
from autotune.knobs import KNOBS
from autotune.knobs.optimizer_impl import impls_offered, own_impl
from autotune.training.feed import behind_store, stopwatch
from autotune.training.process_settings import process
from autotune.training.step import Repeated, Step, apply_model, apply_optimizer, loader_options, move, step_plan


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
    # GradScaler would pass its scale to kernels that assert there is none, or that spoil SGD's momentum with it.
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("mode", "left"), [("off", True), ("default", True), ("reduce-overhead", False)])
def test_a_step_with_cuda_graphs_leaves_no_gradients_and_marks_no_iterations(monkeypatch, mode, left, precision):
    """Marks would outlast the training: evaluations, which have none, would count as one endless iteration."""
    marks, seen = [], []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()

    def gradients(model):
        seen.append([p.grad is not None for p in model.parameters()])

    config = {"compile_mode": mode, "precision": precision}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"after_backward": gradients, "after_step": gradients}
    step = Step(model, optimizer, lambda m, x: m(x).square().mean(), config, "cpu", **hooks)
    losses = [step(torch.ones(3, 2)) for _ in range(2)]
    assert seen == [[True, True]] * 4
    assert [p.grad is not None for p in model.parameters()] == [left, left]
    assert not torch.equal(model.weight, before)
    assert not any(loss.requires_grad for loss in losses)
    assert not marks


def test_torch_takes_each_call_of_a_compiled_model_as_a_new_iteration():
    """CUDA graphs rely on it where no iterations are marked, in training and in evaluation."""
    model = nn.Linear(2, 1)
    model.compile(backend="eager")
    seen = []
    for number in range(6):
        with torch.set_grad_enabled(number < 3):
            found = model.train(number < 3)(torch.ones(3, 2)).sum()
        seen.append(GenerationTracker.generation)
        if found.requires_grad:
            found.backward()
        assert GenerationTracker.generation == seen[-1], "the backward pass belongs to the same iteration"
    assert len(set(seen)) == 6 and seen == sorted(seen)


def test_an_optimizer_without_flags_supports_one_implementation():
    assert impls_offered(torch.optim.LBFGS(nn.Linear(2, 2).parameters()), "cpu") == ("for-loop",)


def test_fused_kernels_for_cpus_only_are_not_offered_on_a_card() -> None:
    class Older(torch.optim.Adagrad):
        def _init_group(self, group, *lists):
            # As in the versions before it had such kernels.
            for p in group["params"]:
                _device_dtype_check_for_fused(p, cuda_unsupported=True)

    older, adam = (kind(nn.Linear(2, 2).parameters(), fused=True) for kind in (Older, torch.optim.Adam))
    assert impls_offered(older, "cuda") == ("for-loop", "foreach")
    assert impls_offered(older, "cpu") == impls_offered(adam, "cuda") == ("for-loop", "foreach", "fused")


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
    moved = move(batch, torch.device("cpu"), non_blocking=False, channels_last=4)
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)
    assert moved["ids"].is_contiguous()
    assert moved["boxes"][0].is_contiguous()
    assert moved["n"] == 1


def test_volumes_have_a_layout_of_their_own():
    batch = [torch.ones(2, 3, 4, 4, 4), torch.ones(2, 3, 4, 4)]
    volumes, images = move(batch, torch.device("cpu"), non_blocking=False, channels_last=5)
    assert volumes.is_contiguous(memory_format=torch.channels_last_3d) and images.is_contiguous()
    model = apply_model(nn.Conv3d(3, 4, 3), {"memory_format": "channels_last_3d"}, "cpu")
    assert model.weight.is_contiguous(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"memory_format": "channels_last_3d", "batch_size": 2}
    step = Step(model, optimizer, lambda m, x: m(x).square().mean(), config, "cpu")
    assert torch.isfinite(step(torch.randn(2, 3, 4, 4, 4)))
    knob = KNOBS["memory_format"]
    for value, layout in (("contiguous", torch.contiguous_format), ("channels_last_3d", torch.channels_last_3d)):
        knob.switch_model(model, optimizer, value)
        assert knob.is_in_force(model, optimizer, value)
        assert optimizer.state[model.weight]["momentum_buffer"].is_contiguous(memory_format=layout)


@pytest.fixture
def usual_algorithms():
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_are_asked_for(usual_algorithms, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    process({"deterministic": True})
    assert torch.are_deterministic_algorithms_enabled()
    # Put where CUDA's libraries look for it, before they are loaded.
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    process({"deterministic": False})
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("config", "asynchronous"),
    [
        ({"pin_memory": True}, True),
        ({"pin_memory": True, "non_blocking": False}, False),
        ({"pin_memory": True, "non_blocking": True}, True),
        ({"pin_memory": False}, False),
    ],
)
def test_copies_are_asynchronous_as_the_knob_says_or_as_before_there_was_one(config, asynchronous):
    assert step_plan(config).non_blocking is asynchronous


class Lengths(torch.utils.data.Dataset):
    """Three samples that can be read at once, and more that is known of them."""

    lengths = (1, 2, 3)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return [(10, 11, 12)[index] for index in indices]


def test_wrapped_data_sets_tell_what_they_know_and_read_by_their_own_rules(tmp_path):
    data = DataRef(kind="folder", path=str(tmp_path), store=SlowStore(latency_s=0.0), epoch_samples=100)
    wrapped, _ = stopwatch(Repeated(behind_store(Lengths(), data), 100), list)
    assert wrapped.lengths == (1, 2, 3) and len(wrapped) == 100
    assert wrapped.__getitems__([0, 4, 99]) == [10, 11, 10]
    again = pickle.loads(pickle.dumps(wrapped))
    assert again.lengths == (1, 2, 3) and again[5] == 12
    with pytest.raises(AttributeError):
        _ = wrapped.nothing_of_the_kind


class Slow(torch.utils.data.Dataset):
    """Four samples, each of which takes 20 ms."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.02)
        return index


@pytest.mark.parametrize("batch_size", [2, None])
def test_batches_of_single_samples_are_timed(batch_size):
    """A loader of the user's own may take a wrapped data set's samples one by one."""
    data, collate = stopwatch(Slow(), lambda samples: samples)
    joined = torch.utils.data.ConcatDataset([data])
    for _, made in torch.utils.data.DataLoader(joined, batch_size=batch_size, collate_fn=collate):
        assert 0.02 * (batch_size or 1) <= made.seconds < 10
    # Of other data it is not known how long it took.
    _, collate = stopwatch(Slow(), lambda samples: samples)
    assert [made.seconds for _, made in torch.utils.data.DataLoader(range(4), collate_fn=collate)] == [0.0] * 4


def test_a_packed_sequence_moves_itself():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    moved = move(packed, torch.device("cpu"), non_blocking=False, channels_last=0)
    assert isinstance(moved, nn.utils.rnn.PackedSequence)
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
