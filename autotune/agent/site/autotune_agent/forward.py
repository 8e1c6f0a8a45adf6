"""A forward pass of ours around a model's own: the layout of its inputs, autocast, and outputs in fp32."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial, wraps
from typing import Any

from autotune_agent.applying import channels_last, is_image
from autotune_agent.outside import Outside

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
