"""A launch of a script: it is watched, measured and ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.base.layout import LaunchFiles
from autotune.base.records import CheckPlan, CommandRef, Phase, PhaseLimits, TrialStatus
from autotune.launcher import ProcessLauncher
from tests.support import make_spec

from .conftest import PLAIN, PLAN, code, python


@pytest.mark.slow
def test_the_rate_of_a_script_is_that_of_its_sleeps(launched: Any) -> None:
    result = launched(*python("steady.py", "--step-s", "0.02", "--epochs", "1000"))
    assert result.status is TrialStatus.COMPLETE, result.cause
    found = result.measurement
    # Each of 8 samples; sleeping takes a little longer than asked for.
    assert 200 < found.steady_per_s < 402
    assert found.batch_size == 8 and found.epoch_samples == 320
    assert found.loader_wait_fraction < 0.3
    assert result.phase_s.keys() == {
        p.value for p in (Phase.LOAD, Phase.BUILD, Phase.COMPILE, Phase.WARMUP, Phase.MEASURE)
    }


@pytest.mark.slow
def test_evaluations_are_left_out_of_the_rate(launched: Any) -> None:
    result = launched(*python("steady.py", "--step-s", "0.02", "--evaluate-s", "0.5", "--epochs", "1000"))
    assert 200 < result.measurement.steady_per_s < 402


#: Makes its batches itself, of as many samples as it is told.
BY_HAND = """
import sys, time, torch
model = torch.nn.Linear(16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(int(sys.argv[1]), 16)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "samples", "counts"), [("{batch_size}", 8, "samples"), ("8", 1, "steps")])
def test_without_a_loader_steps_count_unless_the_command_sets_the_batch(
    launched: Any, batch: str, samples: int, counts: str
) -> None:
    found = launched(*code(BY_HAND), batch).measurement
    assert (found.batch_size, found.counts) == (samples, counts)
    assert 40 * samples < found.steady_per_s < 101 * samples


#: Saves once in each epoch, which takes most of the time.
SAVING = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(256, 16), torch.randint(2, (256,))), batch_size=8)
while True:
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 3:
            time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_pause_in_each_epoch_belongs_to_the_rate(launched: Any) -> None:
    result = launched(*code(SAVING))
    assert result.status is TrialStatus.COMPLETE, result.cause
    # At most 256 samples in 0.2 s.
    assert 300 < result.measurement.samples_per_s < 1290


@pytest.mark.slow
def test_waits_for_the_loader_are_seen(launched: Any) -> None:
    result = launched(*python("steady.py", "--step-s", "0.01", "--load-s", "0.004", "--epochs", "1000"))
    found = result.measurement
    assert 0.6 < found.loader_wait_fraction < 0.9
    # What loading takes is timed where it happens: 4 ms a sample here, and 1 ms with four workers side by side.
    assert 100 < found.loader_capacity_per_s < 251
    faster = launched(
        *python("steady.py", "--step-s", "0.01", "--load-s", "0.004", "--epochs", "1000"),
        num_workers=4,
        prefetch_factor=2,
    )
    assert faster.measurement.steady_per_s > 1.5 * found.steady_per_s, "workers were set from outside"
    assert 400 < faster.measurement.loader_capacity_per_s < 1001


@pytest.mark.slow
def test_a_loader_that_iterates_in_its_own_way_is_seen_and_set(launched: Any) -> None:
    words = python("steady.py", "--step-s", "0.01", "--load-s", "0.004", "--epochs", "1000", "--endless")
    plain = launched(*words).measurement
    assert plain.batch_size == 8 and 0.6 < plain.loader_wait_fraction < 0.9
    faster = launched(*words, num_workers=4, prefetch_factor=2).measurement
    assert faster.steady_per_s > 1.5 * plain.steady_per_s, "workers were set from outside"


@pytest.mark.slow
def test_accumulated_gradients_are_one_step(launched: Any) -> None:
    result = launched(*python("steady.py", "--step-s", "0.01", "--accumulate", "4", "--epochs", "1000"))
    assert result.measurement.batch_size == 32


EPOCHS = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Pages(Dataset):
    def __len__(self):
        return {samples}
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(2)

net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
pages = Pages()
loader = DataLoader(pages, {batch})
began, seen = time.time(), 0
while True:
    {anew}
    for x in loader:
        seen += len(x)
        net(x).sum().backward()
        optimizer.step()
    if {evaluated}:
        with torch.no_grad():
            time.sleep(0.2)
            [net(x) for x in DataLoader(pages, 64)]
"""
ANEW = ("", "loader = DataLoader(pages, loader.batch_size)", "pages = Pages(); loader = DataLoader(pages, 8)")


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("anew", ANEW[1:], ids=["loader", "data set"])
def test_a_loader_made_anew_for_each_epoch_is_one_loader(launched: Any, anew: str, evaluated: bool) -> None:
    """Its epochs, and the start of its workers in each, belong to the rate; what is evaluated between does not."""
    words = code(EPOCHS.format(samples=96, batch=8, anew=anew, evaluated=evaluated))
    plain, forked = launched(*words), launched(*words, num_workers=2, prefetch_factor=2)
    assert plain.measurement is not None and forked.measurement is not None, (plain.cause, forked.cause)
    assert plain.measurement.epoch_samples == forked.measurement.epoch_samples == 96
    assert 500 < plain.measurement.samples_per_s < 1000
    # 2 workers have 48 ms of work in an epoch, and take longer to start.
    assert forked.measurement.samples_per_s < 2.0 * plain.measurement.samples_per_s
    assert forked.measurement.epoch_turn_s is None or forked.measurement.epoch_turn_s > 0.005


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("anew", ANEW[:2], ids=["same", "anew"])
def test_epochs_of_a_batch_or_three_are_measured_whole(launched: Any, batches: int, anew: str) -> None:
    result = launched(*code(EPOCHS.format(samples=48, batch=48 // batches, anew=anew, evaluated=False)))
    found = result.measurement
    assert found is not None, result.cause
    assert found.batch_size == 48 // batches and found.epoch_samples == 48 and 300 < found.samples_per_s < 1000


@pytest.mark.slow
def test_an_epoch_that_is_broken_off_has_as_many_batches_as_were_taken(launched: Any) -> None:
    text = EPOCHS.format(samples=1000, batch=8, anew="", evaluated=False)
    words = code(text.replace("optimizer.step()", "optimizer.step()\n        if seen % 160 == 0: break"))
    result = launched(*words, num_workers=2, prefetch_factor=2)
    assert result.measurement is not None and result.measurement.epoch_samples == 160, result.cause


@pytest.mark.slow
def test_the_losses_of_the_first_steps_are_told(launched: Any, tmp_path: Path) -> None:
    plan = CheckPlan(store=str(tmp_path / "store"), steps=5)
    found = launched(*python("steady.py"), check=plan).check
    assert len(found.losses) == 5 and found.finite and found.losses[0] > 0
    broken = launched(*python("steady.py", "--nan-at", "3"), check=plan).check
    assert len(broken.losses) == 2 and not broken.finite


@pytest.mark.slow
def test_losses_are_those_before_a_scaler(launched: Any) -> None:
    plan = CheckPlan(store="none", steps=3)
    plain, scaled = (launched(*python("steady.py", *more), check=plan).check for more in ((), ("--scale",)))
    assert scaled.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.slow
def test_random_numbers_begin_alike_where_a_script_does_not_seed_them(launched: Any) -> None:
    first, again, other = (
        launched(*python("steady.py"), check=CheckPlan(store="none", steps=2, reference=True, seed=seed)).check
        for seed in (0, 0, 1)
    )
    assert first is not None and again is not None and other is not None
    assert first.losses == again.losses != other.losses


@pytest.mark.slow
def test_a_script_that_ignores_sigterm_is_killed(launched: Any) -> None:
    began = time.monotonic()
    result = launched(*python("steady.py", "--stubborn", "--epochs", "100000"))
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True], ids=["at a limit", "when the search is ended"])
def test_a_script_that_would_act_on_its_end_is_not_asked(
    process_launcher: ProcessLauncher, tmp_path: Path, stopped: bool
) -> None:
    acts = (
        "import pathlib, signal, sys, time\n"
        "def requeue(*_):\n"
        "    pathlib.Path('requeued').touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, requeue)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(1000)\n"
    )
    limits = PhaseLimits() if stopped else PhaseLimits(load_s=6.0)
    command = CommandRef(words=code(acts), folder=str(tmp_path), view=False)
    spec = make_spec(tmp_path / "launch", command=command, config=PLAIN, limits=limits)
    result = process_launcher.run(
        spec, on_beat=lambda beat: None, stop=lambda: stopped and (tmp_path / "ready").exists()
    )
    assert result.status is (TrialStatus.INTERRUPTED if stopped else TrialStatus.TIMEOUT), result.cause
    assert (tmp_path / "ready").exists() and not (tmp_path / "requeued").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "cause"),
    [
        (python("steady.py", "--epochs", "0"), TrialStatus.USER_ERROR, "no optimizer of PyTorch has taken a step"),
        (
            python("steady.py", "--steps", "7"),
            TrialStatus.USER_ERROR,
            "ended after 7 step(s), too few to tell its rate",
        ),
        (
            code(
                "import torch\n"
                "net = torch.nn.Linear(2, 1)\n"
                "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
                "kept, tested = (torch.utils.data.DataLoader(torch.ones(n, 2), 4) for n in (400, 8))\n"
                "while True:\n"
                "    for x in kept:\n"
                "        net(x).sum().backward(); optimizer.step()\n"
                "        with torch.no_grad(): [net(y) for y in tested]\n"
            ),
            TrialStatus.USER_ERROR,
            "none of the script's steps began and ended inside an epoch, of 100 batch(es) each,",
        ),
        (code("pass"), TrialStatus.USER_ERROR, "has not imported torch"),
        (("no-such-program",), TrialStatus.USER_ERROR, "'no-such-program' cannot be run: No such file or directory"),
        (code("import sys; sys.exit(3)"), TrialStatus.USER_ERROR, "the script ended with exit code 3"),
        # Python, parsers of options and launchers say in one line what is wrong, without a traceback.
        (
            (sys.executable, "-m", "no.such.module"),
            TrialStatus.USER_ERROR,
            "ended with exit code 1 (its last line: ",
        ),
        (
            python("steady.py", "--such", "1"),
            TrialStatus.USER_ERROR,
            "ended with exit code 2 (its last line: steady.py: error: unrecognized arguments: --such 1)",
        ),
        (
            code("import os, time; os.fork() or time.sleep(1000)"),
            TrialStatus.USER_ERROR,
            "what it started goes on in the background",
        ),
        (
            code("import os, torch, time; os.fork() or (os.setsid(), time.sleep(1000))"),
            TrialStatus.USER_ERROR,
            "what it started goes on in the background",
        ),
        (code("import torch; input()"), TrialStatus.USER_ERROR, "EOFError: EOF when reading a line"),
        (code("input()"), TrialStatus.USER_ERROR, "EOFError: EOF when reading a line"),
        (python("steady.py", "--raise-at", "9"), TrialStatus.USER_ERROR, "OwnError: the loss is odd (steady.py:"),
        (
            python("steady.py", "--raise-at", "9", "--error", "torch.OutOfMemoryError"),
            TrialStatus.OOM,
            "CUDA out of memory",
        ),
        (python("steady.py", "--raise-at", "9", "--error", "SIGSEGV"), TrialStatus.CRASHED, "was ended by SIGSEGV"),
        (python("steady.py", "--raise-at", "9", "--error", "SIGKILL"), TrialStatus.KILLED, "was ended by SIGKILL"),
    ],
)
def test_what_ends_early_says_why(launched: Any, words: tuple[str, ...], status: TrialStatus, cause: str) -> None:
    result = launched(*words)
    assert result.status is status, result.cause
    assert cause in result.cause and result.measurement is None


#: Its first optimizer fails in its second step, and another one takes its place.
REPLACED = """
import time, torch
class Failing(torch.optim.SGD):
    def step(self):
        if self.state["steps"]:
            raise ArithmeticError
        self.state["steps"] = 1
model = torch.nn.Linear(16, 2)
optimizer = Failing(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).sum().backward()
    try:
        optimizer.step()
    except ArithmeticError:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_the_optimizer_in_place_of_one_that_failed_is_seen(launched: Any) -> None:
    result = launched(*code(REPLACED))
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert 30 < result.measurement.steady_per_s < 101


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told(launched: Any) -> None:
    result = launched(*python("steady.py", "--kill-worker", "--epochs", "1000"), num_workers=1)
    assert result.status is TrialStatus.LOADER_WORKER_DIED, result.cause


@pytest.mark.slow
def test_nothing_of_a_script_is_left(launched: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pid = tmp_path_factory.mktemp("outside") / "pid"
    result = launched(*python("steady.py", "--background", str(pid), "--epochs", "1000"))
    assert result.status is TrialStatus.COMPLETE, result.cause
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIG_DFL)
    files = LaunchFiles(tmp_path / "launch")
    assert not files.trail.exists() and files.stdout.read_text() == "begins\n"


@pytest.mark.slow
def test_what_comes_between_updates_again_and_again_belongs_to_the_rate(launched: Any) -> None:
    """Updates, then a rollout that takes longer than all of them, as in on-policy reinforcement learning."""
    text = (
        "import time, torch\n"
        "net = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "while True:\n"
        "    for update in range(20):\n"
        "        net(torch.ones(4, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        time.sleep(0.015)\n"
        "    time.sleep(0.5)\n"
    )
    result = launched(*code(text), plan=PLAN.model_copy(update={"min_measure_s": 1.5}))
    assert result.status is TrialStatus.COMPLETE, result.cause
    found = result.measurement
    # 20 updates in 0.8 s and a little more; of windows of 0.1 s, few have a rollout.
    assert 15 < found.samples_per_s < 26 and {window.steps for window in found.windows} == {20}
