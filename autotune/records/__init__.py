"""The frozen values that cross processes and restarts, with a schema version where they are stored.

They are pydantic models because each of them is read back from a file that another process wrote, or was killed while
writing: unknown keys, missing keys, NaN and infinity are rejected.
Names carry their units: ``_s`` seconds, ``_bytes`` bytes, ``_per_s`` per second.

This package imports neither torch nor any other part of autotune, so that objectives can import it on its own.
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
    Side,
    TrialStatus,
    Value,
)
from autotune.records.facts import (
    Fingerprint,
    Host,
    Probe,
)
from autotune.records.figures import FIGURES, SHORT, Figure
from autotune.records.goal import NEEDS, Goal, NotScored, training_s
from autotune.records.heat import Heat, HeatEntrant, StudyHeat, Turn, heat_title
from autotune.records.job import (
    ENDED,
    Cancelled,
    Child,
    Done,
    End,
    Failed,
    Job,
    JobRequest,
    JobRow,
    JobState,
    Paused,
    Queued,
    Running,
    Status,
)
from autotune.records.launch import (
    CheckPlan,
    CommandRef,
    DataRef,
    HeatPlan,
    HoldPlan,
    LiveSpec,
    MeasurePlan,
    PhaseLimits,
    SlowStore,
    TrialSpec,
    WorkloadRef,
)
from autotune.records.measurement import Measurement, Surroundings, Window
from autotune.records.outcome import BreakEven, Edge, Failure, Finding, LedgerRow, LeftFiles, Outcome, Standing
from autotune.records.proof import EAGER_FP32, Bottleneck, HoldVerdict, KnobPart, Limit, TrainVerdict
from autotune.records.result import Beat, Hold, TrainCheck, TrialResult
from autotune.records.study import LARGEST, LARGEST_IMAGE, StudySpec
from autotune.records.trial import Prediction, Trial

__all__ = [
    "ATTEMPTS",
    "EAGER_FP32",
    "ENDED",
    "FIGURES",
    "INFEASIBLE",
    "LARGEST",
    "LARGEST_IMAGE",
    "NEEDS",
    "SCHEMA_VERSION",
    "SHORT",
    "TRANSIENT",
    "Beat",
    "Bottleneck",
    "BreakEven",
    "Cancelled",
    "CheckPlan",
    "Child",
    "CommandRef",
    "Config",
    "DataRef",
    "Done",
    "Edge",
    "End",
    "Failed",
    "Failure",
    "Figure",
    "Finding",
    "Fingerprint",
    "Goal",
    "Heat",
    "HeatEntrant",
    "HeatPlan",
    "Hold",
    "HoldPlan",
    "HoldVerdict",
    "Host",
    "Job",
    "JobRequest",
    "JobRow",
    "JobState",
    "KnobPart",
    "LaunchKind",
    "LedgerRow",
    "LeftFiles",
    "Limit",
    "LiveSpec",
    "MeasurePlan",
    "Measurement",
    "NotScored",
    "Outcome",
    "Paused",
    "Phase",
    "PhaseLimits",
    "Prediction",
    "Probe",
    "Queued",
    "Record",
    "Running",
    "Side",
    "SlowStore",
    "Standing",
    "Status",
    "StudyHeat",
    "StudySpec",
    "Surroundings",
    "TrainCheck",
    "TrainVerdict",
    "Trial",
    "TrialResult",
    "TrialSpec",
    "TrialStatus",
    "Turn",
    "Value",
    "Window",
    "WorkloadRef",
    "heat_title",
    "training_s",
]
