"""A real launcher in virtual time, while the driver's answers change. Runs in the process of `evaluate.py`."""

import os
import time
from pathlib import Path

from autotune.base.records import MeasurePlan
from autotune.launcher import ProcessLauncher
from autotune.launcher.quiet import Quiet
from autotune.machine import gpu
from autotune.workload.catalog import find_workload
from tests.support import FakeClock, make_spec

CARD = "GPU-a"


class World(FakeClock):
    """A clock that advances on sleep and updates the driver's state with it.

    Attributes:
        changes: ``(at, text)``: seconds since `begin`, and the content of the state file from then on.
    """

    def begin(self, changes):
        self.began = self.now()
        self.changes = list(changes)
        self._apply()

    def now(self):
        # The launch itself takes real time, and its report is compared with this clock.
        return super().now() + time.monotonic()

    def sleep(self, seconds):
        super().sleep(seconds)
        self._apply()

    @property
    def passed_s(self):
        return self.now() - self.began

    def _apply(self):
        while self.changes and self.passed_s >= self.changes[0][0]:
            state = Path(os.environ["NVML_STUB_STATE"])
            new = state.with_suffix(".new")
            new.write_text(self.changes.pop(0)[1])
            os.replace(new, state)


world = World()
said = []
launcher = ProcessLauncher("test-nvml", world, on_wait=said.append)


def launch(changes, *, folder, workload, device="cuda:0", stop_at_s=float("inf"), allow_busy=False, afresh=False):
    """Run a launch while the driver's state changes; return its result and the messages.

    Args:
        afresh: it is the first launch of a search.
    """
    said.clear()
    if afresh:
        launcher._quiet = Quiet(world, gpu.gpus, said.append)
    spec = make_spec(
        Path(folder),
        workload=find_workload(workload, {"folder": folder}),
        config={"batch_size": 8, "num_workers": 0, "intra_op_threads": 1},
        batch_size=8,
        plan=MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.02, max_measure_s=2.0).model_copy(
            update={"busy_cores": None if allow_busy else 1e3}
        ),
        devices=(device,),
        env={"CUDA_VISIBLE_DEVICES": CARD},
    )
    world.begin(changes)
    # Stop the launch once virtual time has reached `stop_at_s`.
    result = launcher.run(spec, on_beat=lambda beat: None, stop=lambda: world.passed_s >= stop_at_s)
    return {"result": result, "said": list(said)}
