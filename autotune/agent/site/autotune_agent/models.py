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

from autotune_agent.applying import (
    DIMENSIONS,
    cannot_lay_out,
    channels_last,
    dimensions_of,
    is_image,
    lay_out,
    may_have_format,
    torch_format,
)
from autotune_agent.facts import is_capturing
from autotune_agent.setting import Setting, safely

# Sees whether a loss is computed in lower precision outside of the models that run under autocast.
#
# What a model returns is converted back to fp32. What it hands on in another way (a forward hook, an attribute, an
# object that cannot be copied) is not, and the script would go on computing with it as it never has.

#: Backward passes under autocast that are looked at: those of all losses of the first step or two.
LOOKS = 8
#: Calls of models, and operations of a loss, beyond which nothing is said.
_MOST_CALLS, _MOST_NODES = 2000, 20_000


class Outside:
    """Looks at the graphs of the first losses. PyTorch numbers the operations of a thread, so those that a model has
    made itself are told by their numbers.

    Attributes:
        looks: that are left.
    """

    def __init__(self) -> None:
        self.looks = LOOKS
        #: Numbers of the operations in each call of a model under autocast: first, and one after the last.
        self._calls: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """What is computed in this context, a model computes under autocast."""
        first = _next_number() if self.looks else None
        yield
        last = None if first is None else _next_number()
        if first is not None and last is not None and len(self._calls) < _MOST_CALLS:
            self._calls.append((first, last))
        else:
            # Of calls that are not known, operations would look like those of a loss.
            self.end()

    def end(self) -> None:
        """Look no longer."""
        self.looks = 0
        self._calls = []

    def found(self, losses: Any) -> str | None:
        """Return why autocast is not for this training, as a clause; ``None`` if nothing tells.

        Args:
            losses: that a backward pass begins at: a tensor, or several.
        """
        import torch

        if not self.looks or not self._calls:
            return None
        calls = sorted(self._calls)
        firsts = [first for first, _ in calls]
        begin = [losses] if isinstance(losses, torch.Tensor) else list(losses)
        todo = [loss.grad_fn for loss in begin if isinstance(loss, torch.Tensor) and loss.grad_fn is not None]
        # They are held, so that none of them takes the place of another.
        seen = set(todo)
        while todo and len(seen) < _MOST_NODES:
            node = todo.pop()
            place = bisect_right(firsts, node._sequence_nr()) - 1
            if place >= 0 and node._sequence_nr() < calls[place][1]:
                continue
            for made in getattr(node, "_input_metadata", ()):
                dtype = getattr(made, "dtype", None)
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


# A forward pass of ours around a model's own: the layout of its inputs, autocast, and outputs in fp32.

#: Objects in the outputs of a model that are looked into.
_MOST_OBJECTS = 200
#: What holds no tensors that a loss would take from there.
_CLOSED = (type(None), str, bytes, int, float, complex, type, types.ModuleType)
#: See `How`.
Rescue = Callable[[Exception], "Callable[[], None] | None"]
#: Marks a forward pass of ours, and holds the one that the instance had before.
_OURS = "_autotune_before"


@dataclasses.dataclass
class How:
    """How a model computes while it trains. May be changed between two steps.

    Attributes:
        outside: sees what becomes of what is computed under autocast.
        lower: the dtype of autocast; ``None`` for none.
        channels_last: dimensions of the inputs that get their channels last; 0 for none.
        rescue: told what a forward pass raises; returns what lets the model compute in another way, so that it is worth
            another try, or ``None``.
    """

    outside: Outside
    lower: Any = None
    channels_last: int = 0
    rescue: Rescue | None = None


def wrap_forward(model: Any, how: How) -> None:
    """Convert inputs to channels last, and run the forward pass of a training under autocast, with outputs in fp32.

    As accelerate does. An evaluation keeps the script's own precision.
    """
    import torch

    kind = type(model).forward
    # An instance may have a forward of its own, which a library has put there.
    own = model.__dict__.get("forward")

    def compute(self: Any, args: Any, kwargs: Any) -> Any:
        if how.channels_last:
            last = partial(_channels_last, dimensions=how.channels_last)
            args, kwargs = _each(args, last), _each(kwargs, last)
        run: Callable[..., Any] = partial(kind, self) if own is None else own
        lower = how.lower
        if lower is None or not is_training(self):
            return run(*args, **kwargs)
        weight = next(self.parameters())
        if weight.dtype is not torch.float32 or torch.is_autocast_enabled(weight.device.type):
            # The script does so itself now, although it did not when the model was first called.
            return run(*args, **kwargs)
        # Without the cache of cast weights, in which one that was first used without gradients would have none.
        with torch.autocast(weight.device.type, dtype=lower, cache_enabled=False):
            outputs = run(*args, **kwargs)
        # A compiler that looks inside is to see nothing that it cannot follow.
        return _each(outputs, _full, None if torch.compiler.is_compiling() else {})

    def watched(self: Any, args: Any, kwargs: Any) -> Any:
        if how.lower is None or not how.outside.looks:
            return compute(self, args, kwargs)
        with how.outside.call():
            return compute(self, args, kwargs)

    @wraps(kind)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What a compiler looks at is as simple as can be; `ModelDoor` sees what compiled code raises.
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

    setattr(forward, _OURS, own)
    model.forward = types.MethodType(forward, model)


def is_training(model: Any) -> bool:
    """Return whether a call of a model is one of its training. Exports and evaluations are the script's own."""
    import torch

    if not model.training or not torch.is_grad_enabled():
        return False
    return not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def leave_out_of_copies(base: Any) -> None:
    """Let copies and pickles of models have the forward pass that they would have without us."""
    theirs = base.__getstate__

    def getstate(module: Any) -> Any:
        state = theirs(module)
        made = getattr(state.get("forward"), "__func__", None) if isinstance(state, dict) else None
        if hasattr(made, _OURS):
            own = getattr(made, _OURS)
            if own is None:
                del state["forward"]
            else:
                state["forward"] = own
        return state

    base.__getstate__ = getstate


def leave_out_of_scripts() -> None:
    """Let TorchScript compile the forward passes that models would have without us: it reads their source, and looks
    for the names in it where the function is from."""
    import torch

    theirs = torch.jit.script

    @wraps(theirs)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, torch.nn.Module):
            if not args:
                # Of a class, the names are looked for in the frame that calls.
                kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
            return theirs(obj, *args, **kwargs)
        held: list[tuple[Any, Any]] = [(module, module.__dict__.get("forward")) for module in obj.modules()]
        ours = [(module, made) for module, made in held if hasattr(getattr(made, "__func__", None), _OURS)]
        for module, made in ours:
            own = getattr(made, _OURS)
            if own is None:
                del module.forward
            else:
                module.forward = own
        try:
            return theirs(obj, *args, **kwargs)
        finally:
            for module, made in ours:
                module.forward = made

    torch.jit.script = script


def _channels_last(tensor: Any, dimensions: int) -> Any:
    return channels_last(tensor, dimensions) if is_image(tensor, dimensions) else tensor


def _full(tensor: Any) -> Any:
    import torch

    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _each(held: Any, change: Callable[[Any], Any], known: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return what holds tensors, with each of them changed; itself if none is. What holds one is copied.

    Args:
        known: to look into objects of any class, too: those that have been looked into by their ids, each held, and
            what has become of it.
    """
    import torch

    if isinstance(held, torch.Tensor):
        return change(held)
    if isinstance(held, MutableMapping):
        new = {name: _each(held[name], change, known) for name in held.keys()}  # noqa: SIM118
        if all(new[name] is held[name] for name in new):
            return held
        # The model outputs of Hugging Face are mappings and dataclasses; a copy keeps their type.
        found = copy.copy(held)
        for name, value in new.items():
            found[name] = value
        return found
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
        # What cannot be copied stays as it is; `Outside` sees whether it matters.
        with contextlib.suppress(Exception):
            known[id(held)] = held, _with_attributes(held, _attributes(held), change, known)
    return known[id(held)][1]


def _attributes(held: Any) -> list[str]:
    """Return the names of what an object holds."""
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(held).__mro__]
    listed = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    return [*getattr(held, "__dict__", ()), *(name for name in listed if not name.startswith("__"))]


def _with_attributes(
    held: Any, names: Sequence[str], change: Callable[[Any], Any], known: dict[int, tuple[Any, Any]] | None
) -> Any:
    own = {name: getattr(held, name) for name in names if hasattr(held, name)}
    new = {name: _each(value, change, known) for name, value in own.items()}
    if all(value is own[name] for name, value in new.items()):
        return held
    copied: Any = copy.copy(held)
    for name, value in new.items():
        if value is not own[name]:
            object.__setattr__(copied, name, value)
    return copied


# The door of the models: the call of an outermost module that is being trained.

#: What spreads a model over devices or processes, and has copied or reordered its parameters.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
#: What a model is like that nothing has been set for.
_UNSET: Mapping[str, Any] = {"memory_format": "contiguous", "autocast": None, "compile": None}
#: Graphs of one model that torch keeps while it is switched. Beyond its usual eight it would silently not compile.
_GRAPHS = 64


class ModelDoor:
    """Sets ``memory_format``, ``autocast`` and ``compile`` of models, in place, before they are first trained.

    The outermost module that is called with gradients on, in training mode, and has parameters to train, is a model.
    There may be several (the two of a GAN). Looking for them stops when `remove` is called.

    Args:
        begin: notes that this process trains; returns whether the agent is for it.
        to_switch: models will be switched to other settings later.
        rescue: as `How.rescue`.
        lowered: told why a training under autocast computes otherwise than it should (see `Outside`); what it raises is
            raised by the backward pass.
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
        #: What is in force for each model, by the names of `_UNSET`, and how its forward pass is told.
        self._told: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._hows: weakref.WeakKeyDictionary[Any, How] = weakref.WeakKeyDictionary()
        #: Compiled calls of each model, by mode.
        self._made: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        #: Facts of the model that was seen first.
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
        theirs = base.__call__

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            # A compiler that looks inside sees the call of a module as it is.
            if torch.compiler.is_compiling() or not self._looking or not torch.is_grad_enabled():
                return theirs(module, *args, **kwargs)
            self._captured = self._captured or is_capturing()
            if not safely(self._is_ours, module):
                return theirs(module, *args, **kwargs)
            # What a model calls is none of ours: it is not slower, and a compiler that looks inside sees nothing of us.
            _swap(base, "__call__", call, theirs)
            try:
                if module not in self._known:
                    self._known.add(module)
                    safely(self._set, module)
                return theirs(module, *args, **kwargs)
            finally:
                if self._looking:
                    _swap(base, "__call__", theirs, call)

        self._looking = True
        base.__call__ = call
        self._undo.append(lambda: _swap(base, "__call__", call, theirs))
        self._watch_compilers(base, call, theirs)
        if self._lowered is not None and (self._to_switch or any(s.arguments.get("autocast") for s in self._settings)):
            self._watch_losses(self._lowered)
        leave_out_of_copies(base)
        leave_out_of_scripts()

    def _is_ours(self, module: Any) -> bool:
        return _is_model(module) and self._begin()

    def remove(self) -> None:
        """Let calls be what they were."""
        self._looking = False
        while self._undo:
            self._undo.pop()()

    def _watch_compilers(self, base: Any, call: Any, theirs: Any) -> None:
        """Note when the script compiles something, and let it see the call of a module as it is."""
        import torch

        compile_ = torch.compile

        @wraps(compile_)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            if not self._looking:
                return compile_(*args, **kwargs)
            self._compiles = self._compiles or not self._compiling
            swapped = _swap(base, "__call__", call, theirs)
            try:
                return compile_(*args, **kwargs)
            finally:
                if swapped:
                    _swap(base, "__call__", theirs, call)

        torch.compile = compiling
        self._undo.append(lambda: _swap(torch, "compile", compiling, compile_))

    def _watch_losses(self, lowered: Callable[[str], None]) -> None:
        """Look at what the first backward passes begin at."""
        import torch

        theirs = torch.autograd.backward

        @wraps(theirs)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._outside.looks:
                why = safely(self._outside.found, tensors)
                if why is not None:
                    lowered(why)
            elif not self._to_switch:
                _swap(torch.autograd, "backward", backward, theirs)
            theirs(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def _set(self, model: Any) -> None:
        self.own = self.own or _facts(model, compiles=self._compiles)
        wanted: list[Setting] = []
        told: dict[str, Any] = {}

        def want(setting: Setting) -> str | None:
            reason = _why_not(model, setting.arguments, compiles=self._compiles)
            if reason is None and not setting.ask:
                wanted.append(setting)
                told.update(setting.arguments)
            return reason

        for setting in self._settings:
            setting.try_to(partial(want, setting))
        try:
            self._apply(model, told)
        except Exception as error:
            # The training goes on without.
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
        """Models will be switched no longer, but for back to what the script does itself."""
        self._to_switch = False
        self._made.clear()
        if not any(how.lower for how in self._hows.values()):
            self._outside.end()

    def _apply(self, model: Any, told: Mapping[str, Any]) -> None:
        import torch

        before = self._told.setdefault(model, dict(_UNSET))
        changed = {name: value for name, value in told.items() if before[name] != value}
        if "memory_format" in changed:
            # The script may have put its weights elsewhere since it was asked.
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
        # What is made holds on to the model, so it is kept no longer than it is switched.
        made = self._made.setdefault(model, {}) if self._to_switch else {}
        if mode is not None and mode not in made:
            self._compiling = True
            try:
                made[mode] = _compiled(model, mode, self._rescue, self._hows.get(model))
            finally:
                self._compiling = False
        model._compiled_call_impl = None if mode is None else made[mode]


def _keep_graphs() -> None:
    """Let torch keep a graph for each setting that a compiled model is switched to, the script's own model included."""
    import torch

    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(torch._dynamo.config, name, max(_GRAPHS, getattr(torch._dynamo.config, name)))


def _is_model(module: Any) -> bool:
    import torch
    from torch.nn.parameter import is_lazy

    if not module.training or torch._C._current_graph_task_id() != -1:
        # In a backward pass, a part of a model is computed again (activation checkpointing).
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    parameters = list(module.parameters())
    # Without data, a model is only looked at: its operations are counted, or its shapes.
    return any(p.requires_grad for p in parameters) and not any(is_lazy(p) or p.is_meta for p in parameters)


def _swap(holder: Any, name: str, now: Any, then: Any) -> bool:
    """Set an attribute if it is what we expect. What somebody else has put there since then stays."""
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
    """Return whether weights that a memory format is for have it, and no other one."""
    layout = torch_format(memory_format)
    own = (p for p in parameters if may_have_format(p, memory_format))
    return any(not p.is_contiguous() and p.is_contiguous(memory_format=layout) for p in own)


def _of_accelerate() -> str | None:
    """Return the dtype of the autocast that accelerate has put into a forward pass; ``None`` if it has not."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    precision = getattr(state, "_shared_state", {}).get("_mixed_precision")
    return {"bf16": "bfloat16", "fp16": "float16"}.get(str(precision))


def _why_not(model: Any, told: dict[str, Any], *, compiles: bool) -> str | None:
    """Return why something cannot be set for a model, as a clause; ``None`` if it can.

    Args:
        compiles: the script has compiled something.
    """
    import torch

    kinds = [kind.__name__ for kind in type(model).__mro__]
    wrapper = next((kind for kind in kinds if kind in _WRAPPERS), None)
    parameters = list(model.parameters())
    if isinstance(model, torch.jit.ScriptModule):
        return "the model is a TorchScript module"
    if "autocast" in told:
        # Also where the plan is to use none. accelerate puts autocast into the forward pass, and keeps the old one.
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
    """Return the call of a model compiled for training; what runs without gradients stays as it is."""
    import torch

    # Some classes have a method of that name for something else.
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
