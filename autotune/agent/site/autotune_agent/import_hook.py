"""Acts when a module has been imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from autotune_agent.setting import say


class _Finder(MetaPathFinder):
    """Finds nothing itself: it makes the loader of one module call a function afterwards."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        #: The module is being looked for by other finders, or has been imported. This one stays in `sys.meta_path`:
        #: another thread may be iterating over it, and would skip a finder if one was removed.
        self._rests = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._rests:
            return None
        self._rests = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            # Active again until the module has been imported: a first attempt may fail.
            self._rests = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            if self._rests:
                return
            self._rests = True
            try:
                self._then()
            except Exception as error:
                # The import itself has succeeded, and the script runs.
                say(f"nothing is set: {type(error).__name__}: {error}")

        try:
            # Patch the loader that was found instead of wrapping it, as tools check what kind of loader a module has.
            spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        except (AttributeError, TypeError):
            say(f"nothing is set: {fullname} is loaded by {type(spec.loader).__name__}")
        return spec


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call a function as soon as a top-level module has been imported; at once if a ``.pth`` file has done so."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))
