"""Disturbed windows: real busy processes beside real launches, and what counts as a disturbance."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from autotune.base.clock import SystemClock
from autotune.base.records import MeasurePlan, Phase, Surroundings, TrialStatus, Window
from autotune.child.windows import card_of, reason_to_discard, what_went_on
from autotune.launcher.quiet import cards_of
from autotune.machine.cpu_load import CpuWatch
from autotune.machine.gpu import SLOWDOWNS
from tests.support import make_spec

pytestmark = pytest.mark.slow

CORES = len(os.sched_getaffinity(0))
#: Other processes may use three quarters of the machine, more than anything running beside the tests usually takes.
PLAN = MeasurePlan(
    target_halfwidth=10.0, min_windows=4, min_window_s=0.1, max_measure_s=1.0, busy_cores=max(0.75, 0.75 * CORES)
)
BUSY = "\nwhile True:\n    pass\n"


@pytest.fixture
def quiet():
    """Wait until the machine is idle."""
    clock = SystemClock()
    watch = CpuWatch(os.getpid(), clock)
    deadline = clock.now() + 20
    while clock.now() < deadline:
        clock.sleep(0.5)
        if watch.read().foreign_cores < 0.25 * CORES:
            return
    pytest.skip("others keep this machine busy, so nothing can be undisturbed here")


@pytest.fixture
def hog():
    """One busy process per core, until ``hog()`` is called or the test ends."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(CORES)]

    def end():
        for process in processes:
            process.kill()
            process.wait()

    yield end
    end()


@pytest.fixture
def launch(launched):
    return lambda plan, **more: launched("steady.py", None, {"step_s": 0.01}, plan=plan, status=None, **more)[0]


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        ({}, None),
        ({"stops": 0}, None),
        ({"stops": 2}, "its processes were stopped and continued again (SIGSTOP, as cpulimit does)"),
        ({"foreign_cores": 1.2, "idle_cores": 0.0}, "others used 1.2 of 4 cores"),
        # Cores were idle, so the other processes took nothing from the training.
        ({"foreign_cores": 1.2, "idle_cores": 0.4}, None),
        ({"foreign_cores": 0.3, "idle_cores": 0.0}, None),
        ({"foreign_cores": 1.2}, None),
        ({"foreign_processes": 0, "clocks_event_reasons": 0}, None),
        ({"foreign_processes": 1}, "another process is on the card"),
        # Whether it computed is known.
        ({"foreign_processes": 1, "foreign_sm_percent": 0}, None),
        ({"foreign_processes": 1, "foreign_sm_percent": 5}, None),
        ({"foreign_processes": 1, "foreign_sm_percent": 6}, "another process computed on the card"),
        # One that only draws is not listed.
        ({"foreign_processes": 0, "foreign_sm_percent": 30}, "another process computed on the card"),
        # Any change of the performance state may set this bit alone.
        ({"clocks_event_reasons": 0x08}, None),
        ({"clocks_event_reasons": 0x48}, "HW thermal slowdown held the card's clocks down"),
        ({"clocks_event_reasons": 0x88}, "HW power brake held the card's clocks down"),
        ({"clocks_event_reasons": 0x20}, "SW thermal slowdown held the card's clocks down"),
        # A slowdown that may last is named only if nothing else is to be said.
        (
            {"clocks_event_reasons": 0x20, "foreign_cores": 1.2, "idle_cores": 0.0},
            "others used 1.2 of 4 cores",
        ),
        # Idle, and a power cap under load, are normal states of a card.
        ({"clocks_event_reasons": 0x01 | 0x04}, None),
    ],
)
def test_what_speaks_against_a_window(around, reason):
    assert reason_to_discard(Surroundings(**around), 4, busy_cores=0.4) == reason


def test_others_are_no_reason_without_a_limit():
    around = Surroundings(foreign_cores=4.0, idle_cores=0.0, foreign_processes=1, foreign_sm_percent=80, stops=3)
    assert reason_to_discard(around, 4, busy_cores=None) is None
    assert reason_to_discard(Surroundings(foreign_processes=1), 4, busy_cores=None) is None
    slowed = around.model_copy(update={"clocks_event_reasons": 0x40})
    assert reason_to_discard(slowed, 4, busy_cores=None) == "HW thermal slowdown held the card's clocks down"


def test_a_slow_card_has_a_name_for_every_bit():
    assert len(set(SLOWDOWNS.values())) == len(SLOWDOWNS) == 3
    assert all(bit.bit_count() == 1 for bit in SLOWDOWNS)


def discarded(reason, **around):
    return Window(steps=1, samples=1, seconds=1.0, discarded=reason, around=Surroundings(**around))


def test_what_went_on_is_said_of_most_windows():
    load = [discarded(f"others used {n} of 2 cores", foreign_cores=n) for n in (1.0, 2.0)]
    card = [discarded("another process is on the card", foreign_processes=1)] * 3
    assert what_went_on(load, 2) == "other processes kept using 1.5 of 2 cores"
    assert what_went_on(load + card, 2) == "another process is on the card"


@pytest.mark.parametrize(
    ("device", "visible", "card"),
    [
        ("cpu", None, None),
        ("cpu", "GPU-a", None),
        ("cuda:0", None, None),
        ("cuda:0", "GPU-a", "GPU-a"),
        ("cuda:GPU-b", None, "GPU-b"),
        ("cuda:0", "MIG-c", "MIG-c"),
        ("cuda:0", "1", None),
        ("cuda:0", "GPU-a,GPU-b", "GPU-a"),
        ("cuda:0", "0,1", None),
    ],
)
def test_the_card_a_launch_runs_on(device, visible, card):
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert card_of(make_spec(Path("x"), devices=(device,), env=env)) == card


@pytest.mark.parametrize(
    ("device", "visible", "cards"),
    [("cuda:0", "GPU-a,GPU-b", ("GPU-a", "GPU-b")), ("cuda:0", "GPU-a", ("GPU-a",)), ("cpu", "GPU-a,GPU-b", ())],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_cards_of_a_launch(device, visible, cards, ranks):
    """Of a script, ranks are its own business: it is one launch on all cards that it sees."""
    spec = make_spec(Path("x"), devices=(device,), env={"CUDA_VISIBLE_DEVICES": visible}, ranks=ranks)
    assert cards_of(spec) == cards
    if ranks > 1 and len(cards) > 1:
        assert [card_of(spec.model_copy(update={"rank": rank})) for rank in range(ranks)] == list(cards)


class TestAlone:
    """These have the machine to themselves."""

    def test_a_launch_that_others_never_leave_alone_says_so(self, launch, hog):
        result = launch(PLAN)
        assert (result.status, result.phase, result.transient) == (TrialStatus.INTERRUPTED, Phase.MEASURE, True)
        assert result.cause.startswith("other processes kept using ")
        assert f" of {CORES} cores; " in result.cause
        assert result.measurement is None
        assert "when it is quiet" in result.advice
        # Discarded windows may double the time.
        assert 2 <= result.phase_s[Phase.MEASURE] < 6

    def test_windows_that_others_disturbed_are_repeated(self, launch, quiet, hog):
        clock = SystemClock()
        ends = None

        def on_beat(beat):
            nonlocal ends
            if beat.phase is Phase.MEASURE:
                ends = ends or clock.now() + 0.8
                if clock.now() > ends:
                    hog()

        result = launch(PLAN.model_copy(update={"max_measure_s": 4.0}), on_beat=on_beat)
        assert result.status is TrialStatus.COMPLETE, result.cause
        found = result.measurement
        assert len(found.discarded) >= 3
        for window in found.discarded:
            assert window.discarded == f"others used {window.around.foreign_cores:.1f} of {CORES} cores"
            assert window.around.foreign_cores > PLAN.busy_cores and window.around.idle_cores < 0.1 * max(1, CORES)
        assert len(found.windows) >= PLAN.min_windows
        assert all(w.discarded is None for w in found.windows)
        # Discarded windows are not included anywhere else.
        assert found.measured_s == pytest.approx(sum(w.seconds for w in found.windows))
        assert len(found.step_s) == len(found.losses) == sum(w.steps for w in found.windows)

    def test_foreign_load_is_ignored_by_default(self, launch, hog):
        result = launch(PLAN.model_copy(update={"busy_cores": None}))
        assert result.status is TrialStatus.COMPLETE, result.cause
        assert result.measurement.discarded == ()
        assert max(w.around.foreign_cores for w in result.measurement.windows) > 0.5

    def test_a_launch_that_is_stopped_again_and_again_says_so(self, launch):
        measuring, ended = threading.Event(), threading.Event()

        def stop():
            measuring.wait()
            while not ended.wait(0.02):
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()
                        process.resume()

        thread = threading.Thread(target=stop)
        thread.start()
        try:
            result = launch(PLAN, on_beat=lambda beat: measuring.set() if beat.phase is Phase.MEASURE else None)
        finally:
            measuring.set()
            ended.set()
            thread.join()
        assert (result.status, result.phase, result.transient) == (TrialStatus.INTERRUPTED, Phase.MEASURE, True)
        assert result.cause.startswith("its processes were stopped and continued again (SIGSTOP, as cpulimit does); ")
        undisturbed = launch(PLAN.model_copy(update={"busy_cores": None}))
        assert {w.around.stops for w in undisturbed.measurement.windows} == {0}
