"""`autotune matrix`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from autotune.base.errors import AutotuneError, ProfileError, UnknownNameError, UsageError
from autotune.base.files import read_regular
from autotune.base.layout import StudyFiles
from autotune.base.records import ENDED, Fingerprint, JobRequest, JobRow, JobState, StudySpec
from autotune.cli.job_request import (
    CALL_OPTIONS,
    QUEUES,
    YAML_BYTES,
    error_prefix,
    flag,
    option_words,
    parsed_request,
    repeatable_options,
)
from autotune.cluster.slurm_queue import Allocation
from autotune.profile import Profile, plain_data
from autotune.profile.schema import shown
from autotune.profile.store import Row, Slot, has_default_size, on_hardware
from autotune.report.listing import gain_text, stale_text
from autotune.space.formatting import model_name
from autotune.study.request import read_request

# The file of ``autotune submit matrix.yaml``: models × targets × batch sizes, each cell a search.
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
# Options are those of ``autotune submit``. What a target says wins over what its model says, and that over the
# defaults.


_KEYS = ("defaults", "models", "targets", "batches")
_AGAIN = "see the example in the documentation of clusters."
#: A target's name is a part of a study's.
_TARGET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
#: Options that name one job, or that a cell has by its place.
_OURS = {
    "study": "the study of a cell is named by its content",
    "keep_batch_size": "write `batches`, which are kept",
    "dry_run": "it concerns the whole matrix",
    "again": "it concerns the whole matrix",
    "file": "a matrix holds no file of jobs",
    "state_dir": "it concerns the whole matrix",
    "json": "it concerns the whole matrix",
}
#: What is said of a model only if nothing else tells it from others.
_APART = ("model", "script", "data", "budget")
#: What only a target has.
_TARGETS = ("to", "hardware")
Place = tuple[str | int, ...]
#: By name: where each is in the file, and its value.
Options = dict[str, tuple[Place, Any]]


@dataclass(frozen=True)
class Cell:
    """One search of a matrix.

    Attributes:
        number: of the model in the list. model, target: as the file calls them.
        more: what the model says of itself, as text, but what is often all its own: its file, data and budget, which
            are in further.
        batch: the batch size that is kept; ``None`` if it is searched.
        to: whose queue; ``None`` if the target does not say. hardware: a part of the name of the target's GPU or CPU,
            if it says.
        words: of its command line, after ``autotune submit``.
        line: of its model in the file. lines: by flag, those of its options, and of the keys and values in them.
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
    lines: Mapping[str, tuple[int, Mapping[str, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Matrix:
    """The cells of a file, by model, then batch, then target."""

    path: Path
    targets: tuple[str, ...]
    cells: tuple[Cell, ...]

    def at_fault(self, cell: Cell, message: str, typed: Sequence[str] = ()) -> str:
        """Return where an error comes from, as a prefix of its message: by the flags in it, and by what it quotes.

        Args:
            typed: words of options on the command line, which may be what is wrong.
        """
        flags, quoted = set(re.findall(r"--[a-z][a-z-]*", message)), set(re.findall(r"'([^']*)'", message))
        there = {part for word in typed for part in (word, *_parts(word))}
        named = [cell.lines[one] for one in cell.lines if one in flags]
        if flags & there and not named:
            return "the command line"
        # A message may also call a knob by its bare name.
        for words in (quoted, set(re.findall(r"[a-z]+(?:_[a-z]+)+", message))):
            for _, texts in named or cell.lines.values():
                for text in texts:
                    if text in words:
                        return f"{self.path}, line {texts[text]}"
        if named:
            return f"{self.path}, line {named[0][0]}"
        return "the command line" if quoted & there else f"{self.path}, line {cell.line}"


def read_matrix(path: Path, known: Collection[str], repeatable: Collection[str]) -> Matrix:
    """Read a matrix.

    Args:
        known: the options of a job, as they are typed. repeatable: those that can have several values.

    Raises:
        UsageError: it cannot be read, or does not have this form; the message names the line.
    """
    try:
        text = read_regular(path, YAML_BYTES, follow=True).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    try:
        data = plain_data(text, str(path), kind="matrix", again=_AGAIN)
    except ProfileError as error:
        raise UsageError(str(error), advice=error.advice, detail=error.detail) from None
    node = YAML(typ="safe", pure=True).compose(text)
    lines = dict(_places(node)) if node is not None else {}
    return _Reading(path, lines, known, repeatable).matrix(data)


def _places(node: Node, at: Place = ()) -> Iterator[tuple[Place, int]]:
    """Yield the line of every key and item."""
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield (*at, key.value), key.start_mark.line + 1
            yield from _places(value, (*at, key.value))
    elif isinstance(node, SequenceNode):
        for i, value in enumerate(node.value):
            yield (*at, i), value.start_mark.line + 1
            yield from _places(value, (*at, i))


class _Reading:
    """Reads one file, whose lines are known by their places in it."""

    def __init__(
        self, path: Path, lines: Mapping[Place, int], known: Collection[str], repeatable: Collection[str]
    ) -> None:
        self._path = path
        self._lines = lines
        self._known = known
        self._repeatable = repeatable

    def matrix(self, data: Any) -> Matrix:
        if isinstance(data, dict) and "jobs" in data:
            raise UsageError(
                f"{self._path} is a list of jobs, not a matrix", advice=f"write `autotune submit --file {self._path}`."
            )
        if not isinstance(data, dict) or not all(data.get(name) for name in ("models", "targets")):
            raise UsageError(f"{self._path} is no matrix: it needs models and targets", advice=_AGAIN)
        for name in data:
            if name not in _KEYS:
                self._refuse((name,), UnknownNameError("key", str(name)[:60], _KEYS))
        defaults = self._options(data.get("defaults") or {}, ("defaults",), self._known)
        batches = self._batches(data.get("batches"))
        models, targets = self._models(data["models"]), self._targets(data["targets"])
        cells = []
        for place, model in models:
            for batch in batches:
                for target, options in targets.items():
                    given = {**defaults, **model, **options}
                    cells.append(self._cell(given, model, place, target, batch))
        return Matrix(self._path, tuple(targets), tuple(cells))

    def _cell(self, given: Options, model: Options, at: Place, target: str, batch: int | None) -> Cell:
        if batch is not None and "batch_size" in given:
            self._refuse(given["batch_size"][0], "batch-size stands beside batches, which say the same")
        words: list[str] = []
        for name, (place, value) in given.items():
            if name not in _TARGETS:
                try:
                    words += option_words(name, value, self._repeatable)
                except UsageError as error:
                    self._refuse(place, error)
        if batch is not None:
            words += [flag("batch_size"), str(batch), flag("keep_batch_size")]
        said = {name: value for name, (_, value) in given.items()}
        return Cell(
            number=int(at[1]),
            model=str(said.get("model") or Path(str(said["script"])).name.split(".")[0]),
            more=", ".join(_said(name, value) for name, (_, value) in model.items() if name not in _APART),
            further=", ".join(
                _said(name, value)
                for name, (_, value) in model.items()
                if name in _APART and (name != "model" or value != model_name(str(value)))
            ),
            target=target,
            batch=batch,
            to=said.get("to"),
            hardware=said.get("hardware"),
            words=tuple(words),
            line=self._line(at),
            lines={
                flag(name): (self._line(place), {text: self._line(at) for text, at in _texts(value, place)})
                for name, (place, value) in given.items()
            },
        )

    def _models(self, data: Any) -> list[tuple[Place, Options]]:
        if not isinstance(data, list):
            self._refuse(("models",), "models must be a list", advice="write `- resnet50`, a line for each.")
        found: list[tuple[Place, Options]] = []
        for i, item in enumerate(data):
            at: Place = ("models", i)
            options = self._options({"model": item} if isinstance(item, str) else item, at, self._known)
            if not options.get("model", (at, None))[1] and not options.get("script", (at, None))[1]:
                self._refuse(at, "a model has a name", advice="write `- resnet50` or `- {model: mine.py, …}`.")
            found.append((at, options))
        return found

    def _targets(self, data: Any) -> dict[str, Options]:
        if not isinstance(data, dict):
            self._refuse(("targets",), "targets must have names", advice="write `here: {}`, a line for each.")
        found = {}
        for name, options in data.items():
            at = ("targets", name)
            if not isinstance(name, str) or not _TARGET.fullmatch(name):
                self._refuse(at, f"{shown(name)} cannot name a target", advice="use letters, digits, dots and dashes.")
            found[name] = self._options(options or {}, at, [*self._known, *map(flag, _TARGETS)])
            for one in _TARGETS:
                place, value = found[name].get(one, (at, ""))
                if not isinstance(value, str):
                    self._refuse(place, f"{one} must be text, not {shown(value)}")
            place, queue = found[name].get("to", (at, QUEUES[0]))
            if queue not in QUEUES:
                self._refuse(place, UnknownNameError("queue", queue, QUEUES))
        return found

    def _batches(self, data: Any) -> Sequence[int | None]:
        if data is None:
            return [None]
        if not isinstance(data, list) or not data:
            self._refuse(("batches",), "batches must be a list of batch sizes")
        for i, one in enumerate(data):
            if type(one) is not int or one < 1:
                self._refuse(("batches", i), f"a batch size is a whole number above zero, not {shown(one)}")
        return list(dict.fromkeys(data))

    def _options(self, data: Any, at: Place, known: Collection[str]) -> Options:
        if not isinstance(data, dict):
            self._refuse(at, f"{shown(at[-1], quoted=False)} must be options with their values, not {shown(data)}")
        found: Options = {}
        for name, value in data.items():
            option = str(name).replace("-", "_")
            # A model that is only a name has no place of its own for it.
            place = (*at, name) if (*at, name) in self._lines else at
            if option in _OURS:
                self._refuse(place, f"{shown(name, quoted=False)} cannot stand in a matrix: {_OURS[option]}")
            if flag(option) not in known:
                self._refuse(
                    place, UnknownNameError("option", str(name)[:60], [one.removeprefix("--") for one in known])
                )
            found[option] = (place, value)
        return found

    def _line(self, place: Place) -> int:
        while place and place not in self._lines:
            place = place[:-1]
        return self._lines.get(place, 1)

    def _refuse(self, place: Place, why: str | AutotuneError, advice: str | None = None) -> NoReturn:
        told = advice or (why.advice if isinstance(why, AutotuneError) else None)
        raise UsageError(f"{self._path}, line {self._line(place)}: {why}", advice=told)


def _texts(value: Any, at: Place) -> Iterator[tuple[str, Place]]:
    """Yield the keys and values of an option, and their parts, with their places."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield str(key), (*at, key)
            yield from _texts(one, (*at, key))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _texts(one, (*at, i))
    else:
        yield from ((text, at) for text in (str(value), *_parts(str(value))))


def _parts(text: str) -> list[str]:
    """Return what stands on both sides of the signs in ``NAME=VALUE`` or ``FIGURE<=VALUE``."""
    return [part for part in re.split(r"[=<>,:]+", text) if part]


def _said(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return name if value is True else f"{name}={value}"


# The cells of a matrix: what each asks for, which profile it has, and whether it is to be queued.


ENDINGS = (".yaml", ".yml")
#: Digits of the hash by which a cell's study is told from others.
_DIGITS = 8
#: What a profile tells of its search, or what does not change what is searched for. Of all else only a study's name
#: tells whether it is the same.
_TOLD = frozenset(
    {
        *("name", "mark", "created", "model", "args", "data", "objective", "device", "batch_size", "image_size"),
        *("budget_s", "trials", "sampler", "seed", "allow_busy", "keep_batch_size", "ranks", "storage"),
    }
)


@dataclass(frozen=True)
class Asked:
    """A cell with what it asks for.

    Attributes:
        to: whose queue. study: name of its study, which tells its content; further searches of it have a number behind.
    """

    cell: Cell
    to: str
    request: JobRequest
    allocation: Allocation
    study: str

    def is_study(self, name: str) -> bool:
        """Return whether a study of this name has searched for this cell, with the same content."""
        return name.startswith(self.study) and re.fullmatch(r"(-[1-9]\d{0,8})?", name[len(self.study) :]) is not None

    def number_of(self, name: str) -> int:
        """Return which of this cell's studies has this name: 1 for the first."""
        return int(name[len(self.study) + 1 :] or 1)

    def profile_of(self, profiles: Sequence[Slot], here: Fingerprint) -> tuple[Slot, list[Row]] | None:
        """Return the profile of this cell, and what has changed since: one that was found for it, or else one of the
        same training on such hardware; of several the one of which the least has changed."""
        found = [kept for kept in profiles if self._is_own(kept.profile, here)] or [
            kept for kept in profiles if self._is_training(kept.profile) and self._is_hardware(kept.profile, here)
        ]
        return min(((kept, kept.stale(here)) for kept in found), key=lambda pair: len(pair[1]), default=None)

    def _is_own(self, profile: Profile, here: Fingerprint) -> bool:
        study = profile.provenance.study
        if not self.is_study(study):
            return False
        # The daemon of another machine has studies of the same names, and its profiles may have been copied here.
        at_home = self.to != "daemon" or (Path(self.request.studies_dir) / study).exists()
        return at_home or self._is_hardware(profile, here)

    def _is_training(self, profile: Profile) -> bool:
        # What variables do to a training is not known.
        if self.allocation.environment or not is_training(profile, self.request.spec):
            return False
        study = StudyFiles(Path(self.request.studies_dir) / profile.provenance.study)
        try:
            searched = read_request(study) if study.request.exists() else self.request.spec
        except AutotuneError:
            return False
        # Where its study is here, that tells whether the search was a narrower one.
        return _asked_for(searched) - {"baseline"} <= _TOLD

    def _is_hardware(self, profile: Profile, here: Fingerprint) -> bool:
        cores = self.allocation.cpus or self.request.cores
        if cores not in (None, profile.fingerprint.values.get("cores")):
            return False
        if self.request.spec.device == "cpu" and profile.conditions.device != "cpu":
            return False
        asked = self.cell.hardware or (self.request.gpu if self.request.gpu != "any" else "") or self._gres()
        if asked:
            # As whole words: an A100 is no A10.
            words = rf"(?<![a-z0-9]){re.escape(asked.casefold())}(?![a-z0-9])"
            return re.search(words, profile.conditions.device_name.casefold()) is not None
        if self.to != "daemon":
            # Which hardware a queue of others has is not known.
            return False
        on_cpu = self.request.spec.device == "cpu" or here.values.get("gpu_model") is None
        return on_cpu == (profile.conditions.device == "cpu") and on_hardware(profile, here)

    def _gres(self) -> str:
        """Return the kind of card in ``gpu:h100:1``."""
        parts = (self.allocation.gres or "").split(":")
        return parts[1] if len(parts) > 1 and parts[0] == "gpu" and not parts[1].isdigit() else ""


@dataclass(frozen=True)
class Plan:
    """What is to become of a cell.

    Attributes:
        study: name of the study to be made; ``None`` if the cell is left out. why: why, as a clause.
        job: that has been submitted for it already, and waits or runs.
    """

    asked: Asked
    study: str | None
    why: str
    job: JobRow | None = None


def is_training(profile: Profile, spec: StudySpec) -> bool:
    """Return whether a profile is of the training that a search asks for, hardware aside; not if that cannot be told,
    as of the data in a folder, or of a script."""
    then, batch_size = profile.conditions, profile.baseline.configuration["batch_size"]
    return (
        _asked_for(spec) <= _TOLD
        and (profile.workload.model, profile.workload.args, profile.provenance.objective)
        == (spec.model, spec.args, spec.objective)
        and (spec.image_size == then.image_size or (spec.image_size is None and has_default_size(profile)))
        and then.data in {"generated": ("generated", "none"), "synthetic": ("synthetic",)}.get(spec.data, ())
        and (then.ranks, then.keeps_batch_size, then.seed) == (spec.ranks, spec.keep_batch_size, spec.seed)
        and (spec.batch_size == batch_size or (spec.batch_size is None and not spec.keep_batch_size))
        # What an objective of the user's was then is not known.
        and not any(one.endswith(".py") for one in spec.objectives)
        and (spec.allow_busy or not then.allow_busy)
    )


def _asked_for(spec: StudySpec) -> set[str]:
    return set(spec.model_dump(exclude_defaults=True))


def matrix_named(words: Sequence[str], root: Any) -> str | None:
    """Return the matrix that a command line names: its only word that is no option, no value, and not behind ``--``.

    Args:
        root: the context of `autotune` itself.
    """
    if "--" in words or not any(word.endswith(ENDINGS) for word in words):
        return None
    with root.command.commands["search"].make_context("search", list(words), parent=root) as own:
        found: list[str] = own.params["words"] or []
    return found[0] if len(found) == 1 and found[0].endswith(ENDINGS) else None


def cells_of(path: Path, root: Any, *, to: str = "daemon", given: Sequence[str] = ()) -> tuple[Matrix, list[Asked]]:
    """Read a matrix; return its cells with what they ask for.

    Args:
        to: whose queue, where a target does not say.
        given: words of options that apply where the file says nothing else.

    Raises:
        UsageError: the file is no matrix, or a cell asks for what cannot be.
    """
    commands = root.command.commands
    options = {word for name in ("submit", "search") for one in commands[name].params for word in one.opts}
    known = options - {flag(name.removeprefix("as_")) for name in CALL_OPTIONS}
    matrix = read_matrix(path, known, repeatable_options(root))
    return matrix, [_asked(matrix, cell, root, to, given) for cell in matrix.cells]


def _asked(matrix: Matrix, cell: Cell, root: Any, to: str, given: Sequence[str]) -> Asked:
    queue = cell.to or to
    with error_prefix(lambda message: matrix.at_fault(cell, message, given)):
        request, allocation = parsed_request(root, queue, [*given, *cell.words])
    if request.spec.name:
        raise UsageError(
            "--study is for one search", advice="leave it out; a matrix names its studies by their content."
        )
    label = re.sub(r"[^A-Za-z0-9._-]", "-", request.label)[:80].lstrip("._-")
    batch = "" if cell.batch is None else f"-b{cell.batch}"
    study = f"{label}{batch}-{cell.target}-{_content(request, allocation, queue)[:_DIGITS]}"
    return Asked(cell, queue, request, allocation, study)


def _content(request: JobRequest, allocation: Allocation, to: str) -> str:
    """Return the hash of what is searched: of the request, its code, its variables, and what chooses the machine."""
    # Without options at their defaults: those that a later version has must not change the hash.
    identity = [
        request.spec.model_dump(mode="json", exclude_defaults=True, exclude={"name", "mark", "created", "storage"}),
        *(sorted(request.sources.items()), request.studies_dir, request.gpu, request.cores, request.host_memory_bytes),
        *(to, allocation.partition, allocation.gres, allocation.cpus, allocation.memory_bytes),
        *(sorted(allocation.more.items()), sorted(allocation.environment.items())),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def planned(
    asked: Sequence[Asked], jobs: Sequence[JobRow], profiles: Sequence[Slot], here: Fingerprint, *, again: bool
) -> list[Plan]:
    """Return what is to become of each cell.

    Args:
        jobs: of all queues. profiles: in force here.
        again: queue also what has been searched. A cell whose job waits or runs is never queued again.
    """
    by_study = {job.study: job for job in jobs}
    at_work = {job.refreshes: job for job in jobs if job.refreshes is not None and job.state not in ENDED}
    found: dict[str, Plan] = {}
    plans = []
    for one in asked:
        if one.study in found:
            plans.append(Plan(one, None, f"the same as line {found[one.study].asked.cell.line} asks for"))
            continue
        kept = one.profile_of(profiles, here)
        refresh = None if kept is None else at_work.get(kept[0].name)
        if refresh is None:
            found[one.study] = _planned(one, by_study, kept, again)
        else:
            why = f"job {refresh.name}, which searches again for its profile, is {refresh.state.value}"
            found[one.study] = Plan(one, None, why, refresh)
        plans.append(found[one.study])
    return plans


def _planned(asked: Asked, jobs: Mapping[str, JobRow], found: tuple[Slot, list[Row]] | None, again: bool) -> Plan:
    studies = Path(asked.request.studies_dir)
    there = {path.name for path in studies.glob(f"{asked.study}*")} | jobs.keys()
    # Of some nothing may be left.
    names = sorted(filter(asked.is_study, there), key=asked.number_of)
    last = names[-1] if names else None
    name = asked.study if last is None else f"{asked.study}-{asked.number_of(last) + 1}"
    for one in names:
        if one in jobs and jobs[one].state not in ENDED:
            return Plan(asked, None, f"job {jobs[one].name} is {jobs[one].state.value}", jobs[one])
    state = None if last is None else jobs[last].state if last in jobs else _seen(StudyFiles(studies / last))
    if again:
        return Plan(asked, name, "asked for again")
    if state is not None and state not in ENDED:
        return Plan(asked, None, f"its study {last} is there, from elsewhere")
    if found is not None:
        kept, rows = found
        if rows:
            return Plan(asked, name, f"its profile is {stale_text(rows)}")
        return Plan(asked, None, f"its profile is in force: {gain_text(kept.profile)}")
    if state is JobState.DONE:
        return Plan(asked, None, f"study {last} has searched for it, and no profile of it is in force")
    return Plan(asked, name, "missing" if state is None else f"study {last} is without an answer")


def _seen(study: StudyFiles) -> JobState:
    """Return the state of a study of which no job is known here."""
    if study.outcome.exists():
        return JobState.DONE
    return JobState.FAILED if study.failure.exists() else JobState.RUNNING
