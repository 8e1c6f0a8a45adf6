"""A real daemon with cards simulated by a stand-in for the driver's library: foreign processes, no answers, memory that
is not released."""

from __future__ import annotations

import os

import pytest

from autotune.base.clock import SystemClock
from autotune.base.records import JobState

from ..daemon.conftest import Daemon, acted_request  # noqa: TID252
from ..process.alive import wait_until  # noqa: TID252
from .conftest import card, split, state

UUID, OTHER = "GPU-11111111-0000-0000-0000-000000000000", "GPU-22222222-0000-0000-0000-000000000000"
STRANGER = 4_000_000
pytestmark = pytest.mark.skipif(
    os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC,
    reason="in a container nobody knows which of a card's processes is which",
)


@pytest.fixture
def cards(nvml_library, tmp_path):
    """A daemon, and a function that sets what the driver reports to it."""
    daemon = Daemon(tmp_path / "state", ("--quiet-for", "0s", "--idle-cores", "1000"))
    told = tmp_path / "nvml.txt"
    daemon.env = {"LD_LIBRARY_PATH": str(nvml_library), "NVML_STUB_STATE": str(told)}

    def say(*some, **more):
        told.with_suffix(".new").write_text(state(*some, **more))
        told.with_suffix(".new").rename(told)

    say(card(UUID), card(OTHER, name="NVIDIA A100"))
    daemon.start()
    yield daemon, say
    daemon.stop()


def on_a_card(folder, name, behaviour, **changes):
    request = acted_request(folder, name, behaviour, gpu="any", **changes)
    return request.model_copy(update={"spec": request.spec.model_copy(update={"device": "auto"})})


def device(daemon, name):
    return next((d for d in daemon.client.status()["devices"] if d["name"] == name), None)


def visible_to(daemon):
    """The devices that the running jobs see, sorted."""
    seen = []
    for pid in daemon.leaders():
        with open(f"/proc/{pid}/environ") as stream:
            seen += [v for v in stream.read().split("\0") if v.startswith("CUDA_VISIBLE_DEVICES=")]
    return sorted(v.partition("=")[2] for v in seen)


def look_again(daemon, times=3):
    """Wait until the daemon has read its devices ``times`` more times."""

    def looks():
        lines = daemon.client.metrics().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("autotune_device_readings_total "))

    before = looks()
    wait_until(lambda: looks() >= before + times)


@pytest.mark.slow
def test_a_job_makes_way_for_a_neighbour_and_goes_on_when_he_is_gone(cards, tmp_path):
    daemon, say = cards
    (job,) = daemon.client.submit(on_a_card(tmp_path, "mine", "waits_the_first_time"))
    wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
    running = daemon.client.job(job.id).status
    assert running.device == UUID
    pid = running.child.pid
    # The job's own process on the card is no reason to pause.
    say(card(UUID, processes=pid, memory_used=9_000_000_000, utilization=97), card(OTHER))
    wait_until(lambda: device(daemon, UUID)["state"] == "running")
    look_again(daemon)
    assert daemon.client.job(job.id).state is JobState.RUNNING
    clock = SystemClock()
    came = clock.now()
    say(card(UUID, processes=f"{pid} {STRANGER}", memory_used=9_000_000_000, utilization=97), card(OTHER))
    wait_until(lambda: daemon.client.job(job.id).state is JobState.QUEUED)
    assert not daemon.leaders() and clock.now() - came < 10
    assert str(STRANGER) in daemon.client.job(job.id).status.why
    # While the foreign process is there, no job starts on this card; the other card is unaffected.
    say(card(UUID, processes=STRANGER, memory_used=9_000_000_000), card(OTHER))
    look_again(daemon)
    assert daemon.client.job(job.id).runs == 1
    say(card(UUID), card(OTHER))
    (ended,) = daemon.until_ended(job.id, deadline_s=30)
    assert (ended.state, ended.runs, ended.placed) == (JobState.DONE, 2, UUID)


@pytest.mark.slow
def test_a_driver_that_does_not_answer_is_waited_for(cards, tmp_path):
    """The daemon opens NVML once, and again after an error."""
    daemon, say = cards
    opened = tmp_path / "nvml.txt.opened"
    wait_until(lambda: device(daemon, UUID) is not None)
    opened.touch()
    look_again(daemon)
    assert opened.stat().st_size == 0
    say(card(UUID), card(OTHER), fail={"*": 999})
    wait_until(lambda: device(daemon, UUID)["state"] == "unknown")
    (job,) = daemon.client.submit(on_a_card(tmp_path, "mine", "well"))
    look_again(daemon)
    assert daemon.client.job(job.id).state is JobState.QUEUED
    say(card(UUID), card(OTHER))
    (ended,) = daemon.until_ended(job.id, deadline_s=30)
    assert ended.state is JobState.DONE
    # The job, which is no real search, asks nothing.
    assert opened.stat().st_size == 1


@pytest.mark.stress
def test_memory_that_stays_after_a_kill_keeps_the_card_from_everybody(cards, tmp_path):
    daemon, say = cards
    first, second = daemon.client.submit(
        on_a_card(tmp_path, "first", "deaf").model_copy(update={"gpu": "h200"}),
        on_a_card(tmp_path, "second", "well").model_copy(update={"gpu": "h200"}),
    )
    wait_until((daemon.files.queue.job(first.id).folder / "ready").exists)
    say(card(UUID, memory_used=9_000_000_000), card(OTHER, name="NVIDIA A100"))
    daemon.client.cancel(first.id)
    wait_until(lambda: daemon.client.job(first.id).state is JobState.CANCELLED)
    wait_until(lambda: device(daemon, UUID)["state"] == "quarantined")
    assert "no process is there" in device(daemon, UUID)["why"]
    look_again(daemon)
    assert daemon.client.job(second.id).state is JobState.QUEUED
    assert 'autotune_device_quarantined{device="' + UUID in daemon.client.metrics()
    say(card(UUID), card(OTHER, name="NVIDIA A100"))
    (ended,) = daemon.until_ended(second.id, deadline_s=30)
    assert ended.state is JobState.DONE


@pytest.mark.slow
def test_two_cards_two_jobs_each_sees_its_own(cards, tmp_path):
    daemon, _ = cards
    jobs = daemon.client.submit(*(on_a_card(tmp_path, f"job-{n}", "waits_the_first_time") for n in range(3)))
    for job in jobs[:2]:
        wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
    assert visible_to(daemon) == [UUID, OTHER]
    assert daemon.client.job(jobs[2].id).state is JobState.QUEUED


@pytest.mark.slow
def test_jobs_go_to_the_instances_of_a_split_card(cards, tmp_path):
    daemon, say = cards
    say(split(UUID, "MIG-b", "MIG-c"))
    wait_until(lambda: device(daemon, "MIG-c") is not None and device(daemon, UUID) is None)
    named = on_a_card(tmp_path, "named", "waits_the_first_time")
    named = named.model_copy(update={"spec": named.spec.model_copy(update={"device": "cuda:MIG-c"})})
    absent = on_a_card(tmp_path, "absent", "well")
    absent = absent.model_copy(update={"spec": absent.spec.model_copy(update={"device": "cuda:MIG-dead"})})
    first, second = daemon.client.submit(named, absent)
    (third,) = daemon.client.submit(on_a_card(tmp_path, "any", "waits_the_first_time"))
    for job in (first, third):
        wait_until((daemon.files.queue.job(job.id).folder / "ready").exists)
    assert [daemon.client.job(job.id).status.device for job in (first, third)] == ["MIG-c", "MIG-b"]
    assert visible_to(daemon) == ["MIG-b", "MIG-c"]
    assert "there is no MIG-dead" in daemon.client.waits_for(second.id)
