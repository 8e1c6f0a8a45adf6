"""The knobs: a catalog with one file for each, which holds all that is known of it.

A file is found by lying here; nothing else names it. To add a knob, write ``autotune/knobs/NAME.py`` with an instance
``KNOB`` of a subclass of `Knob`: spaces, samplers, checks, descriptions, profiles and ``docs/knobs.md`` read it from
there, and `autotune.training` applies it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from autotune.knobs.knob import Expected, Knob, Maths, Part, Refusal, Scope, SiteFacts, StepPlan, spell

__all__ = ["KNOBS", "Expected", "Knob", "Maths", "Part", "Refusal", "Scope", "SiteFacts", "StepPlan", "spell"]

#: Modules of this folder that are no knob: the contract, and the page made from the catalog.
_OTHERS = ("__main__", "knob", "page")


def _catalog() -> dict[str, Knob]:
    found = []
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _OTHERS:
            knob: Knob = import_module(f"{__name__}.{module.name}").KNOB
            assert knob.name == module.name, f"{module.name}.py holds a knob called {knob.name}"
            found.append(knob)
    return {knob.name: knob for knob in sorted(found, key=lambda k: (k.place, k.name))}


#: By name, in the order in which a configuration lists them.
KNOBS: dict[str, Knob] = _catalog()
