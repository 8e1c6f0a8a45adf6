"""Which rank a process is, and what several ranks do with one data set."""

from __future__ import annotations

from itertools import islice

import pytest

from autotune.exchange import RankSampler
from autotune.ranks import Rank, own_rank

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
