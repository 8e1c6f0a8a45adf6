"""A workload given as objects of a script or notebook: a model and a data set, and functions of any kind.

They are pickled by value (cloudpickle), classes of a notebook's cells included, and trials train copies of them. What
cannot be copied so is refused with the attribute that holds it.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any

from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import workload_source
from autotune.search.tuning.workload_file import HEAD, stem_for, users_folders
from autotune.workload.contract import REQUIRED

#: How deep in a part the attribute is looked for that cannot be copied.
_DEEPEST = 6
_MAKE_IT_THERE = "make it where it is used, or give a function that makes the whole: dataset() or model()."


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
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    text = _text(hashes, objects)
    digest = hashlib.sha256(text.encode()).hexdigest()
    model = parts["model"]
    named = model if isinstance(model, type | FunctionType) else type(model)
    path = workload_source(studies.absolute(), digest, stem_for(named.__name__))
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomic(path.parent / f"{name}.pickle", content)
    write_atomic(path, text)
    return str(path)


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


def _text(hashes: Mapping[str, str], objects: tuple[str, ...]) -> str:
    folders = users_folders()
    lines = [
        HEAD,
        "from pathlib import Path",
        "",
        *(["import sys", "", f"sys.path[:0] = {folders!r}", ""] if folders else []),
        "from autotune.workload.carrying import Carried",
        "",
        # The hashes make other objects another workload.
        f"_parts = Carried(Path(__file__).parent, {dict(hashes)!r}, {objects!r})",
        *(f"{name} = _parts.part({name!r})" for name in REQUIRED),
    ]
    return "\n".join(lines) + "\n"


def _pickled(name: str, part: object, model: object) -> bytes:
    of_function = None if name in ("model", "dataset") else model
    try:
        return _dumps(part, of_function)
    except Exception as error:
        path, why = _culprit(name, part, error, of_function)
        if isinstance(why, _Refused):
            raise UsageError(f"{path} {why}", advice=why.advice) from None
        raise UsageError(f"{path} cannot be copied into other processes: {why}", advice=_MAKE_IT_THERE) from None


class _Refused(Exception):
    """What could be pickled, but would not be the same training."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


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
                raise _Refused(f"is on the device {found.device}", advice)
            if isinstance(found, io.IOBase) and not isinstance(found, io.StringIO | io.BytesIO):
                raise _Refused("is an open file, which other processes do not have", _MAKE_IT_THERE)
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
