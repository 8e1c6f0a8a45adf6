"""Classifies a failure (out of memory, no space in /dev/shm, a compiler's, …), from the exception or from messages."""

from __future__ import annotations

import builtins
import errno
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from autotune.base.errors import MORE_PROCESSES, SHM_FULL, AutotuneError, WorkloadError
from autotune.base.layout import LaunchFiles
from autotune.base.records import Measurement, TrialSpec, TrialStatus
from autotune.knobs import refused_knob
from autotune.launcher.result import end_of, signal_name
from autotune.machine import host, system
from autotune.machine.host import shared_memory
from autotune.space.formatting import phrase
from autotune.training.step import step_plan

# Tells a machine that cannot compile from a model that cannot be compiled, by the exceptions of torch.compile.
#
# Inductor's own exceptions are recognized by their types. Compilers report on stderr, and Inductor's helper processes
# pass on only the text of an exception, so the rest is recognized by its text.

#: Packages whose exceptions are about compiling.
_PACKAGES = ("torch._dynamo", "torch._inductor", "torch.fx", "triton")
_FOLDERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")
_STDLIB = sysconfig.get_path("stdlib")
#: A folder that gives one of these errors stays unusable for the whole search.
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)

_TRITON = "install the version of Triton that belongs to this PyTorch."
_NO_TYPES = {
    "InvalidCxxCompiler": host.NO_CXX_COMPILER.advice,
    "TritonMissing": _TRITON,
    "GPUTooOldForTriton": "torch.compile needs a card of compute capability 7.0 or above.",
}
_TEXTS = {
    "Failed to find C compiler": host.NO_C_COMPILER.advice,
    "Failed to find C++ compiler": host.NO_CXX_COMPILER.advice,
    "No working C++ compiler found": host.NO_CXX_COMPILER.advice,
    "Cannot find a working triton installation": _TRITON,
    "libcuda.so cannot found": "run ldconfig, or set TRITON_LIBCUDA_PATH to the folder of libcuda.so.",
    "Cannot find ptxas": _TRITON,
    "Could not create or locate cache dir": "set TRITON_CACHE_DIR to a folder that can be written.",
    "failed to map segment from shared object": "set TMPDIR to a file system without noexec.",
}
#: What compilers and linkers say about missing files, each with the file.
_ABSENT = re.compile(
    r"fatal error: '?(?P<header>[\w./+-]+)'?(?:: No such file or directory| file not found)"
    r"|cannot find -l(?P<library>[\w.+-]+)"
    r"|cannot execute ['\u2018](?P<program>cc1\w*)"
)
#: Triton builds C files of its own, which contain nothing of the model.
_TRITONS_BUILD = re.compile(r"CalledProcessError: Command '\[.*\.c'")


def _from_compiler(link: BaseException) -> bool:
    """Return whether an exception is torch.compile's own, or was raised in its code while it handled files."""
    return type(link).__module__.startswith(_PACKAGES) or (isinstance(link, OSError) and _raised_inside(link))


def _cannot_compile(links: Sequence[BaseException]) -> tuple[str, str] | None:
    """Return why nothing can be compiled on this machine, and what to do about it, if that is what an exception and its
    causes say; else ``None``."""
    if not any(map(_from_compiler, links)) and not any("Failed to find C" in _text(link) for link in links):
        return None
    for link in links:
        text, name = _text(link), type(link).__name__
        if name in _NO_TYPES and _from_compiler(link):
            return _line(text), _NO_TYPES[name]
        message = next((phrase for phrase in _TEXTS if phrase in text), None)
        if message is not None:
            return _line(text, message), _TEXTS[message]
        absent = _ABSENT.search(text)
        if absent is not None:
            return _line(text, absent[0]), _advice(absent)
        if isinstance(link, OSError) and _raised_inside(link):
            reason = _unusable_file(link)
            if reason is not None:
                return reason
        if _TRITONS_BUILD.search(f"{name}: {text}"):
            if host.python_header(os.environ) is None:
                lack = host.no_python_header()
                return lack.what, lack.advice
            return "the C compiler failed to build Triton's launcher", "its words are in stderr.log."
    return None


def _unusable_file(error: OSError) -> tuple[str, str] | None:
    # `subprocess` gives the name of the program that it could not start.
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if error.errno == errno.ENOENT and last == os.path.join(_STDLIB, "subprocess.py"):
        return f"the compiler {error.filename} cannot be started", "install it, or set CC and CXX."
    if error.errno in _UNWRITABLE:
        return f"the compiler's cache cannot be written: {error}", "make that folder writable."
    return None


def _raised_inside(error: BaseException) -> bool:
    """Return whether the last frame outside the standard library is the compiler's."""
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    outside = [name for name in frames if not name.startswith((_STDLIB, "<")) or "-packages/" in name]
    return bool(outside) and any(folder in outside[-1] for folder in _FOLDERS)


def _advice(absent: re.Match[str]) -> str:
    if absent["header"] == "Python.h":
        return host.no_python_header().advice
    what = absent["header"] or (f"the library {absent['library']}" if absent["library"] else absent["program"])
    return f"install what provides {what}."


def _line(text: str, phrase: str = "") -> str:
    """Return the line of a text that holds a phrase."""
    return next((line.strip() for line in text.splitlines() if phrase in line and line.strip()), text.strip())


# Maps an exception to a status with its cause: by type first, then by known C++ error messages. Never by guessing.
#
# torch.compile wraps an error several times and a loader worker wraps it once, so the whole exception chain is
# examined.


class Diverged(Exception):
    """A loss is not finite."""


class Slow(Exception):
    """The configuration is certainly slower than the pruning threshold, so measuring it further is not worthwhile.

    Attributes:
        rate_per_s: samples per second observed. measurement: what was measured up to that point.
    """

    def __init__(self, rate_per_s: float, measurement: Measurement | None = None) -> None:
        unit = "samples/s" if measurement is None else measurement.unit
        super().__init__(f"ran at {rate_per_s:.4g} {unit}")
        self.rate_per_s = rate_per_s
        self.measurement = measurement


SKIPS = "the script goes on where something fails under these settings: see what it catches, and mend that."
LEAVES = "let the model return all that its loss is computed from, or keep the precision: --fix precision=fp32."


class Unlike(Exception):
    """A script does not train as its baseline does.

    Attributes:
        advice: `SKIPS` or `LEAVES`.
    """

    def __init__(self, how: str, advice: str) -> None:
        super().__init__(how)
        self.advice = advice


class Disturbed(Exception):
    """Other processes kept the machine busy, so no undisturbed measurement was possible."""

    advice = "end what else runs on this machine, tune when it is quiet, or accept it with --allow-busy."


class ScriptKilled(Exception):
    """A signal ended the script.

    Attributes:
        number: of the signal. by_kernel: the kernel's OOM killer has killed something meanwhile.
    """

    def __init__(self, number: int, *, by_kernel: bool) -> None:
        super().__init__(f"the script was ended by {signal_name(number)}")
        self.number = number
        self.by_kernel = by_kernel


@dataclass(frozen=True)
class Verdict:
    """A status with a cause and advice for the user.

    Attributes:
        cannot_compile: the compilation failed because of this machine, not because of the model.
        refuses: the knob whose value something in the training refuses.
    """

    status: TrialStatus
    cause: str
    advice: str | None = None
    cannot_compile: bool = False
    refuses: str | None = None


#: Messages of allocators and libraries that run out of memory.
_OOM_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    # From NCCL, in the last line of its error; which of them depends on what it asked CUDA for.
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # Creating a handle needs memory, and cuBLAS has no other way to report the lack of it here.
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "unable to find an engine",
    "std::bad_alloc",
)
#: oneDNN reports a failed allocation as a failed primitive. It means out-of-memory only when a memory limit is set.
_OOM_TEXTS_UNDER_LIMIT = ("could not create a primitive", "could not execute a primitive", "can't start new thread")
#: How errors of the driver and of NVIDIA's libraries begin, most of which have no type of their own.
_CUDA_TEXTS = (
    "CUDA error: ",
    "CUDA driver error: ",
    "Triton Error [CUDA]: ",
    "cuDNN error: ",
    "cuDNN Frontend error: ",
    "cusolver error: ",
)
_BUS_TEXT = "is killed by signal: Bus error"
#: If at least this much of /dev/shm, and at least half of it, is free after a worker's bus error, it was not full.
AMPLE_BYTES = 2**30
_WORKER_TEXTS = ("DataLoader worker (pid", "exited unexpectedly")
#: The thread that pins memory ends when it cannot read a batch, because the worker that made it is gone.
_WORKER_ALONE_TEXTS = ("is killed by signal", "Pin memory thread exited unexpectedly")
#: Maximum length of a cause. Exception messages can contain printed tensors.
CAUSE_CHARS = 500
#: Messages of `termios` and `curses`, whose errors have no number.
_TERMINAL_TEXTS = ("Inappropriate ioctl for device", "could not find terminal")
_TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and every exception it was raised from, each once."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        link = todo.pop()
        if not isinstance(link, BaseException) or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [getattr(link, "inner_exception", None), link.__cause__, link.__context__]


def classify(error: BaseException, spec: TrialSpec) -> Verdict:
    """Return the status for an exception raised by a launch."""
    if isinstance(error, Diverged):
        lower = step_plan(spec.config).autocast is not None
        full = "this is full precision: look at the learning rate, the loss and the data."
        what_to_do = "this precision may not suit the workload." if lower else full
        return Verdict(TrialStatus.DIVERGED, _text(error), what_to_do)
    if isinstance(error, Unlike):
        refuses = refused_knob(spec.config, _text(error))
        return Verdict(TrialStatus.DIVERGED, _text(error), error.advice, refuses=refuses)
    if isinstance(error, ScriptKilled) and error.number != signal.SIGKILL:
        return Verdict(TrialStatus.CRASHED, str(error), "its last words are in stderr.log.")
    if isinstance(error, ScriptKilled):
        status = TrialStatus.HOST_OOM if error.by_kernel else TrialStatus.KILLED
        return Verdict(status, "the kernel's memory killer ended the script" if error.by_kernel else str(error))
    links = list(chain(error))
    for link in links:
        text = _text(link)
        if _is_shm(link, text):
            return _shm_exhausted(_first_line(link))
        if _is_oom(link, text, spec):
            more = "" if spec.memory_limit_bytes is None else ", or raise --memory-limit"
            # The compiler of older versions of PyTorch names the error that it wraps in the second line, and NCCL names
            # what it lacked in the last line.
            lines = [*map(_first_line, links), *map(_short, text.splitlines())]
            cause = next((line for line in lines if _is_oom(RuntimeError(line), line, spec)), _first_line(link))
            return Verdict(TrialStatus.OOM, cause, f"use a smaller batch or a lower precision{more}.")
    for link in links:
        if _is_dead_worker(link, _text(link)):
            return _dead_worker(link)
    for link in links:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            # Not the configuration's fault. Checked before the compiler's errors, because a full disk can stop it as
            # well.
            return Verdict(TrialStatus.CRASHED, f"the disk is full: {_first_line(link)}", "free some space.")
    if (machine := _cannot_compile(links)) is not None:
        return Verdict(TrialStatus.COMPILE_FAILED, _short(machine[0]), machine[1], cannot_compile=True)
    if any(map(_from_compiler, links)):
        return Verdict(TrialStatus.COMPILE_FAILED, _first_line(links[-1] if len(links) > 1 else error))
    for link in links if not isinstance(error, AutotuneError) else ():
        refuses = None if _is_cuda_error(link) else refused_knob(spec.config, _text(link))
        if refuses is not None:
            layer = _layer(link)
            what = f"{phrase(refuses, spec.config[refuses])} is refused{f' by {layer}' if layer else ''}"
            cause = f"{what}: {_first_line(link)}{_place(link, spec)}"
            return Verdict(TrialStatus.USER_ERROR, cause, refuses=refuses)
    for link in links:
        if isinstance(link, AutotuneError):
            return Verdict(TrialStatus.USER_ERROR, _text(link), link.advice)
        if _is_cuda_error(link):
            # The CUDA context is unusable from here on; only this process is affected.
            return Verdict(TrialStatus.CRASHED, _first_line(link))
    advice = "raise `ulimit -n`: each tensor in a worker's queue is an open file." if _has_no_files(links) else None
    if any(isinstance(link, BlockingIOError) or "can't start new thread" in _text(link) for link in links):
        advice = MORE_PROCESSES
    if spec.command is not None and (any(map(_needs_terminal, links)) or _asked_for_terminal(spec)):
        advice = "nobody types in a launch, and its output is no terminal: tell the script by options what it asks for."
    return Verdict(TrialStatus.USER_ERROR, f"{_first_line(error)}{_place(error, spec)}", advice)


def _is_cuda_error(link: BaseException) -> bool:
    """Return whether the driver or one of its libraries reported an error."""
    accelerator_error = getattr(torch, "AcceleratorError", None)  # since PyTorch 2.8, and not for every error
    return (accelerator_error is not None and isinstance(link, accelerator_error)) or (
        isinstance(link, RuntimeError) and _own_text(link).startswith(_CUDA_TEXTS)
    )


def _own_text(link: BaseException) -> str:
    """Return an exception's message; for one passed on by the thread that pins memory, that of the original
    exception."""
    text = _text(link)
    if not text.startswith("Caught ") or "pin memory thread" not in text:
        return text
    return text.strip().splitlines()[-1].partition(": ")[2]


def _shm_exhausted(evidence: str) -> Verdict:
    free, size = shared_memory()
    return Verdict(
        TrialStatus.SHM_EXHAUSTED,
        f"/dev/shm is too small for the loader's batches, {free / 2**20:.1f} of {size / 2**20:.0f} MiB are free now: "
        f"{evidence}",
        SHM_FULL,
    )


def _dead_worker(link: BaseException) -> Verdict:
    """Classify a dead loader worker by its exit code where it is known, otherwise by PyTorch's message."""
    codes = system.dead_workers()
    if system.NO_SHARED_MEMORY in codes:
        return _shm_exhausted("a loader worker could not send a batch")
    if (-signal.SIGBUS in codes and not _shm_is_ample()) or (not codes and _BUS_TEXT in _text(link)):
        # Pages of shared memory are allocated on first touch, so a process that touches a page too many gets SIGBUS.
        # Newer versions of PyTorch allocate all pages up front; other libraries do not.
        return _shm_exhausted("a loader worker died by SIGBUS")
    how = ", ".join(sorted({_ending(code) for code in codes}))
    return Verdict(
        TrialStatus.LOADER_WORKER_DIED,
        f"a loader worker {how} ({_first_line(link)})" if how else _first_line(link),
        "its last words are in stderr.log.",
    )


def _shm_is_ample() -> bool:
    # The dead worker's memory has been freed again, so free space is only a weak sign. Require a lot of it.
    free, size = shared_memory()
    return free >= max(AMPLE_BYTES, size / 2)


def _ending(code: int) -> str:
    if code == system.LOST_BATCH:
        return "could not send a batch"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal_name(-code)
    return f"was killed ({name})" if code == -signal.SIGKILL else f"died by {name}"


def _has_no_files(links: list[BaseException]) -> bool:
    return any(
        getattr(link, "errno", None) in (errno.EMFILE, errno.ENFILE) or any(t in _text(link) for t in _TOO_MANY_FILES)
        for link in links
    )


def _needs_terminal(link: BaseException) -> bool:
    """Return whether a script has asked for keyboard input, or for the terminal itself."""
    if isinstance(link, EOFError):
        # Others raise it for files that end early, and `getpass` raises it without a message.
        asker = next((file for file, _ in reversed(_frames(link))), "")
        return _text(link) == "EOF when reading a line" or asker.endswith("getpass.py")
    return getattr(link, "filename", None) == "/dev/tty" or any(text in _text(link) for text in _TERMINAL_TEXTS)


def _asked_for_terminal(spec: TrialSpec) -> bool:
    """Return whether a program that a script has started, such as ``stty``, has complained that there is no
    terminal."""
    # Look before the traceback that ends the log: what the script itself has written since is not the cause.
    before, _, _ = end_of(LaunchFiles(Path(spec.folder)).stderr).rpartition(_TRACEBACK)
    return any(text in before for text in _TERMINAL_TEXTS)


def _is_oom(link: BaseException, text: str, spec: TrialSpec) -> bool:
    if isinstance(link, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(link, OSError) and link.errno == errno.ENOMEM:
        return True
    if not isinstance(link, RuntimeError):
        return False
    texts = _OOM_TEXTS + (_OOM_TEXTS_UNDER_LIMIT if spec.memory_limit_bytes else ())
    return any(t in text for t in texts)


def _is_shm(link: BaseException, text: str) -> bool:
    if isinstance(link, OSError) and link.errno == errno.ENOSPC:
        return "/dev/shm" in str(link.filename or "") or "torch_" in str(link.filename or "")
    return isinstance(link, RuntimeError) and system.SHM_TEXT in text


def _is_dead_worker(link: BaseException, text: str) -> bool:
    if isinstance(link, RuntimeError):
        return all(t in text for t in _WORKER_TEXTS) or any(t in text for t in _WORKER_ALONE_TEXTS)
    # When a worker is killed, the queue's socket often breaks before PyTorch notices its death.
    if isinstance(link, ConnectionResetError | EOFError | BrokenPipeError):
        files = [file for file, _ in _frames(link)]
        return any(f.endswith("torch/utils/data/dataloader.py") or "torch/multiprocessing" in f for f in files)
    return False


def _frames(error: BaseException) -> list[tuple[str, int | None]]:
    """Return the file and line of each frame that an exception passed through, the innermost last; if it was raised in
    a script's own process, of the frames there."""
    frames = getattr(error, FRAMES, None)
    if frames is not None:
        return [(file, line) for file, line in frames]
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]


def _layer(error: BaseException) -> str | None:
    """Return the class name of the innermost module that an exception passed through; ``None`` if there is none."""
    if hasattr(error, FRAMES):
        return getattr(error, "layer", None)
    receivers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(
        (type(receiver).__name__ for receiver in reversed(receivers) if isinstance(receiver, torch.nn.Module)), None
    )


def _text(error: BaseException) -> str:
    """Return an exception's message, even if its class fails to produce one."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its message cannot be shown: {type(broken).__name__})"


def _first_line(error: BaseException) -> str:
    """Return the exception as one sentence. For a loader worker's error, use the last line of its traceback."""
    text = _text(error).strip()
    if text.startswith("Caught ") and "DataLoader worker" in text:
        return _short(text.splitlines()[-1].strip())
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    name = type(error).__name__
    return f"{name}: {_short(line)}" if line else name


def _short(line: str) -> str:
    # The cause is printed in a terminal, so replace control characters.
    shown = "".join(c if c.isprintable() else "�" for c in line[:CAUSE_CHARS])
    return shown if len(line) <= CAUSE_CHARS else f"{shown} …"


def _place(error: BaseException, spec: TrialSpec) -> str:
    """Return where in the user's own file the error was raised, as `` (file.py:12)``."""
    if spec.command is None:
        files = {spec.workload.path}
    else:
        files = {os.path.join(spec.command.folder, word) for word in spec.command.words if word.endswith(".py")}
    for file, line in reversed(_frames(error)):
        if file in files:
            return f" ({file.rsplit('/', 1)[-1]}:{line})"
    return ""


# How a script ended, from what its agent reports, or else from the traceback that it printed.

#: Attribute of an exception that was raised in a script's process: the frames it passed through there, each ``[file,
#: line]``.
FRAMES = "_autotune_frames"
_TRACEBACK = "Traceback (most recent call last):"
_TRACED = re.compile(r'  File "(.+)", line (\d+)')
#: The line of the exception itself.
_LAST_LINE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
#: How many lines a framework may print after a traceback. If there are more, the script went on after it.
_AFTER = 3
#: How many characters of a last line are shown.
_LONGEST = 200


def rebuilt(chain: list[list[Any]]) -> Exception:
    """Return a copy of an exception of a script, with its name, base, message and causes.

    Args:
        chain: as the agent reports it; see `autotune_agent.facts.chain`.
    """
    links = [_link(*link_facts) for link_facts in chain]
    for link, cause in pairwise(links):
        link.__cause__ = cause
    return links[0]


def _link(name: str, bases: list[str], message: str, facts: dict[str, Any]) -> Exception:
    frames = facts.pop("frames", [])
    kind = next((base for n in (name, *bases) if (base := _known(n)) is not None), Exception)
    module, _, short = name.rpartition(".")
    # Give it the same name and message, so that it is reported, and classified, as what it was. Many classes derive
    # their message from the arguments that they were created with (`OSError`, `KeyError`, `UnicodeDecodeError`), which
    # are not available here.
    namespace = {
        "__module__": module,
        # Some base classes take other arguments.
        "__init__": BaseException.__init__,
        "__str__": lambda self: message,
    }
    error: Exception = type(short, (kind,), namespace)(message)
    setattr(error, FRAMES, frames)
    for attribute, value in facts.items():
        setattr(error, attribute, value)
    return error


def is_told(error: BaseException) -> bool:
    """Return whether an error says how a script ended, or what it lacks, as opposed to a fault in watching it."""
    return hasattr(error, FRAMES) or isinstance(error, ScriptKilled | WorkloadError)


def _known(name: str) -> type[Exception] | None:
    module, _, short = name.rpartition(".")
    holder = builtins if module == "builtins" else sys.modules.get(module) if module.startswith("torch") else None
    candidate = getattr(holder, short, None)
    # A group cannot be created without the exceptions in it.
    usable = (
        isinstance(candidate, type)
        and issubclass(candidate, Exception)
        and not issubclass(candidate, BaseExceptionGroup)
    )
    return candidate if usable else None


def last_words(log: str) -> list[list[Any]] | None:
    """Return the exception that the last traceback in a log ends with, as a chain (see `autotune_agent.watching`).

    ``None`` unless the log ends with it, except for a few lines: programs that catch all their exceptions print them,
    and end. What caused it is not included.
    """
    _, marker, text = log.rpartition(_TRACEBACK)
    if not marker:
        return None
    frames: list[list[Any]] = []
    lines = text.lstrip("\n").splitlines()
    for number, line in enumerate(lines):
        frame = _TRACED.match(line)
        if frame is not None:
            frames.append([frame[1], int(frame[2])])
        if line.startswith(" ") or not line:
            continue
        ends = _LAST_LINE.fullmatch(line)
        after = [other for other in lines[number + 1 :] if other.strip()]
        if ends is None or len(after) > _AFTER:
            return None
        name = ends[1] if "." in ends[1] or not hasattr(builtins, ends[1]) else f"builtins.{ends[1]}"
        return [[name, [], ends[2] or "", {"frames": frames}]]
    return None


def last_line(log: str) -> str | None:
    """Return the last line of a log that has words in it, cut to `_LONGEST`; ``None`` if there is none.

    Option parsers, launchers and Python itself give the reason for ending in one line, without a traceback.
    """
    lines = (" ".join(line.split()) for line in reversed(log.splitlines()))
    last = next((line for line in lines if any(c.isalpha() for c in line) and not line.startswith("autotune: ")), None)
    return last if last is None or len(last) <= _LONGEST else last[:_LONGEST] + " …"
