"""SIGKILL at ten moments, each followed by a resume: no trial lost or repeated, no survivors, a profile at the end."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter

import optuna
import pytest

from autotune.base.errors import NoVerdictError
from autotune.base.layout import StudyFiles
from autotune.profile import read
from autotune.space import key
from autotune.study.request import read_request
from autotune.study.tables import read_trials

from .alive import marked, measuring

DEADLINE_S = 120.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autotune", *arguments]


def alive(files: StudyFiles) -> list[int]:
    return list(marked(read_request(files).mark))


def poll(condition, process=None, gap_s=0.01):
    """Wait until the condition holds; return False if the process ended first."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        if process is not None and process.poll() is not None:
            return False
        time.sleep(gap_s)
    raise TimeoutError("the moment did not come")


def remembered(files: StudyFiles) -> dict[int, tuple[str, str, float | None]]:
    return {t.number: (key(t.config), t.result.status.value, t.score) for t in read_trials(files)}


TEN = [
    "folder",
    *["measuring", "trial", "measuring", "result"],
    *["measuring", "trial", "measuring"],
    "measuring",
    "export",
]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("moments", "trials", "budget"),
    [
        (["measuring", "result"], "2", "45s"),
        pytest.param(TEN, "9", "70s", marks=pytest.mark.stress),
    ],
    ids=["two", "ten"],
)
def test_kills_lose_nothing(workloads, tmp_path, moments, trials, budget):
    files = StudyFiles(tmp_path / "studies" / "killed")
    start = command(
        "search", "--model", str(workloads / "tiny.py"), "--study", "killed", "--budget", budget, "--trials", trials,
        "--fix", "workload.pause=false",
        "--device", "cpu", "--set", "compile_mode=off", "--set", "num_workers=0,2", "--allow-busy",
    )  # fmt: skip
    before: dict[int, tuple[str, str, float | None]] = {}
    killed = []
    for number, moment in enumerate(moments):
        arguments = start if number == 0 else command("resume", "killed")
        process = subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        finished = len(before)
        results = len(list(files.folder.glob("*/*/result.json")))
        conditions = {
            "folder": files.request.exists,
            "measuring": lambda: measuring(files),
            "trial": lambda finished=finished: len(remembered(files)) > finished,
            "result": lambda results=results: len(list(files.folder.glob("*/*/result.json"))) > results,
            "export": lambda: files.profile.exists() or any(files.folder.glob(".tmp-*")),
        }
        # The export takes only a few milliseconds.
        reached = poll(conditions[moment], process, gap_s=0.0002 if moment == "export" else 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed.append((moment, reached))
        assert poll(lambda: not alive(files)), f"survivors of the kill at {moment}: {alive(files)}"
        now = remembered(files)
        assert {n: now[n] for n in before} == before, f"the kill at {moment} lost or changed a trial"
        before = now
    assert all(reached for _, reached in killed), killed

    end = subprocess.run(
        command("resume", "killed", "--json"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    # On a busy machine the proof may end without a verdict, and without a profile.
    assert end.returncode in (0, NoVerdictError.exit_code), end.stderr
    now = remembered(files)
    assert {n: now[n] for n in before} == before
    outcome = json.loads(end.stdout)
    assert sum(outcome["trials"].values()) == len(now)
    counted = Counter(config for config, status, _ in now.values() if status != "interrupted")
    assert max(counted.values()) == 1, f"counted twice: {counted.most_common(3)}"
    assert end.returncode or read(files.profile).provenance.study == "killed"
    assert not alive(files)
    states = [t.state for t in optuna.load_study(study_name="killed", storage=files.storage_url).trials]
    assert all(state.is_finished() for state in states)
