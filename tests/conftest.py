"""Shared by all tests: CUDA tests are skipped without a device, and one real launcher serves all tests that need it."""

from pathlib import Path
from uuid import uuid4

import pytest

from autotune.clock import SystemClock
from autotune.launcher import ProcessLauncher
from autotune.layout import LOCK_DIR, STATE_DIR
from autotune.machine.gpu import NvmlUnavailable, gpus

# Show the compared values in failures of the public suites, as in any test.
pytest.register_assert_rewrite("autotune.testing.contract", "autotune.testing.daemon")


@pytest.fixture(scope="session", autouse=True)
def _nobodys_state(tmp_path_factory):
    """Redirect what searches store for their user, and what daemons lock, to folders of the test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCK_DIR, str(tmp_path_factory.mktemp("locks")))
        patch.setenv(STATE_DIR, str(tmp_path_factory.mktemp("user") / "state"))
        yield


def pytest_collection_modifyitems(items):
    # Asking torch would import it into this process. A driver that does not answer fails these tests.
    cards = gpus()
    if not (cards.driver_present if isinstance(cards, NvmlUnavailable) else cards):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA device on this machine"))


@pytest.fixture(scope="session")
def workloads():
    """The folder with the workloads that tests train."""
    return Path(__file__).parent / "process" / "workloads"


@pytest.fixture(scope="session")
def study_mark():
    """The mark of `process_launcher`'s processes."""
    return f"test-{uuid4().hex}"


@pytest.fixture(scope="session")
def process_launcher(study_mark):
    """A real launcher, kept for the whole run because its template takes seconds to start."""
    launcher = ProcessLauncher(study_mark, SystemClock())
    yield launcher
    launcher.close()
