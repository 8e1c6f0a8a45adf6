"""A file that is no workload is refused when it is submitted, without an import in the command's own process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autotune.base.errors import AutotuneError, UsageError, WorkloadError
from autotune.cli.job_request import check_workload, unchecked_workloads
from autotune.launcher.watch import is_alive
from autotune.workload.catalog import find_workload
from tests.support import make_job_request, make_study_spec

from ..process.alive import wait_until  # noqa: TID252

#: Without torch, so that the checks are quick.
GOOD = "def model(ctx): ...\ndef dataset(ctx): ...\ndef optimizer(ctx, model): ...\ndef loss(ctx, model, batch): ...\n"
ENVIRONMENT = {"PATH": os.environ["PATH"]}


def checked(folder: Path, text: str, *, limit_s: float = 60.0, args: dict[str, str] | None = None) -> str | None:
    path = folder / "mine_to_check.py"
    path.write_text(text)
    return check_workload(find_workload(str(path), args or {}), ENVIRONMENT, limit_s=limit_s)


@pytest.mark.parametrize(
    "more", ["", "import os\nprint('x' * 10**6)\n", "import threading\nthreading.Thread(target=input).start()\n"]
)
def test_a_workload_is_taken(tmp_path: Path, more: str) -> None:
    assert checked(tmp_path, more + GOOD) is None
    assert "mine_to_check" not in sys.modules


@pytest.mark.parametrize(
    ("text", "says", "kind"),
    [
        ("def model(ctx): ...", "it defines no dataset, optimizer, loss", WorkloadError),
        ("import no_such_module", "No module named 'no_such_module'", WorkloadError),
        ("def (", "SyntaxError", WorkloadError),
        ("raise SystemExit(3)", "SystemExit: 3", WorkloadError),
        (GOOD + "BATCH_SIZE = 'x'", "BATCH_SIZE must be", WorkloadError),
        ("import os\nos._exit(0)", "with exit code 0", WorkloadError),
        ("import os\nos.kill(os.getpid(), 11)", "with signal 11", WorkloadError),
        ("import os\nos.environ['ONLY_HERE']", "KeyError: 'ONLY_HERE'", WorkloadError),
    ],
)
def test_what_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str, kind: type[AutotuneError]
) -> None:
    # The job would not have the variable either.
    monkeypatch.setenv("ONLY_HERE", "1")
    with pytest.raises(kind, match=says):
        checked(tmp_path, text)


def test_an_argument_that_it_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown argument 'depth'"):
        checked(tmp_path, GOOD, args={"depth": "3"})


@pytest.mark.slow
def test_one_that_does_not_end_is_given_up_and_said(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    text = f"""
import subprocess, time
other = subprocess.Popen(["sleep", "300"])
open({str(pid_file)!r}, "w").write(str(other.pid))
time.sleep(300)
"""
    said = checked(tmp_path, text, limit_s=4.0)
    assert said == "mine_to_check was not checked: importing it took longer than 4 s."
    wait_until(lambda: not is_alive(int(pid_file.read_text())))


def test_only_the_users_own_are_checked_and_each_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    path = tmp_path / "mine_to_check.py"
    path.write_text(GOOD + f"open({str(log)!r}, 'a').write('checked ')\n")
    own = make_job_request(spec=make_study_spec("a", model=str(path)), label="mine_to_check", environment=ENVIRONMENT)
    built_in = make_job_request(spec=make_study_spec("b", model="resnet18"), label="resnet18")
    replayed = make_job_request(spec=make_study_spec("c", model="recorded"), label="x", replay="/surface")
    assert unchecked_workloads([own, own, built_in, replayed]) == []
    assert log.read_text() == "checked "
