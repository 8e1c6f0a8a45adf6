"""A file with several jobs for ``autotune submit --file``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from autotune.base.errors import UsageError
from autotune.base.files import read_regular

YAML_BYTES = 2**20


def read_jobs(path: Path, repeatable: Collection[str]) -> list[list[str]]:
    """Read the jobs of a YAML file, each as the words of a command line after ``autotune submit``.

    The file has a list ``jobs`` of mappings from options to values, and optionally a mapping ``defaults`` that applies
    to all of them. A list of values repeats the option, and a mapping stands for NAME=VALUE.

    Args:
        repeatable: the options that can have several values, as they are typed.

    Raises:
        UsageError: the file cannot be read, or does not have this form.
    """
    try:
        found = YAML(typ="safe", pure=True).load(read_regular(path, YAML_BYTES, follow=True).decode())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    jobs = found.get("jobs") if isinstance(found, dict) else None
    defaults = found.get("defaults", {}) if isinstance(found, dict) else None
    if isinstance(found, dict) and "models" in found:
        raise UsageError(f"{path} is a matrix, not a list of jobs", advice=f"write `autotune submit {path}`.")
    well_formed = isinstance(jobs, list) and jobs and isinstance(defaults, dict)
    if not well_formed or not all(isinstance(job, dict) for job in cast(list[Any], jobs)):
        raise UsageError(
            f"{path} holds no list of jobs", advice="write `jobs:`, and under it `- model: resnet50` for each."
        )
    unknown = set(found) - {"jobs", "defaults"}
    if unknown:
        raise UsageError(f"{path}: {sorted(map(str, unknown))[0]!r} is neither jobs nor defaults")
    return [
        _words({**cast(dict[str, Any], defaults), **job}, path, repeatable) for job in cast(list[dict[str, Any]], jobs)
    ]


def _words(options: Mapping[str, Any], path: Path, repeatable: Collection[str]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        try:
            words += option_words(str(name), value, repeatable)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return words


def option_words(name: str, value: Any, repeatable: Collection[str]) -> list[str]:
    """Return an option of a file as words of a command line.

    Args:
        repeatable: the options that can have several values, as they are typed.

    Raises:
        UsageError: an option cannot have this value.
    """
    words: list[str] = []
    for one in _settings(value) if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        if isinstance(one, dict | list) or one is None:
            raise UsageError(f"{name} has no value that an option can have")
        if one is not False:
            words += [flag(name)] if one is True else [flag(name), str(one)]
    # Of an option that is repeated and cannot be, only the last value would count.
    if isinstance(value, dict | list) and flag(name) not in repeatable:
        raise UsageError(f"{name} has one value, not several")
    return words


def flag(name: str) -> str:
    """Return an option of a file as it is typed: ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"


def _settings(value: Mapping[str, Any]) -> list[str]:
    """Return ``batch_size=32,64`` for ``{batch_size: [32, 64]}``."""
    texts = {name: one if isinstance(one, list) else [one] for name, one in value.items()}
    return [
        f"{name}={','.join(str(v).lower() if isinstance(v, bool) else str(v) for v in vs)}"
        for name, vs in texts.items()
    ]
