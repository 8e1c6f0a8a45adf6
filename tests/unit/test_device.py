"""Cards, from a compiled stand-in for the driver's library; the fingerprint; what doctor says of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.doctor import State, diagnose, doctor
from autotune.device import Gpu, fingerprint, has_nvidia_device
from autotune.records import DataRef, Host, Probe

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


NVML = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
static int is(const char *mode) { const char *set = getenv("NVML_MODE"); return set && !strcmp(set, mode); }
int nvmlInitWithFlags(unsigned flags) { return is("unknown") ? 999 : is("unloaded") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "stub error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "580.1"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = is("none") ? 0 : 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (is("foreign") && index == 0) return 4;
    if (is("lost") && index == 1) return 15;
    *handle = (void *)(unsigned long)(index + 1);
    return 0;
}
int nvmlDeviceGetUUID(void *card, char *text, unsigned size) {
    strcpy(text, card == (void *)1 ? "GPU-a" : "GPU-b");
    return 0;
}
int nvmlDeviceGetName(void *card, char *text, unsigned size) { strcpy(text, "Stub [H200]"); return 0; }
int nvmlDeviceGetMemoryInfo(void *card, memory_t *memory) {
    if (card == (void *)2) return 3;
    memory->total = 1000; memory->used = 10; memory->free = 990;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *card, utilization_t *rates) { rates->gpu = 42; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *card, unsigned *mw) { *mw = 450500; return 0; }
int nvmlDeviceGetMigMode(void *card, unsigned *now, unsigned *next) {
    *now = card == (void *)1;
    return is("mig?") ? 999 : 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, void *list) {
    return card == (void *)1 ? 0 : 999;
}
int nvmlDeviceGetTemperature(void *card, int sensor, unsigned *celsius) { *celsius = 50; return 0; }
"""
ASKS = """
import dataclasses, json
from autotune.device import gpus
found = gpus()
plain = dataclasses.asdict
print(json.dumps([plain(card) for card in found] if isinstance(found, list) else plain(found)))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``libnvidia-ml.so.1`` that answers as its environment variable ``NVML_MODE`` says."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to compile the stand-in for the driver's library")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nvml.c").write_text(NVML)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    return folder


def ask(driver: Path, mode: str) -> object:
    """What `gpus` says in a fresh interpreter, as plain data."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "NVML_MODE": mode}
    done = subprocess.run([sys.executable, "-c", ASKS], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_cards_as_the_driver_tells(driver: Path) -> None:
    answer = ask(driver, "ok")
    assert isinstance(answer, list)
    first, second = (Gpu(**card) for card in answer)
    assert (first.index, first.uuid, first.name, first.driver_version) == (0, "GPU-a", "Stub [H200]", "580.1")
    assert (first.memory_bytes, first.memory_used_bytes, first.utilization_percent) == (1000, 10, 42)
    assert (first.power_limit_w, first.temperature_c, first.mig, list(first.processes or ())) == (450.5, 50, True, [])
    assert first.processes is not None
    # What the driver does not tell, or this library does not have, is unknown: neither zero nor "nobody".
    assert (second.memory_bytes, second.processes, second.clocks_event_reasons, second.mig) == (None, None, None, False)


def test_cards_of_others_are_left_out(driver: Path) -> None:
    answer = ask(driver, "foreign")
    assert isinstance(answer, list)
    assert [card["index"] for card in answer] == [1]


def test_a_driver_without_cards_is_an_answer(driver: Path) -> None:
    assert ask(driver, "none") == []


@pytest.mark.parametrize("mode", ["unknown", "lost", "mig?"])
def test_a_driver_that_fails_is_never_no_driver(driver: Path, mode: str) -> None:
    answer = ask(driver, mode)
    assert isinstance(answer, dict)
    assert answer["driver_present"] is True
    assert "NVML fails" in answer["reason"]


def test_a_library_without_its_driver_is_no_driver(driver: Path) -> None:
    answer = ask(driver, "unloaded")
    assert isinstance(answer, dict)
    assert answer["driver_present"] is has_nvidia_device()


def test_device_files_and_the_kernel_tell_of_a_driver(tmp_path: Path) -> None:
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    dev.mkdir()
    write(dev / "nvidiactl", "")
    assert not has_nvidia_device(dev=dev, proc=proc)
    write(dev / "nvidia3", "")
    assert has_nvidia_device(dev=dev, proc=proc)
    (proc / "driver" / "nvidia").mkdir(parents=True)
    assert has_nvidia_device(dev=tmp_path / "nothing", proc=proc)


def probe(**changed: object) -> Probe:
    values: dict[str, object] = {
        "torch_version": "2.15", "torchvision_version": "0.29", "python_version": "3.11", "cuda_version": "13.0",
        "cudnn_version": "9.1", "device": "cuda:0", "device_name": "H200 slice", "device_memory_bytes": 70 * GIB,
        "native_bf16": True, "tf32": True, "cudagraphs": True, "compiler": None, "worker_start_method": "fork",
        "cores": 8, "workload_sha256": "abc", "workload_name": "w", "default_batch_size": 32,
        "default_image_size": None, "cpu_image_size": None, "wants_data": None, "varying_shapes": False,
        "has_images": False, "optimizer_impls": (),
        "own_optimizer_impl": "for-loop", "parameters": 1, "dataset_samples": None, "sample_bytes": None,
    }  # fmt: skip
    return Probe.model_validate({**values, **changed})


HOST = Host(
    cpu_model="C",
    cores=8,
    memory_bytes=64 * GIB - 5,
    available_bytes=1,
    shm_bytes=GIB // 2 + 9,
    shm_free_bytes=0,
    open_files=9,
)
CARD = Gpu(index=0, uuid="GPU-a", name="H200", driver_version="580", mig=True, memory_bytes=GIB, power_limit_w=700.0)
DATA = DataRef(kind="generated", path="/somewhere", identity="id")


def test_fingerprint_names_what_a_measurement_hangs_on() -> None:
    made = fingerprint(probe(), HOST, CARD, DATA)
    assert made.device_uuid == "GPU-a"
    assert made.values == {
        "gpu_model": "H200 slice", "gpu_memory_bytes": 70 * GIB, "power_limit_w": 700.0, "mig": True, "driver": "580",
        "torch": "2.15", "cuda": "13.0", "cudnn": "9.1", "cpu_model": "C", "cores": 8, "memory_gib": 64, "shm_gib": 0.5,
        "worker_start_method": "fork", "workload_sha256": "abc", "data_kind": "generated", "data_identity": "id",
    }  # fmt: skip


def test_a_cpu_fingerprint_ignores_the_card_beside_it() -> None:
    cpu = probe(device="cpu", device_name="C", device_memory_bytes=None)
    assert fingerprint(cpu, HOST, CARD, DATA) == fingerprint(cpu, HOST, None, DATA)
    assert fingerprint(cpu, HOST, CARD, DATA).values["gpu_model"] is None


def test_doctor_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(json_output=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema_version"] == 1
    names = {check["name"] for check in printed["checks"]}
    assert {"cores", "memory", "/dev/shm", "torch", "c++ compiler", "open files", "studies folder"} <= names
    assert any(name.startswith("gpu") for name in names)


def test_doctor_prints_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(json_output=False) == 0
    printed = capsys.readouterr().out
    assert all(check.name in printed for check in diagnose())


def test_doctor_refuses_other_platforms() -> None:
    (only,) = diagnose(system="darwin")
    assert only.state is State.MISSING
    assert only.essential
