"""Shared by all tests: no CUDA tests without CUDA, and one launcher with its template for those who need a real one."""

from pathlib import Path
from uuid import uuid4

import pytest

from autotune.clock import SystemClock
from autotune.launcher import ProcessLauncher
from autotune.layout import STATE_DIR
from autotune.machine.gpu import has_nvidia_device

# The suites that we hand out tell what they compared, like any test.
pytest.register_assert_rewrite("autotune.testing.contract", "autotune.testing.daemon")


@pytest.fixture(scope="session", autouse=True)
def _nobodys_state(tmp_path_factory):
    """What searches leave behind for their user goes to a folder of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR, str(tmp_path_factory.mktemp("user") / "state"))
        yield


def pytest_collection_modifyitems(items):
    # Asking torch would load it into this process.
    if not has_nvidia_device():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA device on this machine"))


@pytest.fixture(scope="session")
def workloads():
    """The folder of the workloads that tests train."""
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
