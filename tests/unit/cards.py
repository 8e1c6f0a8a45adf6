"""Machines whose cards are made up."""

import pytest

from autotune.machine.gpu import Gpu, NvmlUnavailable
from autotune.search import request, subject


def card(index: int, **more: object) -> Gpu:
    facts = {"mig": False, "memory_bytes": 80 * 2**30, "power_limit_w": 700.0, "name": "a card", **more}
    return Gpu(index=index, uuid=f"GPU-{index}a", driver_version="580", **facts)  # type: ignore[arg-type]


def list_cards(patch: pytest.MonkeyPatch, cards: list[Gpu] | NvmlUnavailable) -> None:
    """Let the search see these."""
    for module in (request, subject):
        patch.setattr(module, "gpus", lambda: cards)


def make_machine(patch: pytest.MonkeyPatch) -> None:
    """Four equal cards and eight cores, all visible."""
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.delenv("CUDA_DEVICE_ORDER", raising=False)
    patch.setattr(request, "allowed_cores", lambda: frozenset(range(8)))
    list_cards(patch, [card(i) for i in range(4)])
