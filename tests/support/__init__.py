"""Fakes, factories for records, and contract suites, for tests of autotune and of code built on it.

Nothing here starts a process, sleeps, or inspects the machine.
"""

from tests.support.clock import FakeClock
from tests.support.contract import LauncherContract, LauncherRig, Scenario
from tests.support.daemon import Behaviour, RunnerContract, RunnerRig, ScriptedDevices, ScriptedRunner
from tests.support.makers import (
    PROFILE_DATA,
    make_host,
    make_job_request,
    make_measurement,
    make_outcome,
    make_probe,
    make_profile,
    make_spec,
    make_standing,
    make_study_spec,
    make_trial,
)
from tests.support.scripted import Play, ScriptedLauncher
from tests.support.surfaces import write_surface
from tests.support.workers import ScriptedWorkers

__all__ = [
    "PROFILE_DATA",
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
    "make_profile",
    "make_spec",
    "make_standing",
    "make_study_spec",
    "make_trial",
    "write_surface",
]
