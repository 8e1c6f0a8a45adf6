"""What torch.compile needs on a machine besides PyTorch: a compiler, and Python's header files. Starts no process."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HEADER = "Python.h"
#: Lists of folders in which gcc and clang look for header files.
_SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")


@dataclass(frozen=True)
class Lack:
    """Something that is not there.

    Attributes:
        what: a clause that names it. advice: what to install, as a sentence's end.
    """

    what: str
    advice: str


def cxx_compiler(env: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler that Inductor uses for the CPU; ``None`` if there is none."""
    # Inductor looks for these two and no other.
    return shutil.which(_program(env.get("CXX")) or "g++", path=env.get("PATH"))


def c_compiler(env: Mapping[str, str]) -> str | None:
    """Return the path of the C compiler with which Triton builds its launcher; ``None`` if there is none."""
    stated = _program(env.get("CC"))
    names = (stated,) if stated else ("gcc", "clang")
    return next((path for name in names if (path := shutil.which(name, path=env.get("PATH")))), None)


def python_header(env: Mapping[str, str]) -> Path | None:
    """Return the path of ``Python.h``, which both compilers need; ``None`` if there is none."""
    searched = [folder for name in _SEARCHED for folder in env.get(name, "").split(os.pathsep) if folder]
    for folder in (*_include_folders(), *searched):
        header = Path(folder, _HEADER)
        if header.is_file():
            return header
    return None


def no_python_header() -> Lack:
    """Return the lack of ``Python.h``, with the place where it should be."""
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    advice = f"install Python's header files (Debian: apt install {package})."
    return Lack(f"{_HEADER} is not in {_include_folders()[0]}", advice)


NO_C_COMPILER = Lack("there is no C compiler for Triton", "install gcc (Debian: apt install gcc) or set CC.")
NO_CXX_COMPILER = Lack("there is no C++ compiler for Inductor", "install g++ (Debian: apt install g++) or set CXX.")


def _program(stated: str | None) -> str | None:
    """Return the program of a command line such as ``ccache g++``."""
    try:
        return next(iter(shlex.split(stated or "")), None)
    except ValueError:  # quotes that are not closed
        return stated


def _include_folders() -> tuple[str, ...]:
    # Debian's own scheme adds "local", where the headers are not.
    return sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")
