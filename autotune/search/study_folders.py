"""Names and folders of studies: how a new study gets them, and how an existing study is found."""

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
#: Stands for the study that was started last.
NEWEST = ""
#: The factor by which expected seconds are increased, and the multiple to which they are rounded up.
_AMPLE, _STEP_S = 1.2, 30
#: Maximum length of a name. File systems allow 255 bytes, and numbered studies and exports add to the name.
MAX_NAME = 200


def check_study_name(name: str) -> None:
    """Refuse a name that is not a valid folder name on every system. The empty name, which requests a number, passes.

    Raises:
        UsageError: the name is invalid.
    """
    if name and not STUDY_NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a study", advice="use letters, digits, dots, dashes and underscores.")
    if len(name) > MAX_NAME:
        raise UsageError(f"{name!r} is too long for a study's name", advice=f"use at most {MAX_NAME} characters.")


def require_utf8(path: Path) -> None:
    """Refuse a path that is not valid UTF-8, because it could not be written to ``study.yaml``, a profile or a page.

    Raises:
        UsageError: the path is not valid UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="replace")
        raise UsageError(
            f"the name of {shown} is not valid UTF-8", advice="rename it, or use a link with another name."
        ) from None


def new_folder(spec: StudySpec, ref: WorkloadRef, studies: Path, taken: Collection[str] = ()) -> StudyFiles:
    """Make the folder of a new study. If the request has no name, the study gets a numbered one that is not taken.

    Raises:
        UsageError: the name is taken, reserved for a job of the daemon, or invalid.
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
        # A search that was killed before it wrote its request leaves an empty folder, with nothing to resume.
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
    """Make a folder with this name and the next free number.

    Raises:
        UsageError: the path of the studies' folder is not valid UTF-8.
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
    """Find a study by its name or its folder's path; `NEWEST` is the one started last.

    Raises:
        UnknownNameError: there is no such study.
    """
    requests = [f for f in studies.glob("*/study.yaml") if f.is_file()]
    if name == NEWEST:
        if not requests:
            raise UsageError(f"{studies} holds no study yet", advice="--studies-dir names another folder.")
        return StudyFiles(max(requests, key=lambda f: (f.stat().st_mtime, f.parent.name)).parent.absolute())
    for folder in (studies / name, Path(name)):
        # Unlike Path.is_file, this is False for a name that is too long.
        if os.path.isfile(folder / "study.yaml"):
            return StudyFiles(folder.absolute())
    names = [f.parent.name for f in requests]
    advice = None if names else f"{studies} holds no study yet; --studies-dir names another folder."
    raise UnknownNameError("study", name, names, advice=advice)


def study_argument(files: StudyFiles) -> str:
    """Return a study as an argument for commands, which `find_study` resolves from the current folder."""
    return files.name if files.folder.parent == DEFAULT_STUDIES.absolute() else str(files.folder)


def resume_command(study: str, more_s: float) -> str:
    """Return the command that resumes a study for about this many more seconds."""
    return f"autotune resume {shlex.quote(study)} --budget +{_STEP_S * math.ceil(_AMPLE * max(1.0, more_s) / _STEP_S)}s"


def absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
