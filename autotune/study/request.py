"""The request of a search: its file, its options, and its command line."""

from __future__ import annotations

import io
import math
import operator
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from autotune.base.errors import UsageError
from autotune.base.files import read_regular, write_atomic
from autotune.base.layout import DEFAULT_STUDIES, StudyFiles
from autotune.base.parsing import (
    bandwidth_bytes_per_s,
    duration_s,
    duration_text,
    lists,
    pairs,
    price,
    price_text,
    short_duration_s,
    size_bytes,
)
from autotune.base.records import LARGEST, LARGEST_IMAGE, SCHEMA_VERSION, StudySpec
from autotune.knobs import KNOBS, spell
from autotune.knobs.gradient_accumulation import KNOB as ACCUMULATION
from autotune.samplers import SAMPLERS
from autotune.space.requirements import Requirements
from autotune.study.storage_url import typed_address

# ``study.yaml``: the request of a study, readable by people, and by YAML 1.1 and 1.2 parsers alike.

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
        content = YAML(typ="safe", pure=True).load(read_regular(files.request, MAX_REQUEST_BYTES, follow=True).decode())
        if isinstance(content, dict) and isinstance(v := content.get("schema_version"), int) and v > SCHEMA_VERSION:
            raise UsageError(
                f"study {files.name!r} was made by a newer autotune (schema {v})", advice="upgrade autotune."
            )
        return StudySpec.model_validate(content)
    except OSError as error:
        raise UsageError(f"{files.request} cannot be read: {error.strerror}") from error
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{files.request} is not what autotune wrote: {(str(error).splitlines() or [type(error).__name__])[0]}",
            advice="undo the change, or start a new study; the trials in the folder are untouched.",
        ) from error


def process_mark(files: StudyFiles, spec: StudySpec) -> str:
    """Return the mark of a study's processes, by which the next run finds any that are left over.

    It also identifies the folder: a copy of a study has the same request and must not end the original's processes.
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


# An option of a search: how its values are written on a command line and in Python, and which field they fill.


def _file_or_name(text: str, _flag: str) -> str:
    return str(Path(text).expanduser().absolute()) if text.endswith(".py") else text


def _files_or_names(text: str, flag: str) -> str:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) < len(parts):
        raise UsageError(f"{flag} {text[:60]!r} names nothing, or one thing twice, between its commas")
    return ",".join(_file_or_name(part, flag) for part in parts)


def _only(kind: type) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return checked


_text = _only(str)


def _path_text(value: Any) -> str:
    return str(_text(os.fspath(value)))


def _whole(value: Any) -> int:
    # Accepts whole numbers of other libraries, too, but no fractions.
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _duration(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"must be a number of seconds above zero, not {value!r}")
    return duration_text(value)


def _price(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return price_text(value)


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return list(texts)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return value.items()


def _lists(value: Any) -> list[str]:
    texts = []
    for name, values in _items(value):
        items = values if isinstance(values, Iterable) and not isinstance(values, str | Mapping) else [values]
        texts.append(f"{name}={','.join(_spelled(item, name) for item in items)}")
    return texts


def _spelled(value: Any, name: str) -> str:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"takes text, a number, True or False for {name}, not {value!r}")
    return spell(value)


@dataclass(frozen=True)
class Spelling:
    """How values of one kind are written on a command line, and given in Python.

    Attributes:
        takes: the values that it accepts in Python, for the documentation and for errors.
        given: converts one of these to what the command line's parser returns. Raises `TypeError` for values of another
            type, and `ValueError` with the rest of a sentence that begins with the option's flag.
        kind: type to which the command line's parser converts a word.
        many: whether the option may be repeated.
        read: converts the parsed value (a list for an option that may be repeated). The second argument is the option's
            flag, for error messages. Raises `UsageError`.
        write: converts a value to words, each to be preceded by the flag, from which `read` returns the same value.
    """

    takes: str = "text"
    given: Callable[[Any], Any] = _text
    kind: type = str
    many: bool = False
    read: Callable[[Any, str], Any] = lambda typed, _flag: typed
    write: Callable[[Any], list[str]] = lambda value: [str(value)]


TEXT = Spelling()
STORAGE = Spelling(read=typed_address)
WHOLE = Spelling("a whole number", _whole, kind=int)
FLAG = Spelling("True or False", _only(bool), kind=bool)
PATH = Spelling("text or a path", lambda value: Path(_path_text(value)), kind=Path)
FILE = Spelling("text or a path", _path_text, read=_file_or_name)
FILES = replace(FILE, read=_files_or_names)
FOLDER = replace(
    FILE,
    read=lambda text, _flag: text if text in ("generated", "synthetic") else str(Path(text).expanduser().absolute()),
)
DURATION = Spelling(
    'seconds, or text as in "10m"', _duration, read=duration_s, write=lambda seconds: [duration_text(seconds)]
)
SHORT = replace(DURATION, read=short_duration_s)
SIZE = Spelling(
    'bytes, or text as in "6GiB"',
    lambda value: value if isinstance(value, str) else f"{_whole(value)}B",
    read=size_bytes,
    write=lambda size: [f"{size}B"],
)
BANDWIDTH = replace(
    SIZE,
    takes='bytes per second, or text as in "50MB/s"',
    read=bandwidth_bytes_per_s,
    write=lambda size: [f"{size}B/s"],
)
PRICE = Spelling("a number above zero", _price, read=price, write=lambda amount: [price_text(amount)])
TEXTS = Spelling("text, or a list of texts", _texts, many=True, read=lambda typed, _flag: tuple(typed), write=list)
PAIRS = Spelling(
    "a dictionary of values by name",
    lambda value: [f"{name}={_spelled(item, name)}" for name, item in _items(value)],
    many=True,
    read=pairs,
    write=lambda values: [f"{name}={value}" for name, value in values.items()],
)
LISTS = Spelling(
    "a dictionary of lists of values by name",
    _lists,
    many=True,
    read=lists,
    write=lambda found: [f"{name}={','.join(values)}" for name, values in found.items()],
)


@dataclass(frozen=True)
class SearchOption:
    """One option of ``autotune search`` and of ``autotune submit``.

    Attributes:
        name: without the leading dashes, and with underscores instead of inner dashes.
        default: parsed value if the option is not given; equivalent to the field's own default.
        minimum, maximum: smallest and largest value of a whole number.
        field: field of `StudySpec`; empty if it is the option's name, ``None`` for an option of the call rather than of
            the study.
        space: whether ``autotune space`` also takes the option.
        recorded: whether a recorded surface fixes it, so that the option conflicts with ``--replay``.
        written: whether the command line of a request includes the option.
        keyword: name of the argument of `autotune.tune`; empty if it is the option's name, ``None`` if there is none.
    """

    name: str
    spelling: Spelling
    help: str
    default: Any = None
    metavar: str | None = None
    minimum: int | None = None
    maximum: int = LARGEST
    field: str | None = ""
    space: bool = False
    recorded: bool = False
    written: Literal["unless default", "always", "never"] = "unless default"
    keyword: str | None = ""

    def __post_init__(self) -> None:
        for attribute in ("field", "keyword"):
            if getattr(self, attribute) == "":
                object.__setattr__(self, attribute, self.name)

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def value(self, parsed: Any) -> Any:
        """Convert a parsed value to the value of the request's field.

        Raises:
            UsageError: the value is invalid.
        """
        if self.spelling.many:
            return self.spelling.read(list(parsed or ()), self.flag)
        if self.spelling is WHOLE and parsed is not None and parsed > self.maximum:
            raise UsageError(f"{self.flag} must be at most {self.maximum}, not {str(parsed)[:30]}")
        return None if parsed is None else self.spelling.read(parsed, self.flag)

    def parsed(self, given: Any) -> Any:
        """Convert a value given in Python to what the command line's parser would have returned.

        Raises:
            UsageError: the value has the wrong type, or is below the minimum.
        """
        try:
            parsed = self.spelling.given(given)
        except TypeError:
            text = repr(given)
            what = text if len(text) <= 60 else type(given).__name__
            raise UsageError(f"{self.flag} takes {self.spelling.takes}, not {what}") from None
        except ValueError as error:
            raise UsageError(f"{self.flag} {error}") from None
        if self.minimum is not None and parsed < self.minimum:
            raise UsageError(f"{self.flag} must be at least {self.minimum}, not {parsed}")
        return parsed

    def words(self, value: Any) -> list[str]:
        if self.written == "never" or (self.written != "always" and value == self.value(self.default)):
            return []
        if self.spelling is FLAG:
            return [self.flag]
        return [word for text in self.spelling.write(value) for word in (self.flag, text)]

    def asked(self, parsed: Any) -> bool:
        """Return whether a parsed value differs from the default."""
        return parsed != self.default and parsed not in ((), [])


# The options of a search. Each is declared once: its parsing, its field in the request, and its formatting.
#
# The commands that take these options, the arguments of `autotune.tune`, the request built from them, the conflicts
# with ``--replay``, and the command line shown in a report are all derived from `OPTIONS`.

#: Options that a recorded surface fixes: those of what is trained, which `autotune space` takes too; of these, a
#: script's; and others. The last two exist on the command line only.
_subject = partial(SearchOption, space=True, recorded=True)
_script = partial(_subject, keyword=None)
_shell = partial(SearchOption, recorded=True, keyword=None)
_MOST_SAMPLES = KNOBS["batch_size"].maximum
#: In the order of the help text.
OPTIONS: tuple[SearchOption, ...] = (
    _subject("model", FILE, "A name, FILE.py, or package.module:NAME.", None, "MODEL"),
    _subject(
        "arg", PAIRS, "For the workload itself; may be repeated.", None, "KEY=VALUE", field="args", keyword="args"
    ),
    _subject("data", FOLDER, "A folder, generated, or synthetic.", "generated", "DATA"),
    SearchOption(
        "store_latency",
        SHORT,
        "Put a slow store in front of the data: how long each file takes to come, such as 80ms.",
        metavar="DURATION",
        recorded=True,
        field="store_latency_s",
    ),
    SearchOption(
        "store_bandwidth",
        BANDWIDTH,
        "Its bandwidth for one reader, such as 50MB/s.",
        metavar="SIZE/s",
        recorded=True,
        field="store_bytes_per_s",
    ),
    SearchOption(
        "store_cache",
        SIZE,
        "A cache in front of it, as it is after the first epoch.",
        metavar="SIZE",
        recorded=True,
        field="store_cache_bytes",
    ),
    SearchOption(
        "epochs",
        WHOLE,
        "Epochs of the training: report the hours they take, and the first one's rate.",
        minimum=1,
        maximum=10**6,
    ),
    SearchOption(
        "samples", WHOLE, "Samples that the training reads in all, where no whole number of epochs says it.", minimum=1
    ),
    SearchOption(
        "price_per_hour",
        PRICE,
        "What this machine costs, in whatever currency: report what the training costs.",
        metavar="PRICE",
    ),
    # Left out of the written command: once the search has begun, the name is taken.
    SearchOption(
        "study", TEXT, "Name of the study.  [default: a fresh number]", "", field="name", recorded=True, written="never"
    ),
    _shell(
        "storage",
        STORAGE,
        "Store it in a database that several machines share: postgresql://USER@HOST/DATABASE.",
        metavar="URL",
    ),
    SearchOption("studies_dir", PATH, "Folder that holds the studies.", DEFAULT_STUDIES, field=None, recorded=True),
    SearchOption("budget", DURATION, "How long to search.", "10m", "DURATION", field="budget_s", written="always"),
    SearchOption("trials", WHOLE, "End after this many trials.", minimum=1),
    SearchOption(
        "objective",
        FILES,
        "A name or FILE.py; higher is better. Several with commas: the first chooses the winner.",
        "throughput",
    ),
    SearchOption(
        "require",
        TEXTS,
        "What the winner must meet, such as 'peak_memory<=8GiB'; may be repeated.",
        metavar="FIGURE<=VALUE",
    ),
    _subject("device", TEXT, "auto, cpu, cuda, cuda:N, cuda:GPU-UUID or cuda:MIG-UUID.", "auto", "DEVICE"),
    SearchOption(
        "devices",
        TEXT,
        "Search on several at once: 0,1,2,3 or all for cards, cpu:0-7,cpu:8-15 for cores.",
        metavar="LIST",
        recorded=True,
    ),
    _shell(
        "on",
        TEXT,
        "Launch on the nodes of a Ray cluster: ray://HOST:10001, or ray for the one that this machine is in.",
        metavar="CLUSTER",
    ),
    _shell(
        "on_resources",
        PAIRS,
        "What each worker there asks for: accelerator_type=H100, CPU=8, or resources of your own. May be repeated.",
        metavar="NAME=AMOUNT",
    ),
    _shell("workers", WHOLE, "With --on: how many there, instead of all.", None, "N", 1, 2**10),
    _subject("batch_size", WHOLE, "The baseline's batch size.", minimum=1, maximum=_MOST_SAMPLES),
    SearchOption("keep_batch_size", FLAG, "Search at the baseline's batch size only.", False, space=True),
    _subject(
        "global_batch",
        WHOLE,
        "Samples of an optimizer's step: fixed, in parts that are searched.",
        minimum=1,
        maximum=_MOST_SAMPLES,
    ),
    _subject(
        "nproc_per_node",
        WHOLE,
        "Processes that train together, as torchrun starts them; the batch size is each one's.",
        1,
        minimum=1,
        maximum=2**10,
        field="ranks",
    ),
    _subject("image_size", WHOLE, "Side of an image in pixels.", minimum=1, maximum=LARGEST_IMAGE),
    _script("samples_per_step", WHOLE, "Of a script's optimizer, where its loader does not tell.", minimum=1),
    _script(
        "map",
        PAIRS,
        "Words by which a script's own options set a knob; may be repeated.",
        metavar="KNOB[:VALUE]=WORDS",
        field="flags",
    ),
    _script(
        "output_flag",
        TEXT,
        "A script's option for where it writes: each launch gets a folder, removed at its end.",
        metavar="FLAG",
    ),
    _script("scratch", FLAG, "Run each launch of a script in an empty folder of its own, removed at its end.", False),
    _script(
        "rate",
        TEXT,
        "How a program that is not PyTorch's tells (?P<rate>…), samples/s, or (?P<seconds>…) of a step.",
        metavar="REGEX",
    ),
    _script("rate_file", TEXT, "The file in which it does, if not on its output.", metavar="FILE"),
    _script(
        "script",
        PATH,
        "A file of `autotune init -- python train.py`: the command and its own flags.",
        metavar="FILE",
        field=None,
    ),
    _subject("baseline", PAIRS, "What is run today.", None, "KNOB=VALUE"),
    SearchOption("set", LISTS, "Search only these values of a knob.", None, "KNOB=V1,V2", field="narrowed", space=True),
    SearchOption("fix", PAIRS, "Pin a knob.", None, "KNOB=VALUE", field="fixed", space=True),
    _subject("memory_limit", SIZE, "Device memory a trial may use.", None, "6GiB", field="memory_limit_bytes"),
    SearchOption("sampler", TEXT, f"{', '.join(SAMPLERS)}.", "auto"),
    SearchOption("seed", WHOLE, "Of everything random.", 0, minimum=0),
    SearchOption("allow_busy", FLAG, "Measure although others use cores or GPU.", False, recorded=True),
    _shell("dry_run", FLAG, "Say what would be tried; measure nothing.", False, field=None),
    SearchOption(
        "replay", PATH, "Search a recorded surface in virtual time.", metavar="SURFACE", field=None, keyword=None
    ),
)


def option(name: str) -> SearchOption:
    return {o.name: o for o in OPTIONS}[name]


# A request as typed: built from the values of options, and written as a command line again.


def spec_of(parsed: Mapping[str, Any], *, mark: str, created: str) -> StudySpec:
    """Build a request from parsed values by option name; missing ones get their defaults.

    Raises:
        UsageError: a value is invalid, or two options contradict each other.
    """
    fields = {o.field: o.value(parsed[o.name]) for o in OPTIONS if o.field is not None and o.name in parsed}
    try:
        spec = StudySpec.model_validate({"name": "", "mark": mark, "created": created, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        flag = next((o.flag for o in OPTIONS if first["loc"] and o.field == first["loc"][0]), str(first["loc"]))
        message = f"{flag} cannot be {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise UsageError(message) from None
    _refuse_contradictions(spec)
    # Raises an error for invalid requirements.
    return spec.model_copy(update={"require": tuple(map(str, Requirements.parsed(spec.require, spec.goal).every))})


def _refuse_contradictions(spec: StudySpec) -> None:
    if spec.devices is not None and spec.device != "auto":
        raise UsageError("--device and --devices both say where to search", advice="leave one of them out.")
    if spec.devices is not None and spec.ranks > 1:
        raise UsageError(
            "--devices searches for a training on one device, and --nproc-per-node for one on several",
            advice="leave one of them out.",
        )
    if spec.workers is not None and spec.on is None:
        raise UsageError("--workers is for a cluster", advice="--on ray://HOST:10001 names it.")
    if spec.epochs is not None and spec.samples is not None:
        raise UsageError("--epochs and --samples both say how long the training is", advice="leave one of them out.")
    baseline_batch = spec.baseline.get("batch_size")
    if spec.batch_size is not None and baseline_batch is not None and baseline_batch != str(spec.batch_size):
        raise UsageError(
            f"--batch-size {spec.batch_size} and --baseline batch_size={baseline_batch} contradict each other"
        )
    if spec.keep_batch_size and "batch_size" in {*spec.narrowed, *spec.fixed}:
        raise UsageError("--keep-batch-size and a --set or --fix of batch_size contradict each other")
    if spec.global_batch is not None:
        _check_global_batch(spec, spec.global_batch)
    names = sorted(spec.narrowed.keys() & spec.fixed.keys())
    if names:
        raise UsageError(f"{names[0]} is given both to --set and to --fix")


def _check_global_batch(spec: StudySpec, samples: int) -> None:
    for flag, values in (("--set", spec.narrowed), ("--fix", spec.fixed), ("--baseline", spec.baseline)):
        if "batch_size" in values:
            raise UsageError(f"--global-batch fixes the batch size, and {flag} says something else of it")
    if samples % spec.ranks:
        raise UsageError(f"--global-batch {samples} cannot be divided equally among {spec.ranks} ranks")
    if spec.batch_size is not None and samples % (spec.batch_size * spec.ranks):
        of_all = f" times {spec.ranks} ranks" if spec.ranks > 1 else ""
        raise UsageError(
            f"--global-batch {samples} is not a multiple of --batch-size {spec.batch_size}{of_all}",
            advice="--batch-size says how many samples go through the model at once today.",
        )
    if spec.batch_size is not None and ACCUMULATION.name in spec.baseline:
        raise UsageError(
            f"--batch-size and --baseline {ACCUMULATION.name} both say what is run today", advice="leave one out."
        )


def command_of(spec: StudySpec) -> str:
    """Return the command line that makes the same request, without options at their defaults."""
    options = [o for o in OPTIONS if o.field is not None and (spec.command is None or o.field != "model")]
    words = [w for o in options for w in o.words(getattr(spec, str(o.field)))]
    script = () if spec.command is None else ("--", *spec.command.words)
    return shlex.join(["autotune", "search", *words, *script])
