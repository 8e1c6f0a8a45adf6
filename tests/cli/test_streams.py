"""Commands whose standard streams are closed, full, left by their reader, or not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import DEADLINE_S, Project, new_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return new_project(tmp_path_factory.mktemp("streams") / "project")


def shell(project: Project, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in which ``autotune`` is the command."""
    words = " ".join(project.command('"$@"'))
    return subprocess.run(
        ["bash", "-c", f"autotune() {{ {words}; }}\n{script}"],
        cwd=project.folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("autotune doctor >&-", 0),
        ("autotune doctor 2>&-", 0),
        ("autotune doctor <&- >&- 2>&-", 0),
        ("autotune jobs 2>&-", 7),
        ("autotune doctor | true; exit ${PIPESTATUS[0]}", 0),
        ("autotune jobs 2>&1 | true; exit ${PIPESTATUS[0]}", 7),
        ("autotune doctor > /dev/full", 5),
        ("autotune --help > /dev/full", 5),
        ("autotune doctor 2> /dev/full", 0),
    ],
)
def test_a_stream_that_does_not_work(project: Project, script: str, code: int) -> None:
    done = shell(project, script)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr and "fault" not in done.stderr
    assert ("stdout cannot be written" in done.stderr) == ("> /dev/full" in script and "2>" not in script)


def test_no_file_gets_the_number_of_a_closed_stream(project: Project) -> None:
    """A database that is opened as descriptor 1 would be written into by every ``print``."""
    code = "prepare_streams(); f = open('first', 'w'); print('lost', flush=True); f.write(str(f.fileno()))"
    script = f'{sys.executable} -P -c "from autotune.cli.output import prepare_streams; {code}" <&- >&- 2>&-'
    assert shell(project, script).returncode == 0
    assert int((project.folder / "first").read_text()) > 2


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"COLUMNS": "0"},
        {"COLUMNS": "9" * 30},
        {"COLUMNS": "²"},
    ],
)
def test_an_environment_in_which_text_is_hard_to_print(project: Project, environment: dict[str, str]) -> None:
    done = shell(project, "autotune doctor", **environment)
    assert done.returncode == 0, done.stderr
    assert "python" in done.stdout and "fault" not in done.stderr


POOLED = """
import multiprocessing, os, signal, sys, time
from autotune.cli.output import stop_signals

def wait(told):
    told.send(1)
    time.sleep(60)

with stop_signals() as stop:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=wait, args=(there,))
    child.start()
    here.recv()
    child.terminate()
    child.join(20)
    print(child.exitcode, stop())
    if not (rank := os.fork()):
        stop.join()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(rank, 0)
    print(int(stop()))
"""


def test_a_process_of_a_workloads_own_is_ended_by_a_signal_as_ever() -> None:
    """One that a workload forks while signals are only noted; a rank, which is forked as well, notes them with us."""
    ran = subprocess.run([sys.executable, "-c", POOLED], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.split() == ["-15", "None", "15"], ran.stderr
