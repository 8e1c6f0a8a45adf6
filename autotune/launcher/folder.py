"""The folder of a launch, made ready for it."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import MachineError
from autotune.files import write_atomic
from autotune.layout import LaunchFiles
from autotune.records import TrialSpec


def open_folder(spec: TrialSpec) -> LaunchFiles:
    """Make the launch's folder and write ``spec.json`` into it.

    A launch that is tried again under the same name does not inherit the old one's result.

    Raises:
        MachineError: the folder cannot be made or written.
    """
    files = LaunchFiles(Path(spec.folder))
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        files.result.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot use the folder {files.folder}: {error.strerror}", advice="--studies-dir names another place."
        ) from error
    write_atomic(files.spec, spec.model_dump_json(indent=1))
    return files
