"""Lets the agent into a command of the user's: the words that set knobs there, the plan of what the agent sets, and the
environment that carries it.

See the package ``autotune_agent`` for what happens inside.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.records import CommandRef, Config, Value
from autotune.knobs import KNOBS, Knob, spell
from autotune.space import canonical, environment, parse_value

#: The folder that comes first on ``PYTHONPATH``; `autotune_agent.arm` reads the variable.
FOLDER = Path(__file__).parents[1] / "agent" / "site"
PLAN = "AUTOTUNE_AGENT"
#: A knob's name in a command, in place of its value.
_PLACE = re.compile(r"\{([a-z_]+)\}")
#: A word of a command, in place of the words that ``--map`` adds; without it they come last.
FLAGS = "{flags}"
#: Options of Python that make it ignore ``PYTHONPATH`` or ``sitecustomize``, and those that take a value.
_DEAF, _WITH_VALUE = frozenset("EIS"), frozenset("WX")


def places(command: Sequence[str]) -> set[str]:
    """Return the knobs that have a place in a command, such as ``{batch_size}``."""
    return {name for part in command for name in _PLACE.findall(part) if name in KNOBS}


def filled(command: Sequence[str], config: Config) -> list[str]:
    """Return a command with each knob's place taken by its value; by PyTorch's own where it is inactive.

    Braces around anything else stay as they are.

    Raises:
        UsageError: the configuration does not have the knob, and PyTorch has no value of its own.
    """

    def value(match: re.Match[str]) -> str:
        knob = KNOBS.get(match[1])
        if knob is None:
            return match[0]
        found = canonical(config).get(knob.name, knob.default)
        if found is None:
            raise UsageError(
                f"nothing is known to put in the place of {match[0]}",
                advice="write the value into the command.",
            )
        return spell(found)

    return [_PLACE.sub(value, part) for part in command]


@dataclass(frozen=True)
class Flag:
    """Words by which options of a script's own set a knob: what one ``--map`` says.

    Attributes:
        value: ``None`` stands for any; the words have a place for it then.
    """

    knob: str
    value: Value | None
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """What stands before the words."""
        return self.knob if self.value is None else f"{self.knob}:{spell(self.value)}"


def flags_of(written: Mapping[str, str]) -> list[Flag]:
    """Return what ``--map`` says, by ``KNOB:VALUE`` or ``KNOB``.

    Raises:
        UsageError: a knob or a value is unknown or given twice, or words are missing or lack a place for the value.
    """
    found: list[Flag] = []
    for name, text in written.items():
        knob, colon, value = name.partition(":")
        if knob not in KNOBS:
            raise UnknownNameError("knob", knob, KNOBS)
        found.append(Flag(knob, parse_value(knob, value) if colon else None, _split(text, name)))
        _check(found)
    return found


def _split(text: str, name: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        raise UsageError(f"--map {name}: a quote is not closed in {text[:60]!r}", advice="close it.") from None
    if not words:
        raise UsageError(
            f"--map {name} has no words", advice=f"write the script's own options: --map {name}='--option'."
        )
    return words


def _check(flags: Sequence[Flag]) -> None:
    """Raise `UsageError` if the last one cannot be, by itself or beside the others."""
    *others, last = flags
    knob, inside = last.knob, places(last.words)
    if inside - {knob}:
        raise UsageError(
            f"--map {last.name} has a place for {sorted(inside - {knob})[0]}", advice="give it a --map of its own."
        )
    if last.value is None and knob not in inside:
        raise UsageError(
            f"--map {knob} has no place for its value",
            advice=f"write --map {knob}='--option {{{knob}}}', or name the value: --map {knob}:VALUE='--option'.",
        )
    same = [other.value for other in others if other.knob == knob]
    if last.value in same:
        raise UsageError(f"--map gives {last.name} twice", advice="keep one of them.")
    if same and None in (last.value, *same):
        raise UsageError(
            f"--map gives {knob} both for any value and for one", advice="keep one of them, or name each value."
        )


def check_flags(command: CommandRef) -> None:
    """Check which words would be added to a command, before it is run.

    Raises:
        UsageError: see `flags_of`; or a knob has a place in the command, too, or ``{flags}`` is there twice.
    """
    for flag in flags_of(command.flags):
        if flag.knob in places(command.words):
            raise UsageError(
                f"{flag.knob} has both a --map and a place in the command", advice="leave one of them out."
            )
    if (command.flags or command.output_flag) and command.words.count(FLAGS) > 1:
        raise UsageError(f"{FLAGS} is in the command twice", advice="leave it where further words belong.")
    if command.output_flag is not None and not command.output_flag.split():
        raise UsageError("--output-flag has no words", advice="write the script's own option: --output-flag --out.")


def set_by(command: CommandRef) -> set[str]:
    """Return the knobs that a command sets itself, by places or by flags of its own."""
    return places(command.words) | {flag.knob for flag in flags_of(command.flags)}


def samples_in_step(command: CommandRef, config: Config) -> int:
    """Return the samples of one step of a command's training, as far as that is told; 1 if it is not."""
    if command.samples_per_step is not None:
        return command.samples_per_step
    return int(config.get("batch_size", 1)) if "batch_size" in set_by(command) else 1


def told_values(command: CommandRef) -> dict[str, tuple[Value, ...]]:
    """Return the values that ``--map`` names, of each knob for which it does: no others can be set."""
    found: dict[str, tuple[Value, ...]] = {}
    for flag in flags_of(command.flags):
        if flag.value is not None:
            found[flag.knob] = (*found.get(flag.knob, ()), flag.value)
    return found


def words_of(command: CommandRef, config: Config, output: Path | None = None) -> list[str]:
    """Return the words of a command under a configuration: places are filled, and its own flags are there.

    No words are added for the values that the script has by itself (`CommandRef.own`), unless ``--map`` names them.

    Args:
        output: the folder that it is told to write to, by `CommandRef.output_flag`.

    Raises:
        UsageError: see `filled`.
    """
    words = filled(command.words, config)
    if not command.flags and output is None:
        return [word for word in words if word != FLAGS]
    more = list(_added(command, canonical(config)))
    if output is not None:
        *before, flag = (command.output_flag or "").split()
        more += [*before, f"{flag}{output}"] if flag.endswith("=") else [*before, flag, str(output)]
    at = words.index(FLAGS) if FLAGS in words else len(words)
    return [*words[:at], *more, *words[at + 1 :]]


def _added(command: CommandRef, config: Config) -> Iterator[str]:
    for flag in flags_of(command.flags):
        value = config.get(flag.knob)
        # A value that has no effect in a configuration is not in it.
        if value is not None and (value != command.own.get(flag.knob) if flag.value is None else value == flag.value):
            yield from filled(flag.words, config)


def plan(
    config: Config, title: str, *, in_command: set[str], own: Config | None = None, compared: bool = False
) -> dict[str, Any]:
    """Return what the agent is told: each knob of a configuration with the door at which it is set, or why it is not.

    Args:
        title: what its one line begins with. own: the script's own values, which are worth no word there; PyTorch's
            defaults where they are not known.
        in_command: knobs that the command itself sets.
        compared: what loaders deliver under it has been compared with what the script's own deliver.
    """
    usual = {name: knob.default for name, knob in KNOBS.items()} | dict(own or {})
    settings = [
        {**_setting(n, v, n in in_command), "plain": n in usual and v == usual[n]} for n, v in canonical(config).items()
    ]
    return {"title": title, "settings": settings, "compared": compared}


def question(*, in_command: set[str]) -> dict[str, Any]:
    """Return a plan by which the agent sets nothing, and tells which values of all knobs could be set.

    Of numbers it is asked for the least and the most: whether one can be set depends on no more than whether it is 0.

    Args:
        in_command: knobs that the command itself sets.
    """
    asked = [
        {**_setting(name, value, name in in_command), "ask": True}
        for name, knob in KNOBS.items()
        for value in knob.values or (knob.minimum, knob.maximum)
    ]
    return {"title": "", "settings": asked}


def doors(config: Config, *, in_command: set[str]) -> dict[str, dict[str, Any]]:
    """Return what each door is told of a configuration that a running script is switched to.

    Args:
        in_command: knobs that the command itself sets.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in canonical(config).items():
        at = None if name in in_command or name not in KNOBS else KNOBS[name].at_door(value)
        if at is not None:
            found.setdefault(at[0], {}).update(at[1])
    return found


def _setting(name: str, value: Value, in_command: bool) -> dict[str, Any]:
    knob = KNOBS.get(name)
    if knob is None:
        return {"knob": name, "words": f"{name}={spell(value)}", "refused": "it is a knob of a workload file"}
    found: dict[str, Any] = {
        "knob": name,
        "value": value,
        "words": knob.phrase(value),
    }
    if in_command:
        return {**found, "done": 1}
    at = knob.at_door(value)
    if at is None:
        return {**found, "refused": _refusal(knob)}
    door, arguments = at
    return {**found, "door": door, "arguments": arguments}


def _refusal(knob: Knob) -> str:
    return knob.not_outside or "it cannot be set from outside"


def entered(
    env: Mapping[str, str], told: Mapping[str, Any], config: Config, *, in_command: Set[str] = frozenset()
) -> dict[str, str]:
    """Return an environment in which the agent enters every Python process, with the variables that a configuration
    needs.

    Args:
        in_command: knobs that the command itself sets.

    Raises:
        MachineError: the folder's name cannot be part of ``PYTHONPATH``.
    """
    if os.pathsep in str(FOLDER):
        raise MachineError(
            f"autotune is installed below {str(FOLDER)!r}, and a folder with {os.pathsep!r} in its name cannot be on "
            "PYTHONPATH",
            advice="install it elsewhere.",
        )
    outside = {name: value for name, value in config.items() if name not in in_command}
    found = {**env, **environment(outside), PLAN: json.dumps(told, separators=(",", ":"))}
    outer = env.get("PYTHONPATH")
    found["PYTHONPATH"] = os.pathsep.join([str(FOLDER), outer] if outer else [str(FOLDER)])
    return found


def deaf(command: Sequence[str]) -> str | None:
    """Return the option of a command by which Python ignores the agent; ``None`` if there is none."""
    return _options(command)[0]


def python_file(command: Sequence[str]) -> str | None:
    """Return the file that a command's Python runs; ``None`` if it runs no Python, or Python no file."""
    return _options(command)[1]


def refuse_deaf(command: Sequence[str]) -> None:
    """Refuse a command whose Python would ignore the agent.

    Raises:
        UsageError: it would.
    """
    ignores = deaf(command)
    if ignores is not None:
        raise UsageError(
            f"with {ignores}, Python ignores PYTHONPATH, by which autotune enters the script",
            advice=f"leave {ignores} out.",
        )


def _options(command: Sequence[str]) -> tuple[str | None, str | None]:
    """Return what Python's own options in a command say, each if there is one: that which makes it ignore the agent,
    and the file that is run."""
    ignores: str | None = None
    if not command or not re.fullmatch(r"python[0-9.]*", PurePath(command[0]).name):
        return None, None
    options = iter(command[1:])
    for option in options:
        if not option.startswith("-"):
            return ignores, option
        if option.startswith("--") or option == "-":
            break
        for i, letter in enumerate(option[1:], 1):
            if letter in _DEAF:
                ignores = ignores or f"-{letter}"
            if letter in "cm":
                return ignores, None
            if letter in _WITH_VALUE:
                if i == len(option) - 1:
                    next(options, None)
                break
    return ignores, None
