"""Options that commands share."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.base import tracking
from autotune.base.clock import timestamp
from autotune.base.errors import ProfileError, UnknownNameError, UsageError
from autotune.base.files import read_regular
from autotune.base.layout import StudyFiles
from autotune.base.records import LARGEST, CommandRef, StudySpec
from autotune.cli import completion
from autotune.cli.help_text import HelpOption
from autotune.knobs import KNOBS, Knob, OwnOption, spell
from autotune.profile import plain_data
from autotune.search import NEWEST, find_study
from autotune.search.subject import command_name
from autotune.study.request import SearchOption, option, spec_of
from autotune.study.storage_url import url_of_environment

# What a script's options are likely to set, judging by their names: the lines of ``map`` and ``output_flag`` in its
# file.

#: Options that take the output folder.
_OUTPUT = OwnOption(
    ("output_dir", "out_dir", "outdir", "output_folder", "save_dir", "work_dir"),
    like=r"out|output|default_root_dir|.*(save|output|log|ckpt|checkpoint).*(dir|path|folder)",
)
#: Prefixes of switches that turn something off.
_NO = ("--no-", "--no_", "--disable-", "--disable_")


@dataclass(frozen=True)
class KnownFlag:
    """One line of a script's file.

    Attributes:
        knob: the knob it sets; ``None`` for the option that takes the output folder.
        name: ``KNOB:VALUE`` or ``KNOB``; empty for that option.
        words: the words that set it. sure: the option's name leaves no doubt. remark: the option's own help.
    """

    knob: Knob | None
    name: str
    words: str
    sure: bool
    remark: str


def known_flags(options: Sequence[HelpOption]) -> list[KnownFlag]:
    """Return what options are likely to set, with the likeliest option for each, in the order of the knobs."""
    likeliest: dict[str, KnownFlag] = {}
    for knob in (*KNOBS.values(), None):
        for candidate in options:
            for flag in _output(candidate) if knob is None else _of(knob, candidate):
                before = likeliest.get(flag.name)
                if before is None or (flag.sure and not before.sure):
                    likeliest[flag.name] = flag
    # If one option surely sets a knob, guesses at others would only confuse.
    surely = {flag.knob for flag in likeliest.values() if flag.sure}
    return [flag for flag in likeliest.values() if flag.sure or flag.knob not in surely]


def _of(knob: Knob, option: HelpOption) -> Iterator[KnownFlag]:
    takes_words = bool(option.value) and not option.choices
    # `--bf16 [BF16]` is a switch as well.
    is_switch = not option.value or (takes_words and option.value.startswith("["))
    for pattern in knob.own_options:
        sure = _is_meant(option, pattern)
        if sure is None:
            continue
        if pattern.choices:
            for choice in option.choices:
                if choice in pattern.choices:
                    name = f"{knob.name}:{spell(pattern.choices[choice])}"
                    yield KnownFlag(knob, name, f"{option.long} {choice}", sure, option.help)
        elif pattern.sets is None:
            if takes_words:
                yield KnownFlag(knob, knob.name, f"{option.long} {{{knob.name}}}", sure, option.help)
        elif is_switch and (switch := _switch(option, on=pattern.sets is not False)) is not None:
            yield KnownFlag(knob, f"{knob.name}:{spell(pattern.sets)}", switch, sure, option.help)


def _output(option: HelpOption) -> Iterator[KnownFlag]:
    sure = _is_meant(option, _OUTPUT)
    if option.value and not option.choices and sure is not None:
        yield KnownFlag(None, "", option.long, sure, option.help)


def _switch(option: HelpOption, *, on: bool) -> str | None:
    """Return the long name of a switch that turns something on or off; ``None`` if it has none."""
    long = [name for name in option.names if name.startswith("--")]
    return next((name for name in long if name.startswith(_NO) != on), None)


def _is_meant(option: HelpOption, own: OwnOption) -> bool | None:
    """Return whether an option is surely one of these, or only possibly; ``None`` if it is not one."""
    if set(own.names).intersection(option.keys):
        return True
    return False if any(re.fullmatch(own.like, key) for key in option.keys) else None


# ``train.autotune.yaml``: how a training script is run, and what its own flags set, for ``--script``.


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_text, values))


#: Its keys: whether a value is right, and what it must be.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (lambda v: bool(v) and (_is_text(v) or _are_texts(v)), "text, such as python train.py --epochs 90"),
    "map": (
        lambda v: isinstance(v, dict) and _are_texts([*v, *v.values()]),
        "a mapping of KNOB:VALUE or KNOB to words, in quotes",
    ),
    "output_flag": (_is_text, "text, such as --output-dir"),
    "scratch": (lambda v: isinstance(v, bool), "true or false"),
    "rate": (_is_text, "text, such as '(?P<rate>[0-9.]+) images/s'"),
    "rate_file": (_is_text, "text, such as metrics.jsonl"),
    "samples_per_step": (lambda v: type(v) is int and 0 < v <= LARGEST, "a whole number above 0"),
}
KEYS = tuple(_VALUES)
#: Suffix of its file's name.
ENDING = ".autotune.yaml"
_MOST_BYTES = 2**20
_AGAIN = "write it again with `autotune init -- python train.py …`."


def read_yaml(path: Path, kind: str, again: str, *, missing: str = "") -> tuple[str, Any]:
    """Return the text of a file of plain YAML, and its content.

    Args:
        kind: what error messages call the file. again: how to get a correct one. missing: advice if there is none.

    Raises:
        UsageError: the file cannot be read, or holds more than plain data.
    """
    try:
        text = read_regular(path, _MOST_BYTES, follow=True).decode("utf-8-sig")
        return text, plain_data(text, str(path), kind=kind, again=again)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", advice=missing or f"name a {kind}.") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", advice=f"name a {kind}.") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", advice=again) from None
    except ProfileError as error:
        raise UsageError(str(error), advice=error.advice, detail=error.detail) from None


def read_script(path: Path) -> dict[str, Any]:
    """Read a script's file; return its values by key, ``command`` as words and ``map`` by ``KNOB:VALUE`` or ``KNOB``.

    Raises:
        UsageError: the file cannot be read, or has a wrong key or value.
    """
    _, data = read_yaml(path, "script's file", _AGAIN, missing="`autotune init -- python train.py …` writes one.")
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no keys", advice=f"it may have {', '.join(KEYS)}.")
    for key, value in data.items():
        if key not in KEYS:
            raise UnknownNameError(f"key in {path}", str(key)[:60], KEYS)
        is_right, expected = _VALUES[key]
        if value is not None and not is_right(value):
            raise UsageError(f"{path}: {key} must be {expected}", advice="correct that line.")
    # A key without a value is ignored.
    values = {key: value for key, value in data.items() if value is not None}
    if "command" in values:
        values["command"] = _words(values["command"], path)
    if "map" in values:
        values["map"] = {name: spell(words) for name, words in values["map"].items()}
    return values


def _words(command: str | list[str], path: Path) -> list[str]:
    if isinstance(command, list):
        return command
    try:
        words = shlex.split(command)
    except ValueError:
        raise UsageError(f"{path}: a quote is not closed in the command", advice="close it.") from None
    if not words:
        raise UsageError(f"{path}: command has no words", advice="write it as in a shell: python train.py.")
    return words


def with_script(typed: Mapping[str, Any], words: Sequence[str], path: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return the options and the words of a command line, completed by a script's file. The command line wins.

    Args:
        typed: values by option name, as returned by the command-line parser.

    Raises:
        UsageError: see `read_script`; or neither names a command to run.
    """
    if path is None:
        return dict(typed), list(words)
    values = read_script(path)
    words = list(words) or values.get("command", [])
    if not words:
        raise UsageError(f"{path} has no command", advice="write one into it, or behind --.")
    completed = dict(typed)
    if "map" in completed:
        typed_pairs = list(completed["map"] or ())
        knobs = {pair.partition("=")[0].partition(":")[0] for pair in typed_pairs}
        more = [f"{n}={text}" for n, text in values.get("map", {}).items() if n.partition(":")[0] not in knobs]
        completed["map"] = [*more, *typed_pairs]
    for name in KEYS[2:]:
        if name in completed and not completed[name] and name in values:
            completed[name] = values[name]
    return completed, words


def quoted(text: str) -> str:
    """Return text as a quoted scalar, which YAML 1.1 and 1.2 read the same way."""
    return json.dumps(text, ensure_ascii=False)


# Options of commands: those of a search (`autotune.study.request`), and those that several commands share.

#: Shell completion of an option's value.
_COMPLETIONS: dict[str, Callable[..., list[str]]] = {
    "model": completion.models,
    "objective": completion.objectives,
    "sampler": completion.samplers,
    "baseline": completion.knobs,
    "set": completion.knobs,
    "fix": completion.knobs,
}


#: Placeholder for a value in help texts, by its type.
_METAVARS: dict[type, str] = {int: "N", str: "NAME", Path: "FOLDER"}


def typer_option(one: SearchOption, *, help_: str | None = None, default: Any = ...) -> Any:
    """Return an option of a search as a Typer option.

    Args:
        help_: the help text, if this command needs a different one from the search's.
        default: the default; leave it out in ``Annotated``, where the parameter has its own.
    """
    return typer.Option(
        default,
        one.flag,
        help=help_ or one.help,
        metavar=one.metavar or _METAVARS.get(one.spelling.kind),
        min=one.minimum,
        autocompletion=_COMPLETIONS.get(one.name),
    )


def search_options(options: Sequence[SearchOption]) -> Callable[..., Callable[..., None]]:
    """Return a decorator that adds options of a search to a command, as `takes` does."""
    return takes([_parameter(one) for one in options])


def takes(added: Sequence[inspect.Parameter]) -> Callable[..., Callable[..., None]]:
    """Return a decorator that adds parameters to a command, which receives their values, by name, as its first
    argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def typed(**given: Any) -> None:
            command({one.name: given.pop(one.name) for one in added}, **given)

        own_parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        # Those without a default, such as the context, have to come first.
        parameters = sorted([*own_parameters, *added], key=lambda one: one.default is not one.empty)
        # Typer reads a command's help, name and parameters from these attributes.
        typed.__doc__, typed.__name__ = command.__doc__, command.__name__
        typed.__annotations__ = {one.name: one.annotation for one in parameters}
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return typed

    return decorate


def _parameter(one: SearchOption) -> inspect.Parameter:
    kind: Any = one.spelling.kind
    listed = list[kind] if one.spelling.many else kind
    default = typer_option(one, default=one.default)
    return inspect.Parameter(one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=listed)


def make_spec(typed: Mapping[str, Any], words: Sequence[str] = ()) -> StudySpec:
    """Return a new request from the option values of a command line.

    Args:
        words: the command of the script to tune, if given in place of a model.

    Raises:
        UsageError: an option has an invalid value, or neither ``--model`` nor ``--replay`` nor a command is given.
    """
    typed, words = with_script(typed, words, typed.get("script"))
    if "storage" in typed and typed["storage"] is None and typed.get("replay") is None:
        url = url_of_environment()
        typed = {**typed, "storage": None if url is None else url.address}
    if words:
        if typed["model"] is not None or typed.get("replay") is not None:
            raise UsageError("both --model and a command say what to train", advice="leave one of them out.")
        spec = spec_of({**typed, "model": command_name(words)}, mark=uuid.uuid4().hex, created=timestamp())
        return spec.model_copy(update={"command": CommandRef(words=tuple(words), folder=os.getcwd())})
    if typed["model"] is None and typed.get("replay") is None:
        raise UsageError("--model says what to train", advice="--model resnet50, --model mine.py; or --replay SURFACE.")
    values = {**typed, "model": typed["model"] or "recorded"}
    return spec_of(values, mark=uuid.uuid4().hex, created=timestamp())


def flag(name: str) -> str:
    """Return a parameter as typed on a command line: ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"


def was_typed(ctx: Any, name: str) -> bool:
    """Whether a parameter's value comes from the command line, not from its default or the environment."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def typed_words(ctx: Any, names: Iterable[str]) -> list[str]:
    """Return the words that set those parameters again that were typed."""
    words: list[str] = []
    for name in names:
        value = ctx.params[name]
        if was_typed(ctx, name):
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [flag(name), *([] if item is True else [str(item)])]
    return words


def refuse_group_options(ctx: typer.Context) -> None:
    """Refuse options between a command group and its subcommand, which would otherwise be ignored."""
    for name in ctx.params:
        if was_typed(ctx, name):
            typed = flag(name.removeprefix("as_"))
            raise UsageError(
                f"{typed} stands before {ctx.invoked_subcommand!r}",
                advice=f"write it behind: autotune {ctx.info_name} {ctx.invoked_subcommand} … {typed}.",
            )


Study = Annotated[
    str,
    typer.Argument(
        help="Name or folder of a study; the newest without.",
        metavar="[STUDY]",
        show_default=False,
        autocompletion=completion.studies,
    ),
]
StudiesDir = Annotated[Path, typer_option(option("studies_dir"))]
ProfileFile = Annotated[Path, typer.Option("--profile", help="A profile.yaml.", metavar="FILE")]
#: What a profile says of its training, which the command line may replace.
ItsModel = Annotated[str, typer_option(option("model"), help_="The model; the profile's, if its code is unchanged.")]
ItsData = Annotated[str, typer.Option("--data", help="A folder, generated, synthetic.  [default: as measured]")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout if not given.")]
Args = Annotated[list[str] | None, typer_option(option("arg"))]
ScriptFile = Annotated[Path | None, typer_option(option("script"))]
Map = Annotated[list[str] | None, typer_option(option("map"))]
AllowBusy = Annotated[bool, typer_option(option("allow_busy"))]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        help=f"Write it to an experiment tracker, too: {', '.join(tracking.names())}. May be repeated.",
        metavar="NAME",
        autocompletion=completion.trackers,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
NoInput = Annotated[
    bool, typer.Option("--no-input", help="Never ask anything. autotune never does; scripts may say so.")
]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND…]", help="A training script, as it stands: python train.py --epochs 90."),
]


def changed_fields(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a study's request that options of a search change, of those that are typed.

    Raises:
        UsageError: a value is invalid, or both ``--epochs`` and ``--samples`` are given.
    """
    fields = {str(one.field): one.value(typed[one.name]) for one in map(option, typed) if one.asked(typed[one.name])}
    lengths = fields.keys() & {"epochs", "samples"}
    if len(lengths) == 2:
        raise UsageError("--epochs and --samples both say how long the training is", advice="leave one of them out.")
    # One length replaces the other.
    return {**dict.fromkeys(("epochs", "samples") if lengths else ()), **fields}


def study_of(study: str, studies_dir: Path) -> StudyFiles:
    """Find the study of a command. If it is the newest by default, print its name on stderr."""
    files = find_study(study, studies_dir)
    if study == NEWEST:
        typer.echo(f"the newest study: {files.name}", err=True)
    return files
