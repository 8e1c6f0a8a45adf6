"""Whether batches come from workers in new shared memory each, or in *slots* that are used again.

PyTorch's workers put each batch into new shared memory: a worker touches its pages for the first time, and one thread
of the training's process maps them, touches them again and gives them back to the system. With ``slots``, a batch is
stacked into memory that an earlier batch has left (``autotune_agent/slots.py``); the slot is free again when the last
tensor of the batch is gone. Samples and their order are the same.

Helps: large batches whose samples are made quickly.

Hurts: each worker holds two or three batches more. Batches with shapes that vary mostly take PyTorch's way, and so does
everything made by a collate function other than PyTorch's. A training that itself puts a batch into shared memory while
it holds a NumPy view of it is not to use slots: the view would not move along.

Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from autotune.base.records import Config, Value
from autotune.knobs.knob import Door, Expected, Knob, Refusal, Scope

#: Slots of one worker, as in the agent's ``slots``, which needs torch and nothing of autotune.
MOST_SLOTS = 16


class BatchMemory(Knob):
    name = "batch_memory"
    about = "shared memory of batches"
    scope = Scope.LOADER
    place = 65
    values = ("fresh", "slots")
    default = "fresh"
    added = True
    needs = "num_workers"
    inactive = (
        Refusal("there is no anonymous shared memory here", lambda facts, value: not hasattr(os, "memfd_create")),
        Refusal("batches are made by a function of its own", lambda facts, value: facts.probe.own_collate),
    )
    expected = {"loader": {"slots": Expected(0.4, 0.6)}, "whole": {"slots": Expected(0.05, 0.15)}}

    def phrase(self, value: Value) -> str:
        return "batches in slots" if value == "slots" else "new memory for batches"

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]]:
        return "loader", {"batch_memory": str(value)}

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        return "fresh" if facts["loader"] else None


KNOB = BatchMemory()


def in_slots(config: Config) -> bool:
    """Return whether batches lie in slots under a configuration."""
    return config.get(KNOB.name) == "slots"
