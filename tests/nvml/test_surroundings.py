"""Windows disturbed by a card's state, from the driver's answers to the reason stored with the window."""

import pytest

from .conftest import card

UNKNOWN = 999
#: Bits of nvmlClocksEventReasons in nvml.h.
SLOWED = {
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
    0x40 | 0x08 | 0x04: "HW thermal slowdown",
}
#: None, idle, application clocks, SW power cap, sync boost, display clocks: by configuration, or normal under load.
#: HW slowdown (0x8) is trusted only beside the bits of heat or of the power brake.
USUAL = (0x0, 0x1, 0x2, 0x4, 0x8, 0x10, 0x100)
OURS, THEIRS = 4711, 4712
#: The number of our process on the host, in a container.
OURS_OUTSIDE = 90_001


@pytest.fixture
def watcher(driver):
    """``watcher(processes)``: start to watch while these processes are on the card, and settle in as `OURS`, when
    ``comers`` have come, too."""

    def begin(processes="", *, comers=""):
        driver.says(card("GPU-b"), card("GPU-a", processes=processes))
        driver.asked("watcher = surroundings.SurroundingsReader(['GPU-a'], clock)")
        driver.says(card("GPU-b"), card("GPU-a", processes=f"{processes} {comers} {OURS}".strip()))
        driver.asked("watcher.settle_in(); watcher.begin()")

    return begin


def window(driver):
    """``(surroundings, joules used, why the window is discarded)`` of a window that ends now."""
    driver.asked("around, used_j = watcher.read()")
    return driver.asked("(around, used_j, surroundings.reason_to_discard(around, 4, 1e3))")


@pytest.mark.parametrize("bits", SLOWED, ids=hex)
def test_a_throttled_window_is_discarded_and_the_next_one_counts(driver, watcher, bits):
    watcher()
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, reasons=bits, sm_clock=345))
    around, _, reason = window(driver)
    assert (around["clocks_event_reasons"], around["sm_clock_mhz"]) == (bits, 345)
    assert reason == f"{SLOWED[bits]} held the card's clocks down"
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, reasons=0))
    assert window(driver)[2] is None


@pytest.mark.parametrize("bits", USUAL, ids=hex)
def test_what_is_usual_under_load_does_not_count_as_throttling(driver, watcher, bits):
    watcher()
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, reasons=bits))
    around, _, reason = window(driver)
    assert (around["clocks_event_reasons"], reason) == (bits, None)


def test_the_state_of_the_other_card_is_not_ours(driver, watcher):
    watcher()
    driver.says(card("GPU-b", processes=THEIRS, reasons=0x40), card("GPU-a", processes=OURS))
    around, _, reason = window(driver)
    assert (around["foreign_processes"], around["clocks_event_reasons"], reason) == (0, 1, None)


def test_a_foreign_process_comes_and_goes(driver, watcher):
    watcher()
    driver.says(card("GPU-b"), card("GPU-a", processes=f"{OURS} {THEIRS}"))
    around, _, reason = window(driver)
    assert (around["foreign_processes"], reason) == (1, "another process is on the card")
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS))
    around, _, reason = window(driver)
    assert (around["foreign_processes"], reason) == (0, None)


def test_a_process_that_was_there_before_us_is_foreign(driver, watcher):
    watcher(processes=str(THEIRS))
    around, _, reason = window(driver)
    assert (around["foreign_processes"], reason) == (1, "another process is on the card")


def test_a_process_that_was_there_before_us_may_leave_and_others_come(driver, watcher):
    watcher(processes=str(THEIRS))
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS))
    assert window(driver)[0]["foreign_processes"] == 0
    driver.says(card("GPU-b"), card("GPU-a", processes=f"{OURS} 100 101"))
    assert window(driver)[0]["foreign_processes"] == 2


def samples(*found):
    """Return the driver's samples of ``(timestamp, pid, per cent of the SMs)``."""
    return " ".join(":".join(map(str, one)) for one in found)


def on_the_card(driver, *found, processes=f"{THEIRS} {OURS}"):
    """The driver reports these samples, beside those of another card."""
    other = card("GPU-b", samples=samples((99, 7, 70)))
    driver.says(other, card("GPU-a", processes=processes, samples=samples(*found)))


def test_an_idle_stranger_disturbs_no_window_and_one_that_computes_does(driver, watcher):
    watcher(processes=str(THEIRS))
    on_the_card(driver, (10, OURS, 97))
    around, _, reason = window(driver)
    assert (around["foreign_processes"], around["foreign_sm_percent"], reason) == (1, 0, None)
    on_the_card(driver, (10, OURS, 97), (20, OURS, 60), (21, THEIRS, 30), (21, 100, 9))
    around, _, reason = window(driver)
    assert (around["foreign_sm_percent"], reason) == (39, "another process computed on the card")
    # The driver samples once in up to a second, so without a new sample the last one stands.
    assert window(driver)[0]["foreign_sm_percent"] == 39
    on_the_card(driver, (30, OURS, 97))
    around, _, reason = window(driver)
    assert (around["foreign_sm_percent"], reason) == (0, None)


def test_who_comes_during_start_up_is_not_taken_for_ours(driver, watcher):
    watcher(comers=str(THEIRS))
    on_the_card(driver, (10, OURS, 50), (11, THEIRS, 50))
    around, _, reason = window(driver)
    assert (around["foreign_processes"], reason) == (1, "another process is on the card")


def test_the_server_of_mps_may_come_with_our_first_launch(driver):
    driver.says(card("GPU-a"))
    driver.asked("watcher = surroundings.SurroundingsReader(['GPU-a'], clock)")
    # It computes for us; we are on the list, too.
    server = {THEIRS: "/usr/bin/nvidia-cuda-mps-server"}
    driver.says(card("GPU-a", processes=f"{THEIRS} {OURS}", samples=samples((10, THEIRS, 97))), process=server)
    driver.asked("watcher.settle_in(); watcher.begin()")
    around, _, reason = window(driver)
    assert (around["foreign_processes"], around["foreign_sm_percent"], reason) == (0, None, None)
    # For whom it computes is not known, so whoever comes may compute.
    driver.says(card("GPU-a", processes=f"{THEIRS} {OURS} 99", samples=samples((20, THEIRS, 97))), process=server)
    around, _, reason = window(driver)
    assert (around["foreign_processes"], reason) == (1, "another process is on the card")


def test_what_fills_the_drivers_buffer_is_not_a_sample(driver, watcher):
    watcher()
    on_the_card(driver, (10, OURS, 97), (0, 0, 0), (11, 0, 50), (12, THEIRS, 2_147_483_632), processes=OURS)
    assert window(driver)[0]["foreign_sm_percent"] == 0


@pytest.mark.parametrize("failing", [3, 13, UNKNOWN], ids=["not supported", "no such function", "unknown error"])
def test_without_samples_a_stranger_counts_as_computing(driver, watcher, failing):
    watcher(processes=str(THEIRS))
    sampled = card("GPU-a", processes=f"{THEIRS} {OURS}", samples=samples((10, OURS, 97)))
    driver.says(card("GPU-b"), sampled, fail={"nvmlDeviceGetProcessUtilization": failing})
    around, _, reason = window(driver)
    assert (around["foreign_sm_percent"], reason) == (None, "another process is on the card")


def test_samples_that_number_processes_differently_from_the_list(driver):
    # Newer drivers list a container's processes by the container's numbers, and sample by the host's.
    before = {"processes": "", "samples": samples((5, 80, 40))}
    driver.says(card("GPU-a", **before))
    driver.asked("watcher = surroundings.SurroundingsReader(['GPU-a'], clock)")
    driver.says(card("GPU-a", **before | {"processes": 17}))
    driver.asked("watcher.settle_in(); watcher.begin()")
    # The one that computed before is a stranger, and the one that began to is ours.
    driver.says(card("GPU-a", processes=17, samples=samples((10, OURS_OUTSIDE, 55), (11, 80, 40))))
    around, _, reason = window(driver)
    assert (around["foreign_sm_percent"], reason) == (40, "another process computed on the card")
    driver.says(card("GPU-a", processes=17, samples=samples((20, OURS_OUTSIDE, 97))))
    assert window(driver)[0]["foreign_sm_percent"] == 0
    driver.says(card("GPU-a", processes=17, samples=samples((30, OURS_OUTSIDE, 90), (30, 81, 10))))
    assert window(driver)[0]["foreign_sm_percent"] == 10


def test_samples_in_which_ours_cannot_be_found_tell_nothing(driver, watcher):
    watcher()
    on_the_card(driver, (10, OURS_OUTSIDE, 55), (11, 80, 40), processes=OURS)
    around, _, reason = window(driver)
    assert (around["foreign_sm_percent"], reason) == (None, None)
    on_the_card(driver, (20, OURS_OUTSIDE, 55), processes=OURS)
    assert window(driver)[0]["foreign_sm_percent"] == 0


@pytest.mark.parametrize("listed", ["", "0", "55"], ids=["no process", "all processes as one", "MPS's server"])
def test_a_list_in_which_ours_does_not_appear_tells_nothing(driver, listed):
    driver.says(card("GPU-a", processes=listed))
    driver.asked("watcher = surroundings.SurroundingsReader(['GPU-a'], clock)")
    driver.asked("watcher.settle_in(); watcher.begin()")
    around, _, reason = window(driver)
    assert (around["foreign_processes"], around["foreign_sm_percent"], reason) == (None, None, None)
    driver.says(card("GPU-a", processes=listed, samples=samples((10, OURS_OUTSIDE, 97))))
    assert window(driver)[0]["foreign_sm_percent"] == 0
    driver.says(card("GPU-a", processes=listed, samples=samples((20, OURS_OUTSIDE, 60), (20, 80, 30))))
    assert window(driver)[2] == "another process computed on the card"


def test_foreign_processes_are_unknown_before_we_have_settled_in(driver):
    driver.says(card("GPU-a", processes=f"{OURS} {THEIRS}"))
    driver.asked("watcher = surroundings.SurroundingsReader(['GPU-a'], clock); watcher.begin()")
    assert window(driver)[0]["foreign_processes"] is None


@pytest.mark.parametrize("failing", ["*", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_unknown_processes_are_neither_absent_nor_foreign(driver, watcher, failing):
    watcher()
    driver.says(card("GPU-b"), card("GPU-a", processes=f"{OURS} {THEIRS}"), fail={failing: UNKNOWN})
    around, _, reason = window(driver)
    assert (around["foreign_processes"], reason) == (None, None)
    driver.says(card("GPU-b"), card("GPU-a", processes=f"{OURS} {THEIRS}"))
    assert window(driver)[0]["foreign_processes"] == 1


def test_what_a_window_is_kept_with(driver, watcher):
    watcher()
    busy = {"sm_clock": 1755, "memory_clock": 3201, "temperature": 61, "power": 655_250, "reasons": 4}
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, energy=5_350_500, **busy))
    around, used_j, _ = window(driver)
    assert used_j == 350.5
    assert (around["sm_clock_mhz"], around["memory_clock_mhz"], around["temperature_c"]) == (1755, 3201, 61)
    assert (around["power_w"], around["clocks_event_reasons"]) == (655.25, 4)
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, energy=5_350_700))
    assert window(driver)[1] == pytest.approx(0.2)


def test_energy_is_counted_from_where_a_window_begins(driver, watcher):
    watcher()
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, energy=7_000_000))
    driver.asked("watcher.begin()")
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, energy=7_002_000))
    assert window(driver)[1] == 2.0


def test_without_a_counter_there_is_no_energy(driver, watcher):
    watcher()
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, energy=None))
    assert window(driver)[1] is None
    # After the counter returns, a difference is reported only when both readings are known.
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, energy=9_000_000))
    assert window(driver)[1] is None
    driver.says(card("GPU-b"), card("GPU-a", processes=OURS, energy=9_001_000))
    assert window(driver)[1] == 1.0


#: The process of the second rank, on the second card.
SECOND = 4713


@pytest.fixture
def both(driver):
    """``both(first, second)``: the driver's further answers of the two cards that a training of two ranks is on."""

    def say(first=None, second=None):
        on_first, on_second = {"processes": OURS, **(first or {})}, {"processes": SECOND, **(second or {})}
        driver.says(card("GPU-a", **on_first), card("GPU-b", **on_second))

    say({"processes": ""}, {"processes": ""})
    driver.asked("watcher = surroundings.SurroundingsReader(['GPU-a', 'GPU-b'], clock)")
    say()
    driver.asked("watcher.settle_in(); watcher.begin()")
    return say


@pytest.mark.parametrize("which", ["first", "second"])
def test_what_holds_one_of_several_cards_up_discards_the_window(driver, both, which):
    both(**{which: {"reasons": 0x40, "sm_clock": 345, "temperature": 88}})
    around, _, reason = window(driver)
    assert (around["sm_clock_mhz"], around["temperature_c"]) == (345, 88)
    assert (around["clocks_event_reasons"], reason) == (0x41, "HW thermal slowdown held the card's clocks down")
    assert driver.asked("watcher.at_work()") == {"sm_clock_mhz": 345, "clocks_event_reasons": 0x41}
    both()
    around, _, reason = window(driver)
    assert (around["foreign_processes"], around["sm_clock_mhz"], reason) == (0, 1980, None)


def test_a_stranger_on_one_of_several_cards(driver, both):
    idle, ours = {"samples": samples((10, OURS, 97))}, {"samples": samples((10, SECOND, 97))}
    both(idle, {**ours, "processes": f"{SECOND} {THEIRS}"})
    around, _, reason = window(driver)
    assert (around["foreign_processes"], around["foreign_sm_percent"], reason) == (1, 0, None)
    both(idle, {"processes": f"{SECOND} {THEIRS}", "samples": samples((20, SECOND, 60), (21, THEIRS, 30))})
    around, _, reason = window(driver)
    assert (around["foreign_sm_percent"], reason) == (30, "another process computed on the card")


def test_what_a_stranger_on_one_card_does_may_be_unknown_while_the_other_card_tells(driver, both):
    told = {"samples": samples((10, OURS, 97))}
    untold = {"processes": f"{SECOND} {THEIRS}", "fail": {"nvmlDeviceGetProcessUtilization": UNKNOWN}}
    both(told, untold)
    around, _, reason = window(driver)
    assert (around["foreign_processes"], around["foreign_sm_percent"]) == (1, None)
    assert reason == "another process is on the card"


def test_the_energy_of_several_cards_is_the_sum(driver, both):
    both({"energy": 5_350_500, "power": 500_000}, {"energy": 5_100_000, "power": 400_000})
    around, used_j, _ = window(driver)
    assert (used_j, around["power_w"]) == (450.5, 900.0)
    both({"energy": 5_351_500}, {"energy": None, "power": None})
    around, used_j, _ = window(driver)
    assert (used_j, around["power_w"]) == (None, None), "what one card has used is not what the training has"
