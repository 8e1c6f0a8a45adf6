"""Runs of `autotune train --epochs`, and what they have come to."""

import json

import torch


def into(folder, words, **moment):
    return {"words": [*words, "--checkpoints", str(folder)], **moment}


def newest(folder):
    return max(folder.glob("checkpoint-*.pt"))


def learnt(folder):
    """What a training has come to, without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    history = [{n: row[n] for n in ("epoch", "steps", "samples", "loss", "learning_rate", "metrics")} for row in rows]
    state = torch.load(newest(folder), weights_only=True)
    for own in state["ranks"]:
        for name in ("counted_samples", "counted_s", "energy_j"):
            own["tally"].pop(name)
    found = {name: state[name] for name in ("model", "optimizer", "scheduler", "ranks", "workload")}
    return history, {**found, "steps": json.loads(newest(folder).with_suffix(".json").read_text())["steps"]}


def assert_equal(one, other, where="it"):
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_equal(one[name], other[name], f"{where}[{name!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (mine, others) in enumerate(zip(one, other, strict=True)):
            assert_equal(mine, others, f"{where}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif hasattr(one, "tobytes"):
        assert one.tobytes() == other.tobytes(), where
    else:
        assert one == other, where
