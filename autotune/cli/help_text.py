"""What `--help` says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

# The options of a program, as far as its help text tells them: in the styles of argparse and click.

#: A line that begins an option: its names, and its help behind two spaces or more.
_OPTION = re.compile(r"\s{1,10}(-{1,2}[A-Za-z].*?)(?:\s{2,}(\S.*))?")
_NAME = re.compile(r"(--?[A-Za-z][\w.-]*)(?:[ =]?(.*))?")
_CHOICES = re.compile(r"[{\[]([\w.,|:-]+)[}\]]")
#: Frames that typer and rich draw around it.
_FRAME = str.maketrans("", "", "│|┃")


@dataclass(frozen=True)
class HelpOption:
    """One option.

    Attributes:
        names: as typed, such as ``-j`` and ``--workers``. value: what stands for its value, empty for a switch.
        choices: values that it takes, if it lists them. help: what it says of itself, on one line.
    """

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str

    @property
    def long(self) -> str:
        """The name to type: the first long one, or else the first."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names without dashes, in lower case with underscores."""
        return tuple(name.lstrip("-").replace("-", "_").lower() for name in self.names)


def options_in(text: str) -> list[HelpOption]:
    """Return the options that a help text lists, in its order."""
    found: list[tuple[str, list[str]]] = []
    for raw in text.splitlines():
        line = raw.translate(_FRAME) if raw.lstrip().startswith(("│", "┃")) else raw
        match = _OPTION.fullmatch(line.rstrip())
        if match is not None:
            found.append((match[1], [match[2]] if match[2] else []))
        elif found and line.startswith("    ") and line.strip():
            found[-1][1].append(line.strip())
        elif not line.strip() or not line.startswith(" "):
            # Whatever follows belongs to no option.
            found.append(("", []))
    return [_option(head, " ".join(more)) for head, more in found if head]


def _option(head: str, more: str) -> HelpOption:
    names: list[str] = []
    value = ""
    # click writes `--amp / --no-amp`, and rich `--workers,-j`.
    for part in re.split(r",\s*(?=-)|\s/\s|\s+(?=-{1,2}[A-Za-z])", head):
        match = _NAME.fullmatch(part.strip())
        if match is not None:
            names.append(match[1])
            value = match[2].strip() if match[2] else value
    # rich has further names, and the kind of the value, in columns of their own.
    while (name := re.match(r"(--?[A-Za-z][\w-]*)(?:[,\s]+|$)", more)) is not None:
        names.append(name[1])
        more = more[name.end() :]
    kind = re.match(r"(INTEGER|TEXT|FLOAT|PATH|DIRECTORY|\[[\w|.-]+\])(?:\s|$)", more)
    if not value and kind is not None:
        value, more = kind[1], more[kind.end() :].strip()
    listed = _CHOICES.match(value)
    choices = tuple(re.split(r"[,|]", listed[1])) if listed and re.search(r"[,|]", listed[1]) else ()
    return HelpOption(tuple(names), value, choices, " ".join(more.split()))


# How help lists options and commands: by the question that they answer.

#: Options of a search by panel, those that most need first. What is in none of them stands in the last.
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
#: Commands by panel. Each is in one.
COMMAND_PANELS: dict[str, tuple[str, ...]] = {
    "Search": ("search", "resume", "space", "init", "doctor"),
    "Results": ("report", "show", "rank", "studies", "profiles", "export"),
    "Training": ("train", "run", "verify"),
    "Queues and databases": ("submit", "jobs", "daemon", "storage"),
}


def _write_panels(ctx: Any, formatter: Any, options: Sequence[Any]) -> None:
    """Write options in their panels."""
    left = {one.name: row for one in options if (row := one.get_help_record(ctx)) is not None}
    last = list(OPTION_PANELS)[-1]
    for title, names in OPTION_PANELS.items():
        rows = [left.pop(name) for name in (list(left) if title == last else names) if name in left]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


class InPanels(TyperCommand):
    """A command that lists its options in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options by panel."""
        own = self.get_params(ctx)
        arguments = [row for one in own if not _is_option(one) and (row := one.get_help_record(ctx)) is not None]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        _write_panels(ctx, formatter, [one for one in own if _is_option(one)])


class CommandsInPanels(TyperGroup):
    """A group that lists its commands in panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by panel, each on one line."""
        for title, names in COMMAND_PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=70)) for name in names])


def _is_option(one: Any) -> bool:
    return bool(one.param_type_name == "option")


# Commands that take the options of another one, too, and list them in their help.

#: Settings of such a command: what it does not know itself is left to the other one's parser.
BEYOND = {"allow_extra_args": True, "ignore_unknown_options": True}


def also_takes(other: str, heading: str) -> type[TyperCommand]:
    """Return the class of a command whose help lists the options of another command of the same group.

    Args:
        other: the other command's name.
        heading: stands above its options, in panels.
    """

    class Both(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            # What stands behind -- is the other one's, and is left to it with the mark, which a parser would drop.
            at = args.index("--") if "--" in args else len(args)
            left = super().parse_args(ctx, args[:at])
            ctx.args = [*ctx.args, *args[at:]]
            return left

        def format_options(self, ctx: Any, formatter: Any) -> None:
            super().format_options(ctx, formatter)
            own = {one.name for one in self.params}
            beyond = [one for one in ctx.parent.command.commands[other].params if one.name not in own]
            formatter.write_paragraph()
            formatter.write_text(heading)
            with formatter.indentation():
                _write_panels(ctx, formatter, [one for one in beyond if _is_option(one)])

    return Both
