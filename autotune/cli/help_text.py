"""The text of `--help`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

# The options of a program, parsed from its help text in the styles of argparse and click.

#: A line that begins an option: its names, and its help after two or more spaces.
_OPTION = re.compile(r"\s{1,10}(-{1,2}[A-Za-z].*?)(?:\s{2,}(\S.*))?")
_NAME = re.compile(r"(--?[A-Za-z][\w.-]*)(?:[ =]?(.*))?")
_CHOICES = re.compile(r"[{\[]([\w.,|:-]+)[}\]]")
#: Frames that typer and rich draw around help.
_FRAME = str.maketrans("", "", "│|┃")


@dataclass(frozen=True)
class HelpOption:
    """One option.

    Attributes:
        names: as typed, such as ``-j`` and ``--workers``. value: the placeholder for its value, empty for a switch.
        choices: the values that it takes, if it lists them. help: its help text, on one line.
    """

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str

    @property
    def long(self) -> str:
        """The name to type: the first long one, or else the first one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names without dashes, in lower case with underscores."""
        return tuple(name.lstrip("-").replace("-", "_").lower() for name in self.names)


def options_in(text: str) -> list[HelpOption]:
    """Return the options that a help text lists, in order."""
    options: list[tuple[str, list[str]]] = []
    for raw in text.splitlines():
        line = raw.translate(_FRAME) if raw.lstrip().startswith(("│", "┃")) else raw
        match = _OPTION.fullmatch(line.rstrip())
        if match is not None:
            options.append((match[1], [match[2]] if match[2] else []))
        elif options and line.startswith("    ") and line.strip():
            options[-1][1].append(line.strip())
        elif not line.strip() or not line.startswith(" "):
            # What follows belongs to no option.
            options.append(("", []))
    return [_option(head, " ".join(more)) for head, more in options if head]


def _option(head: str, more: str) -> HelpOption:
    names: list[str] = []
    value = ""
    # click writes `--amp / --no-amp`, and rich `--workers,-j`.
    for part in re.split(r",\s*(?=-)|\s/\s|\s+(?=-{1,2}[A-Za-z])", head):
        match = _NAME.fullmatch(part.strip())
        if match is not None:
            names.append(match[1])
            value = match[2].strip() if match[2] else value
    # rich puts further names, and the type of the value, in columns of their own.
    while (name := re.match(r"(--?[A-Za-z][\w-]*)(?:[,\s]+|$)", more)) is not None:
        names.append(name[1])
        more = more[name.end() :]
    value_type = re.match(r"(INTEGER|TEXT|FLOAT|PATH|DIRECTORY|\[[\w|.-]+\])(?:\s|$)", more)
    if not value and value_type is not None:
        value, more = value_type[1], more[value_type.end() :].strip()
    choice_list = _CHOICES.match(value)
    choices = tuple(re.split(r"[,|]", choice_list[1])) if choice_list and re.search(r"[,|]", choice_list[1]) else ()
    return HelpOption(tuple(names), value, choices, " ".join(more.split()))


# How help groups options and commands: by the question that they answer.

#: Options of a search by panel, those that most people need first. Options in none of them go to the last.
OPTION_PANELS: dict[str, tuple[str, ...]] = {
    "Most used": (
        *("model", "data", "budget", "batch_size", "keep_batch_size", "set", "fix", "objective", "device", "study"),
    ),
    "What is trained": (
        *("arg", "image_size", "global_batch", "nproc_per_node"),
        *("store_latency", "store_bandwidth", "store_cache"),
    ),
    "A script": ("script", "map", "output_flag", "scratch", "samples_per_step", "rate", "rate_file"),
    "What to try": ("baseline", "memory_limit", "trials", "sampler", "seed"),
    "Other goals": ("require", "epochs", "samples", "price_per_hour"),
    "Other machines": ("devices", "on", "on_resources", "workers", "storage", "allow_busy"),
    "Output": (),
}
#: Commands by panel. Each command is in one.
COMMAND_PANELS: dict[str, tuple[str, ...]] = {
    "Search": ("search", "resume", "space", "init", "doctor"),
    "Results": ("report", "show", "rank", "studies", "profiles", "export"),
    "Training": ("train", "run", "verify"),
    "Queues and databases": ("submit", "jobs", "daemon", "storage"),
}


def _write_panels(ctx: Any, formatter: Any, options: Sequence[Any]) -> None:
    """Write options by panel."""
    unlisted = {option.name: row for option in options if (row := option.get_help_record(ctx)) is not None}
    last = list(OPTION_PANELS)[-1]
    for title, names in OPTION_PANELS.items():
        rows = [unlisted.pop(name) for name in (list(unlisted) if title == last else names) if name in unlisted]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


class InPanels(TyperCommand):
    """A command that lists its options in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options by panel."""
        parameters = self.get_params(ctx)
        arguments = [
            row
            for parameter in parameters
            if not _is_option(parameter) and (row := parameter.get_help_record(ctx)) is not None
        ]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        _write_panels(ctx, formatter, [parameter for parameter in parameters if _is_option(parameter)])


class CommandsInPanels(TyperGroup):
    """A group that lists its commands in panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by panel, each on one line."""
        for title, names in COMMAND_PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=70)) for name in names])


def _is_option(one: Any) -> bool:
    return bool(one.param_type_name == "option")


# Commands that also take the options of another command, and list them in their help.

#: Settings of such a command: options that it does not know are left to the other command's parser.
BEYOND = {"allow_extra_args": True, "ignore_unknown_options": True}


def also_takes(other: str, heading: str) -> type[TyperCommand]:
    """Return the class of a command whose help lists the options of another command of the same group.

    Args:
        other: the other command's name.
        heading: the heading above its options, which are in panels.
    """

    class Both(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            # Words behind -- belong to the other command, and are left to it with the --, which a parser would drop.
            separator = args.index("--") if "--" in args else len(args)
            remaining = super().parse_args(ctx, args[:separator])
            ctx.args = [*ctx.args, *args[separator:]]
            return remaining

        def format_options(self, ctx: Any, formatter: Any) -> None:
            super().format_options(ctx, formatter)
            own_names = {option.name for option in self.params}
            other_options = [
                option for option in ctx.parent.command.commands[other].params if option.name not in own_names
            ]
            formatter.write_paragraph()
            formatter.write_text(heading)
            with formatter.indentation():
                _write_panels(ctx, formatter, [option for option in other_options if _is_option(option)])

    return Both
