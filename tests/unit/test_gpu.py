"""Detecting a GPU driver, the fingerprint, and the output of doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.base.records import DataRef
from autotune.cli.doctor import State, diagnose, doctor
from autotune.machine.gpu import Gpu, has_nvidia_card, has_nvidia_driver
from autotune.machine.host import fingerprint
from tests.support import make_host, make_probe

GIB = 2**30


def made(root: Path, *files: str) -> Path:
    """Return ``root`` as the root of a file system with these files."""
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text({"vendor": "0x10de\n", "class": "0x030200\n"}.get(path.name, ""))
    return root


@pytest.mark.parametrize(
    ("files", "driver"),
    [
        (("dev/nvidiactl",), False),
        (("dev/nvidia3",), True),
        (("proc/driver/nvidia/version",), True),
        (("dev/dxg",), False),  # WSL2 with a card of another maker
        (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), True),
        (("usr/lib/wsl/lib/libcuda.so.1",), False),
    ],
)
def test_device_files_and_the_kernel_indicate_a_driver(tmp_path: Path, files: tuple[str, ...], driver: bool) -> None:
    assert has_nvidia_driver(made(tmp_path, *files)) is driver


def test_a_card_without_a_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    bus = "sys/bus/pci/devices"
    assert not has_nvidia_card(tmp_path)
    made(tmp_path, f"{bus}/0000:00:01.0/vendor", f"{bus}/0000:00:01.0/class", f"{bus}/0000:00:02.0/vendor")
    (tmp_path / bus / "0000:00:01.0/class").write_text("0x040300\n")  # the sound of a card
    assert not has_nvidia_card(tmp_path)
    (tmp_path / bus / "0000:00:02.0/class").write_text("0x030200\n")
    assert has_nvidia_card(tmp_path)


PROBE = make_probe(
    torch_version="2.15",
    cuda_version="13.0",
    cudnn_version="9.1",
    device="cuda:0",
    device_name="H200 slice",
    device_memory_bytes=70 * GIB,
    cores=8,
    workload_sha256="abc",
)
HOST = make_host(cpu_model="C", cores=8, memory_bytes=64 * GIB - 5, shm_bytes=GIB // 2 + 9)
CARD = Gpu(index=0, uuid="GPU-a", name="H200", driver_version="580", mig=True, memory_bytes=GIB, power_limit_w=700.0)
DATA = DataRef(kind="generated", path="/somewhere", identity="id")


def test_fingerprint_names_what_a_measurement_depends_on() -> None:
    made = fingerprint(PROBE, HOST, CARD, DATA)
    assert made.device_uuid == "GPU-a"
    assert made.values == {
        "gpu_model": "H200 slice", "gpu_memory_bytes": 70 * GIB, "power_limit_w": 700.0, "mig": True, "driver": "580",
        "torch": "2.15", "cuda": "13.0", "cudnn": "9.1", "cpu_model": "C", "cores": 8, "memory_gib": 64, "shm_gib": 0.5,
        "worker_start_method": "fork", "workload_sha256": "abc", "data_kind": "generated", "data_identity": "id",
    }  # fmt: skip


def test_a_fingerprint_names_the_instance_of_a_card() -> None:
    instance = Gpu(0, "MIG-b", "H200 MIG 1g.18gb", "580", mig=False, profile="1g.18gb")
    found = fingerprint(PROBE.model_copy(update={"device_uuid": "GPU-torch"}), HOST, instance, DATA)
    assert (found.values["mig"], found.device_uuid) == ("1g.18gb", "MIG-b")


def test_a_cpu_fingerprint_ignores_an_installed_card() -> None:
    cpu = PROBE.model_copy(update={"device": "cpu", "device_name": "C", "device_memory_bytes": None})
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
