"""The base of all records, and the words they share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1

#: One value of a knob, in the contract's spelling.
Value = bool | int | float | str
#: One value for every active knob. Inactive knobs are absent, never null.
Config = Mapping[str, Value]


class Record(BaseModel):
    """Base of all records: frozen, closed to unknown keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrialStatus(StrEnum):
    """How a launch ended. Exactly one holds, and only `COMPLETE` has a score."""

    COMPLETE = "complete"
    #: Stopped early because it was slow; its rate was seen.
    PRUNED = "pruned"
    #: The device's allocator, driver or libraries had no memory (or the CPU's, under a limit).
    OOM = "oom"
    #: The kernel's own killer chose a process of the launch.
    HOST_OOM = "host_oom"
    SHM_EXHAUSTED = "shm_exhausted"
    LOADER_WORKER_DIED = "loader_worker_died"
    #: Died by a signal of its own making, or ended without reporting anything.
    CRASHED = "crashed"
    #: SIGKILL from outside, and not by the kernel's memory killer.
    KILLED = "killed"
    #: Still making progress when a phase's limit ran out.
    TIMEOUT = "timeout"
    #: No progress at all for longer than a step can take.
    HANG = "hang"
    COMPILE_FAILED = "compile_failed"
    #: A loss that is not finite.
    DIVERGED = "diverged"
    #: The workload's own code or data raised.
    USER_ERROR = "user_error"
    INTERRUPTED = "interrupted"


#: Failures that say nothing about the configuration, and may go well another time.
TRANSIENT = frozenset({TrialStatus.KILLED, TrialStatus.LOADER_WORKER_DIED, TrialStatus.CRASHED})
#: How often a configuration is launched that fails in such ways.
ATTEMPTS = 3
#: The configuration itself does not work here. Told to Optuna as PRUNED with a violated constraint, so that
#: the sampler learns from it (TPE forgets FAIL).
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
    """Where a launch is. Each phase has its own limit and its own progress beats."""

    #: Import the workload, open its dataset, start the loader's iterator.
    LOAD = "load"
    #: Model and optimizer, on the device; ends when the first batch is at hand.
    BUILD = "build"
    #: The first step, in every compile mode.
    COMPILE = "compile"
    WARMUP = "warmup"
    MEASURE = "measure"


class LaunchKind(StrEnum):
    """What a child process is asked to do."""

    #: Learn the facts about torch, the device and the workload; takes no step.
    PROBE = "probe"
    #: Train and measure one configuration.
    MEASURE = "measure"
    #: The same step over batches that stay on the device: what the device could do without a loader.
    DEVICE_ONLY = "device_only"
    #: The loader alone, its batches thrown away: what it could deliver without a device.
    LOADER_ONLY = "loader_only"
    #: Train some steps from saved weights over saved batches, for the losses.
    TRAIN_CHECK = "train_check"
    #: Train on until memory has settled, with an evaluation pass and the largest sample.
    HOLD = "hold"
