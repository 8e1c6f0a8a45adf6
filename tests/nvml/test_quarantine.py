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

    run((0, gpus(IDLE)), name="before")
    return run


def gpus(used, *, processes="", **more):
    """Return the state in which GPU-a, the second card, has ``used`` memory in use."""
    return state(card("GPU-b", memory_used=BUSY), card("GPU-a", memory_used=used, processes=processes), **more)


def has_run(result):
    # It cannot train, because the driver is a stand-in.
    return result["exit_code"] is not None


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


def test_memory_that_stays_is_waited_for_and_that_is_said_once(launch):
    result, said = launch((0, gpus(BUSY, processes="4711")), (40, gpus(IDLE)))
    assert has_run(result)
    assert 40 < result["waited_s"] < 45
    (sentence,) = said
    assert sentence.startswith("waiting, because 30000 MiB of the GPU NVIDIA H200 (GPU-a) are in use by process 4711")
    assert "600 MiB were when it was idle" in sentence


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
    driver.asked("from autotune.errors import MachineError")
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
