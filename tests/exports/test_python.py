"""The snippet does what `autotune.load_profile` does, in a process that has no autotune: the same loader, and the same
losses bit by bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from autotune import profile as profiles
from autotune.base.records import Value
from autotune.profile.export import FORMATS
from autotune.training.step import split

from .profiles import CPU, CUDA, answer_of, profile_with

PLAIN: dict[str, Value] = {"precision": "fp32", "batch_size": 8, "num_workers": 0, "intra_op_threads": 1}
CONFIGURATIONS: dict[str, dict[str, Value]] = {
    "plain": {**PLAIN, "optimizer_impl": "for-loop"},
    "images in bf16, with workers": {**CPU, "batch_size": 8, "intra_op_threads": 1},
    "batches in slots": {
        **PLAIN,
        "num_workers": 2,
        "prefetch_factor": 2,
        "persistent_workers": False,
        "batch_memory": "slots",
    },
    "parts, deterministic": {
        **{**PLAIN, "gradient_accumulation": 4, "optimizer_impl": "foreach", "deterministic": True},
        **{"memory_format": "channels_last", "num_workers": 1, "prefetch_factor": 2, "persistent_workers": False},
    },
}
COMPILED: dict[str, dict[str, Value]] = {"compiled": {**PLAIN, "compile_mode": "default", "optimizer_impl": "fused"}}

#: Trains with whatever ``setup(config)`` gives, and says what the loader and the training were.
TRAINING = """
import json, sys
import torch
from torch import nn

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 42

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        return {"image": torch.randn(3, 8, 8, generator=made), "label": (index % 4, "name")}

def loss_fn(model, batch):
    layouts.append(batch["image"].is_contiguous(memory_format=torch.channels_last))
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"][0])

def train(loader, prepare, step):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    layouts.clear()
    batches = loader(Images())
    losses = [step(model, optimizer, loss_fn, batch) for batch in batches]
    assert not any(loss.requires_grad for loss in losses)
    group = optimizer.param_groups[0]
    how = batches.multiprocessing_context
    return {
        "losses": [loss.item().hex() for loss in losses],
        "weights": float(sum(p.double().sum() for p in model.parameters())).hex(),
        "loader": [batches.batch_size, batches.num_workers, batches.prefetch_factor, batches.pin_memory,
                   batches.persistent_workers, batches.drop_last, how and how.get_start_method(),
                   batches.collate_fn.__name__],
        "process": [torch.get_num_threads(), torch.get_float32_matmul_precision(),
                    torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark],
        "model": [model[0].weight.is_contiguous(memory_format=torch.channels_last), list(model.state_dict()),
                  model._compiled_call_impl is not None, group["fused"], group["foreach"], layouts],
    }

layouts = []
"""
WITHOUT = """
import builtins, importlib.util
sys.modules["autotune"] = None
for file in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("fast", file + ".py")
    fast = sys.modules["fast"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fast)
    found.append(train(fast.loader, fast.prepare, fast.step))
print(json.dumps(found))
"""
WITH = """
import autotune
for file in sys.argv[1:]:
    fast = autotune.load_profile(file + ".yaml")
    fast.process()
    def prepare(model, optimizer):
        return fast.model(model), fast.optimizer(optimizer)
    def step(model, optimizer, loss_fn, batch):
        return fast.step(model, optimizer, loss_fn)(batch)
    # Trials drop the last batch.
    found.append(train(lambda data: fast.loader(data, drop_last=True), prepare, step))
print(json.dumps(found))
"""


def both(configurations: dict[str, dict[str, Value]], folder: Path) -> tuple[list[Any], list[Any]]:
    """Return what trainings with the snippets and with the profiles themselves were like."""
    files = []
    for number, config in enumerate(configurations.values()):
        profile = profile_with(config)
        (folder / f"{number}.py").write_text(FORMATS["python"].export(profile).text)
        (folder / f"{number}.yaml").write_text(profiles.dump(profile))
        files.append(str(folder / str(number)))
    found = f"{TRAINING}\nfound = []\n"
    # Isolated: no PYTHONPATH, and nothing from this folder.
    alone = answer_of(found + WITHOUT, *files, folder=folder, options=("-I",))
    return alone, answer_of(found + WITH, *files, folder=folder)


@pytest.mark.slow
def test_trains_as_the_profile_does(tmp_path: Path) -> None:
    alone, applied = both(CONFIGURATIONS, tmp_path)
    assert alone == applied
    plain, images, slots, parts = alone
    assert plain["loader"] == [8, 0, None, False, False, True, None, "default_collate"] and len(plain["losses"]) == 5
    assert images["loader"] == [8, 2, 4, False, True, True, "fork", "default_collate"]
    assert slots["loader"] == [8, 2, 2, False, False, True, "fork", "collate_in_slots"]
    assert images["model"][0] and all(images["model"][-1]) and images["model"][3] is True
    assert len(parts["model"][-1]) == 4 * len(parts["losses"]) and parts["process"][2] is True
    assert plain["losses"] != images["losses"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_compiles_in_place_as_the_profile_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise each of them starts a pool of processes, which import torch.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    alone, applied = both(COMPILED, tmp_path)
    assert alone == applied
    assert alone[0]["model"][1] == ["0.weight", "0.bias", "3.weight", "3.bias"] and alone[0]["model"][2]


class Pair(NamedTuple):
    image: torch.Tensor
    names: list[str]


@dataclass
class Boxes:
    images: torch.Tensor
    of_each: list[torch.Tensor]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.arange(4), torch.ones(4, 3)),
        {"image": torch.ones(4, 3), "label": (torch.arange(4), "all"), "factor": 3.0, "nothing": None},
        ([torch.ones(n) for n in range(4)], [{"box": torch.zeros(n, 4)} for n in range(4)]),
        [torch.arange(4), torch.arange(4), torch.arange(4), torch.arange(4)],
        [1, 2, 3, 4],
        # An image with as many boxes as there are samples.
        (torch.arange(4), [torch.full((n, 2), n) for n in (1, 4, 2, 3)]),
        (torch.arange(4), [torch.full((4, 2), n) for n in range(4)]),
        Pair(torch.ones(4), ["a", "b", "c", "d"]),
        Boxes(torch.arange(4), [torch.full((4, 2), n) for n in range(4)]),
        torch.ones(4, 2),
    ],
    ids=repr,
)
def test_divides_a_batch_as_autotune_does(batch: Any) -> None:
    config: dict[str, Value] = {**PLAIN, "batch_size": 4, "gradient_accumulation": 2}
    fast: dict[str, Any] = {}
    threads = torch.get_num_threads()
    exec(FORMATS["python"].export(profile_with(config)).text, fast)
    torch.set_num_threads(threads)
    assert repr([fast["part"](fast["move"](batch), number) for number in (0, 1)]) == repr(split(batch, 4, 2))
    for other in (torch.ones(3), {1, 2, 3, 4}):
        with pytest.raises(ValueError, match="cannot be split"):
            fast["part"](other, 0)


def test_holds_nothing_that_the_knobs_do_not_do() -> None:
    plain = FORMATS["python"].export(profile_with(PLAIN)).text
    code = plain[plain.index("import torch") :]
    for word in ("autocast", "GradScaler", "channels_last", "compile", "cudnn", "os.environ", "PARTS", "foreach"):
        assert word not in code
    assert len(code.splitlines()) < 60


def test_what_needs_a_gpu_is_in_it() -> None:
    config: dict[str, Value] = {**CUDA, "compile_mode": "reduce-overhead", "deterministic": True}
    text = FORMATS["python"].export(profile_with(config)).text
    compile(text, "fast.py", "exec")
    for line in (
        'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"',
        'os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"',
        "torch.backends.cudnn.benchmark = True",
        "with torch.autocast(DEVICE.type, dtype=torch.float16):",
        "SCALER.scale(loss).backward()",
        "SCALER.unscale_(optimizer)",
        'model.compile(mode="reduce-overhead")',
        "parameter.grad = parameter.grad.clone()",
        "return batch.to(DEVICE, non_blocking=True)",
    ):
        assert line in text, line
    tf32 = FORMATS["python"].export(profile_with({**CUDA, "precision": "tf32"})).text
    assert 'torch.set_float32_matmul_precision("high")' in tf32 and "allow_tf32" not in tf32
    assert "GradScaler" not in tf32 and json.dumps("expandable_segments:True") in tf32
