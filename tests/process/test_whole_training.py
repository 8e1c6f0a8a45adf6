"""`autotune train --epochs`, killed at any moment: it ends with the losses and weights of an uninterrupted training."""

import fcntl
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import tracking

from . import tracked
from .wholes import assert_equal, into, learnt, newest

HERE = Path(__file__).parent
WORKERS = {"num_workers": 2, "prefetch_factor": 2}


def test_another_training_is_refused_and_more_epochs_are_not(run, training, tmp_path):
    folder, words = tmp_path / "kept", training({"num_workers": 0}, {"schedule": "no"}, epochs=1)
    first, more = run(into(folder, words), into(folder, training({"num_workers": 0}, {"schedule": "no"}, epochs=2)))
    assert (first["code"], more["code"]) == (0, 0), more["stderr"]
    assert json.loads(more["stdout"])["resumed_at_step"] == 25 and json.loads(more["stdout"])["steps"] == 50
    before = learnt(folder)
    for config, args, epochs, said in (
        ({"num_workers": 0, "precision": "bf16"}, {"schedule": "no"}, 2, "precision was not there, and is bf16"),
        ({"num_workers": 0}, {"schedule": "no", "width": "32"}, 2, "--arg width was 16, and is 32"),
        ({"num_workers": 0}, {"schedule": "no", "samples": "400"}, 2, "samples of an epoch was 200, and is 400"),
        ({"num_workers": 0}, {"schedule": "no"}, 1, "are in epoch 2 already"),
    ):
        (refused,) = run(into(folder, training(config, args, epochs)))
        assert refused["code"] == 6 and said in refused["stderr"], refused["stderr"]
        assert "--checkpoints DIR" in refused["stderr"]
    assert_equal(learnt(folder), before)


def test_what_cannot_be_done_is_said_before_anything_is_trained(run, training, tmp_path):
    words = training({"num_workers": 0}, epochs=1)
    short = [word for word in words if word not in ("--epochs", "1", "--checkpoint-every", "0.02s")]
    folder = tmp_path / "kept"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = run(
            into(folder, words),
            into(folder, [*words, "--steps", "5"]),
            into(folder, short),
            {"words": [*short, "--checkpoint-every", "5m"]},
            {"words": [*short, "--track", "tensorboard"]},
        )
    said = [
        *("another training writes its checkpoints to", "--steps and --epochs are two trainings"),
        *("--checkpoints needs --epochs", "--checkpoint-every needs --epochs", "needs"),
    ]
    for one, sentence in zip(done, said, strict=True):
        assert one["code"] == 2 and sentence in one["stderr"], one["stderr"]
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(run, training, tmp_path):
    words = training({"num_workers": 0}, epochs=2)
    plain, killed = run(
        into(tmp_path / "plain", words),
        # At the end of the second epoch: within the first, there may have been no time for a checkpoint.
        into(tmp_path / "damaged", words, moment="between epochs", count=2),
    )
    assert (plain["code"], killed["code"]) == (0, -signal.SIGKILL)
    broken = newest(tmp_path / "damaged")
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data)
    (last,) = run(into(tmp_path / "damaged", words))
    assert last["code"] == 0
    assert f"{broken.name} is damaged" in last["stderr"] and (tmp_path / "damaged" / f"damaged-{broken.name}").exists()
    assert_equal(learnt(tmp_path / "plain"), learnt(tmp_path / "damaged"))
    for path in (tmp_path / "damaged").glob("checkpoint-*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    (none,) = run(into(tmp_path / "damaged", words))
    assert none["code"] == 5 and "none of the checkpoints" in none["stderr"]
    assert len(list((tmp_path / "damaged").glob("damaged-*"))) == 3


@pytest.mark.parametrize(
    ("number", "code", "moment"), [(signal.SIGINT, 130, "evaluation"), (signal.SIGTERM, 143, "step")], ids=str
)
def test_a_polite_end_writes_a_checkpoint(run, training, tmp_path, number, code, moment):
    words = [*training({"num_workers": 0}, epochs=2), "--checkpoint-every", "1h"]
    # Of another training, whose checkpoints are gone: its first epoch is not this one's.
    row = {"epoch": 1, "steps": 25, "loss": 9.0, "learning_rate": 1.0, "samples": 100, "metrics": {"mse": 9.0}}
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended" / "history.jsonl").write_text(json.dumps({**row, "counted_samples": 0, "counted_s": 0.0}))
    plain, ended, last = run(
        into(tmp_path / "plain", words),
        into(tmp_path / "ended", words, moment=moment, count=2, signal=number),
        into(tmp_path / "ended", words),
    )
    at = 2 if moment == "step" else 25
    assert ended["code"] == code and f"goes on from step {at}." in ended["stderr"], ended["stderr"]
    assert plain["code"] == last["code"] == 0 and json.loads(last["stdout"])["resumed_at_step"] == at
    assert_equal(learnt(tmp_path / "plain"), learnt(tmp_path / "ended"))


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({"num_workers": 0}, {}),
        ({**WORKERS, "persistent_workers": True, "precision": "bf16"}, {}),
        ({**WORKERS, "persistent_workers": False, "gradient_accumulation": 2}, {"args": {"stream": "yes"}}),
        ({"num_workers": 0}, {"name": "whole_loader"}),
    ],
    ids=["here", "workers that stay, bf16", "a stream, in parts", "a loader of its own"],
)
def test_killed_five_times_it_ends_as_if_it_had_not_been(run, training, tmp_path, config, more):
    words, draws = training(config, **more), random.Random(17)
    moments = [
        {"moment": "step", "count": draws.randint(1, 20)},
        # A checkpoint is written in many pieces.
        {"moment": "middle of a write", "count": draws.randint(1, 100)},
        {"moment": "written", "count": draws.randint(1, 3)},
        {"moment": "evaluation", "count": draws.randint(1, 3)},
        {"moment": "between epochs", "count": 1},
    ]
    draws.shuffle(moments)
    plain, *killed, last = run(
        into(tmp_path / "plain", words),
        *(into(tmp_path / "killed", words, **moment) for moment in moments),
        into(tmp_path / "killed", words),
    )
    assert (plain["code"], last["code"]) == (0, 0), plain["stderr"] + last["stderr"]
    assert [one["code"] for one in killed] == [-signal.SIGKILL] * 5, [one["stderr"] for one in killed]
    assert json.loads(last["stdout"])["resumed_at_step"] > 0
    assert_equal(learnt(tmp_path / "plain"), learnt(tmp_path / "killed"))
    # The newest two, and no temporaries.
    assert len(list((tmp_path / "killed").glob("checkpoint-*.pt"))) == 2
    assert not list((tmp_path / "killed").glob(".tmp-*"))
    history, _ = learnt(tmp_path / "plain")
    assert [row["epoch"] for row in history] == [1, 2, 3, 4, 5, 6]
    assert history[0]["metrics"].keys() == {"mse", "largest", "metric"}
    assert len({row["loss"] for row in history}) == 6


@pytest.mark.parametrize("name", tracking.names())
def test_a_tracker_has_parameters_and_epochs_of_a_training_and_of_how_it_went_on(run, training, tmp_path, name):
    package = tracking.tracker_named(name).package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'autotune[track]'")
    words = [*training({"num_workers": 0}, epochs=3), "--track", name]
    env = tracked.environment(tmp_path)
    killed, last = run(
        into(tmp_path / "kept", words, env=env, moment="between epochs", count=2),
        into(tmp_path / "kept", words, env=env),
    )
    assert (killed["code"], last["code"]) == (-signal.SIGKILL, 0), last["stderr"]
    assert "is told nothing more" not in killed["stderr"] + last["stderr"]
    assert json.loads(last["stdout"])["epochs"] == 3, "something else is printed"
    history, _ = learnt(tmp_path / "kept")
    code = "import json, sys; from pathlib import Path; import tracked\n"
    code += f"print(json.dumps(tracked.{name}(Path(sys.argv[1]))))"
    # A reader of its own, as the tools keep what they have seen of their folders.
    reader = [sys.executable, "-c", code, tmp_path]
    read = subprocess.run(reader, cwd=HERE, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    parameters, figures = json.loads(read.stdout.splitlines()[-1])
    assert float(parameters["batch_size"]) == 8 and float(parameters["promised_samples_per_second"]) > 0
    wanted = {row["steps"]: row for row in history}
    # Some trackers send from a thread, and a process that is killed may not have come to it.
    assert {50, 75} <= dict(figures["mse"]).keys() <= wanted.keys()
    for step, value in figures["mse"]:
        assert value == pytest.approx(wanted[step]["metrics"]["mse"], rel=1e-6)
    assert {"epoch", "epoch/loss", "epoch/samples_per_second", "largest", "metric"} <= figures.keys()
