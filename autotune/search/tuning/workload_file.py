"""A workload written as a file."""

from __future__ import annotations

import ast
import builtins
import cmath
import dataclasses
import hashlib
import inspect
import io
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import workload_source
from autotune.workload.contract import CONSTANTS, OPTIONAL, PARTS, REQUIRED, takes_context

#: Scopes that run when the scope around them does, unlike functions.
_AT_ONCE = {"listcomp", "setcomp", "dictcomp", "genexpr"}


def _function_source(function: FunctionType, called: str) -> str:
    if function.__name__ == "<lambda>":
        raise UsageError(f"{called} is a lambda, whose source cannot be told apart", advice="write it with def.")
    try:
        text = textwrap.dedent(inspect.getsource(function))
        codes = list(_codes(compile(text, "<workload>", "exec", dont_inherit=True)))
    except (OSError, TypeError, SyntaxError) as error:
        raise _no_source(called) from error
    if not any(_outline(code) == _outline(function.__code__) for code in codes):
        raise UsageError(f"the source of {called} has changed since it was defined", advice="define it again.")
    return text


def _class_source(value: type, functions: list[FunctionType], called: str) -> str:
    # A notebook's classes have no file that inspect could find, but their methods know the cell.
    for function in functions:
        text, line = "".join(linecache.getlines(function.__code__.co_filename)), function.__code__.co_firstlineno
        found = next((part for first, last, part in _classes(text, value.__name__) if first <= line <= last), None)
        if found is not None:
            return textwrap.dedent(f"{found}\n")
    # A class without methods of its own, such as a dataclass, is in the last cell that defined it. IPython keeps the
    # cells that have run in a list called `In`.
    cells = getattr(sys.modules[value.__module__], "In", []) if value.__module__ == "__main__" else []
    for cell in reversed(cells if isinstance(cells, list) else []):
        # One inside of another class or a function is not it.
        if part := next((part for *_, part in _classes(cell, value.__name__) if not part[0].isspace()), None):
            return part
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError) as error:
        raise _no_source(called) from error


def _classes(source: str, name: str) -> Iterator[tuple[int, int, str]]:
    """Yield the first and last line and the text of each class with this name; nothing if this is no source."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, TypeError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == name:
            first, last = min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or node.lineno
            yield first, last, "\n".join(source.split("\n")[first - 1 : last])


def _no_source(called: str) -> UsageError:
    return UsageError(
        f"the source of {called} cannot be found, so other processes cannot have it",
        advice="define it in a notebook's cell or in a file.",
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _outline(code: CodeType) -> tuple[Any, ...]:
    """Return what stays equal if a function is compiled alone. Its bytecode depends on the imports around it."""
    plain = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType | frozenset)]
    return code.co_name, code.co_names, code.co_varnames, plain


def _names(text: str) -> tuple[set[str], set[str]]:
    """Return the global names that a definition uses, and those that it needs when it is defined."""
    used: set[str] = set()
    early: set[str] = set()

    def walk(table: symtable.SymbolTable, at_once: bool) -> None:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                used.add(symbol.get_name())
                if at_once:
                    early.add(symbol.get_name())
        for inner in table.get_children():
            walk(inner, at_once and (inner.get_type() != "function" or inner.get_name() in _AT_ONCE))

    walk(symtable.symtable(text, "<workload>", "exec"), at_once=True)
    return used, early


# A workload given as Python objects, written as a file that other processes can import.
#
# Trials run in processes of their own, and the parent never runs the workload. Functions and classes of a script or a
# notebook are therefore written to a file as source, with the imports, constants and other definitions that they use.
# What an importable module defines is imported from there. Live objects that they use (an open file, a tensor in a
# global variable) are refused; a model and a data set that are live themselves are copied (`carried_argument`).


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
HEAD = '''\
"""Written by autotune.tune. The processes of a search import it, and so does resuming the study: leave it here."""
'''
_MAKE_IT_INSIDE = "make it inside the function that uses it, or in a module that both import."
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
    return _written(_Writer().text(workload), _name_of(workload), studies)


def _written(text: str, name: str, studies: Path, pickles: Mapping[str, bytes] = MappingProxyType({})) -> str:
    """Write a workload's file, with the files beside it, and return its path. The study is called after it, so its name
    is no module's."""
    stem = f"{re.sub(r'[^A-Za-z0-9_]', '_', name)}_workload"
    path = workload_source(studies.absolute(), hashlib.sha256(text.encode()).hexdigest(), stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    for part, content in pickles.items():
        write_atomic(path.parent / f"{part}.pickle", content)
    write_atomic(path, text)
    return str(path)


def _part(workload: object, name: str) -> Any:
    return workload.get(name) if isinstance(workload, Mapping) else getattr(workload, name, None)


def _is_namespace(workload: object) -> bool:
    """Whether the parts of a workload have nothing to do with each other, unlike the methods of an object."""
    return isinstance(workload, Mapping | SimpleNamespace | ModuleType)


def _name_of(workload: object) -> str:
    if isinstance(workload, ModuleType) and workload.__name__ != "__main__":
        return workload.__name__.rpartition(".")[2]
    if not _is_namespace(workload):
        return (workload if isinstance(workload, type) else type(workload)).__name__
    script = getattr(sys.modules["__main__"], "__file__", None)
    return PurePath(script).stem if script and "get_ipython" not in vars(builtins) else "notebook"


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
        parts = {}
        for name in (*REQUIRED, *OPTIONAL, *CONSTANTS):
            value, own, user = _part(workload, name), name, "the workload"
            if value is None or (name in OPTIONAL and not callable(value)):
                continue
            if isinstance(value, FunctionType | type) and value.__name__ != "<lambda>":
                own, user = value.__name__, name
            elif isinstance(value, MethodType):
                raise UsageError(f"{name} is a method of an object", advice="give the object itself to autotune.tune.")
            self._add(own, value, user)
            parts[name] = own
            if name in REQUIRED and not takes_context(value, REQUIRED[name]):
                self._imports["from autotune.workload.contract import without_context as _bare"] = None
                parts[name] = f"_bare({own})"
        return self._named(parts)

    def _object(self, workload: object) -> list[str]:
        kind = workload if isinstance(workload, type) else type(workload)
        self._add(kind.__name__, kind, kind.__name__)
        if kind is workload:
            lines = [f"{_OBJECT} = {kind.__name__}()"]
        else:
            own = self._expression(dict(vars(workload)), f"an instance of {kind.__name__}")
            lines = [f"{_OBJECT} = object.__new__({kind.__name__})", f"vars({_OBJECT}).update({own})"]
        names = [n for n in (*REQUIRED, *OPTIONAL, *CONSTANTS) if _part(workload, n) is not None]
        return lines + self._named({name: f"{_OBJECT}.{name}" for name in names})

    def _named(self, parts: Mapping[str, str]) -> list[str]:
        """Return lines that make something the parts of the workload, as names of the file. If what the workload uses
        has one of these names, they stand in a dictionary instead."""
        names = (*REQUIRED, *OPTIONAL, *CONSTANTS)
        if all(parts.get(name) in (name, f"_bare({name})") for name in names if name in self._known):
            return [f"{name} = {value}" for name, value in parts.items() if value != name]
        return [f"{PARTS} = {{", *(f"    {name!r}: {value}," for name, value in parts.items()), "}"]

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
            self._define(name, value)
        else:
            text = self._expression(value, user, name)
            names = (node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
            self._constants[name] = (f"{name} = {text}", frozenset(names))

    def _define(self, name: str, value: FunctionType | type) -> None:
        """Provide for a function or class with its source, and for the global names that it uses.

        Raises:
            UsageError: it is a lambda, uses variables of a function around it, or its source cannot be found.
        """
        members = [value] if isinstance(value, FunctionType) else vars(value).values()
        functions = [f for m in members if callable(m) and isinstance(f := inspect.unwrap(m), FunctionType)]
        for function in functions:
            outer = [free for free in function.__code__.co_freevars if free != "__class__"]
            if outer:
                raise UsageError(
                    f"{name} uses {', '.join(outer)} of the function around it, which other processes do not have",
                    advice="define it at the top level, and make what it needs inside it.",
                )
        if isinstance(value, FunctionType):
            text, namespace = _function_source(functions[0], name), functions[0].__globals__
        else:
            text, namespace = _class_source(value, functions, name), vars(sys.modules[value.__module__])
        self._future |= any(f.__code__.co_flags & annotations.compiler_flag for f in functions)
        names, early = _names(text)
        self._definitions[name] = ("\n" + text, frozenset(early))
        for used in sorted(names):
            if used == "__file__":
                raise UsageError(f"{name} uses __file__, which is another file in other processes")
            if used in namespace and not (used.startswith("__") and used.endswith("__")):
                self._add(used, namespace[used], name)
        # What is said with dots, as in `package.module.name`, and all beginnings of it with a dot.
        chains = (ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
        for chain in (chain for chain in chains if re.fullmatch(r"[\w.]+", chain)):
            module = namespace.get(chain.partition(".")[0])
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
            f"{user} uses {what}{_shown(value)}, which other processes cannot be given", advice=_MAKE_IT_INSIDE
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


def _home(value: Any, module: str | None, path: str, name: str) -> tuple[str, str] | None:
    """Return the module from which other processes can import a value, and the value's name there."""
    is_there = module is not None and _is_importable(module)
    if isinstance(value, FunctionType | type) and not is_there:
        return None
    if module is not None and is_there:
        found: Any = sys.modules[module]
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is value:
            return module, path
    known = sorted((n for n in list(sys.modules) if _is_importable(n)), key=lambda n: (n.count("."), n))
    return next(((n, name) for n in known if vars(sys.modules[n]).get(name) is value), None)


def _is_importable(module: str) -> bool:
    found = sys.modules.get(module)
    return module != "__main__" and isinstance(found, ModuleType) and found.__spec__ is not None


def users_folders() -> list[str]:
    """Return the folders of the import path that not every process of this interpreter has."""
    folders = [Path(p or ".").absolute() for p in dict.fromkeys(sys.path)]
    users = [f for f in folders if f.is_dir() and f.name not in ("site-packages", "dist-packages")]
    return list(dict.fromkeys(str(f) for f in users if not f.is_relative_to(sys.base_prefix)))


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


# A workload given as objects of a script or notebook: a model and a data set, and functions of any kind.
#
# They are pickled by value (cloudpickle), classes of a notebook's cells included, and trials train copies of them. What
# cannot be copied so is refused with the attribute that holds it.

#: How deep in a part the attribute is looked for that cannot be copied.
_DEEPEST = 6
_GIVE_A_FUNCTION = "make it where it is used, or give a function that makes the whole: dataset() or model()."


def is_live(name: str, part: object) -> bool:
    """Return whether a part of a workload is what its function would return, and not the function."""
    if isinstance(part, type | FunctionType | str | bytes):
        return False
    return _is_module(part) or (
        name == "dataset" and any(hasattr(part, method) for method in ("__getitem__", "__iter__"))
    )


def carried_argument(parts: Mapping[str, Any], studies: Path) -> str:
    """Pickle the four parts of a workload beside a file that loads them; return the file, as ``--model`` takes it.

    Args:
        parts: by the names of the four functions. Those of which `is_live` says so are returned by the functions.
        studies: the folder of studies; the files are put into a hidden folder there.

    Raises:
        UsageError: a part cannot be copied into other processes.
        MachineError: the files cannot be written.
    """
    objects = tuple(name for name in REQUIRED if is_live(name, parts[name]))
    for name, part in parts.items():
        _check(name, part, live=name in objects)
    contents = {name: _pickled(name, parts[name], parts["model"]) for name in REQUIRED}
    # The hashes make other objects another workload.
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    folders, model = users_folders(), parts["model"]
    lines = [
        HEAD,
        "from pathlib import Path",
        "",
        *(["import sys", "", f"sys.path[:0] = {folders!r}", ""] if folders else []),
        "from autotune.workload.carrying import Carried",
        "",
        f"_parts = Carried(Path(__file__).parent, {hashes!r}, {objects!r})",
        *(f"{name} = _parts.part({name!r})" for name in REQUIRED),
    ]
    named = model if isinstance(model, type | FunctionType) else type(model)
    return _written("\n".join(lines) + "\n", named.__name__, studies, contents)


def _check(name: str, part: object, *, live: bool) -> None:
    given = type(part).__name__
    if _is("utils.data.DataLoader", part):
        raise UsageError("dataset is a loader, and each trial makes its own", advice="give the data set in it.")
    if name in ("optimizer", "loss") and (live or not callable(part)):
        raise UsageError(
            f"{name} must be a function, not a {given}",
            advice="trials make their own: give optimizer(model), and loss(model, batch).",
        )
    if not live and not callable(part):
        raise UsageError(f"{name} must be given itself, or as a function that makes it, not as a {given}")


def _pickled(name: str, part: object, model: object) -> bytes:
    of_function = None if name in ("model", "dataset") else model
    try:
        return _dumps(part, of_function)
    except Exception as error:
        path, why = _culprit(name, part, error, of_function)
        if isinstance(why, _Refused):
            raise UsageError(f"{path} {why}", advice=why.advice) from None
        raise UsageError(f"{path} cannot be copied into other processes: {why}", advice=_GIVE_A_FUNCTION) from None


class _Refused(UsageError):
    """What could be pickled, but would not be the same training."""


def _dumps(value: object, model: object | None) -> bytes:
    """Pickle by value.

    Args:
        model: of a workload whose function is pickled, which must have it from its argument.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, found: Any) -> Any:
            if _is("Tensor", found) and found.device.type != "cpu":
                advice = "move it to the CPU: trials need the memory of the card, and move their own copies there."
                raise _Refused(f"is on the device {found.device}", advice=advice)
            if isinstance(found, io.IOBase) and not isinstance(found, io.StringIO | io.BytesIO):
                raise _Refused("is an open file, which other processes do not have", advice=_GIVE_A_FUNCTION)
            if model is not None and _is_module(found):
                if found is model:
                    advice = "let the function use its argument."
                    raise _Refused("is the model itself, of which trials train copies", advice=advice)
                if any(True for _ in found.parameters()):
                    advice = "make it a part of the model, which is the argument."
                    raise _Refused("has parameters, of which each function would have a copy", advice=advice)
            return super().reducer_override(found)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _culprit(path: str, value: object, error: Exception, model: object | None) -> tuple[str, Exception]:
    """Return the innermost attribute that cannot be pickled, as ``dataset.file``, and the error that it gives."""
    for _ in range(_DEEPEST):
        for step, inner in _inside(value):
            try:
                _dumps(inner, model)
            except Exception as deeper:
                path, value, error = f"{path}{step}", inner, deeper
                break
        else:
            break
    return path, error


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """Yield what an object holds, with how it is written behind the object."""
    if isinstance(value, FunctionType):
        names = value.__code__.co_names
        yield from ((f" uses {n!r}, which", value.__globals__[n]) for n in names if n in value.__globals__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f" uses {name!r}, which", cell.cell_contents
    elif _is_module(value):
        module: Any = value
        yield from ((f".{n}", v) for n, v in (*module.named_parameters(), *module.named_buffers()))
        yield from ((f".{n}", v) for n, v in vars(module).items() if n not in ("_parameters", "_buffers", "_modules"))
        yield from ((f".{n}", v) for n, v in module.named_children())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
    else:
        yield from ((f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items())


def _is_module(value: object) -> bool:
    return _is("nn.Module", value)


def _is(kind: str, value: object) -> bool:
    # Whoever has one has imported torch; nobody else needs it for this.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, attrgetter(kind)(torch))
