"""`autotune train --epochs` of two ranks over gloo: killed, it goes on as if it had not been; who fails is named."""

import json
import signal

import pytest
import torch

from .wholes import assert_equal, into, learnt, newest

TWO = {"ranks": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more", "steps", "moments"),
    [
        (
            {"num_workers": 0, "broadcast_buffers": False},
            {},
            12,
            [("step", 1, 7), ("middle of a write", 0, 30), ("evaluation", 1, 2), ("between epochs", 0, 1)],
        ),
        (
            {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": True},
            {"args": {"stream": "yes"}},
            25,
            [("step", 0, 9)],
        ),
        (
            {"num_workers": 0},
            {"name": "whole_sharded", "args": {"samples": "80"}},
            5,
            [("step", 1, 3), ("evaluation", 0, 2)],
        ),
    ],
    ids=["buffers of their own", "a stream", "sharded"],
)
def test_killed_it_ends_as_if_it_had_not_been(run, training, tmp_path, config, more, steps, moments):
    words = training(config, epochs=2, **more, **TWO)
    plain, *killed, last = run(
        into(tmp_path / "plain", words),
        *(into(tmp_path / "killed", words, moment=moment, rank=rank, count=count) for moment, rank, count in moments),
        into(tmp_path / "killed", words),
    )
    assert (plain["code"], last["code"]) == (0, 0), plain["stderr"] + last["stderr"]
    for one, (_, rank, _) in zip(killed, moments, strict=True):
        assert one["code"] == 5 and f"rank {rank}: killed from outside (SIGKILL)." in one["stderr"], one["stderr"]
    assert json.loads(last["stdout"])["resumed_at_step"] > 0
    assert_equal(learnt(tmp_path / "plain"), learnt(tmp_path / "killed"))
    assert len(list((tmp_path / "killed").glob("checkpoint-*.pt"))) == 2
    history, state = learnt(tmp_path / "plain")
    # Each rank has half of the samples, and draws for itself.
    assert [row["steps"] for row in history] == [steps, 2 * steps]
    assert all(row["samples"] == 16 * steps for row in history)
    one, other = (own["random"]["torch"] for own in state["ranks"])
    assert not torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "code"),
    [
        ({"moment": "evaluation", "count": 1, "rank": 1, "signal": signal.SIGTERM}, 143),
        ({"moment": "step", "count": 5, "rank": 0, "signal": signal.SIGINT, "leader": True}, 130),
    ],
    ids=["one rank is asked in an evaluation", "their leader is asked in a step"],
)
def test_a_polite_end_of_one_ends_all_with_a_checkpoint(run, training, tmp_path, moment, code):
    pytest.importorskip("tensorboard")
    words = [*training({"num_workers": 0}, epochs=2, **TWO), "--checkpoint-every", "1h", "--track", "tensorboard"]
    plain, ended, last = run(
        into(tmp_path / "plain", words), into(tmp_path / "ended", words, **moment), into(tmp_path / "ended", words)
    )
    assert ended["code"] == code and "rank" not in ended["stderr"], ended["stderr"]
    at = json.loads(last["stdout"])["resumed_at_step"]
    # All ranks end after the same step, which may be a later one than that of the signal.
    assert (5 <= at <= 12) and f"goes on from step {at}." in ended["stderr"]
    assert plain["code"] == last["code"] == 0
    assert_equal(learnt(tmp_path / "plain"), learnt(tmp_path / "ended"))
    for epoch in (1, 2):
        # Only one rank reports, and only one tracks.
        assert plain["stderr"].count(f"epoch {epoch}, step {12 * epoch}, ") == 1
    assert len(list((tmp_path / "plain").rglob("events.out.tfevents.*"))) == 1


def test_what_a_rank_raises_is_told_with_its_number_and_other_ranks_are_refused(run, training, tmp_path):
    words = training({"num_workers": 0}, epochs=2, **TWO)
    failed, debugged = run(
        into(tmp_path / "kept", words, moment="step", count=15, rank=1, signal=0),
        into(tmp_path / "other", [*words, "--debug"], moment="step", count=1, rank=1, signal=0),
    )
    (resumed,) = run(into(tmp_path / "kept", training({"num_workers": 0}, epochs=2)))
    assert failed["code"] == debugged["code"] == 4
    assert "autotune: rank 1: whole fails in this training: ValueError: the labels are wrong." in failed["stderr"]
    assert "Traceback" not in failed["stderr"] and "raise ValueError(" in debugged["stderr"]
    assert newest(tmp_path / "kept").exists()
    assert resumed["code"] == 6 and "ranks was 2, and is 1" in resumed["stderr"], resumed["stderr"]


def test_torchrun_is_refused(run, training, tmp_path):
    (done,) = run(into(tmp_path, training({"num_workers": 0}, **TWO), env={"TORCHELASTIC_RUN_ID": "none"}))
    assert done["code"] == 2 and "leave torchrun out" in done["stderr"].lower(), done["stderr"]
