"""Launches where a monitoring agent starts a thread when torch is imported, so that no process may be forked."""

import os
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.base.clock import SystemClock
from autotune.base.layout import LaunchFiles
from autotune.base.records import PhaseLimits, TrialStatus
from autotune.launcher import ProcessLauncher

from .alive import marked

AGENT = """
import sys, threading

class Agent:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            threading.Thread(target=threading.Event().wait, name="reporter", daemon=True).start()

sys.meta_path.insert(0, Agent())
"""


@pytest.fixture(scope="module")
def spawning(tmp_path_factory):
    """A launcher whose launches cannot be forked, its mark, and what it has said."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "sitecustomize.py").write_text(AGENT)
    mark, said = f"test-{uuid4().hex}", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        launcher = ProcessLauncher(mark, SystemClock(), on_wait=said.append)
    yield launcher, mark, said
    launcher.close()
    assert marked(mark) == {}
    # Once, though there were several.
    assert len(said) == 1
    assert "a second thread running here (reporter)" in said[0] and "each imports torch itself" in said[0]


LAUNCHES = {
    "completes, with workers": {"config": {"num_workers": 2}},
    "crashes": {"name": "signals.segv", "at": 2},
    # By then the import has taken longer.
    "is too slow": {"name": "signals.wait", "at": 1, "limits": PhaseLimits(load_s=60.0, compile_s=0.8)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_spawned_launch_ends_like_a_forked_one(spawning, process_launcher, fault, name):
    launcher, mark, _ = spawning
    seen = []
    for runs, folder in ((process_launcher, "forked"), (launcher, "spawned")):
        spec = fault(folder=folder, **LAUNCHES[name])
        result = runs.run(spec, on_beat=lambda beat: None, stop=lambda: False)
        # The stack at the end, of a crash and of a timeout.
        stack = "fault_signals.py" in LaunchFiles(Path(spec.folder)).stderr.read_text()
        seen.append((result.status, result.phase, result.exit_code, result.unclean_exit, result.transient, stack))
    assert list(marked(mark).values()) == [os.getpid()], "more than the template is alive"
    assert seen[0] == seen[1]
    assert stack == ("name" in LAUNCHES[name])
    assert result.measurement is not None or result.status is not TrialStatus.COMPLETE
