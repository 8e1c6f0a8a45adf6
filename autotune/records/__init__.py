"""The frozen values that cross processes and restarts, each with a schema version.

They are pydantic models because every one of them is read back from a file that another process wrote, or
was killed while writing: unknown keys, missing keys, NaN and infinity are refused at the door.
Units stand in the names: ``_s`` seconds, ``_bytes`` bytes, ``_per_s`` per second.

This module imports neither torch nor anything else of autotune, so that objectives may import it alone.
"""

from autotune.records.base import (
    ATTEMPTS,
    INFEASIBLE,
    SCHEMA_VERSION,
    TRANSIENT,
    Config,
    LaunchKind,
    Phase,
    Record,
    TrialStatus,
    Value,
)
from autotune.records.facts import (
    Fingerprint,
    Host,
    Probe,
)
from autotune.records.launch import (
    CheckPlan,
    DataRef,
    HoldPlan,
    MeasurePlan,
    PhaseLimits,
    TrialSpec,
    WorkloadRef,
)
from autotune.records.result import (
    Beat,
    Hold,
    Measurement,
    Surroundings,
    TrainCheck,
    TrialResult,
    Window,
)
from autotune.records.study import (
    Bottleneck,
    BreakEven,
    Failure,
    HoldVerdict,
    KnobPart,
    LedgerRow,
    Limit,
    Outcome,
    Prediction,
    Standing,
    StudySpec,
    TrainVerdict,
    Trial,
)

__all__ = [
    "ATTEMPTS",
    "INFEASIBLE",
    "SCHEMA_VERSION",
    "TRANSIENT",
    "Beat",
    "Bottleneck",
    "BreakEven",
    "CheckPlan",
    "Config",
    "DataRef",
    "Failure",
    "Fingerprint",
    "Hold",
    "HoldPlan",
    "HoldVerdict",
    "Host",
    "KnobPart",
    "LaunchKind",
    "LedgerRow",
    "Limit",
    "MeasurePlan",
    "Measurement",
    "Outcome",
    "Phase",
    "PhaseLimits",
    "Prediction",
    "Probe",
    "Record",
    "Standing",
    "StudySpec",
    "Surroundings",
    "TrainCheck",
    "TrainVerdict",
    "Trial",
    "TrialResult",
    "TrialSpec",
    "TrialStatus",
    "Value",
    "Window",
    "WorkloadRef",
]
