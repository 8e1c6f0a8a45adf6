"""Names and folders of studies: which a new one gets, and how an existing one is found."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections.abc import Collection
from pathlib import Path

from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import StudySpec, WorkloadRef
from autotune.study.budget import refuse_reserved

STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Stands for the study that was begun last.
NEWEST = ""
#: Of the seconds that something is expected to take, and the steps in which they are told.
_AMPLE, _STEP_S = 1.2, 30
#: File systems take 255 bytes in a name, and names of numbered studies and of exports are longer than this.
MAX_NAME = 200


def check_study_name(name: str) -> None:
    """Refuse a name that is not a valid folder name on every system. The empty name, which asks for a number, passes.

    Raises:
        UsageError: the name is invalid.
    """
    if name and not STUDY_NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a study", advice="use letters, digits, dots, dashes and underscores.")
    if len(name) > MAX_NAME:
        raise UsageError(f"{name!r} is too long for a study's name", advice=f"use at most {MAX_NAME} characters.")


def require_utf8(path: Path) -> None:
    """Refuse a path that is not valid UTF-8: it could not be written to ``study.yaml``, a profile or a page.

    Raises:
        UsageError: it is not.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="replace")
        raise UsageError(
            f"the name of {shown} is not valid UTF-8", advice="rename it, or use a link with another name."
        ) from None


def new_folder(spec: StudySpec, ref: WorkloadRef, studies: Path, taken: Collection[str] = ()) -> StudyFiles:
    """Make the folder of a new study, with a numbered name, which is not among the taken ones, if the request has none.

    Raises:
        UsageError: the name is taken, kept for a job of the daemon, or invalid.
        MachineError: the folder cannot be made.
    """
    require_utf8(studies.absolute())
    try:
        studies.mkdir(parents=True, exist_ok=True)
        if not spec.name:
            return _numbered(ref.name.replace(":", "-"), studies, taken)
        check_study_name(spec.name)
        files = StudyFiles((studies / spec.name).absolute())
        files.folder.mkdir(exist_ok=True)
        refuse_reserved(files, spec.mark)
        # An empty folder is left by a search that was killed before it wrote its request. It has nothing to resume.
        if any(path != files.reservation for path in files.folder.iterdir()):
            raise UsageError(
                f"study {spec.name!r} exists already",
                advice=f"`autotune resume {spec.name}` goes on with it; another --study starts a new one.",
            )
        return files
    except OSError as error:
        raise MachineError(
            f"cannot make a study in {studies}: {error.strerror}", advice="--studies-dir names another folder."
        ) from error


def numbered_folder(name: str, studies: Path) -> StudyFiles:
    """Make a folder of that name and the next free number.

    Raises:
        UsageError: the name of the folder of all studies is no text.
        MachineError: the folder cannot be made.
    """
    require_utf8(studies.absolute())
    try:
        studies.mkdir(parents=True, exist_ok=True)
        return _numbered(name, studies)
    except OSError as error:
        raise MachineError(f"{studies} cannot be written: {error.strerror}") from None


def _numbered(name: str, studies: Path, taken: Collection[str] = ()) -> StudyFiles:
    number = 1
    while True:
        folder = studies / f"{name}-{number}"
        if folder.name not in taken:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return StudyFiles(folder.absolute())
        number += 1


def find_study(name: str, studies: Path) -> StudyFiles:
    """Find a study by its name, or by its folder's path; `NEWEST` is that which was begun last.

    Raises:
        UnknownNameError: there is no such study.
    """
    begun = [f for f in studies.glob("*/study.yaml") if f.is_file()]
    if name == NEWEST:
        if not begun:
            raise UsageError(f"{studies} holds no study yet", advice="--studies-dir names another folder.")
        return StudyFiles(max(begun, key=lambda f: (f.stat().st_mtime, f.parent.name)).parent.absolute())
    for folder in (studies / name, Path(name)):
        # Unlike Path.is_file, this is False for a name that is too long.
        if os.path.isfile(folder / "study.yaml"):
            return StudyFiles(folder.absolute())
    known = [f.parent.name for f in begun]
    advice = None if known else f"{studies} holds no study yet; --studies-dir names another folder."
    raise UnknownNameError("study", name, known, advice=advice)


def study_argument(files: StudyFiles) -> str:
    """Return a study as an argument of commands, which `find_study` resolves from the current folder."""
    return files.name if files.folder.parent == DEFAULT_STUDIES.absolute() else str(files.folder)


def resume_command(study: str, more_s: float) -> str:
    """Return the command that goes on with a study for about so many more seconds."""
    return f"autotune resume {shlex.quote(study)} --budget +{_STEP_S * math.ceil(_AMPLE * max(1.0, more_s) / _STEP_S)}s"


def absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
