"""Options of commands: those of a search (`autotune.study.options`), and those that several commands share."""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.base import tracking
from autotune.cli import completion
from autotune.cli.script_file import with_script
from autotune.base.clock import timestamp
from autotune.base.errors import UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import CommandRef, StudySpec
from autotune.search import NEWEST, find_study
from autotune.search.script import command_name
from autotune.study.options import option
from autotune.study.search_option import SearchOption
from autotune.study.storage_url import url_of_environment
from autotune.study.typed_request import spec_of

#: What the shell offers for an option's value.
_COMPLETIONS: dict[str, Callable[..., list[str]]] = {
    "model": completion.models,
    "objective": completion.objectives,
    "sampler": completion.samplers,
    "baseline": completion.knobs,
    "set": completion.knobs,
    "fix": completion.knobs,
}


def typer_option(one: SearchOption, *, help_: str | None = None, default: Any = ...) -> Any:
    """Return an option of a search as a Typer option.

    Args:
        help_: the help text, if this command needs another one than the search.
        default: the default; leave it out in ``Annotated``, where the parameter has its own.
    """
    return typer.Option(
        default,
        one.flag,
        help=help_ or one.help,
        metavar=one.metavar,
        min=one.minimum,
        autocompletion=_COMPLETIONS.get(one.name),
    )


def search_options(
    options: Sequence[SearchOption], *, required: Sequence[str] = ()
) -> Callable[..., Callable[..., None]]:
    """Return a decorator that adds options of a search to a command.

    The command receives their values, by option name, as its first argument.

    Args:
        required: names of the options that have no default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def typed(**given: Any) -> None:
            command({one.name: given.pop(one.name) for one in options}, **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [*(_parameter(one, one.name in required) for one in options), *own]
        # Typer reads a command's help, name and parameters from these attributes.
        typed.__doc__, typed.__name__ = command.__doc__, command.__name__
        typed.__annotations__ = {one.name: one.annotation for one in parameters}
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return typed

    return decorate


def _parameter(one: SearchOption, required: bool) -> inspect.Parameter:
    kind: Any = one.spelling.kind
    listed = list[kind] if one.spelling.many else kind
    default = typer_option(one, default=... if required else one.default)
    return inspect.Parameter(one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=listed)


def make_spec(typed: Mapping[str, Any], words: Sequence[str] = ()) -> StudySpec:
    """Return a new request from the option values of a command line.

    Args:
        words: of the script to tune, if one is given in place of a model.

    Raises:
        UsageError: an option has an invalid value, or neither ``--model`` nor ``--replay`` nor a command is given.
    """
    typed, words = with_script(typed, words, typed.get("script"))
    if "storage" in typed and typed["storage"] is None and typed.get("replay") is None:
        told = url_of_environment()
        typed = {**typed, "storage": None if told is None else told.address}
    if words:
        if typed["model"] is not None or typed.get("replay") is not None:
            raise UsageError("both --model and a command say what to train", advice="leave one of them out.")
        spec = spec_of({**typed, "model": command_name(words)}, mark=uuid.uuid4().hex, created=timestamp())
        return spec.model_copy(update={"command": CommandRef(words=tuple(words), folder=os.getcwd())})
    if typed["model"] is None and typed.get("replay") is None:
        raise UsageError("--model says what to train", advice="--model resnet50, --model mine.py; or --replay SURFACE.")
    asked = {**typed, "model": typed["model"] or "recorded"}
    return spec_of(asked, mark=uuid.uuid4().hex, created=timestamp())


def was_typed(ctx: Any, name: str) -> bool:
    """Whether a parameter's value comes from the command line, not from its default or the environment."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def refuse_group_options(ctx: typer.Context) -> None:
    """Refuse options between a command group and its subcommand, which would otherwise be ignored.

    Raises:
        UsageError: there is such an option.
    """
    for name in ctx.params:
        if was_typed(ctx, name):
            flag = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} stands before {ctx.invoked_subcommand!r}",
                advice=f"write it behind: autotune {ctx.info_name} {ctx.invoked_subcommand} … {flag}.",
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


def study_of(study: str, studies_dir: Path) -> StudyFiles:
    """Find the study of a command; of the newest, which nobody has named, the name is told on stderr."""
    files = find_study(study, studies_dir)
    if study == NEWEST:
        typer.echo(f"the newest study: {files.name}", err=True)
    return files
