"""Processes that escape from their launch, and files left in /dev/shm: removed before the next launch."""

import pytest

from autotune.base.records import Phase, PhaseLimits, TrialStatus
from autotune.launcher import watch

from .conftest import ENDLESS, noted


@pytest.mark.parametrize(
    "name", ["double_fork", "without_an_environment", "spawn_a_python", "keep_forking", "keep_forking_fast"]
)
def test_processes_that_escape_from_a_success(ended, name):
    end = ended(f"leftovers.{name}", "build")
    assert end.result.status is TrialStatus.COMPLETE, end.result.cause
    assert not end.result.unclean_exit
    assert noted(end, "left-behind") or (end.files.folder / "held").exists()
    assert end.seconds < 15


def test_a_process_that_its_launch_waits_for_at_exit(ended, monkeypatch):
    monkeypatch.setattr(watch, "EXIT_S", 0.5)
    end = ended("leftovers.a_child_to_wait_for", "build")
    assert (end.result.status, end.result.unclean_exit) == (TrialStatus.COMPLETE, True), end.result.cause
    assert noted(end, "left-behind")
    assert end.seconds < 15


@pytest.mark.parametrize("name", ["double_fork", "keep_forking"])
def test_processes_that_escape_from_a_worker(ended, name):
    """Forked by a worker, so it is no descendant of the launch any more when that ends."""
    end = ended(f"leftovers.{name}", "worker", config={"num_workers": 1})
    assert end.result.status is TrialStatus.COMPLETE, end.result.cause
    assert noted(end, "left-behind")


def test_processes_that_escape_from_a_crash(ended):
    end = ended("leftovers.double_fork_and_crash", 2)
    assert end.seen == (TrialStatus.CRASHED, Phase.WARMUP)
    assert end.result.cause == "died by SIGABRT"
    assert noted(end, "left-behind")


def test_processes_that_escape_from_a_timeout(ended):
    end = ended("leftovers.double_fork_and_wait", 1, limits=PhaseLimits(compile_s=0.4))
    assert end.seen == (TrialStatus.TIMEOUT, Phase.COMPILE)
    assert noted(end, "left-behind")


def test_shared_memory_of_a_killed_leader(ended):
    end = ended("leftovers.shared_memory_and_kill", 2)
    assert end.seen == (TrialStatus.KILLED, Phase.WARMUP)
    assert noted(end, "shared-memory")


@pytest.mark.slow
def test_tensors_shared_as_files_by_a_killed_leader(ended):
    end = ended("leftovers.tensors_as_files_and_kill", 2)
    assert end.seen == (TrialStatus.KILLED, Phase.WARMUP)
    assert noted(end, "left-behind")


@pytest.mark.slow
def test_tensors_on_their_way_from_workers_to_a_killed_leader(ended):
    end = ended("leftovers.workers_share_tensors_as_files", "load", config={"num_workers": 2}, plan=ENDLESS)
    assert end.seen == (TrialStatus.KILLED, Phase.MEASURE)
    assert len(set(noted(end, "left-behind"))) == 3
