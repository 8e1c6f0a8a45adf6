"""The doors of models: where their memory format, precision and compiling are set."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import types
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial, wraps
from typing import Any

from autotune_agent.facts import is_capturing
from autotune_agent.in_place import (
    DIMENSIONS,
    cannot_lay_out,
    channels_last,
    dimensions_of,
    is_image,
    lay_out,
    may_have_format,
    torch_format,
)
from autotune_agent.setting import Setting, safely

# Detects a loss that is computed in lower precision outside of the models that run under autocast.
#
# What a model returns is converted back to fp32. What it passes on in another way (by a forward hook, an attribute, an
# object that cannot be copied) is not, and the script would compute with it as it never has before.

#: Backward passes under autocast to look at: enough for all losses of the first step or two.
LOOKS = 8
#: Calls of models, and operations of a loss, beyond which nothing is reported.
_MOST_CALLS, _MOST_NODES = 2000, 20_000


class Outside:
    """Looks at the graphs of the first losses. PyTorch numbers the operations of a thread, so that the numbers identify
    the operations that a model has made itself.

    Attributes:
        looks: how many are left.
    """

    def __init__(self) -> None:
        self.looks = LOOKS
        #: Numbers of the operations in each call of a model under autocast: first, and one after the last.
        self._calls: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Take what is computed in this context as computed by a model under autocast."""
        first = _next_number() if self.looks else None
        yield
        last = None if first is None else _next_number()
        if first is not None and last is not None and len(self._calls) < _MOST_CALLS:
            self._calls.append((first, last))
        else:
            # The operations of an unrecorded call would look like those of a loss.
            self.end()

    def end(self) -> None:
        """Stop looking."""
        self.looks = 0
        self._calls = []

    def found(self, losses: Any) -> str | None:
        """Return why autocast does not suit this training, as a clause; ``None`` if there is no sign of that.

        Args:
            losses: where a backward pass begins: a tensor, or several.
        """
        import torch

        if not self.looks or not self._calls:
            return None
        calls = sorted(self._calls)
        firsts = [first for first, _ in calls]
        starts = [losses] if isinstance(losses, torch.Tensor) else list(losses)
        todo = [loss.grad_fn for loss in starts if isinstance(loss, torch.Tensor) and loss.grad_fn is not None]
        # The nodes are kept alive, so that none takes the address of another.
        seen = set(todo)
        while todo and len(seen) < _MOST_NODES:
            node = todo.pop()
            place = bisect_right(firsts, node._sequence_nr()) - 1
            if place >= 0 and node._sequence_nr() < calls[place][1]:
                continue
            for output in getattr(node, "_input_metadata", ()):
                dtype = getattr(output, "dtype", None)
                if dtype in (torch.bfloat16, torch.float16):
                    lower = str(dtype).rpartition(".")[2]
                    return f"its loss would be computed in {lower} outside of the model ({node.name()})"
            for other, _ in node.next_functions:
                if other is not None and other not in seen:
                    seen.add(other)
                    todo.append(other)
        self.looks -= 1
        if not self.looks:
            self.end()
        return None


def _next_number() -> int | None:
    """Return a number between those of the operations before and after; ``None`` where operations have none."""
    import torch

    with torch.enable_grad():
        node: Any = (torch.zeros((), requires_grad=True) * 1).grad_fn
    return None if node is None else int(node._sequence_nr())


# A wrapper around a model's own forward pass: the layout of its inputs, autocast, and outputs in fp32.

#: At most so many objects in the outputs of a model are looked into.
_MOST_OBJECTS = 200
#: Types that hold no tensors that a loss would take from there.
_CLOSED = (type(None), str, bytes, int, float, complex, type, types.ModuleType)
#: See `How`.
Rescue = Callable[[Exception], "Callable[[], None] | None"]
#: Marks our forward passes, and holds the one that the instance had before.
_OURS = "_autotune_before"


@dataclasses.dataclass
class How:
    """How a model computes while it trains. It may be changed between two steps.

    Attributes:
        outside: sees what happens to the results computed under autocast.
        lower: the dtype of autocast; ``None`` for none.
        channels_last: dimensions of the inputs that get their channels last; 0 for none.
        rescue: called with what a forward pass raises; returns a function that makes the model compute in another way,
            if that is worth another try, or ``None``.
    """

    outside: Outside
    lower: Any = None
    channels_last: int = 0
    rescue: Rescue | None = None


def wrap_forward(model: Any, how: How) -> None:
    """Convert inputs to channels last, and run the forward pass of a training under autocast, with outputs in fp32.

    This is what accelerate does. An evaluation keeps the script's own precision.
    """
    import torch

    kind = type(model).forward
    # An instance may have a forward of its own, which a library has put there.
    original = model.__dict__.get("forward")

    def compute(self: Any, args: Any, kwargs: Any) -> Any:
        if how.channels_last:
            last = partial(_channels_last, dimensions=how.channels_last)
            args, kwargs = _each(args, last), _each(kwargs, last)
        run: Callable[..., Any] = partial(kind, self) if original is None else original
        lower = how.lower
        if lower is None or not is_training(self):
            return run(*args, **kwargs)
        weight = next(self.parameters())
        if weight.dtype is not torch.float32 or torch.is_autocast_enabled(weight.device.type):
            # The script uses lower precision itself now, although it did not when the model was first called.
            return run(*args, **kwargs)
        # Without the cache of cast weights: a weight first used without gradients would be cached without them.
        with torch.autocast(weight.device.type, dtype=lower, cache_enabled=False):
            outputs = run(*args, **kwargs)
        # A compiler that traces this must see nothing that it cannot follow.
        return _each(outputs, _full, None if torch.compiler.is_compiling() else {})

    def watched(self: Any, args: Any, kwargs: Any) -> Any:
        if how.lower is None or not how.outside.looks:
            return compute(self, args, kwargs)
        with how.outside.call():
            return compute(self, args, kwargs)

    @wraps(kind)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Keep what a compiler traces as simple as possible; `ModelDoor` sees what compiled code raises.
        if torch.compiler.is_compiling():
            return compute(self, args, kwargs)
        if how.rescue is None:
            return watched(self, args, kwargs)
        try:
            return watched(self, args, kwargs)
        except Exception as error:
            back = how.rescue(error)
            if back is None:
                raise
        # Not in the handler above, where the error holds on to the memory of the first try.
        back()
        return watched(self, args, kwargs)

    setattr(forward, _OURS, original)
    model.forward = types.MethodType(forward, model)


def is_training(model: Any) -> bool:
    """Return whether a call of a model is part of its training. Exports and evaluations are left as they are."""
    import torch

    if not model.training or not torch.is_grad_enabled():
        return False
    return not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def leave_out_of_copies(base: Any) -> None:
    """Give copies and pickles of models the forward pass that they would have without us."""
    original = base.__getstate__

    def getstate(module: Any) -> Any:
        state = original(module)
        function = getattr(state.get("forward"), "__func__", None) if isinstance(state, dict) else None
        if hasattr(function, _OURS):
            before = getattr(function, _OURS)
            if before is None:
                del state["forward"]
            else:
                state["forward"] = before
        return state

    base.__getstate__ = getstate


def leave_out_of_scripts() -> None:
    """Let TorchScript compile the forward passes that models would have without us: it reads their source, and resolves
    the names in it where the function was defined."""
    import torch

    original = torch.jit.script

    @wraps(original)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, torch.nn.Module):
            if not args:
                # For a class, names are resolved in the calling frame.
                kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
            return original(obj, *args, **kwargs)
        forwards: list[tuple[Any, Any]] = [(module, module.__dict__.get("forward")) for module in obj.modules()]
        wrapped = [
            (module, forward) for module, forward in forwards if hasattr(getattr(forward, "__func__", None), _OURS)
        ]
        for module, forward in wrapped:
            before = getattr(forward, _OURS)
            if before is None:
                del module.forward
            else:
                module.forward = before
        try:
            return original(obj, *args, **kwargs)
        finally:
            for module, forward in wrapped:
                module.forward = forward

    torch.jit.script = script


def _channels_last(tensor: Any, dimensions: int) -> Any:
    return channels_last(tensor, dimensions) if is_image(tensor, dimensions) else tensor


def _full(tensor: Any) -> Any:
    import torch

    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _each(held: Any, change: Callable[[Any], Any], known: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a structure with each of its tensors changed; itself if none is. Whatever holds a changed one is copied.

    Args:
        known: if not ``None``, objects of any class are looked into, too. It holds those that have been, by their ids:
            each object, which is kept alive, and what has become of it.
    """
    import torch

    if isinstance(held, torch.Tensor):
        return change(held)
    if isinstance(held, MutableMapping):
        new = {name: _each(held[name], change, known) for name in held.keys()}  # noqa: SIM118
        if all(new[name] is held[name] for name in new):
            return held
        # The model outputs of Hugging Face are mappings and dataclasses; a copy keeps their type.
        copied = copy.copy(held)
        for name, value in new.items():
            copied[name] = value
        return copied
    if type(held) in (tuple, list) or (isinstance(held, tuple) and hasattr(held, "_fields")):
        parts = [_each(part, change, known) for part in held]
        if all(part is before for part, before in zip(parts, held)):  # noqa: B905
            return held
        return type(held)(*parts) if hasattr(held, "_fields") else type(held)(parts)
    if dataclasses.is_dataclass(held) and not isinstance(held, type):
        return _with_attributes(held, [f.name for f in dataclasses.fields(held)], change, known)
    if known is None or len(known) >= _MOST_OBJECTS or callable(held) or isinstance(held, _CLOSED):
        return held
    if id(held) not in known:
        known[id(held)] = held, held
        # An object that cannot be copied stays as it is; `Outside` sees whether that matters.
        with contextlib.suppress(Exception):
            known[id(held)] = held, _with_attributes(held, _attributes(held), change, known)
    return known[id(held)][1]


def _attributes(held: Any) -> list[str]:
    """Return the names of an object's attributes."""
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(held).__mro__]
    slot_names = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
    return [*getattr(held, "__dict__", ()), *(name for name in slot_names if not name.startswith("__"))]


def _with_attributes(
    held: Any, names: Sequence[str], change: Callable[[Any], Any], known: dict[int, tuple[Any, Any]] | None
) -> Any:
    old = {name: getattr(held, name) for name in names if hasattr(held, name)}
    new = {name: _each(value, change, known) for name, value in old.items()}
    if all(value is old[name] for name, value in new.items()):
        return held
    copied: Any = copy.copy(held)
    for name, value in new.items():
        if value is not old[name]:
            object.__setattr__(copied, name, value)
    return copied


# The door of the models: the call of an outermost module that is being trained.

#: Wrappers that spread a model over devices or processes, and have copied or reordered its parameters.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
#: The state of a model for which nothing has been set.
_UNSET: Mapping[str, Any] = {"memory_format": "contiguous", "autocast": None, "compile": None}
#: Graphs of one model that torch keeps while it is switched. Beyond the default eight, it would silently not compile.
_GRAPHS = 64


class ModelDoor:
    """Sets ``memory_format``, ``autocast`` and ``compile`` of models, in place, before they are first trained.

    The outermost module that is called with gradients on, in training mode, and has parameters to train, is a model.
    There may be several (the two of a GAN). Looking for them stops when `remove` is called.

    Args:
        begin: notes that this process trains; returns whether the agent is meant for it.
        to_switch: whether models will be switched to other settings later.
        rescue: as `How.rescue`.
        lowered: called with why a training under autocast does not compute as it should (see `Outside`); what it raises
            is raised by the backward pass.
    """

    def __init__(
        self,
        settings: list[Setting],
        begin: Callable[[], bool],
        *,
        to_switch: bool = False,
        rescue: Rescue | None = None,
        lowered: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._begin = begin
        self._to_switch = to_switch
        self._rescue = rescue
        self._lowered = lowered
        self._outside = Outside()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        #: What is in force for each model, by the names of `_UNSET`, and the `How` of its forward pass.
        self._told: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._hows: weakref.WeakKeyDictionary[Any, How] = weakref.WeakKeyDictionary()
        #: Compiled calls of each model, by mode.
        self._made: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        #: Facts about the model that was seen first.
        self.own: dict[str, Any] = {}
        self._looking = False
        self._compiles = False
        #: A call of a model has been recorded in a CUDA graph.
        self._captured = False
        self._compiling = False
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Look at every call of an outermost module."""
        import torch

        base: Any = torch.nn.Module
        original = base.__call__

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            # A compiler that traces this sees the original call of a module.
            if torch.compiler.is_compiling() or not self._looking or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            self._captured = self._captured or is_capturing()
            if not safely(self._is_ours, module):
                return original(module, *args, **kwargs)
            # Inner modules are called without our patch: they are not slower, and a compiler sees nothing of it.
            _swap(base, "__call__", call, original)
            try:
                if module not in self._known:
                    self._known.add(module)
                    safely(self._set, module)
                return original(module, *args, **kwargs)
            finally:
                if self._looking:
                    _swap(base, "__call__", original, call)

        self._looking = True
        base.__call__ = call
        self._undo.append(lambda: _swap(base, "__call__", call, original))
        self._watch_compilers(base, call, original)
        if self._lowered is not None and (self._to_switch or any(s.arguments.get("autocast") for s in self._settings)):
            self._watch_losses(self._lowered)
        leave_out_of_copies(base)
        leave_out_of_scripts()

    def _is_ours(self, module: Any) -> bool:
        return _is_model(module) and self._begin()

    def remove(self) -> None:
        """Restore the original calls."""
        self._looking = False
        while self._undo:
            self._undo.pop()()

    def _watch_compilers(self, base: Any, call: Any, theirs: Any) -> None:
        """Note when the script compiles something, and let the compiler see the original call of a module."""
        import torch

        original = torch.compile

        @wraps(original)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            if not self._looking:
                return original(*args, **kwargs)
            self._compiles = self._compiles or not self._compiling
            swapped = _swap(base, "__call__", call, theirs)
            try:
                return original(*args, **kwargs)
            finally:
                if swapped:
                    _swap(base, "__call__", theirs, call)

        torch.compile = compiling
        self._undo.append(lambda: _swap(torch, "compile", compiling, original))

    def _watch_losses(self, lowered: Callable[[str], None]) -> None:
        """Look at the losses at which the first backward passes begin."""
        import torch

        original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._outside.looks:
                why = safely(self._outside.found, tensors)
                if why is not None:
                    lowered(why)
            elif not self._to_switch:
                _swap(torch.autograd, "backward", backward, original)
            original(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def _set(self, model: Any) -> None:
        self.own = self.own or _facts(model, compiles=self._compiles)
        wanted: list[Setting] = []
        arguments: dict[str, Any] = {}

        def want(setting: Setting) -> str | None:
            reason = _why_not(model, setting.arguments, compiles=self._compiles)
            if reason is None and not setting.ask:
                wanted.append(setting)
                arguments.update(setting.arguments)
            return reason

        for setting in self._settings:
            setting.try_to(partial(want, setting))
        try:
            self._apply(model, arguments)
        except Exception as error:
            # The training goes on without these settings.
            for setting in wanted:
                setting.done -= 1
                setting.refusals[f"{type(error).__name__}: {error}"] += 1

    def switch(self, told: Mapping[str, Any]) -> None:
        """Set all models to something else, between two steps.

        Args:
            told: what is to be in force; anything else is as the script has it.
        """
        if self._compiles or told.get("compile") is not None:
            _keep_graphs()
        for model in list(self._told):
            self._apply(model, {**_UNSET, **told})

    def stop_autocast(self) -> None:
        """Let all models go on in the script's own precision."""
        for model in list(self._told):
            self._apply(model, {"autocast": None})

    def stop_compiling(self) -> None:
        """Let all models go on without being compiled."""
        for model in list(self._told):
            self._apply(model, {"compile": None})

    def settle(self) -> None:
        """Note that models will not be switched any more, except back to what the script does itself."""
        self._to_switch = False
        self._made.clear()
        if not any(how.lower for how in self._hows.values()):
            self._outside.end()

    def _apply(self, model: Any, told: Mapping[str, Any]) -> None:
        import torch

        before = self._told.setdefault(model, dict(_UNSET))
        changed = {name: value for name, value in told.items() if before[name] != value}
        if "memory_format" in changed:
            # The script may have moved its weights since this was checked.
            reason = cannot_lay_out(model, changed["memory_format"])
            if self._captured:
                reason = "a CUDA graph of the script's reads its weights where they are"
            if reason is not None:
                raise RuntimeError(reason)
        how = self._hows.get(model)
        if how is None and (self._to_switch or changed.keys() & {"memory_format", "autocast"}):
            how = self._hows[model] = How(self._outside, rescue=self._rescue)
            wrap_forward(model, how)
        if how is not None and "memory_format" in changed:
            lay_out(model, changed["memory_format"])
            how.channels_last = dimensions_of(changed["memory_format"])
        if how is not None and "autocast" in changed:
            how.lower = None if changed["autocast"] is None else getattr(torch, changed["autocast"])
        if "compile" in changed:
            self._compile(model, changed["compile"])
        before.update(changed)

    def _compile(self, model: Any, mode: str | None) -> None:
        # A compiled call keeps the model alive, so it is cached only while the model may be switched.
        calls = self._made.setdefault(model, {}) if self._to_switch else {}
        if mode is not None and mode not in calls:
            self._compiling = True
            try:
                calls[mode] = _compiled(model, mode, self._rescue, self._hows.get(model))
            finally:
                self._compiling = False
        model._compiled_call_impl = None if mode is None else calls[mode]


def _keep_graphs() -> None:
    """Let torch keep a graph for each setting that a compiled model is switched to, the script's own model included."""
    import torch

    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(torch._dynamo.config, name, max(_GRAPHS, getattr(torch._dynamo.config, name)))


def _is_model(module: Any) -> bool:
    import torch
    from torch.nn.parameter import is_lazy

    if not module.training or torch._C._current_graph_task_id() != -1:
        # During a backward pass, a part of a model is recomputed (activation checkpointing).
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    parameters = list(module.parameters())
    # A model without data is only inspected, such as for its shapes or the number of its operations.
    return any(p.requires_grad for p in parameters) and not any(is_lazy(p) or p.is_meta for p in parameters)


def _swap(holder: Any, name: str, now: Any, then: Any) -> bool:
    """Set an attribute if it has the expected value; leave anything that somebody else has put there since."""
    if getattr(holder, name) is not now:
        return False
    setattr(holder, name, then)
    return True


def _facts(model: Any, *, compiles: bool) -> dict[str, Any]:
    import torch

    parameters = list(model.parameters())
    device = parameters[0].device
    lower = None
    if torch.is_autocast_enabled(device.type):
        lower = str(torch.get_autocast_dtype(device.type)).rpartition(".")[2]
    elif "_original_forward" in model.__dict__:
        lower = _of_accelerate()
    return {
        "kind": type(model).__name__,
        "device": device.type,
        "index": device.index,
        "autocast": lower,
        "dtype": str(parameters[0].dtype).rpartition(".")[2],
        "compiled": compiles,
        "images": any(p.dim() == 4 for p in parameters),
        "volumes": any(p.dim() == 5 for p in parameters),
        **{name: _is_laid_out(parameters, name) for name in DIMENSIONS},
        "parameters": sum(p.numel() for p in parameters),
    }


def _is_laid_out(parameters: Sequence[Any], memory_format: str) -> bool:
    """Return whether weights to which a memory format applies have it, and not the contiguous one."""
    layout = torch_format(memory_format)
    weights = (p for p in parameters if may_have_format(p, memory_format))
    return any(not p.is_contiguous() and p.is_contiguous(memory_format=layout) for p in weights)


def _of_accelerate() -> str | None:
    """Return the dtype of the autocast that accelerate has put into a forward pass; ``None`` without one."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    precision = getattr(state, "_shared_state", {}).get("_mixed_precision")
    return {"bf16": "bfloat16", "fp16": "float16"}.get(str(precision))


def _why_not(model: Any, told: dict[str, Any], *, compiles: bool) -> str | None:
    """Return why something cannot be set for a model, as a clause; ``None`` if it can.

    Args:
        compiles: whether the script has compiled something.
    """
    import torch

    kinds = [kind.__name__ for kind in type(model).__mro__]
    wrapper = next((kind for kind in kinds if kind in _WRAPPERS), None)
    parameters = list(model.parameters())
    if isinstance(model, torch.jit.ScriptModule):
        return "the model is a TorchScript module"
    if "autocast" in told:
        # Even if the plan is to use none. accelerate puts autocast into the forward pass, and keeps the original.
        if torch.is_autocast_enabled(parameters[0].device.type) or "_original_forward" in model.__dict__:
            return "the script uses autocast itself"
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
            return "not all weights are fp32"
        if wrapper == "DataParallel":
            return "autocast does not reach the threads of DataParallel"
        return None
    if "compile" in told and compiles:
        return "the script compiles itself"
    if told.get("memory_format") == "contiguous" and not all(p.is_contiguous() for p in parameters):
        return "the script lays out its weights itself"
    if told in ({"compile": None}, {"memory_format": "contiguous"}):
        return None
    dimensions = dimensions_of(told.get("memory_format", ""))
    if dimensions and not any(p.dim() == dimensions for p in parameters):
        return f"the model has no {dimensions}-dimensional weights"
    if wrapper is not None:
        return f"the model is inside {wrapper}"
    return cannot_lay_out(model, told["memory_format"]) if dimensions else None


def _compiled(model: Any, mode: str, rescue: Rescue | None, how: How | None) -> Callable[..., Any]:
    """Return a model's call compiled for training; calls without gradients stay uncompiled."""
    import torch

    # Some classes define a method of that name for something else.
    torch.nn.Module.compile(model, mode=mode)
    graphs = model._compiled_call_impl

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if how is None or how.lower is None or not how.outside.looks:
            return graphs(*args, **kwargs)
        with how.outside.call():
            return graphs(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_training(model):
            return model._call_impl(*args, **kwargs)
        if rescue is None:
            return compiled(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            back = rescue(error)
            if back is None:
                raise
        back()
        return model._call_impl(*args, **kwargs)

    return call
