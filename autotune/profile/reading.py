"""Reads a profile from untrusted text. It must be plain data, and every error says what to change."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    MappingStartEvent,
    NodeEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from autotune.base.errors import ProfileError, UnknownNameError
from autotune.base.files import read_regular
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.profile.schema import EXPORT_AGAIN, SCHEMA_VERSION, Profile, Wrong, shown
from autotune.base.records import LARGEST

#: A profile is a few KiB; a larger file is something else.
MAX_BYTES = 2**20
#: Far above what a profile needs; parsing a hostile MiB would otherwise take many seconds.
_MAX_DEPTH = 20
_MAX_VALUES = 10_000
_CORRECT = f"correct that line, or {EXPORT_AGAIN}"
_CUT_SHORT = f"the file may have been cut short; {EXPORT_AGAIN}"
#: Messages for pydantic's error types, worded to follow the key's name.
_MUST = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text (in quotes)",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "finite_number": "must be a finite number",
}


def read(path: Path) -> Profile:
    """Read a profile. Nothing in the file is imported or run.

    Raises:
        ProfileError: the file does not exist, cannot be read, or is not a profile that this version understands.
    """
    try:
        data = read_regular(path, MAX_BYTES, follow=True)
    except FileNotFoundError:
        found = _found_near(path)
        makes = "`autotune search` makes one in its study's folder, `autotune export STUDY -o FILE` copies it."
        raise ProfileError(
            f"there is no profile {path}", advice=makes if found is None else f"did you mean {found}?"
        ) from None
    except IsADirectoryError:
        found = _found_near(path)
        raise ProfileError(
            f"{path} is a folder", advice="name a profile's file." if found is None else f"its profile is {found}."
        ) from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _too_large(str(path)) from None
        raise ProfileError(
            f"cannot read {path}: {error.strerror or error}", advice="name a profile's file that you may read."
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProfileError(f"{path} is not UTF-8 text (line {line})", advice=f"a profile is; {EXPORT_AGAIN}") from None
    return parse(text, str(path))


def _found_near(path: Path) -> Path | None:
    """Return the profile that may be meant by a folder, the name of a study, or the name of a profile alone."""
    own, named = StudyFiles(path).profile, StudyFiles(DEFAULT_STUDIES / path).profile
    # What may not be looked at is not meant.
    with contextlib.suppress(OSError):
        found = next((one for one in (own, named) if one.is_file()), None)
        if found is None and path.name == own.name:
            others = (path.parent / DEFAULT_STUDIES).glob(f"*/{own.name}")
            found = max(others, key=lambda one: one.stat().st_mtime, default=None)
        return found
    return None


def parse(text: str, source: str) -> Profile:
    """Parse a profile from text; error messages refer to it as ``source``.

    Raises:
        ProfileError: the text is not a profile that this version understands.
    """
    if len(text) > MAX_BYTES:
        raise _too_large(source)
    data = plain_data(text, source)
    if not isinstance(data, dict):
        raise ProfileError(f"{source} is no profile: it holds no keys", advice=EXPORT_AGAIN)
    _check_numbers(data, source)
    _check_schema(data, source)
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, data, source) from None


def _too_large(source: str) -> ProfileError:
    return ProfileError(
        f"{source} is larger than {MAX_BYTES // 2**20} MiB, which no profile is", advice="name a profile's file."
    )


def plain_data(text: str, source: str, *, kind: str = "profile", again: str = EXPORT_AGAIN) -> Any:
    """Return the data in YAML from anybody: nothing but mappings, lists and plain values, and not many of them.

    Args:
        source, kind: how error messages call the text. again: how to get a correct one.

    Raises:
        ProfileError: it is no YAML, or has more than data.
    """
    try:
        _refuse_cleverness(text, source, kind, again)
        return YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        line = _line_of(error, text)
        raise ProfileError(
            f"{source}: line {line} repeats a key of its section: {shown(text.splitlines()[line - 1].strip())}",
            advice="keep one of the two lines.",
        ) from None
    except YAMLError as error:
        raise ProfileError(
            f"{source} is not YAML (line {_line_of(error, text)})",
            advice=f"correct that line, or {again}",
            detail=str(error),
        ) from None
    except (ValueError, TypeError) as error:
        # Text that looks like a number or a date but is not valid: 2026-13-45, an integer of 5,000 digits.
        raise ProfileError(
            f"{source} holds a value that YAML cannot read", advice="put text in quotes.", detail=str(error)
        ) from None


def _line_of(error: YAMLError, text: str) -> int:
    if isinstance(error, ReaderError):
        return text.count("\n", 0, error.position) + 1
    mark = error.problem_mark or error.context_mark if isinstance(error, MarkedYAMLError) else None
    return 1 if mark is None else min(mark.line + 1, max(1, len(text.splitlines())))


def _refuse_cleverness(text: str, source: str, kind: str, again: str) -> None:
    """Reject YAML features that only an attacker would use, before any value is constructed."""
    depth = documents = values = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        found = None
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None) is not None:
            found = "an anchor or alias (& or *)"
        elif getattr(event, "tag", None) is not None:
            found = "a tag (!)"
        depth += isinstance(event, MappingStartEvent | SequenceStartEvent) - isinstance(event, CollectionEndEvent)
        documents += isinstance(event, DocumentStartEvent)
        values += isinstance(event, NodeEvent)
        if values > _MAX_VALUES:
            found = f"more than {_MAX_VALUES} values"
        if depth > _MAX_DEPTH:
            found = f"sections more than {_MAX_DEPTH} deep"
        if documents > 1:
            found = "a second document (---)"
        if found is not None:
            raise ProfileError(
                f"{source}: line {event.start_mark.line + 1} has {found}, which a {kind} may not have",
                advice=f"a {kind} is plain data; {again}",
            )


def _check_schema(data: dict[Any, Any], source: str) -> None:
    version = data.get("schema_version")
    if type(version) is not int or version < 1:
        said = f"its schema_version is {shown(version)}" if "schema_version" in data else "it has no schema_version"
        raise ProfileError(f"{source} is no profile: {said}", advice=EXPORT_AGAIN)
    if version > SCHEMA_VERSION:
        versions = data.get("versions")
        made_by = versions.get("autotune") if isinstance(versions, dict) else None
        by = f"a newer autotune, {shown(made_by)}" if isinstance(made_by, str) else "a newer autotune"
        raise ProfileError(
            f"{source} was made by {by} (schema {version}, this one reads {SCHEMA_VERSION})",
            advice="upgrade autotune, or export the study with this version.",
        )


def _check_numbers(data: Any, source: str, *path: str) -> None:
    """Refuse whole numbers of any size: formatting one of 5,000 digits fails, and computing with it takes for ever."""
    if isinstance(data, int) and abs(data) > LARGEST:
        where = shown(".".join(path), quoted=False)
        raise ProfileError(f"{source}: {where} is too large a number", advice=_CORRECT)
    if isinstance(data, dict):
        for name, value in data.items():
            _check_numbers(name, source, *path, "[key]")
            _check_numbers(value, source, *path, str(name))
    elif isinstance(data, list):
        for value in data:
            _check_numbers(value, source, *path)


def _refusal(error: ValidationError, data: dict[Any, Any], source: str) -> ProfileError:
    """Describe the first problem to fix. A mistyped key is both unknown and missing: report it as unknown."""
    order = {"extra_forbidden": 0, "missing": 2}
    wrong = min(error.errors(include_url=False), key=lambda e: order.get(e["type"], 1))
    where, held = _where(wrong["loc"], data)
    if wrong["type"] == "extra_forbidden":
        name = str(wrong["loc"][-1])
        advice = UnknownNameError("key", name, _known_keys(wrong["loc"][:-1])).advice
        return ProfileError(f"{source}: unknown key {shown(where, quoted=False)}", advice=advice)
    if wrong["type"] == "missing":
        return ProfileError(f"{source}: {where} is missing", advice=_CUT_SHORT)
    where = shown(where, quoted=False)
    custom = wrong.get("ctx", {}).get("error")
    if isinstance(custom, Wrong):
        where += f".{shown(custom.key, quoted=False)}" if custom.key else ""
        return ProfileError(f"{source}: {where} {custom.sentence}", advice=custom.advice or _CORRECT)
    if wrong["type"] == "invalid_key" or wrong["loc"][-1] == "[key]":
        return ProfileError(f"{source}: the key {where} must be text", advice="put it in quotes.")
    return ProfileError(f"{source}: {where} {_must(wrong)}, not {shown(held)}", advice=_CORRECT)


def _must(wrong: ErrorDetails) -> str:
    # pydantic names each member of a union; only the fingerprint's values are a union.
    if wrong["loc"][:2] == ("fingerprint", "values") and len(wrong["loc"]) > 3:
        return "must be text, a finite number, true, false or null"
    return _MUST.get(wrong["type"]) or wrong["msg"].replace("Input should be", "must be")


def _where(loc: Sequence[int | str], data: Any) -> tuple[str, Any]:
    """Return the dotted path of an error and the value there, without the union members that pydantic appends."""
    path = []
    for part in loc:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            break
        path.append(str(part))
    return ".".join(path), data


def _known_keys(loc: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = Profile
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        model = next(c for c in (annotation, *get_args(annotation)) if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
