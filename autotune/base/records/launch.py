"""A launch: what is asked of it, and what it found."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from autotune.base.records.base import SCHEMA_VERSION, LaunchKind, Phase, Record, Side, TrialStatus, Value
from autotune.base.records.facts import Deliveries, Probe
from autotune.base.records.measurement import Measurement, Surroundings


class WorkloadRef(Record):
    """The location of a workload's code.

    Attributes:
        name: its display name: the catalog name, the file's stem or the object's name.
        path: the file, absolute; ``None`` for a workload named ``package.module:NAME``.
        module: the import name; for a file its stem, imported with the file's folder first on ``sys.path``.
        attribute: the object inside the module, or ``None`` if the module itself is the workload.
        args: ``--arg`` values as text; the workload's own code interprets them.
        sha256: hash of the file and its sibling modules; empty for a named module until the probe fills it in.
    """

    name: str
    path: str | None = None
    module: str
    attribute: str | None = None
    args: dict[str, str] = Field(default_factory=dict)
    sha256: str = ""


class CommandRef(Record):
    """A training script of the user's, as it stands.

    Attributes:
        words: the program and its arguments; ``{num_workers}`` and the like stand for values of knobs.
        folder: where it is run, absolute.
        samples_per_step: of one step of its optimizer, where they cannot be seen; ``None``: those of its loader's
            batches.
        flags: ``--map``: by ``KNOB:VALUE``, or ``KNOB`` for any value, the words by which options of the script's own
            set it.
        output_flag: the script's option for the folder that it writes to, of which each launch gets one of its own.
        scratch: each launch runs in an empty folder of its own instead of `folder`.
        rate: of a program that is not looked into: the regular expression by which it tells its rate, with a group
            ``rate`` (samples per second) or ``seconds`` (of a step). rate_file: the file in which it does so, below the
            folder that it is told to write to, or else the one it runs in; ``None``: on its output.
        repeats: its data set keeps what it has made, so that a first epoch is slower than later ones: launches that
            measure repeat as many batches, and tell of later ones.
        own: of the knobs of `flags`, the values that the script has without such words, as far as they are known.
        view: whether each launch sees a copy-on-write view of `folder`, in which it leaves nothing; ``None``: if that
            is possible.
    """

    words: tuple[str, ...] = Field(min_length=1)
    folder: str
    samples_per_step: int | None = Field(default=None, gt=0)
    flags: dict[str, str] = Field(default_factory=dict)
    output_flag: str | None = None
    scratch: bool = False
    rate: str | None = None
    rate_file: str | None = None
    repeats: int | None = Field(default=None, gt=0)
    own: dict[str, Value] = Field(default_factory=dict)
    view: bool | None = None


class LiveSpec(Record):
    """A training that is tuned while it goes on.

    Attributes:
        folder: for profile and report, absolute. pid: of the script.
        words, workload: its command, and what it is called.
        allow: knobs that may change the maths. expect_s: seconds that the training is expected to take.
    """

    folder: str
    pid: int
    words: tuple[str, ...] = Field(min_length=1)
    workload: WorkloadRef
    allow: tuple[str, ...] = ()
    expect_s: float = Field(default=600.0, gt=0)


#: A bandwidth that nothing waits for.
UNLIMITED = 1e12


class SlowStore(Record):
    """A slow store that is put in front of a folder.

    Attributes:
        latency_s: until a file begins to come. bytes_per_s: of one reader.
        cached: fraction of the files that are held by a cache in front of it, and always the same ones.
    """

    latency_s: float = Field(default=0.0, ge=0)
    bytes_per_s: float = Field(default=UNLIMITED, gt=0)
    cached: float = Field(default=0.0, ge=0, le=1)

    @property
    def words(self) -> str:
        """The store in words: ``80 ms a file, 50 MB/s, 25 % of the files cached``."""
        parts = [f"{1000 * self.latency_s:g} ms a file"]
        if self.bytes_per_s < UNLIMITED:
            parts.append(f"{self.bytes_per_s / 1e6:g} MB/s")
        if self.cached:
            parts.append(f"{100 * self.cached:.3g} % of the files cached")
        return ", ".join(parts)


class DataRef(Record):
    """The data passed to a workload.

    Attributes:
        kind: ``generated``, ``folder`` or ``synthetic``.
        path: the folder, absolute; ``None`` if there is none (synthetic, or a workload that makes its own).
        identity: a hash that changes when the data does; part of the fingerprint.
        epoch_samples: nominal number of samples per epoch, over which the epoch's turn is spread;
            ``None`` for the data set's own length.
        page_cache: ``warm`` when all files were read before the first launch, ``cold`` when files may come from the
            disk, ``unknown`` when the workload has files of its own or none, ``None`` without files.
        store: a slow one in front of the folder; ``None`` for the folder as it is.
    """

    kind: str
    path: str | None = None
    identity: str = ""
    epoch_samples: int | None = Field(default=None, gt=0)
    page_cache: str | None = None
    store: SlowStore | None = None

    @property
    def first_epoch_apart(self) -> bool:
        """Whether a first epoch reads from elsewhere than later ones: from behind a cache, or from what is to be in the
        page cache then."""
        return self.store.cached > 0 if self.store is not None else self.kind == "folder" and self.page_cache == "warm"


class PhaseLimits(Record):
    """Time limits in seconds: for each phase of a launch, for silence inside a stepping phase, and in total (``None``
    for no limit beyond those of the phases)."""

    load_s: float = 120.0
    build_s: float = 120.0
    compile_s: float = 600.0
    warmup_s: float = 120.0
    measure_s: float = 120.0
    silence_s: float = 60.0
    total_s: float | None = None

    def of(self, phase: Phase) -> float:
        """Return the limit of ``phase`` in seconds."""
        return float(getattr(self, f"{phase.value}_s"))


class MeasurePlan(Record):
    """The duration and precision of a measurement.

    Attributes:
        target_halfwidth: stop when the rate's 95 % interval is within ± this fraction of the rate.
        min_windows: minimum number of windows.
        min_window_s: a window holds whole steps and lasts at least this long.
        max_measure_s: stop measuring after this many seconds, whatever the interval. Discarded windows may extend this
            to twice the time.
        min_measure_s: measure at least this long, so that several launches have the same precision.
        warmup_steps: minimum number of steps to discard after the first.
        max_warmup_s: end the warm-up after this many seconds even if the loader's queue has not settled.
        prune_below_per_s: end as ``pruned`` as soon as the rate's interval lies below this many samples per second;
            0 never prunes.
        prune_clock_mhz: the card's clock at which that rate was seen. A launch at a lower clock must be slower than
            that rate at its own clock. ``None`` if unknown.
        per_batch: of a script, the baseline's backward passes and updates per batch: what trains otherwise has failed.
            0 is not compared, and nothing is if this is ``None``.
        busy_cores: discard a window in which other processes used more than this many cores while none was idle, or
            used the card; ``None`` for no limit on either.
    """

    target_halfwidth: float = 0.02
    min_windows: int = 5
    min_window_s: float = 0.5
    max_measure_s: float = 20.0
    min_measure_s: float = 0.0
    warmup_steps: int = 2
    max_warmup_s: float = 30.0
    prune_below_per_s: float = 0.0
    prune_clock_mhz: float | None = None
    per_batch: tuple[float, float] | None = None
    busy_cores: float | None = None


class DeliveryPlan(Record):
    """How much of what a loader delivers is noted, for comparison with another launch.

    Attributes:
        seed: of the order of samples, the same in each launch that is compared.
        least, most: distinct batches of the first epoch, each of which is drawn twice; more than ``least`` only until
            `limit_s` seconds have passed. second: those of the next epoch.
        totals: batches of the first epoch of each data set, where known; those beyond are not noted.
        epochs: to wait for. wait_s: for the next one, once an epoch has ended: the script may evaluate.
    """

    seed: int = 0
    least: int = Field(default=4, gt=0)
    most: int = Field(default=16, gt=0)
    limit_s: float = 1.0
    second: int = Field(default=4, gt=0)
    totals: tuple[int, ...] = ()
    epochs: int = Field(default=2, gt=0)
    wait_s: float = 5.0


class CheckPlan(Record):
    """The parameters of a train_check launch.

    Attributes:
        store: folder with the saved weights and batches, absolute. The reference launch with `seed` 0 creates it; the
            others read it.
        steps: number of training steps; the saved batches are used in rotation.
        batches: number of batches to save.
        reference: this is one of the eager fp32 runs. It starts from weights of its own seed, unless the seed is 0.
        seed: 0 starts from the saved weights. Of a script, what its random numbers begin with, unless it seeds them.
        deliveries: what the loader of the configuration delivers is noted: of a script while it takes its steps, of a
            workload instead of steps.
    """

    store: str
    steps: int = Field(default=24, gt=0)
    batches: int = Field(default=4, gt=0)
    reference: bool = False
    seed: int = 0
    deliveries: DeliveryPlan | None = None


class HoldPlan(Record):
    """The parameters of a hold launch.

    Attributes:
        min_s, max_s: train at least and at most this long.
        settled_steps: memory has settled when its peak has not grown for this many steps, or for the second half of
            all steps if `max_s` allows fewer.
        sustain_s: CUDA: then train for this long at full speed, to measure the rate that the card holds.
    """

    min_s: float = 5.0
    max_s: float = 60.0
    settled_steps: int = Field(default=20, gt=0)
    sustain_s: float = 0.0


class HeatPlan(Record):
    """The parameters of a heat launch.

    Attributes:
        side: whether the device is compared, without a loader, or the loader, without a training.
        entrants: the configurations, at least two, that one training can be switched between, or that differ in their
            loaders alone. The first is the reference: it takes part in every round.
        turn_s: a turn has enough counted steps, or batches, to last at least this long, and at least one.
        even_steps: of a script, a turn has a multiple of this many steps: see `Measurement`.
        min_rounds, max_rounds: number of rounds. An entrant that is certainly behind drops out after any of them.
        all_rounds: nobody drops out, and as many rounds as possible are taken.
        max_s: end with the round after this many seconds of turns, including everything around them but first steps.
        wall_s: no turn begins later than this many seconds after the launch, except the reference's first; ``None``:
            no limit.
        settled: end when each ratio to the best is known within ± this fraction, 95 %.
        least_per_s: end when another round is expected to improve the choice of the best by less than this per second,
            in natural logarithms.
    """

    side: Side = "device"
    entrants: tuple[dict[str, Value], ...] = Field(min_length=2)
    turn_s: float = Field(default=0.2, gt=0)
    even_steps: int = Field(default=1, gt=0)
    min_rounds: int = Field(default=3, gt=1)
    max_rounds: int = Field(default=40, gt=1)
    all_rounds: bool = False
    max_s: float = 60.0
    wall_s: float | None = Field(default=None, gt=0)
    settled: float = 0.01
    least_per_s: float = Field(default=0.0, ge=0)

    @property
    def timeless(self) -> HeatPlan:
        """The plan without its allowed duration, which depends on the time that the search has left."""
        return self.model_copy(update={"wall_s": None})


class TrialSpec(Record):
    """Everything a child process needs to know. Written to ``spec.json`` before it starts.

    Attributes:
        launch: name of the launch inside the study, and of its folder.
        number: the Optuna trial's number; ``None`` for launches that are not trials.
        devices: contract names: ``("cpu",)``, ``("cuda:0",)``, ``("cuda:GPU-<uuid>",)`` or ``("cuda:MIG-<uuid>",)``.
        cores: to which its processes are pinned, ascending; empty: to none.
        ranks: processes that train together, each on a device of its own where there are several. rank: which of them
            this spec is for.
        exchanges: device_only: whether the ranks exchange gradients.
        env: variables the child must see when it is *loaded*; if they differ from the template's, a new one is started.
        entry: of earlier versions, always ``workload``.
        command: the script to run, whose training is measured; ``None`` runs the workload.
        memory_limit_bytes: enforced by a soft RLIMIT_DATA on a CPU, as a fraction of device memory on CUDA.
        first_sample: how many samples the study's earlier launches have read; it continues after them.
        repeats: number of the trial this one repeats after a transient failure, if any.
        check, hold, heat: plans of launches of those kinds. The configuration of a heat is that of its reference.
        keeps: of a script's probe: its script trains on when it is over, if it can, for launches that follow.
        follows: it may take place in a script that an earlier launch has kept, instead of one of its own.
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
    cores: tuple[int, ...] = ()
    ranks: int = Field(default=1, ge=1)
    rank: int = Field(default=0, ge=0)
    exchanges: bool = True
    env: dict[str, str] = Field(default_factory=dict)
    entry: str = "workload"
    command: CommandRef | None = None
    seed: int = 0
    first_sample: int = Field(default=0, ge=0)
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
    heat: HeatPlan | None = None
    keeps: bool = False
    follows: bool = False


class Turn(Record):
    """One turn of an entrant: counted steps in a row.

    Attributes:
        seconds: of the counted steps together, on CUDA by the device's clock. samples: in them.
        wait_s: in a script, how long these steps also waited for their loader.
    """

    steps: int
    samples: int
    seconds: float
    wait_s: float | None = None
    around: Surroundings | None = None


class _Ended(Record):
    """How a configuration's training ended, in a launch or in a heat.

    Attributes:
        phase: the phase it was in.
        cause: one sentence on what happened; ``None`` only when complete.
        advice: what the user could change, if anything.
        cannot_compile: the compilation failed for a reason that is this machine's and not the model's.
        refuses: the knob whose value something in the training refuses, whatever the other knobs.
    """

    status: TrialStatus
    phase: Phase | None = None
    cause: str | None = None
    advice: str | None = None
    cannot_compile: bool = False
    refuses: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_former(cls, data: Any) -> Any:
        # Versions before noted a refused precision so, which is `refuses` now: a study of theirs tries it once more.
        return {k: v for k, v in data.items() if k != "cannot_lower"} if isinstance(data, dict) else data


class HeatEntrant(_Ended):
    """What a heat saw of one configuration.

    Attributes:
        status: ``complete``, or ``pruned`` if it dropped out because it was certainly behind; otherwise what it failed
            with.
        turns: for each round, ``None`` where it took none.
        ratio, ratio_ci95: its rate on the heat's side relative to the reference's, and the 95 % interval of that;
            ``None`` without a turn in a round of the reference's.
        first_step_s: its very first step, in which its model is compiled.
        peak_bytes: device memory, its own; on a CPU an upper bound, because the process keeps what others have freed.
    """

    config: dict[str, Value]
    status: TrialStatus = TrialStatus.COMPLETE
    turns: tuple[Turn | None, ...] = ()
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    first_step_s: float | None = None
    peak_bytes: int | None = None


class Heat(Record):
    """Several configurations compared within one process. The first entrant is the reference.

    Attributes:
        side: of the training, what was compared.
        noise_sd: standard deviation of the logarithm of one turn's rate, relative to the others of its round.
        switch_s: seconds spent on switching, or on starting and ending loaders. ended: why it ended, in one clause.
    """

    side: Side = "device"
    entrants: tuple[HeatEntrant, ...]
    noise_sd: float
    startup_s: float
    switch_s: float
    measured_s: float
    ended: str

    @property
    def reference(self) -> HeatEntrant:
        """The entrant that ratios are relative to: the first, or the first of those that were left when it failed."""
        return next((e for e in self.entrants if e.ratio is not None), self.entrants[0])


class StudyHeat(Record):
    """A heat of a study.

    Attributes:
        number: counted from 1.
        after: number of trials that had ended when it began.
        wall_s: seconds of its launches together.
    """

    number: int
    after: int
    heat: Heat
    wall_s: float

    @property
    def title(self) -> str:
        """What it is called while it runs."""
        return heat_title(self.number, self.heat.side)


def heat_title(number: int, side: Side) -> str:
    """Return what a heat is called while it runs."""
    return f"heat {number}" if side == "device" else f"heat {number}, of the loader"


class TrainCheck(Record):
    """The course of a training from saved weights over saved batches.

    Attributes:
        losses: after each step, up to the first that was not finite (then `finite` is False). A step skipped by
            GradScaler is repeated, and its loss is not included.
        changed: fraction of the trainable tensors that differ from their initial values.
        scaler_skips: number of steps that GradScaler skipped because of an overflow.
        metric: what the workload's own says of the model after these steps; ``None`` if it has none.
        metric_lacks: why it could not be computed, as a clause.
        deliveries: what the loader has delivered, if that was to be noted.
    """

    losses: tuple[float, ...]
    finite: bool
    changed: float
    scaler_skips: int = 0
    metric: float | None = None
    metric_lacks: str | None = None
    deliveries: Deliveries | None = None


class Hold(Record):
    """The memory use of a training, compared with the device's memory.

    Attributes:
        steps, seconds: how long it trained.
        settled: the peak had stopped growing.
        peak_bytes: including evaluation and largest sample. CUDA: reserved by the allocator, since the first step.
        first_step_bytes: CUDA: the same up to the end of the first step.
        capacity_bytes: memory that was free on the device, or the memory limit.
        alloc_retries: CUDA only, since the first step.
        evaluated: how the evaluation pass was run, if it was: ``evaluate`` (the workload's own), ``eval`` (its loss in
            evaluation mode), ``train`` (its loss in training mode, without gradients).
        evaluation_per_s: samples per second of the computing in that pass, under ``no_grad``; ``None`` if not timed.
        inference_gain: what ``torch.inference_mode()`` makes of it, as a ratio; ``None`` if it was not timed, or fails.
        largest_bytes: size of the largest sample; ``None`` if all samples have the same shape.
        sustained_per_s: CUDA: samples per second after `seconds` of training, over `sustained_s`, without the turns of
            epochs. sm_clock_mhz: the card's clock at their end.
    """

    steps: int
    seconds: float
    settled: bool
    peak_bytes: int
    first_step_bytes: int | None = None
    capacity_bytes: int
    alloc_retries: int | None = None
    evaluated: str | None = None
    evaluation_per_s: float | None = None
    inference_gain: float | None = None
    largest_bytes: int | None = None
    sustained_per_s: float | None = None
    sustained_s: float = 0.0
    sm_clock_mhz: int | None = None

    @property
    def headroom(self) -> float:
        """Fraction of the capacity that remained free."""
        return 1 - self.peak_bytes / self.capacity_bytes


#: Steps that a script takes at its start until anything is seen of it, and which one that trains already does not.
UNSEEN_STEPS = 4


class TrialResult(_Ended):
    """The end of a launch, with its evidence. Written to ``result.json`` last, atomically.

    Attributes:
        exit_code: as in `os.waitstatus_to_exitcode`: negative for a signal.
        unclean_exit: the launch reported success and the process died afterwards.
        rate_seen_per_s: rate of a ``pruned`` launch.
        peak_bytes: peak device memory seen, for failures (a measurement has its own).
        phase_s: seconds spent in each phase entered. wall_s: from its beginning, which is at `began_s` of the machine's
            monotonic clock, to its end.
        rank: the rank that the cause refers to, of several.
        error_code: exit code of the autotune error that ended it, if one did.
        transient: the failure says nothing about the configuration and may not recur.
        waited_s: seconds the launch waited for the device to become idle before it began; not in `wall_s`.
        turn: of a heat that did not end by itself: whose turn it was, as an index into its entrants.
        samples_drawn: how many samples its loaders have read, or asked for; ``None`` if it could not tell.
        within: names the script that it took place in, which an earlier launch had started, if it had none of its own.
            Its measurement has that start-up.
        measurement: of a complete launch; of a pruned launch, what it had measured by then, if anything.
    """

    schema_version: int = SCHEMA_VERSION
    launch: str
    evidence: str | None = None
    exit_code: int | None = None
    unclean_exit: bool = False
    rate_seen_per_s: float | None = None
    peak_bytes: int | None = None
    phase_s: dict[str, float] = Field(default_factory=dict)
    began_s: float | None = None
    wall_s: float = 0.0
    rank: int = 0
    error_code: int | None = None
    transient: bool = False
    waited_s: float = 0.0
    turn: int | None = None
    samples_drawn: int | None = None
    within: str | None = None
    measurement: Measurement | None = None
    check: TrainCheck | None = None
    hold: Hold | None = None
    heat: Heat | None = None
    probe: Probe | None = None

    @property
    def alone_s(self) -> float:
        """Seconds that it takes as a launch of its own, which would have to start the script."""
        if self.within is None or self.measurement is None:
            return self.wall_s
        return self.wall_s + self.measurement.startup_s + UNSEEN_STEPS * self.measurement.mean_step_s


class Beat(Record):
    """One progress report, written by the child after a step or at the start of a phase.

    Attributes:
        at_s: the child's monotonic clock, which should run like the parent's.
        turn: in a heat, the entrant whose turn it is, as an index.
        disturbed: why the last window does not count, as a clause.
    """

    phase: Phase
    at_s: float | None = None
    step: int = 0
    rate_per_s: float | None = None
    loss: float | None = None
    memory_bytes: int | None = None
    turn: int | None = None
    disturbed: str | None = None


class Prediction(Record):
    """The sampler's expectation of a trial before it began.

    Attributes:
        rate_per_s: in the objective's unit, if that is not a rate. seconds: duration of the whole trial.
        peak_bytes: of device memory; ``None`` if it could not be predicted.
        why: a few words on why the trial was proposed.
    """

    rate_per_s: float
    seconds: float
    peak_bytes: float | None = None
    why: str = ""


class Trial(Record):
    """One finished trial, as the search stores it.

    Attributes:
        predicted: ``None`` if the proposer had no particular expectation.
        result: its measurement omits the per-step tuples; those are in the trial's folder.
        score: the objective's; only for a complete trial. further: those of further objectives.
    """

    number: int
    config: dict[str, Value]
    result: TrialResult
    score: float | None = None
    further: tuple[float, ...] = ()
    repeats: int | None = None
    predicted: Prediction | None = None

    @property
    def rate_per_s(self) -> float | None:
        """Samples per second: measured if complete, observed if pruned."""
        measurement = self.result.measurement
        return measurement.samples_per_s if measurement else self.result.rate_seen_per_s
