"""A launch of a script leaves nothing in the folder where it runs, and sees it as it was before the search."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.base.layout import StudyFiles
from autotune.base.records import CommandRef, LaunchKind, Probe, TrialResult, TrialStatus
from autotune.child import script_folders, temporary
from autotune.launcher import ProcessLauncher
from autotune.search.subject import left_sentence, where_it_writes
from tests.support import make_probe, make_spec, make_study_spec

from ..process.alive import wait_until  # noqa: TID252
from .conftest import PLAIN, PLAN, SCRIPTS

#: Trains for as long as it is let, after what is put before it.
TRAINS = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
sys.argv[1:] = ["--epochs", "100000", "--step-s", "0.005"]
import steady
steady.main()
"""


@pytest.fixture
def launch(command_launch: Any, tmp_path: Path) -> Callable[..., TrialResult]:
    """``launch(text, …)``: how a launch of a script that does this, and then trains, has ended. As in a search, its
    folder is below the one where it runs."""

    def run(text: str, *, kind: LaunchKind = LaunchKind.MEASURE, **command: Any) -> TrialResult:
        (tmp_path / "script.py").write_text(text + TRAINS)
        spec = {"folder": "studies/script-1/trials/00001", "plan": PLAN, "kind": kind}
        return command_launch((sys.executable, "script.py"), said=command, **spec)

    return run


@pytest.fixture(scope="session")
def _views(process_launcher: ProcessLauncher, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips tests where the kernel grants no view."""
    folder = tmp_path_factory.mktemp("tried")
    words = (sys.executable, "-c", "import time; time.sleep(0.1)")
    command = CommandRef(words=words, folder=str(folder), view=True)
    spec = make_spec(folder / "launch", command=command, config=PLAIN, plan=PLAN)
    cause = str(process_launcher.run(spec, on_beat=lambda beat: None, stop=lambda: False).cause)
    if "cannot be viewed copy-on-write" in cause:
        pytest.skip(cause)


def there(folder: Path) -> dict[str, str]:
    """What is in a folder, but for studies and what tests put there."""
    files = [path for path in folder.rglob("*") if path.is_file() and "studies" not in path.parts]
    return {str(path.relative_to(folder)): path.read_text() for path in files if path.name != "script.py"}


@pytest.mark.slow
@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize(
    "text",
    [
        # As trainings go on that run under a scheduler.
        "import os\nassert not os.path.exists('last.pt')\nopen('last.pt', 'w').write('weights')\n",
        # As scripts do that refuse an output folder of another run.
        "import os\nos.makedirs('out')\nopen('out/config.json', 'w').write('{}')\n",
        "import os\nos.remove('a')\nos.rename('b', 'c')\nopen('d/e', 'a').write('more')\nos.remove('d/f')\n",
        "import os, shutil\nshutil.rmtree('d')\nos.mkdir('d')\nassert not os.listdir('d')\n",
        # It may do so for itself alone.
        "import os\nopen('d/x', 'w').close()\nos.chmod('d/x', 0)\nos.makedirs('n/m')\nos.chmod('n', 0)\n",
    ],
    ids=["goes on", "refuses a folder", "removes", "replaces a folder", "forbids"],
)
def test_each_launch_sees_the_folder_as_it_was(launch: Callable[..., TrialResult], tmp_path: Path, text: str) -> None:
    (tmp_path / "d").mkdir()
    for name in ("a", "b", "d/e", "d/f"):
        (tmp_path / name).write_text(name)
    before = there(tmp_path)
    for _ in range(2):
        result = launch(text)
        assert result.status is TrialStatus.COMPLETE, (result.cause, result.evidence)
        assert there(tmp_path) == before


@pytest.mark.slow
@pytest.mark.usefixtures("_views")
def test_what_is_large_is_told_and_removed(launch: Callable[..., TrialResult], tmp_path: Path) -> None:
    before = set(temporary.base().glob("autotune-launch-*"))
    result = launch("open('large', 'wb').write(bytes(120 * 2**20))\n", kind=LaunchKind.PROBE)
    assert result.probe is not None, (result.cause, result.evidence)
    assert result.probe.view_refused is None and result.probe.wrote is not None
    assert result.probe.wrote.names == ("large",) and result.probe.wrote.size_bytes == 120 * 2**20
    (told,) = sentences(tmp_path, result.probe)
    assert "writes 120 MiB in its folder before it trains, anew at each launch (large)" in told
    # The template removes it when it has said that the launch is over.
    wait_until(lambda: set(temporary.base().glob("autotune-launch-*")) <= before)
    assert not (tmp_path / "large").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("_views")
def test_what_a_view_refuses_is_done_without_one(launch: Callable[..., TrialResult], tmp_path: Path) -> None:
    refuses = (
        "import os\nplaces = [line.split()[4] for line in open('/proc/self/mountinfo')]\n"
        "if os.getcwd() in places: raise OSError(18, 'Invalid cross-device link')\n"
        "open('left.pt', 'w').close()\n"
    )
    result = launch(refuses, kind=LaunchKind.PROBE)
    assert result.probe is not None, result.cause
    assert result.probe.view_refused == "the script does there what such a view refuses (Invalid cross-device link)"
    # What fails for another reason, fails.
    failed = launch("raise FileNotFoundError(2, 'No such file', 'data')\n", kind=LaunchKind.PROBE)
    assert failed.probe is None and "FileNotFoundError" in str(failed.cause)


@pytest.mark.slow
def test_a_folder_that_cannot_be_viewed_is_the_launchs_own(launch: Callable[..., TrialResult], tmp_path: Path) -> None:
    # The folder for temporary files is in it.
    script = {"words": (sys.executable, str(tmp_path / "script.py")), "folder": tempfile.gettempdir()}
    assert launch("", **script).status is TrialStatus.COMPLETE
    refused = launch("", **script, view=True)
    assert refused.status is TrialStatus.USER_ERROR and "cannot be viewed copy-on-write any more" in str(refused.cause)


def sentences(folder: Path, probe: Probe, **command: Any) -> list[str]:
    files = StudyFiles(folder / "studies" / "train-1")
    files.folder.mkdir(parents=True, exist_ok=True)
    files.request.touch()
    for name in ("new.ckpt", "new.txt"):
        path = folder / name
        if path.exists():
            os.utime(path, ns=(0, files.request.stat().st_mtime_ns + 1))
    ref = CommandRef(words=("train",), folder=str(folder), **command)
    return list(where_it_writes(ref, files, probe))


def test_weights_that_launches_may_leave_are_told_before_they_are_measured(tmp_path: Path) -> None:
    for name in ("old.pt", "last.pt", "runs/checkpoint-7.bin", "latest.txt", "new.ckpt", "new.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(0, 1))
    assert sentences(tmp_path, make_probe()) == []
    probe = make_probe(view_refused="an overlay cannot be mounted (Operation not permitted)")
    assert sentences(tmp_path, probe, scratch=True) == []
    where, weights = sentences(tmp_path, probe)
    assert f"launches write in {tmp_path} itself" in where and "(Operation not permitted)" in where
    assert weights.startswith("last.pt, new.ckpt and runs/checkpoint-7.bin may hold weights of a launch from now on")
    assert "--scratch or --output-flag" in weights


def test_what_was_left_is_told_without_an_outcome_too(tmp_path: Path) -> None:
    sentences(tmp_path, make_probe())
    files = StudyFiles(tmp_path / "studies" / "train-1")
    (tmp_path / "new.ckpt").write_text("weights")
    os.utime(tmp_path / "new.ckpt", ns=(0, files.request.stat().st_mtime_ns + 1))
    command = CommandRef(words=("train",), folder=str(tmp_path))
    told = left_sentence(files, make_study_spec(command=command))
    assert told is not None and told.startswith("1 file in") and "new.ckpt" in told


@pytest.mark.slow
def test_a_search_that_is_killed_leaves_nothing_when_it_goes_on(tmp_path: Path) -> None:
    folder, temporaries = tmp_path / "project", tmp_path / "temporary"
    for made in (folder, temporaries):
        made.mkdir()
    (folder / "script.py").write_text("open('big', 'w').write('x' * 10**6)\n" + TRAINS)
    how: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "TMPDIR": str(temporaries)}}
    how |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    autotune = [sys.executable, "-P", "-m", "autotune"]
    words = ["--allow-busy", "--study", "killed", "--budget", "60s", "--", sys.executable, "script.py"]
    with subprocess.Popen([*autotune, "search", *words], **how) as killed:
        wait_until(lambda: any(temporaries.glob("autotune-launch-*")), 60)
        left = next(temporaries.glob("autotune-launch-*"))
        wait_until(lambda: (left / "view" / "upper" / "big").exists() or (folder / "big").exists(), 60)
        killed.kill()
    with subprocess.Popen([*autotune, "resume", "killed"], **how) as resumed:
        wait_until(lambda: not left.exists(), 60)
        resumed.send_signal(signal.SIGINT)
        assert resumed.wait(60) in (0, 130)
    assert not any(temporaries.glob("autotune-launch-*"))


@pytest.mark.slow
def test_ranks_are_not_asked_to_end_either(launch: Callable[..., TrialResult], tmp_path: Path) -> None:
    acts = (
        "import signal, sys\n"
        f"def requeue(*_):\n    open({str(tmp_path / 'studies' / 'requeued')!r}, 'w').close()\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, requeue)\n"
    )
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    result = launch(acts, words=(sys.executable, *run), view=False)
    assert result.status is TrialStatus.COMPLETE, (result.cause, result.evidence)
    assert not (tmp_path / "studies" / "requeued").exists()


@pytest.mark.slow
def test_trackers_are_silent(launch: Callable[..., TrialResult], tmp_path: Path) -> None:
    place = Path("/tmp/launch")
    told = script_folders.silent({"WANDB_MODE": "online", "MLFLOW_RUN_ID": "7", "TRACKIO_SPACE_ID": "me/it"}, place)
    assert told["WANDB_MODE"] == "disabled" and told["MLFLOW_TRACKING_URI"] == "file:///tmp/launch/trackers/mlflow"
    assert "MLFLOW_RUN_ID" not in told and "TRACKIO_SPACE_ID" not in told
    assert script_folders.silent({"WANDB_MODE": "offline", "NEPTUNE_MODE": "debug"}, place)["WANDB_MODE"] == "offline"
    result = launch("import os\nassert os.environ['WANDB_MODE'] == 'disabled', os.environ\n")
    assert result.status is TrialStatus.COMPLETE, result.cause
