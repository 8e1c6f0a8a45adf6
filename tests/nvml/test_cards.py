"""Reading cards through the real nvidia-ml-py, with all kinds of answers from the driver."""

import pytest

from autotune.machine.gpu import has_nvidia_driver

from .conftest import Driver, card, compiled, split

UNKNOWN, LOST, NO_PERMISSION = 999, 15, 4
EVERY_CALL = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCudaComputeCapability",
)


@pytest.mark.slow
def test_a_card_as_the_driver_tells(driver):
    driver.says(card("GPU-a", processes="4711 4712", utilization=42, reasons=4, mig=1))
    (found,) = driver.asked("gpu.gpus()")
    assert found == {
        "is": "Gpu",
        "index": 0,
        "uuid": "GPU-a",
        "name": "NVIDIA H200",
        "driver_version": "580.95.05",
        "mig": True,
        "memory_bytes": 150_000_000_000,
        "memory_used_bytes": 600_000_000,
        "utilization_percent": 42,
        "power_limit_w": 700.0,
        "processes": [4711, 4712],
        "clocks_event_reasons": 4,
        "temperature_c": 34,
        "compute_capability": [9, 0],
        "instances": [],
        "profile": None,
        "old_uuid": None,
    }


def test_each_card_tells_for_itself(driver):
    """An idle card and a card whose processes are unknown are reported differently."""
    driver.says(card("GPU-a", mig=1), {"uuid": "GPU-b", "name": "NVIDIA GB10", "mig": 0})
    first, second = driver.asked("gpu.gpus()")
    assert (first["index"], first["mig"], first["processes"], first["power_limit_w"]) == (0, True, [], 700.0)
    assert (second["index"], second["mig"], second["processes"], second["power_limit_w"]) == (1, False, None, None)


def test_the_server_of_mps_is_nobody(driver):
    driver.says(
        card("GPU-a", processes="4711 4712"), process={4711: "/usr/bin/nvidia-cuda-mps-server -d", 4712: "python"}
    )
    (found,) = driver.asked("gpu.gpus()")
    assert found["processes"] == [4712]


def test_a_process_may_have_any_name(driver):
    driver.says(card("GPU-a", processes="4711"))
    driver.state.write_bytes(driver.state.read_bytes() + b"process.4711 /home/J\xf6rg/a.out\n")
    (found,) = driver.asked("gpu.gpus()")
    assert found["processes"] == [4711]


def test_the_drivers_own_memory_does_not_count_as_used(driver):
    driver.says(card("GPU-a", memory_reserved=900_000_000))
    (found,) = driver.asked("gpu.gpus()")
    assert (found["memory_bytes"], found["memory_used_bytes"]) == (150_000_000_000, 600_000_000)


@pytest.mark.parametrize("code", [2, 3, 13, 25])
def test_a_driver_that_does_not_know_the_second_version_tells_the_first(driver, code):
    driver.says(card("GPU-a", memory_reserved=900_000_000), fail={"nvmlDeviceGetMemoryInfo_v2": code})
    (found,) = driver.asked("gpu.gpus()")
    assert found["memory_used_bytes"] == 1_500_000_000


def test_memory_that_the_driver_does_not_tell_now_is_unknown(driver):
    driver.says(card("GPU-a"), fail={"nvmlDeviceGetMemoryInfo_v2": UNKNOWN})
    assert driver.asked("gpu.gpus()")[0]["memory_used_bytes"] is None


def test_a_split_card_tells_its_instances(driver):
    """NVML leaves numbers out where instances came and went, and tells power and clocks of the whole card only."""
    nameless = {"uuid": "MIG-c", "name": "A card", "slices": 3, "memory_total": 60 * 2**30, "processes": "4711"}
    hidden = {"uuid": "MIG-d", "fail.nvmlDeviceGetMigDeviceHandleByIndex": NO_PERMISSION}
    driver.says(split("GPU-a", "MIG-b", {"uuid": None}, nameless, hidden, reasons=0x40), card("GPU-e"))
    whole, other = driver.asked("gpu.gpus()")
    first, second = whole["instances"]
    assert (whole["mig"], other["mig"], other["instances"]) == (True, False, [])
    assert first == {
        "is": "Gpu",
        "index": 0,
        "uuid": "MIG-b",
        "name": "NVIDIA H200 MIG 1g.18gb",
        "driver_version": "580.95.05",
        "mig": False,
        "memory_bytes": 17_000_000_000,
        "memory_used_bytes": 60_000_000,
        "utilization_percent": None,
        "power_limit_w": 700.0,
        "processes": [],
        "clocks_event_reasons": 0x40,
        "temperature_c": 34,
        "compute_capability": [9, 0],
        "instances": [],
        "profile": "1g.18gb",
        "old_uuid": "MIG-GPU-a/7/0",
    }
    assert (second["index"], second["uuid"], second["profile"]) == (2, "MIG-c", "3g of 61440 MiB")
    assert (second["old_uuid"], second["processes"]) == ("MIG-GPU-a/9/0", [4711])


def test_a_reading_of_a_card(driver):
    told = {"processes": "4711", "samples": "9:4711:97", "reasons": 0x40, "sm_clock": 345, "energy": 5_000_250}
    driver.says(card("GPU-a"), card("GPU-b", **told))
    assert driver.asked("gpu.CardWatch('GPU-b').read()") == {
        "is": "CardReading",
        "processes": [4711],
        "sm_percent": {"4711": 97},
        "sm_clock_mhz": 345,
        "memory_clock_mhz": 3201,
        "temperature_c": 34,
        "power_w": 121.5,
        "clocks_event_reasons": 0x40,
        "energy_j": 5000.25,
    }
    assert driver.asked("gpu.CardWatch('GPU-b').sm_clock_mhz()") == 345


def test_clocks_of_an_instance_are_those_of_its_card(driver):
    """Its processes are its own. Watts and joules are not known, because other instances use some of the card's."""
    driver.says(card("GPU-a"), split("GPU-b", "MIG-c", {"uuid": "MIG-d", "processes": "4711"}, processes="1 2 4711"))
    found = driver.asked("gpu.CardWatch('MIG-d').read()")
    assert (found["processes"], found["power_w"], found["energy_j"]) == ([4711], None, None)
    assert (found["sm_clock_mhz"], found["temperature_c"], found["clocks_event_reasons"]) == (1980, 34, 1)


def test_a_search_for_energy_needs_a_counter_of_each_card(driver):
    refused = """
from autotune.base.errors import UsageError
try:
    said = devices.require_energy_counters(cards)
except UsageError as error:
    said = str(error)
"""

    def said(*cards):
        driver.asked(f"cards = {list(cards)}")
        driver.asked(refused)
        return driver.asked("said")

    driver.says(card("GPU-a"), card("GPU-b", energy=None), split("GPU-c", "MIG-d"))
    assert said("GPU-a") is None
    assert said("GPU-a", "GPU-b") == ("--objective energy is not possible here: the driver tells no energy of GPU-b")
    assert said("MIG-d") == (
        "--objective energy is not possible here: MIG-d is a MIG instance, and its card's counter tells what all "
        "instances use"
    )


def test_the_stub_has_every_call_that_the_product_makes(driver):
    """Otherwise a missing call would make values "unknown" in these tests for the wrong reason."""
    driver.says(split("GPU-a", {"uuid": "MIG-b", "name": "nameless"}))
    driver.asked("""
missed = []
original = gpu.pynvml._nvmlGetFunctionPointer
def pointer(name):
    try:
        return original(name)
    except gpu.pynvml.NVMLError:
        missed.append(name)
        raise
gpu.pynvml._nvmlGetFunctionPointer = pointer
gpu.gpus()
for uuid in ("GPU-a", "MIG-b"):
    watch = gpu.CardWatch(uuid); watch.read(); watch.close()
gpu.pynvml._nvmlGetFunctionPointer = original
""")
    assert driver.asked("missed") == []


@pytest.mark.parametrize("told", ["nothing", "errors"])
def test_what_a_card_does_not_tell_is_unknown_and_never_zero(driver, told):
    if told == "nothing":
        driver.says({"uuid": "GPU-a", "name": "NVIDIA GB10"})
    else:
        driver.says(card("GPU-a", mig=None, fail=dict.fromkeys(EVERY_CALL, UNKNOWN)))
    (found,) = driver.asked("gpu.gpus()")
    known = {"is", "index", "uuid", "name", "driver_version", "mig", "instances"}
    assert {name for name, value in found.items() if value is not None} == known
    assert found["mig"] is False


def test_cards_of_others_are_left_out(driver):
    refused = card("GPU-a", fail={"nvmlDeviceGetHandleByIndex_v2": NO_PERMISSION})
    driver.says(refused, card("GPU-b"))
    assert [(found["index"], found["uuid"]) for found in driver.asked("gpu.gpus()")] == [(1, "GPU-b")]
    # As CUDA does, which counts only those that it may use.
    assert [found["uuid"] for found in driver.asked("gpu.visible(gpu.gpus(), '0')")] == ["GPU-b"]
    assert driver.asked("gpu.visible(gpu.gpus(), '1')") == []
    driver.says(refused)
    assert driver.asked("gpu.gpus()")["driver_present"] is True


def test_a_driver_without_cards_is_an_answer(driver):
    driver.says()
    assert driver.asked("gpu.gpus()") == []


@pytest.mark.parametrize(
    ("call", "code", "sentence"),
    [
        ("nvmlInitWithFlags", UNKNOWN, "Unknown Error"),
        ("nvmlSystemGetDriverVersion", UNKNOWN, "Unknown Error"),
        ("nvmlDeviceGetCount_v2", UNKNOWN, "Unknown Error"),
        ("nvmlDeviceGetHandleByIndex_v2", LOST, "GPU is lost"),
        ("nvmlDeviceGetUUID", UNKNOWN, "Unknown Error"),
        ("nvmlDeviceGetMigMode", UNKNOWN, "Unknown Error"),
        ("*", UNKNOWN, "Unknown Error"),
    ],
)
def test_a_driver_that_fails_for_a_while_is_never_no_driver(driver, call, code, sentence):
    driver.says(card("GPU-a"), fail={call: code})
    found = driver.asked("gpu.gpus()")
    assert (found["is"], found["driver_present"]) == ("NvmlUnavailable", True)
    assert f"NVML fails with: {sentence}" in found["reason"]
    driver.says(card("GPU-a"))
    assert [found["uuid"] for found in driver.asked("gpu.gpus()")] == ["GPU-a"]


def test_a_lost_card_beside_a_good_one_is_not_left_out(driver):
    driver.says(card("GPU-a"), card("GPU-b", fail={"nvmlDeviceGetHandleByIndex_v2": LOST}))
    found = driver.asked("gpu.gpus()")
    assert (found["is"], found["driver_present"]) == ("NvmlUnavailable", True)
    assert "GPU is lost" in found["reason"]


@pytest.mark.slow
def test_an_older_library_lacks_calls(tmp_path):
    """Values behind missing symbols are unknown, unless an older call provides them."""
    absent = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperature", "nvmlDeviceGetMigMode")
    driver = Driver(compiled(tmp_path, *(f"-D{name}=without_{name}" for name in absent)), tmp_path / "nvml.txt")
    try:
        driver.says(card("GPU-a", reasons=0x40, mig=1))
        (found,) = driver.asked("gpu.gpus()")
        assert (found["clocks_event_reasons"], found["temperature_c"], found["mig"]) == (0x40, None, False)
        assert (found["uuid"], found["utilization_percent"]) == ("GPU-a", 0)
    finally:
        driver.close()


def test_a_library_without_its_driver(driver):
    found = driver.asked("gpu.gpus()")
    assert (found["is"], found["driver_present"]) == ("NvmlUnavailable", has_nvidia_driver())


@pytest.mark.slow
def test_no_library_at_all(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").touch()  # found before any other, and not one
    driver = Driver(tmp_path, tmp_path / "nvml.txt")
    try:
        found = driver.asked("gpu.gpus()")
        assert (found["is"], found["driver_present"]) == ("NvmlUnavailable", has_nvidia_driver())
        assert "driver" in found["reason"]
        nothing = driver.asked("gpu.CardWatch('GPU-a').read()")
        assert {value for name, value in nothing.items() if name != "is"} == {None}
    finally:
        driver.close()


def test_one_answer_of_a_watched_card_that_fails_is_unknown_alone(driver):
    failing = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses_v3")
    driver.says(card("GPU-a", processes="4711", samples="", fail=dict.fromkeys(failing, UNKNOWN)))
    found = driver.asked("gpu.CardWatch('GPU-a').read()")
    assert {name for name, value in found.items() if value is None} == {"power_w", "processes"}


def test_a_watch_that_was_closed_finds_its_card_in_a_new_place(driver):
    """A handle is valid only as long as the driver runs."""
    driver.says(card("GPU-a"), card("GPU-b", temperature=61))
    driver.asked("watch = gpu.CardWatch('GPU-b'); watch.read()")
    driver.says(card("GPU-b", temperature=62), card("GPU-a"))
    driver.asked("watch.close()")
    assert driver.asked("watch.read()")["temperature_c"] == 62
    driver.asked("watch.close()")


def test_a_watched_card_that_does_not_answer_is_asked_again(driver):
    driver.asked("watch = gpu.CardWatch('GPU-b')")
    for state in ("no driver", "no init", "not this card"):
        if state == "no init":
            driver.says(card("GPU-b"), fail={"nvmlInitWithFlags": UNKNOWN})
        elif state == "not this card":
            driver.says(card("GPU-a"))
        reading = driver.asked("watch.read()")
        assert {value for name, value in reading.items() if name != "is"} == {None}, state
    driver.says(card("GPU-a"), card("GPU-b", sm_clock=1234))
    assert driver.asked("watch.read()")["sm_clock_mhz"] == 1234
    driver.says(card("GPU-a"), card("GPU-b"), fail={"*": UNKNOWN})
    assert driver.asked("watch.read()")["sm_clock_mhz"] is None
    driver.says(card("GPU-a"), card("GPU-b", sm_clock=555))
    assert driver.asked("watch.read()")["sm_clock_mhz"] == 555
    driver.asked("watch.close()")
