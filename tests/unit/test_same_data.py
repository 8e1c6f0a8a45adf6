"""What a loader delivers is compared with what it delivers under other settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "made_up_sets.py"


def cases(first: int, count: int, *more: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(first), str(count), *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == count
    return found


@pytest.mark.parametrize("count", [46, pytest.param(500, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])])
def test_what_passes_is_the_same_data(count: int) -> None:
    found = cases(0, count)
    assert [case for case in found if case["passed"] and not case["safe"]] == []
    # It is no refusal of everything.
    assert any(case["passed"] for case in found)


@pytest.mark.parametrize("count", [14, pytest.param(100, marks=[pytest.mark.stress, pytest.mark.timeout(600)])])
def test_data_sets_without_state_are_not_refused(count: int) -> None:
    assert [case for case in cases(1000, count, "plain") if not case["passed"]] == []
