"""A workload given as a model and a data set that exist already: copied by value, or refused with what cannot be."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.base.errors import UsageError, WorkloadError
from autotune.search.tuning.workload_file import carried_argument, is_live
from autotune.workload.carrying import Carried

#: A script with objects of its own classes; it prints the file of the workload.
SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn
from beside import scale
from autotune.search.tuning import _model

torch.manual_seed(7)
WIDTH = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.layer(x)


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = lambda x: scale(x) + WIDTH

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transform(torch.full((WIDTH,), float(index)))


def loss(model, batch):
    assert isinstance(model, Net)
    return model(batch).mean()


def main():
    rate = 0.5
    net = Net()
    print(_model(net, {"dataset": Rows(), "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=rate),
                       "loss": loss}, Path(sys.argv[1])))
    print(float(net.layer.weight.sum()).hex())


main()
"""
#: What a trial does with the file: in another process, with loader workers of several start methods, and each model as
#: it was at first.
TRIAL = """
import sys
from pathlib import Path
from autotune import Context
from autotune.workload.catalog import find_workload
from autotune.base.records import DataRef
from autotune.training.step import build, open_loader
from autotune.workload.contract import load

if __name__ == "__main__":
    workload = load(find_workload(sys.argv[1], {}))
    ctx = Context("cpu", 4, None, 0, DataRef(kind="none"))
    sums = []
    for method in ("fork", "spawn"):
        config = {"batch_size": 4, "num_workers": 1}
        step = build(workload, ctx, config)
        sums.append(float(step.model.layer.weight.sum()).hex())
        assert step.optimizer.param_groups[0]["lr"] == 0.5
        for batch in open_loader(workload, ctx, config, worker_start_method=method):
            assert torch_isfinite(step(batch))
        assert step.model.seen == 2
    print(*sums)
"""


def python(script: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, check=False, timeout=120, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_objects_of_a_script_are_trained_in_other_processes(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def scale(x): return 2 * x\n")
    script, trial = tmp_path / "train.py", tmp_path / "elsewhere" / "trial.py"
    trial.parent.mkdir()
    script.write_text(SCRIPT)
    trial.write_text(TRIAL.replace("torch_isfinite", "__import__('torch').isfinite"))
    path, weights = python(script, str(tmp_path / "studies"))
    assert Path(path).name == "Net_workload.py"
    # The same weights at each begin, and those of the script.
    assert python(trial, path) == [f"{weights} {weights}"]
    damaged = Path(path).with_name("model.pickle")
    damaged.write_bytes(damaged.read_bytes() + b".")
    with pytest.raises(AssertionError, match="model.pickle is not what the search began with"):
        python(trial, path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_pickle_of_somebody_else_is_not_loaded_though_it_is_what_was_written(tmp_path: Path) -> None:
    made = tmp_path / "made"
    content = pickle.dumps(_Opens(made))
    (tmp_path / "model.pickle").write_bytes(content)
    carried = Carried(tmp_path, {"model": hashlib.sha256(content).hexdigest()}, ())
    os.chown(tmp_path / "model.pickle", 12345, 12345)
    with pytest.raises(WorkloadError, match=r"model.pickle cannot be read: it belongs to the user 12345, not to you"):
        carried.part("model")
    assert not made.exists()
    # Of this user, and another one than was written.
    os.chown(tmp_path / "model.pickle", os.geteuid(), -1)
    with pytest.raises(WorkloadError, match=r"model.pickle is not what the search began with"):
        Carried(tmp_path, {"model": "0" * 64}, ()).part("model")
    assert not made.exists()


class _Opens:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


class Rows(torch.utils.data.Dataset[int]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 1


class OnCard(torch.Tensor):
    """Stands for a tensor on a card, which there need not be."""

    device = torch.device("cuda:0")


def on_card() -> torch.Tensor:
    return torch.zeros(1).as_subclass(OnCard)


OPENED = contextlib.ExitStack()


def opened() -> Any:
    """An open file, closed when the test has ended: one left to the collector would warn in some other test."""
    return OPENED.enter_context(Path(__file__).open())


@pytest.fixture(autouse=True)
def _close_opened() -> Iterator[None]:
    with OPENED:
        yield


def net(**attributes: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(made[0], name, value)
    return made


NET, CRITERION = nn.Linear(2, 2), nn.PReLU()


def forgetful(model: nn.Module, batch: Any) -> Any:
    return NET(batch)


def with_parameters(model: nn.Module, batch: Any) -> Any:
    return CRITERION(model(batch))


# As if a script had defined them: what an importable module defines is imported from there.
for function in (forgetful, with_parameters):
    function.__module__ = "__main__"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dataset": lambda: Rows(file=opened())}, "dataset.file is an open file"),
        ({"dataset": lambda: Rows(parts=[1, {"a": opened()}])}, "dataset.parts[1]['a'] is an open file"),
        ({"dataset": lambda: Rows(cached=on_card())}, "dataset.cached is on the device cuda:0"),
        ({"model": lambda: net(table=on_card())}, "model.0.table is on the device cuda:0"),
        ({"model": lambda: net(log=threading.Lock())}, "model.0.log cannot be copied into other processes: "),
        ({"loss": lambda: forgetful, "model": lambda: NET}, "loss uses 'NET', which is the model itself"),
        ({"loss": lambda: with_parameters}, "loss uses 'CRITERION', which has parameters"),
        ({"optimizer": lambda: torch.optim.SGD(NET.parameters(), lr=1.0)}, "optimizer must be a function, not a SGD"),
        ({"dataset": lambda: "folder"}, "dataset must be given itself, or as a function that makes it, not as a str"),
        ({"dataset": lambda: torch.utils.data.DataLoader([1])}, "dataset is a loader, and each trial makes its own"),
        ({"loss": nn.CrossEntropyLoss}, "loss must be a function, not a CrossEntropyLoss"),
    ],
)  # fmt: skip
def test_what_cannot_be_copied_is_named(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    parts = {"model": net, "dataset": Rows, "optimizer": lambda: torch.optim.SGD, "loss": lambda: len}
    with pytest.raises(UsageError) as caught:
        carried_argument({name: make() for name, make in {**parts, **changed}.items()}, tmp_path)
    assert str(caught.value).startswith(sentence)
    assert not list(tmp_path.iterdir())


def test_what_is_live() -> None:
    assert is_live("model", net()) and is_live("dataset", Rows()) and is_live("dataset", [1, 2])
    assert not is_live("model", nn.Linear) and not is_live("dataset", Rows) and not is_live("dataset", net)


#: Functions of a script, whose batches are of a class of its own.
BATCHES = """
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from autotune.search.tuning.workload_file import model_argument


@dataclass
class Batch:
    values: torch.Tensor


def model(): return torch.nn.Linear(1, 1)
def dataset(): return [torch.zeros(1)] * 8
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
def loss(model, batch): return model(batch.values).mean()
def collate(ctx): return together
def together(samples): return Batch(torch.stack(samples))


parts = {"model": model, "dataset": dataset, "optimizer": optimizer, "loss": loss, "collate": collate}
print(model_argument(parts, Path(sys.argv[1])))
"""
DELIVERED = """
import sys
from autotune import Context
from autotune.base.records import DataRef
from autotune.training.step import open_loader
from autotune.workload.catalog import find_workload
from autotune.workload.contract import load

if __name__ == "__main__":
    workload = load(find_workload(sys.argv[1], {}))
    ctx = Context("cpu", 4, None, 0, DataRef(kind="none"))
    for method in ("fork", "spawn"):
        loader = open_loader(workload, ctx, {"batch_size": 4, "num_workers": 1}, worker_start_method=method)
        print(*(type(batch).__name__ for batch in loader))
"""


@pytest.mark.slow
def test_workers_hand_over_batches_of_a_class_of_the_scripts_own(tmp_path: Path) -> None:
    script, trial = tmp_path / "train.py", tmp_path / "elsewhere" / "trial.py"
    trial.parent.mkdir()
    script.write_text(BATCHES)
    trial.write_text(DELIVERED)
    (path,) = python(script, str(tmp_path / "studies"))
    assert python(trial, path) == ["Batch Batch", "Batch Batch"]
