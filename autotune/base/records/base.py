"""The base class of all records, and the types they share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1

#: One value of a knob, spelled as in the contract.
Value = bool | int | float | str
#: One value for every active knob. Inactive knobs are absent, never null.
Config = Mapping[str, Value]


class Record(BaseModel):
    """Base of all records: frozen, no unknown keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrialStatus(StrEnum):
    """The way a launch ended. Only `COMPLETE` has a score."""

    COMPLETE = "complete"
    #: Stopped early because it was slow; its rate is known.
    PRUNED = "pruned"
    #: The device's allocator, driver or libraries ran out of memory (or the CPU's, under a limit).
    OOM = "oom"
    #: The kernel's OOM killer killed a process of the launch.
    HOST_OOM = "host_oom"
    SHM_EXHAUSTED = "shm_exhausted"
    LOADER_WORKER_DIED = "loader_worker_died"
    #: Killed by a signal it raised itself, or ended without a report.
    CRASHED = "crashed"
    #: SIGKILL from outside, but not from the kernel's OOM killer.
    KILLED = "killed"
    #: Still making progress when a phase's limit ran out.
    TIMEOUT = "timeout"
    #: No progress for longer than a step can take.
    HANG = "hang"
    COMPILE_FAILED = "compile_failed"
    #: A loss was not finite, or batches were not trained on that the baseline trains on.
    DIVERGED = "diverged"
    #: The workload's own code or data raised an exception.
    USER_ERROR = "user_error"
    INTERRUPTED = "interrupted"


#: Failures that say nothing about the configuration and may not recur.
TRANSIENT = frozenset({TrialStatus.KILLED, TrialStatus.LOADER_WORKER_DIED, TrialStatus.CRASHED})
#: How often to launch a configuration that fails in one of these ways.
ATTEMPTS = 3
#: The configuration does not work on this machine. Reported to Optuna as PRUNED with a violated constraint, so that
#: the sampler learns from it (TPE ignores FAIL).
INFEASIBLE = frozenset(
    {
        TrialStatus.OOM,
        TrialStatus.HOST_OOM,
        TrialStatus.SHM_EXHAUSTED,
        TrialStatus.COMPILE_FAILED,
        TrialStatus.DIVERGED,
        TrialStatus.TIMEOUT,
        TrialStatus.HANG,
    }
)


class Phase(StrEnum):
    """The current phase of a launch. Each phase has its own limit and its own progress beats."""

    #: Import the workload, open its dataset, start the loader's iterator.
    LOAD = "load"
    #: Create model and optimizer on the device; ends when the first batch is available.
    BUILD = "build"
    #: The first step, in every compile mode.
    COMPILE = "compile"
    WARMUP = "warmup"
    MEASURE = "measure"


#: Of a training, what a heat compares.
Side = Literal["device", "loader"]


class LaunchKind(StrEnum):
    """The task of a child process."""

    #: Collect facts about torch, the device and the workload; takes no step.
    PROBE = "probe"
    #: Train and measure one configuration.
    MEASURE = "measure"
    #: Measure steps over batches kept on the device: its rate without a loader.
    DEVICE_ONLY = "device_only"
    #: Measure the loader alone and discard its batches: its rate without a device.
    LOADER_ONLY = "loader_only"
    #: Take some steps from saved weights over saved batches and report the losses.
    TRAIN_CHECK = "train_check"
    #: Train until memory has settled, with an evaluation pass and the largest sample.
    HOLD = "hold"
    #: Let several configurations take turns in one process, and compare their rates on the device or of the loader.
    HEAT = "heat"
