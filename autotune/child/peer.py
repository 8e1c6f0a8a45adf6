"""What a rank does beside the first one: it trains as that one does, until it is ended."""

from __future__ import annotations

import time
from typing import NoReturn

import torch

from autotune.child.beats import MIN_GAP_S, Beats
from autotune.child.ceilings import resident_of
from autotune.child.loop import empty_queue
from autotune.child.measure import Measuring
from autotune.child.ranks import RankBoard
from autotune.base.clock import Clock
from autotune.training.feed import Feed, Source
from autotune.base.records import LaunchKind, Phase, TrialSpec
from autotune.training.step import Step


def follow(spec: TrialSpec, beats: Beats, clock: Clock, began: float, board: RankBoard) -> NoReturn:
    """Take part in a launch that another rank measures.

    Raises:
        Diverged: the first loss was not finite. What comes later the first rank sees, since gradients are averaged.
    """
    # The first rank watches all cards.
    launch = Measuring(spec, beats, clock, began, cards=False)
    source: Source = (feed := Feed(launch.loader))
    work: Step | None = None
    if spec.kind is LaunchKind.LOADER_ONLY:
        launch.wake()
    else:
        work = launch.build()
        work.exchanges = spec.exchanges
        if spec.kind is LaunchKind.DEVICE_ONLY:
            source = resident_of(launch, feed)
    launch.first_step(source.next(), work)
    if work is not None and spec.kind is LaunchKind.MEASURE:
        empty_queue(source, beats)
    _go_on(launch, source, work, board)


def _go_on(launch: Measuring, source: Source, work: Step | None, board: RankBoard) -> NoReturn:
    launch.beats.enter(Phase.MEASURE)
    began = noted = time.monotonic()
    waited_s = 0.0
    while True:
        delivery = source.next()
        waited_s += delivery.wait_s
        if work is not None:
            work(delivery.batch)
        now = time.monotonic()
        if now - noted >= MIN_GAP_S:
            if launch.device.type == "cuda":
                # It must not run far ahead of what the first rank waits for.
                torch.cuda.synchronize()
            noted = now
            memory = launch.memory
            board.note(
                launch.spec.rank,
                waited_s=waited_s,
                seconds=now - began,
                peak_bytes=memory.peak_bytes,
                reserved_bytes=memory.peak_reserved_bytes,
            )
