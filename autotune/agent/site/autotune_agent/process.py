"""The door of the process: threads, cuDNN, matrix products."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from autotune_agent.setting import Setting


class ProcessDoor:
    """Sets ``threads``, ``cudnn_benchmark`` and ``matmul_precision``.

    What is read from the environment was set before the process started, and needs nothing here.
    """

    def __init__(self, settings: list[Setting]) -> None:
        self._settings = settings

    def install(self) -> None:
        """Set what is to be set, before the script does anything."""
        for setting in self._settings:
            setting.try_to(partial(_set, setting.arguments))

    def look_again(self) -> None:
        """Note what the script has set to something else before it began to train: it may have its reasons."""
        for setting in self._settings:
            if setting.done and not all(_now(name) == value for name, value in setting.arguments.items()):
                setting.done = 0
                setting.refused = "the script sets it itself"


def _set(told: dict[str, Any]) -> str | None:
    import torch

    if "threads" in told:
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            return "several processes share the cores"
        torch.set_num_threads(told["threads"])
    if "cudnn_benchmark" in told:
        torch.backends.cudnn.benchmark = told["cudnn_benchmark"]
    if "matmul_precision" in told:
        torch.set_float32_matmul_precision(told["matmul_precision"])
    return None


def _now(name: str) -> Any:
    import torch

    if name == "threads":
        return torch.get_num_threads()
    if name == "cudnn_benchmark":
        return torch.backends.cudnn.benchmark
    return torch.get_float32_matmul_precision()
