"""Writes a workload given as Python objects to a file that other processes can import.

Trials run in processes of their own, and the parent never runs the workload. Functions, classes and objects of a script
or notebook are pickled by value (cloudpickle) beside a file that loads them; whatever an importable module defines is
imported from there. Trials train copies of objects. What cannot be copied is refused, with an error that names the
attribute that holds it. The file's folder depends on the `identity` of what the file loads, so that cells that are run
again give the same workload, and changed cells a different one.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import io
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path, PurePath
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import workload_source
from autotune.workload.carrying import FUNCTIONS, HASHES, WHOLE
from autotune.workload.contract import CONSTANTS, OPTIONAL, REQUIRED

#: How many levels deep to search a part for the attribute that cannot be copied.
_DEEPEST = 6
_GIVE_A_FUNCTION = "make it where it is used, or give a function that makes the whole: dataset() or model()."
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_PARTS = (*REQUIRED, *OPTIONAL, *CONSTANTS)
_HEAD = '''\
"""Written by autotune.tune. The processes of a search import it, and so does resuming the study: leave it here."""
'''


def model_argument(workload: object, studies: Path) -> str:
    """Return the ``--model`` of a workload given as an object, and write its file if it has none.

    Args:
        workload: a module, an instance or class, or a mapping or namespace, with the four functions; in a mapping,
            model and data set may be objects (`is_live`); trials train copies of these.
        studies: the folder of studies; the file is written to a hidden folder in it.

    Raises:
        UsageError: the object is not a workload, or a part of it cannot be copied into other processes.
        MachineError: the file cannot be written.
    """
    required = {name: _part(workload, name) for name in REQUIRED}
    if not isinstance(workload, Mapping):
        # What an object holds is copied with it, and is no function of a workload.
        functions = {name: callable(part) and not is_live(name, part) for name, part in required.items()}
        required = {name: part if functions[name] else None for name, part in required.items()}
    missing = [name for name, part in required.items() if part is None]
    if missing:
        raise UsageError(
            f"{_shown(workload)} is no workload: it has no {', '.join(missing)}",
            advice="a workload has the functions " + ", ".join(f"{name}(ctx…)" for name in REQUIRED) + ".",
        )
    file = getattr(workload, "__file__", None) if isinstance(workload, ModuleType) else None
    if isinstance(workload, ModuleType) and file and workload.__name__ == Path(file).stem:
        return str(Path(file).absolute())
    parts = {name: part for name in _PARTS if (part := _part(workload, name)) is not None}
    parts = {name: part for name, part in parts.items() if name not in OPTIONAL or callable(part)}
    literals = {name: text for name in CONSTANTS if name in parts and (text := _literal(parts[name])) is not None}
    if _is_namespace(workload):
        objects = tuple(name for name in REQUIRED if is_live(name, parts[name]))
        for name, part in parts.items():
            _check(name, part, live=name in objects)
        functions = {name: part for name, part in parts.items() if name not in objects and name not in literals}
        pickles = {FUNCTIONS: _pickled(functions, parts["model"])}
        pickles |= {name: _pickled({name: parts[name]}, None) for name in objects}
        lines = [f"{name} = _parts.part({name!r})" for name in parts if name not in literals]
        workload_id = identity(parts)
    else:
        objects, pickles, workload_id = (), {WHOLE: _pickled({WHOLE: workload}, None)}, identity(workload)
        lines = [f"_workload = _parts.whole({isinstance(workload, type)})"]
        lines += [f"{name} = _workload.{name}" for name in parts if name not in literals]
    lines += [f"{name} = {text}" for name, text in literals.items()]
    text = _text(workload_id, objects, lines)
    path = workload_source(studies.absolute(), hashlib.sha256(text.encode()).hexdigest(), _stem(workload))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, content in pickles.items():
            write_atomic(path.parent / f"{name}.pickle", content)
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in pickles.items()}
        write_atomic(path.parent / HASHES, json.dumps(hashes))
        write_atomic(path, text)
    return str(path)


def is_live(name: str, part: object) -> bool:
    """Return whether a part of a workload is the object that its function would return, not the function itself."""
    if isinstance(part, type | FunctionType | str | bytes):
        return False
    return _is_module(part) or (
        name == "dataset" and any(hasattr(part, method) for method in ("__getitem__", "__iter__"))
    )


def _part(workload: object, name: str) -> Any:
    return workload.get(name) if isinstance(workload, Mapping) else getattr(workload, name, None)


def _is_namespace(workload: object) -> bool:
    """Return whether the parts of a workload are independent of each other, unlike the methods of an object."""
    return isinstance(workload, Mapping | SimpleNamespace | ModuleType)


def _stem(workload: object) -> str:
    """Return the name of a workload's file, distinct from any module's; the study is named after it."""
    model = _part(workload, "model")
    if isinstance(workload, ModuleType) and workload.__name__ != "__main__":
        name = workload.__name__.rpartition(".")[2]
    elif not _is_namespace(workload):
        name = (workload if isinstance(workload, type) else type(workload)).__name__
    elif is_live("model", model):
        name = type(model).__name__
    else:
        script = getattr(sys.modules["__main__"], "__file__", None)
        name = PurePath(script).stem if script and "get_ipython" not in vars(builtins) else "notebook"
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', name)}_workload"


def _check(name: str, part: object, *, live: bool) -> None:
    kind = type(part).__name__
    if _is("utils.data.DataLoader", part):
        raise UsageError("dataset is a loader, and each trial makes its own", advice="give the data set in it.")
    if isinstance(part, MethodType) and not isinstance(part.__self__, type):
        raise UsageError(f"{name} is a method of an object", advice="give the object itself to autotune.tune.")
    if name in ("optimizer", "loss") and (live or not callable(part)):
        raise UsageError(
            f"{name} must be a function, not a {kind}",
            advice="trials make their own: give optimizer(model), and loss(model, batch).",
        )
    if name in REQUIRED and not live and not callable(part):
        raise UsageError(f"{name} must be given itself, or as a function that makes it, not as a {kind}")


def _literal(value: object) -> str | None:
    """Return a constant as a literal, which can be read without running the file; ``None`` if it has none."""
    text = repr(value)
    try:
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, TypeError):
        return None


def _text(known: str, objects: tuple[str, ...], lines: list[str]) -> str:
    folders = users_folders()
    return "\n".join(
        [
            _HEAD,
            *(["import sys", "", f"sys.path[:0] = {folders!r}", ""] if folders else []),
            "from autotune.workload.carrying import Carried",
            "",
            # The search identifies its workload by this: other code or values make it a different workload.
            f"IDENTITY = {known!r}",
            f"_parts = Carried.beside(__file__, {objects!r}, python={platform.python_version().rpartition('.')[0]!r})",
            *lines,
            "",
        ]
    )


def users_folders() -> list[str]:
    """Return the folders of the import path that only some processes of this interpreter have."""
    return [f for f in dict.fromkeys(str(Path(p or ".").absolute()) for p in sys.path) if _is_users(f)]


def _is_users(folder: str) -> bool:
    path = Path(folder)
    installed = path.name in ("site-packages", "dist-packages")
    return path.is_dir() and not installed and not path.is_relative_to(sys.base_prefix)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str | type(None)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


# What makes two things the same workload: their code, and the values that it uses.

#: Attributes of classes and functions that say where they are defined, or are created anew each time.
_PASSING = frozenset(
    (
        *("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__firstlineno__"),
        *("__static_attributes__", "_abc_impl"),
    )
)


def identity(value: object) -> str:
    """Return a hash of an object's code and values that is the same in every process of the same Python version.

    File names, line numbers, comments and unused globals do not affect it.
    """
    return _Hashes().of(value)


class _Hashes:
    """Hashes of objects that may refer to each other."""

    def __init__(self) -> None:
        #: By id. The objects are kept alive, so that no other object can get the same id.
        self._done: dict[int, tuple[str, object]] = {}
        self._open: list[int] = []

    def of(self, value: object) -> str:
        """Return an object's hash."""
        if id(value) in self._open:
            # It contains itself: hash how many levels up it is.
            return f"above {len(self._open) - self._open.index(id(value))}"
        if id(value) not in self._done:
            self._open.append(id(value))
            text = "\0".join([type(value).__name__, *self._parts(value)])
            self._open.pop()
            self._done[id(value)] = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(), value
        return self._done[id(value)][0]

    def _parts(self, value: Any) -> Iterator[str]:
        # Only of builtin types themselves: what is derived from them has code and attributes of its own.
        kind = type(value)
        if kind in _PLAIN or isinstance(value, PurePath):
            yield repr(value)
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif (home := _home(value)) is not None:
            yield home
        elif isinstance(value, CodeType):
            yield f"{value.co_code.hex()} {value.co_flags} {value.co_exceptiontable.hex()}"
            yield f"{value.co_argcount} {value.co_posonlyargcount} {value.co_kwonlyargcount}"
            names = (value.co_name, value.co_names, value.co_varnames, value.co_freevars)
            yield from map(self.of, (*names, value.co_consts))
        elif isinstance(value, FunctionType):
            cells = [list(_held_by(cell)) for cell in value.__closure__ or ()]
            attributes = {name: part for name, part in vars(value).items() if name not in _PASSING}
            used = {
                n: value.__globals__[n] for n in sorted({*_global_names(value.__code__)} & value.__globals__.keys())
            }
            yield from map(self.of, (value.__code__, value.__defaults__, value.__kwdefaults__, cells, attributes, used))
        elif isinstance(value, type):
            yield self.of(value.__bases__)
            yield self.of({name: vars(value)[name] for name in sorted(vars(value).keys() - _PASSING)})
        elif kind in (list, tuple):
            yield from map(self.of, value)
        elif kind in (set, frozenset):
            yield from sorted(map(self.of, value))
        elif kind in (dict, MappingProxyType):
            yield from (self.of(part) for pair in value.items() for part in pair)
        elif isinstance(value, staticmethod | classmethod):
            yield self.of(value.__func__)
        elif isinstance(value, property):
            yield from map(self.of, (value.fget, value.fset, value.fdel))
        elif _is("Tensor", value):
            yield f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {self.of(kind)}"
            yield hashlib.sha256(_bytes_of(value)).hexdigest()
        else:
            yield from map(self.of, self._pickled(value))

    def _pickled(self, value: object) -> Iterator[object]:
        """Yield the parts that an object is reduced to for pickling."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # a kind of object that only cloudpickle can pickle
            yield hashlib.sha256(_dumps(value, None)).hexdigest()
            return
        # The fourth and fifth parts are iterators over items.
        parts = [reduced] if isinstance(reduced, str) else reduced
        yield from (list(part) if place in (3, 4) and part is not None else part for place, part in enumerate(parts))


def _held_by(cell: CellType) -> Iterator[object]:
    """Yield what a variable of a function around another one holds; nothing if it has not been assigned yet."""
    with contextlib.suppress(ValueError):
        yield cell.cell_contents


def _bytes_of(tensor: Any) -> bytes:
    buffer = io.BytesIO()
    sys.modules["torch"].save(tensor.detach().cpu().clone(), buffer)
    return buffer.getvalue()


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names, including those of attributes, that a code object and those nested in it may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _home(value: Any) -> str | None:
    """Return the name under which other processes can import a value; ``None`` if it must be copied."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__":
        return None
    target: Any = sys.modules.get(module)
    if getattr(target, "__spec__", None) is None:
        return None
    for part in path.split("."):
        target = getattr(target, part, None)
    return f"{module}.{path}" if target is value else None


# Pickling by value, and finding what cannot be pickled.


def _pickled(parts: Mapping[str, object], model: object | None) -> bytes:
    """Pickle parts of a workload, by name, together, so that they share the objects that they use.

    Args:
        model: the workload's, if the pickled functions must get it as their argument.

    Raises:
        UsageError: one of the parts cannot be pickled.
    """
    try:
        return _dumps(parts, model)
    except Exception:
        for name, part in parts.items():
            try:
                _dumps(part, model)
            except Exception as error:
                path, why = _culprit("the workload" if name == WHOLE else name, part, error, model)
                if isinstance(why, _Refused):
                    raise UsageError(f"{path} {why}", advice=why.advice) from None
                sentence = f"{path} cannot be copied into other processes: {why}"
                raise UsageError(sentence, advice=_GIVE_A_FUNCTION) from None
        raise


class _Refused(Exception):
    """An object could be pickled, but training with the copy would not be the same training."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def _dumps(value: object, model: object | None) -> bytes:
    """Pickle by value.

    Args:
        model: the workload's, if the pickled functions must get it as their argument.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, found: Any) -> Any:
            if _is("Tensor", found) and found.device.type != "cpu":
                advice = "move it to the CPU: trials need the memory of the card, and move their own copies there."
                raise _Refused(f"is on the device {found.device}", advice)
            if isinstance(found, io.IOBase) and not isinstance(found, io.StringIO | io.BytesIO):
                raise _Refused("is an open file, which other processes do not have", _GIVE_A_FUNCTION)
            if model is not None and _is_module(found):
                if found is model:
                    advice = "let the function use its argument."
                    raise _Refused("is the model itself, of which trials train copies", advice)
                if any(True for _ in found.parameters()):
                    advice = "make it a part of the model, which is the argument."
                    raise _Refused("has parameters, of which each function would have a copy", advice)
            return super().reducer_override(found)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _culprit(path: str, value: object, error: Exception, model: object | None) -> tuple[str, Exception]:
    """Return the innermost attribute that cannot be pickled, such as ``dataset.file``, and the error it raises."""
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
    """Yield each thing that an object holds, with the text that refers to it, to be appended to the object's name."""
    if isinstance(value, FunctionType):
        names = value.__code__.co_names
        yield from ((f" uses {n!r}, which", value.__globals__[n]) for n in names if n in value.__globals__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((f" uses {name!r}, which", held) for held in _held_by(cell))
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
    # An instance exists only if torch has been imported, so there is no need to import it here.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, attrgetter(kind)(torch))
