"""Packs a launch for a worker: with its code, and with the launch that makes what it starts from."""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotune.workload.catalog import source_files
from autotune.launcher.errands import Errand
from autotune.base.layout import StudyFiles
from autotune.base.records import TrialSpec


def packed(name: str, spec: TrialSpec, study: Path) -> Errand:
    """Return a launch as an errand.

    Args:
        name: see `Errand`.
        study: the study's folder.
    """
    path = spec.workload.path
    script = None if spec.command is None else path
    return Errand(
        name=name,
        study=str(study),
        spec=spec,
        code=source_files(Path(path)) if spec.command is None and path is not None else {},
        script=script,
        script_sha256="" if script is None else spec.workload.sha256,
        before=_maker(spec, StudyFiles(study)),
    )


def _maker(spec: TrialSpec, files: StudyFiles) -> TrialSpec | None:
    """Return the launch that makes what a check starts from; ``None`` if it starts from nothing."""
    if spec.check is None or (spec.check.reference and spec.check.seed == 0):
        return None
    for path in sorted(files.launches.glob("*/spec.json")):
        with contextlib.suppress(OSError, ValueError):
            made = TrialSpec.model_validate_json(path.read_text())
            check = made.check
            if check is not None and check.reference and check.seed == 0 and check.store == spec.check.store:
                return made
    return None
