"""What is to be set, and the outcome."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Setting:
    """One knob of a plan.

    Attributes:
        knob: its name in the contract. words: its value for people, such as ``4 workers``.
        value: the value as in the contract.
        door: where it is set: ``process``, ``loader``, ``optimizer`` or ``model``.
        arguments: what is set there; each door's class documents what it accepts.
        plain: whether it is the script's own, and not worth a mention if it is in force.
        refused: why it cannot be set at all, as a clause; ``None`` if there is no such reason.
        ask: nothing is to be set, only whether it could be is to be found out; then `done` counts the objects for which
            it could.
        done: the number of objects, such as models, for which it is in force.
        refusals: the reasons why it is not in force for others, each with the number of objects.
    """

    knob: str
    words: str
    value: Any = None
    door: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    refused: str | None = None
    ask: bool = False
    done: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def try_to(self, act: Callable[[], str | None]) -> None:
        """Set it for one object.

        Args:
            act: sets it, or returns why it cannot be set, as a clause. If it raises, the training goes on.
        """
        try:
            reason = act()
        except Exception as error:
            if is_of_a_worker(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            self.done += 1
        else:
            self.refusals[reason] += 1

    @property
    def why_not(self) -> str | None:
        """Why it is in force for no object, as a clause; ``None`` if it is for some."""
        if self.done:
            return None
        most = self.refusals.most_common(1)
        return self.refused or (most[0][0] if most else f"no {self.door} was seen")


def safely(act: Callable[..., Any], *told: Any) -> Any:
    """Call one of our functions and return its result; if it fails, return ``None``, and the training goes on."""
    try:
        return act(*told)
    except Exception as error:
        if is_of_a_worker(error):
            raise
        say(f"the training goes on without: {type(error).__name__}: {error}")
        return None


def is_of_a_worker(error: Exception) -> bool:
    """Return whether a loader's worker has died: PyTorch raises that from a signal handler, wherever the script is at
    that moment, and the error is the script's."""
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error)


def say(words: str) -> None:
    """Print a line on stderr, if there is a stderr."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            sys.stderr.write(f"autotune: {words}\n")
            sys.stderr.flush()


def sentence(title: str, settings: list[Setting]) -> str:
    """Return a sentence on what is in force, and what is not and why."""
    done = [_in_force(s) for s in settings if s.done and not s.plain]
    parts = [f"{title}: {', '.join(done) or 'nothing to set'}"]
    why: dict[str, list[str]] = {}
    for setting in settings:
        if setting.done:
            continue
        reason = setting.why_not
        if reason is not None and (setting.refused or setting.refusals or not setting.plain):
            what = f"{setting.knob} is the script's own" if setting.plain else f"not {setting.words}"
            why.setdefault(reason, []).append(what)
    parts += [f"{', '.join(what)} ({reason})" for reason, what in why.items()]
    return "; ".join(parts)


def _in_force(setting: Setting) -> str:
    others = sum(setting.refusals.values())
    if not others:
        return setting.words
    return f"{setting.words} ({setting.done} of {setting.done + others} {setting.door}s)"
