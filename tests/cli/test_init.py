"""`autotune init`: a plain workload that runs, and the parts of a training script."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from autotune.base.records import DataRef
from autotune.cli.init import NotTold, Script
from autotune.cli.main import run
from autotune.workload.contract import Context

TRAIN = Path(__file__).with_name("plain_training.py")


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("searching_here")
def test_the_plain_workload_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init"]) == 0
    # A dry run sets a search up and probes the workload, which opens its data and builds its model and optimizer.
    capsys.readouterr()
    assert run(["search", "--model", "mine.py", "--device", "cpu", "--dry-run", "--json"]) == 0
    assert "64" in json.dumps(json.loads(capsys.readouterr().out))
    text = (tmp_path / "mine.py").read_text()
    assert text == "\n".join(line.rstrip() for line in text.split("\n")) and "\n\n\n\n" not in text


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("mine = 1\n")
    assert run(["init"]) == run(["init", "mine.py"]) == run(["init", "not-a-module.py"]) == 2
    assert (tmp_path / "mine.py").read_text() == "mine = 1\n"
    assert "mine.py exists already" in capsys.readouterr().err


def test_the_parts_of_a_plain_training_script(tmp_path: Path, capsys: Any) -> None:
    """The script runs for minutes if it is imported, so it is not."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.read_text())
    assert run(["init", "--from", str(script)]) == 0
    assert "TODO" not in capsys.readouterr().out
    path = tmp_path / "train_workload.py"
    lines = script.read_text().splitlines()
    quoted = [int(n) for n in re.findall(r"# From line (\d+) of train.py", path.read_text())]
    assert len(quoted) == 4
    for wanted in ("Net(", "Blobs(", "AdamW(", "criterion("):
        assert any(wanted in lines[number - 1] for number in quoted), wanted
    found = loaded(path)
    assert found.BATCH_SIZE == 48
    ctx = Context(device="cpu", batch_size=48, image_size=None, seed=0, data=DataRef(kind="none"))
    model = found.model(ctx)
    # The script replaces the last layer after the model is made.
    assert [type(m).__name__ for m in model.children()] == ["Linear", "Linear"]
    assert model.first.in_features == 64 and model.last.out_features == 10
    data = found.dataset(ctx)
    assert len(data) == 2048
    optimizer = found.optimizer(ctx, model)
    assert type(optimizer).__name__ == "AdamW"
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.05, 0.01)
    import torch

    inputs, labels = (torch.stack(column) for column in zip(*(data[i] for i in range(8)), strict=True))
    loss = found.loss(ctx, model, (inputs, labels))
    expected = torch.nn.functional.cross_entropy(model(inputs), labels, label_smoothing=0.1)
    assert loss.shape == () and loss.requires_grad and torch.allclose(loss, expected)
    # What the four functions do not need is not taken.
    assert "argparse" not in path.read_text() and "def evaluate" not in path.read_text()


@pytest.mark.parametrize(
    ("part", "script", "reason"),
    [
        ("optimizer", "x = 1", "no torch.optim optimizer"),
        ("dataset", "optimizer = torch.optim.SGD(m.parameters())", "no DataLoader is assigned"),
        (
            "model",
            "if big: net = A()\nelse: net = B()\no = optim.Adam(net.parameters())",
            "line 2 decides it only when",
        ),
        ("model", "def go(net):\n    o = optim.Adam(net.parameters())", "what go() gets for net is not certain"),
        ("model", "net = make(sizes)\no = optim.Adam(net.parameters())", "where make comes from was not found"),
        ("loss", "net = 1\no = optim.Adam(net.parameters())\nfor x in y: pass", "no LOSS.backward()"),
        ("dataset", "a = p.parse_args()\nl = DataLoader(open(a.path))", "a.path has no default"),
        ("batch_size", "l = DataLoader([], batch_size=2 * n)", "where n comes from"),
    ],
)
def test_what_is_not_certain_is_not_told(part: str, script: str, reason: str) -> None:
    with pytest.raises(NotTold) as caught:
        getattr(Script(script), part)()
    assert str(caught.value).startswith(reason)


def test_casts_stay_and_moves_to_a_device_go(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda")
inputs = torch.arange(12).reshape(6, 2)
inputs = inputs.float()
labels = torch.zeros(6, dtype=torch.int32)
labels = labels.to(device).to("cuda", torch.long)
model = torch.nn.Linear(2, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=2)
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device=device))
    loss.backward()
    optimizer.step()
"""
    )
    assert run(["init", str(tmp_path / "own.py"), "--from", str(script)]) == 0
    capsys.readouterr()
    found = loaded(tmp_path / "own.py")
    ctx = Context(device="cpu", batch_size=2, image_size=None, seed=0, data=DataRef(kind="none"))
    x, y = found.dataset(ctx)[0]
    assert (str(x.dtype), str(y.dtype)) == ("torch.float32", "torch.int64")
    assert found.loss(ctx, found.model(ctx), (x[None], y[None])).shape == ()
    assert "cuda" not in "".join(line for line in (tmp_path / "own.py").read_text().split("\n") if "#" not in line)


def test_what_is_not_told_raises_when_it_is_used(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nmodel = torch.nn.Linear(2, 2)\nopt = torch.optim.SGD(model.parameters(), lr=1)\n")
    assert run(["init", str(tmp_path / "own.py"), "--from", str(script)]) == 0
    said = capsys.readouterr().out
    for part in ("dataset", "BATCH_SIZE"):
        assert f"{part}: not told by the script, because no DataLoader is assigned" in said
    found = loaded(tmp_path / "own.py")
    assert type(found.model(None)).__name__ == "Linear"
    for call in (lambda: found.dataset(None), lambda: found.loss(None, None, None)):
        with pytest.raises(NotImplementedError, match="is still to be written; train.py did not tell it"):
            call()
    assert "# TODO: no DataLoader is assigned." in (tmp_path / "own.py").read_text()


def test_a_script_that_cannot_be_read(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text("def (")
    for script in ("train.py", "nothing.py"):
        assert run(["init", str(tmp_path / "own.py"), "--from", str(tmp_path / script)]) == 2
    assert "cannot be read as Python" in capsys.readouterr().err
    assert not (tmp_path / "own.py").exists()
