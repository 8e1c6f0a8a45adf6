"""Sees whether a loss is computed in lower precision outside of the models that run under autocast.

What a model returns is converted back to fp32. What it hands on in another way (a forward hook, an attribute, an object
that cannot be copied) is not, and the script would go on computing with it as it never has.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

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
