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

from autotune.base.errors import ImpossibleError, UsageError, WorkloadError
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import CommandRef, DataRef, LeftFiles, Phase, Probe, StudySpec, Value, WorkloadRef
from autotune.launcher.script_entry import check_flags, flags_of, places, python_file, refuse_deaf, set_by, told_values
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

#: The data of a workload's first probe, in which it reports the data it needs, and of all launches of a script.
NO_DATA = DataRef(kind="none")

#: If a script takes this long to begin training, the user is told how many launches fit, unless that is enough.
SLOW_START_S, ENOUGH = 15.0, 30
#: With this many launches, a search gets somewhere: a baseline, heats, a few trials, two finalists launched again.
_SOME = 12


def slow_start(files: StudyFiles, budget_s: float) -> str | None:
    """Say how many launches of a script fit into a budget; ``None`` if its probe trained soon, or if many fit."""
    _, result = read_launch(files.launch("probe-1"))
    phase_s = {} if result is None else result.phase_s
    start_s = sum(phase_s.get(phase, 0.0) for phase in (Phase.LOAD, Phase.BUILD, Phase.COMPILE))

    def launches_in(budget_s: float) -> int:
        # Warming up takes as long again as measuring.
        return int(budget_s / (start_s + 2 * plan_for(budget_s, None).max_measure_s))

    fit = launches_in(budget_s)
    if start_s < SLOW_START_S or fit >= ENOUGH:
        return None
    minutes = next(m for m in itertools.count(math.ceil(budget_s / 60)) if launches_in(60.0 * m) >= _SOME)
    hint = f"; --budget {minutes}m has room for {_SOME}" if fit < _SOME else ""
    return f"the script takes {start_s:.0f} s until it trains, so that about {fit} launches fit into the budget{hint}"


class Subject(ABC):
    """What a search trains, with everything that depends on its kind.

    Attributes:
        words: its command; empty for a workload.
    """

    words: tuple[str, ...] = ()

    def __init__(self, spec: StudySpec) -> None:
        self.spec = spec

    @staticmethod
    def of(spec: StudySpec) -> Subject:
        """Return the subject of a request."""
        return WorkloadSubject(spec) if spec.script is None else ScriptSubject(spec, spec.script)

    @abstractmethod
    def checked(self) -> WorkloadRef:
        """Check the request before anything is run, and return what refers to the subject in records.

        Raises:
            UsageError: it does not exist, an option is only for the other kind, or options contradict each other.
            WorkloadError: the data folder does not exist.
        """

    def told(self) -> Mapping[str, tuple[Value, ...]]:
        """Return the values of knobs that its command states."""
        return {}

    def data(self) -> DataRef:
        """Return the data of the first probe. A script has options of its own for it."""
        return NO_DATA

    @abstractmethod
    def file(self, ref: WorkloadRef) -> Path | None:
        """Return its source file, if that is known before the probe."""

    @abstractmethod
    def cards(self, *, one_each: bool) -> int:
        """Return how many cards a launch of it should see; `ALL` for every card there is.

        Args:
            one_each: launches have one card each, because there are several devices or because they run elsewhere.

        Raises:
            ImpossibleError: it needs more than that one card.
        """

    def before_measuring(self, files: StudyFiles, probe: Probe) -> Iterator[str]:
        """Yield what the user should know before it is launched to be measured."""
        yield from ()

    def left(self, files: StudyFiles) -> LeftFiles | None:
        """Return what its launches may have left behind outside their folders."""
        return None


class WorkloadSubject(Subject):
    """A workload's file or module, trained in autotune's own processes."""

    def checked(self) -> WorkloadRef:
        spec = self.spec
        ref = find_workload(spec.model, spec.args)
        if spec.samples_per_step is not None:
            raise UsageError("--samples-per-step is for training scripts", advice="a workload's loader tells.")
        given = {
            "--map": spec.flags,
            "--output-flag": spec.output_flag is not None,
            "--scratch": spec.scratch,
            "--rate": spec.rate is not None,
            "--rate-file": spec.rate_file is not None,
        }
        for flag in filter(given.get, given):
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
        # Data is generated once the workload has reported what it needs.
        return NO_DATA if self.spec.data == "generated" else DataRef(kind="folder", path=str(absolute(self.spec.data)))

    def file(self, ref: WorkloadRef) -> Path | None:
        return None if ref.path is None else Path(ref.path)

    def cards(self, *, one_each: bool) -> int:
        return self.spec.ranks


class ScriptSubject(Subject):
    """A command that trains in its own process: a script that the agent enters, or a program that tells its rate."""

    def __init__(self, spec: StudySpec, command: CommandRef) -> None:
        super().__init__(spec)
        self._command = command
        self.words = command.words

    def told(self) -> Mapping[str, tuple[Value, ...]]:
        return told_values(self._command)

    def checked(self) -> WorkloadRef:
        spec, command = self.spec, self._command
        given = {
            "--data": spec.data != "generated",
            "--arg": spec.args,
            "--image-size": spec.image_size is not None,
            "--global-batch": spec.global_batch is not None,
            "--nproc-per-node": spec.ranks > 1,
            "--store-latency": spec.store_latency_s is not None,
            "--store-bandwidth": spec.store_bytes_per_s is not None,
            "--store-cache": spec.store_cache_bytes is not None,
        }
        for flag in filter(given.get, given):
            raise UsageError(f"{flag} is for workloads", advice="a script has options of its own: put them behind --.")
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

    def file(self, ref: WorkloadRef) -> Path | None:
        return script_of(self._command)

    def cards(self, *, one_each: bool) -> int:
        ranks = ranks_told(self.words)
        if one_each and ranks is not None and ranks > 1:
            raise ImpossibleError(
                f"the command starts {ranks} processes, and here each launch has one card",
                advice="leave --devices, --on and --workers out.",
            )
        return 1 if one_each or ranks is None else ranks

    def before_measuring(self, files: StudyFiles, probe: Probe) -> Iterator[str]:
        times = max(map(times_read, () if probe.deliveries is None else probe.deliveries.sets), default=1)
        if times > 1:
            yield (
                f"each of the script's {times} workers reads all of its iterated data set, so that samples come "
                f"{times} times in an epoch: torch.utils.data.get_worker_info() tells them apart"
            )
        yield from filter(None, [slow_start(files, self.spec.budget_s)])
        yield from where_it_writes(self._command, files, probe)

    def left(self, files: StudyFiles) -> LeftFiles | None:
        _, result = read_launch(files.launch("probe-1"))
        if result is not None and result.probe is not None and result.probe.view_refused is None:
            return None  # the launches had a view of the script's folder
        return left_files(Path(self._command.folder), files)


def _check_rate(spec: StudySpec, command: CommandRef) -> None:
    """Check the options for a program that reports its own rate.

    Raises:
        UsageError: the regular expression is invalid or lacks its group, no knob could be set, or nothing says what
            value a knob has today.
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
    knobs = set_by(command)
    if not knobs:
        raise UsageError(
            "a program that tells its own rate is not looked into, and nothing says how to set a knob of it",
            advice="--map num_workers='--workers {num_workers}' does, or {num_workers} in its command.",
        )
    stated = {*spec.baseline, *(["batch_size"] if spec.batch_size is not None else [])}
    for name in sorted(knobs - stated):
        raise UsageError(f"nothing says what {name} is today", advice=f"--baseline {name}=… does.")


def command_ref(command: CommandRef, name: str) -> WorkloadRef:
    """Return what a command trains, as a reference to a workload.

    Raises:
        UsageError: its program or the file that its Python runs does not exist, or its Python would ignore the agent.
    """
    if command.rate is None:
        refuse_deaf(command.words)
    folder, program = Path(command.folder), command.words[0]
    path = folder / program
    # As in `subprocess`, a program with a slash in it is a path, not a name to look up.
    executable = shutil.which(path if "/" in program else program)
    if executable is None and not places([program]):
        if "/" in program and path.exists():
            raise UsageError(f"{program!r} is no program that may be run", advice="is it a file, and executable?")
        raise UsageError(
            f"there is no program {program!r}",
            advice="put python before it." if program.endswith(".py") else "it is looked for as in a shell.",
        )
    run = python_file(command.words)
    if run is not None and not places([run]) and not os.path.exists(folder / run):
        raise UsageError(f"there is no file {folder / run}", advice="commands run in this folder.")
    script = script_of(command)
    # For a module or a program, only the command itself is known.
    digest = hashlib.sha256("\0".join(command.words).encode(errors="surrogateescape")).hexdigest()
    return WorkloadRef(name=name, module="", sha256=digest if script is None else source_hash(script))


def script_of(command: CommandRef) -> Path | None:
    """Return the script that a command runs, as far as its words show: the first Python file among them."""
    paths = (Path(command.folder) / word for word in command.words if word.endswith(".py"))
    return next((path for path in paths if path.is_file()), None)


def command_name(words: Sequence[str]) -> str:
    """Return a command's name: that of its script or module, or else that of its program."""
    script = next((PurePath(word).stem for word in words if word.endswith(".py")), None)
    module = next((after.rpartition(".")[2] for word, after in pairwise(words) if word == "-m"), None)
    name = script or module or PurePath(words[0]).name
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("-._") or "command"


# The cards that a script sees: one for each process that the launcher in its command starts, otherwise one.

#: What ``--nproc-per-node=gpu`` stands for: one process for each visible card.
ALL = 0
#: Options of torchrun and of ``accelerate launch`` that set the number of processes, in both spellings.
_RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(.*))?", re.DOTALL)
#: An option of ``accelerate launch``: one process for each card, unless a number is given.
_MULTI = re.compile(r"--multi[-_]gpu")
#: Modules that are launchers. Any other module is what is launched.
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def ranks_told(words: Sequence[str]) -> int | None:
    """Return how many processes a command's launcher starts, each with its own card, as far as its words show;
    `ALL` for one on each card, ``None`` if they do not say."""
    ranks: int | None = None
    multi_gpu = False
    for word, after in pairwise([*words, ""]):
        if word.endswith(".py") or (word in ("-m", "--module") and after not in _LAUNCHERS):
            break  # the script or module that it launches has its own options
        multi_gpu = multi_gpu or bool(_MULTI.fullmatch(word))
        match = _RANKS.fullmatch(word)
        if match is None:
            continue
        value = after if match[1] is None else match[1]
        if value in ("gpu", "auto"):
            ranks = ALL
        elif value.isdecimal() and int(value):
            ranks = int(value)
    return ALL if ranks is None and multi_gpu else ranks


def unlike_the_search(words: Sequence[str], profile: Profile) -> str | None:
    """Return, as a clause, how many cards a command gets if its script saw a different number in the search of a
    profile; ``None`` if it gets as many, or if the profile is not for cards."""
    then, ranks = profile.conditions.cards, ranks_told(words)
    if not profile.conditions.device.startswith("cuda"):
        return None
    if ranks:
        start = f"the command starts {count(ranks, 'process', 'processes')}"
        return None if ranks == then else f"{start}, and the search saw {count(then, 'card')}: its rate will be another"
    now = cards_seen()
    if now in (0, then):
        return None
    hint = "; CUDA_VISIBLE_DEVICES hides the others" if now > then else ""
    return (
        f"the script sees {count(now, 'card')}, and in the search it saw {then}: what uses all was not measured{hint}"
    )


def cards_seen() -> int:
    """Return how many cards a process sees, of MIG instances one as in CUDA; 0 if the driver does not say."""
    cards = gpus()
    if isinstance(cards, NvmlUnavailable):
        return 0
    shown = visible(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return min(1, len(shown)) if any(card.mig or card.profile for card in shown) else len(shown)


# What the launches of a script may leave in the folder where it runs, if they have no copy-on-write view of it
# (`autotune.child.script_folders`).

#: No more than this many entries of the folder are examined.
MOST = 5000
#: How many files are named.
_NAMED = 3
#: If a launch writes this much before it trains, the user is told that every launch does.
_MUCH_BYTES = 10 * 2**20
#: Names of files from which a later run of a script may resume: a new file matches the first, an older one both.
_WEIGHTS = re.compile(r".*\.(pt|pth|ckpt|bin|safetensors|npz)|.*checkpoint.*", re.IGNORECASE)
_TO_GO_ON = re.compile(r"(.*[-_.])?(last|latest|checkpoint|ckpt|resume)([-_.].*)?", re.IGNORECASE)
#: Folders that Python or a user's environments write to.
_OTHERS = (str(DEFAULT_STUDIES), "__pycache__", "node_modules")


def own_folders(spec: StudySpec) -> tuple[str, ...]:
    """Return the options that give launches of a script their own folders."""
    options = {"--output-flag": spec.output_flag is not None, "--scratch": spec.scratch}
    return tuple(flag for flag, is_set in options.items() if is_set)


def where_it_writes(command: CommandRef, files: StudyFiles, probe: Probe) -> Iterator[str]:
    """Yield what the user should know about where a script writes, before it is launched to be measured."""
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
    since_ns = _begun_ns(files)
    # Files that launches may have written, or may overwrite, and that a later run may read.
    names = [
        _encodable(os.path.relpath(entry.path, folder))
        for entry, status in _files(folder, files.folder.parent)
        if _WEIGHTS.fullmatch(entry.name)
        and ((since_ns is not None and status.st_mtime_ns > since_ns) or _TO_GO_ON.fullmatch(entry.name))
    ]
    if names:
        some = listed(names[:_NAMED]) if len(names) <= _NAMED else f"{', '.join(names[:_NAMED])} and others"
        yield (
            f"{some} may hold weights of a launch from now on, and a later run of the script may go on from there: "
            "use --scratch or --output-flag, or keep a copy"
        )


def left_sentence(files: StudyFiles, spec: StudySpec) -> str | None:
    """Say what the launches of a search that ends without an outcome may have left behind; ``None`` if nothing."""
    left = Subject.of(spec).left(files)
    return None if left is None else left_text(left, own_folders(spec)).rstrip(".")


def left_files(folder: Path, files: StudyFiles) -> LeftFiles | None:
    """Return the files below a folder that are new or changed since a study began; ``None`` if there are none.

    They may belong to anybody who works in the folder. Names, sizes and times are examined, except in hidden folders,
    studies and virtual environments.
    """
    since_ns = _begun_ns(files)
    if since_ns is None:
        return None
    sizes = {
        os.path.relpath(entry.path, folder): status.st_size
        for entry, status in _files(folder, files.folder.parent)
        if status.st_mtime_ns > since_ns
    }
    if not sizes:
        return None
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))
    names = tuple(map(_encodable, largest[:_NAMED]))
    return LeftFiles(folder=str(folder), names=names, number=len(sizes), size_bytes=sum(sizes.values()))


def _encodable(name: str) -> str:
    # As text in records must be.
    return os.fsencode(name).decode(errors="replace")


def _begun_ns(files: StudyFiles) -> int | None:
    try:
        return files.request.stat().st_mtime_ns
    except OSError:
        return None


def _files(folder: Path, studies: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the files in and below a folder, among the entries that are examined."""
    for entry in itertools.islice(_entries(folder, studies), MOST):
        # A file may just have been removed.
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield entry, status


def _entries(folder: Path, studies: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries in and below a folder, upper levels first."""
    waiting = [str(folder)]
    for place in waiting:
        try:
            with os.scandir(place) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
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
