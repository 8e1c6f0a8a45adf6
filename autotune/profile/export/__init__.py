"""The catalog of export formats: one file per format, which holds everything known about it.

Formats are found by listing this folder; nothing else names them. To add one, write ``autotune/profile/export/NAME.py``
with ``FORMAT``, an instance of a subclass of `Format`. ``autotune export``, its ``--list`` and ``docs/exports.md`` are
derived from it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from autotune.profile.export.format import Exported, Format, Given, Told, ToolFormat

__all__ = ["FORMATS", "Exported", "Format", "Given", "Told", "ToolFormat"]

#: Modules of this folder that are not formats.
_OTHERS = ("__main__", "format", "own")


def _catalog() -> dict[str, Format]:
    formats = []
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _OTHERS:
            instance: Format = import_module(f"{__name__}.{module.name}").FORMAT
            assert instance.name == module.name, f"{module.name}.py holds a format called {instance.name}"
            formats.append(instance)
    return {instance.name: instance for instance in sorted(formats, key=lambda f: (f.place, f.name))}


#: Formats by name, in the order of lists. The first is the default.
FORMATS: dict[str, Format] = _catalog()
