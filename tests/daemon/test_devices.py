"""Which of a card's processes belong to a job, as far as a daemon can tell."""

import pytest

from autotune.daemon.devices import RealDevices, Settings
from autotune.machine.gpu import Gpu

IDLE = Gpu(
    0,
    "GPU-a",
    "NVIDIA H200",
    "580.95.05",
    mig=False,
    memory_bytes=150_000_000_000,
    memory_used_bytes=600_000_000,
    utilization_percent=0,
)


@pytest.mark.parametrize(
    ("host_pids", "present", "foreign"),
    [
        # The job is process 17 of the container, and the driver lists it under any number, or not at all.
        (False, {90_001}, set()),
        (False, set(), set()),
        (False, {17, 18}, {17, 18}),
        (True, {17}, set()),
        (True, {17, 18}, {18}),
        (True, {18}, {18}),
    ],
)
def test_others_on_the_card_of_a_job(monkeypatch, host_pids, present, foreign):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card = Gpu(**{**vars(IDLE), "processes": tuple(present)})
    devices = RealDevices(Settings(), cards=lambda: [card], host_pids=host_pids)
    reading = next(found for found in devices.read() if found.name == card.uuid)
    assert reading.processes == present
    assert devices.foreign(reading, frozenset({17})) == foreign
