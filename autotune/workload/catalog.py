"""Resolves a name or path to the file of a workload or objective, without importing it or torch.

A model is named in one of five ways: the path of a file, ``package.module:NAME``, a file of the catalog (by its stem),
a classification, detection or segmentation model of the installed torchvision (by torchvision's own name for it), or
``timm:NAME``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.records import Value, WorkloadRef
from autotune.workload.contract import PARTS

_Task = Literal["classification", "detection", "segmentation"]
#: The catalog files that serve all of torchvision's names, each with what these models are for, and the folder below
#: its models that registers them.
_TORCHVISION: dict[str, tuple[_Task, str]] = {
    "torchvision_classifier": ("classification", ""),
    "torchvision_detector": ("detection", "detection"),
    "torchvision_segmenter": ("segmentation", "segmentation"),
}
_TIMM, _TIMM_FILE = "timm:", "timm_classifier"


def catalog_folder(kind: Literal["models", "objectives"]) -> Path:
    """Return the folder of the built-in files of ``kind``: inside an installed package, or beside it in a checkout.

    Raises:
        MachineError: neither folder exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_catalog" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise MachineError(
        f"this installation of autotune has no {kind} folder", advice="install autotune again; files are missing."
    )


def workload_names() -> list[str]:
    """Return the catalog's models, sorted. torchvision's and timm's names work too but are not listed here."""
    # A file that serves many names is not itself a model.
    return [name for name in _stems("models") if name not in _TORCHVISION and name != _TIMM_FILE]


def is_named(model: str) -> bool:
    """Return whether a model is found by its name alone, in the catalog, in torchvision or in timm."""
    return model.startswith(_TIMM) or model in workload_names() or model in torchvision_names()


def objective_names() -> list[str]:
    """Return the catalog's objectives, sorted."""
    return _stems("objectives")


def _stems(kind: Literal["models", "objectives"]) -> list[str]:
    files = catalog_folder(kind).glob("*.py")
    return sorted(file.stem for file in files if file.stem.isidentifier() and not file.stem.startswith("_"))


def find_workload(name: str, args: Mapping[str, str]) -> WorkloadRef:
    """Locate the code of model ``name``.

    Args:
        name: a path (``x.py``, or anything with a separator; ``~`` is expanded), ``timm:NAME``,
            ``package.module:NAME``, a catalog name, or a torchvision model, in this order.
        args: the ``--arg`` values.

    Raises:
        UsageError: a path that is not an importable file, a malformed module reference, or an ``architecture``
            argument that contradicts a torchvision name.
        UnknownNameError: a name that matches nothing; carries the closest names.
    """
    if _is_path(name):
        return _file_reference(_file(name, "model"), args)
    folder = catalog_folder("models")
    if name.startswith(_TIMM):
        if importlib.util.find_spec("timm") is None:
            raise UsageError(f"{name} needs timm, which is not installed here", advice="pip install timm.")
        return _architecture(name, name.removeprefix(_TIMM), folder / f"{_TIMM_FILE}.py", args)
    if ":" in name:
        return _module_reference(name, args)
    if os.path.isfile(folder / f"{name}.py"):
        return _file_reference(folder / f"{name}.py", args)
    if name in torchvision_names():
        return _architecture(name, name, folder / f"{_torchvision_files()[name]}.py", args)
    raise _unknown("model", name, {*workload_names(), *torchvision_names()})


def _architecture(name: str, architecture: str, file: Path, args: Mapping[str, str]) -> WorkloadRef:
    """Return the reference to one of the many models that a file serves."""
    requested = args.get("architecture", architecture)
    if requested != architecture:
        raise UsageError(
            f"--model {name} and --arg architecture={requested} name two models", advice="leave one of them out."
        )
    return _file_reference(file, {"architecture": architecture, **args}).model_copy(update={"name": name})


def find_objective(name_or_path: str) -> Path:
    """Return the absolute path of an objective's file, found by the same rules as a model's.

    Raises:
        UsageError: a path that is not an importable file.
        UnknownNameError: not in the catalog; carries the closest names.
    """
    if _is_path(name_or_path):
        return _file(name_or_path, "objective")
    names = objective_names()
    if name_or_path in names:
        return catalog_folder("objectives") / f"{name_or_path}.py"
    raise _unknown("objective", name_or_path, names)


def _unknown(what: str, name: str, known: set[str] | list[str]) -> UnknownNameError:
    here = f"{name}.py"
    advice = f"for the file in this folder write {here}." if os.path.isfile(here) else None
    return UnknownNameError(what, name, known, advice=advice)


def _is_path(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _file(name: str, what: str) -> Path:
    # Do not resolve symbolic links: the folder that goes on sys.path is the one the user named.
    path = Path(os.path.abspath(Path(name).expanduser()))
    # Unlike the methods of Path, these return False for a name that is too long.
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder, not the file of {what}", advice="name the Python file inside it.")
    if not os.path.isfile(path):
        with_suffix = path.with_name(f"{path.name}.py")
        advice = (
            f"did you mean {with_suffix}?" if os.path.isfile(with_suffix) else "check the path and the current folder."
        )
        raise UsageError(f"there is no file {path}", advice=advice)
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UsageError(
            f"{path.name} cannot be imported by its name",
            advice="give it a name of letters, digits and underscores that ends in .py.",
        )
    return path


def _module_reference(name: str, args: Mapping[str, str]) -> WorkloadRef:
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        raise UsageError(f"{name!r} names an object inside a file", advice=f"name the file alone: {module}.")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"{name!r} is no module reference", advice="write it as package.module:NAME.")
    return WorkloadRef(name=attribute, module=module, attribute=attribute, args=dict(args))


def _file_reference(path: Path, args: Mapping[str, str]) -> WorkloadRef:
    return WorkloadRef(name=path.stem, path=str(path), module=path.stem, args=dict(args), sha256=source_hash(path))


def source_hash(path: Path) -> str:
    """Return a SHA-256 over a file and the modules beside it that it imports, directly or indirectly.

    Each file is hashed with its name relative to the folder, its length and its bytes, in the order of names, so
    moving the folder changes nothing and renaming a file does. Imports are found in the source without running it, so
    imports computed at run time are missed. A file that does not parse is hashed without following its imports.

    Raises:
        UsageError: one of the files cannot be read.
    """
    digest = hashlib.sha256()
    for name, content in sorted(source_files(path).items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def source_files(path: Path) -> dict[str, bytes]:
    """Return the files that `source_hash` covers: name relative to the folder of ``path``, and content.

    Raises:
        UsageError: one of the files cannot be read.
    """
    folder = path.parent
    contents: dict[str, bytes] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(folder).as_posix()
        if name in contents:
            continue
        try:
            contents[name] = file.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
        waiting.extend(_siblings(_parse(contents[name]), file, folder))
    return contents


def _parse(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        # Warnings about the user's source belong in the child that runs it.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser's stack, not the machine's
            return ast.Module(body=[], type_ignores=[])


def _siblings(tree: ast.Module, file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files under ``folder`` that the imports in ``tree`` (parsed from ``file``) lead to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else folder
            if base.is_relative_to(folder):
                for alias in node.names:
                    # The name may be a submodule or an object inside the module; the file system tells which.
                    yield from _module_files(base, [*(node.module or "").split("."), alias.name])


def _module_files(base: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the files Python would run to import ``parts`` below ``base``: each package on the way, then the module."""
    for part in filter(None, parts):
        package = base / part
        if (package / "__init__.py").is_file():
            yield package / "__init__.py"
        elif (base / f"{part}.py").is_file():
            yield base / f"{part}.py"
            return
        elif not package.is_dir():
            return
        base = package


def declared_knobs(path: Path) -> dict[str, tuple[Value, ...]] | None:
    """Return the knobs that a workload's file declares, with those of their values that are literals, without running
    it.

    ``None`` if they cannot be determined: the file has no literal ``KNOBS``, has more than one, or cannot be read.
    """
    try:
        body = _parse(path.read_bytes()).body
    except OSError:
        return None
    declared: list[ast.expr | None] = []
    for node in body:
        # In whatever way it is bound or changed, also inside a block: what is there besides one plain literal counts.
        # Functions only read it, later.
        for inner in () if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == "KNOBS":
                value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
                declared.append(value if isinstance(inner.ctx, ast.Store) else None)
    if len(declared) != 1 or not isinstance(declared[0], ast.Dict):
        return None
    names = [getattr(key, "value", None) for key in declared[0].keys]
    if not all(isinstance(name, str) for name in names):
        return None
    return {str(name): _literals(value) for name, value in zip(names, declared[0].values, strict=True)}


def constants(path: Path, names: Sequence[str]) -> dict[str, Value | None]:
    """Return the names that a workload's file binds, of those given, with their values, without running it. The value
    is ``None`` if it is no literal, or the name is bound more than once. Empty if the file cannot be read."""
    try:
        tree = _parse(path.read_bytes())
    except OSError:
        return {}
    literals: dict[str, Value] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(getattr(node, "value", None), "value", None)
        if isinstance(value, bool | int | float | str):
            literals |= {t.id: value for t in targets if isinstance(t, ast.Name)}
    nodes = list(ast.walk(tree))
    bound = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound += [node.asname or node.name for node in nodes if isinstance(node, ast.alias)]
    # Names in a file with `PARTS` may be anybody's.
    everything = "*" in bound or PARTS in bound
    return {
        name: literals.get(name) if bound.count(name) == 1 and not everything else None
        for name in names
        if name in bound or everything
    }


def _literals(node: ast.expr) -> tuple[Value, ...]:
    """Return the literal values in a tuple or list, or among the arguments of ``knob(…)``."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List) else []
    if isinstance(node, ast.Call) and _name_of(node.func) == "knob":
        parts = node.args
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    return tuple(value for value in values if isinstance(value, bool | int | float | str))


def torchvision_names() -> frozenset[str]:
    """Return the names of the classification, detection and segmentation models that the installed torchvision
    registers.

    They are read from its source, because importing it would import torch. Empty if torchvision is not installed.
    """
    return frozenset(_torchvision_files())


def torchvision_task(name: str) -> _Task | None:
    """Return what the installed torchvision's model of this name is for; ``None`` if it has no such model."""
    file = _torchvision_files().get(name)
    return None if file is None else _TORCHVISION[file][0]


@functools.cache
def _torchvision_files() -> dict[str, str]:
    """Return torchvision's names, each with the catalog file that serves it."""
    spec = importlib.util.find_spec("torchvision")
    files: dict[str, str] = {}
    for location in (spec.submodule_search_locations or []) if spec else []:
        for stem, (_, folder) in _TORCHVISION.items():
            for file in sorted((Path(location) / "models" / folder).glob("*.py")):
                source = file.read_bytes()
                if b"@register_model" in source:
                    files.update(dict.fromkeys(_registered(_parse(source)), stem))
    return files


def _registered(tree: ast.Module) -> Iterator[str]:
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for decorator in function.decorator_list:
            if not (isinstance(decorator, ast.Call) and _name_of(decorator.func) == "register_model"):
                continue
            candidates = [*decorator.args[:1], *(word.value for word in decorator.keywords if word.arg == "name")]
            values = [value.value for value in candidates if isinstance(value, ast.Constant)]
            yield next((value for value in values if isinstance(value, str)), function.name)


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
