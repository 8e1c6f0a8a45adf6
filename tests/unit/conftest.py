"""Studies in virtual time are kept in memory: they sync their files thousands of times, and outlive no machine.

Examples of properties are the same in every run, and none has a deadline: a failure says nothing of luck or load.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from autotune.workload.catalog import find_objective
from autotune.workload.scoring import Scorer

settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

MEMORY = Path("/dev/shm")
#: What a module of such tests has in it.
STUDIES = {"History", "NoisyWorld", "World"}


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    """Scores by the rate."""
    made = Scorer(find_objective("throughput"))
    yield made
    made.close()


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder in memory for tests of studies, if there is room."""
    room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2**30
    if not room or STUDIES.isdisjoint(vars(request.module)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="autotune-tests-", dir=MEMORY) as folder:
        yield Path(folder)
