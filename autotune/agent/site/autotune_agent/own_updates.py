"""Trainings that update their weights themselves, without an optimizer of torch.optim."""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

from autotune_agent.facts import is_capturing
from autotune_agent.setting import safely

#: Parameters that are looked at, the nearest to the loss, and elements of each.
_PROBES, _ELEMENTS = 8, 64
#: Nodes of a graph in which parameters are looked for.
_NODES = 20_000
#: Between so many changes in a row there must have been equally many backward passes.
_CHANGES = 4
#: Passes that are looked at before it is given up.
_LOOKS = 1000
#: An optimizer of torch.optim may take its first step later: seconds to wait for it, and if there is such an optimizer.
_WAIT_S, _LONG_WAIT_S = 2.0, 30.0
#: If gradients have been computed so often and for so long, and no step was seen, that is told; of a model that is only
#: called, later.
_UNSEEN_AFTER, _UNSEEN_S, _CALLED_S = 20, 12.0, 30.0


class OwnCode:
    """Stands for a script's own code that updates its weights, where an optimizer is asked for.

    Args:
        device: of the weights.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.defaults: dict[str, Any] = {}
        self.state: dict[Any, Any] = {}
        self.param_groups: list[dict[str, Any]] = [{"params": [torch.empty(0, device=device)]}]


class OwnUpdates:
    """Sees that weights change from one backward pass to another although no optimizer of torch.optim takes steps. If
    they do so after every so many passes, the end of the first of these passes is where steps are told apart.

    All looks end with the first step of an optimizer of torch.optim. Values are compared only until it is known after
    how many passes they change: each look waits for the device.

    Args:
        begin: notes that this process trains; returns whether the agent is for it.
        adopt: called once, with what stands for the script's code, and facts about it.
        stepped: called for each step from then on.
        unseen: called once, with how the script trains, if it does so without a step that can be seen.
    """

    def __init__(
        self,
        begin: Callable[[], bool],
        adopt: Callable[[Any, dict[str, Any]], None],
        stepped: Callable[[Any], None],
        unseen: Callable[[str], None],
    ) -> None:
        self._begin, self._adopt, self._stepped, self._unseen = begin, adopt, stepped, unseen
        self._looking = False
        self._code: OwnCode | None = None
        self._facts: dict[str, Any] = {}
        self._probes: list[Any] = []
        self._values: list[Any] = []
        #: Backward passes since weights have changed, and how many there were between changes.
        self._since = 0
        self._gaps: deque[int] = deque(maxlen=_CHANGES)
        self._changes = 0
        #: Weights change after so many passes.
        self._per: int | None = None
        #: Passes, gradients that were asked for otherwise, calls of models; and when the first of them was.
        self._passes = self._gradients = self._calls = 0
        self._first_s: float | None = None
        self._wait_s: float | None = None
        self._told = False
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Look at backward passes. ``import torch`` has just ended."""
        import torch

        theirs, gradients = torch.autograd.backward, torch.autograd.grad

        @wraps(theirs)
        def backward(*args: Any, **kwargs: Any) -> Any:
            # In a pass, parts of a model are computed again (activation checkpointing).
            if torch.compiler.is_compiling() or not self._looking or torch._C._current_graph_task_id() != -1:
                return theirs(*args, **kwargs)
            safely(self._before, args[0] if args else kwargs.get("tensors"))
            theirs(*args, **kwargs)
            safely(self._after)
            return None

        @wraps(gradients)
        def grad(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._looking:
                self._gradients += 1
                safely(self._look_out)
            return gradients(*args, **kwargs)

        def restore() -> None:
            for name, ours, own in (("backward", backward, theirs), ("grad", grad, gradients)):
                if getattr(torch.autograd, name) is ours:
                    setattr(torch.autograd, name, own)

        self._looking = True
        torch.autograd.backward, torch.autograd.grad = backward, grad
        self._undo.append(restore)

    def stop(self) -> None:
        """Look no longer: an optimizer of torch.optim takes the steps."""
        if self._looking:
            self._looking = False
            self._probes, self._values = [], []
            self._undo.pop()()

    def called(self) -> None:
        """Note that a model was called to train it."""
        if self._looking and self._code is None:
            self._calls += 1
            self._look_out()

    def _before(self, tensors: Any) -> None:
        if self._code is not None or is_capturing() or not self._begin():
            return
        self._passes += 1
        if self._per is None and self._passes <= _LOOKS:
            self._compare(tensors)
        self._look_out()

    def _compare(self, tensors: Any) -> None:
        """Note whether weights have changed since the last pass began."""
        held = self._held() or self._find(tensors)
        now = [parameter.detach().flatten()[:_ELEMENTS].clone() for parameter in held]
        changed = len(now) == len(self._values) and any(bool((a != b).any()) for a, b in zip(now, self._values))  # noqa: B905
        self._values = now
        self._since += 1
        if not changed:
            return
        self._changes += 1
        if self._changes > 1:
            # What came before the first change is not known.
            self._gaps.append(self._since)
        self._since = 0
        if len(self._gaps) == _CHANGES and len(set(self._gaps)) == 1:
            self._per = self._gaps[0]
            self._values = []

    def _held(self) -> list[Any]:
        """Return the parameters that are looked at, as far as they are still there."""
        return [parameter for parameter in (probe() for probe in self._probes) if parameter is not None]

    def _find(self, tensors: Any) -> list[Any]:
        """Return the parameters nearest to a loss, and keep in mind what was found."""
        import torch

        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors or ())
        leaves = _leaves([tensor.grad_fn for tensor in roots])
        # An input that gradients are asked for (adversarial training) is no weight.
        leaves = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)] or leaves
        found = leaves[:_PROBES]
        self._probes = [weakref.ref(leaf) for leaf in found]
        if leaves:
            parameters = sum(leaf.numel() for leaf in leaves)
            self._facts = {"kind": "its own", "device": leaves[0].device.type, "parameters": parameters}
        return found

    def _after(self) -> None:
        if self._code is not None:
            self._since += 1
        elif self._per is not None and self._has_waited():
            self._code = OwnCode(next((parameter.device for parameter in self._held()), "cpu"))
            self._since = self._per
            self._adopt(self._code, self._facts)
        if self._code is not None and self._since >= (self._per or 1):
            self._since = 0
            self._stepped(self._code)

    def _has_waited(self) -> bool:
        """Whether an optimizer of torch.optim would have taken a step by now."""
        if self._wait_s is None:
            import torch

            # `isinstance` would ask objects for their class, which some answer with a warning.
            there = any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects())
            self._wait_s = _LONG_WAIT_S if there else _WAIT_S
        return time.monotonic() - (self._first_s or 0.0) > self._wait_s

    def _look_out(self) -> None:
        """Tell that the script trains without steps, once that is plain."""
        now = time.monotonic()
        self._first_s = now if self._first_s is None else self._first_s
        times = max(self._passes, self._gradients)
        if self._told or self._code is not None or now - self._first_s < _UNSEEN_S:
            return
        if max(times, self._calls) < _UNSEEN_AFTER or (not times and now - self._first_s < _CALLED_S):
            return
        # Where weights do not change, gradients may be added up for a step to come, for any time.
        if self._passes and not self._changes:
            return
        if self._per is not None and (self._wait_s or 0.0) > now - self._first_s:
            return
        self._told = True
        if self._changes:
            self._unseen("its weights change, but not after equally many backward passes")
        else:
            self._unseen("it calls no backward()" if self._gradients else "it asks for no gradients")


def _leaves(nodes: list[Any]) -> list[Any]:
    """Return the tensors whose gradients a graph adds up, the nearest first."""
    todo = deque(node for node in nodes if node is not None)
    seen = set(todo)
    found = []
    while todo and len(seen) < _NODES:
        node = todo.popleft()
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
    return found
