"""The options of a search. Each is declared once: its parsing, its field in the request, and its formatting.

The commands that take these options, the arguments of `autotune.tune`, the request built from them, the conflicts with
``--replay`` and the command line shown in a report are all derived from `OPTIONS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from autotune.errors import UsageError
from autotune.knobs import KNOBS
from autotune.layout import DEFAULT_STUDIES
from autotune.parsing import duration_s, duration_text, lists, pairs, size_bytes
from autotune.records import LARGEST, LARGEST_IMAGE, StudySpec
from autotune.samplers import SAMPLERS
from autotune.study import python_values as python


def _same(typed: Any, _flag: str) -> Any:
    return typed


def _plain(value: Any) -> list[str]:
    return [str(value)]


@dataclass(frozen=True)
class Spelling:
    """How values of one kind are written on a command line.

    Attributes:
        kind: type to which the command line's parser converts a word.
        many: the option may be repeated.
        read: converts the parsed value (a list for an option that may be repeated). The second argument is the option's
            flag, for error messages. Raises `UsageError`.
        write: converts a value to words, each to be preceded by the flag, from which `read` returns the same value.
        python: how the same values are given in Python.
    """

    kind: type = str
    many: bool = False
    read: Callable[[Any, str], Any] = _same
    write: Callable[[Any], list[str]] = _plain
    python: python.PythonKind = python.TEXT


def _file_or_name(text: str, _flag: str) -> str:
    return str(Path(text).expanduser().absolute()) if text.endswith(".py") else text


def _folder_or_kind(text: str, _flag: str) -> str:
    return text if text in ("generated", "synthetic") else str(Path(text).expanduser().absolute())


TEXT = Spelling()
WHOLE = Spelling(kind=int, python=python.WHOLE)
FLAG = Spelling(kind=bool, python=python.FLAG)
PATH = Spelling(kind=Path, python=python.PATH)
FILE = Spelling(read=_file_or_name, python=python.FILE)
FOLDER = Spelling(read=_folder_or_kind, python=python.FILE)
DURATION = Spelling(read=duration_s, write=lambda seconds: [duration_text(seconds)], python=python.DURATION)
SIZE = Spelling(read=size_bytes, write=lambda size: [f"{size}B"], python=python.SIZE)
PAIRS = Spelling(
    many=True, read=pairs, write=lambda found: [f"{n}={value}" for n, value in found.items()], python=python.PAIRS
)
LISTS = Spelling(
    many=True,
    read=lists,
    write=lambda found: [f"{n}={','.join(values)}" for n, values in found.items()],
    python=python.LISTS,
)


@dataclass(frozen=True)
class SearchOption:
    """One option of ``autotune search`` and of ``autotune submit``.

    Attributes:
        name: without the leading dashes, and with underscores instead of inner dashes.
        field: field of `StudySpec`; ``None`` for an option of the call rather than of the study.
        default: parsed value if the option is not given; equivalent to the field's own default.
        minimum, maximum: smallest and largest value of a whole number.
        space: ``autotune space`` takes the option, too.
        recorded: fixed by a recorded surface, so the option conflicts with ``--replay``.
        written: whether `command_of` includes the option.
        keyword: name of the argument of `autotune.tune`; empty if it is the option's own, ``None`` if there is none.
    """

    name: str
    spelling: Spelling
    help: str
    field: str | None = None
    default: Any = None
    metavar: str | None = None
    minimum: int | None = None
    maximum: int = LARGEST
    space: bool = False
    recorded: bool = False
    written: Literal["unless default", "always", "never"] = "unless default"
    keyword: str | None = ""

    @property
    def flag(self) -> str:
        """The option as typed."""
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

    @property
    def argument(self) -> str | None:
        """The name of the argument of `autotune.tune`; ``None`` for an option of the command line only."""
        return self.name if self.keyword == "" else self.keyword

    def parsed(self, given: Any) -> Any:
        """Convert a value given in Python to what the command line's parser would have returned.

        Raises:
            UsageError: the value has the wrong type, or is below the minimum.
        """
        parsed = self.spelling.python.parsed(given, self.flag)
        if self.minimum is not None and parsed < self.minimum:
            raise UsageError(f"{self.flag} must be at least {self.minimum}, not {parsed}")
        return parsed

    def words(self, value: Any) -> list[str]:
        """Return the command line words for a value."""
        if self.written == "never" or (self.written != "always" and value == self.value(self.default)):
            return []
        if self.spelling is FLAG:
            return [self.flag]
        return [word for text in self.spelling.write(value) for word in (self.flag, text)]

    def asked(self, parsed: Any) -> bool:
        """Return whether a parsed value differs from the default."""
        return parsed != self.default and parsed not in ((), [])


#: In the order of the help text.
OPTIONS = (
    SearchOption(
        "model", FILE, "A name, FILE.py, or package.module:NAME.", "model", None, "MODEL", space=True, recorded=True
    ),
    SearchOption(
        "arg",
        PAIRS,
        "For the workload itself; may be repeated.",
        "args",
        None,
        "KEY=VALUE",
        space=True,
        recorded=True,
        keyword="args",
    ),
    SearchOption(
        "data", FOLDER, "A folder, generated, or synthetic.", "data", "generated", "DATA", space=True, recorded=True
    ),
    # Left out of the written command: once the search has begun, the name is taken.
    SearchOption(
        "study", TEXT, "Name of the study.  [default: a fresh number]", "name", "", recorded=True, written="never"
    ),
    SearchOption("studies_dir", PATH, "Folder that holds the studies.", default=DEFAULT_STUDIES, recorded=True),
    SearchOption("budget", DURATION, "How long to search.", "budget_s", "10m", "DURATION", written="always"),
    SearchOption("trials", WHOLE, "End after this many trials.", "trials", minimum=1),
    SearchOption("objective", FILE, "A name or FILE.py; higher is better.", "objective", "throughput"),
    SearchOption(
        "device",
        TEXT,
        "auto, cpu, cuda, cuda:N, cuda:GPU-UUID or cuda:MIG-UUID.",
        "device",
        "auto",
        "DEVICE",
        space=True,
        recorded=True,
    ),
    SearchOption(
        "batch_size",
        WHOLE,
        "The baseline's batch size.",
        "batch_size",
        minimum=1,
        maximum=KNOBS["batch_size"].maximum,
        space=True,
        recorded=True,
    ),
    SearchOption(
        "keep_batch_size",
        FLAG,
        "Search at the baseline's batch size only.",
        "keep_batch_size",
        False,
        space=True,
    ),
    SearchOption(
        "image_size",
        WHOLE,
        "Side of an image in pixels.",
        "image_size",
        minimum=1,
        maximum=LARGEST_IMAGE,
        space=True,
        recorded=True,
    ),
    SearchOption(
        "samples_per_step",
        WHOLE,
        "Of a script's optimizer, where its loader does not tell.",
        "samples_per_step",
        minimum=1,
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "map",
        PAIRS,
        "Words by which a script's own options set a knob; may be repeated.",
        "flags",
        None,
        "KNOB[:VALUE]=WORDS",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "output_flag",
        TEXT,
        "A script's option for where it writes: each launch gets a folder, removed at its end.",
        "output_flag",
        metavar="FLAG",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "scratch",
        FLAG,
        "Run each launch of a script in an empty folder of its own, removed at its end.",
        "scratch",
        False,
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "rate",
        TEXT,
        "How a program that is not PyTorch's tells (?P<rate>…), samples/s, or (?P<seconds>…) of a step.",
        "rate",
        metavar="REGEX",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "rate_file",
        TEXT,
        "The file in which it does, if not on its output.",
        "rate_file",
        metavar="FILE",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption(
        "script",
        PATH,
        "A file of `autotune init -- python train.py`: the command and its own flags.",
        metavar="FILE",
        space=True,
        recorded=True,
        keyword=None,
    ),
    SearchOption("baseline", PAIRS, "What is run today.", "baseline", None, "KNOB=VALUE", space=True, recorded=True),
    SearchOption("set", LISTS, "Search only these values of a knob.", "narrowed", None, "KNOB=V1,V2", space=True),
    SearchOption("fix", PAIRS, "Pin a knob.", "fixed", None, "KNOB=VALUE", space=True),
    SearchOption(
        "memory_limit",
        SIZE,
        "Device memory a trial may use.",
        "memory_limit_bytes",
        None,
        "6GiB",
        space=True,
        recorded=True,
    ),
    SearchOption("sampler", TEXT, f"{', '.join(SAMPLERS)}.", "sampler", "auto"),
    SearchOption("seed", WHOLE, "Of everything random.", "seed", 0, minimum=0),
    SearchOption("allow_busy", FLAG, "Measure although others use cores or GPU.", "allow_busy", False, recorded=True),
    SearchOption(
        "dry_run", FLAG, "Say what would be tried; measure nothing.", default=False, recorded=True, keyword=None
    ),
    SearchOption("replay", PATH, "Search a recorded surface in virtual time.", metavar="SURFACE", keyword=None),
)


def option(name: str) -> SearchOption:
    """Return the option called ``name``."""
    return {found.name: found for found in OPTIONS}[name]


def spec_of(parsed: Mapping[str, Any], *, mark: str, created: str) -> StudySpec:
    """Build a request from parsed values by option name; missing ones get their defaults.

    Raises:
        UsageError: a value is invalid, or two options contradict each other.
    """
    asked = {o.field: o.value(parsed[o.name]) for o in OPTIONS if o.field is not None and o.name in parsed}
    try:
        spec = StudySpec.model_validate({"name": "", "mark": mark, "created": created, **asked})
    except ValidationError as error:
        raise _refused(error) from None
    stated = spec.baseline.get("batch_size")
    if spec.batch_size is not None and stated is not None and stated != str(spec.batch_size):
        raise UsageError(f"--batch-size {spec.batch_size} and --baseline batch_size={stated} contradict each other")
    if spec.keep_batch_size and "batch_size" in {*spec.narrowed, *spec.fixed}:
        raise UsageError("--keep-batch-size and a --set or --fix of batch_size contradict each other")
    both = sorted(spec.narrowed.keys() & spec.fixed.keys())
    if both:
        raise UsageError(f"{both[0]} is given both to --set and to --fix")
    return spec


def _refused(error: ValidationError) -> UsageError:
    first = error.errors()[0]
    flag = next((o.flag for o in OPTIONS if first["loc"] and o.field == first["loc"][0]), str(first["loc"]))
    return UsageError(f"{flag} cannot be {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def command_of(spec: StudySpec) -> str:
    """Return the command line that makes the same request, without options at their defaults."""
    asked = [o for o in OPTIONS if o.field is not None and (spec.command is None or o.field != "model")]
    words = [w for o in asked for w in o.words(getattr(spec, str(o.field)))]
    script = () if spec.command is None else ("--", *spec.command.words)
    return shlex.join(["autotune", "search", *words, *script])
