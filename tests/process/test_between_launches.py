"""Between two launches: dead processes leave nothing in shared memory, and no launch starts on a busy card."""

import contextlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from autotune.base.clock import SystemClock
from autotune.base.records import MeasurePlan, TrialStatus
from autotune.launcher import ProcessLauncher
from autotune.machine.gpu import Gpu
from autotune.workload.catalog import find_workload
from tests.support import make_spec

from .alive import marked, wait_until

SHM = Path("/dev/shm")
#: Long enough for everything to be seen.
LONG = MeasurePlan(target_halfwidth=0.0, min_windows=2, min_window_s=0.02, max_measure_s=30.0)
UUID = "GPU-11111111-2222-3333-4444-555555555555"
CARD = Gpu(0, UUID, "A card", "580.00", mig=False, memory_used_bytes=2**28)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The folder for temporary files of all these launches."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def leaving(workloads, tmp_path, temporary):
    """``leaving(dies, method)``: a launch whose leader and worker each leave a file, until one of them is killed."""
    tag = uuid4().hex[:8]

    def spec(dies, method):
        workload = find_workload(str(workloads / "leaving.py"), {"tag": tag, "dies": dies})
        config = {"batch_size": 8, "num_workers": 1, "prefetch_factor": 2, "intra_op_threads": 1}
        return make_spec(
            tmp_path / dies,
            workload=workload,
            config=config,
            batch_size=8,
            worker_start_method=method,
            plan=LONG,
            env={"TMPDIR": str(temporary)},
        )

    yield spec, tag
    for name in SHM.glob(f"*_{tag}"):
        name.unlink()


@pytest.fixture
def neighbour(leaving):
    """The pid of a dead process that left a file."""
    _, tag = leaving
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    (SHM / f"torch_{process.pid}_1_{tag}").touch()
    return process.pid


def semaphores(mark):
    """The named semaphores of the processes that carry a mark."""
    found = set()
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            found.update(re.findall(r"/dev/shm/(sem\.mp-\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("dies", ["leader", "worker"])
def test_the_dead_leave_nothing(process_launcher, study_mark, leaving, neighbour, temporary, method, dies):
    spec, tag = leaving
    named = set()
    most = 0

    def look(beat):
        nonlocal most
        named.update(semaphores(study_mark))
        most = max(most, len(list(SHM.glob(f"torch_*_{tag}"))))
        if most == 3 and (named or method == "fork"):
            (SHM / f"die_{tag}").touch()

    result = process_launcher.run(spec(dies, method), on_beat=look, stop=lambda: False)
    expected = TrialStatus.KILLED if dies == "leader" else TrialStatus.LOADER_WORKER_DIED
    assert result.status is expected, result.cause
    assert result.transient
    assert most == 3, "leader, worker and neighbour had a file each"
    assert list(SHM.glob(f"torch_*_{tag}")) == [SHM / f"torch_{neighbour}_1_{tag}"]
    # Workers hand over tensors through sockets in a temporary folder.
    assert not [path for path in temporary.iterdir() if path.name.startswith(("pymp-", "autotune-"))]
    # Workers that are not forked use named semaphores, which only multiprocessing's resource tracker can remove.
    assert bool(named) == (method != "fork")
    wait_until(lambda: not any((SHM / name).exists() for name in named))


class TestAlone:
    """These have the machine to themselves."""

    @pytest.mark.slow
    def test_a_launch_waits_for_its_card(self, fault):
        """The driver is simulated; the launches are real, and fail because there is no card."""
        readings = [0, 0, 900, 900, 900, 900, 0, 0]
        said = []

        def cards():
            return [replace(CARD, memory_used_bytes=CARD.memory_used_bytes + readings.pop(0) * 2**20)]

        def run(folder, stop=lambda: False):
            spec = fault(devices=("cuda:0",), env={"CUDA_VISIBLE_DEVICES": UUID}, folder=folder)
            return launcher.run(spec, on_beat=lambda beat: None, stop=stop)

        launcher = ProcessLauncher(f"test-{uuid4().hex}", SystemClock(), cards=cards, on_wait=said.append)
        try:
            first, second = run("1"), run("2")
            assert readings == [] and said == []
            assert 0 < first.waited_s < second.waited_s
            readings[:] = [900] * 10
            third = run("3", stop=lambda: len(readings) < 5)
        finally:
            launcher.close()
        assert (third.status, third.phase, third.transient) == (TrialStatus.INTERRUPTED, None, False)
        assert "waited for a quiet machine" in third.cause and third.waited_s > 0
