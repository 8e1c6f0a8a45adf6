"""``autotune run --live``: a training is tuned while it goes on, whatever fails in it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.profile import read

from ..process.alive import wait_until  # noqa: TID252
from .conftest import SCRIPTS, Ran, Runner

pytestmark = pytest.mark.slow

LIVING = [sys.executable, str(SCRIPTS / "living.py")]
LIVE = [sys.executable, "-P", "-m", "autotune", "run", "--live", "--expect", "90s"]


def _once_tuned(script: str) -> list[str]:
    """The option with which a script ends soon after it has been tuned."""
    return ["--until", f"studies/{script}-live-1/report.md"]


def _folder(run: Runner) -> Path:
    return next((run.folder / "studies").iterdir())


def _report(run: Runner) -> str:
    """The report, which may be written after the script has ended."""
    wait_until((_folder(run) / "report.md").exists)
    return (_folder(run) / "report.md").read_text()


def _supervisors(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "autotune.child.live" in process.cmdline() and str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Runner(tmp_path_factory.mktemp("plain")).run([*LIVING, "--fast"])


@pytest.fixture(scope="module", params=["forward", "backward", "loss"])
def tuned(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Runner, Ran]:
    run = Runner(tmp_path_factory.mktemp("tuned"))
    ran = run.run([*LIVE, "--", *LIVING, "--fails", request.param, *_once_tuned("living")])
    return request.param, run, ran


@pytest.mark.timeout(200)
def test_what_is_faster_stays(tuned: tuple[str, Runner, Ran]) -> None:
    _, run, ran = tuned
    assert ran.code == 0, ran.stderr
    assert ran.stderr.startswith("autotune: live: ") and "1 thread" in ran.stderr and ran.stderr.count("\n") == 1
    assert ran.seen["threads"] == 1
    profile = read(_folder(run) / "profile.yaml")
    assert profile.configuration["intra_op_threads"] == 1 and profile.gives.speedup_ci95[0] > 1


@pytest.mark.timeout(200)
def test_what_fails_in_its_turn_does_not_end_the_training(tuned: tuple[str, Runner, Ran]) -> None:
    how, run, ran = tuned
    report = (_folder(run) / "report.md").read_text()
    why = {
        "forward": "RuntimeError: not in this format",
        "backward": "RuntimeError: not backward",
        "loss": "its loss is not finite",
    }[how]
    assert f"channels_last: no figure: {why}" in report
    assert ("gradients of zero, because a configuration failed in them: 1" in report) == (how != "forward")
    assert sum(map(math.isnan, ran.seen["losses"])) == (how == "loss")


@pytest.mark.timeout(200)
def test_each_sample_comes_when_it_would_without_us(tuned: tuple[str, Runner, Ran], plain: Ran) -> None:
    how, _, ran = tuned
    taken, losses = ran.seen["taken"], ran.seen["losses"]
    assert taken == plain.seen["taken"][: len(taken)] and len(taken) == 8 * len(losses)
    if how == "forward":
        assert losses == pytest.approx(plain.seen["losses"][: len(losses)], abs=1e-3)


@pytest.mark.timeout(200)
def test_nothing_is_left_running(tuned: tuple[str, Runner, Ran]) -> None:
    _, run, _ = tuned
    for process in _supervisors(run.folder):
        process.wait(timeout=30)


@pytest.mark.timeout(100)
def test_nor_does_it_where_there_is_no_loader(run: Runner) -> None:
    words = [*LIVING, "--fails", "backward", "--by-hand", *_once_tuned("living")]
    ran = run.run([*LIVE, "--", *words])
    assert ran.code == 0, ran.stderr
    assert "channels_last: no figure: RuntimeError: not backward" in _report(run)
    taken, losses = ran.seen["taken"], ran.seen["losses"]
    assert len(taken) == 8 * len(losses) > 2000 and all(map(math.isfinite, losses))
    # Each sample once in an epoch, of which the last has been left.
    epochs = [taken[at : at + 2000] for at in range(0, len(taken), 2000)]
    assert all(sorted(epoch) == list(range(2000)) for epoch in epochs[:-1])
    assert len(set(epochs[-1])) == len(epochs[-1])


STARVED = [sys.executable, str(SCRIPTS / "starved.py")]


@pytest.fixture(scope="module")
def starving(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Runner(tmp_path_factory.mktemp("starving")).run([*STARVED, "--fast"])


@pytest.mark.timeout(100)
def test_a_starved_training_gets_workers_while_it_goes_on(run: Runner, starving: Ran) -> None:
    ran = run.run([*LIVE, "--", *STARVED, *_once_tuned("starved")])
    assert ran.code == 0 and ran.stderr.count("\n") == 1, ran.stderr
    assert ran.seen["workers"] > 1 and f"{ran.seen['workers']} workers" in ran.stderr
    profile = read(_folder(run) / "profile.yaml")
    assert profile.configuration["num_workers"] == ran.seen["workers"] and profile.gives.speedup_ci95[0] > 1.1
    # In the same order, each sample as often, and no other random number is drawn.
    taken, losses = ran.seen["taken"], ran.seen["losses"]
    assert taken == starving.seen["taken"][: len(taken)]
    assert losses == pytest.approx(starving.seen["losses"][: len(losses)], abs=1e-4)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_workers_that_fail_do_not_end_the_training(run: Runner, starving: Ran, how: str) -> None:
    ran = run.run([*LIVE[:-1], "30s", "--", *STARVED, "--fails", how, *_once_tuned("starved")])
    assert ran.code == 0, ran.stderr
    assert ran.seen["workers"] == 0
    taken, losses = ran.seen["taken"], ran.seen["losses"]
    assert taken == starving.seen["taken"][: len(taken)]
    assert losses == pytest.approx(starving.seen["losses"][: len(losses)], abs=1e-4)
    assert ("OSError: not in a worker (in a worker)" if how == "raises" else "exited") in _report(run) + ran.stderr


@pytest.mark.timeout(100)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_training_goes_on_without_its_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    words = [*LIVE, "--", *LIVING, "--until", "ended"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        log = tmp_path / "studies" / "living-live-1" / "stdout.log"
        # Its first turn is over.
        wait_until(lambda: child.poll() is not None or (log.exists() and log.stat().st_size), 60)
        assert child.poll() is None
        (supervisor,) = _supervisors(tmp_path)
        os.kill(supervisor.pid, number)
        (tmp_path / "ended").touch()
        out, errors = child.communicate(timeout=60)
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor.kill()
    assert child.returncode == 0, errors
    assert Ran(0, out, errors).seen["threads"] == 2


@pytest.mark.timeout(100)
def test_several_ranks_train_as_they_would(run: Runner) -> None:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2"]
    ran = run.run([*LIVE, "--", *torchrun, str(SCRIPTS / "train.py"), "--ddp"])
    assert ran.code == 0, ran.stderr
    assert "several ranks cannot be tuned" in _report(run)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "one of --profile, --trial and --live is needed"),
        (["--live", "--allow", "batch_size"], "--allow batch_size is not possible"),
        (["--live", "--expect", "soon"], "--expect 'soon' is no duration"),
    ],
)
def test_bad_options_are_told_before_anything_runs(run: Runner, options: list[str], said: str) -> None:
    ran = run.run([*LIVE[:5], *options, "--", sys.executable, "-c", "print('ran')"])
    assert ran.code != 0 and said in ran.stderr and "ran" not in ran.stdout and ran.stderr.count("\n") <= 2
