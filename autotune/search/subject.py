"""What is trained: a workload, or a command as it stands."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from types import MappingProxyType

from autotune.base.errors import ImpossibleError, UsageError, WorkloadError
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import CommandRef, DataRef, LeftFiles, Phase, Probe, StudySpec, Value, WorkloadRef
from autotune.launcher.entering import check_flags, flags_of, places, python_file, refuse_deaf, set_by, told_values
from autotune.machine.gpu import NvmlUnavailable, gpus, visible
from autotune.profile import Profile
from autotune.report.sentences import left_text
from autotune.search.study_folders import absolute
from autotune.space.formatting import count, listed, memory_text
from autotune.stats import times_read
from autotune.study.history import read_launch
from autotune.study.launches import plan_for
from autotune.workload.catalog import find_workload, source_hash
from autotune.workload.data import sets as data_sets

#: The data of the first probe, in which a workload reports the data it needs, and of all of a script.
NO_DATA = DataRef(kind="none")

# Looks for the program and the file that a command names, before anything is started.


def require_program(command: CommandRef) -> None:
    """Refuse a command that cannot be started, or whose script the agent could not enter.

    Raises:
        UsageError: its program or the file that its Python runs does not exist, or its Python would ignore the agent.
    """
    if command.rate is None:
        refuse_deaf(command.words)
    folder, program = Path(command.folder), command.words[0]
    path = folder / program
    # Like `subprocess`: what has a slash in it is no name to be looked for.
    found = shutil.which(path if "/" in program else program)
    if found is None and not places([program]):
        if "/" in program and path.exists():
            raise UsageError(f"{program!r} is no program that may be run", advice="is it a file, and executable?")
        raise UsageError(
            f"there is no program {program!r}",
            advice="put python before it." if program.endswith(".py") else "it is looked for as in a shell.",
        )
    script = python_file(command.words)
    if script is not None and not places([script]) and not os.path.exists(folder / script):
        raise UsageError(f"there is no file {folder / script}", advice="commands run in this folder.")


# A training script of the user's in place of a workload: checks of what is asked of it, its file, and its name.

#: A script that takes this long until it trains is told how many launches fit, unless that is more than enough.
SLOW_START_S, ENOUGH = 15.0, 30
#: With as many, a search gets somewhere: a baseline, heats, a few trials, two finalists that are launched again.
_SOME = 12


def slow_start(files: StudyFiles, budget_s: float) -> str | None:
    """Say how many launches of a script fit into a budget; ``None`` if its probe began to train soon, or many do."""
    _, result = read_launch(files.launch("probe-1"))
    spent = {} if result is None else result.phase_s
    start_s = sum(spent.get(phase, 0.0) for phase in (Phase.LOAD, Phase.BUILD, Phase.COMPILE))
    fit = _launches_in(budget_s, start_s)
    if start_s < SLOW_START_S or fit >= ENOUGH:
        return None
    minutes = next(m for m in itertools.count(math.ceil(budget_s / 60)) if _launches_in(60.0 * m, start_s) >= _SOME)
    more = f"; --budget {minutes}m has room for {_SOME}" if fit < _SOME else ""
    return f"the script takes {start_s:.0f} s until it trains, so that about {fit} launches fit into the budget{more}"


def _launches_in(budget_s: float, start_s: float) -> int:
    # As long again as it is measured, it warms up.
    return int(budget_s / (start_s + 2 * plan_for(budget_s, None).max_measure_s))


class Subject(ABC):
    """What a search trains, with all that depends on which kind of thing that is.

    Attributes:
        words: its command; empty for a workload.
        told: values of knobs that its command states.
    """

    words: tuple[str, ...] = ()
    told: Mapping[str, tuple[Value, ...]] = MappingProxyType({})

    def __init__(self, spec: StudySpec) -> None:
        self.spec = spec

    @staticmethod
    def of(spec: StudySpec) -> Subject:
        """Return what a request is for."""
        return WorkloadSubject(spec) if spec.script is None else ScriptSubject(spec, spec.script)

    @abstractmethod
    def checked(self) -> WorkloadRef:
        """Check what is asked of it before anything is run, and return what stands for it in records.

        Raises:
            UsageError: it is not there, an option is for the other kind only, or options contradict each other.
            WorkloadError: the data folder does not exist.
        """

    @abstractmethod
    def data(self) -> DataRef:
        """Return the data of the first probe."""

    @abstractmethod
    def file(self, ref: WorkloadRef) -> Path | None:
        """Return its source, if it is known before the probe."""

    @abstractmethod
    def cards(self, *, one_each: bool) -> int:
        """Return how many cards a launch of it is to see; `ALL` for each that there is.

        Args:
            one_each: launches have one card each, because there are several devices or they run elsewhere.

        Raises:
            ImpossibleError: it needs more than that.
        """

    def before_measuring(self, files: StudyFiles, probe: Probe) -> Iterator[str]:
        """Yield what its user is to know before it is launched to be measured."""
        yield from ()

    def left(self, files: StudyFiles) -> LeftFiles | None:
        """Return what its launches may have left outside their folders."""
        return None


class WorkloadSubject(Subject):
    """A workload's file or module, trained in autotune's own processes."""

    def checked(self) -> WorkloadRef:
        spec = self.spec
        ref = find_workload(spec.model, spec.args)
        if spec.samples_per_step is not None:
            raise UsageError("--samples-per-step is for training scripts", advice="a workload's loader tells.")
        for flag, given in (
            ("--map", bool(spec.flags)),
            ("--output-flag", spec.output_flag is not None),
            ("--scratch", spec.scratch),
            ("--rate", spec.rate is not None),
            ("--rate-file", spec.rate_file is not None),
        ):
            if given:
                raise UsageError(f"{flag} is for training scripts", advice="a workload has no command.")
        if spec.data not in ("generated", "synthetic") and not os.path.isdir(Path(spec.data).expanduser()):
            raise WorkloadError(
                f"there is no folder {spec.data!r}",
                advice="--data takes a folder with one folder of images per class, or generated, or synthetic.",
            )
        return ref

    def data(self) -> DataRef:
        if self.spec.data == "synthetic":
            return data_sets.synthetic()
        # Generated data is made once the workload has said what it needs.
        return NO_DATA if self.spec.data == "generated" else DataRef(kind="folder", path=str(absolute(self.spec.data)))

    def file(self, ref: WorkloadRef) -> Path | None:
        return None if ref.path is None else Path(ref.path)

    def cards(self, *, one_each: bool) -> int:
        return self.spec.ranks


class ScriptSubject(Subject):
    """A command, which trains in a process of its own: a script that the agent enters, or a program that tells its own
    rate. It has options of its own for its data."""

    def __init__(self, spec: StudySpec, command: CommandRef) -> None:
        super().__init__(spec)
        self._command = command
        self.words = command.words

    @property
    def told(self) -> Mapping[str, tuple[Value, ...]]:  # type: ignore[override]
        return told_values(self._command)

    def checked(self) -> WorkloadRef:
        spec, command = self.spec, self._command
        for flag, given in (
            ("--data", spec.data != "generated"),
            ("--arg", bool(spec.args)),
            ("--image-size", spec.image_size is not None),
            ("--global-batch", spec.global_batch is not None),
            ("--nproc-per-node", spec.ranks > 1),
            ("--store-latency", spec.store_latency_s is not None),
            ("--store-bandwidth", spec.store_bytes_per_s is not None),
            ("--store-cache", spec.store_cache_bytes is not None),
        ):
            if given:
                raise UsageError(
                    f"{flag} is for workloads", advice="a script has options of its own: put them behind --."
                )
        check_flags(command)
        if spec.samples_per_step is not None and any(flag.knob == "batch_size" for flag in flags_of(command.flags)):
            raise UsageError(
                "--samples-per-step says that a step has as many samples, whatever --map batch_size does",
                advice="leave one of them out.",
            )
        if "batch_size" in places(command.words) and spec.batch_size is None:
            raise UsageError("nothing says what {batch_size} is today", advice="--batch-size does.")
        _check_rate(spec, command)
        return command_ref(command, spec.model)

    def data(self) -> DataRef:
        return NO_DATA

    def file(self, ref: WorkloadRef) -> Path | None:
        return script_of(self._command)

    def cards(self, *, one_each: bool) -> int:
        if one_each:
            refuse_ranks(self.words, "here each launch has one card")
            return 1
        told = ranks_told(self.words)
        return 1 if told is None else told

    def before_measuring(self, files: StudyFiles, probe: Probe) -> Iterator[str]:
        times = max(map(times_read, () if probe.deliveries is None else probe.deliveries.sets), default=1)
        if times > 1:
            yield (
                f"each of the script's {times} workers reads all of its iterated data set, so that samples come "
                f"{times} times in an epoch: torch.utils.data.get_worker_info() tells them apart"
            )
        start = slow_start(files, self.spec.budget_s)
        if start is not None:
            yield start
        yield from before_measuring(self._command, files, probe)

    def left(self, files: StudyFiles) -> LeftFiles | None:
        _, looked = read_launch(files.launch("probe-1"))
        if looked is not None and looked.probe is not None and looked.probe.view_refused is None:
            return None  # they had a view of the script's folder
        return left_files(Path(self._command.folder), files)


def _check_rate(spec: StudySpec, command: CommandRef) -> None:
    """Check what is said of a program that tells its own rate.

    Raises:
        UsageError: the expression is none, or lacks its group; or nothing could be set, or nothing says what is run
            today.
    """
    if command.rate is None:
        if command.rate_file is not None:
            raise UsageError("--rate-file says where, and nothing says what", advice="--rate REGEX does.")
        return
    try:
        groups = set(re.compile(command.rate).groupindex)
    except re.error as error:
        raise UsageError(f"--rate {command.rate!r} is no regular expression: {error}", advice="correct it.") from None
    if groups not in ({"rate"}, {"seconds"}):
        raise UsageError(
            f"--rate {command.rate!r} has not just one group called rate or seconds",
            advice="let (?P<rate>…) match samples per second, or (?P<seconds>…) the seconds of a step.",
        )
    if groups == {"rate"} and command.samples_per_step is not None:
        raise UsageError("--samples-per-step and a rate in samples contradict each other", advice="leave one out.")
    inside = set_by(command)
    if not inside:
        raise UsageError(
            "a program that tells its own rate is not looked into, and nothing says how to set a knob of it",
            advice="--map num_workers='--workers {num_workers}' does, or {num_workers} in its command.",
        )
    today = {*spec.baseline, *(["batch_size"] if spec.batch_size is not None else [])}
    for name in sorted(inside - today):
        raise UsageError(f"nothing says what {name} is today", advice=f"--baseline {name}=… does.")


def command_ref(command: CommandRef, name: str) -> WorkloadRef:
    """Return what a command trains, as a workload.

    Raises:
        UsageError: its program or its script does not exist, or the agent could not enter.
    """
    require_program(command)
    script = script_of(command)
    # Of a module or a program, the command itself is all that is known.
    digest = hashlib.sha256("\0".join(command.words).encode(errors="surrogateescape")).hexdigest()
    return WorkloadRef(name=name, module="", sha256=digest if script is None else source_hash(script))


def script_of(command: CommandRef) -> Path | None:
    """Return the file that a command runs, as far as its words tell: the first Python file among them."""
    named = (Path(command.folder) / word for word in command.words if word.endswith(".py"))
    return next((path for path in named if path.is_file()), None)


def command_name(words: Sequence[str]) -> str:
    """Return what a command is called: its script's or module's name, or else its program's."""
    script = next((PurePath(word).stem for word in words if word.endswith(".py")), None)
    module = next((after.rpartition(".")[2] for word, after in pairwise(words) if word == "-m"), None)
    found = script or module or PurePath(words[0]).name
    return re.sub(r"[^A-Za-z0-9._-]", "-", found).lstrip("-._") or "command"


# The cards that a script sees: as many as the launcher in its command starts processes, and otherwise one.

#: What ``--nproc-per-node=gpu`` stands for: a process for each card that is seen.
ALL = 0
#: Options of torchrun and of ``accelerate launch`` that say how many processes there are, in both spellings.
_RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(.*))?", re.DOTALL)
#: An option of ``accelerate launch``: a process for each card, unless there is a number.
_MULTI = re.compile(r"--multi[-_]gpu")
#: Modules that are launchers. Any other one is what is launched.
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def ranks_told(words: Sequence[str]) -> int | None:
    """Return how many processes a command's launcher starts, each with a card of its own, as far as its words tell;
    `ALL` for one on each card, ``None`` if they say nothing."""
    told: int | None = None
    several = False
    for word, after in pairwise([*_before_the_script(words), ""]):
        several = several or bool(_MULTI.fullmatch(word))
        found = _RANKS.fullmatch(word)
        if found is None:
            continue
        value = after if found[1] is None else found[1]
        if value in ("gpu", "auto"):
            told = ALL
        elif value.isdecimal() and int(value):
            told = int(value)
    return ALL if told is None and several else told


def _before_the_script(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command before those of the script or module that is launched, whose options are its own."""
    for word, after in pairwise([*words, ""]):
        if word.endswith(".py") or (word in ("-m", "--module") and after not in _LAUNCHERS):
            return
        yield word


def refuse_ranks(words: Sequence[str], where: str) -> None:
    """Refuse a command that starts several processes where each launch has one card.

    Raises:
        ImpossibleError: it does.
    """
    told = ranks_told(words) or 1
    if told > 1:
        raise ImpossibleError(
            f"the command starts {told} processes, and {where}", advice="leave --devices, --on and --workers out."
        )


def unlike_the_search(words: Sequence[str], profile: Profile) -> str | None:
    """Return what cards a command gets that its script did not see in the search of a profile, as a clause; ``None`` if
    it gets as many, or the profile is not of cards."""
    then, told = profile.conditions.cards, ranks_told(words)
    if not profile.conditions.device.startswith("cuda"):
        return None
    if told:
        here = f"the command starts {count(told, 'process', 'processes')}"
        return None if told == then else f"{here}, and the search saw {count(then, 'card')}: its rate will be another"
    seen = cards_seen()
    if seen in (0, then):
        return None
    hide = "; CUDA_VISIBLE_DEVICES hides the others" if seen > then else ""
    return (
        f"the script sees {count(seen, 'card')}, and in the search it saw {then}: what uses all was not measured{hide}"
    )


def cards_seen() -> int:
    """Return how many cards a process that is started here sees; 0 if the driver does not tell. Of MIG instances CUDA
    shows one."""
    listed = gpus()
    if isinstance(listed, NvmlUnavailable):
        return 0
    seen = visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return min(1, len(seen)) if any(card.mig or card.profile for card in seen) else len(seen)


# What the launches of a script may leave in the folder where it runs, if they have no copy-on-write view of it
# (`autotune.child.script_folders`).

#: Nothing beyond this many entries of the folder is looked at.
MOST = 5000
#: How many files are named.
_NAMED = 3
#: If a launch writes this much before it trains, it is said that each of them does.
_MUCH_BYTES = 10 * 2**20
#: Names of files from which later runs of a script may go on: of any that is new, and of those that were there.
_WEIGHTS = re.compile(r".*\.(pt|pth|ckpt|bin|safetensors|npz)|.*checkpoint.*", re.IGNORECASE)
_TO_GO_ON = re.compile(r"(.*[-_.])?(last|latest|checkpoint|ckpt|resume)([-_.].*)?", re.IGNORECASE)
#: Folders that Python or a user's environments write to.
_OTHERS = (str(DEFAULT_STUDIES), "__pycache__", "node_modules")


def own_folders(spec: StudySpec) -> tuple[str, ...]:
    """Return the options by which launches of a script have folders of their own."""
    given = {"--output-flag": spec.output_flag is not None, "--scratch": spec.scratch}
    return tuple(flag for flag, on in given.items() if on)


def before_measuring(command: CommandRef, files: StudyFiles, probe: Probe) -> Iterator[str]:
    """Yield what its user is to know of where a script writes, before it is launched to be measured."""
    wrote = probe.wrote
    if wrote is not None and wrote.size_bytes >= _MUCH_BYTES:
        yield (
            f"the script writes {memory_text(wrote.size_bytes)} in its folder before it trains, anew at each launch "
            f"({listed(wrote.names)}); if that is data that it prepares, run it once by itself, so that it is there"
        )
    if probe.view_refused is None or command.scratch:
        return
    folder = Path(command.folder)
    yield (
        f"launches write in {folder} itself, since a copy-on-write view of it cannot be had: {probe.view_refused}; "
        "--scratch runs each in a folder of its own, --output-flag FLAG gives each one to write to"
    )
    names = _checkpoints(folder, files)
    if names:
        some = listed(names[:_NAMED]) if len(names) <= _NAMED else f"{', '.join(names[:_NAMED])} and others"
        yield (
            f"{some} may hold weights of a launch from now on, and a later run of the script may go on from there: "
            "use --scratch or --output-flag, or keep a copy"
        )


def _checkpoints(folder: Path, files: StudyFiles) -> list[str]:
    """Return the names of files that launches may have written, or may write over, and that a later run may read."""
    since_ns = _begun_ns(files)
    found = []
    for entry, seen in _files(folder, files.folder.parent):
        fresh = since_ns is not None and seen.st_mtime_ns > since_ns
        if _WEIGHTS.fullmatch(entry.name) and (fresh or _TO_GO_ON.fullmatch(entry.name)):
            found.append(os.fsencode(os.path.relpath(entry.path, folder)).decode(errors="replace"))
    return found


def left_sentence(files: StudyFiles, spec: StudySpec) -> str | None:
    """Say what the launches of a search may have left that ends without an outcome; ``None`` if that is nothing."""
    left = Subject.of(spec).left(files)
    return None if left is None else left_text(left, own_folders(spec)).rstrip(".")


def left_files(folder: Path, files: StudyFiles) -> LeftFiles | None:
    """Return the files below a folder that are new or changed since a study was begun; ``None`` if there are none.

    They may be anybody's who works in it. Names, sizes and times are looked at, outside of hidden folders, studies and
    virtual environments.
    """
    since_ns = _begun_ns(files)
    if since_ns is None:
        return None
    entries = _files(folder, files.folder.parent)
    found = {
        os.path.relpath(entry.path, folder): seen.st_size for entry, seen in entries if seen.st_mtime_ns > since_ns
    }
    if not found:
        return None
    largest = sorted(found, key=lambda name: (-found[name], name))
    # Records are text that can be written.
    names = tuple(os.fsencode(name).decode(errors="replace") for name in largest[:_NAMED])
    return LeftFiles(folder=str(folder), names=names, number=len(found), size_bytes=sum(found.values()))


def _begun_ns(files: StudyFiles) -> int | None:
    try:
        return files.request.stat().st_mtime_ns
    except OSError:
        return None


def _files(folder: Path, studies: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the files in a folder and below it, as far as it is looked through."""
    for entry in itertools.islice(_entries(folder, studies), MOST):
        # Some may just have been removed.
        with contextlib.suppress(OSError):
            seen = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(seen.st_mode):
                yield entry, seen


def _entries(folder: Path, studies: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder and below it, the upper ones first."""
    waiting = [str(folder)]
    for place in waiting:
        try:
            with os.scandir(place) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _OTHERS or entry.path == str(studies):
                continue
            yield entry
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
