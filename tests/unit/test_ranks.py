"""Which rank a process is, and what several ranks do with one data set."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.utils.data import DistributedSampler

from autotune.base.clock import SystemClock
from autotune.base.errors import MachineError
from autotune.base.ranks import Rank, own_rank
from autotune.base.records import TrialSpec, WorkloadRef
from autotune.child.launch import Beats, Launch
from autotune.child.ranks import _place
from autotune.training.exchange import RankSampler
from autotune.training.feed import StartedLoader
from autotune.training.step import move
from tests.support import make_spec

ENV = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, Rank()),
        (ENV, Rank(3, 4, 1)),
        # Clusters set some of them for jobs that are no such training.
        ({"WORLD_SIZE": "2"}, Rank()),
        ({**ENV, "WORLD_SIZE": ""}, Rank()),
        ({**ENV, "RANK": "node1"}, Rank()),
        ({**ENV, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, Rank()),
    ],
)
def test_the_environment_says_which_rank_this_is(environ: dict[str, str], rank: Rank) -> None:
    assert own_rank(environ) == rank


def test_each_epoch_is_another_one_also_if_the_last_was_broken_off() -> None:
    samplers = [RankSampler(range(40), 2, rank, shuffle=True) for rank in (0, 1)]
    broken = [list(islice(sampler, 4)) for sampler in samplers]
    whole = [list(sampler) for sampler in samplers]
    assert sorted(whole[0] + whole[1]) == list(range(40))
    assert [one[:4] for one in whole] != broken


class OfUser(DistributedSampler[int]):
    """Is told by its user which epoch it is."""


@pytest.mark.parametrize("kind", [RankSampler, OfUser])
@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("epoch", [1, 5])
def test_the_first_epoch_is_the_one_that_the_user_says(
    kind: type[DistributedSampler[int]], persistent_workers: bool, epoch: int
) -> None:
    """Although the workers of a loader may have begun another one."""
    expected = kind(range(40), 2, 0, shuffle=True)
    expected.set_epoch(epoch)
    sampler = kind(range(40), 2, 0, shuffle=True)
    loader = StartedLoader(range(40), sampler=sampler, num_workers=1, persistent_workers=persistent_workers)  # type: ignore[arg-type]
    assert (loader._begun is not None) is (kind is RankSampler)
    sampler.set_epoch(epoch)
    assert [int(batch) for batch in loader] == list(expected)
    if kind is OfUser:
        sampler.set_epoch(epoch + 1)
        expected.set_epoch(epoch + 1)
    assert [int(batch) for batch in loader] == list(expected)


WORKLOAD = """
def model(ctx): ...
def dataset(ctx): ...
def optimizer(ctx, model): ...
def loss(ctx, model, batch): ...
"""


def of_rank(rank: int, folder: Path) -> TrialSpec:
    file = folder / f"of_rank_{rank}.py"
    file.write_text(WORKLOAD)
    return make_spec(
        folder / "a",
        workload=WorkloadRef(name=file.stem, module=file.stem, path=str(file)),
        devices=("cuda:0",),
        env={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
        ranks=2,
        rank=rank,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_on_its_card_before_it_opens_a_loader(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that pins memory begins with the loader's workers, on the card that is current then."""
    current: list[torch.device] = []
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with open(os.devnull, "wb") as file:
        launch = Launch(of_rank(rank, tmp_path), Beats(file.fileno(), SystemClock()))
    # The first card is current anyway, and its rank starts workers before it uses a GPU, as one alone does.
    assert launch.device == torch.device("cuda", rank) and current == [launch.device][:rank]


def test_a_rank_without_a_card_names_the_one_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MachineError, match=r"there is no cuda:1: torch sees 1 device"), open(os.devnull, "wb") as file:
        Launch(of_rank(1, tmp_path), Beats(file.fileno(), SystemClock()))


class Told:
    """A batch that moves itself, which tells where it is called from."""

    def __init__(self, to: Callable[..., None]) -> None:
        self.to = to


def test_a_rank_that_copies_to_its_card_waits_for_the_others(tmp_path: Path) -> None:
    """NCCL's exchange itself does not wait: what comes behind it on the card does."""
    log = tmp_path / "stderr.log"
    with log.open("w") as file:
        batch, all_threads = Told(partial(faulthandler.dump_traceback, file)), True
        move(batch, all_threads, non_blocking=False, channels_last=0)  # type: ignore[arg-type]
    assert _place(log, 0) is None


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (grad_scaler, None),
        (clip_grad, None),
        (torch.utils.data.dataloader, "is in wherever (dataloader.py:7)"),
    ],
)
def test_a_rank_that_reads_what_was_exchanged_waits_for_the_others(
    module: ModuleType, place: str | None, tmp_path: Path
) -> None:
    log = tmp_path / "stderr.log"
    log.write_text(
        f'Current thread 0x7f (most recent call first):\n  File "{module.__file__}", line 7 in wherever\n'
        '  File "mine.py", line 1 in <module>\n'
    )
    assert _place(log, 0) == place


ROOT = Path(__file__).parents[2]
#: Two ranks of which one ends at once, and the other a moment later, or only when it is killed.
ONE_IS_QUICKER = """
import json, os, sys, time
from pathlib import Path
from autotune.base.layout import LaunchFiles
from autotune.base.records import LaunchKind, TrainCheck, TrialResult, TrialStatus
from autotune.child.ranks import lead
from autotune.launcher.rank_processes import files_of, in_each_rank
from tests.support import make_spec

folder, statuses, quick, other = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
spec = make_spec(folder, kind=LaunchKind.TRAIN_CHECK, ranks=2)


def write(rank):
    time.sleep(0.0 if rank == quick else 0.4)
    well = statuses[rank] == "complete"
    check = TrainCheck(losses=(float(rank),), finite=True, changed=1.0) if well else None
    cause = None if well else f"as rank {rank} says"
    result = TrialResult(launch=spec.launch, status=TrialStatus(statuses[rank]), cause=cause, check=check)
    files_of(LaunchFiles(folder), rank).result.write_text(result.model_dump_json())
    time.sleep(60.0 if other == 'lingers' and rank != quick else 0.0)
    return 0 if well else 1


def train():
    rank = int(os.environ["RANK"])
    time.sleep(0.0 if rank == quick else 0.4)
    if statuses[rank] != "complete":
        raise ValueError(f"as rank {rank} says")
    return rank


code = lead(spec, os.open(os.devnull, os.O_WRONLY), lambda rank, beats, board: write(rank))
try:
    told = in_each_rank(2, train, each_ends=True)
except Exception as error:
    told = str(error)
print(json.dumps([code, json.loads((folder / "result.json").read_text()), told]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("quick", "other"), [(0, "ends"), (1, "ends"), (0, "lingers")])
@pytest.mark.parametrize("failed", [None, 0, 1])
def test_a_rank_that_ends_well_earlier_hides_no_failure(
    tmp_path: Path, failed: int | None, quick: int, other: str
) -> None:
    """The first rank tells where all end well, and the one that failed where one does, whichever was the quickest, and
    also where the other has told its end and is still ending its workers."""
    statuses = ["diverged" if rank == failed else "complete" for rank in range(2)]
    command = [sys.executable, "-c", ONE_IS_QUICKER, str(tmp_path), json.dumps(statuses), str(quick), other]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    code, result, told = json.loads(done.stdout)
    if failed is None:
        assert (code, result["status"], result["check"]["losses"], told) == (0, "complete", [0.0], 0)
    else:
        assert (code, result["status"], result["cause"]) == (1, "diverged", f"rank {failed}: as rank {failed} says")
        assert told == f"rank {failed}: ValueError: as rank {failed} says"
