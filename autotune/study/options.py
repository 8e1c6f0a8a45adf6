"""The options of a search, each declared once: how it is typed, what it is in a request, and how it is written back.

The commands that take them, the request made of them, the refusal beside ``--replay`` and the command line in a report
all come from `OPTIONS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.errors import UsageError
from autotune.layout import DEFAULT_STUDIES
from autotune.parsing import duration_s, duration_text, lists, pairs, size_bytes
from autotune.records import StudySpec
from autotune.samplers import SAMPLERS


def _same(typed: Any, _flag: str) -> Any:
    return typed


def _plain(value: Any) -> list[str]:
    return [str(value)]


@dataclass(frozen=True)
class Spelling:
    """How values of one kind stand on a command line.

    Attributes:
        kind: what the command line's parser makes of a word.
        many: the option may be repeated.
        read: the value, from what was parsed (of an option that may be repeated, the list of it) and the option's
            flag, which complaints name. Raises `UsageError`.
        write: the value as the words that `read` takes for it, each to stand behind the flag.
    """

    kind: type = str
    many: bool = False
    read: Callable[[Any, str], Any] = _same
    write: Callable[[Any], list[str]] = _plain


def _file_or_name(text: str, _flag: str) -> str:
    return str(Path(text).expanduser().absolute()) if text.endswith(".py") else text


def _folder_or_kind(text: str, _flag: str) -> str:
    return text if text in ("generated", "synthetic") else str(Path(text).expanduser().absolute())


TEXT = Spelling()
WHOLE = Spelling(kind=int)
FLAG = Spelling(kind=bool)
PATH = Spelling(kind=Path)
FILE = Spelling(read=_file_or_name)
FOLDER = Spelling(read=_folder_or_kind)
DURATION = Spelling(read=duration_s, write=lambda seconds: [duration_text(seconds)])
SIZE = Spelling(read=size_bytes, write=lambda size: [f"{size}B"])
PAIRS = Spelling(many=True, read=pairs, write=lambda found: [f"{n}={value}" for n, value in found.items()])
LISTS = Spelling(many=True, read=lists, write=lambda found: [f"{n}={','.join(values)}" for n, values in found.items()])


@dataclass(frozen=True)
class SearchOption:
    """One option of ``autotune search`` and of ``autotune submit``.

    Attributes:
        name: without the dashes in front, and with underscores for those inside.
        field: of `StudySpec`; ``None`` for an option that is about the call and not about the study.
        default: what is parsed where nobody typed it. It means the same as the field's own default.
        minimum: of a whole number.
        space: ``autotune space`` takes it too.
        recorded: a recorded surface has decided it, so that it cannot stand beside ``--replay``.
        written: whether the command line of a request that has such a field states it.
    """

    name: str
    spelling: Spelling
    help: str
    field: str | None = None
    default: Any = None
    metavar: str | None = None
    minimum: int | None = None
    space: bool = False
    recorded: bool = False
    written: Literal["unless default", "always", "never"] = "unless default"

    @property
    def flag(self) -> str:
        """As it is typed."""
        return f"--{self.name.replace('_', '-')}"

    def value(self, parsed: Any) -> Any:
        """What the request holds.

        Raises:
            UsageError: what was typed is no value of its kind.
        """
        if self.spelling.many:
            return self.spelling.read(list(parsed or ()), self.flag)
        return None if parsed is None else self.spelling.read(parsed, self.flag)

    def words(self, value: Any) -> list[str]:
        """What to type for a value."""
        if self.written == "never" or (self.written != "always" and value == self.value(self.default)):
            return []
        if self.spelling is FLAG:
            return [self.flag]
        return [word for text in self.spelling.write(value) for word in (self.flag, text)]

    def asked(self, parsed: Any) -> bool:
        """Whether somebody asked for anything but the default."""
        return parsed != self.default and parsed not in ((), [])


#: In the order in which the help tells them.
OPTIONS = (
    SearchOption(
        "model", FILE, "A name, FILE.py, or package.module:NAME.", "model", None, "MODEL", space=True, recorded=True
    ),
    SearchOption(
        "arg", PAIRS, "For the workload itself; may be repeated.", "args", None, "KEY=VALUE", space=True, recorded=True
    ),
    SearchOption(
        "data", FOLDER, "A folder, generated, or synthetic.", "data", "generated", "DATA", space=True, recorded=True
    ),
    # Once the search has begun the name is taken.
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
        "auto, cpu, cuda, cuda:N or cuda:GPU-UUID.",
        "device",
        "auto",
        "DEVICE",
        space=True,
        recorded=True,
    ),
    SearchOption("batch_size", WHOLE, "The baseline's batch size.", "batch_size", minimum=1, space=True, recorded=True),
    SearchOption(
        "image_size", WHOLE, "Side of an image in pixels.", "image_size", minimum=1, space=True, recorded=True
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
    SearchOption("allow_busy", FLAG, "Measure although others use the cores.", "allow_busy", False, recorded=True),
    SearchOption("dry_run", FLAG, "Say what would be tried; measure nothing.", default=False, recorded=True),
    SearchOption("replay", PATH, "Search a recorded surface in virtual time.", metavar="SURFACE"),
)


def option(name: str) -> SearchOption:
    """One of them, by its name."""
    return {found.name: found for found in OPTIONS}[name]


def spec_of(parsed: Mapping[str, Any], *, mark: str, created: str) -> StudySpec:
    """A request from what was typed, by the options' names; what is not there is as by default.

    Raises:
        UsageError: something in it is no value of its kind, or two contradict each other.
    """
    asked = {o.field: o.value(parsed[o.name]) for o in OPTIONS if o.field is not None and o.name in parsed}
    spec = StudySpec.model_validate({"name": "", "mark": mark, "created": created, **asked})
    stated = spec.baseline.get("batch_size")
    if spec.batch_size is not None and stated is not None and stated != str(spec.batch_size):
        raise UsageError(f"--batch-size {spec.batch_size} and --baseline batch_size={stated} contradict each other")
    both = sorted(spec.narrowed.keys() & spec.fixed.keys())
    if both:
        raise UsageError(f"{both[0]} is given both to --set and to --fix")
    return spec


def command_of(spec: StudySpec) -> str:
    """The command line that asks for the same; what is the default anyway is left out."""
    words = [w for o in OPTIONS if o.field is not None for w in o.words(getattr(spec, o.field))]
    return shlex.join(["autotune", "search", *words])
