"""How many cards a script sees: as many as its launcher starts processes, in a search as in `autotune run`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.base.errors import ImpossibleError
from autotune.base.observer import Observer
from autotune.base.records import CommandRef, WorkloadRef
from autotune.machine.gpu import Gpu, NvmlUnavailable
from autotune.profile import Profile, read
from autotune.search import request, search, setup
from autotune.search.setup import Run
from autotune.search.subject import ALL, ranks_told, unlike_the_search
from autotune.study.history import read_launches
from autotune.study.launches import LaunchConditions
from tests.support import make_study_spec

from .cards import card, list_cards, make_machine
from .world import FIXED, World, plain

TWO = "torchrun --nproc-per-node=2 train.py"
MANY = "torchrun --nproc-per-node=gpu train.py"
PLAIN = "python train.py"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    make_machine(monkeypatch)
    return monkeypatch


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (TWO, 2),
        ("torchrun --standalone --nproc_per_node 8 train.py --lr 0.1", 8),
        ("python -m torch.distributed.run --nproc-per-node=4 -m package.train", 4),
        ("python -m torch.distributed.launch --nproc_per_node=4 train.py", 4),
        ("env NCCL_DEBUG=INFO accelerate launch --num_processes 2 train.py", 2),
        ("accelerate launch --multi_gpu --num-processes=3 -m package.train --num_processes 9", 3),
        ("accelerate launch --multi_gpu train.py", ALL),
        (MANY, ALL),
        ("torchrun --nproc-per-node auto train.py", ALL),
        ("torchrun --nproc-per-node=2 --nproc-per-node=3 train.py", 3),
        ("bash train.sh --nproc-per-node=2", 2),
        ("torchrun --nproc-per-node=cpu train.py", None),
        ("torchrun --nproc-per-node={gpus} train.py", None),
        ("torchrun --nproc-per-node", None),
        ("torchrun train.py --nproc-per-node=2", None),
        ("python train.py --num_processes 8", None),
        ("python -m package.train --num_processes 8", None),
        (PLAIN, None),
    ],
)
def test_what_a_command_says_of_its_ranks(command: str, told: int | None) -> None:
    assert ranks_told(shlex.split(command)) == told


def conditions(command: str | None, **asked: object) -> LaunchConditions:
    ref = None if command is None else CommandRef(words=tuple(shlex.split(command)), folder="/")
    spec = make_study_spec(command=ref, **asked)
    workload = WorkloadRef(name="train", module="")
    run = Run(Path(), spec, workload, *[None] * 3, devices=request.resolve_devices(spec))  # type: ignore[arg-type]
    return setup._first_conditions(run)


@pytest.mark.parametrize(
    ("command", "asked", "seen"),
    [
        (TWO, {}, "GPU-0a,GPU-1a"),
        (TWO, {"device": "cuda:1"}, "GPU-1a,GPU-2a"),
        (MANY, {}, "GPU-0a,GPU-1a,GPU-2a,GPU-3a"),
        (PLAIN, {}, "GPU-0a"),
        (PLAIN, {"device": "cuda:2"}, "GPU-2a"),
        (None, {"ranks": 2}, "GPU-0a,GPU-1a"),
    ],
)
def test_a_script_sees_as_many_cards_as_its_command_says(command: str, asked: dict[str, object], seen: str) -> None:
    found = conditions(command, **asked)
    assert found.env == {"CUDA_VISIBLE_DEVICES": seen} and found.cards == tuple(seen.split(","))
    assert (found.device, found.ranks) == (asked.get("device", "cuda:0"), asked.get("ranks", 1))


def test_only_visible_cards_are_all(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert conditions(MANY).cards == ("GPU-1a", "GPU-3a")
    instances = tuple(Gpu(i, f"MIG-{i}b", "a card", "580", mig=False, profile="1g.10gb") for i in range(2))
    machine.delenv("CUDA_VISIBLE_DEVICES")
    list_cards(machine, [card(0, mig=True, instances=instances)])
    # CUDA shows a process one of them.
    assert conditions(MANY).cards == ("MIG-0b",)


def test_on_a_cpu_there_are_none() -> None:
    for command in (TWO, MANY, PLAIN):
        found = conditions(command, device="cpu")
        assert (found.env, found.cards) == ({}, ())


def test_more_ranks_than_cards_are_refused(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImpossibleError, match="8 ranks need as many cards, and from cuda:0 on there are 4"):
        conditions("torchrun --nproc-per-node=8 train.py")
    with pytest.raises(ImpossibleError, match="the command starts 2 processes, and here each launch has one card"):
        conditions(TWO, devices="0,1")
    assert conditions(PLAIN, devices="0,1").env == {"CUDA_VISIBLE_DEVICES": "GPU-0a"}
    assert conditions(TWO, devices="cpu:0,cpu:1").env == {}


def profile(cards: int, device: str = "cuda:0") -> Profile:
    return Profile.model_construct(conditions=_Conditions(device, cards))  # type: ignore[arg-type]


class _Conditions:
    def __init__(self, device: str, cards: int) -> None:
        self.device = device
        self.cards = cards


@pytest.mark.parametrize(
    ("command", "searched", "sentence"),
    [
        (TWO, 2, None),
        (MANY, 4, None),
        (TWO, 1, "the command starts 2 processes, and the search saw 1 card: its rate will be another"),
        ("torchrun --nproc-per-node=1 train.py", 2, "the command starts 1 process, and the search saw 2 cards"),
        (PLAIN, 1, "the script sees 4 cards, and in the search it saw 1: what uses all was not measured; CUDA_VISIBLE"),
        (MANY, 8, "the script sees 4 cards, and in the search it saw 8: what uses all was not measured"),
    ],
)
def test_what_a_profile_s_command_gets_beside_what_its_search_had(
    command: str, searched: int, sentence: str | None
) -> None:
    found = unlike_the_search(shlex.split(command), profile(searched))
    assert (found is None) == (sentence is None) and (found or "").startswith(sentence or "")
    assert unlike_the_search(shlex.split(command), profile(searched, "cpu")) is None


def test_nothing_is_said_of_cards_that_are_not_known(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert unlike_the_search(shlex.split(PLAIN), profile(1)) is None
    machine.delenv("CUDA_VISIBLE_DEVICES")
    list_cards(machine, NvmlUnavailable("no driver.", driver_present=True))
    assert unlike_the_search(shlex.split(PLAIN), profile(1)) is None


@pytest.mark.parametrize(("ranks", "seen", "cards"), [(["--nproc-per-node=2"], "GPU-0a,GPU-1a", 2), ([], "GPU-0a", 1)])
def test_all_launches_of_a_search_see_the_same_cards_and_its_profile_tells_how_many(
    tmp_path: Path, ranks: list[str], seen: str, cards: int
) -> None:
    world, said = World(tmp_path / "studies"), Lines()
    (tmp_path / "train.py").touch()
    words = (sys.executable, "-m", "torch.distributed.run", *ranks, "train.py")
    spec = world.spec(
        model="train",
        data="generated",
        device="cuda",
        trials=3,
        fixed={**FIXED, "num_workers": "0"},
        command=CommandRef(words=words, folder=str(tmp_path)),
    )
    search(spec, world.folder, replace(world.env(plain), observer=said))
    assert {launch.env["CUDA_VISIBLE_DEVICES"] for launch, _ in read_launches(world.files)} == {seen}
    assert read(world.files.profile).conditions.cards == cards
    alone = "the script sees one of 4 cards, because its command does not say that it starts several ranks"
    assert (alone in said.lines) == (not ranks)


class Lines(Observer):
    """Keeps the sentences of a search."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def says(self, sentence: str) -> None:
        self.lines.append(sentence)
