"""Lets the agent into a command of the user's: the plan of what it sets there, and the environment that carries it.

See the package ``autotune_agent`` for what happens inside.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from autotune.errors import MachineError, UsageError
from autotune.knobs import KNOBS, Knob, spell
from autotune.records import Config, Value
from autotune.space import canonical, environment

#: The folder that comes first on ``PYTHONPATH``; `autotune_agent.arm` reads the variable.
FOLDER = Path(__file__).parent / "agent" / "site"
PLAN = "AUTOTUNE_AGENT"
#: A knob's name in a command, in place of its value.
_PLACE = re.compile(r"\{([a-z_]+)\}")
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


def plan(config: Config, title: str, *, in_command: set[str]) -> dict[str, Any]:
    """Return what the agent is told: each knob of a configuration with the door at which it is set, or why it is not.

    Args:
        title: what its one line begins with.
        in_command: knobs that the command itself sets.
    """
    return {"title": title, "settings": [_setting(n, v, n in in_command) for n, v in canonical(config).items()]}


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
        "plain": value == knob.default,
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


def entered(env: Mapping[str, str], told: Mapping[str, Any], config: Config) -> dict[str, str]:
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
    found = {**env, **environment(config), PLAN: json.dumps(told, separators=(",", ":"))}
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
