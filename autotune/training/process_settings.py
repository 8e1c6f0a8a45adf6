"""Applies the knobs that act on the whole process, and undoes it. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from autotune.base.errors import UsageError
from autotune.base.records import Config
from autotune.knobs import Knob
from autotune.space import environment, settings


class ProcessSettings:
    """What `process` has set. It stays set, unless used in a ``with`` statement, at whose end it is undone."""

    def __init__(self, variables: Mapping[str, str | None], knobs: Sequence[tuple[Knob, Any]]) -> None:
        self._variables = variables
        self._knobs = knobs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Set everything back to what it was.

        The allocator of a process that has used the GPU keeps its settings, and CUDA's libraries keep those that they
        read from the environment when they were loaded.
        """
        for name, before in self._variables.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        for knob, state in reversed(self._knobs):
            knob.restore_process(state)


def process(config: Config) -> ProcessSettings:
    """Apply the knobs that act on the whole process: threads, allocators, cuDNN, TF32.

    Returns:
        An object that undoes it, which is also a context manager.

    Raises:
        UsageError: CUDA is already initialized, and a knob needs variables that are read during initialization.
    """
    variables = environment(config)
    if torch.cuda.is_initialized() and any(os.environ.get(name) != value for name, value in variables.items()):
        late = [knob.name for knob, value in settings(config) if knob.environment(value)]
        raise UsageError(
            f"{', '.join(late)} cannot be applied any more: CUDA is already initialized",
            advice="call process() before anything touches the GPU.",
        )
    before = ProcessSettings(
        {name: os.environ.get(name) for name in variables},
        [(knob, knob.read_process()) for knob, _ in settings(config)],
    )
    os.environ.update(variables)
    try:
        for knob, value in settings(config):
            knob.apply_process(value)
    except BaseException:
        before.restore()
        raise
    return before
