"""The files of launches: what was asked of each, and how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autotune.base.files import read_regular, write_atomic
from autotune.launcher.verdict import MAX_RESULT_BYTES
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import TrialResult, TrialSpec


def read_launch(files: LaunchFiles) -> tuple[TrialSpec | None, TrialResult | None]:
    """Read the spec and the result in a launch's folder; each is ``None`` if it is missing or unreadable."""
    spec: TrialSpec | None = None
    result: TrialResult | None = None
    with contextlib.suppress(OSError, ValueError):
        spec = TrialSpec.model_validate_json(read_regular(files.spec, MAX_RESULT_BYTES))
        result = TrialResult.model_validate_json(read_regular(files.result, MAX_RESULT_BYTES))
    return spec, result


def read_launches(files: StudyFiles) -> Iterator[tuple[TrialSpec, TrialResult]]:
    """Read every readable launch of a study: the trials in order, then the launches outside the search."""
    for folder in (*sorted(files.trials.glob("*")), *sorted(files.launches.glob("*"))):
        spec, result = read_launch(LaunchFiles(folder))
        if spec is not None and result is not None:
            yield spec, result


def write_result(files: LaunchFiles, result: TrialResult) -> None:
    """Write a result to the folder of a launch that could not write its own."""
    files.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(files.result, result.model_dump_json())
