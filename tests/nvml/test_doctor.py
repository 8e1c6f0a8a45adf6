"""What doctor says of the driver and its cards."""

import pytest

from .conftest import card, split


@pytest.mark.slow
def test_doctor_lists_each_cards_processes_and_name(driver):
    cards = [
        card("GPU-a"),
        card("GPU-b", processes="4711"),
        card("GPU-c", mig=1),
        {"uuid": "GPU-d", "name": "x", "mig": 0},
    ]
    driver.says(*cards)
    told = driver.asked("[c for c in doctor.diagnose() if c.name.startswith('gpu')]")
    assert [(c["name"], c["state"]) for c in told] == [
        ("gpu 0", "ok"),
        ("gpu 1", "limit"),
        ("gpu 2", "limit"),
        ("gpu 3", "ok"),
    ]
    for check, says in zip(told, ("No process", "1 process(es)", "MIG", "does not tell"), strict=True):
        assert says in check["sentence"]
    assert [c["sentence"].rpartition(" ")[2] for c in told] == [f"cuda:{c['uuid']}" for c in cards]


def test_doctor_lists_the_instances_of_a_card(driver):
    driver.says(split("GPU-a", "MIG-b", {"uuid": "MIG-c", "processes": "4711"}), split("GPU-d"))
    told = driver.asked("[c for c in doctor.diagnose() if c.name.startswith('gpu')]")
    assert [(c["name"], c["state"]) for c in told] == [
        ("gpu 0", "limit"),
        ("gpu 0.0", "ok"),
        ("gpu 0.1", "limit"),
        ("gpu 1", "limit"),
    ]
    assert "1g.18gb" in told[1]["value"] and told[1]["sentence"].endswith("--device cuda:MIG-b")
    assert "no instance" in told[3]["sentence"]


@pytest.mark.parametrize(
    ("version", "library", "capability", "state", "says"),
    [
        ("999.1", None, "9 0", "ok", "runs"),
        ("390.157", None, "9 0", "missing", "needs driver"),
        # A container that brings a newer library than the driver outside.
        ("390.157", 99000, "9 0", "limit", "390.157 is too old, but the CUDA library here is newer"),
        ("999.1", 12020, "9 0", "missing", "older than the driver"),
        ("999.1", None, "3 0", "missing", "GPU 1: CUDA"),
    ],
)
def test_doctor_compares_torchs_cuda_with_driver_and_cards(driver, version, library, capability, state, says):
    more = {} if library is None else {"cuda": library}
    driver.says(card("GPU-a"), card("GPU-b", capability=capability), driver=version, **more)
    (check,) = driver.asked("doctor._cuda(doctor.gpus(), '2.15.0+cu132', '13.2')")
    assert (check["state"], says in check["sentence"]) == (state, True)


def test_of_a_torch_that_others_built_the_cards_are_not_known(driver):
    driver.says(card("GPU-a", capability="6 1"))
    (check,) = driver.asked("doctor._cuda(doctor.gpus(), '2.9.1', '12.9')")
    assert check["state"] == "ok"
