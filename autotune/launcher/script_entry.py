"""Brings the agent into a user's command: the words that set knobs there, the plan of what the agent sets, and the
environment that carries the plan.

See the package ``autotune_agent`` for what happens inside the command.
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
from autotune.knobs import KNOBS, spell
from autotune.space import canonical, environment, parse_value

#: The folder that comes first on ``PYTHONPATH``; `autotune_agent.arm` reads the variable.
FOLDER = Path(__file__).parents[1] / "agent" / "site"
PLAN = "AUTOTUNE_AGENT"
#: A knob's name in a command, in place of its value.
_PLACE = re.compile(r"\{([a-z_]+)\}")
#: A word of a command that marks where the words that ``--map`` adds go; without it they come last.
FLAGS = "{flags}"
#: Options that make Python ignore ``PYTHONPATH`` or ``sitecustomize``, and options that take a value.
_DEAF, _WITH_VALUE = frozenset("EIS"), frozenset("WX")


def places(command: Sequence[str]) -> set[str]:
    """Return the knobs that have a placeholder in a command, such as ``{batch_size}``."""
    return {name for part in command for name in _PLACE.findall(part) if name in KNOBS}


def filled(command: Sequence[str], config: Config) -> list[str]:
    """Return a command with each knob's placeholder replaced by its value, or by PyTorch's default if it is inactive.

    Braces around anything else are left as they are.

    Raises:
        UsageError: the configuration lacks the knob, and PyTorch has no default for it.
    """

    def value(match: re.Match[str]) -> str:
        knob = KNOBS.get(match[1])
        if knob is None:
            return match[0]
        setting = canonical(config).get(knob.name, knob.default)
        if setting is None:
            raise UsageError(
                f"nothing is known to put in the place of {match[0]}",
                advice="write the value into the command.",
            )
        return spell(setting)

    return [_PLACE.sub(value, part) for part in command]


@dataclass(frozen=True)
class Flag:
    """Words by which a script's own options set a knob: one ``--map``. If `value` is ``None``, they have a placeholder
    for any value."""

    knob: str
    value: Value | None
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The part of ``--map`` before the words."""
        return self.knob if self.value is None else f"{self.knob}:{spell(self.value)}"


def flags_of(written: Mapping[str, str]) -> list[Flag]:
    """Parse ``--map`` options, given as words by ``KNOB:VALUE`` or ``KNOB``.

    Raises:
        UsageError: a knob or a value is unknown or repeated, or words are missing or lack a placeholder for the value.
    """
    flags: list[Flag] = []
    for name, text in written.items():
        knob, colon, value = name.partition(":")
        if knob not in KNOBS:
            raise UnknownNameError("knob", knob, KNOBS)
        setting = parse_value(knob, value) if colon else None
        try:
            words = tuple(shlex.split(text))
        except ValueError:
            raise UsageError(f"--map {name}: a quote is not closed in {text[:60]!r}", advice="close it.") from None
        if not words:
            raise UsageError(
                f"--map {name} has no words", advice=f"write the script's own options: --map {name}='--option'."
            )
        flags.append(Flag(knob, setting, words))
        _check(flags)
    return flags


def _check(flags: Sequence[Flag]) -> None:
    """Raise `UsageError` if the last flag is invalid by itself or together with the others."""
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
    """Check the words that would be added to a command, before it is run.

    Raises:
        UsageError: see `flags_of`; or a knob has a placeholder in the command, too, or ``{flags}`` is there twice.
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
    """Return the knobs that a command sets itself, by placeholders or by its own flags."""
    return places(command.words) | {flag.knob for flag in flags_of(command.flags)}


def samples_in_step(command: CommandRef, config: Config) -> int:
    """Return the samples in one step of a command's training, as far as known; 1 if unknown."""
    if command.samples_per_step is not None:
        return command.samples_per_step
    return int(config.get("batch_size", 1)) if "batch_size" in set_by(command) else 1


def told_values(command: CommandRef) -> dict[str, tuple[Value, ...]]:
    """Return the values that ``--map`` names, by knob: such a knob can be set to no others."""
    values: dict[str, tuple[Value, ...]] = {}
    for flag in flags_of(command.flags):
        if flag.value is not None:
            values[flag.knob] = (*values.get(flag.knob, ()), flag.value)
    return values


def words_of(command: CommandRef, config: Config, output: Path | None = None) -> list[str]:
    """Return the words of a command under a configuration, with placeholders filled and flags added.

    No words are added for values that the script already has (`CommandRef.own`), unless ``--map`` names them.

    Args:
        output: the folder that it is to write to, passed by `CommandRef.output_flag`.

    Raises:
        UsageError: see `filled`.
    """
    words = filled(command.words, config)
    if not command.flags and output is None:
        return [word for word in words if word != FLAGS]
    added = list(_added(command, canonical(config)))
    if output is not None:
        *before, flag = (command.output_flag or "").split()
        added += [*before, f"{flag}{output}"] if flag.endswith("=") else [*before, flag, str(output)]
    position = words.index(FLAGS) if FLAGS in words else len(words)
    return [*words[:position], *added, *words[position + 1 :]]


def _added(command: CommandRef, config: Config) -> Iterator[str]:
    for flag in flags_of(command.flags):
        value = config.get(flag.knob)
        # A configuration does not contain values that have no effect in it.
        if value is not None and (value != command.own.get(flag.knob) if flag.value is None else value == flag.value):
            yield from filled(flag.words, config)


def agent_plan(
    config: Config, title: str, *, in_command: set[str], own: Config | None = None, compared: bool = False
) -> dict[str, Any]:
    """Return the agent's plan: each knob of a configuration with the door at which it is set, or why it is not set.

    Args:
        title: beginning of the agent's one line. own: the script's own values, which that line does not mention;
            PyTorch's defaults are used where they are unknown.
        in_command: those of `set_by`, here as in the functions below.
        compared: what loaders deliver under the configuration has been compared with what the script's own deliver.
    """
    usual = {name: knob.default for name, knob in KNOBS.items()} | dict(own or {})
    settings = [
        {**_setting(n, v, n in in_command), "plain": n in usual and v == usual[n]} for n, v in canonical(config).items()
    ]
    return {"title": title, "settings": settings, "compared": compared}


def probe_plan(*, in_command: set[str]) -> dict[str, Any]:
    """Return a plan by which the agent sets nothing, but reports which values of all knobs could be set.

    For numbers, only the minimum and the maximum are tried: whether one can be set depends only on whether it is 0.
    """
    settings = [
        {**_setting(name, value, name in in_command), "ask": True}
        for name, knob in KNOBS.items()
        for value in knob.values or (knob.minimum, knob.maximum)
    ]
    return {"title": "", "settings": settings}


def door_arguments(config: Config, *, in_command: set[str]) -> dict[str, dict[str, Any]]:
    """Return the arguments for each door when a running script is switched to a configuration."""
    arguments: dict[str, dict[str, Any]] = {}
    for name, value in canonical(config).items():
        at = None if name in in_command or name not in KNOBS else KNOBS[name].script_door(value)
        if at is not None:
            arguments.setdefault(at[0], {}).update(at[1])
    return arguments


def _setting(name: str, value: Value, in_command: bool) -> dict[str, Any]:
    knob = KNOBS.get(name)
    if knob is None:
        return {"knob": name, "words": f"{name}={spell(value)}", "refused": "it is a knob of a workload file"}
    setting: dict[str, Any] = {"knob": name, "value": value, "words": knob.phrase(value)}
    if in_command:
        return {**setting, "done": 1}
    at = knob.script_door(value)
    if at is None:
        return {**setting, "refused": knob.not_outside or "it cannot be set from outside"}
    door, arguments = at
    return {**setting, "door": door, "arguments": arguments}


def agent_environment(
    env: Mapping[str, str], told: Mapping[str, Any], config: Config, *, in_command: Set[str] = frozenset()
) -> dict[str, str]:
    """Return an environment in which the agent enters every Python process, with the variables that a configuration
    needs.

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
    environ = {**env, **environment(outside), PLAN: json.dumps(told, separators=(",", ":"))}
    outer = env.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), outer] if outer else [str(FOLDER)])
    return environ


def deaf(command: Sequence[str]) -> str | None:
    """Return the option of a command that makes Python ignore the agent; ``None`` if there is none."""
    return _options(command)[0]


def python_file(command: Sequence[str]) -> str | None:
    """Return the file that a command's Python runs; ``None`` if the command is not Python, or Python runs no file."""
    return _options(command)[1]


def refuse_deaf(command: Sequence[str]) -> None:
    """Raise `UsageError` if the Python of a command would ignore the agent."""
    ignores = deaf(command)
    if ignores is not None:
        raise UsageError(
            f"with {ignores}, Python ignores PYTHONPATH, by which autotune enters the script",
            advice=f"leave {ignores} out.",
        )


def _options(command: Sequence[str]) -> tuple[str | None, str | None]:
    """Parse the options of Python in a command; return the one that makes it ignore the agent and the file that is run,
    each ``None`` if there is none."""
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
