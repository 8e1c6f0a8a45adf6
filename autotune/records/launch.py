"""What a launch is told."""

from __future__ import annotations

from pydantic import Field

from autotune.records.base import SCHEMA_VERSION, LaunchKind, Phase, Record, Value


class WorkloadRef(Record):
    """Where a workload's code is, without importing it.

    Attributes:
        name: what a person calls it: the catalog name, the file's stem or the object's name.
        path: the file, absolute; ``None`` for a workload named ``package.module:NAME``.
        module: the import name; for a file its stem, imported with the file's folder first on ``sys.path``.
        attribute: the object inside the module, or ``None`` when the module itself is the workload.
        args: ``--arg`` values as text; the workload's own code interprets them.
        sha256: hash of the file and its sibling modules; empty for a named module until the probe fills it.
    """

    name: str
    path: str | None = None
    module: str
    attribute: str | None = None
    args: dict[str, str] = Field(default_factory=dict)
    sha256: str = ""


class DataRef(Record):
    """The data a workload is given.

    Attributes:
        kind: ``generated``, ``folder`` or ``synthetic``.
        path: the folder, absolute; ``None`` where there is none (synthetic, or a workload that makes its own).
        identity: a hash that changes when the data does; part of the fingerprint.
        epoch_samples: the stated length of an epoch in samples, by which an epoch's turn weighs in;
            ``None`` means the dataset's own length.
        page_cache: ``warm`` when all files were read before the first launch, else ``cold``; ``None`` without files.
    """

    kind: str
    path: str | None = None
    identity: str = ""
    epoch_samples: int | None = Field(default=None, gt=0)
    page_cache: str | None = None


class PhaseLimits(Record):
    """Seconds each phase of a launch may take, how long it may stay silent inside a stepping phase, and how long
    it may take in all (``None``: as long as its phases do)."""

    load_s: float = 120.0
    build_s: float = 120.0
    compile_s: float = 600.0
    warmup_s: float = 120.0
    measure_s: float = 120.0
    silence_s: float = 60.0
    total_s: float | None = None

    def of(self, phase: Phase) -> float:
        """The limit of ``phase`` in seconds."""
        return float(getattr(self, f"{phase.value}_s"))


class MeasurePlan(Record):
    """How long to measure.

    Attributes:
        target_halfwidth: stop when the rate's 95 % interval is within this fraction of the rate.
        min_windows: never fewer windows than this.
        min_window_s: a window holds whole steps and lasts at least this long.
        max_measure_s: stop measuring after this many seconds, whatever the interval. Windows that were discarded may
            be repeated for as long again.
        min_measure_s: measure at least this long; several launches with a floor share one precision.
        warmup_steps: steps discarded at least, after the first.
        max_warmup_s: warm-up ends after this many seconds even if the loader's queue has not settled.
        prune_below_per_s: end as ``pruned`` as soon as the rate's interval lies below this many samples per second;
            0 never prunes.
        busy_cores: discard a window in which processes of others used more than this many cores while none was
            free; ``None``: however loaded the host is.
    """

    target_halfwidth: float = 0.02
    min_windows: int = 5
    min_window_s: float = 0.5
    max_measure_s: float = 20.0
    min_measure_s: float = 0.0
    warmup_steps: int = 2
    max_warmup_s: float = 30.0
    prune_below_per_s: float = 0.0
    busy_cores: float | None = None


class CheckPlan(Record):
    """What a train_check launch does.

    Attributes:
        store: folder with the saved weights and batches, absolute. The launch whose `seed` is 0 as a reference makes
            it; every other reads it.
        steps: training steps to take; the saved batches are gone through in turns.
        batches: how many batches are saved.
        reference: this is one of the eager fp32 runs. It starts from weights of its own seed, unless the seed is 0.
        seed: 0 starts from the saved weights.
    """

    store: str
    steps: int = Field(default=24, gt=0)
    batches: int = Field(default=4, gt=0)
    reference: bool = False
    seed: int = 0


class HoldPlan(Record):
    """What a hold launch does.

    Attributes:
        min_s: train at least this long; max_s: at most.
        settled_steps: memory has settled when its peak has not grown for this many steps, or for the second half of
            all steps where `max_s` has room for fewer.
    """

    min_s: float = 5.0
    max_s: float = 60.0
    settled_steps: int = Field(default=20, gt=0)


class TrialSpec(Record):
    """Everything one child process needs to know. Written to ``spec.json`` before it starts.

    Attributes:
        launch: the launch's name inside the study, also its folder's name.
        number: the Optuna trial's number, ``None`` for launches that are no trials.
        devices: contract names: ``("cpu",)``, ``("cuda:0",)`` or ``("cuda:GPU-<uuid>",)``.
        env: variables the child must see when it is *loaded*; differing from the template's means spawn.
        entry: what is run; ``workload`` is the only one so far.
        memory_limit_bytes: see DESIGN: soft RLIMIT_DATA on a CPU, a fraction of device memory on CUDA.
        repeats: number of the trial this one repeats after a transient failure, if any.
        check, hold: of launches of those kinds.
    """

    schema_version: int = SCHEMA_VERSION
    kind: LaunchKind
    launch: str
    number: int | None = None
    folder: str
    workload: WorkloadRef
    data: DataRef
    config: dict[str, Value]
    devices: tuple[str, ...] = ("cpu",)
    ranks: int = 1
    env: dict[str, str] = Field(default_factory=dict)
    entry: str = "workload"
    seed: int = 0
    image_size: int | None = None
    batch_size: int = Field(gt=0)
    worker_start_method: str = "fork"
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    cache_folder: str | None = None
    limits: PhaseLimits = PhaseLimits()
    plan: MeasurePlan = MeasurePlan()
    repeats: int | None = None
    check: CheckPlan | None = None
    hold: HoldPlan | None = None
