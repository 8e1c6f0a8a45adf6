"""A workload given as Python objects, written as a file that other processes can import.

Trials run in processes of their own, and the parent never runs the workload. Functions and classes of a script or a
notebook are therefore written to a file as source, with the imports, constants and other definitions that they use.
What an importable module defines is imported from there. Live objects that they use (an open file, a tensor in a
global variable) are refused; a model and a data set that are live themselves are copied (`autotune.search.tuning.carried`).
"""

from __future__ import annotations

import ast
import builtins
import cmath
import dataclasses
import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import workload_source
from autotune.search.tuning.source import Definition, attribute_chains, definition_of
from autotune.workload.contract import CONSTANTS, OPTIONAL, REQUIRED, takes_context

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
HEAD = '''\
"""Written by autotune.tune. The processes of a search import it, and so does resuming the study: leave it here."""
'''
_MAKE_IT_THERE = "make it inside the function that uses it, or in a module that both import."
_OBJECT = "_workload"


def model_argument(workload: object, studies: Path) -> str:
    """Return the ``--model`` of a workload given as an object, and write its file if it has none.

    Args:
        workload: a module, an instance or class, or a mapping or namespace, with the four functions.
        studies: the folder of studies; the file is put into a hidden folder there.

    Raises:
        UsageError: the object is no workload, or other processes cannot be given what it uses.
        MachineError: the file cannot be written.
    """
    missing = [name for name in REQUIRED if not callable(_part(workload, name))]
    if missing:
        raise UsageError(
            f"{_shown(workload)} is no workload: it has no {', '.join(missing)}",
            advice="a workload has the functions " + ", ".join(f"{name}(ctx…)" for name in REQUIRED) + ".",
        )
    file = getattr(workload, "__file__", None) if isinstance(workload, ModuleType) else None
    if isinstance(workload, ModuleType) and file and workload.__name__ == Path(file).stem:
        return str(Path(file).absolute())
    text = _Writer().text(workload)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = workload_source(studies.absolute(), digest, _stem(workload))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return str(path)


def _part(workload: object, name: str) -> Any:
    return workload.get(name) if isinstance(workload, Mapping) else getattr(workload, name, None)


def _is_namespace(workload: object) -> bool:
    """Whether the parts of a workload have nothing to do with each other, unlike the methods of an object."""
    return isinstance(workload, Mapping | SimpleNamespace | ModuleType)


def _stem(workload: object) -> str:
    """Return a name for the workload that is no module's name: the study is called after it."""
    if isinstance(workload, ModuleType) and workload.__name__ != "__main__":
        name = workload.__name__.rpartition(".")[2]
    elif not _is_namespace(workload):
        name = (workload if isinstance(workload, type) else type(workload)).__name__
    else:
        script = getattr(sys.modules["__main__"], "__file__", None)
        name = PurePath(script).stem if script and "get_ipython" not in vars(builtins) else "notebook"
    return stem_for(name)


def stem_for(name: str) -> str:
    """Return the name of a workload's file, which is no module's."""
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', name)}_workload"


class _Writer:
    """Collects what one workload needs, in the order of a file."""

    def __init__(self) -> None:
        self._imports: dict[str, None] = {}
        #: Source by name, with the names that it needs at once: constants, and functions and classes.
        self._constants: dict[str, tuple[str, frozenset[str]]] = {}
        self._definitions: dict[str, tuple[str, frozenset[str]]] = {}
        self._known: dict[str, Any] = {}
        self._future = False

    def text(self, workload: object) -> str:
        """Return the file's text."""
        last = self._namespace(workload) if _is_namespace(workload) else self._object(workload)
        parts = [HEAD]
        if self._future:
            parts.append("from __future__ import annotations\n")
        folders = users_folders()
        if folders:
            parts.append(f"import sys\n\nsys.path[:0] = {folders!r}\n")
        parts.append("".join(f"{line}\n" for line in sorted(self._imports)))
        parts += self._in_order()
        parts.append("\n" + "".join(f"{line}\n" for line in last))
        return "\n".join(part for part in parts if part)

    def _namespace(self, workload: object) -> list[str]:
        lines = []
        for name in (*REQUIRED, *OPTIONAL, *CONSTANTS):
            value = _part(workload, name)
            if value is None or (name in OPTIONAL and not callable(value)):
                continue
            if isinstance(value, FunctionType | type) and value.__name__ != "<lambda>":
                own = value.__name__
                self._add(own, value, name)
                if name in REQUIRED and not takes_context(value, REQUIRED[name]):
                    self._imports["from autotune.workload.contract import without_context as _bare"] = None
                    lines.append(f"{name} = _bare({own})")
                elif own != name:
                    lines.append(f"{name} = {own}")
            elif isinstance(value, MethodType):
                raise UsageError(f"{name} is a method of an object", advice="give the object itself to autotune.tune.")
            else:
                self._add(name, value, "the workload")
        self._refuse_taken(lines)
        return lines

    def _object(self, workload: object) -> list[str]:
        kind = workload if isinstance(workload, type) else type(workload)
        self._add(kind.__name__, kind, kind.__name__)
        if kind is workload:
            lines = [f"{_OBJECT} = {kind.__name__}()"]
        else:
            own = self._expression(dict(vars(workload)), f"an instance of {kind.__name__}")
            lines = [f"{_OBJECT} = object.__new__({kind.__name__})", f"vars({_OBJECT}).update({own})"]
        names = [n for n in (*REQUIRED, *OPTIONAL, *CONSTANTS) if _part(workload, n) is not None]
        lines += [f"{name} = {_OBJECT}.{name}" for name in names]
        self._refuse_taken(lines)
        return lines

    def _refuse_taken(self, lines: list[str]) -> None:
        """Raise `UsageError` if a part of the workload would replace something else of the same name."""
        for name, _, value in (line.partition(" = ") for line in lines):
            if name in self._known and value != f"_bare({name})":
                raise UsageError(
                    f"the workload uses another thing called {name!r} than its own {name}", advice="rename that one."
                )

    def _add(self, name: str, value: Any, user: str) -> None:
        """Provide for a global name. ``user``: what uses it, for error messages."""
        if name in self._known:
            if self._known[name] is not value:
                raise UsageError(f"two things are called {name!r} here", advice="rename one of them.")
            return
        self._known[name] = value
        if isinstance(value, ModuleType) and _is_importable(value.__name__):
            plain = value.__name__ == name
            self._imports[f"import {name}" if plain else f"import {value.__name__} as {name}"] = None
        elif self._imported(name, value):
            pass
        elif isinstance(value, FunctionType | type):
            found = definition_of(value, name)
            self._future |= found.future
            self._definitions[name] = ("\n" + found.text, found.early)
            self._add_names(found, name)
        else:
            text = self._expression(value, user, name)
            self._constants[name] = (f"{name} = {text}", _names_in(text))

    def _add_names(self, found: Definition, user: str) -> None:
        for name in sorted(found.names):
            if name == "__file__":
                raise UsageError(f"{user} uses __file__, which is another file in other processes")
            if name in found.globals and not (name.startswith("__") and name.endswith("__")):
                self._add(name, found.globals[name], user)
        for chain in attribute_chains(found.text):
            module = found.globals.get(chain.partition(".")[0])
            inner = f"{getattr(module, '__name__', '')}.{chain.partition('.')[2]}"
            while isinstance(module, ModuleType) and inner != module.__name__:
                # What another import has loaded is not there after `import package` alone.
                if inner in sys.modules:
                    self._imports[f"import {inner}"] = None
                inner = inner.rpartition(".")[0]

    def _imported(self, name: str, value: Any) -> bool:
        """Import a value from the module that defines it, if there is one."""
        if isinstance(value, _PLAIN):
            return False
        home, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None) or name
        found = _home(value, home if isinstance(home, str) else None, path, name)
        if found is None:
            return False
        module, inside = found
        outer, dot, _ = inside.partition(".")
        if dot:
            self._imports[f"from {module} import {outer} as _{outer}"] = None
            self._constants[name] = (f"{name} = _{inside}", frozenset())
        else:
            self._imports[f"from {module} import {inside}" + ("" if inside == name else f" as {name}")] = None
        return True

    def _expression(self, value: Any, user: str, name: str = "") -> str:
        """Return source that makes an equal value.

        Raises:
            UsageError: there is none, because the value is a live object.
        """
        if type(value) in _PLAIN and not (isinstance(value, float | complex) and not cmath.isfinite(value)):
            return repr(value)
        if type(value) in (list, tuple, set, frozenset):
            inner = ", ".join(self._expression(v, user, name) for v in value)
            return f"{type(value).__name__}([{inner}])"
        if type(value) is dict:
            each = (
                (self._expression(k, user, name), self._expression(v, user, k if isinstance(k, str) else name))
                for k, v in value.items()
            )
            return "{" + ", ".join(f"{k}: {v}" for k, v in each) + "}"
        if isinstance(value, PurePath):
            self._imports["from pathlib import Path as _Path"] = None
            return f"_Path({str(value)!r})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind = type(value)
            self._add(kind.__name__, kind, user)
            fields = [f.name for f in dataclasses.fields(value) if f.init]
            inner = ", ".join(f"{n}={self._expression(getattr(value, n), user, n)}" for n in fields)
            return f"{kind.__name__}({inner})"
        what = f"{name!r}, " if name else ""
        raise UsageError(
            f"{user} uses {what}{_shown(value)}, which other processes cannot be given", advice=_MAKE_IT_THERE
        )

    def _in_order(self) -> list[str]:
        """Return the source of everything, in an order in which each part finds what it needs at once."""
        parts = {**self._constants, **self._definitions}
        done: dict[str, str] = {}

        def visit(name: str) -> None:
            text, early = parts[name]
            for needed in sorted((early & parts.keys()) - {name} - done.keys()):
                visit(needed)
            done[name] = text

        for name in parts:
            if name not in done:
                visit(name)
        return list(done.values())


def _names_in(expression: str) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name))


def _home(value: Any, module: str | None, path: str, name: str) -> tuple[str, str] | None:
    """Return the module from which other processes can import a value, and the value's name there."""
    if isinstance(value, FunctionType | type) and (module is None or not _is_importable(module)):
        return None
    if module is not None and _is_importable(module) and _at(module, path) is value:
        return module, path
    known = sorted((n for n in list(sys.modules) if _is_importable(n)), key=lambda n: (n.count("."), n))
    return next(((n, name) for n in known if vars(sys.modules[n]).get(name) is value), None)


def _at(module: str, path: str) -> Any:
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _is_importable(module: str) -> bool:
    found = sys.modules.get(module)
    return module != "__main__" and isinstance(found, ModuleType) and found.__spec__ is not None


def users_folders() -> list[str]:
    """Return the folders of the import path that not every process of this interpreter has."""
    return [f for f in dict.fromkeys(str(Path(p or ".").absolute()) for p in sys.path) if _is_users(f)]


def _is_users(folder: str) -> bool:
    path = Path(folder)
    installed = path.name in ("site-packages", "dist-packages")
    return path.is_dir() and not installed and not path.is_relative_to(sys.base_prefix)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"
