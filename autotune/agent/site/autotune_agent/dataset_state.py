"""What a data set keeps between two samples: positions of open files, random generators, iterators, attributes.

Copies of it in several workers would each continue from where it stands, and forked workers share open files. What it
reaches is walked by ``vars``, closures and the globals that its functions use; nothing in it is called, except ``tell``
of files and ``__reduce__`` of Python's own iterators.
"""

from __future__ import annotations

import collections
import ctypes
import dis
import functools
import hashlib
import io
import itertools
import mmap
import os
import random
import socket
import stat
import struct
import sys
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

#: The most objects to look at in one walk, and in one container.
_MOST, _MOST_OF_ONE = 20_000, 256
#: Seconds of a walk, after which the rest is left out; the most items of a long list that are looked at together.
_LIMIT_S, _TOGETHER = 0.05, 200_000
#: The most bytes of an array to look at; in a larger one, as many are spread over it.
_BYTES = 2**16
#: Modules whose objects are open stores: what is reachable only through them cannot be seen, and their documentation
#: forbids using them in a forked process.
_STORES = ("h5py", "lmdb", "rocksdict", "sqlite3", "tables")
#: Modules that are not the user's: their functions use globals in ways that are not state of a data set.
_NOT_THEIRS = (
    *("torch", "numpy", "torchvision", "torchaudio", "PIL", "cv2", "pandas", "scipy"),
    *("autotune", "autotune_agent"),
)
_STDLIB = frozenset(
    getattr(
        sys, "stdlib_module_names", ("builtins", "collections", "functools", "itertools", "multiprocessing", "random")
    )
)
#: Standard modules whose objects hold only what was put into them. Others, such as loggers, keep records.
_HOLDERS = (
    *("argparse", "builtins", "collections", "functools", "itertools", "types"),
    *("queue", "tarfile", "tempfile", "zipfile"),
)
#: The part of Linux's ``struct tcp_info`` up to the counts of bytes acknowledged and received.
_TCP_COUNTS = struct.Struct("=120xQQ")
#: Kinds of movers (see `Kept`) that a script may reset between two epochs.
_GO_ON = ("a generator of random numbers", "an iterator")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Kept:
    """What was found in one walk.

    Attributes:
        movers: by path, the progress of each thing that advances from sample to sample: generators of random numbers,
            files, iterators. kinds: what each of them is, in words.
        values: by path, a digest of anything else that is kept.
        stores: open stores that no other process may use, in words, by path. devices: those on which tensors lie.
        whole: whether everything that could be reached was looked at.
    """

    def __init__(self) -> None:
        self.movers: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.stores: dict[str, str] = {}
        self.devices: set[str] = set()
        self.whole = True

    def is_held(self) -> str | None:
        """Return why copies of what was looked at may not deliver what it does, as a clause; ``None`` if it holds
        nothing that can advance from sample to sample, whether or not it was seen advancing."""
        for path, words in (*self.stores.items(), *self.kinds.items()):
            return f"the data set holds {words} ({path}), and its data were not compared with workers"
        if not self.whole:
            return "the data set holds more than can be looked at, and its data were not compared with workers"
        return None

    def open_files(self) -> dict[str, str]:
        """Return the open files, in words, by path."""
        return {path: words for path, words in self.kinds.items() if words.startswith("the open file")}

    def moved_since(self, before: Kept) -> dict[str, str]:
        """Return what has advanced since another walk, in words, by path."""
        return {
            path: self.kinds[path]
            for path, at in self.movers.items()
            if path in before.movers and before.movers[path] != at
        }

    def grown_since(self, before: Kept) -> list[str]:
        """Return the paths of what holds more than in another walk, such as ``dataset.cache``."""
        lengths = {path: size for path, size in self.values.items() if path.startswith(("len(", "filled("))}
        grown = [path for path, size in lengths.items() if path in before.values and size > before.values[path]]
        return [path.partition("(")[2][:-1] for path in grown]

    def counted_since(self, before: Kept) -> list[str]:
        """Return the paths of plain values that differ from another walk, such as ``dataset.calls``."""
        return [
            path
            for path, value in self.values.items()
            if not path.startswith(("len(", "filled(")) and before.values.get(path, value) != value
        ]

    def opened_since(self, before: Kept) -> dict[str, str]:
        """Return what advances from sample to sample, or is open, and was absent in another walk, in words, by path."""
        after, earlier = {**self.kinds, **self.stores}, {**before.kinds, **before.stores}
        return {path: words for path, words in after.items() if path not in earlier}

    def changed_since(self, before: Kept) -> list[str]:
        """Return the paths of anything kept that differs from another walk, such as ``dataset.difficulty``."""
        paths = [p for p in {**before.values, **self.values} if before.values.get(p) != self.values.get(p)]
        if not (self.whole and before.whole):
            # What one of the walks did not reach is not a change.
            paths = [p for p in paths if p in self.values and p in before.values]
        # What has been opened since was not changed by the script, and how much is filled makes no difference.
        paths = [p for p in paths if p not in self.kinds and not p.startswith("filled(")]
        # The position in a file is left out: workers have one of their own, or must not have the file.
        paths += [path for path, words in self.moved_since(before).items() if words in _GO_ON]
        return sorted(set(paths), key=lambda path: (len(path), path))


def walk(roots: dict[str, Any], *, times: int = 1) -> Kept:
    """Look at everything that some objects reach.

    Args:
        roots: the objects, by the names that their paths begin with, such as ``dataset``. times: multiplies the usual
            limits on objects and seconds, if the decision depends on this look alone.
    """
    kept = Kept()
    seen: set[int] = set()
    # Objects made while walking are kept alive in `alive`, so that no other gets their address.
    queue: collections.deque[tuple[str, Any]] = collections.deque(roots.items())
    alive: list[Any] = []
    # Processor time, so that other processes do not cut the walk short.
    until = time.thread_time() + times * _LIMIT_S
    while queue:
        path, thing = queue.popleft()
        if isinstance(thing, _PLAIN):
            # By its repr, because nan does not equal itself.
            kept.values[path] = hash(thing) if isinstance(thing, (str, bytes)) else repr(thing)
            continue
        if id(thing) in seen:
            continue
        if len(seen) >= times * _MOST or time.thread_time() > until:
            kept.whole = False
            break
        seen.add(id(thing))
        alive.append(thing)
        try:
            queue.extend(_look(path, thing, kept))
        except Exception:
            # Proxies, and objects that have ended, may raise on any access.
            kept.whole = False
    return kept


def _look(path: str, thing: Any, found: Kept) -> Iterable[tuple[str, Any]]:
    """Note the facts about an object itself; return what it holds, by path."""
    kind = type(thing)
    module = (kind.__module__ or "").partition(".")[0]
    if module in _STORES:
        found.stores[path] = f"an open {kind.__module__}.{kind.__name__}"
        return ()
    if isinstance(thing, socket.socket):
        found.stores[path] = "an open connection"
        return ()
    mover = _mover(thing, kind, module)
    if mover is not None:
        found.kinds[path], found.movers[path] = mover
        return ()
    array = _array(thing, found)
    if array is not None:
        found.values[path] = array
        return ()
    if isinstance(thing, (list, tuple, collections.deque)):
        found.values[f"len({path})"] = len(thing)
        if len(thing) > _MOST_OF_ONE:
            found.values[f"all({path})"] = _together(thing)
        found.values[f"filled({path})"] = sum(part is not None for part in itertools.islice(thing, _TOGETHER))
        return [(f"{path}[{i}]", part) for i, part in zip(range(_MOST_OF_ONE), thing)]  # noqa: B905
    if isinstance(thing, (set, frozenset)):
        found.values[f"len({path})"] = len(thing)
        found.values[f"all({path})"] = hash(frozenset(thing))
        return ()
    if isinstance(thing, dict):
        found.values[f"len({path})"] = len(thing)
        some = list(thing.items())[:_MOST_OF_ONE]
        parts = [(f"{path}[{_short(key)}]", value) for key, value in some]
        return [*parts, *attributes(path, thing)]
    if isinstance(thing, types.ModuleType):
        return ()
    if isinstance(thing, functools.partial):
        return [(path, thing.func), (f"{path}.args", thing.args), (f"{path}.keywords", thing.keywords)]
    if isinstance(thing, types.MethodType):
        return [(path, thing.__self__), (path, thing.__func__)]
    if isinstance(thing, (types.BuiltinMethodType, types.MethodWrapperType)):
        return [(path, thing.__self__)]
    if isinstance(thing, functools._lru_cache_wrapper):
        found.values[f"len({path})"] = thing.cache_info().currsize
        return [(path, thing.__wrapped__)]
    if isinstance(thing, types.FunctionType):
        found.values[path] = f"{thing.__module__}.{thing.__qualname__} {_digest(thing.__code__.co_code)}"
        return _used_by(path, thing)
    if isinstance(thing, type):
        return _of_class(thing)
    if isinstance(thing, (classmethod, staticmethod)):
        return [(path, thing.__func__)]
    if isinstance(thing, property):
        return [(path, part) for part in (thing.fget,) if part is not None]
    if module in _STDLIB and module not in _HOLDERS and module != "__main__":
        return ()
    found.values[path] = f"{kind.__module__}.{kind.__qualname__}"
    return [*attributes(path, thing), *([] if _is_known(module) else [(path, kind)])]


def _together(things: Any) -> int:
    """Return a hash of the plain values in a long list."""
    return hash(tuple(repr(t) for t in itertools.islice(things, _TOGETHER) if isinstance(t, _PLAIN)))


def attributes(path: str, thing: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object itself, by path, without calling anything of it."""
    parts = dict(getattr(thing, "__dict__", None) or {})
    for base in type(thing).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            try:
                parts.setdefault(name, object.__getattribute__(thing, name))
            except (AttributeError, TypeError):
                continue
    return [(f"{path}.{name}", value) for name, value in parts.items()]


def _used_by(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reaches: closure and defaults, and if it is the user's, the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):  # noqa: B905
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    yield from ((path, value) for value in function.__defaults__ or ())
    if _is_known((function.__module__ or "").partition(".")[0]):
        return
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            # Not by `co_names`, which holds names of attributes, too.
            value = (
                function.__globals__.get(instruction.argval)
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
                else None
            )
            if value is not None and not isinstance(value, types.ModuleType):
                yield instruction.argval, value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if _is_known((base.__module__ or "").partition(".")[0]):
            continue
        for name, value in list(base.__dict__.items()):
            if not name.startswith("__") or callable(value):
                yield f"{kind.__name__}.{name}", value


def _is_known(module: str) -> bool:
    # A script's own module may be named like a standard one, but `__main__` is always the script's.
    return module != "__main__" and (module in _NOT_THEIRS or module in _STDLIB)


def _mover(thing: Any, kind: type, module: str) -> tuple[str, Any] | None:
    """Return the kind of a thing that advances from sample to sample, and its progress; ``None`` for other things."""
    if isinstance(thing, random.Random):
        return "a generator of random numbers", _digest(repr(thing.getstate()).encode())
    if module == "numpy" and kind.__name__ in ("Generator", "RandomState"):
        bits = getattr(thing, "bit_generator", None) or thing._bit_generator
        return "a generator of random numbers", _digest(repr(bits.state).encode())
    if module == "torch" and kind.__name__ == "Generator":
        return "a generator of random numbers", _digest(_bytes_of(thing.get_state()))
    if isinstance(thing, (io.BytesIO, io.StringIO)):
        return "a stream in memory", None if thing.closed else thing.tell()
    if isinstance(thing, mmap.mmap):
        return "a mapped file", None if thing.closed else thing.tell()
    if isinstance(thing, io.IOBase) and not thing.closed and _is_read(thing):
        return f"the open file {_name(thing)}", _told(thing)
    if isinstance(thing, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        frame = getattr(thing, "gi_frame", None)
        return "an iterator", None if frame is None else (frame.f_lasti, _plain(frame.f_locals))
    if hasattr(kind, "__next__") and _is_known(module) and module != "torch":
        return "an iterator", _progress(thing)
    return None


def _is_read(file: Any) -> bool:
    try:
        return bool(file.readable()) and file.fileno() >= 0
    except (OSError, ValueError):
        return False


def _told(file: Any) -> Any:
    try:
        return file.tell()
    except (OSError, ValueError):
        # A text file does not tell while it is iterated over.
        pass
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_CUR)
    except (OSError, ValueError):
        # A pipe has no position, and what was read from it is gone.
        return object()


def _name(file: Any) -> str:
    return repr(os.path.basename(str(getattr(file, "name", "?"))))


def _plain(values: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, value) for name, value in values.items() if isinstance(value, _PLAIN))


def _progress(iterator: Any, depth: int = 3) -> Any:
    """Return the progress of one of Python's own iterators; if that is unknown, a new object each time."""
    if not depth:
        return object()
    words = repr(iterator)
    if " object at 0x" not in words:
        # As for `itertools.count`.
        return words
    try:
        state = iterator.__reduce__()
    except Exception:
        return object()
    parts: list[Any] = [part for part in state[2:] if isinstance(part, _PLAIN)]
    for inner in state[1] if isinstance(state[1], tuple) else ():
        kind = type(inner)
        mover = _mover(inner, kind, (kind.__module__ or "").partition(".")[0])
        if mover is not None:
            parts.append(mover[1])
        elif hasattr(kind, "__next__"):
            parts.append(_progress(inner, depth - 1))
    return tuple(parts) or (None if state[1] == () or not state[1:] else object())


def _array(thing: Any, found: Kept) -> Any:
    """Return a digest of a tensor or an array; ``None`` for other things. Only a part of a large array is looked at."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        found.devices.add(thing.device.type)
        part = b""
        # Shared memory is where workers keep what they have made.
        in_place = thing.device.type == "cpu" and thing.layout is torch.strided and thing.is_contiguous()
        if in_place and not thing.is_shared() and thing.numel():
            flat = thing.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() * flat.element_size() // _BYTES)].clone()
            part = bytes(memory(some))
        return tuple(thing.shape), 0 if thing.is_inference() else thing._version, str(thing.dtype), _digest(part)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, numpy.ndarray):
        if thing.dtype.hasobject:
            return thing.shape, str(thing.dtype)
        flat = thing.reshape(-1) if thing.flags.c_contiguous else thing
        step = max(1, thing.nbytes // _BYTES)
        part = flat[::step]
        return thing.shape, str(thing.dtype), _digest(part.tobytes())
    if numpy is not None and isinstance(thing, numpy.generic):
        return repr(thing)
    return None


def memory(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""


def _short(key: Any) -> str:
    return repr(key)[:40] if isinstance(key, _PLAIN) else type(key).__name__


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.numpy()) if hasattr(tensor, "numpy") else bytes(tensor.tolist())


def open_places() -> dict[int, tuple[str, Any]]:
    """Return, by descriptor, the files that this process has open for reading, each with its position, and its TCP
    connections, each with the numbers of bytes transferred."""
    places: dict[int, tuple[str, Any]] = {}
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISREG(kind) or stat.S_ISBLK(kind):
                info = _fdinfo(descriptor)
                # A file that is only written to, such as a log, is not a source of samples.
                if int(info["flags"], 8) & os.O_ACCMODE != os.O_WRONLY:
                    places[descriptor] = os.readlink(f"/proc/self/fd/{name}"), int(info["pos"])
            elif stat.S_ISSOCK(kind):
                passed = _passed(descriptor)
                if passed is not None:
                    places[descriptor] = passed
        except (OSError, KeyError, ValueError):
            continue
    return places


def _fdinfo(descriptor: int) -> dict[str, str]:
    with open(f"/proc/self/fdinfo/{descriptor}") as lines:
        return dict(line.replace(":", " ", 1).split(None, 1) for line in lines if ":" in line)


def _passed(descriptor: int) -> tuple[str, Any] | None:
    # Making a socket object may set a timeout, and with it the blocking mode of all that share the connection.
    blocking = os.get_blocking(descriptor)
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
                return None
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            host = duplicate.getpeername()
    finally:
        os.set_blocking(descriptor, blocking)
    return f"{host[0]}:{host[1]}", _TCP_COUNTS.unpack_from(info)


def named(place: tuple[str, Any]) -> str:
    """Return in words what is open."""
    name, at = place
    return f"the connection to {name}" if isinstance(at, tuple) else f"the open file {os.path.basename(name)!r}"


def moved_places(before: dict[int, tuple[str, Any]], now: dict[int, tuple[str, Any]]) -> list[str]:
    """Return what was open before and has been read from since, in words."""
    return [
        named(place)
        for descriptor, place in now.items()
        if descriptor in before and before[descriptor][0] == place[0] and before[descriptor][1] != place[1]
    ]
