"""One run of one study, from the probe to the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.clock import Clock, SystemClock
from autotune.data import sets as data_sets
from autotune.errors import (
    AutotuneError,
    InfeasibleError,
    InterruptedSearch,
    MachineError,
    UsageError,
    WorkloadError,
)
from autotune.files import write_atomic
from autotune.launcher import Launcher, ProcessLauncher
from autotune.layout import StudyFiles
from autotune.machine import page_cache
from autotune.machine.gpu import Gpu, fingerprint
from autotune.machine.host import read_host
from autotune.observer import Observer, Silent
from autotune.profile import write as write_profile
from autotune.records import Config, DataRef, Host, Probe, StudySpec, Trial, TrialResult, TrialStatus, WorkloadRef
from autotune.scoring import Scorer
from autotune.search.outcome import outcome_of, profile_of
from autotune.search.request import absolute, request_for_space, resolve_device
from autotune.search.warm_start import won_elsewhere
from autotune.space import build_space
from autotune.study.budget import Budget
from autotune.study.history import History
from autotune.study.launches import BUSY_FRACTION, LaunchConditions, Launches
from autotune.study.loop import Study
from autotune.study.tables import LaunchTables
from autotune.verify import Final, prove
from autotune.workload import DEFAULT_BATCH_SIZE

#: Data larger than this part of the free memory is not read beforehand.
CACHE_FRACTION = 0.5
#: Nor is reading beforehand worth more than this.
WARM_S = 60.0
#: A pass without data, by which a workload says which data it wants.
_NO_DATA = DataRef(kind="none")


@dataclass(frozen=True)
class Environment:
    """What a search touches of the world, as parameters.

    Attributes:
        stop: the number of the signal that asks the search to end, or ``None``. Asked a few times a second.
        launcher: makes the launcher of a study, from the study's mark.
    """

    observer: Observer
    clock: Clock
    stop: Callable[[], int | None]
    launcher: Callable[[str], Launcher]

    @classmethod
    def real(cls, observer: Observer | None = None, stop: Callable[[], int | None] = lambda: None) -> Environment:
        """This machine, now."""
        clock, told = SystemClock(), observer or Silent()
        return cls(told, clock, stop, lambda mark: ProcessLauncher(mark, clock, on_wait=told.says))


class Search:
    """One run of one study, from the probe to the profile."""

    def __init__(
        self,
        files: StudyFiles,
        spec: StudySpec,
        ref: WorkloadRef,
        env: Environment,
        launcher: Launcher,
        scorer: Scorer,
    ) -> None:
        self.files = files
        self.spec = spec
        self.ref = ref
        self.env = env
        self.launcher = launcher
        self.scorer = scorer
        self.budget = Budget(files, spec.budget_s, env.clock)
        self.data_s = 0.0

    def run(self, first: Sequence[Config] = ()) -> None:
        """Search and prove.

        Args:
            first: configurations to try before others, in a new study.
        """
        spec, observer = self.spec, self.env.observer
        conditions, gpu = self.first_conditions()
        observer.begins(spec, _headline(spec, self.ref, conditions, None))
        conditions, probe = self.probe(conditions)
        conditions = self.warmed(conditions)
        self.tell(conditions, probe)
        host = read_host()
        space = build_space(probe, host, request_for_space(spec, probe.workload_knobs))
        history = History(self.files, space)
        print_ = fingerprint(probe, host, gpu, conditions.data)
        history.bind(print_)
        if not history.has_plan:
            first = first or won_elsewhere(self.files, spec, print_, space, observer.says)
            history.plan(first, capacity_of(spec, probe, host))
        launches = self.launches(conditions)
        study = Study(
            space,
            history,
            launches,
            self.scorer,
            observer,
            sampler=spec.sampler,
            seed=spec.seed,
            trials=spec.trials,
            # Half the best's rate says nothing about another objective.
            prune=spec.objective == "throughput",
            stop=self.env.stop,
            capacity_bytes=history.capacity_bytes,
            first=history.planned,
        )
        study.recover()
        # Probes ran before there was a database, and a kill may have come between a result and its row.
        LaunchTables(self.files).rebuild()
        stopped = study.run()
        observer.says(stopped)
        baseline = study.baseline
        if baseline is None:
            raise _no_baseline(stopped, history.trials)
        final = Final(space, launches, self.scorer, observer, self.env.stop, by_rate=spec.objective == "throughput")
        proof = prove(final, study.ranked, baseline, study.noise)
        outcome = outcome_of(
            self.files,
            spec,
            probe,
            host.cpu_model,
            conditions,
            proof,
            history.trials,
            elapsed_s=self.budget.spent_s,
            measured_s=launches.measured_s,
            data_s=self.data_s,
            wait_s=self.budget.waited_s,
            stopped=stopped,
        )
        measurement = baseline.result.measurement
        epoch = measurement.epoch_samples if measurement else None
        profile = profile_of(outcome, spec, probe, print_, conditions, self.ref, epoch)
        write_profile(profile, self.files.profile)
        # The outcome is what says that the study is done: it comes last.
        write_atomic(self.files.outcome, outcome.model_dump_json(indent=1))
        self.budget.save()

    def tell(self, conditions: LaunchConditions, probe: Probe) -> None:
        """Say what is going to be measured."""
        self.env.observer.begins(self.spec, _headline(self.spec, self.ref, conditions, probe))

    def launches(self, conditions: LaunchConditions) -> Launches:
        """Starts launches under these conditions, on the budget's time."""
        return Launches(
            self.files,
            conditions,
            self.budget,
            self.launcher,
            self.env.observer,
            lambda: self.env.stop() is not None,
            busy_cores=None if self.spec.allow_busy else BUSY_FRACTION * read_host().cores,
        )

    def first_conditions(self) -> tuple[LaunchConditions, Gpu | None]:
        """What can be said before the workload was asked, and the card that it will run on."""
        device, gpu = resolve_device(self.spec.device)
        # By UUID: PyTorch's own order of cards is not the driver's.
        env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu.uuid}
        conditions = LaunchConditions(
            workload=self.ref,
            data=_NO_DATA,
            device=device,
            batch_size=self.spec.batch_size or DEFAULT_BATCH_SIZE,
            image_size=self.spec.image_size,
            seed=self.spec.seed,
            worker_start_method="fork",
            memory_limit_bytes=self.spec.memory_limit_bytes,
            env=env,
        )
        return conditions, gpu

    def probe(self, conditions: LaunchConditions) -> tuple[LaunchConditions, Probe]:
        """Ask the workload which data it wants, get that, and look at the workload with it."""
        given = self.spec.data not in ("generated", "synthetic")
        if given:
            conditions = replace(conditions, data=DataRef(kind="folder", path=str(absolute(self.spec.data))))
        elif self.spec.data == "synthetic":
            conditions = replace(conditions, data=data_sets.synthetic())
        probe = self._one_probe("probe-1", conditions)
        if probe.wants_data not in (None, "images"):
            raise WorkloadError(
                f"{self.ref.name} asks for DATA = {probe.wants_data!r}", advice='the one set made here is "images".'
            )
        if probe.wants_data is not None and not conditions.data.identity:
            data = data_sets.folder(absolute(self.spec.data)) if given else self._generate()
            conditions = replace(conditions, data=data)
            probe = self._one_probe("probe-2", conditions)
        image_size = conditions.image_size or (
            probe.cpu_image_size if probe.device == "cpu" else probe.default_image_size
        )
        batch_size = self.spec.batch_size or probe.default_batch_size
        return replace(
            conditions,
            image_size=image_size,
            batch_size=batch_size,
            worker_start_method=probe.worker_start_method,
            workload=self.ref.model_copy(update={"sha256": probe.workload_sha256}),
        ), probe

    def warmed(self, conditions: LaunchConditions) -> LaunchConditions:
        """The same with the data's files read once, so that the first launch does not read slower than the last."""
        data = conditions.data
        if data.path is None:
            return conditions
        # A cache that fills all of memory would be thrown out again by the training itself.
        limit = int(CACHE_FRACTION * read_host().available_bytes)
        self.budget.pause()
        began = self.env.clock.now()
        try:
            state = page_cache.warm(Path(data.path), limit_bytes=limit, limit_s=WARM_S, clock=self.env.clock)
        finally:
            self.data_s += self.env.clock.now() - began
            self.budget.resume()
        if state == "cold":
            self.env.observer.says(
                "the data does not fit into the page cache: its files may be read faster by one launch than by another"
            )
        return replace(conditions, data=data.model_copy(update={"page_cache": state}))

    def _one_probe(self, name: str, conditions: LaunchConditions) -> Probe:
        result = self.launches(conditions).probe(name)
        signal_number = self.env.stop()
        if signal_number is not None:
            raise InterruptedSearch(signal_number)
        if result.probe is None or result.status is not TrialStatus.COMPLETE:
            raise _probe_error(self.ref, result)
        return result.probe

    def _generate(self) -> DataRef:
        observer = self.env.observer

        def progress(done: int, total: int) -> None:
            observer.data_progress(done, total)
            signal_number = self.env.stop()
            if signal_number is not None:
                raise InterruptedSearch(signal_number)

        # Made once for all studies of this user: not this search's seconds.
        self.budget.pause()
        began = self.env.clock.now()
        try:
            return data_sets.ensure_generated(
                processes=read_host().cores, on_progress=progress, on_warning=observer.says, clock=self.env.clock
            )
        finally:
            self.data_s += self.env.clock.now() - began
            self.budget.resume()


def capacity_of(spec: StudySpec, probe: Probe, host: Host) -> int | None:
    """Device memory that a training may use."""
    own = probe.device_memory_bytes if probe.device != "cpu" else host.available_bytes
    known = [limit for limit in (spec.memory_limit_bytes, own) if limit is not None]
    return min(known, default=None)


def _no_baseline(stopped: str, trials: Sequence[Trial]) -> AutotuneError:
    """Why a search ends with nothing to compare with."""
    disturbed = next((t.result for t in reversed(trials) if t.result.transient and t.result.cause), None)
    if disturbed is not None:
        return MachineError(f"{stopped} before the baseline was measured: {disturbed.cause}", advice=disturbed.advice)
    return InfeasibleError(
        f"{stopped} before the baseline was measured", advice="start a new search with a larger --budget."
    )


def _probe_error(ref: WorkloadRef, result: TrialResult) -> AutotuneError:
    cause = result.cause or f"ended as {result.status}"
    kinds: dict[int | None, type[AutotuneError]] = {2: UsageError, 5: MachineError}
    kind = kinds.get(result.error_code, WorkloadError)
    message = cause if result.error_code else f"{ref.name} cannot be used: {cause}"
    return kind(message, advice=result.advice, detail=None if result.error_code else result.evidence)


def _headline(spec: StudySpec, ref: WorkloadRef, conditions: LaunchConditions, probe: Probe | None) -> str:
    parts = [ref.name, f"on {conditions.device}"]
    if probe is not None:
        parts.append(f"batch {conditions.batch_size}")
        if conditions.image_size is not None:
            chosen = "" if spec.image_size else f" (the default on {'a CPU' if probe.device == 'cpu' else 'a GPU'})"
            parts.append(f"images of {conditions.image_size} px{chosen}")
        parts.append(f"data {conditions.data.kind if conditions.data.kind != 'none' else 'of its own'}")
    return ", ".join(parts)
