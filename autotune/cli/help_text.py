"""The text of `--help`."""

from __future__ import annotations

import re
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

LAST_PANEL = "Output"
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
    LAST_PANEL: (),
}
#: Options of `submit` alone, by panel.
JOB_PANELS: dict[str, tuple[str, ...]] = {
    "The job": (
        *("to", "priority", "gpu", "not_before", "window", "max_hours", "after", "on_reboot", "on_done"),
        *("host_memory", "cores", "env", "keep_fresh", "again"),
    ),
    "Slurm": ("partition", "gres", "time", "cpus", "mem", "account", "qos", "sbatch"),
}
#: Commands by panel. Each command is in one.
COMMAND_PANELS: dict[str, tuple[str, ...]] = {
    "Search": ("search", "resume", "space", "init", "doctor"),
    "Results": ("report", "show", "rank", "studies", "profiles", "export"),
    "Training": ("train", "run", "verify"),
    "Queues and databases": ("submit", "jobs", "daemon", "storage"),
}


class InPanels(TyperCommand):
    """A command that lists its arguments, and then its options in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels that have something to show."""
        parameters = self.get_params(ctx)
        rows = {one.name: row for one in parameters if (row := one.get_help_record(ctx)) is not None}
        arguments = tuple(one.name for one in parameters if one.param_type_name == "argument")
        for title, names in {"Arguments": arguments, **JOB_PANELS, **OPTION_PANELS}.items():
            shown = [rows.pop(name) for name in (list(rows) if title == LAST_PANEL else names) if name in rows]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)


class CommandsInPanels(TyperGroup):
    """A group that lists its commands in panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by panel, each on one line."""
        for title, names in COMMAND_PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=70)) for name in names])
