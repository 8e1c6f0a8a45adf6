"""The upper bounds of a configuration, measured separately: the device without a loader, and the loader alone."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autotune.training.batches import move
from autotune.child.beats import Beats
from autotune.child.measure import Measuring
from autotune.base.clock import Clock
from autotune.training.feed import Feed, Resident
from autotune.base.records import Measurement, TrialSpec
from autotune.training.step import step_plan

#: Number of batches kept on the device, as long as they fit in this fraction of its memory.
RESIDENT = 4
RESIDENT_FRACTION = 0.05


def device_only(spec: TrialSpec, beats: Beats, clock: Clock, began: float) -> Measurement:
    """Train under ``spec.config`` on batches that are already on the device. The loader is closed before measuring.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        Disturbed: other processes kept the machine too busy to measure.
        Diverged: a loss was not finite.
    """
    launch = Measuring(spec, beats, clock, began)
    feed = Feed(launch.loader)
    step = launch.build()
    step.exchanges = spec.exchanges
    resident = resident_of(launch, feed)
    started = launch.first_step(resident.next(), step)
    return launch.measurement(launch.run(resident, step), started, turn_s=None)


def loader_only(spec: TrialSpec, beats: Beats, clock: Clock, began: float) -> Measurement:
    """Run the loader under ``spec.config`` as fast as it goes and discard its batches. No model is built.

    Args:
        began: `clock` reading at the start of the launch; start-up time is counted from it.

    Raises:
        Disturbed: other processes kept the machine too busy to measure.
    """
    # Other processes on the card and its temperature do not affect a loader.
    launch = Measuring(spec, beats, clock, began, cards=False)
    feed = Feed(launch.loader)
    launch.wake()
    started = launch.first_step(feed.next(), None)
    loop = launch.run(feed, None)
    turn_s = median(feed.turns_s) if feed.turns_s else None
    return launch.measurement(loop, started, turn_s, feed.epoch_batches)


def resident_of(launch: Measuring, feed: Feed) -> Resident:
    """Copy a few batches, at least one, to the device, and close the loader."""
    resident = Resident(_to_stay(launch, feed))
    feed.close()
    return resident


def _to_stay(launch: Measuring, feed: Feed) -> list[Any]:
    channels_last = step_plan(launch.spec.config).channels_last
    room = RESIDENT_FRACTION * launch.memory.capacity_bytes
    batches: list[Any] = []
    for _ in range(min(RESIDENT, feed.epoch_batches or RESIDENT)):
        batch = feed.next().batch
        batches.append(move(batch, launch.device, non_blocking=False, channels_last=channels_last))
        room -= _bytes_of(batch)
        if room < _bytes_of(batch):
            break
    return batches


def _bytes_of(batch: Any) -> int:
    """Return the size of all tensors in a batch, including those nested in tuples, lists and dicts."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
