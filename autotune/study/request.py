"""``study.yaml``: the request of a study, readable by people, and by YAML 1.1 and 1.2 parsers alike."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from autotune.base.errors import UsageError
from autotune.base.files import read_regular, write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import SCHEMA_VERSION, StudySpec

#: A request takes about a kilobyte.
MAX_REQUEST_BYTES = 2**20


def write_request(files: StudyFiles, spec: StudySpec) -> None:
    """Write ``study.yaml``. All strings are quoted, because YAML 1.1 parsers read a bare ``off`` as false.

    Raises:
        MachineError: the folder cannot be written.
    """
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.dump(_quoted(spec.model_dump(mode="json")), stream)
    heading = "# What was asked for; `autotune resume` asks for the same again.\n"
    write_atomic(files.request, heading + stream.getvalue())


def read_request(files: StudyFiles) -> StudySpec:
    """Read ``study.yaml``.

    Raises:
        UsageError: the file is missing, damaged, or written by a newer version.
    """
    try:
        found = YAML(typ="safe", pure=True).load(read_regular(files.request, MAX_REQUEST_BYTES, follow=True).decode())
        if isinstance(found, dict) and isinstance(v := found.get("schema_version"), int) and v > SCHEMA_VERSION:
            raise UsageError(
                f"study {files.name!r} was made by a newer autotune (schema {v})", advice="upgrade autotune."
            )
        return StudySpec.model_validate(found)
    except OSError as error:
        raise UsageError(f"{files.request} cannot be read: {error.strerror}") from error
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{files.request} is not what autotune wrote: {(str(error).splitlines() or [type(error).__name__])[0]}",
            advice="undo the change, or start a new study; the trials in the folder are untouched.",
        ) from error


def process_mark(files: StudyFiles, spec: StudySpec) -> str:
    """Return the mark of a study's processes, by which the next run finds those that are left.

    It names the folder too: a copy of a study has the same request, and must not end what the original runs.
    """
    if not files.folder.exists():
        return spec.mark  # a preview makes no study
    folder = files.folder.stat()
    return f"{spec.mark}-{folder.st_dev:x}-{folder.st_ino:x}"


def _quoted(value: Any) -> Any:
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, dict):
        return {_quoted(k): _quoted(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_quoted(v) for v in value]
    return value
