"""Fakes, factories for records, and contract suites, for tests of autotune and of code built on it.

Nothing here starts a process, sleeps, or inspects the machine.
"""

from autotune.testing.clock import FakeClock
from autotune.testing.contract import LauncherContract, LauncherRig, Scenario
from autotune.testing.daemon import Behaviour, RunnerContract, RunnerRig, ScriptedDevices, ScriptedRunner
from autotune.testing.makers import (
    make_host,
    make_job_request,
    make_measurement,
    make_outcome,
    make_probe,
    make_spec,
    make_standing,
    make_study_spec,
    make_trial,
)
from autotune.testing.scripted import Play, ScriptedLauncher
from autotune.testing.surfaces import write_surface
from autotune.testing.workers import ScriptedWorkers

__all__ = [
    "Behaviour",
    "FakeClock",
    "LauncherContract",
    "LauncherRig",
    "Play",
    "RunnerContract",
    "RunnerRig",
    "Scenario",
    "ScriptedDevices",
    "ScriptedLauncher",
    "ScriptedRunner",
    "ScriptedWorkers",
    "make_host",
    "make_job_request",
    "make_measurement",
    "make_outcome",
    "make_probe",
    "make_spec",
    "make_standing",
    "make_study_spec",
    "make_trial",
    "write_surface",
]
