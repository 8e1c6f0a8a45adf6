"""No launch starts on a card that is busy or does not answer: a real launcher in virtual time."""

import pytest

from .conftest import card, state

UNKNOWN = 999
MIB = 2**20
IDLE = 600 * MIB
BUSY = 30_000 * MIB


@pytest.fixture
def launch(driver, workloads, tmp_path):
    """``launch(*changes, **options)``: ``(result, messages)`` of a launch on GPU-a while the driver's answers change.
    An earlier launch has seen the card idle."""
    workload = str(workloads / "faults.py")
    driver.asked("import waiting")

    def run(*changes, name="launch", **options):
        given = {"folder": str(tmp_path / name), "workload": workload, **options}
        answer = driver.asked(f"waiting.launch({list(changes)!r}, **{given!r})")
        return answer["result"], answer["said"]

    run((0, gpus(IDLE)), name="before", afresh=True)
    return run


def gpus(used, *, processes="", utilization=0, **more):
    """Return the state in which GPU-a, the second card, has ``used`` memory in use."""
    card_a = card("GPU-a", memory_used=used, processes=processes, utilization=utilization)
    return state(card("GPU-b", memory_used=BUSY), card_a, **more)


def has_run(result):
    # It cannot train, because the driver is a stand-in.
    return result["exit_code"] is not None


@pytest.mark.slow
def test_an_idle_card_is_not_waited_for(launch):
    result, said = launch((0, gpus(IDLE)))
    assert has_run(result)
    assert result["waited_s"] < 1  # two readings
    assert said == []


@pytest.mark.parametrize(("driver_version", "advice"), [("390.157", "needs driver"), ("999.1", "autotune doctor")])
def test_a_launch_that_cannot_use_the_card_says_what_the_driver_lacks(launch, driver_version, advice):
    result, _ = launch((0, gpus(IDLE, driver=driver_version)))
    assert "cannot use" in result["cause"]
    assert advice in result["advice"]


def test_a_little_more_than_before_is_idle(launch):
    result, said = launch((0, gpus(IDLE + 32 * MIB)))
    assert has_run(result) and result["waited_s"] < 1 and said == []


@pytest.mark.parametrize("utilization", [95, None], ids=["at work", "unknown whether at work"])
def test_somebody_at_work_is_waited_for_and_that_is_said_once(launch, utilization):
    result, said = launch((0, gpus(BUSY, processes="4711", utilization=utilization)), (40, gpus(IDLE)))
    assert has_run(result)
    assert 40 < result["waited_s"] < 45
    (sentence,) = said
    assert sentence.startswith("waiting, because 30000 MiB of the GPU NVIDIA H200 (GPU-a) are in use by process 4711")
    assert "600 MiB were when it was idle" in sentence


@pytest.mark.parametrize(
    ("used", "processes", "utilization", "by", "again"),
    [
        (BUSY, "4711 4712", 0, "by process 4711, 4712; ", 2),
        (IDLE + 300 * MIB, "", 5, "; ", 0),
        (IDLE + 300 * MIB, "", None, "; ", 0),
    ],
    ids=["processes that rest", "a browser, which is not listed", "unknown use"],
)
def test_what_stays_and_rests_becomes_the_idle_level(launch, used, processes, utilization, by, again):
    result, said = launch((0, gpus(used, processes=processes, utilization=utilization)))
    assert has_run(result)
    assert 20 < result["waited_s"] < 25
    _, sentence = said
    assert sentence.startswith(f"{used / MIB:.0f} MiB of the GPU NVIDIA H200 (GPU-a) stay in use")
    assert by in sentence and sentence.endswith("windows in which others compute there are discarded.")
    # Nothing more is said of it. When it has gone, the level from before holds, but a browser always comes and goes.
    result, said = launch((0, gpus(used + 30 * MIB, processes=processes)), name="second")
    assert has_run(result) and result["waited_s"] < 1 and said == []
    launch((0, gpus(IDLE)), name="third")
    result, said = launch((0, gpus(used, processes=processes)), name="fourth")
    assert len(said) == again and 10 * again <= result["waited_s"] < 25 and has_run(result)


def test_memory_that_goes_and_comers_begin_the_count_anew(launch):
    # A card that is being emptied, 2 GiB a second, and then one on which others arrive.
    emptied = [(second, gpus(BUSY - 2048 * second * MIB)) for second in range(14)]
    comers = [(14 + 15 * n, gpus(IDLE + 500 * MIB, processes=f"{4711 + n}")) for n in range(3)]
    result, said = launch(*emptied, *comers)
    assert has_run(result)
    assert 14 + 2 * 15 + 20 <= result["waited_s"] < 14 + 2 * 15 + 25
    assert "stay in use by process 4713" in said[-1]


def test_an_unknown_state_begins_the_count_anew(launch):
    kept = gpus(BUSY, processes="4711")
    result, _ = launch((0, kept), (15, gpus(BUSY, fail={"*": UNKNOWN})), (16, kept))
    assert has_run(result) and 36 <= result["waited_s"] < 41


def test_allow_busy_waits_only_until_the_memory_is_steady(launch):
    at_work = gpus(BUSY, processes="4711", utilization=95)
    result, said = launch((0, at_work), allow_busy=True)
    assert has_run(result) and 20 < result["waited_s"] < 25
    assert said[-1].endswith("stay in use by process 4711; that counts as idle.")


def test_who_is_there_from_the_start_is_named_once(launch):
    there = gpus(BUSY, processes="4711", utilization=3)
    result, said = launch((0, there), afresh=True)
    assert has_run(result) and result["waited_s"] < 1
    (sentence,) = said
    assert "30000 MiB of the GPU NVIDIA H200 (GPU-a) stay in use by process 4711; that counts as idle" in sentence
    _, said = launch((0, there), name="second")
    assert said == []


def test_a_short_delay_is_waited_for_in_silence(launch):
    result, said = launch((0, gpus(BUSY)), (0.5, gpus(IDLE)))
    assert has_run(result) and 0.5 < result["waited_s"] < 1 and said == []


def test_one_good_reading_is_not_enough(launch):
    result, _ = launch((0, gpus(BUSY)), (9.5, gpus(IDLE)), (10.2, gpus(BUSY)), (30, gpus(IDLE)))
    assert has_run(result)
    assert 30 < result["waited_s"] < 35


@pytest.mark.parametrize(
    ("broken", "because"),
    [
        (gpus(IDLE, fail={"*": UNKNOWN}), "the driver does not say whether the GPU is idle"),
        (gpus(IDLE, fail={"nvmlDeviceGetMemoryInfo_v2": UNKNOWN}), "does not tell how much memory"),
        (state(card("GPU-b")), "the driver does not list the GPU GPU-a"),
        (state(), "the driver does not list the GPU GPU-a"),
    ],
    ids=["unknown error", "memory unknown", "card gone", "no cards"],
)
def test_unknown_is_waited_for_and_never_taken_for_idle(launch, broken, because):
    result, said = launch((0, broken), (60, gpus(IDLE)))
    assert has_run(result)
    assert 60 < result["waited_s"] < 65
    (sentence,) = said
    assert because in sentence


def test_unknown_between_two_good_readings_begins_the_count_anew(launch):
    changes = [(0, gpus(BUSY)), (9.5, gpus(IDLE)), (10.2, gpus(IDLE, fail={"*": UNKNOWN})), (20, gpus(IDLE))]
    result, _ = launch(*changes)
    assert has_run(result)
    assert 21 <= result["waited_s"] < 25


def test_cards_are_told_apart_by_uuid_and_not_by_index(launch):
    """CUDA's order, the driver's, and the driver's after a restart all differ."""
    swapped = state(card("GPU-a", memory_used=IDLE), card("GPU-b", memory_used=BUSY))
    result, said = launch((0, swapped))
    assert has_run(result) and result["waited_s"] < 1 and said == []
    swapped_and_busy = state(card("GPU-a", memory_used=BUSY), card("GPU-b", memory_used=IDLE))
    result, said = launch((0, swapped_and_busy), (20, swapped), name="again")
    assert has_run(result) and 20 < result["waited_s"] < 25
    assert "(GPU-a)" in said[0]


def test_a_search_can_be_ended_while_it_waits(launch):
    result, _ = launch((0, gpus(BUSY)), stop_at_s=15.0)
    assert (result["status"], has_run(result)) == ("interrupted", False)
    assert "waited" in result["cause"]
    assert 15 <= result["waited_s"] < 17


def test_patience_ends_with_the_reason_and_the_next_launch_works(launch, driver, workloads, tmp_path):
    given = {"folder": str(tmp_path / "never"), "workload": str(workloads / "faults.py")}
    driver.asked("from autotune.base.errors import MachineError")
    driver.asked(f"""
try:
    waiting.launch({[(0, gpus(BUSY))]!r}, **{given!r})
    ended = None
except MachineError as error:
    ended = [str(error), error.advice, waiting.world.passed_s]
""")
    sentence, advice, passed_s = driver.asked("ended")
    assert "30000 MiB of the GPU NVIDIA H200 (GPU-a) are in use" in sentence and "--device" in advice
    assert 600 <= passed_s < 610
    result, _ = launch((0, gpus(IDLE)), name="after")
    assert has_run(result) and result["waited_s"] < 1


def test_a_launch_on_the_cpu_asks_no_driver(launch, driver):
    driver.state.unlink()
    result, said = launch(device="cpu", name="cpu")
    assert (result["status"], result["waited_s"], said) == ("complete", 0.0, [])
