"""Scripts that end, hang, hide or ask: each in one clear sentence, and with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.agent.site.autotune_agent.facts import chain
from autotune.base.layout import StudyFiles
from autotune.base.records import PhaseLimits, TrialStatus
from autotune.child.failure import last_words, rebuilt

from ..process.alive import wait_until  # noqa: TID252
from .conftest import SCRIPTS, Runner, code, python

TYPED = "nobody types in a launch, and its output is no terminal"
SEARCH = [sys.executable, "-P", "-m", "autotune", "search", "--allow-busy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "import torch; input('continue? ')",
        "import torch; open('/dev/tty')",
        "input('continue? ')",
        "import getpass; getpass.getpass()",
        "import os; os.get_terminal_size()",
    ],
)
def test_a_script_that_needs_a_terminal_is_told_that_there_is_none(launched: Any, text: str) -> None:
    result = launched(*code(text))
    assert result.status is TrialStatus.USER_ERROR, result.cause
    assert result.advice is not None and result.advice.startswith(TYPED), (result.cause, result.advice)
    # How its end was noticed is no evidence.
    assert "Traceback" in result.evidence and "autotune" not in result.evidence


#: What a great many copies of one file do when they are imported, and a script that trains.
ASKING = f"""
import os, runpy, sys, termios
termios.tcgetattr(0)
rows, columns = map(int, os.popen("stty size").read().split())
assert rows and columns
sys.argv[1:] = ["--step-s", "0.01", "--epochs", "1000"]
runpy.run_path({str(SCRIPTS / "steady.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_script_may_ask_how_wide_its_terminal_is(launched: Any) -> None:
    result = launched(*code(ASKING))
    assert result.status is TrialStatus.COMPLETE, (result.cause, result.evidence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "cause", "limits"),
    [
        ("while True: pass", "did not import torch within 0.5 s", PhaseLimits(load_s=0.5)),
        ("import torch\nwhile True: pass", "called no model to train it within 0.5 s", PhaseLimits(build_s=0.5)),
        (
            "import torch\nmodel = torch.nn.Linear(1, 1)\nwhile True: model(torch.zeros(1, 1)).sum().backward()",
            "no optimizer of PyTorch took a step within 0.5 s",
            PhaseLimits(compile_s=0.5),
        ),
    ],
)
def test_a_script_that_never_trains_does_not_run_for_ever(
    launched: Any, text: str, cause: str, limits: PhaseLimits
) -> None:
    result = launched(*code(text), limits=limits)
    assert result.status is TrialStatus.TIMEOUT and cause in result.cause, result.cause
    assert "a quarter of the --budget" in result.advice
    # What its own watcher did meanwhile is nobody's evidence.
    assert result.evidence is None or "autotune/child" not in result.evidence


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_training_in_a_process_of_the_scripts_own_is_told(launched: Any, how: str) -> None:
    result = launched(*python("elsewhere.py", how, "--steps", "30"))
    assert result.status is TrialStatus.USER_ERROR
    assert result.cause.startswith(f"the script trains in a process that it has {how[:4]}"), result.cause
    assert "torchrun" in result.advice


@pytest.mark.slow
def test_training_elsewhere_is_not_watched_to_its_end(launched: Any) -> None:
    result = launched(*python("elsewhere.py", "fork"))
    assert result.status is TrialStatus.USER_ERROR and "forked itself" in result.cause, result.cause
    assert result.wall_s < 60


@pytest.mark.slow
def test_a_training_in_the_background_is_told_and_ended(launched: Any, tmp_path: Path) -> None:
    result = launched(*python("elsewhere.py", "background"))
    assert result.status is TrialStatus.USER_ERROR and "goes on in the background" in result.cause, result.cause
    assert not [p for p in psutil.process_iter(["cmdline"]) if "background" in (p.info["cmdline"] or ())]


@pytest.mark.slow
def test_a_loader_in_a_spawned_process_is_the_scripts_own(launched: Any) -> None:
    result = launched(*python("elsewhere.py", "loader"), num_workers=2, prefetch_factor=2)
    assert result.status is TrialStatus.COMPLETE, result.cause
    # Nothing tells how many samples a step has.
    assert result.measurement.batch_size == 1 and result.measurement.epoch_samples == 0


@pytest.mark.slow
def test_a_closed_pipe_is_told(launched: Any) -> None:
    endless = "import torch\nwhile True: print('y')"
    result = launched("bash", "-o", "pipefail", "-c", f'"{sys.executable}" -c "{endless}" | head -1')
    assert result.status is TrialStatus.USER_ERROR, result.cause
    assert "BrokenPipeError: [Errno 32] Broken pipe" in result.cause


@pytest.mark.slow
def test_what_a_framework_has_caught_is_told_by_its_traceback(launched: Any) -> None:
    caught = (
        "import sys, traceback, torch\n"
        "try: raise torch.OutOfMemoryError('CUDA out of memory.')\n"
        "except Exception: traceback.print_exc(); print('Set DEBUG=1 for more.', file=sys.stderr); sys.exit(1)"
    )
    result = launched(*code(caught))
    assert result.status is TrialStatus.OOM and "CUDA out of memory" in result.cause


def test_only_last_words_count() -> None:
    text = 'Traceback (most recent call last):\n  File "a b.py", line 3, in <module>\n    f()\n    ~^^\n'
    error = "KeyError: 'x'\n"
    (told,) = last_words(f"begins\n{text}{error}") or ()
    assert told == ["builtins.KeyError", [], "'x'", {"frames": [["a b.py", 3]]}]
    assert last_words(f"{text}a.b.OwnError\n\nSet DEBUG=1\n") == [["a.b.OwnError", [], "", told[3]]]
    assert last_words(text + error + "epoch\n" * 4) is None, "it went on after that"
    assert last_words(text) is None and last_words("") is None


@pytest.mark.slow
def test_what_a_shell_has_started_is_not_asked_to_end(
    launched: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = tmp_path_factory.mktemp("outside") / "saved"
    (tmp_path / "saves.py").write_text(
        "import signal, sys, time\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"def save(number, frame):\n    open({str(saved)!r}, 'w').close()\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "sys.argv[1:] = ['--epochs', '100000', '--step-s', '0.005']\n"
        "import steady\nsteady.main()\n"
    )
    result = launched("bash", "-c", f'"{sys.executable}" saves.py; echo done')
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert not saved.exists()


@pytest.mark.slow
def test_workers_leave_no_folders(launched: Any) -> None:
    """Each worker that sends tensors makes one for its sockets, and cannot remove it when it is ended."""
    before = set(Path(tempfile.gettempdir()).glob("pymp-*"))
    result = launched(*python("steady.py", "--step-s", "0.005", "--epochs", "1000"), num_workers=2, prefetch_factor=2)
    assert result.status is TrialStatus.COMPLETE, result.cause
    made = set(Path(tempfile.gettempdir()).glob("pymp-*")) - before
    assert not [path for path in made if path.stat().st_uid == os.getuid() and not any(path.iterdir())]


@pytest.mark.slow
def test_an_optimizer_that_goes_on_in_a_forked_child_does_not_count(launched: Any, tmp_path: Path) -> None:
    forks = (
        "import os, time, torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "parent = os.getpid()\n"
        "for step in range(100000):\n"
        "    time.sleep(0.02 if os.getpid() == parent else 0.001)\n"
        "    model(torch.zeros(1, 1)).sum().backward()\n"
        "    optimizer.step()\n"
        "    if step == 2: os.fork()\n"
    )
    result = launched(*code(forks))
    assert result.status is TrialStatus.COMPLETE, result.cause
    assert result.measurement.steady_per_s < 51, "in steps; the child's are many more"


NO_PROGRAMS = pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["./no/such/program"], "there is no program './no/such/program'"),
        (["/"], "'/' is no program that may be run"),
        (["train.py"], "there is no program 'train.py'.\n          Put python before it."),
        ([sys.executable, "-u", "nowhere.py"], "there is no file "),
        ([sys.executable, "-I", "nowhere.py"], "with -I, Python ignores PYTHONPATH"),
    ],
)


@NO_PROGRAMS
@pytest.mark.parametrize("command", ["search", "space"])
def test_what_cannot_be_started_is_told_at_once(run: Runner, command: str, words: list[str], message: str) -> None:
    ran = run.typed(command, "--", *words)
    assert ran.code == 2 and message in ran.stderr and ran.stderr.count("\n") == 2, ran.stderr
    assert not (run.folder / "studies").exists()


@NO_PROGRAMS
def test_nor_is_it_tuned_while_it_goes_on(run: Runner, words: list[str], message: str) -> None:
    ran = run.run([sys.executable, "-P", "-m", "autotune", "run", "--live", "--", *words])
    assert ran.code == 2 and message in ran.stderr and ran.stderr.count("\n") == 2, ran.stderr
    assert not (run.folder / "studies").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn", "background"])
def test_a_profile_that_is_not_applied_says_so(run: Runner, how: str) -> None:
    ran = run.script("elsewhere.py", how, "--steps", "3")
    forked = "spawned" if how == "spawn" else "forked"
    assert ran.code == 0
    assert ran.stderr == (
        f"autotune: profile.yaml: not applied: the script trains in a process that it has {forked} itself\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_search_goes_on_when_trials_die(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> None:
    starts = str(tmp_path_factory.mktemp("outside") / "starts")
    narrow = ["--set", "memory_format=contiguous,channels_last", "--set", "optimizer_impl=for-loop,foreach"]
    fixed = ["--fix", "intra_op_threads=1", "--fix", "compile_mode=off", "--fix", "precision=fp32"]
    # The first two starts are the probe's and the baseline's; this sampler has no heats.
    words = python("dying.py", starts, "--raises", "3", "--exits", "4", "--crashes", "5")
    command = [*SEARCH, "--json", "--budget", "10m", "--sampler", "random", *narrow, *fixed, "--", *words]
    fifth = StudyFiles(run.folder / "studies" / "dying-1").trial(4)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=run.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as search:
        wait_until(lambda: fifth.result.exists() or search.poll() is not None, 200)
        search.send_signal(signal.SIGINT)
        out, errors = search.communicate(timeout=60)
    assert json.loads(out)["error"]["exit_code"] == search.returncode == 130, errors
    shown = run.run([sys.executable, "-P", "-m", "autotune", "show", "dying-1", "--json"])
    trials = json.loads(shown.stdout)["trials"]
    assert [trial["status"] for trial in trials[:4]] == ["complete", "user_error", "user_error", "crashed"]
    causes = [str(trial["cause"]) for trial in trials[1:4]]
    assert causes[0].startswith("RuntimeError: as it had to (dying.py:")
    assert causes[1:] == ["the script ended with exit code 7", "the script was ended by SIGSEGV"]
    # What crashed may not do so again.
    assert trials[4]["status"] in ("complete", "pruned") and trials[4]["config"] == trials[3]["config"]


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "weights.pt"),
        PermissionError(13, "Permission denied", "/data"),
        OSError("of words of its own"),
        KeyError("label"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        subprocess.CalledProcessError(3, ["unzip", "data.zip"]),
        SyntaxError("invalid syntax", ("config.py", 3, 1, "x =", 3, 4)),
        ExceptionGroup("two workers", [ValueError("a"), ValueError("b")]),
        json.JSONDecodeError("Expecting value", "x", 0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_words(error: Exception) -> None:
    found = rebuilt(json.loads(json.dumps(chain(error))))
    assert str(found) == str(error) and type(found).__name__ == type(error).__name__
    assert getattr(found, "errno", None) == getattr(error, "errno", None)


def test_a_file_that_is_not_there_is_named(launched: Any) -> None:
    result = launched(*code("import torch; torch.load('latest.pt')"))
    assert result.status is TrialStatus.USER_ERROR
    assert result.cause.startswith("FileNotFoundError: [Errno 2] No such file or directory: 'latest.pt'"), result.cause


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_what_ends_the_thread_that_trains_is_told(launched: Any, joined: bool) -> None:
    """The process goes on, as a window or a server does, or ends as if nothing had happened."""
    text = (
        "import threading, time, torch\n"
        "def helps():\n    raise OSError('the telescope is out of reach')\n"
        "def trains():\n"
        "    net = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    for step in range(20):\n"
        "        net(torch.ones(4, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "    raise ArithmeticError('the sums do not add up')\n"
        "threading.Thread(target=helps).start()\n"
        "thread = threading.Thread(target=trains)\n"
        "thread.start()\n" + ("thread.join()" if joined else "while True: time.sleep(1)")
    )
    result = launched(*code(text))
    assert result.status is TrialStatus.USER_ERROR and result.wall_s < 60
    assert result.cause == "ArithmeticError: the sums do not add up", result.cause


@pytest.mark.slow
def test_a_helpers_thread_may_end(launched: Any) -> None:
    text = (
        "import threading, torch\n"
        "def helps():\n    raise OSError('no telemetry')\n"
        "threading.Thread(target=helps).start()\n"
        "net = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "while True:\n"
        "    net(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    result = launched(*code(text))
    assert result.status is TrialStatus.COMPLETE, result.cause


@pytest.mark.slow
def test_what_workers_were_sending_is_removed(launched: Any) -> None:
    """Each of several launches: a worker is not in the middle of a batch every time it is ended."""
    text = (
        "import torch\n"
        "class Large(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 100_000\n"
        "    def __getitem__(self, index): return torch.full((64, 256, 256), float(index))\n"
        "net = torch.nn.Linear(256, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for x in torch.utils.data.DataLoader(Large(), 2, num_workers=2):\n"
        "    net(x[0, 0]).sum().backward()\n"
        "    optimizer.step()\n"
    )
    before = set(Path("/dev/shm").glob("torch_*"))
    for _ in range(3):
        assert launched(*code(text)).status is TrialStatus.COMPLETE
    left = [path.name for path in set(Path("/dev/shm").glob("torch_*")) - before]
    assert not [name for name in left if not psutil.pid_exists(int(name.split("_")[1]))]
