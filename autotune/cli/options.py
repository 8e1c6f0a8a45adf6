"""What commands take: the options of a search as `autotune.study.options` declares them, and a few that many share."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.clock import timestamp
from autotune.errors import UsageError
from autotune.records import StudySpec
from autotune.study.options import SearchOption, option, spec_of


def declared(one: SearchOption, *, help_: str | None = None, default: Any = ...) -> Any:
    """An option of a search, as Typer takes it: for ``Annotated``, or with a default in place of a parameter's own.

    Args:
        help_: what it is for in this command, where that is something else.
    """
    return typer.Option(default, one.flag, help=help_ or one.help, metavar=one.metavar, min=one.minimum)


def takes(options: Sequence[SearchOption], *, required: Sequence[str] = ()) -> Callable[..., Callable[..., None]]:
    """Give a command options of a search: it gets what was typed, by their names, as its first argument.

    Args:
        required: the names of those that have to be typed.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        def typed(**given: Any) -> None:
            command({one.name: given.pop(one.name) for one in options}, **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [*(_parameter(one, one.name in required) for one in options), *own]
        # Typer makes of a command what these three say.
        typed.__doc__, typed.__name__ = command.__doc__, command.__name__
        typed.__annotations__ = {one.name: one.annotation for one in parameters}
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return typed

    return give


def _parameter(one: SearchOption, required: bool) -> inspect.Parameter:
    kind: Any = one.spelling.kind
    listed = list[kind] if one.spelling.many else kind
    default = declared(one, default=... if required else one.default)
    return inspect.Parameter(one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=listed)


def make_spec(typed: Mapping[str, Any]) -> StudySpec:
    """A new request from what was typed.

    Raises:
        UsageError: something in it is no value of its kind, or there is nothing to search.
    """
    if typed["model"] is None and typed.get("replay") is None:
        raise UsageError("--model says what to train", advice="--model resnet50, --model mine.py; or --replay SURFACE.")
    asked = {**typed, "model": typed["model"] or "recorded"}
    return spec_of(asked, mark=uuid.uuid4().hex, created=timestamp())


def was_typed(ctx: Any, name: str) -> bool:
    """Whether a parameter stands on the command line, and is no default nor from the environment."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def refuse_group_options(ctx: typer.Context) -> None:
    """Refuse options that stand before a command's own name: they would be dropped.

    Raises:
        UsageError: there is one.
    """
    for name in ctx.params:
        if was_typed(ctx, name):
            flag = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} stands before {ctx.invoked_subcommand!r}",
                advice=f"write it behind: autotune {ctx.info_name} {ctx.invoked_subcommand} … {flag}.",
            )


Study = Annotated[str, typer.Argument(help="Name or folder of a study.", metavar="STUDY")]
StudiesDir = Annotated[Path, declared(option("studies_dir"))]
Args = Annotated[list[str] | None, declared(option("arg"))]
AllowBusy = Annotated[bool, declared(option("allow_busy"))]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
NoInput = Annotated[
    bool, typer.Option("--no-input", help="Never ask anything. autotune never does; scripts may say so.")
]
