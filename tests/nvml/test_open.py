"""How long the driver's library stays open."""

import pytest

from .conftest import card

UNKNOWN = 999


def test_nvml_is_let_go_of_after_every_question(driver):
    """Otherwise a restarted driver would be queried through dead handles."""
    holders = driver.asked("gpu.pynvml._nvmlLib_refcount")
    for fail in ({}, {"nvmlDeviceGetMigMode": UNKNOWN}):
        driver.says(card("GPU-a"), fail=fail)
        driver.asked("gpu.gpus()")
        assert driver.asked("gpu.pynvml._nvmlLib_refcount") == holders
    driver.asked("watch = gpu.CardWatch('GPU-a'); watch.read(); watch.close(); watch.close()")
    assert driver.asked("gpu.pynvml._nvmlLib_refcount") == holders


@pytest.fixture
def kept(driver):
    """The driver's process while it wants NVML to be kept open; yields a function that returns how often it is open."""
    driver.says(card("GPU-a"))
    driver.asked("""
before = gpu.pynvml._nvmlLib_refcount
users = lambda: gpu.pynvml._nvmlLib_refcount - before
block = gpu.kept_open(); block.__enter__()
""")
    yield lambda: driver.asked("users()")
    driver.asked("block.__exit__(None, None, None)")
    assert driver.asked("users()") == 0


def test_nvml_stays_open_between_the_queries_of_a_search(driver, kept):
    assert kept() == 0, "not before the first query"
    for _ in range(2):
        driver.asked("gpu.gpus()")
        assert kept() == 1
    driver.asked("with gpu.kept_open(): gpu.gpus()")
    assert kept() == 1, "until the last one that wants it has ended"


@pytest.mark.parametrize("call", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetUUID", "*"])
def test_an_error_closes_nvml_and_the_next_query_opens_it_anew(driver, kept, call):
    driver.asked("gpu.gpus()")
    driver.says(card("GPU-a"), fail={call: UNKNOWN})
    assert driver.asked("gpu.gpus()")["is"] == "NvmlUnavailable"
    assert kept() == 0
    driver.says(card("GPU-b"))
    assert [found["uuid"] for found in driver.asked("gpu.gpus()")] == ["GPU-b"]
    assert kept() == 1


def test_a_search_keeps_nvml_open(driver, tmp_path):
    driver.says(card("GPU-a"))
    driver.asked(f"""
from pathlib import Path
from autotune.base.layout import StudyFiles
from autotune.base.records import StudySpec, WorkloadRef
from autotune.search.setup import Environment, run_of
before = gpu.pynvml._nvmlLib_refcount
env = Environment.real()
spec = StudySpec(name="mine", mark="m", created="c", model="resnet18")
told = []
with run_of(StudyFiles(Path({str(tmp_path)!r})), spec, WorkloadRef(name="resnet18", module="resnet18"), env) as run:
    told.append((run.target.gpu.uuid, gpu.pynvml._nvmlLib_refcount - before))
told.append(gpu.pynvml._nvmlLib_refcount - before)
""")
    assert driver.asked("told") == [["GPU-a", 1], 0]


def test_without_a_driver_nothing_is_kept_open(driver, kept):
    driver.state.unlink()
    driver.asked("gpu.gpus()")
    assert kept() == 0


def test_no_connection_to_the_driver_crosses_a_fork(driver, kept):
    """A process that is forked, and the one that forks it, both connect anew."""
    driver.asked("gpu.gpus()")
    assert kept() == 1
    driver.asked("""
import os
reader, writer = os.pipe()
child = os.fork()
if not child:
    inherited = users()
    found = gpu.gpus()
    os.write(writer, f"{inherited} {found[0].uuid} {users()}".encode())
    os._exit(0)
os.waitpid(child, 0)
told = os.read(reader, 100).decode()
os.close(reader); os.close(writer)
""")
    assert driver.asked("told") == "0 GPU-a 1"
    assert kept() == 0
    driver.asked("gpu.gpus()")
    assert kept() == 1
