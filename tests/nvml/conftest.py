"""A stand-in for the driver's library (NVML), compiled here and loaded by the real nvidia-ml-py in a child process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EVALUATE = HERE / "evaluate.py"
#: The default state of a card in these tests: idle, with no process on it.
IDLE = {
    "name": "NVIDIA H200",
    "memory_total": 150_000_000_000,
    "memory_used": 600_000_000,
    "utilization": 0,
    "processes": "",
    "reasons": 1,
    "sm_clock": 1980,
    "memory_clock": 3201,
    "temperature": 34,
    "capability": "9 0",
    "power": 121_500,
    "power_limit": 700_000,
    "energy": 5_000_000,
    "mig": 0,
}
#: The default state of a MIG instance. NVML tells nothing else of one.
INSTANCE = {
    "name": "NVIDIA H200 MIG 1g.18gb",
    "memory_total": 17_000_000_000,
    "memory_used": 60_000_000,
    "processes": "",
    "slices": 1,
}


def card(uuid, **told):
    """Return the state of a card; ``None`` removes an answer."""
    return {k: v for k, v in {"uuid": uuid, **IDLE, **told}.items() if v is not None}


def split(uuid, *instances, **told):
    """Return the state of a card with these MIG instances, each a UUID or the changes of its state."""
    found = card(uuid, mig=1, utilization=None, **told)
    for index, changes in enumerate(instances):
        new = {"uuid": changes} if isinstance(changes, str) else changes
        found |= {f"mig.{index}.{key}": value for key, value in (INSTANCE | new).items() if value is not None}
    return found


def state(*cards, **more) -> str:
    """Return the contents of the stub's state file for these cards; see `Driver.says`."""
    lines = {"driver": "580.95.05", "cards": len(cards), **_flat(more)}
    for index, told in enumerate(cards):
        lines |= {f"{index}.{key}": value for key, value in _flat(told).items()}
    return "".join(f"{key} {value}\n" for key, value in lines.items())


def _flat(told):
    whole = {k: v for k, v in told.items() if not isinstance(v, dict)}
    return whole | {f"{key}.{name}": v for key, of in told.items() if isinstance(of, dict) for name, v in of.items()}


class Driver:
    """The stub with its state file, and a process that queries it through autotune's own functions.

    Args:
        library: the folder with ``libnvidia-ml.so.1``.
        state: path of the state file. Until the first `says` there is no driver.
    """

    def __init__(self, library: Path, state: Path) -> None:
        self.state = state
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB_STATE": str(state)}
        self._process = subprocess.Popen(
            [sys.executable, str(EVALUATE)], env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self, *cards, **more) -> None:
        """Set the cards that the driver reports. ``fail={"nvmlDeviceGetCount_v2": 999}`` makes calls fail; `fail` in a
        card does so for that card. ``process={4711: "python"}`` names processes."""
        new = self.state.with_suffix(".new")
        new.write_text(state(*cards, **more))
        os.replace(new, self.state)

    def asked(self, code):
        """Evaluate an expression in the other process and return its value; ``None`` for a statement."""
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


def compiled(folder: Path, *options: str) -> Path:
    """Compile the stub into a folder and return the folder."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for the driver's library")
    library = folder / "libnvidia-ml.so.1"
    flags = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}", *options)
    subprocess.run([compiler, *flags, "-o", library, HERE / "stub.c"], check=True)
    return folder


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory) -> Path:
    """A folder with the compiled stub in it."""
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def asking(nvml_library, tmp_path_factory) -> Driver:
    """One process for all tests of a file, because it takes half a second to start."""
    driver = Driver(nvml_library, tmp_path_factory.mktemp("state") / "nvml.txt")
    yield driver
    driver.close()


@pytest.fixture
def driver(asking) -> Driver:
    """No driver is loaded until the test says so."""
    asking.state.unlink(missing_ok=True)
    return asking
