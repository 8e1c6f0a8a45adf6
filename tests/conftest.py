"""Shared by all tests: CUDA tests are skipped without a device, and one real launcher serves all tests that need it.

Two processes run the tests (pytest-xdist; ``-n 0`` runs them in one). Those that measure, or watch the machine, have it
to themselves: they run one after the other in one process, after all others, while the other process waits.
"""

import fcntl
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.clock import SystemClock
from autotune.launcher import ProcessLauncher
from autotune.layout import LOCK_DIR, STATE_DIR
from autotune.machine.gpu import NvmlUnavailable, gpus

# Show the compared values in failures of the public suites, as in any test.
pytest.register_assert_rewrite("autotune.testing.contract", "autotune.testing.daemon")


_HERE = Path(__file__)
#: Tests that run beside others, by folder or file: they measure nothing of this machine.
_BESIDE = (
    *("unit", "old", "packaging"),
    *(f"cli/test_{name}.py" for name in ("commands", "completion", "dry_run", "hostile_arguments", "replay")),
    *(f"daemon/test_{name}.py" for name in ("board", "queue", "scheduler", "web")),
)
_ALONE = tuple(f"unit/test_{name}.py" for name in ("cpu_load", "page_cache", "quiet"))
#: What every test holds while it runs: together with others, or alone.
_machine = _HERE.open()


def _runs_alone(item):
    place = Path(item.path).relative_to(_HERE.parent)
    names = {str(place), *map(str, place.parents)}
    return not names & set(_BESIDE) or bool(names & set(_ALONE))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    fcntl.flock(_machine, fcntl.LOCK_EX if _runs_alone(item) else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        fcntl.flock(_machine, fcntl.LOCK_UN)


@pytest.fixture(scope="session", autouse=True)
def _nobodys_state(tmp_path_factory):
    """Redirect what searches store for their user, and what daemons lock, to folders of the test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCK_DIR, str(tmp_path_factory.mktemp("locks")))
        patch.setenv(STATE_DIR, str(tmp_path_factory.mktemp("user") / "state"))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        # What a file's tests share is made once. Fixtures of the whole run are those of the tests that run alone.
        item.add_marker(pytest.mark.xdist_group("alone" if _runs_alone(item) else str(item.path)))
    items.sort(key=_runs_alone)
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
