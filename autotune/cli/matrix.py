"""The cells of a matrix: what each asks for, which profile it has, and whether it is to be queued."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cli.job_file import flag
from autotune.cli.job_request import CALL_OPTIONS, error_prefix, parsed_request, repeatable_options
from autotune.cli.matrix_file import Cell, Matrix, read_matrix
from autotune.cluster.slurm_request import Allocation
from autotune.base.errors import AutotuneError, UsageError
from autotune.base.layout import StudyFiles
from autotune.profile import Profile
from autotune.profile.here import Row, has_default_size, on_hardware
from autotune.profile.store import Slot
from autotune.base.records import ENDED, Fingerprint, JobRequest, JobRow, JobState, StudySpec
from autotune.report.profiles import gain_text, stale_text
from autotune.study.request import read_request

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
