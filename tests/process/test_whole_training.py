"""`autotune train --epochs`, killed at any moment: it ends with the losses and weights of an uninterrupted training."""

import fcntl
import hashlib
import importlib.util
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.base import tracking

from . import tracked
from .wholes import assert_equal, into, learnt, newest

HERE = Path(__file__).parent
WORKERS = {"num_workers": 2, "prefetch_factor": 2}


@pytest.mark.slow
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


@pytest.mark.slow
def test_code_in_a_checkpoint_beside_a_profile_is_not_run(run, training, whole_profile, tmp_path):
    made = tmp_path / "made"

    class Code:
        def __reduce__(self):
            return (open, (str(made), "w"))

    # That of a training which has ended, so that all that is told beside it is right.
    folder = tmp_path / "profile-checkpoints"
    (first,) = run(into(folder, training({"num_workers": 0}, epochs=1)))
    assert first["code"] == 0, first["stderr"]
    head = newest(folder).with_suffix(".json")
    content = pickle.dumps({"version": Code()}, protocol=2)
    path = folder / f"checkpoint-000007-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    command = [sys.executable, "-P", "-m", "autotune", "train", "--profile", tmp_path / "profile.yaml", "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 6, done.stderr
    assert f"\nautotune: the checkpoints in {folder} were written by another version of autotune.\n" in done.stderr
    path.with_suffix(".json").write_bytes(head.read_bytes())
    (refused,) = run(into(folder, training({"num_workers": 0}, epochs=1)))
    assert refused["code"] == 6, refused["stderr"]
    assert f"autotune: the checkpoint {path.name} is not one of autotune's: it holds more than" in refused["stderr"]
    assert path.exists() and not made.exists()


def test_what_no_checkpoint_can_hold_is_said_after_the_first_step(run, training, tmp_path):
    words = [*training({"num_workers": 0}, {"keeps": "a number of NumPy"}), "--checkpoint-every", "1h"]
    (done,) = run(into(tmp_path / "kept", words))
    assert done["code"] == 4, done["stderr"]
    assert "\nautotune: state(ctx, model)['best'] is a numpy.float64, which no checkpoint can hold" in done["stderr"]
    assert "epoch 1" not in done["stderr"] and [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]


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
    assert len(list((tmp_path / "damaged").glob("damaged-*.pt"))) == 3


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


@pytest.mark.slow
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
def test_killed_six_times_it_ends_as_if_it_had_not_been(run, training, tmp_path, config, more):
    words, draws = training(config, **more), random.Random(17)
    moments = [
        {"moment": "step", "count": draws.randint(1, 20)},
        # A checkpoint is written in many pieces.
        {"moment": "middle of a write", "count": draws.randint(1, 100)},
        {"moment": "written beside it", "count": draws.randint(1, 3)},
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
    assert [one["code"] for one in killed] == [-signal.SIGKILL] * 6, [one["stderr"] for one in killed]
    assert json.loads(last["stdout"])["resumed_at_step"] > 0
    assert_equal(learnt(tmp_path / "plain"), learnt(tmp_path / "killed"))
    # The newest two, and no temporaries.
    written = sorted(path.suffix for path in (tmp_path / "killed").glob("checkpoint-*"))
    assert written == [".json", ".json", ".pt", ".pt"]
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
