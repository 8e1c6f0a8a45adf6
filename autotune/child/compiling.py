"""Tells a machine that cannot compile from a model that cannot be compiled, by the exceptions of torch.compile.

Types are known where Inductor raises its own. Compilers report on stderr, and Inductor's helper processes pass on the
text of an exception only, so the rest is known by its text.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.machine import compilers

#: Packages whose exceptions are about compiling.
_PACKAGES = ("torch._dynamo", "torch._inductor", "torch.fx", "triton")
_FOLDERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")
_STDLIB = sysconfig.get_path("stdlib")
#: A folder with these errors stays unusable for the whole search.
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)

_TRITON = "install the version of Triton that belongs to this PyTorch."
_NO_TYPES = {
    "InvalidCxxCompiler": compilers.NO_CXX_COMPILER.advice,
    "TritonMissing": _TRITON,
    "GPUTooOldForTriton": "torch.compile needs a card of compute capability 7.0 or above.",
}
_TEXTS = {
    "Failed to find C compiler": compilers.NO_C_COMPILER.advice,
    "Failed to find C++ compiler": compilers.NO_CXX_COMPILER.advice,
    "No working C++ compiler found": compilers.NO_CXX_COMPILER.advice,
    "Cannot find a working triton installation": _TRITON,
    "libcuda.so cannot found": "run ldconfig, or set TRITON_LIBCUDA_PATH to the folder of libcuda.so.",
    "Cannot find ptxas": _TRITON,
    "Could not create or locate cache dir": "set TRITON_CACHE_DIR to a folder that can be written.",
    "failed to map segment from shared object": "set TMPDIR to a file system without noexec.",
}
#: What compilers and linkers say of files that are not there, each with the file.
_ABSENT = re.compile(
    r"fatal error: '?(?P<header>[\w./+-]+)'?(?:: No such file or directory| file not found)"
    r"|cannot find -l(?P<library>[\w.+-]+)"
    r"|cannot execute ['\u2018](?P<program>cc1\w*)"
)
#: Triton builds C files of its own, which have nothing of the model in them.
_TRITONS_BUILD = re.compile(r"CalledProcessError: Command '\[.*\.c'")


@dataclass(frozen=True)
class CannotCompile:
    """Why nothing can be compiled on this machine, and what to do about it."""

    cause: str
    advice: str


def from_compiler(link: BaseException) -> bool:
    """Return whether an exception is torch.compile's own, or raised in its code while it handled files."""
    return type(link).__module__.startswith(_PACKAGES) or (isinstance(link, OSError) and _raised_inside(link))


def cannot_compile(links: Sequence[BaseException], text_of: Callable[[BaseException], str]) -> CannotCompile | None:
    """Return why this machine cannot compile, if that is what an exception and its causes say; else ``None``."""
    if not any(map(from_compiler, links)) and not any("Failed to find C" in text_of(link) for link in links):
        return None
    for link in links:
        text, name = text_of(link), type(link).__name__
        if name in _NO_TYPES and from_compiler(link):
            return CannotCompile(_line(text), _NO_TYPES[name])
        known = next((phrase for phrase in _TEXTS if phrase in text), None)
        if known is not None:
            return CannotCompile(_line(text, known), _TEXTS[known])
        absent = _ABSENT.search(text)
        if absent is not None:
            return CannotCompile(_line(text, absent[0]), _advice(absent))
        if isinstance(link, OSError) and _raised_inside(link):
            found = _unusable_file(link)
            if found is not None:
                return found
        if _TRITONS_BUILD.search(f"{name}: {text}"):
            if compilers.python_header(os.environ) is None:
                lack = compilers.no_python_header()
                return CannotCompile(lack.what, lack.advice)
            return CannotCompile("the C compiler failed to build Triton's launcher", "its words are in stderr.log.")
    return None


def _unusable_file(error: OSError) -> CannotCompile | None:
    # subprocess names the program that it could not start.
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if error.errno == errno.ENOENT and last == os.path.join(_STDLIB, "subprocess.py"):
        return CannotCompile(f"the compiler {error.filename} cannot be started", "install it, or set CC and CXX.")
    if error.errno in _UNWRITABLE:
        return CannotCompile(f"the compiler's cache cannot be written: {error}", "make that folder writable.")
    return None


def _raised_inside(error: BaseException) -> bool:
    """Return whether the last frame outside the standard library is the compiler's."""
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    own = [name for name in frames if not name.startswith((_STDLIB, "<")) or "-packages/" in name]
    return bool(own) and any(folder in own[-1] for folder in _FOLDERS)


def _advice(absent: re.Match[str]) -> str:
    if absent["header"] == "Python.h":
        return compilers.no_python_header().advice
    what = absent["header"] or (f"the library {absent['library']}" if absent["library"] else absent["program"])
    return f"install what provides {what}."


def _line(text: str, phrase: str = "") -> str:
    """Return the line of a text that holds a phrase."""
    return next((line.strip() for line in text.splitlines() if phrase in line and line.strip()), text.strip())
