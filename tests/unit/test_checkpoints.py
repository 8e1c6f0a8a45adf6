"""Checkpoints that are damaged, somebody else's or of another version, and what none can hold."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autotune.base.errors import MachineError, ResumeRefusedError, WorkloadError
from autotune.training.whole_training.checkpoints import (
    VERSION,
    Checkpoints,
    Head,
    check_plain,
    load_checkpoint,
    restore,
    states,
)

HEAD = Head(
    version=VERSION, torch="2", identity={"model": "m"}, mark="m", epochs=2, epoch=0, steps=3, over=False
)  # fmt: skip
OTHERS = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


class Opens:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def kept(tmp_path: Path, said: list[str]) -> Checkpoints:
    (tmp_path / "kept").mkdir()
    return Checkpoints(tmp_path / "kept", said.append)


def planted(kept: Checkpoints, made: Path, *, head: str | None) -> Path:
    """Write a checkpoint that makes a file when it is unpickled, under the hash that it has."""
    torch.save({"steps": Opens(made)}, kept.folder / "new")
    sha256 = hashlib.sha256((kept.folder / "new").read_bytes()).hexdigest()
    path = (kept.folder / "new").rename(kept.folder / f"checkpoint-000007-{sha256[:16]}.pt")
    if head is not None:
        path.with_suffix(".json").write_text(head)
    return path


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (None, "were written by another version of autotune"),
        (json.dumps({"version": VERSION + 1, "of": "a later one"}), "were written by another version of autotune"),
        (HEAD.model_dump_json(), "holds more than tensors and plain values, and was not loaded"),
    ],
    ids=["an earlier layout", "a later version", "with all that belongs to it"],
)
def test_nothing_in_a_checkpoint_is_run(
    kept: Checkpoints, said: list[str], tmp_path: Path, head: str | None, sentence: str
) -> None:
    path = planted(kept, tmp_path / "made", head=head)

    def take_up() -> None:
        found = kept.newest()
        assert found is not None
        load_checkpoint(found.path)

    with pytest.raises(ResumeRefusedError, match=sentence):
        take_up()
    assert path.exists() and not (tmp_path / "made").exists() and said == []


@needs_root
@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_one_of_somebody_else_is_refused_before_it_is_read(kept: Checkpoints, said: list[str], suffix: str) -> None:
    path = kept.save(HEAD, {"steps": 1}).with_suffix(suffix)
    os.chown(path, OTHERS, OTHERS)
    with pytest.raises(ResumeRefusedError, match=f"{path.name} is not gone on from: it belongs to the user {OTHERS}"):
        kept.newest()
    assert path.exists() and said == []


def test_a_link_is_not_followed(kept: Checkpoints, tmp_path: Path) -> None:
    path = kept.save(HEAD, {"steps": 1})
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResumeRefusedError, match="it is a symbolic link"):
        kept.newest()


def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(kept: Checkpoints, said: list[str]) -> None:
    first, second = kept.save(HEAD, {"steps": 1}), kept.save(HEAD, {"steps": 2})
    second.write_bytes(second.read_bytes()[:-20])
    found = kept.newest()
    assert found is not None and (found.path, found.head) == (first, HEAD)
    assert load_checkpoint(first) == {"steps": 1}
    aside = kept.folder / f"damaged-{second.name}"
    assert not second.exists() and aside.exists() and aside.with_suffix(".json").exists() and len(said) == 1


def test_so_is_one_of_which_the_file_beside_it_is_damaged(kept: Checkpoints, said: list[str]) -> None:
    path = kept.save(HEAD, {"steps": 1})
    path.with_suffix(".json").write_text(HEAD.model_dump_json()[:-5])
    with pytest.raises(MachineError, match="none of the checkpoints in .* is intact"):
        kept.newest()
    assert f"({path.stem}.json is not what was written)" in said[0]


def test_only_the_newest_two_are_kept_and_nothing_of_others(kept: Checkpoints) -> None:
    # Left by a process that was killed before its checkpoint had a name.
    (kept.folder / "checkpoint-000001-0123456789abcdef.json").write_text(HEAD.model_dump_json())
    assert kept.newest() is None
    paths = [kept.save(HEAD, {"steps": number}) for number in range(3)]
    wanted = {path.with_suffix(suffix) for path in paths[1:] for suffix in (".pt", ".json")}
    assert set(kept.folder.iterdir()) == wanted


def labelled() -> torch.Tensor:
    found = torch.zeros(2)
    found.label = Path("x")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        ({"best": np.float64(1.0)}, "['best']", "numpy.float64"),
        ({"a": [1, {"b": np.zeros(2)}]}, "['a'][1]['b']", "numpy.ndarray"),
        ({3: {"path": Path("x")}}, "[3]['path']", "pathlib"),
        ({"counts": defaultdict(int)}, "['counts']", "collections.defaultdict"),
        ({np.int64(1): 1}, " key ", "numpy.int64"),
        ((1, nn.Linear(1, 1)), "[1]", "torch.nn.modules.linear.Linear"),
        ([lambda: None], "[0]", "builtins.function"),
        ({"w": labelled()}, "['w']", "torch.Tensor"),
    ],
    ids=["a number of NumPy", "an array", "a path", "a class of dict", "a key", "a module", "a function", "a label"],
)
def test_what_none_can_hold_is_named_when_it_is_saved(kept: Checkpoints, value: Any, where: str, kind: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        kept.save(HEAD, {"workload": value})
    assert str(caught.value).startswith(f"state(ctx, model){where}") and f" is a {kind}" in str(caught.value)
    assert "tensors, numbers, text, and dicts, lists and tuples" in str(caught.value)
    assert not list(kept.folder.iterdir())


def test_what_one_can_hold_comes_back(kept: Checkpoints) -> None:
    check_plain({"workload": torch.eye(2).to_sparse()})
    itself: dict[str, Any] = {"one": 1}
    itself["self"] = itself
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    values = [None, True, 2**100, 1.5, 1j, "text", b"bytes", (1, (2, [])), {(1, 2): 3}, {1}, OrderedDict()]
    values += [torch.Size([2]), torch.bfloat16, torch.device("cpu")]
    parameter = nn.Parameter(torch.ones(2))
    path = kept.save(HEAD, {"workload": values, "p": parameter, "model": model.state_dict(), "itself": itself})
    back = load_checkpoint(path)
    assert back["workload"] == values and torch.equal(back["p"], parameter)
    assert back["itself"]["self"] is back["itself"]
    model.load_state_dict(back["model"])


def test_states_of_generators_of_every_kind_come_back(kept: Checkpoints) -> None:
    cpu, before = torch.device("cpu"), np.random.get_bit_generator()
    try:
        for generator in (np.random.MT19937(1), np.random.PCG64(1), np.random.Philox(1)):
            np.random.set_bit_generator(generator)
            with warnings.catch_warnings():
                # NumPy says that only the first kind has a state of the older form.
                warnings.simplefilter("ignore", RuntimeWarning)
                path = kept.save(HEAD, {"random": states(cpu)})
            drawn = np.random.rand(3)
            restore(load_checkpoint(path)["random"], cpu)
            assert np.array_equal(np.random.rand(3), drawn)
    finally:
        np.random.set_bit_generator(before)
