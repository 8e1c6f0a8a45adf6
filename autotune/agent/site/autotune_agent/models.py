"""The door of the models: the call of an outermost module that is being trained."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
import weakref
from collections.abc import Callable, MutableMapping
from functools import partial, wraps
from typing import Any

from autotune_agent.setting import Setting, safely

#: What spreads a model over devices or processes, and has copied or reordered its parameters.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
#: Marks a forward pass of ours, and holds the one that the instance had before.
_OURS = "_autotune_before"


class ModelDoor:
    """Sets ``memory_format``, ``autocast`` and ``compile`` of models, in place, before they are first trained.

    The outermost module that is called with gradients on, in training mode, and has parameters to train, is a model.
    There may be several (the two of a GAN). Looking for them stops when `remove` is called.

    Args:
        begin: notes that this process trains; returns whether the agent is for it.
    """

    def __init__(self, settings: list[Setting], begin: Callable[[], bool]) -> None:
        self._settings = settings
        self._begin = begin
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Facts of the model that was seen first.
        self.own: dict[str, Any] = {}
        self._looking = False
        self._compiles = False
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
        _leave_out_of_copies(base)

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

    def _apply(self, model: Any, told: dict[str, Any]) -> None:
        channels_last = told.get("memory_format") == "channels_last"
        if channels_last:
            _lay_out(model)
        if told.get("autocast") is not None or channels_last:
            _wrap_forward(model, told.get("autocast"), channels_last=channels_last)
        if told.get("compile") is not None:
            self._compiling = True
            try:
                _compile(model, told["compile"])
            finally:
                self._compiling = False


def _is_model(module: Any) -> bool:
    import torch
    from torch.nn.parameter import is_lazy

    if not module.training or torch._C._current_graph_task_id() != -1:
        # In a backward pass, a part of a model is computed again (activation checkpointing).
        return False
    parameters = list(module.parameters())
    return any(p.requires_grad for p in parameters) and not any(map(is_lazy, parameters))


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
        "channels_last": any(
            p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
            for p in parameters
        ),
        "parameters": sum(p.numel() for p in parameters),
    }


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
    if told.get("memory_format") == "channels_last" and not any(p.dim() == 4 for p in parameters):
        return "the model has no 4-dimensional weights"
    return None if wrapper is None else f"the model is inside {wrapper}"


def _lay_out(model: Any) -> None:
    """Lay out 4-dimensional weights, their gradients, and buffers with channels last.

    `Module.to` would also ask it of 5-dimensional ones, which cannot have it.
    """
    import torch

    with torch.no_grad():
        for held in (*model.parameters(), *model.buffers()):
            for tensor in (held, held.grad):
                if tensor is not None and tensor.dim() == 4:
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def _wrap_forward(model: Any, dtype: str | None, *, channels_last: bool) -> None:
    """Convert inputs to channels last, and run the forward pass of a training under autocast, with outputs in fp32.

    As accelerate does. An evaluation keeps the script's own precision.
    """
    import torch

    lower = None if dtype is None else getattr(torch, dtype)
    kind = type(model).forward
    # An instance may have a forward of its own, which a library has put there.
    own = model.__dict__.get("forward")

    @wraps(kind)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if channels_last:
            args, kwargs = _each(args, _channels_last), _each(kwargs, _channels_last)
        run: Callable[..., Any] = partial(kind, self) if own is None else own
        if lower is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        # Without the cache of cast weights, in which one that was first used without gradients would have none.
        with torch.autocast(next(self.parameters()).device.type, dtype=lower, cache_enabled=False):
            outputs = run(*args, **kwargs)
        return _each(outputs, _full)

    setattr(forward, _OURS, own)
    model.forward = types.MethodType(forward, model)


def _leave_out_of_copies(base: Any) -> None:
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


def _compile(model: Any, mode: str) -> None:
    """Compile a model in place for training; what runs without gradients stays as it is."""
    import torch

    # Some classes have a method of that name for something else.
    torch.nn.Module.compile(model, mode=mode)
    compiled = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if torch.is_grad_enabled() else model._call_impl(*args, **kwargs)

    model._compiled_call_impl = call


def _channels_last(tensor: Any) -> Any:
    import torch

    if tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _full(tensor: Any) -> Any:
    import torch

    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _each(held: Any, change: Callable[[Any], Any]) -> Any:
    """Return what holds tensors, with each of them changed; itself if none is."""
    import torch

    if isinstance(held, torch.Tensor):
        return change(held)
    if isinstance(held, MutableMapping):
        new = {name: _each(held[name], change) for name in held.keys()}  # noqa: SIM118
        if all(new[name] is held[name] for name in new):
            return held
        # The model outputs of Hugging Face are mappings and dataclasses; a copy keeps their type.
        found = copy.copy(held)
        for name, value in new.items():
            found[name] = value
        return found
    if type(held) in (tuple, list) or (isinstance(held, tuple) and hasattr(held, "_fields")):
        parts = [_each(part, change) for part in held]
        if all(part is before for part, before in zip(parts, held)):  # noqa: B905
            return held
        return type(held)(*parts) if hasattr(held, "_fields") else type(held)(parts)
    if dataclasses.is_dataclass(held) and not isinstance(held, type):
        fields = {f.name: _each(getattr(held, f.name), change) for f in dataclasses.fields(held)}
        if all(value is getattr(held, name) for name, value in fields.items()):
            return held
        copied: Any = copy.copy(held)
        for name, value in fields.items():
            object.__setattr__(copied, name, value)
        return copied
    return held
