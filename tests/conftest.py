"""Shared by all tests: CUDA tests are skipped without a device, and one real launcher serves all tests that need it."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
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


HERE = Path(__file__).parent
#: Folders whose tests are marked ``alone``.
ALONE = frozenset({"contract", "gpu", "process"})


@contextlib.contextmanager
def _locked(name, kind):
    """Hold a lock against the other processes that run this checkout's tests."""
    checkout = hashlib.sha256(str(HERE).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"autotune-tests-{os.getuid()}-{checkout}.{name}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        # A child forked meanwhile holds the same lock, so closing the file would not be enough.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test beside those of the other process, or if it is marked ``alone``, without them."""
    with contextlib.ExitStack() as room:
        # Whoever waits for the room holds the door, or those who share the room would keep him out.
        with _locked("door", fcntl.LOCK_EX):
            kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
            room.enter_context(_locked("room", kind))
        return (yield)


def pytest_collection_modifyitems(items):
    for item in items:
        if any(item.path.is_relative_to(HERE / folder) for folder in ALONE):
            item.add_marker(pytest.mark.alone)
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
