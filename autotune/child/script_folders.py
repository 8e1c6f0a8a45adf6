"""Where a script that is measured may write."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from autotune.base.errors import MachineError
from autotune.base.layout import LaunchFiles
from autotune.base.records import CommandRef, LeftFiles, Probe, TrialSpec
from autotune.child import temporary, view_entry

# A copy-on-write view of the folder that a script runs in: a launch sees the folder as it was, under its own name, and
# what it writes, changes or removes there vanishes with the launch.
#
# It is an overlay in a mount namespace of the launch's own, which the kernel may or may not grant to any user
# (`autotune.child.view_entry`). What is written goes to the launch's temporary folder, because the upper layer of an
# overlay must not be below the lower one, and studies usually are. Left out of the view are the launch's own folder,
# which is in the study; the user's caches, which a launch may fill as it does elsewhere; and environments with Python
# modules, whose bytecode would be compiled again at each launch.

#: A first look that writes more than this, or opens a larger file for writing, is made without a view.
MOST_BYTES = 2 * 2**30
#: With less room left than this, the disk counts as full.
_ROOM_BYTES = 16 * 2**20
#: How many of the files that were written are named, and how many are examined.
_NAMED, _LOOKED_AT = 3, 5000
#: Errors by which an overlay refuses what the folder itself may allow: renaming a folder that was there before, or
#: changing a file of another user or group.
_UNFIT = (
    errno.EXDEV,
    errno.EOVERFLOW,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EPERM,
    errno.EACCES,
    errno.ENOTSUP,
)
_NUMBER = re.compile(r"\[Errno (\d+)\]")
#: Variables that name folders shared by all that a user runs.
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
#: Where environments usually are, and the files that identify one.
_ENVIRONMENTS, _MARKS = (".venv", "venv", "env"), ("pyvenv.cfg", "conda-meta")


class Refused(Exception):
    """There can be no view; the message says why, as a clause."""


class Outgrown(Exception):
    """A first look has written too much for a view; the message says how, as a clause."""


class View:
    """A view of a command's folder for one launch.

    Args:
        runs_in: the folder that the command runs in.
        place: the launch's temporary folder.
        hidden: a file that the view is to lack.

    Raises:
        Refused: there can be no view here.
    """

    def __init__(
        self, spec: TrialSpec, command: CommandRef, runs_in: Path, place: Path | None, hidden: Path | None = None
    ) -> None:
        self.folder = Path(os.path.realpath(command.folder))
        if place is None:
            raise Refused("there is no room for temporary files")
        place = Path(os.path.realpath(place)) / "view"
        if place.is_relative_to(self.folder):
            raise Refused(f"the folder for temporary files, {place.parent.parent}, is in it")
        folder_stat = os.stat(self.folder)
        if os.geteuid() != 0 and (folder_stat.st_uid, folder_stat.st_gid) != (os.geteuid(), os.getegid()):
            # The files there could not be changed: a user namespace maps no other ids.
            raise Refused("it belongs to another user or group")
        self._place = place
        self.upper, self._work = place / "upper", place / "work"
        self._runs_in = runs_in
        self._hidden = [] if hidden is None or not self._has(hidden) else [str(hidden)]
        cache = spec.cache_folder
        temporary.remove(place)
        try:
            for folder in (self.upper, self._work):
                folder.mkdir(parents=True)
            if cache is not None:
                # Compiled code belongs to the study, and outlives the launch that is the first to compile.
                Path(cache).mkdir(parents=True, exist_ok=True)
            # What the script creates there gets the group and mode that it would have had in the folder.
            shutil.copymode(self.folder, self.upper)
        except OSError as error:
            raise Refused(f"{place} cannot be written ({error.strerror})") from error
        kept = map(os.path.realpath, _kept(command, [spec.folder, *([] if cache is None else [cache])]))
        self._kept = [path for path in kept if self._has(Path(path))]
        self._free_bytes = self._left_bytes()

    def _has(self, path: Path) -> bool:
        return path != self.folder and path.is_relative_to(self.folder)

    def start(self, words: Sequence[str], env: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
        """Start a command in the view.

        Raises:
            Refused: the kernel does not allow it.
            OSError: the command cannot be run.
        """
        reading, writing = os.pipe()
        with open(reading, "rb") as answer:
            folders = self.folder, self.upper, self._work, self._runs_in
            view = view_entry.words(writing, folders, self._kept, self._hidden)
            # Without `site` and Python's environment variables, which are meant for the command alone.
            enter = [sys.executable, "-I", "-S", view_entry.__file__, *view, *words]
            try:
                process = subprocess.Popen(enter, env=env, pass_fds=[writing], **how)
            finally:
                os.close(writing)
            # The pipe is closed when the command begins.
            lines = answer.read().decode(errors="replace").splitlines()
        if lines == ["entered"]:
            return process
        code = process.wait()
        if lines and lines[-1].startswith("errno "):
            number = int(lines[-1].split()[1])
            raise OSError(number, os.strerror(number))
        raise Refused(lines[0].removeprefix("refused ") if lines else f"its process ended with exit code {code}")

    def written(self, path: Path) -> Path:
        """Return the actual path of a file that the command writes."""
        inside = self._has(path) and not any(path.is_relative_to(kept) for kept in self._kept)
        return self.upper / path.relative_to(self.folder) if inside else path

    @property
    def is_full(self) -> bool:
        """Whether there is no room left for what the command writes."""
        return self._left_bytes() < _ROOM_BYTES

    @property
    def no_room(self) -> MachineError:
        """The error that says so."""
        return MachineError(
            f"what the script writes at a launch does not fit into {self._place.parent.parent}",
            advice="TMPDIR names another folder for temporary files; or free some space.",
        )

    def check_size(self, pid: int) -> None:
        """Raise `Outgrown` if a command has written too much for a first look."""
        # Other processes may write there, too.
        if self._free_bytes - self._left_bytes() <= MOST_BYTES:
            return
        sizes = _sizes(self.upper)
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        # A file that is being copied, because it was opened for writing, is not visible meanwhile.
        if sum(sizes.values()) > MOST_BYTES or _written_bytes(pid) > MOST_BYTES:
            raise Outgrown(
                f"the script writes more than {MOST_BYTES >> 30} GiB there, or opens as much for writing"
                + ("" if largest is None else f" ({largest})")
            )

    def _left_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._place).free
        except OSError:
            return 0


def _written_bytes(pid: int) -> int:
    """Return how much a process and its children have written, wherever it went."""
    written = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                written += member.io_counters().write_bytes
    return written


def temporary_folder() -> Path | None:
    """Return the temporary folder of this launch, which the template has created (`autotune.child.temporary`)."""
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return None if folder is None else Path(folder)


def first_look(spec: TrialSpec, command: CommandRef, look: Callable[[CommandRef], Probe]) -> Probe:
    """Probe a command in a view, or else without one, and record in the probe which it was.

    If a view does not suit the script (the kernel lets us create one, but refuses what the script does in it), the
    command is probed again without one. Later launches are to do as this one did.

    Args:
        look: probes a command.

    Raises: as `look`.
    """
    why: str | None
    try:
        View(spec, command, Path(command.folder), temporary_folder()).start([], os.environ).wait()
    except (Refused, OSError) as refused:
        why = str(refused)
    else:
        try:
            probe = look(command.model_copy(update={"view": True}))
            return probe.model_copy(update={"wrote": _wrote(command.folder)})
        except Exception as error:
            why = _unfit(error)
            if why is None:
                raise
    return look(command.model_copy(update={"view": False})).model_copy(update={"view_refused": why})


def _unfit(error: BaseException) -> str | None:
    """Return why a script that has failed in a view may succeed without one, as a clause; ``None`` if it may not."""
    if isinstance(error, Outgrown | MachineError):
        return str(error)
    link: BaseException | None = error
    while link is not None:
        number = getattr(link, "errno", None)
        numbers = {number, *map(int, _NUMBER.findall(str(link)))}
        text = next((os.strerror(n) for n in _UNFIT if n in numbers or os.strerror(n) in str(link)), None)
        if text is not None:
            return f"the script does there what such a view refuses ({text})"
        link = link.__cause__ or link.__context__
    return None


def _kept(command: CommandRef, ours: Sequence[str]) -> Iterator[str]:
    """Yield the files and folders that are left out of a view, wherever they are."""
    caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    program = shutil.which(os.path.join(command.folder, command.words[0])) or shutil.which(command.words[0])
    environments = [os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    environments += [os.path.join(command.folder, name) for name in _ENVIRONMENTS]
    if program is not None:
        environments.append(os.path.dirname(os.path.dirname(os.path.abspath(program))))
    existing = [path for path in environments if path and any(os.path.exists(f"{path}/{name}") for name in _MARKS)]
    yield from filter(os.path.exists, dict.fromkeys((*ours, os.path.expanduser("~/.cache"), *caches, *existing)))


def _wrote(folder: str) -> LeftFiles | None:
    """Return what was written in the view of this launch, except Python's bytecode."""
    place = temporary_folder()
    sizes = {} if place is None else _sizes(place / "view" / "upper")
    if not sizes:
        return None
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:_NAMED]
    names = tuple(os.fsencode(name).decode(errors="replace") for name in largest)
    return LeftFiles(folder=folder, names=names, number=len(sizes), size_bytes=sum(sizes.values()))


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files below a folder, by their paths relative to it; if there are very many, of some of
    them."""
    sizes: dict[str, int] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            with contextlib.suppress(OSError):
                entry = os.lstat(os.path.join(place, name))
                # A file that was removed appears as a device.
                if stat.S_ISREG(entry.st_mode):
                    sizes[os.path.relpath(os.path.join(place, name), folder)] = entry.st_size
        if len(sizes) > _LOOKED_AT:
            break
    return sizes


# The folders that a launch of a script has for itself, how its words and variables keep their meaning in one of them,
# and an environment in which experiment trackers are silent.

#: Options of Python that make the current folder a place to import from.
_IMPORTS = ("-m", "-c")
#: Programs whose ``-m`` names a module, and a module of which the same holds.
_RUNS_MODULES = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
_LAUNCHER = "torch.distributed.run"
#: Variables that keep trackers from sending anything, with the values that a user may have set to the same effect. What
#: a script itself passes in its calls takes precedence over them.
_SILENT = {
    "WANDB_MODE": ("disabled", "offline", "dryrun"),
    # For `Experiment`, for `comet_ml.start`, and for the callback of transformers.
    "COMET_AUTO_LOG_DISABLE": ("1", "true"),
    "COMET_START_ONLINE": ("0", "false"),
    "COMET_MODE": ("DISABLED", "OFFLINE"),
    # Both clients of neptune read it.
    "NEPTUNE_MODE": ("offline", "debug", "disabled"),
    "CLEARML_OFFLINE_MODE": ("1", "true"),
    "SWANLAB_MODE": ("disabled", "offline", "local"),
    # Since MLflow 3.13, a store in files has to be allowed.
    "MLFLOW_ALLOW_FILE_STORE": ("true",),
}
#: Variables for the folders in which trackers keep what they do not send.
_THROWN_AWAY = (
    "COMET_OFFLINE_DIRECTORY", "NEPTUNE_DATA_DIRECTORY", "NEPTUNE_LOG_DIRECTORY", "CLEARML_CACHE_DIR", "TRACKIO_DIR",
)  # fmt: skip
#: The same for MLflow, as URIs.
_STORES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
#: Variables that name something in the user's own store, or a place to send to.
_LEFT_OUT = (
    "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL",
)  # fmt: skip


def prepare(command: CommandRef, files: LaunchFiles) -> tuple[Path, Path | None]:
    """Create the folders that a launch has for itself; return where it runs, and the folder that it is told to write
    to, if any."""
    for folder, wanted in ((files.scratch, command.scratch), (files.output, command.output_flag is not None)):
        # An earlier attempt may have been killed.
        shutil.rmtree(folder, ignore_errors=True)
        if wanted:
            folder.mkdir()
    return (
        files.scratch if command.scratch else Path(command.folder),
        None if command.output_flag is None else files.output,
    )


def elsewhere(words: Sequence[str], folder: str) -> list[str]:
    """Return words that mean the same in any folder as in this one: the files and folders that they name, also after
    ``--option=``, are given by their full paths. A program without a slash is looked up in ``PATH``, and a module by
    its name, although there may be a folder of that name."""
    kept = {*_modules_at(words), *([] if words and os.sep in words[0] else [0])}
    return [word if i in kept else _in_full(word, folder) for i, word in enumerate(words)]


def _modules_at(words: Sequence[str]) -> Iterator[int]:
    """Yield which words name the modules that Python, or a launcher, runs. A file has options of its own, which may be
    called ``-m`` as well."""
    for i, word in enumerate(words):
        if word.endswith(".py"):
            return
        if word == "-m" and any(_RUNS_MODULES.fullmatch(os.path.basename(before)) for before in words[:i]):
            yield i + 1
            if words[i + 1 : i + 2] != [_LAUNCHER]:
                return


def _in_full(word: str, folder: str) -> str:
    before, equals, name = word.partition("=") if word.startswith("-") else ("", "", word)
    path = os.path.join(folder, name)
    return f"{before}{equals}{path}" if name and os.path.exists(path) else word


def importing(env: Mapping[str, str], words: Sequence[str], folder: str) -> dict[str, str]:
    """Return an environment in which Python finds the same modules in any folder as in this one."""
    first = [folder] if any(option in words for option in _IMPORTS) else []
    # An empty entry among others is the current folder.
    places = [place or "." for place in env["PYTHONPATH"].split(os.pathsep)] if env.get("PYTHONPATH") else []
    outer = [os.path.normpath(os.path.join(folder, place)) for place in places]
    return {**env, "PYTHONPATH": os.pathsep.join([*first, *outer])} if first or outer else dict(env)


def silent(env: Mapping[str, str], place: Path) -> dict[str, str]:
    """Return an environment in which experiment trackers send nothing, and write to a place that is removed with the
    launch."""
    silenced = {name: value for name, value in env.items() if name not in _LEFT_OUT}
    for name, values in _SILENT.items():
        if env.get(name, "").lower() not in map(str.lower, values):
            silenced[name] = values[0]
    silenced |= {name: str(place / "trackers" / name.split("_")[0].lower()) for name in _THROWN_AWAY}
    return silenced | {name: (place / "trackers" / "mlflow").as_uri() for name in _STORES}
