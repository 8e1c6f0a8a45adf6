"""The door of the process: threads, cuDNN, matrix products, host memory."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from autotune_agent import in_place
from autotune_agent.setting import Setting

_NAMES = ("threads", "cudnn_benchmark", "matmul_precision", "malloc")


class ProcessDoor:
    """Sets ``threads``, ``cudnn_benchmark``, ``matmul_precision`` and ``malloc``.

    Settings read from the environment were set before the process started, and need nothing here.
    """

    def __init__(self, settings: list[Setting]) -> None:
        self._settings = settings
        self._before: dict[str, Any] = {}
        #: The values before anything was set.
        self._found: dict[str, Any] = {}

    def install(self) -> None:
        """Set what is to be set, before the script does anything."""
        for setting in self._settings:
            if not setting.ask:
                self._found.update({name: _now(name) for name in setting.arguments})
                setting.try_to(partial(_set, setting.arguments))
        # Read only what is needed: some versions of PyTorch warn when a value is read.
        names = {name for setting in self._settings if setting.ask for name in setting.arguments}
        self._before = {name: _now(name) for name in names}

    def switch(self, told: dict[str, Any]) -> None:
        """Set the process to something else.

        Args:
            told: what is to be in force; anything else that was set before is put back to its original value.
        """
        before = dict(self._found)
        for name in told:
            self._found.setdefault(name, _now(name))
        # A value that PyTorch did not report stays as it is.
        originals = {name: value for name, value in self._found.items() if value is not None}
        reason = _set({**originals, **told})
        if reason is not None:
            # What was refused was not set, so nothing is to be put back later.
            self._found = before
            raise RuntimeError(reason)

    def own(self) -> dict[str, Any]:
        """Return what is in force."""
        return {name: _now(name) for name in _NAMES}

    def look_again(self) -> None:
        """Note settings that the script has changed before it began to train: it may have its reasons."""
        for setting in self._settings:
            if setting.ask:
                setting.try_to(partial(self._could, setting.arguments))
            elif setting.done and not all(_now(name) == value for name, value in setting.arguments.items()):
                setting.done = 0
                setting.refused = "the script sets it itself"

    def _could(self, told: dict[str, Any]) -> str | None:
        for name, value in told.items():
            if value != _now(name) != self._before[name]:
                return "the script sets it itself"
        return _why_not(told)


def _why_not(told: dict[str, Any]) -> str | None:
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    if "threads" in told and several:
        return "several processes share the cores"
    return in_place.cannot_set_malloc(told["malloc"]) if "malloc" in told else None


def _set(told: dict[str, Any]) -> str | None:
    import torch

    reason = _why_not(told)
    if reason is not None:
        return reason
    if "threads" in told:
        torch.set_num_threads(told["threads"])
    if "cudnn_benchmark" in told:
        torch.backends.cudnn.benchmark = told["cudnn_benchmark"]
    if "malloc" in told:
        in_place.set_malloc(told["malloc"])
    if "matmul_precision" in told:
        torch.set_float32_matmul_precision(told["matmul_precision"])
    return None


def _now(name: str) -> Any:
    """Return the value in force; ``None`` if PyTorch does not report it."""
    import torch

    if name == "malloc":
        return in_place.malloc_now()
    try:
        if name == "threads":
            return torch.get_num_threads()
        if name == "cudnn_benchmark":
            return torch.backends.cudnn.benchmark
        return torch.get_float32_matmul_precision()
    except (RuntimeError, Warning):
        # The precision was set per backend, which newer versions allow; reading it may raise a warning.
        return None
