"""How a tool's own loop is told to compile, which is wrong with some of CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.base.errors import UsageError
from autotune.profile.export.format import Given, Told
from autotune.knobs.compile_mode import KNOB as COMPILE
from autotune.knobs.compile_mode import replays
from autotune.base.records import Value


def compiled(value: Value, given: Given, on: Mapping[str, Any] | str, off: Mapping[str, Any]) -> Told:
    """Return what tells a tool to compile, or not to.

    Args:
        on: options, or what the user does by hand.

    Raises:
        UsageError: the tool would accumulate gradients that CUDA graphs have overwritten.
    """
    if value == COMPILE.default:
        return Told(off)
    by_hand, options = (on, {}) if isinstance(on, str) else (None, on)
    if not replays(given.config):
        return Told(options, by_hand)
    if given.parts > 1:
        raise UsageError(
            f"{value} replays CUDA graphs, which overwrite the gradients that the tool would accumulate",
            advice=f"search again with --set {COMPILE.name}=off,default, or export with --format python.",
        )
    graphs = "replays CUDA graphs: clone what you keep of a step's outputs, and keep no gradients"
    return Told(options, f"{by_hand}; it {graphs}" if by_hand else graphs)
