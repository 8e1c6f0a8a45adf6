"""Shared by all tests: CUDA tests are skipped without a device, and one real launcher serves all tests that need it.

Three processes run the tests (pytest-xdist; ``-n 0`` runs them in one), also on two cores, because most tests wait for
children that sleep. Those that measure, or watch the machine, have it to themselves: one after the other, in one
process, after all others, while the other processes wait.
"""

import compileall
import fcntl
import re
import sys
from pathlib import Path, PurePath
from types import SimpleNamespace
from uuid import uuid4

import pytest
from xdist.scheduler import LoadScopeScheduling

import autotune
from autotune.base.clock import SystemClock
from autotune.base.layout import LOCK_DIR, STATE_DIR
from autotune.launcher import ProcessLauncher
from autotune.machine.gpu import NvmlUnavailable, gpus

# Show the compared values in failures of the public suites, as in any test.
pytest.register_assert_rewrite("tests.support.contract", "tests.support.daemon")


#: Folders, files and classes of the tests that have the machine to themselves.
_ALONE = ("cluster", "gpu", "test_page_cache.py", "TestAlone")
#: Folders whose tests start processes; elsewhere, those that do have the marker `process`.
_WITH_PROCESSES = ("cli", "cluster", "daemon", "exports", "gpu", "nvml", "old", "packaging", "process", "scripts")
#: Folders whose files share something that takes long to make.
_TOGETHER = ("cli",)


def _runs_alone(nodeid: str) -> bool:
    return not set(_ALONE).isdisjoint(re.split("/|::", nodeid.partition("[")[0]))


class _Scheduling(LoadScopeScheduling):
    """What a file's tests share is made once, and so is what all tests share that run alone."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = PurePath(file).parent.name
        return "alone" if _runs_alone(nodeid) else folder if folder in _TOGETHER else file


def pytest_xdist_make_scheduler(config, log):
    return _Scheduling(config, log)


def pytest_configure(config):
    # Hundreds of processes import the package. Where Python keeps no bytecode, each of them would compile it.
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(autotune.__file__).parent, quiet=2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    # A test holds this file while it runs: alone, or together with others.
    with open(__file__) as machine:
        fcntl.flock(machine, fcntl.LOCK_EX if _runs_alone(item.nodeid) else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            # A forked child may still have it open.
            fcntl.flock(machine, fcntl.LOCK_UN)


@pytest.fixture(scope="session", autouse=True)
def _nobodys_state(tmp_path_factory):
    """Redirect what searches store for their user, and what daemons lock, to folders of the test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCK_DIR, str(tmp_path_factory.mktemp("locks")))
        patch.setenv(STATE_DIR, str(tmp_path_factory.mktemp("user") / "state"))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _runs_alone(item.nodeid))
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in _WITH_PROCESSES:
            item.add_marker(pytest.mark.process)
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


@pytest.fixture
def searching_here(process_launcher, monkeypatch):
    """Lets searches that are typed in this process launch with `process_launcher`."""
    kept = SimpleNamespace(run=process_launcher.run, close=lambda: None)
    monkeypatch.setattr("autotune.search.setup.ProcessLauncher", lambda *given, **named: kept)
