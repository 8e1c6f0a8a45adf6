"""The launcher's contract, run on the fake and on the real launcher."""

import time

import pytest

from autotune.base.clock import SystemClock
from autotune.base.records import MeasurePlan, TrialStatus
from autotune.launcher.lanes import ThreadLanes
from autotune.workload.catalog import find_workload
from tests.support import FakeClock, LauncherContract, LauncherRig, Play, Scenario, ScriptedLauncher, make_spec

PLAYS = {
    Scenario.HEALTHY: Play(),
    Scenario.RAISES: Play(status=TrialStatus.USER_ERROR),
    Scenario.DIES: Play(status=TrialStatus.CRASHED),
    Scenario.ENDLESS: Play(wall_s=float("inf")),
}


def scripted_spec(scenario, folder):
    return make_spec(folder, config={"batch_size": 32, "workload.scenario": scenario.value})


def scripted(clock):
    return ScriptedLauncher(lambda spec: PLAYS[Scenario(spec.config["workload.scenario"])], clock)


class Hasty(FakeClock):
    """Virtual time that goes on some hundred times as fast as real time, in which launches are told to stop."""

    def sleep(self, seconds):
        time.sleep(seconds / 200)
        super().sleep(seconds)


class TestScripted(LauncherContract):
    @pytest.fixture
    def rig(self):
        return LauncherRig(scripted(FakeClock()), scripted_spec)


class TestAloneOnOneOfSeveralDevices(LauncherContract):
    @pytest.fixture
    def rig(self):
        lanes = ThreadLanes(lambda says: scripted(Hasty()), 2, SystemClock(), print)
        yield LauncherRig(lanes, scripted_spec)
        lanes.close()


class TestProcess(LauncherContract):
    @pytest.fixture
    def rig(self, process_launcher, workloads):
        faults = {
            Scenario.HEALTHY: "",
            Scenario.RAISES: "fault_errors.of_the_users_own",
            Scenario.DIES: "fault_signals.segv",
            Scenario.ENDLESS: "fault_signals.wait",
        }

        def spec(scenario, folder):
            return make_spec(
                folder,
                workload=find_workload(str(workloads / "faults.py"), {"fault": faults[scenario], "at": "1"}),
                config={"batch_size": 8, "num_workers": 0, "intra_op_threads": 1},
                batch_size=8,
                plan=MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.02, max_measure_s=2.0),
            )

        return LauncherRig(process_launcher, spec)
