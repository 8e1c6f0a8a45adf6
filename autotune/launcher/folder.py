"""Prepares the folder of a launch."""

from __future__ import annotations

import shutil
from pathlib import Path

from autotune.base.errors import MachineError
from autotune.base.files import write_atomic
from autotune.base.layout import LaunchFiles
from autotune.base.records import TrialSpec


def make_way(path: Path) -> None:
    """Remove a folder that user code has put where a file of ours belongs. All else can be replaced or unlinked."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def open_folder(spec: TrialSpec) -> LaunchFiles:
    """Create the launch's folder and write ``spec.json`` into it.

    The result of an earlier launch with the same name is removed.

    Raises:
        MachineError: the folder cannot be created or written.
    """
    files = LaunchFiles(Path(spec.folder))
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        make_way(files.result)
        files.result.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot use the folder {files.folder}: {error.strerror}", advice="--studies-dir names another place."
        ) from error
    write_atomic(files.spec, spec.model_dump_json(indent=1))
    return files
