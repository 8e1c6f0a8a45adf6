"""What the command for a card asks of the driver's library, on the stand-in, which has only a part of its functions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import card


@pytest.mark.slow
def test_every_answer_or_the_error_in_its_place(driver):
    driver.says(card("GPU-a", processes="4711 4712", reasons=4))
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.card.ask", "nvml", "GPU-a"],
        env=driver.env,
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["memory_v1"] == {"total": 150_000_000_000, "free": 149_400_000_000, "used": 600_000_000}
    assert told["compute_processes"] == {"count": 2, "own_is_listed": False}
    assert (told["driver"], told["event_reasons"], told["sm_clock_mhz"]) == ("580.95.05", "0x4", 1980)
    assert "NVMLError" in told["persistence_mode"]
