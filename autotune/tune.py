"""The whole way of one search: probe, data, space, study, verification, profile.

The CLI, and whoever calls `tune`, come through here. Nothing is printed; an `Observer` is told.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import data as data_sets
from autotune.catalog import find_objective, find_workload
from autotune.clock import Clock, SystemClock, timestamp
from autotune.device import Gpu, fingerprint, gpus, has_nvidia_device
from autotune.errors import (
    AutotuneError,
    InfeasibleError,
    InterruptedSearch,
    MachineError,
    UnknownNameError,
    UsageError,
    WorkloadError,
)
from autotune.files import exclusive_lock, sweep_temporaries, write_atomic
from autotune.handover import outcome_of, profile_of
from autotune.host import read_host
from autotune.launcher import Launcher, ProcessLauncher, end_survivors
from autotune.layout import StudyFiles
from autotune.observer import Observer, Silent
from autotune.profile import Profile, read
from autotune.profile import write as write_profile
from autotune.records import DataRef, Outcome, Probe, StudySpec, TrialResult, TrialStatus, Value, WorkloadRef
from autotune.scoring import Scorer
from autotune.search.sampler import SAMPLERS
from autotune.space import Space, SpaceRequest, build_space, parse_value
from autotune.study.budget import Budget
from autotune.study.history import History
from autotune.study.launches import Conditions, Launches
from autotune.study.loop import Study
from autotune.study.request import read_request, write_request
from autotune.verify import verify
from autotune.workload import DEFAULT_BATCH_SIZE

DEFAULT_STUDIES = Path("studies")
DEFAULT_BUDGET_S = 600.0
#: A pass without data, by which a workload says which data it wants.
_NO_DATA = DataRef(kind="none")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
    def real(
        cls, observer: Observer | None = None, stop: Callable[[], int | None] = lambda: None
    ) -> Environment:
        """This machine, now."""
        clock = SystemClock()
        return cls(observer or Silent(), clock, stop, lambda mark: ProcessLauncher(mark, clock))


def tune(
    model: str,
    *,
    data: str = "generated",
    args: Mapping[str, str] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    studies_dir: str | os.PathLike[str] = DEFAULT_STUDIES,
    study: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    image_size: int | None = None,
    observer: Observer | None = None,
) -> Profile:
    """Search for the fastest way to train ``model`` on this machine and return its profile.

    Call it from the main thread. Everything else that the command line offers is in `new_study` and `search`.

    Args:
        model: a catalog name, a torchvision classification model, a file, or ``package.module:NAME``.
        data: ``generated``, ``synthetic``, or a folder.
        budget_s: seconds the search may run.

    Raises:
        AutotuneError: see `autotune.errors`.
    """
    spec = StudySpec(
        name=study or "",
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model=model,
        args=dict(args or {}),
        data=data,
        budget_s=budget_s,
        device=device,
        batch_size=batch_size,
        image_size=image_size,
    )
    files = search(spec, Path(studies_dir), Environment.real(observer))
    return read(files.profile)


def search(spec: StudySpec, studies: Path, env: Environment) -> StudyFiles:
    """Make a new study and search. With an empty ``spec.name`` it gets a fresh numbered one.

    Raises:
        AutotuneError: see `autotune.errors`. What was measured until then is in the study's folder.
    """
    _require_linux()
    ref = check_request(spec)
    files = _new_folder(spec, ref, studies)
    spec = spec.model_copy(update={"name": files.name})
    write_request(files, spec)
    _run(files, spec, ref, env)
    return files


def resume(files: StudyFiles, env: Environment) -> None:
    """Go on with a study where it stands; a finished one is left as it is.

    Raises:
        ResumeRefusedError: the machine or the space is another now.
        AutotuneError: see `autotune.errors`.
    """
    _require_linux()
    spec = read_request(files)
    _run(files, spec, check_request(spec), env)


def find_study(name: str, studies: Path) -> StudyFiles:
    """A study by its name, or by its folder's path.

    Raises:
        UnknownNameError: there is none.
    """
    for folder in (studies / name, Path(name)):
        if (folder / "study.yaml").is_file():
            return StudyFiles(folder.absolute())
    known = [f.parent.name for f in studies.glob("*/study.yaml")]
    advice = None if known else f"{studies} holds no study yet; --studies-dir names another folder."
    raise UnknownNameError("study", name, known, advice=advice)


def check_request(spec: StudySpec) -> WorkloadRef:
    """Everything about a request that can be refused before a folder is made or a process started.

    Raises:
        UsageError: an unknown name, or a value that cannot be right anywhere.
        WorkloadError: the data folder is not there, or is none.
    """
    ref = find_workload(spec.model, spec.args)
    find_objective(spec.objective)
    if spec.sampler not in SAMPLERS:
        raise UnknownNameError("sampler", spec.sampler, SAMPLERS)
    request_for_space(spec, None)
    if spec.device != "auto" and not re.fullmatch(r"cpu|cuda(:\d+|:GPU-[0-9a-fA-F-]+)?", spec.device):
        raise UsageError(f"unknown device {spec.device!r}", advice="choices: auto, cpu, cuda, cuda:N, cuda:GPU-….")
    if spec.data not in ("generated", "synthetic") and not Path(spec.data).expanduser().is_dir():
        raise WorkloadError(
            f"there is no folder {spec.data!r}",
            advice="--data takes a folder with one folder of images per class, or generated, or synthetic.",
        )
    return ref


def request_for_space(spec: StudySpec, knobs: Mapping[str, tuple[Value, ...]] | None) -> SpaceRequest:
    """``--set``, ``--fix`` and ``--baseline`` with their values parsed.

    Args:
        knobs: the workload's own, once the probe knows them; before that their values stay text.

    Raises:
        UsageError: an unknown knob or value.
    """
    return SpaceRequest(
        narrowed={n: tuple(parse_value(n, text, knobs) for text in texts) for n, texts in spec.narrowed.items()},
        fixed={n: parse_value(n, text, knobs) for n, text in spec.fixed.items()},
        baseline={n: parse_value(n, text, knobs) for n, text in spec.baseline.items()},
        batch_size=spec.batch_size,
    )


def _as_typed(files: StudyFiles) -> str:
    """A study as `find_study` takes it from the current folder."""
    return files.name if files.folder.parent == DEFAULT_STUDIES.absolute() else str(files.folder)


def _require_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise MachineError(
            f"autotune runs on Linux only, and this is {sys.platform}",
            advice="tune on the Linux machine that you train on; profiles can be read anywhere.",
        )


def _new_folder(spec: StudySpec, ref: WorkloadRef, studies: Path) -> StudyFiles:
    try:
        studies.mkdir(parents=True, exist_ok=True)
        if not spec.name:
            number = 1
            while True:
                with contextlib.suppress(FileExistsError):
                    (studies / f"{ref.name}-{number}").mkdir()
                    return StudyFiles((studies / f"{ref.name}-{number}").absolute())
                number += 1
        if not _NAME.fullmatch(spec.name):
            raise UsageError(
                f"{spec.name!r} cannot name a study", advice="use letters, digits, dots, dashes and underscores."
            )
        try:
            (studies / spec.name).mkdir()
        except FileExistsError:
            raise UsageError(
                f"study {spec.name!r} exists already",
                advice=f"`autotune resume {spec.name}` goes on with it; another --study starts a new one.",
            ) from None
        return StudyFiles((studies / spec.name).absolute())
    except OSError as error:
        raise MachineError(
            f"cannot make a study in {studies}: {error.strerror}", advice="--studies-dir names another folder."
        ) from error


def _run(files: StudyFiles, spec: StudySpec, ref: WorkloadRef, env: Environment) -> None:
    with exclusive_lock(files.lock) as free:
        if not free:
            raise UsageError(f"study {files.name!r} is running already", advice="wait for it, or end it.")
        if files.outcome.exists() and files.profile.exists():
            return
        sweep_temporaries(files.folder)
        end_survivors(spec.mark, env.clock)
        launcher = env.launcher(spec.mark)
        scorer = Scorer(find_objective(spec.objective))
        try:
            _Search(files, spec, ref, env, launcher, scorer).run()
        except InterruptedSearch as interrupted:
            interrupted.advice = f"everything measured is kept; go on with: autotune resume {_as_typed(files)}"
            raise
        finally:
            launcher.close()
            scorer.close()
            env.observer.ends()


class _Search:
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

    def run(self) -> None:
        spec, observer = self.spec, self.env.observer
        conditions, gpu = self._first_conditions()
        observer.begins(spec, _headline(spec, self.ref, conditions, None))
        conditions, probe = self._probe(conditions)
        observer.begins(spec, _headline(spec, self.ref, conditions, probe))
        host = read_host()
        space = build_space(probe, host, request_for_space(spec, probe.workload_knobs))
        history = History(self.files, space)
        print_ = fingerprint(probe, host, gpu, conditions.data)
        history.bind(print_)
        launches = self._launches(conditions)
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
        )
        study.recover()
        stopped = study.run()
        observer.says(stopped)
        baseline = study.baseline
        if baseline is None:
            raise InfeasibleError(
                f"{stopped} before the baseline was measured", advice="give it more with --budget."
            )
        verified = verify(space, study.complete, baseline, launches, self.scorer, observer, self.env.stop)
        outcome = outcome_of(
            self.files,
            spec,
            probe,
            host.cpu_model,
            conditions,
            verified,
            history.trials,
            elapsed_s=self.budget.spent_s,
            measured_s=launches.measured_s,
            data_s=self.data_s,
            stopped=stopped,
        )
        measurement = baseline.result.measurement
        epoch = measurement.epoch_samples if measurement else None
        profile = profile_of(outcome, spec, probe, print_, conditions, self.ref, epoch)
        write_profile(profile, self.files.profile)
        # The outcome is what says that the study is done: it comes last.
        write_atomic(self.files.outcome, outcome.model_dump_json(indent=1))
        self.budget.save()

    def _launches(self, conditions: Conditions) -> Launches:
        return Launches(
            self.files,
            conditions,
            self.budget,
            self.launcher,
            self.env.observer,
            lambda: self.env.stop() is not None,
        )

    def _first_conditions(self) -> tuple[Conditions, Gpu | None]:
        device, gpu = resolve_device(self.spec.device)
        env = {} if gpu is None or not device.startswith("cuda:GPU-") else {"CUDA_VISIBLE_DEVICES": gpu.uuid}
        conditions = Conditions(
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

    def _probe(self, conditions: Conditions) -> tuple[Conditions, Probe]:
        """Ask the workload which data it wants, get that, and look at the workload with it."""
        given = self.spec.data not in ("generated", "synthetic")
        if given:
            conditions = replace(conditions, data=DataRef(kind="folder", path=str(_absolute(self.spec.data))))
        elif self.spec.data == "synthetic":
            conditions = replace(conditions, data=data_sets.synthetic())
        probe = self._one_probe("probe-1", conditions)
        if probe.wants_data is not None and conditions.data.kind != "synthetic":
            if probe.wants_data != "images":
                raise WorkloadError(
                    f"{self.ref.name} asks for DATA = {probe.wants_data!r}", advice='the one set made here is "images".'
                )
            data = data_sets.folder(_absolute(self.spec.data)) if given else self._generate()
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

    def _one_probe(self, name: str, conditions: Conditions) -> Probe:
        result = self._launches(conditions).probe(name)
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
            self.data_s = self.env.clock.now() - began
            self.budget.resume()


def resolve_device(asked: str) -> tuple[str, Gpu | None]:
    """The contract name of the device to use, and what NVML says of it.

    ``auto`` takes the first card where there is one; whether torch can use it is the probe's to find out, and no
    answer of its falls back to the CPU silently.

    Raises:
        MachineError: a card is asked for and there is none, or NVML does not answer.
    """
    if asked == "cpu" or (asked == "auto" and not has_nvidia_device()):
        return "cpu", None
    cards = gpus()
    if not isinstance(cards, list):
        if asked == "auto" and not cards.driver_present:
            return "cpu", None
        raise MachineError(f"the GPU does not answer: {cards.reason}", advice="--device cpu leaves it alone.")
    name = "cuda:0" if asked in ("auto", "cuda") else asked
    wanted = name.removeprefix("cuda:")
    for card in cards:
        if wanted in (str(card.index), card.uuid):
            return name, card
    raise MachineError(f"there is no {name}", advice=f"cards here: {len(cards)}; `autotune doctor` lists them.")


def _probe_error(ref: WorkloadRef, result: TrialResult) -> AutotuneError:
    cause = result.cause or f"ended as {result.status}"
    kinds: dict[int | None, type[AutotuneError]] = {2: UsageError, 5: MachineError}
    kind = kinds.get(result.error_code, WorkloadError)
    message = cause if result.error_code else f"{ref.name} cannot be used: {cause}"
    return kind(message, advice=result.advice, detail=None if result.error_code else result.evidence)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _headline(spec: StudySpec, ref: WorkloadRef, conditions: Conditions, probe: Probe | None) -> str:
    parts = [ref.name, f"on {conditions.device}"]
    if probe is not None:
        parts.append(f"batch {conditions.batch_size}")
        if conditions.image_size is not None:
            chosen = "" if spec.image_size else f" (the default on {'a CPU' if probe.device == 'cpu' else 'a GPU'})"
            parts.append(f"images of {conditions.image_size} px{chosen}")
        parts.append(f"data {conditions.data.kind if conditions.data.kind != 'none' else 'of its own'}")
    return ", ".join(parts)


def load_outcome(files: StudyFiles) -> Outcome | None:
    """The outcome of a finished study, or ``None`` if it is not finished."""
    try:
        return Outcome.model_validate_json(files.outcome.read_text())
    except FileNotFoundError:
        return None


def make_space(spec: StudySpec, env: Environment, folder: Path) -> Space:
    """The legal space for a request on this machine, without a study: one probe, nothing kept.

    Args:
        folder: a temporary folder for the probe's files.
    """
    ref = check_request(spec)
    launcher = env.launcher(spec.mark)
    scorer = Scorer(find_objective(spec.objective))
    try:
        search_ = _Search(StudyFiles(folder), spec, ref, env, launcher, scorer)
        _, probe = search_._probe(search_._first_conditions()[0])
        return build_space(probe, read_host(), request_for_space(spec, probe.workload_knobs))
    finally:
        launcher.close()
        env.observer.ends()
