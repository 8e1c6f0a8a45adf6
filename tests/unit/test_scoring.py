"""Objectives in a separate process: the built-in ones, and a user's file with any behaviour."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune
from autotune.base.errors import MachineError, UsageError
from autotune.base.records import FIGURES, SHORT, Goal, Measurement
from autotune.workload.catalog import find_objective, objective_names
from autotune.workload.scoring import Scorer

MEASUREMENT = Measurement(
    batch_size=32,
    samples_per_s=50.0,
    ci95_per_s=(49.0, 51.0),
    steady_per_s=50.0,
    windows=(),
    step_s=(),
    wait_s=(),
    device_s=(),
    startup_s=20.0,
    compile_s=5.0,
    warmup_s=1.0,
    measured_s=3.0,
    loader_wait_fraction=0.0,
    epoch_samples=1000,
    peak_allocated_bytes=2 * 2**30,
)


@pytest.fixture
def opened() -> Iterator[list[Scorer]]:
    found: list[Scorer] = []
    yield found
    for scorer in found:
        scorer.close()


def scorer_for(opened: list[Scorer], path: Path) -> Scorer:
    opened.append(Scorer(path))
    return opened[-1]


def own(opened: list[Scorer], folder: Path, text: str, name: str = "mine.py") -> Scorer:
    (folder / name).write_text(text)
    return scorer_for(opened, folder / name)


@pytest.mark.parametrize(
    ("name", "expected"),
    # 1000 samples at 50/s take 20 s, and 40 s in a first epoch whose files come at 25/s; start-up and compile 25 s.
    [
        ("throughput", 50.0),
        ("memory_thrift", 25.0),
        ("first_epoch", 3600 / 65),
        ("time_to_train", 86400 / 105),
        ("cost", 3600 / (2.0 * 105)),
        # 30 W at 50 samples/s.
        ("energy", 50 / 30),
        ("lean", 1 / 2),
    ],
)
def test_the_built_in_objectives(opened: list[Scorer], name: str, expected: float) -> None:
    measured = MEASUREMENT.model_copy(update={"energy_j": 90.0, "cold_per_s": 25.0})
    opened.append(Scorer(find_objective(name), goal=Goal(epochs=3, price_per_hour=2.0)))
    assert opened[-1].score(measured) == pytest.approx(expected)


def test_there_are_no_other_built_in_objectives() -> None:
    expected = ["cost", "energy", "first_epoch", "lean", "memory_thrift", "throughput", "time_to_train"]
    assert objective_names() == expected


@pytest.mark.slow
def test_faster_is_never_worse(opened: list[Scorer]) -> None:
    slower = MEASUREMENT.model_copy(update={"energy_j": 90.0})
    faster = slower.model_copy(update={"samples_per_s": 51.0, "steady_per_s": 51.0})
    for name in objective_names():
        opened.append(Scorer(find_objective(name), goal=Goal(samples=10**6, price_per_hour=2.0)))
        higher, lower = opened[-1].score(faster), opened[-1].score(slower)
        # The leanest of equally fast ones is chosen by its memory alone.
        assert higher == lower if opened[-1].facts.rate_within else higher > lower


@pytest.mark.parametrize(
    ("name", "goal", "missing"),
    [
        (
            "time_to_train",
            Goal(price_per_hour=1.0),
            "how long the training is was not stated: --epochs N or --samples N",
        ),
        ("cost", Goal(epochs=3), "what an hour of the machine costs was not stated: --price-per-hour PRICE"),
    ],
)
def test_what_an_objective_needs_to_be_told_is_asked_for_at_once(
    opened: list[Scorer], name: str, goal: Goal, missing: str
) -> None:
    opened.append(Scorer(find_objective(name), goal=goal))
    with pytest.raises(UsageError, match=f"objective {name}: {missing}"):
        opened[-1].check()


def test_a_figure_that_was_not_measured_is_named_and_is_no_fault_of_the_objective(opened: list[Scorer]) -> None:
    with pytest.raises(UsageError, match=r"energy\.py: the energy of this launch is not known") as raised:
        scorer_for(opened, find_objective("energy")).score(MEASUREMENT)
    assert raised.value.advice is None


def test_a_first_epoch_of_unknown_length_is_not_scored(opened: list[Scorer]) -> None:
    with pytest.raises(UsageError, match=r"first_epoch\.py: how many samples an epoch has is not known"):
        scorer_for(opened, find_objective("first_epoch")).score(MEASUREMENT.model_copy(update={"epoch_samples": 0}))


@pytest.mark.parametrize("text", ["RATE_WITHIN = 2.0", "UNIT = 3", "NEEDS = ('money',)"])
def test_what_an_objective_says_of_itself_is_checked(opened: list[Scorer], tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=f"{text.split(maxsplit=1)[0]} must be"):
        own(opened, tmp_path, f"{text}\ndef score(m): return 1.0\n").facts  # noqa: B018


def test_a_users_objective_sees_the_whole_measurement(opened: list[Scorer], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    text = "import beside\ndef score(m):\n    return beside.FACTOR * m.samples_per_s + m.epoch_samples\n"
    assert own(opened, tmp_path, text).score(MEASUREMENT) == 1100.0


def test_one_child_scores_all_measurements(opened: list[Scorer], tmp_path: Path) -> None:
    scorer = own(opened, tmp_path, "calls = []\ndef score(m):\n    calls.append(m)\n    return len(calls)\n")
    others = [MEASUREMENT.model_copy(update={"samples_per_s": rate}) for rate in (51.0, 52.0, 53.0)]
    assert [scorer.score(m) for m in others] == [1, 2, 3]
    # A score is a pure function of a measurement, so it is cached.
    assert scorer.score(others[0]) == 1


def test_printed_output_does_not_disturb_the_answer(
    opened: list[Scorer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import os\nprint('at import')\ndef score(m):\n    print('hello')\n    os.write(1, b'raw')\n    return 7\n"
    assert own(opened, tmp_path, text).score(MEASUREMENT) == 7.0
    opened[-1].close()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "at import" in captured.err and "raw" in captured.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def score(m): return 1 / 0", "ZeroDivisionError"),
        ("def score(m): return float('nan')", "nan"),
        ("def score(m): return float('-inf')", "inf"),
        ("def score(m): return None", "NoneType"),
        ("def score(m): return 'fast'", "fast"),
        ("def score(m): return m.no_such_figure", "no_such_figure"),
        ("def score(): return 1", "argument"),
        ("def scores(m): return 1", "score"),
        ("raise RuntimeError('at import')", "at import"),
        ("def score(m) return 1", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        ("import os\ndef score(m): os._exit(0)", "without an answer"),
        ("import os, signal\ndef score(m): os.kill(os.getpid(), signal.SIGSEGV)", "without an answer"),
        ("import sys\ndef score(m): sys.exit(0)", "without an answer"),
    ],
)
def test_an_invalid_score_is_reported(opened: list[Scorer], tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        own(opened, tmp_path, text + "\n").score(MEASUREMENT)
    assert "objective mine.py" in str(caught.value) and "\n" not in str(caught.value)
    assert "score(measurement)" in str(caught.value.advice)


def test_an_objective_can_be_called_again_after_a_failure(opened: list[Scorer], tmp_path: Path) -> None:
    scorer = own(opened, tmp_path, "def score(m):\n    return 1 / (m.samples_per_s - 50)\n")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        scorer.score(MEASUREMENT)
    assert scorer.score(MEASUREMENT.model_copy(update={"samples_per_s": 51.0})) == 1.0


DIES = """
import os, signal
from pathlib import Path
count = Path(__file__).with_name("count")
def score(m):
    count.write_text(count.read_text() + "." if count.exists() else ".")
    if len(count.read_text()) {when}:
        os.kill(os.getpid(), signal.SIGKILL)
    return 3.0
"""


def test_a_killed_child_is_started_again(opened: list[Scorer], tmp_path: Path) -> None:
    scorer = own(opened, tmp_path, "import os\ndef score(m): return os.getpid()\n")
    first = int(scorer.score(MEASUREMENT))
    os.kill(first, signal.SIGKILL)
    assert int(scorer.score(MEASUREMENT.model_copy(update={"samples_per_s": 51.0}))) != first
    # In the middle of an answer, twice.
    (tmp_path / "dying").mkdir()
    assert own(opened, tmp_path / "dying", DIES.format(when="<= 2")).score(MEASUREMENT) == 3.0


def test_a_child_that_is_always_killed_is_the_machines_fault(opened: list[Scorer], tmp_path: Path) -> None:
    scorer = own(opened, tmp_path, DIES.format(when="<= 3"))
    with pytest.raises(MachineError, match=r"scores with mine\.py was killed 3 times"):
        scorer.score(MEASUREMENT)
    assert scorer.score(MEASUREMENT) == 3.0


def test_a_memory_objective_needs_the_memory(opened: list[Scorer]) -> None:
    unknown = MEASUREMENT.model_copy(update={"peak_allocated_bytes": None})
    with pytest.raises(UsageError, match="memory"):
        scorer_for(opened, find_objective("memory_thrift")).score(unknown)


def test_a_file_named_like_an_imported_module_is_refused(opened: list[Scorer], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="taken"):
        own(opened, tmp_path, "def score(m): return 3\n", "json.py").score(MEASUREMENT)


def test_the_child_has_no_torch_and_not_the_users_folder(
    opened: list[Scorer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "statistics.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(elsewhere)
    text = "import statistics, sys\ndef score(m):\n    return 'torch' in sys.modules\n"
    assert own(opened, tmp_path, text).score(MEASUREMENT) == 0.0


def test_closing_ends_the_child(opened: list[Scorer], tmp_path: Path) -> None:
    scorer = own(opened, tmp_path, "import os\ndef score(m): return os.getpid()\n")
    pid = int(scorer.score(MEASUREMENT))
    os.kill(pid, 0)
    scorer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    scorer.close()
    assert int(scorer.score(MEASUREMENT.model_copy(update={"samples_per_s": 51.0}))) != pid


def test_a_child_exits_without_its_parent(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(m): return 1\n")
    command = [sys.executable, "-P", "-m", "autotune.workload.scoring", str(tmp_path / "mine.py")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stdout == b""


PAGE = Path(autotune.__file__).parent.parent / "docs" / "objectives.md"


def test_the_page_lists_every_objective_and_every_figure() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*objective_names(), *FIGURES, *SHORT}


def test_the_pages_own_objective_scores(opened: list[Scorer], tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scorer = own(opened, tmp_path, code, "greener.py")
    # 90 J in 3 s.
    assert scorer.score(MEASUREMENT.model_copy(update={"energy_j": 90.0})) == pytest.approx(50 / 30)
    assert scorer.facts.unit == "samples/s/W"


def test_a_parameter_with_a_default_is_the_objectives_own(opened: list[Scorer], tmp_path: Path) -> None:
    text = "RATE_WITHIN = 0\ndef score(m, penalty=0.5, *, more=1): return m.samples_per_s * penalty * more\n"
    scorer = own(opened, tmp_path, text)
    assert scorer.score(MEASUREMENT) == 25.0 and scorer.facts.rate_within == 0


@pytest.mark.parametrize("home", ["autotune", "autotune.records"])
def test_an_objective_imports_its_records_by_either_name(opened: list[Scorer], tmp_path: Path, home: str) -> None:
    """The second is the name that they had before."""
    text = f"from {home} import Goal, Measurement, NotScored\n\ndef score(m: Measurement, goal: Goal): return 2.0\n"
    scorer = own(opened, tmp_path, text)
    assert scorer.score(MEASUREMENT) == 2.0
