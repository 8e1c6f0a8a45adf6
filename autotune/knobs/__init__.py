"""The catalog of knobs: one file per knob, which holds everything known about it. To add one, add a file here.

Knobs are found by listing this folder; nothing else names them. To add a knob, write ``autotune/knobs/NAME.py`` with
``KNOB``, an instance of a subclass of `Knob`. Spaces, samplers, checks, descriptions, profiles and ``docs/knobs.md``
are derived from it, and `autotune.training.step` applies it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from autotune.base.records import Value
from autotune.knobs.knob import (
    Expected,
    Knob,
    Maths,
    OwnOption,
    Part,
    Refusal,
    Scope,
    SiteFacts,
    StepPlan,
    answer_to,
    spell,
)

__all__ = [
    "KNOBS",
    "Expected",
    "Knob",
    "Maths",
    "OwnOption",
    "Part",
    "Refusal",
    "Scope",
    "SiteFacts",
    "StepPlan",
    "answer_to",
    "refused_knob",
    "shares",
    "spell",
]

#: Modules of this folder that are not knobs: the contract, and the page generated from the catalog.
_OTHERS = ("__main__", "knob", "page")


def _catalog() -> dict[str, Knob]:
    found = []
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _OTHERS:
            knob: Knob = import_module(f"{__name__}.{module.name}").KNOB
            assert knob.name == module.name, f"{module.name}.py holds a knob called {knob.name}"
            found.append(knob)
    return {knob.name: knob for knob in sorted(found, key=lambda k: (k.place, k.name))}


#: Knobs by name, in the order of a configuration.
KNOBS: dict[str, Knob] = _catalog()


def refused_knob(config: Mapping[str, Value], message: str) -> str | None:
    """Return the knob whose value something in the training refuses with this message, whatever the other knobs are;
    ``None`` if the message tells of no such thing."""
    return next((n for n, value in config.items() if n in KNOBS and KNOBS[n].is_refused(value, message)), None)


def shares(name: str | None, one: Mapping[str, Value], other: Mapping[str, Value]) -> bool:
    """Return whether two configurations have the same value of a knob that something refuses, if anything does."""
    return name is not None and one[name] == other.get(name)
