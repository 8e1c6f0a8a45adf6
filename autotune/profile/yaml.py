"""A profile as YAML: read, checked, and written with its comments."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
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
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from autotune.base.errors import ProfileError, UnknownNameError
from autotune.base.files import read_regular, write_atomic
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.records import LARGEST, Fingerprint, Value, WorkloadRef
from autotune.knobs import KNOBS, spell
from autotune.profile.schema import (
    EXPORT_AGAIN,
    SCHEMA_VERSION,
    Gives,
    Measured,
    Profile,
    ProfileWorkload,
    Wrong,
    printable,
    shown,
)

# Writes a profile as text: YAML with comments for human readers.


_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
#: Plain scalars that YAML 1.1 reads as another type (https://yaml.org/type/bool.html and null.html).
_RETYPED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
#: Largest column at which comments are aligned; longer lines are followed by their comment directly.
_WIDEST = 48

_SECTIONS = {
    "workload": "What is trained. path and module only say where it was found; sha256 says what it is.",
    "gives": "What it gives, as measured. Intervals are [low, high] at 95 %.",
    "baseline": "What it was compared with: the same training, as it ran before.",
    "best_same_batch": "The fastest at the baseline's own batch size and workload knobs.",
    "conditions": "How it was measured.",
    "fingerprint": "Where the figures hold: a machine that differs in one of these values gives other figures.",
    "versions": "Versions it was measured with.",
    "provenance": "Where the figures come from.",
}
_ABOUT = {
    "gives.speedup": "times the baseline's rate",
    "gives.compile_seconds": "s, the first step; not part of the rate",
    "gives.startup_seconds": "s, workload, model and first batch; not part of the rate",
    "gives.loader_wait_fraction": "share of a step spent waiting for the loader, 0 to 1",
    "gives.epoch_turn_seconds": "s between two epochs",
    "gives.launches": "independent processes that the figures rest on",
    "gives.same_batch": "whether it trains at the baseline's batch size",
    "gives.trains_like_fp32": "losses beside eager fp32's, from the same weights and batches",
    "gives.same_data": "what its loader delivers beside the baseline's, sample by sample",
    "gives.memory_headroom": "part of the memory that stayed free in a longer run",
    "gives.learning_rate": "of the first parameter group, as measured with this batch",
    "baseline.learning_rate": "of the first parameter group",
    "best_same_batch.speedup": "times the baseline's rate",
    "conditions.image_size": "pixels a side",
    "conditions.page_cache": "whether files were read from memory (warm) or perhaps the disk (cold)",
    "conditions.epoch_samples": "samples between two epoch turns",
    "conditions.allow_busy": "whether it was measured although others used the cores or the GPU",
    "conditions.cards": "that the script saw",
    "conditions.keeps_batch_size": "only the baseline's batch size was wanted",
    "fingerprint.device_uuid": "recorded, not compared",
    "provenance.score": "by the objective, higher is better",
    "provenance.trials": "how many ended how",
    "provenance.measured_seconds": "s inside kept windows",
    "provenance.elapsed_seconds": "s the search ran",
    "provenance.sha256": "of all the rest: tells whether it was changed since",
}


class _Representer(RoundTripRepresenter):
    """Represents scalars in a form that YAML 1.1 and 1.2 read alike."""

    def represent_number(self, value: float) -> Any:
        mantissa, e, exponent = repr(value).partition("e")
        # YAML 1.1 reads 1e-05 as text: a float needs a point (https://yaml.org/type/float.html).
        text = f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"
        return self.represent_scalar("tag:yaml.org,2002:float", text)

    def represent_nothing(self, value: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(float, _Representer.represent_number)
_Representer.add_representer(type(None), _Representer.represent_nothing)


def dump(profile: Profile) -> str:
    """Return the profile as YAML with comments, from which `autotune.profile.parse` makes an equal profile."""
    data = profile.model_dump(mode="json")
    comments = {**_ABOUT, **_dynamic_comments(profile)}
    root = _node(data, "", 0, comments)
    for section in data:
        if section in _SECTIONS or section == "configuration":
            text = _SECTIONS.get(section) or _configuration_comment(profile)
            root.yaml_set_comment_before_after_key(section, before=f"\n{text}")
    yaml = YAML()
    yaml.Representer = _Representer
    # Folding long lines would be valid, but a folded path cannot be found by a text search.
    yaml.width = 2**31
    stream = io.StringIO()
    yaml.dump(root, stream)
    return f"{_header(profile)}\n{stream.getvalue()}"


def write(profile: Profile, path: Path) -> None:
    """Replace ``path`` with the profile, atomically.

    Raises:
        MachineError: the folder cannot be written; an existing file is unchanged.
    """
    write_atomic(path, dump(profile))


def _node(value: Any, path: str, depth: int, comments: dict[str, str]) -> Any:
    """Convert ``value`` to ruamel's types, with ``comments`` (by dotted path) aligned at the ends of lines."""
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, list):
        items = CommentedSeq(value)
        items.fa.set_flow_style()
        return items
    if not isinstance(value, dict):
        return value
    section = CommentedMap()
    paths = {key: f"{path}.{key}" if path else key for key in value}
    widths = [len(_line(key, item)) for key, item in value.items() if paths[key] in comments]
    column = 2 * depth + 2 + max((width for width in widths if width <= _WIDEST), default=0)
    for key, item in value.items():
        inner = paths[key]
        name = key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _RETYPED else DoubleQuotedScalarString(key)
        section[name] = _node(item, inner, depth + 1, comments)
        if inner in comments:
            section.yaml_add_eol_comment(comments[inner], name, column=column)
    return section


def _line(key: str, value: Any) -> str:
    """Return approximately the line of ``key``; a section's line holds only its name."""
    return f"{key}:" if isinstance(value, dict) and value else f"{key}: {json.dumps(value, ensure_ascii=False)}"


def _dynamic_comments(profile: Profile) -> dict[str, str]:
    """Return the comments that depend on values: each knob beside the baseline's value, and memory in GiB."""
    unit = profile.unit
    comments = {
        "gives.samples_per_second": f"{unit}, epoch turns weighed in",
        **{f"{section}.ci95": unit for section in ("gives", "baseline", "best_same_batch")},
        "gives.sustained_samples_per_second": f"{unit} in that run, at the clocks that the card holds",
    }
    sections: dict[str, Measured | Profile] = {"configuration": profile}
    if profile.best_same_batch is not None:
        sections["best_same_batch.configuration"] = profile.best_same_batch
    else:
        comments["best_same_batch"] = "none apart from the configuration above"
    if profile.workload.flags:
        comments["workload.flags"] = "--map, as it was given; it is given again, a profile adds no words to a command"
        comments["workload.own"] = "what the script does without these words"
    for section, holder in sections.items():
        for name, value in holder.configuration.items():
            comments[f"{section}.{name}"] = _against(profile, name, value)
    for name in profile.baseline.configuration:
        if name in KNOBS:
            comments[f"baseline.configuration.{name}"] = KNOBS[name].about
    memory = profile.gives.peak_memory_bytes
    if memory is not None:
        comments["gives.peak_memory_bytes"] = f"{memory / 2**30:.2f} GiB"
    return comments


def _against(profile: Profile, name: str, value: Value) -> str:
    before = profile.baseline.configuration.get(name)
    if before == value and type(before) is type(value):
        return "same"
    return "baseline: " + ("not set" if before is None else shown(spell(before), quoted=False))


def _configuration_comment(profile: Profile) -> str:
    text = "What to set, each line against the baseline's value."
    removed = [
        shown(f"{name} ({spell(value)})", quoted=False)
        for name, value in profile.baseline.configuration.items()
        if name not in profile.configuration
    ]
    return f"{text}\nSet in the baseline only: {', '.join(removed)}." if removed else text


def _header(profile: Profile) -> str:
    gives, batch = profile.gives, profile.configuration["batch_size"]
    before = profile.baseline.configuration["batch_size"]
    launches = "1 launch" if gives.launches == 1 else f"{gives.launches} launches"
    not_proven = [] if gives.unproven is None else [f"  note      {gives.unproven}"]
    is_baseline = profile.configuration == profile.baseline.configuration
    speedup = "not known: it was not launched in turns with the baseline"
    if gives.speedup is not None and gives.speedup_ci95 is not None:
        speedup = (
            f"{gives.speedup:.2f} times the baseline's {_rate(profile.baseline.samples_per_second)} {profile.unit}, "
            f"95 % interval {gives.speedup_ci95[0]:.2f} to {gives.speedup_ci95[1]:.2f}"
        )
    batch_line, learning_rate = f"{batch}, as in the baseline", []
    if batch != before:
        batch_line = f"{batch}, where the baseline has {before}: the learning rate may have to follow"
        learning_rate = [f"            {learning_rate_line(profile)}"]
    lines = [
        f"autotune profile: {profile.workload.name} on {profile.conditions.device_name}",
        "",
        f"  rate      {_rate(gives.samples_per_second)} {profile.unit}, 95 % interval "
        f"{_rate(gives.ci95[0])} to {_rate(gives.ci95[1])}, from {launches}",
        *_sustained(gives, profile.unit),
        f"  speedup   {'none: this is the baseline itself' if is_baseline else speedup}",
        *not_proven,
        *([f"  batch     {batch_line}"] if profile.conditions.counts == "samples" else []),
        *learning_rate,
        f"  made      {profile.provenance.created}, study {profile.provenance.study}, trial {profile.provenance.trial}",
        "",
        "Train with it:",
        f"  {_how_to_train(profile.workload)}",
        "or in your own code:",
        '  profile = autotune.load_profile("profile.yaml")',
        "  loader, step = profile.prepare(model, optimizer, dataset, loss, shuffle=True, drop_last=True)",
        "where loss(model, batch) returns the loss; `for batch in loader: step(batch)` trains.",
        "",
        "The figures hold for the machine and the versions written below; elsewhere, search again.",
        "Text is quoted because some YAML readers take a bare off or no for false: keep the quotes.",
    ]
    return "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)


def learning_rate_line(profile: Profile) -> str:
    """Return what usually happens to the learning rate with the profile's batch size, in one sentence."""
    batch, before = (int(source.configuration["batch_size"]) for source in (profile, profile.baseline))
    return follows(batch, before, now=profile.gives.learning_rate, was=profile.baseline.learning_rate) + "."


def follows(batch: int, before: int, *, now: float | None = None, was: float | None = None) -> str:
    """Return how the learning rate usually changes with another batch, in numbers where they are known.

    Linear in the batch: Goyal et al. 2017, arXiv:1706.02677 (SGD, after a warm-up of five epochs). In its square root:
    Krizhevsky 2014, arXiv:1404.5997; for Adam: Malladi et al. 2022, arXiv:2205.10287.

    Args:
        batch, before: samples per optimizer step, now and in the baseline.
        now, was: the learning rate of the first parameter group, as measured with each; ``None`` if unknown.

    Returns:
        A sentence without its full stop.
    """
    ratio = batch / before
    if now is not None and was is not None and now != was:
        return f"The workload scales its learning rate itself: {now:.3g} instead of {was:.3g}"
    linear, root = f"{ratio:.3g}×", f"{math.sqrt(ratio):.3g}×"
    subject = "The learning rate usually follows"
    if was is not None:
        linear, root = f"{was * ratio:.3g}", f"{was * math.sqrt(ratio):.3g}"
        subject = f"The learning rate of {was:.3g} usually follows"
    warm_up = ", after a warm-up of some epochs" if ratio > 1 else ""
    return f"{subject}: {linear} in proportion (SGD) or {root} with the square root (Adam){warm_up}"


def _how_to_train(workload: ProfileWorkload) -> str:
    """Return the command that trains with the profile."""
    if workload.is_script:
        # How the script is run is up to the user.
        flags = "".join(f"--map {shlex.quote(f'{name}={words}')} " for name, words in workload.flags.items())
        return f"autotune run --profile profile.yaml {flags}-- python {workload.name}.py …, or as you run it"
    command = ["autotune", "train", "--profile", "profile.yaml", "--model", workload.model]
    for name, value in workload.args.items():
        command += ["--arg", f"{name}={value}"]
    return shlex.join(command)


def _sustained(gives: Gives, unit: str) -> list[str]:
    """Return a line on the rate in a longer run, if it is below the promised interval."""
    lower = gives.sustained_samples_per_second
    if lower is None or lower >= gives.ci95[0]:
        return []
    return [f"  sustained {_rate(lower)} {unit} in a longer run: expect this rate in a long training"]


def _rate(value: float) -> str:
    """Format a rate for people, with about four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# Reads a profile from untrusted text. It must be plain data, and every error says what to change.

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
        nearby = _found_near(path)
        how_to_get = "`autotune search` makes one in its study's folder, `autotune export STUDY -o FILE` copies it."
        raise ProfileError(
            f"there is no profile {path}", advice=how_to_get if nearby is None else f"did you mean {nearby}?"
        ) from None
    except IsADirectoryError:
        nearby = _found_near(path)
        raise ProfileError(
            f"{path} is a folder", advice="name a profile's file." if nearby is None else f"its profile is {nearby}."
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
    """Return the profile that a folder, the name of a study, or the bare file name of a profile may refer to."""
    in_folder, by_name = StudyFiles(path).profile, StudyFiles(DEFAULT_STUDIES / path).profile
    # A path that cannot be accessed is not what the user means.
    with contextlib.suppress(OSError):
        profile = next((file for file in (in_folder, by_name) if file.is_file()), None)
        if profile is None and path.name == in_folder.name:
            others = (path.parent / DEFAULT_STUDIES).glob(f"*/{in_folder.name}")
            profile = max(others, key=lambda file: file.stat().st_mtime, default=None)
        return profile
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
    """Return the data in untrusted YAML: nothing but mappings, lists and plain values, in limited number.

    Args:
        source, kind: what error messages call the text. again: how to get a correct one.

    Raises:
        ProfileError: the text is not YAML, or contains more than plain data.
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
        refused = None
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None) is not None:
            refused = "an anchor or alias (& or *)"
        elif getattr(event, "tag", None) is not None:
            refused = "a tag (!)"
        depth += isinstance(event, MappingStartEvent | SequenceStartEvent) - isinstance(event, CollectionEndEvent)
        documents += isinstance(event, DocumentStartEvent)
        values += isinstance(event, NodeEvent)
        if values > _MAX_VALUES:
            refused = f"more than {_MAX_VALUES} values"
        if depth > _MAX_DEPTH:
            refused = f"sections more than {_MAX_DEPTH} deep"
        if documents > 1:
            refused = "a second document (---)"
        if refused is not None:
            raise ProfileError(
                f"{source}: line {event.start_mark.line + 1} has {refused}, which a {kind} may not have",
                advice=f"a {kind} is plain data; {again}",
            )


def _check_schema(data: dict[Any, Any], source: str) -> None:
    version = data.get("schema_version")
    if type(version) is not int or version < 1:
        reason = f"its schema_version is {shown(version)}" if "schema_version" in data else "it has no schema_version"
        raise ProfileError(f"{source} is no profile: {reason}", advice=EXPORT_AGAIN)
    if version > SCHEMA_VERSION:
        versions = data.get("versions")
        release = versions.get("autotune") if isinstance(versions, dict) else None
        writer = f"a newer autotune, {shown(release)}" if isinstance(release, str) else "a newer autotune"
        raise ProfileError(
            f"{source} was made by {writer} (schema {version}, this one reads {SCHEMA_VERSION})",
            advice="upgrade autotune, or export the study with this version.",
        )


def _check_numbers(data: Any, source: str, *path: str) -> None:
    """Reject huge integers: formatting one of 5,000 digits fails, and computing with it takes forever."""
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
    """Describe the first problem to fix. A mistyped key is both unknown and missing; it is reported as unknown."""
    order = {"extra_forbidden": 0, "missing": 2}
    wrong = min(error.errors(include_url=False), key=lambda e: order.get(e["type"], 1))
    where, value = _where(wrong["loc"], data)
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
    return ProfileError(f"{source}: {where} {_must(wrong)}, not {shown(value)}", advice=_CORRECT)


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


# Checks whether a profile is valid on this machine: compares fingerprints and explains each difference.

#: The names of the rows on whether the profile itself, and the workload's code, are as they were.
PROFILE, CODE = "profile", "workload_sha256"
#: What a difference means for the promised rate, worst first. A row belongs to the first entry that shares a word with
#: its name, or to the last entry if none does.
_MEANS = (
    (
        {PROFILE},
        "the profile has been changed since it was written",
        "nobody measured what it says now, so export it again from its study",
    ),
    ({"workload"}, "the training differs", "what was measured is not what would be trained, so search again"),
    (
        {"device", "gpu", "mig", "power"},
        "the device differs",
        "the rate was never seen on it and the batch may not fit, so search again here",
    ),
    ({"data", "dataset"}, "the data differs", "reading and decoding it may be slower or faster than promised"),
    (
        {"torch", "torchvision", "cuda", "cudnn", "driver", "python"},
        "the software differs",
        "kernels and compiled code differ, so the rate may be higher or lower than promised",
    ),
    (
        {"ranks"},
        "the number of ranks differs",
        "they share cores, memory, links and the loader's source, so the rate of each will be another",
    ),
    (
        {"cpu", "cores", "memory", "shm", "host", "worker"},
        "the host differs",
        "what computes or loads there may be faster or slower than promised, or its workers may not fit",
    ),
    (set[str](), "the machine differs", "the rate may be higher or lower than promised"),
)


def check(profile: Profile, fingerprint: Fingerprint) -> list[tuple[str, str, str]]:
    """Return rows ``(name, in the profile, on this machine)`` for everything that differs; empty if nothing does."""
    rows = profile.fingerprint.differences(fingerprint)
    return [*altered(profile), *((name, brief(then), brief(now)) for name, then, now in rows)]


def unlike(profile: Profile, ref: WorkloadRef, chosen: str, args: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return rows, like those of `check`, for whatever another training has that differs from the profile's.

    Args:
        ref: the training that ``chosen`` (a value of ``--model``) and ``args`` resolved to.
    """
    workload = profile.workload
    # Many models of the catalog share one file. What a module holds is not known before it is imported.
    same_code = ref.sha256 == workload.sha256 if ref.sha256 else chosen == workload.module
    code = (workload.sha256, ref.sha256) if ref.sha256 else (workload.model, chosen)
    rows = {
        CODE: None if same_code else code,
        "workload": None if ref.name == workload.name else (workload.name, ref.name),
        "workload arguments": None if dict(args) == workload.args else (_listed(workload.args), _listed(args)),
    }
    return [(name, brief(row[0]), brief(row[1])) for name, row in rows.items() if row is not None]


def _listed(args: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(args.items())) or "none"


def brief(value: object) -> str:
    """Return a fingerprint's value as text. Of a hash, the first digits are enough to tell two apart."""
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text


def altered(profile: Profile) -> list[tuple[str, str, str]]:
    """Return the row for a profile that was changed after it was written; empty for any other."""
    return [(PROFILE, "as written", "changed")] if profile.altered else []


def warnings_for(differences: Iterable[tuple[str, str, str]]) -> list[str]:
    """Explain the rows of `check` in terms of the promised rate: one sentence per kind of difference, worst first."""
    grouped: list[list[str]] = [[] for _ in _MEANS]
    for name, promised, here in differences:
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        kind = next((i for i, (topics, _, _) in enumerate(_MEANS) if topics & words), len(_MEANS) - 1)
        grouped[kind].append(
            f"{shown(name, quoted=False)} {shown(promised, quoted=False)}, here {shown(here, quoted=False)}"
        )
    return [
        f"{what} ({'; '.join(rows)}): {means}." for rows, (_, what, means) in zip(grouped, _MEANS, strict=True) if rows
    ]
