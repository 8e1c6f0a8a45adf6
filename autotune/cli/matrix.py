"""The file of ``autotune submit FILE.yaml``, and what to do with each of its cells."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from autotune.base.errors import AutotuneError, UnknownNameError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import ENDED, Fingerprint, JobRequest, JobRow, JobState, StudySpec
from autotune.cli.job_request import CALL_OPTIONS, QUEUES, option_words, request_of
from autotune.cli.options import flag, read_yaml
from autotune.cluster.slurm_queue import Allocation
from autotune.profile import Profile
from autotune.profile.in_force import Row, Slot, has_default_size, on_hardware
from autotune.profile.schema import shown
from autotune.report.listing import gain_text, stale_text
from autotune.space.formatting import model_name
from autotune.study.request import read_request

# The file of ``autotune submit FILE.yaml``: a matrix of models × targets × batch sizes, each cell a search.
#
#     defaults: {data: /data/images, studies-dir: /shared/studies}
#     models:
#       - resnet50
#       - {model: mine.py, arg: {depth: 4}, budget: 1h}
#     targets:
#       here: {}
#       a100: {to: slurm, partition: gpu, gres: "gpu:a100:1", time: 2h}
#     batches: [64, 128]
#
# Without targets or batches, each of the models (or ``jobs``, which says the same) is one search. Options are those of
# ``autotune submit``. A target's options win over its model's, and those over the defaults.


_KEYS = ("defaults", "models", "jobs", "targets", "batches")
_AGAIN = "see the example in the documentation of clusters."
#: A target's name becomes part of a study's name.
_TARGET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
#: Options that name a single job, or that follow from a cell's place: the reason why each is refused.
_OURS = {
    "study": "its study is named by its content",
    **dict.fromkeys(("dry_run", "again", "state_dir", "json"), "it concerns the whole file"),
}
#: Options of which a search has one.
_NAMED = ("model", "script", "replay")
#: Options of a model that are shown only if nothing else distinguishes it from the others.
_APART = ("model", "script", "data", "budget")
#: Options that only a target has.
_TARGETS = ("to", "hardware")
Place = tuple[str | int, ...]
#: Options by name, each with its place in the file and its value.
Options = dict[str, tuple[Place, Any]]


@dataclass(frozen=True)
class Cell:
    """One search of a matrix.

    Attributes:
        number: index of the model in the list. model, target: their names in the file.
        more: the model's options as text, except those that are often unique to it (file, data and budget), which are
            in ``further``.
        batch: the batch size to keep; ``None`` if it is searched.
        to: the queue; ``None`` if the target names none. hardware: a part of the name of the target's GPU or CPU, if
            the target gives one.
        words: the words of its command line, after ``autotune submit``.
        line: line of its model in the file.
    """

    number: int
    model: str
    more: str
    further: str
    target: str
    batch: int | None
    to: str | None
    hardware: str | None
    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Matrix:
    """The cells of a file, by model, then batch, then target."""

    path: Path
    targets: tuple[str, ...]
    cells: tuple[Cell, ...]


def read_matrix(path: Path, known: Collection[str], repeatable: Collection[str]) -> Matrix:
    """Read a matrix.

    Args:
        known: the options of a job, as typed. repeatable: those that can have several values.

    Raises:
        UsageError: the file cannot be read or is malformed; the message names the line.
    """
    text, data = read_yaml(path, "matrix", _AGAIN)
    node = YAML(typ="safe", pure=True).compose(text)
    lines = dict(_places(node)) if node is not None else {}
    return _Reading(path, lines, known, repeatable).matrix(data)


def _places(node: Node, at: Place = ()) -> Iterator[tuple[Place, int]]:
    """Yield the place of every key and item, with its line."""
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield (*at, key.value), key.start_mark.line + 1
            yield from _places(value, (*at, key.value))
    elif isinstance(node, SequenceNode):
        for i, value in enumerate(node.value):
            yield (*at, i), value.start_mark.line + 1
            yield from _places(value, (*at, i))


class _Reading:
    """Reads one file, given the line of each place in it."""

    def __init__(
        self, path: Path, lines: Mapping[Place, int], known: Collection[str], repeatable: Collection[str]
    ) -> None:
        self._path = path
        self._lines = lines
        self._known = known
        self._repeatable = repeatable

    def matrix(self, data: Any) -> Matrix:
        if not isinstance(data, dict):
            raise UsageError(f"{self._path} has no models", advice=_AGAIN)
        for name in data:
            if name not in _KEYS:
                self._refuse((name,), UnknownNameError("key", str(name)[:60], _KEYS))
        listed = [name for name in ("models", "jobs") if name in data]
        if len(listed) != 1 or not data[listed[0]]:
            problem = "has both models and jobs, which say the same" if len(listed) > 1 else "has no models"
            raise UsageError(f"{self._path} {problem}", advice=_AGAIN)
        defaults = self._options(data.get("defaults") or {}, ("defaults",), self._known)
        batches = self._batches(data.get("batches"))
        models = self._models(data[listed[0]], listed[0])
        targets = self._targets(data["targets"]) if "targets" in data else {"here": {}}
        cells = []
        for place, model in models:
            for batch in batches:
                for target, options in targets.items():
                    merged = {**defaults, **model, **options}
                    cells.append(self._cell(merged, model, place, target, batch))
        return Matrix(self._path, tuple(targets), tuple(cells))

    def _cell(self, given: Options, model: Options, at: Place, target: str, batch: int | None) -> Cell:
        for name in ("batch_size", "keep_batch_size") if batch is not None else ():
            if name in given:
                self._refuse(given[name][0], f"{name.replace('_', '-')} stands beside batches, which say the same")
        words: list[str] = []
        for name, (place, value) in given.items():
            if name not in _TARGETS:
                try:
                    words += option_words(name, value, self._repeatable)
                except UsageError as error:
                    self._refuse(place, error)
        if batch is not None:
            words += [flag("batch_size"), str(batch), flag("keep_batch_size")]
        values = {name: value for name, (_, value) in given.items()}
        named = next((name for name in _NAMED if values.get(name)), None)
        if named is None:
            self._refuse(at, "a model has a name", advice="write `- resnet50` or `- {model: mine.py, …}`.")
        own_batch = values.get("batch_size")
        if values.get("keep_batch_size") and type(own_batch) is int:
            batch = own_batch
        return Cell(
            number=int(at[1]),
            model=str(values[named]) if named == "model" else Path(str(values[named])).name.split(".")[0],
            more=", ".join(_said(name, value) for name, (_, value) in model.items() if name not in _APART),
            further=", ".join(
                _said(name, value)
                for name, (_, value) in model.items()
                if name in _APART and (name != "model" or value != model_name(str(value)))
            ),
            target=target,
            batch=batch,
            to=values.get("to"),
            hardware=values.get("hardware"),
            words=tuple(words),
            line=self._line(at),
        )

    def _models(self, data: Any, listed: str) -> list[tuple[Place, Options]]:
        if not isinstance(data, list):
            self._refuse((listed,), f"{listed} must be a list", advice="write `- resnet50`, a line for each.")
        models: list[tuple[Place, Options]] = []
        for i, item in enumerate(data):
            at: Place = (listed, i)
            models.append((at, self._options({"model": item} if isinstance(item, str) else item, at, self._known)))
        return models

    def _targets(self, data: Any) -> dict[str, Options]:
        if not isinstance(data, dict) or not data:
            self._refuse(("targets",), "targets must have names", advice="write `here: {}`, a line for each.")
        targets = {}
        for name, options in data.items():
            at = ("targets", name)
            if not isinstance(name, str) or not _TARGET.fullmatch(name):
                self._refuse(at, f"{shown(name)} cannot name a target", advice="use letters, digits, dots and dashes.")
            targets[name] = self._options(options or {}, at, [*self._known, *map(flag, _TARGETS)])
            for key in _TARGETS:
                place, value = targets[name].get(key, (at, ""))
                if not isinstance(value, str):
                    self._refuse(place, f"{key} must be text, not {shown(value)}")
            place, queue = targets[name].get("to", (at, QUEUES[0]))
            if queue not in QUEUES:
                self._refuse(place, UnknownNameError("queue", queue, QUEUES))
        return targets

    def _batches(self, data: Any) -> Sequence[int | None]:
        if data is None:
            return [None]
        if not isinstance(data, list) or not data:
            self._refuse(("batches",), "batches must be a list of batch sizes")
        for i, batch in enumerate(data):
            if type(batch) is not int or batch < 1:
                self._refuse(("batches", i), f"a batch size is a whole number above zero, not {shown(batch)}")
        return list(dict.fromkeys(data))

    def _options(self, data: Any, at: Place, known: Collection[str]) -> Options:
        if not isinstance(data, dict):
            self._refuse(at, f"{shown(at[-1], quoted=False)} must be options with their values, not {shown(data)}")
        options: Options = {}
        for name, value in data.items():
            option = str(name).replace("-", "_")
            # A model given as a bare name has no place of its own for the key.
            place = (*at, name) if (*at, name) in self._lines else at
            if option in _OURS:
                self._refuse(place, f"{shown(name, quoted=False)} cannot stand in a file: {_OURS[option]}")
            if flag(option) not in known:
                self._refuse(
                    place, UnknownNameError("option", str(name)[:60], [word.removeprefix("--") for word in known])
                )
            options[option] = (place, value)
        return options

    def _line(self, place: Place) -> int:
        while place and place not in self._lines:
            place = place[:-1]
        return self._lines.get(place, 1)

    def _refuse(self, place: Place, why: str | AutotuneError, advice: str | None = None) -> NoReturn:
        advised = advice or (why.advice if isinstance(why, AutotuneError) else None)
        raise UsageError(f"{self._path}, line {self._line(place)}: {why}", advice=advised)


def _said(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return name if value is True else f"{name}={value}"


# The cells of a matrix: what each requests, which profile it has, and whether to queue it.


ENDINGS = (".yaml", ".yml")
#: Digits of the hash that distinguishes a cell's study from others.
_DIGITS = 8
#: Fields of a request that a profile records, or that do not change what is searched for. Whether any other field is
#: the same shows only in the study's name.
_TOLD = frozenset(
    {
        *("name", "mark", "created", "model", "args", "data", "objective", "device", "batch_size", "image_size"),
        *("budget_s", "trials", "sampler", "seed", "allow_busy", "keep_batch_size", "ranks", "storage"),
    }
)


@dataclass(frozen=True)
class Asked:
    """A cell with its request.

    Attributes:
        to: the queue. study: name of its study, which identifies its content; repeated searches append a number.
    """

    cell: Cell
    to: str
    request: JobRequest
    allocation: Allocation
    study: str

    def is_study(self, name: str) -> bool:
        """Return whether a study of this name is a search for this cell, with the same content."""
        return name.startswith(self.study) and re.fullmatch(r"(-[1-9]\d{0,8})?", name[len(self.study) :]) is not None

    def number_of(self, name: str) -> int:
        """Return which of this cell's studies has this name, counting from 1."""
        return int(name[len(self.study) + 1 :] or 1)

    def profile_of(self, profiles: Sequence[Slot], here: Fingerprint) -> tuple[Slot, list[Row]] | None:
        """Return the profile of this cell, and what has changed since: one found for this cell, or else one of the same
        training on matching hardware. Of several, return the one with the fewest changes."""
        candidates = [slot for slot in profiles if self._is_own(slot.profile, here)] or [
            slot for slot in profiles if self._is_training(slot.profile) and self._is_hardware(slot.profile, here)
        ]
        return min(((slot, slot.stale(here)) for slot in candidates), key=lambda pair: len(pair[1]), default=None)

    def _is_own(self, profile: Profile, here: Fingerprint) -> bool:
        study = profile.provenance.study
        if not self.is_study(study):
            return False
        # Another machine's daemon may have studies of the same names, and its profiles may have been copied here.
        at_home = self.to != "daemon" or (Path(self.request.studies_dir) / study).exists()
        return at_home or self._is_hardware(profile, here)

    def _is_training(self, profile: Profile) -> bool:
        # The effect of environment variables on a training is unknown.
        if self.allocation.environment or not is_training(profile, self.request.spec):
            return False
        study = StudyFiles(Path(self.request.studies_dir) / profile.provenance.study)
        try:
            searched_spec = read_request(study) if study.request.exists() else self.request.spec
        except AutotuneError:
            return False
        # If its study is on this machine, its request tells whether the search was narrower.
        return _asked_for(searched_spec) - {"baseline"} <= _TOLD

    def _is_hardware(self, profile: Profile, here: Fingerprint) -> bool:
        cores = self.allocation.cpus or self.request.cores
        if cores not in (None, profile.fingerprint.values.get("cores")):
            return False
        if self.request.spec.device == "cpu" and profile.conditions.device != "cpu":
            return False
        wanted = self.cell.hardware or (self.request.gpu if self.request.gpu != "any" else "") or self._gres()
        if wanted:
            # Match whole words: an A100 is no A10.
            words = rf"(?<![a-z0-9]){re.escape(wanted.casefold())}(?![a-z0-9])"
            return re.search(words, profile.conditions.device_name.casefold()) is not None
        if self.to != "daemon":
            # The hardware behind any other queue is unknown.
            return False
        on_cpu = self.request.spec.device == "cpu" or here.values.get("gpu_model") is None
        return on_cpu == (profile.conditions.device == "cpu") and on_hardware(profile, here)

    def _gres(self) -> str:
        """Return the kind of card in ``gpu:h100:1``."""
        parts = (self.allocation.gres or "").split(":")
        return parts[1] if len(parts) > 1 and parts[0] == "gpu" and not parts[1].isdigit() else ""


@dataclass(frozen=True)
class Plan:
    """What to do with a cell.

    Attributes:
        study: name of the study to create; ``None`` if the cell is left out. why: the reason, as a clause.
        job: the job already submitted for it, which is waiting or running.
    """

    asked: Asked
    study: str | None
    why: str
    job: JobRow | None = None


def is_training(profile: Profile, spec: StudySpec) -> bool:
    """Return whether a profile is of the training that a search requests, hardware aside; False if that cannot be
    determined, as for data in a folder, or for a script."""
    conditions, batch_size = profile.conditions, profile.baseline.configuration["batch_size"]
    return (
        _asked_for(spec) <= _TOLD
        and (profile.workload.model, profile.workload.args, profile.provenance.objective)
        == (spec.model, spec.args, spec.objective)
        and (spec.image_size == conditions.image_size or (spec.image_size is None and has_default_size(profile)))
        and conditions.data in {"generated": ("generated", "none"), "synthetic": ("synthetic",)}.get(spec.data, ())
        and (conditions.ranks, conditions.keeps_batch_size, conditions.seed)
        == (spec.ranks, spec.keep_batch_size, spec.seed)
        and (spec.batch_size == batch_size or (spec.batch_size is None and not spec.keep_batch_size))
        # What a user's own objective contained at the time is unknown.
        and not any(path.endswith(".py") for path in spec.objectives)
        and (spec.allow_busy or not conditions.allow_busy)
    )


def _asked_for(spec: StudySpec) -> set[str]:
    return set(spec.model_dump(exclude_defaults=True))


def cells_of(path: Path, root: Any, *, to: str = "daemon", given: Sequence[str] = ()) -> tuple[Matrix, list[Asked]]:
    """Read a matrix; return its cells with their requests.

    Args:
        to: the queue of targets that name none.
        given: words of options that apply unless the file overrides them.

    Raises:
        UsageError: the file is malformed, or a cell's request is invalid.
    """
    params = root.command.commands["submit"].params
    job_options = {word for parameter in params if parameter.name not in CALL_OPTIONS for word in parameter.opts}
    repeatable = {word for parameter in params if getattr(parameter, "multiple", False) for word in parameter.opts}
    matrix = read_matrix(path, job_options, repeatable)
    return matrix, [_asked(matrix, cell, root, to, given) for cell in matrix.cells]


@contextlib.contextmanager
def _error_prefix(where: str) -> Iterator[None]:
    """Prefix the message of every error with ``where``."""
    try:
        yield
    except AutotuneError as error:
        raise UsageError(f"{where}: {error}", advice=error.advice) from error
    except Exception as error:
        # Errors of the command-line parser: Typer uses click or its own copy of it, so their class is not known.
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(f"{where}: {error.format_message().rstrip('.')}") from error


def _asked(matrix: Matrix, cell: Cell, root: Any, to: str, given: Sequence[str]) -> Asked:
    queue = cell.to or to
    typed = " with the options typed" if given else ""
    with (
        _error_prefix(f"{matrix.path}, line {cell.line} on target {cell.target}{typed}"),
        root.command.commands["submit"].make_context("submit", [*given, *cell.words], parent=root) as context,
    ):
        request, allocation = request_of(context, queue)
    if request.spec.name:
        raise UsageError("--study is for one search", advice="leave it out; a file's studies are named by content.")
    label = re.sub(r"[^A-Za-z0-9._-]", "-", request.label)[:80].lstrip("._-")
    parts = (label, "" if cell.batch is None else f"b{cell.batch}", cell.target)
    study = "-".join([*filter(None, parts), _content(request, allocation, queue)[:_DIGITS]])
    return Asked(cell, queue, request, allocation, study)


def _content(request: JobRequest, allocation: Allocation, to: str) -> str:
    """Return a hash of what is searched: the request, its code, its variables, and the choice of machine."""
    # Options at their defaults are left out, so that new options of a later version do not change the hash.
    identity = [
        request.spec.model_dump(mode="json", exclude_defaults=True, exclude={"name", "mark", "created", "storage"}),
        *(sorted(request.sources.items()), request.studies_dir, request.gpu, request.cores, request.host_memory_bytes),
        *(to, allocation.partition, allocation.gres, allocation.cpus, allocation.memory_bytes),
        *(sorted(allocation.more.items()), sorted(allocation.environment.items())),
        *([hashlib.sha256(Path(request.replay).read_bytes()).hexdigest()] if request.replay is not None else []),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def planned(
    asked: Sequence[Asked], jobs: Sequence[JobRow], profiles: Sequence[Slot], here: Fingerprint, *, again: bool
) -> list[Plan]:
    """Return what to do with each cell.

    Args:
        jobs: the jobs of all queues. profiles: those in force here.
        again: also queue what has already been searched. A cell whose job is waiting or running is never queued again.
    """
    by_study = {job.study: job for job in jobs}
    at_work = {job.refreshes: job for job in jobs if job.refreshes is not None and job.state not in ENDED}
    plan_by_study: dict[str, Plan] = {}
    plans = []
    for entry in asked:
        if entry.study in plan_by_study:
            plans.append(Plan(entry, None, f"the same as line {plan_by_study[entry.study].asked.cell.line} asks for"))
            continue
        match = entry.profile_of(profiles, here)
        refresh = None if match is None else at_work.get(match[0].name)
        if refresh is None:
            plan_by_study[entry.study] = _planned(entry, by_study, match, again)
        else:
            why = f"job {refresh.name}, which searches again for its profile, is {refresh.state.value}"
            plan_by_study[entry.study] = Plan(entry, None, why, refresh)
        plans.append(plan_by_study[entry.study])
    return plans


def _planned(asked: Asked, jobs: Mapping[str, JobRow], found: tuple[Slot, list[Row]] | None, again: bool) -> Plan:
    studies = Path(asked.request.studies_dir)
    existing = {path.name for path in studies.glob(f"{asked.study}*")} | jobs.keys()
    # Some of these studies may no longer exist.
    names = sorted(filter(asked.is_study, existing), key=asked.number_of)
    last = names[-1] if names else None
    name = asked.study if last is None else f"{asked.study}-{asked.number_of(last) + 1}"
    for earlier in names:
        if earlier in jobs and jobs[earlier].state not in ENDED:
            return Plan(asked, None, f"job {jobs[earlier].name} is {jobs[earlier].state.value}", jobs[earlier])
    state = None if last is None else jobs[last].state if last in jobs else _seen(StudyFiles(studies / last))
    if again:
        return Plan(asked, name, "asked for again")
    if state is not None and state not in ENDED:
        return Plan(asked, None, f"its study {last} is there, from elsewhere")
    if found is not None:
        slot, rows = found
        if rows:
            return Plan(asked, name, f"its profile is {stale_text(rows)}")
        return Plan(asked, None, f"its profile is in force: {gain_text(slot.profile)}")
    if state is JobState.DONE:
        return Plan(asked, None, f"study {last} has searched for it, and no profile of it is in force")
    return Plan(asked, name, "missing" if state is None else f"study {last} is without an answer")


def _seen(study: StudyFiles) -> JobState:
    """Return the state of a study that has no known job here."""
    if study.outcome.exists():
        return JobState.DONE
    return JobState.FAILED if study.failure.exists() else JobState.RUNNING
