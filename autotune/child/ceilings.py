"""The two limits of a configuration, each measured without the other: the device without a loader, the loader alone."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autotune.child.beats import Beats
from autotune.child.feed import Feed, Resident
from autotune.child.measure import Measuring
from autotune.clock import Clock
from autotune.records import Measurement, TrialSpec
from autotune.training import move, step_plan

#: Batches that stay on the device in turns, if they take no more than this fraction of its memory.
RESIDENT = 4
RESIDENT_FRACTION = 0.05


def device_only(spec: TrialSpec, beats: Beats, clock: Clock, began: float) -> Measurement:
    """The training under ``spec.config`` on batches that lie on the device already; no loader is there any more.

    Args:
        began: `clock` reading at the launch's begin; start-up is counted from it.

    Raises:
        Disturbed: others kept the machine so busy that no measurement was possible.
        Diverged: a loss was not finite.
    """
    launch = Measuring(spec, beats, clock, began)
    feed = Feed(launch.loader)
    step = launch.build()
    resident = Resident(_to_stay(launch, feed))
    feed.close()
    started = launch.first_step(resident.next(), step)
    return launch.measurement(launch.run(resident, step), started, turn_s=None)


def loader_only(spec: TrialSpec, beats: Beats, clock: Clock, began: float) -> Measurement:
    """The loader under ``spec.config``: its batches are taken as fast as they come, and dropped. No model is built.

    Args:
        began: `clock` reading at the launch's begin; start-up is counted from it.

    Raises:
        Disturbed: others kept the machine so busy that no measurement was possible.
    """
    # Who else is on the card, and how hot it is, is nothing to a loader.
    launch = Measuring(spec, beats, clock, began, card=False)
    feed = Feed(launch.loader)
    launch.wake()
    started = launch.first_step(feed.next(), None)
    loop = launch.run(feed, None)
    return launch.measurement(loop, started, turn_s=median(feed.turns_s) if feed.turns_s else None)


def _to_stay(launch: Measuring, feed: Feed) -> list[Any]:
    """A few batches on the device, at least one."""
    channels_last = step_plan(launch.spec.config).channels_last
    room = RESIDENT_FRACTION * launch.memory.capacity_bytes
    batches: list[Any] = []
    for _ in range(min(RESIDENT, len(launch.loader))):
        batch = feed.next().batch
        batches.append(move(batch, launch.device, non_blocking=False, channels_last=channels_last))
        room -= _bytes_of(batch)
        if room < _bytes_of(batch):
            break
    return batches


def _bytes_of(batch: Any) -> int:
    """What a batch's tensors take, as far as they lie in tuples, lists and dicts."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
