"""The live panel and the plain lines, both on stderr."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from autotune.base.observer import Observer
from autotune.base.records import Beat, Measurement, Phase, StudySpec, Trial, TrialResult, TrialStatus, Value, Window
from autotune.report.panel import MIN_GAP_S, LivePanel, PanelConsole, PlainLines, observer_for
from tests.support import make_trial

GIB = 2**30
SPEC = StudySpec(name="resnet50-1", mark="m", created="2025-03-01", model="resnet50", budget_s=600.0)
HEADLINE = "resnet50, on cpu, batch 32"
BASE: dict[str, Value] = {"precision": "fp32", "batch_size": 32, "num_workers": 0}
FAST: dict[str, Value] = {**BASE, "precision": "bf16"}
LARGE: dict[str, Value] = {**BASE, "batch_size": 512}
BEAT = Beat(phase=Phase.MEASURE, step=1234, rate_per_s=58.94, loss=6.9123, memory_bytes=int(1.24 * GIB))


class Seconds:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def complete(number: int, config: dict[str, Value], rate: float) -> Trial:
    measurement = Measurement(
        batch_size=int(config["batch_size"]),
        samples_per_s=rate,
        ci95_per_s=(rate * 0.98, rate * 1.02),
        steady_per_s=rate,
        windows=(Window(steps=5, samples=160, seconds=160 / rate),),
        step_s=(),
        wait_s=(),
        device_s=(),
        startup_s=2.0,
        compile_s=1.0,
        warmup_s=4.0,
        measured_s=12.0,
        loader_wait_fraction=0.02,
        epoch_samples=1024,
        peak_allocated_bytes=GIB,
    )
    result = TrialResult(launch="x", status=TrialStatus.COMPLETE, measurement=measurement, wall_s=24.0)
    return Trial(number=number, config=config, result=result, score=rate)


def failed(number: int, config: dict[str, Value], status: TrialStatus, **result: Any) -> Trial:
    ended = TrialResult(launch="x", status=status, phase=Phase.BUILD, wall_s=9.4, **result)
    return Trial(number=number, config=config, result=ended)


def a_search(observer: Observer) -> None:
    """Make the calls of a search, up to the middle of a verifying launch."""
    observer.begins(SPEC, HEADLINE)
    observer.launch_begins("looking at the workload", {})
    for done in range(1025):
        observer.data_progress(done, 1024)
    for trial in (
        complete(0, BASE, 30.1),
        complete(1, FAST, 61.84),
        failed(2, LARGE, TrialStatus.OOM, cause="can't allocate\nmemory", peak_bytes=4 * GIB),
        failed(3, {**BASE, "num_workers": 1}, TrialStatus.PRUNED, rate_seen_per_s=14.2),
    ):
        observer.launch_begins(f"trial {trial.number}", trial.config)
        observer.clock(trial.number * 65.0, 600.0)
        observer.beat(Beat(phase=Phase.LOAD))
        observer.trial_ends(trial)
    observer.says("four trials are enough")
    observer.launch_begins("verify 1 of 6", FAST)
    observer.beat(BEAT)
    observer.clock(400.0, 600.0)


def a_panel(width: int = 80, stream: io.StringIO | None = None) -> tuple[LivePanel, Seconds, io.StringIO]:
    stream = stream or io.StringIO()
    clock = Seconds()
    return LivePanel(clock, PanelConsole(file=stream, width=width, height=30, force_terminal=True)), clock, stream


def test_the_panel_shows_the_current_launch_the_best_and_the_time_left() -> None:
    panel, _, _ = a_panel()
    a_search(panel)
    lines = panel.content(100).plain.splitlines()
    assert lines[:4] == [
        "now     verify 1 of 6 · measure, step 1,234 · 58.9 samples/s · 1.24 GiB · loss 6.91",
        "        bf16",
        "best    61.8 ± 1.2 samples/s · the baseline 30.1 ± 0.6 · trial 1",
        "        bf16",
    ]
    assert lines[4] == "trials  4: 2 complete · 1 pruned · 1 oom"
    assert [line.split() for line in lines[5:8]] == [
        ["last", "3", "pruned", "~14.2", "1", "worker"],
        ["2", "oom", "in", "build", "batch", "512"],
        ["1", "complete", "61.8", "±", "1.2", "bf16"],
    ]
    assert lines[8].startswith("time    ━")
    assert lines[8].endswith("─ 3 min 20 s left of 10 min")


def test_the_baseline_is_named_before_there_is_anything_to_compare() -> None:
    panel, _, _ = a_panel()
    panel.begins(SPEC, HEADLINE)
    panel.launch_begins("looking at the workload", {})
    assert panel.content(80).plain.splitlines()[0] == "now     looking at the workload"
    panel.launch_begins("trial 0", BASE)
    assert panel.content(80).plain.splitlines()[1] == "        baseline: fp32, batch 32, 0 workers"
    panel.trial_ends(complete(0, BASE, 30.1))
    assert "best    30.1 ± 0.6 samples/s · trial 0" in panel.content(80).plain


def test_an_interrupted_baseline_is_replaced_by_its_repeat() -> None:
    panel, _, _ = a_panel()
    panel.trial_ends(failed(0, BASE, TrialStatus.INTERRUPTED))
    panel.trial_ends(complete(1, BASE, 30.0))
    panel.trial_ends(complete(2, FAST, 60.0))
    assert "60.0 ± 1.2 samples/s · the baseline 30.0 ± 0.6" in panel.content(80).plain


def test_a_stopped_trial_shows_its_rate_as_seen() -> None:
    panel, _, _ = a_panel()
    slow = make_trial(3, LARGE, 14.2, status=TrialStatus.PRUNED)
    assert slow.result.measurement is not None
    panel.trial_ends(complete(0, BASE, 30.1))
    panel.trial_ends(slow)
    assert panel.content(80).plain.splitlines()[-2].split()[:5] == ["last", "3", "pruned", "~14.2", "batch"]


def test_generating_data_has_a_progress_bar() -> None:
    panel, _, _ = a_panel()
    panel.data_progress(512, 1024)
    line = panel.content(80).plain.splitlines()[0]
    assert line.startswith("data    ━")
    assert line.endswith("512 of 1,024 files")
    assert abs(line.count("━") - line.count("─")) <= 1
    panel.launch_begins("trial 0", BASE)
    assert "files" not in panel.content(80).plain


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80])
def test_a_narrow_panel_loses_nothing(width: int) -> None:
    panel, _, _ = a_panel()
    a_search(panel)
    panel.begins(SPEC, HEADLINE)
    narrow, wide = (" ".join(panel.content(w).plain.split()) for w in (width, 200))
    assert HEADLINE in narrow or width - 4 >= len(HEADLINE)
    assert all(len(line) <= width for line in panel.content(width).plain.splitlines())
    bar = re.compile("[━─]+")
    assert bar.sub("", narrow).removeprefix(HEADLINE).strip() == bar.sub("", wide)


@pytest.mark.parametrize("width", [1, 5, 20, 40, 80, 200])
def test_narrow_terminals_are_supported(width: int) -> None:
    panel, clock, stream = a_panel(width)
    a_search(panel)
    clock.sleep(MIN_GAP_S)
    panel.beat(BEAT)
    drawn = stream.getvalue()
    panel.ends()
    assert "╭" in drawn or width < 4
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(panel.content(width))
    assert all(cell_len(line) <= width for line in console.export_text().splitlines())


def test_the_terminals_width_may_change() -> None:
    stream = io.StringIO()
    console = PanelConsole(file=stream, width=120, height=30, force_terminal=True)
    clock = Seconds()
    panel = LivePanel(clock, console)
    a_search(panel)
    console.width = 40
    clock.sleep(MIN_GAP_S)
    before = len(stream.getvalue())
    panel.clock(401.0, 600.0)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()[before:]).splitlines()
    assert len(lines) > 5
    # Three columns stay free for the terminal's echo of Ctrl-C.
    assert {cell_len(line.strip("\r")) for line in lines if line.strip()} == {37}
    panel.ends()


def test_the_panel_is_drawn_rarely_and_only_after_changes() -> None:
    panel, clock, stream = a_panel()
    panel.begins(SPEC, HEADLINE)
    drawings = 0
    for tick in range(600):  # a minute, at the search's interval
        clock.sleep(0.1)
        before = len(stream.getvalue())
        panel.beat(BEAT.model_copy(update={"step": tick + 1}))
        panel.clock(tick * 0.1, 600.0)
        drawings += len(stream.getvalue()) > before
    assert 100 <= drawings <= 60 / MIN_GAP_S <= 240
    before = len(stream.getvalue())
    for _ in range(10):
        clock.sleep(1.0)
        panel.beat(BEAT.model_copy(update={"step": 600}))
    assert len(stream.getvalue()) == before
    panel.ends()


def test_the_panel_uses_no_thread_and_no_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    threads, stdout, stderr = threading.active_count(), sys.stdout, sys.stderr
    panel, _, stream = a_panel()
    a_search(panel)
    assert threading.active_count() == threads
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    panel.ends()
    assert capsys.readouterr() == ("", "")
    assert "four trials are enough" in stream.getvalue()


def test_the_end_may_be_reported_twice_or_before_the_start() -> None:
    panel, clock, stream = a_panel()
    panel.ends()
    assert stream.getvalue() == ""
    a_search(panel)
    panel.ends()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # the cursor is visible again
    after = len(stream.getvalue())
    panel.ends()
    clock.sleep(10)
    panel.beat(BEAT)
    assert len(stream.getvalue()) == after
    panel.says("afterwards")
    assert stream.getvalue()[after:] == "afterwards\n"


class Broken(io.StringIO):
    """A stream that fails after some writes."""

    def __init__(self, error: Exception, good: int) -> None:
        super().__init__()
        self.error = error
        self.good = good

    def write(self, text: str) -> int:
        if self.good == 0:
            raise self.error
        self.good -= 1
        return super().write(text)


@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "EIO"), ValueError("closed")])
def test_a_stream_that_breaks_does_not_end_the_search(error: Exception, good: int) -> None:
    panel, clock, stream = a_panel(stream=Broken(error, good))
    a_search(panel)
    clock.sleep(10)
    panel.beat(BEAT)
    panel.ends()
    panel.says("afterwards")
    lines = PlainLines(Broken(error, good))
    a_search(lines)
    lines.ends()
    assert "afterwards" not in stream.getvalue()


def test_a_closed_pipe_on_the_real_stderr_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch, open(writing, "w", buffering=1, closefd=False) as pipe:
        patch.setattr(sys, "stderr", pipe)
        patch.setenv("TERM", "xterm")
        panel = observer_for(True, Seconds())
        a_search(panel)
        panel.ends()
        a_search(observer_for(False, Seconds()))
        # Text that could not be written must not fail again when the file is closed.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), writing)
    os.close(writing)


def test_an_error_in_drawing_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    panel, clock, stream = a_panel()
    panel.begins(SPEC, HEADLINE)

    def broken(width: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(panel, "content", broken)
    a_search(panel)
    clock.sleep(10)
    panel.beat(BEAT)
    panel.ends()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_plain_lines_report_each_event_once() -> None:
    stream = io.StringIO()
    a_search(PlainLines(stream))
    lines = stream.getvalue().splitlines()
    assert lines[:3] == [
        "[00:00] resnet50-1: resnet50, on cpu, batch 32",
        "[00:00] looking at the workload",
        "[00:00] making data: 0 %, 0 of 1,024 files",
    ]
    assert sum("making data" in line for line in lines) == 11
    assert lines[12:] == [
        "[00:00] making data: 100 %, 1,024 of 1,024 files",
        "[00:00] trial 0 begins: baseline: fp32, batch 32, 0 workers",
        "[00:00] trial 0 complete, 30.1 ± 0.6 samples/s, 1.00 GiB, 24 s",
        "[00:00] trial 1 begins: bf16",
        "[01:05] trial 1 complete, 61.8 ± 1.2 samples/s, 1.00 GiB, 24 s",
        "[01:05] trial 2 begins: batch 512",
        "[02:10] trial 2 oom in build, 4.00 GiB, 9.4 s: can't allocate memory",
        "[02:10] trial 3 begins: 1 worker",
        "[03:15] trial 3 pruned, ~14.2 samples/s, 9.4 s",
        "[03:15] four trials are enough",
        "[03:15] verify 1 of 6 begins: bf16",
    ]
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_summarise_the_trials_of_an_earlier_run() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.launch_begins("looking at the workload", {})
    lines.trial_ends(complete(0, BASE, 30.0))
    lines.trial_ends(complete(1, FAST, 60.0))
    lines.launch_begins("trial 2", LARGE)
    lines.trial_ends(complete(2, LARGE, 33.0))
    assert stream.getvalue().splitlines()[1:] == [
        "[00:00] 2 trials kept: 2 complete; best: 60.0 ± 1.2 samples/s, bf16",
        "[00:00] trial 2 begins: batch 512",
        "[00:00] trial 2 complete, 33.0 ± 0.7 samples/s, 1.00 GiB, 24 s",
    ]


def test_no_animation_unless_the_terminal_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(observer_for(True, Seconds()), LivePanel)
    assert isinstance(observer_for(False, Seconds()), PlainLines)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(observer_for(False, Seconds()), PlainLines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(observer_for(True, Seconds()), PlainLines)
