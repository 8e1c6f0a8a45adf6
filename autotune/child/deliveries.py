"""What the loaders of a training deliver, as the agent notes it (see `autotune_agent.deliveries`): of a script while it
trains, and of a workload without a training."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune import stats
from autotune.launcher import entering
from autotune.child.beats import Beats
from autotune.child.launch import Launch
from autotune.knobs import KNOBS, answer_to
from autotune.knobs.knob import OTHERS
from autotune.knobs.num_workers import WORKERS
from autotune.knobs.persistent_workers import KNOB as PERSISTENT_WORKERS
from autotune.base.layout import LaunchFiles
from autotune.base.records import (
    Config,
    Deliveries,
    DeliveryPlan,
    Phase,
    TrainCheck,
    TrialSpec,
    deliveries_of,
)
from autotune.training.step import open_loader

PERSISTENT = PERSISTENT_WORKERS.name
#: In the middle of an epoch, this many times as long is waited for the next batch as between two.
_IDLE = 2.0


def told_deliveries(plan: DeliveryPlan, files: LaunchFiles) -> dict[str, Any]:
    """Return what the agent is told of a plan. What an attempt before has noted is removed."""
    files.deliveries.unlink(missing_ok=True)
    return {
        "path": str(files.deliveries),
        "seed": plan.seed,
        "batches": [plan.least, plan.most],
        "limit_s": plan.limit_s,
        "second": plan.second,
        "totals": list(plan.totals),
        "epochs": plan.epochs,
    }


class DeliveryLog:
    """Reads what the agent notes, while it does.

    Args:
        plan: ``None`` if nothing is noted.
    """

    def __init__(self, plan: DeliveryPlan | None, files: LaunchFiles) -> None:
        self._plan = plan
        self._path = files.deliveries
        self._events: list[dict[str, Any]] = []
        self._at = 0
        self._ended_at: float | None = None
        self._newest_at = 0.0

    def is_over(self) -> bool:
        """Read what is new; return whether nothing more is to be waited for."""
        if self._plan is None:
            return True
        for event in self._new():
            self._events.append(event)
            self._newest_at = time.monotonic()
            if event["e"] == "end":
                self._ended_at = time.monotonic()
            elif event["e"] == "epoch":
                self._ended_at = None
            elif event["e"] in ("done", "lost"):
                return True
        if self._events and self._events[-1]["e"] in ("done", "lost"):
            return True
        now = time.monotonic()
        if self._ended_at is None:
            # It may go on with a batch that it has, or has noted all.
            return bool(self._events) and now - self._newest_at > _IDLE * self._plan.wait_s
        # Between two epochs a script may do anything, for as long as it likes.
        return now - self._ended_at > self._plan.wait_s

    def _new(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._at)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._at += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def has_begun(self) -> bool:
        """Whether a loader of the training has been iterated over."""
        return bool(self._events)

    @property
    def has_ended_early(self) -> bool:
        """Whether an epoch has ended for no reason of the script's, which may fail of that."""
        return any(event["e"] == "end" and not event["whole"] for event in self._events)

    def found(self) -> Deliveries | None:
        """Return what has been noted, and remove the file; ``None`` if nothing was to be."""
        if self._plan is None:
            return None
        self._events += self._new()
        self._path.unlink(missing_ok=True)
        return deliveries_of(self._events)


def refused_by(deliveries: Deliveries, own: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what the looks at a training's own data set refuse: a knob, the answer it is for (see
    `autotune.knobs.answer_to`), and the reason, a clause.

    Args:
        own: configuration of the script, as far as it is known.
    """
    twice = any(len(one.epochs) > 1 and one.epochs[1].batches for one in deliveries.sets)
    for one in deliveries.sets:
        yield from ((WORKERS, OTHERS, why) for why in stats.why_not_copied(one))
        cached = stats.is_cached(one)
        if cached is not None:
            why = f"the data set keeps what it has made (once more takes {100 * cached:.0f} % of the time)"
            yield WORKERS, OTHERS, f"{why}, and workers would lose it after each epoch"
        changed = next((what for epoch in one.epochs[1:] for what in epoch.changed), None)
        if own.get(PERSISTENT):
            continue
        answer = answer_to(KNOBS[PERSISTENT], True)
        if changed is not None:
            why = f"the script changes {changed} between epochs, and workers that persist never see it"
            yield PERSISTENT, answer, why
        elif one.iterable:
            yield PERSISTENT, answer, "of a data set that is iterated, workers that persist may go on where they ended"
        elif not twice:
            yield PERSISTENT, answer, "no second epoch was seen, of which workers that persist may miss what is new"


def deliver(spec: TrialSpec, beats: Beats) -> TrainCheck:
    """Let the loader of a workload deliver as ``spec.check.deliveries`` says, under ``spec.config``; nothing trains."""
    plan = spec.check.deliveries if spec.check is not None else None
    files = LaunchFiles(Path(spec.folder))
    log = DeliveryLog(plan, files)
    if plan is None or spec.rank:
        return TrainCheck(losses=(), finite=True, changed=1.0)
    launch = Launch(spec, beats)
    # Not before: nothing else is to be found in the agent's folder.
    sys.path.append(str(entering.FOLDER))
    from autotune_agent.deliveries import Noting

    process = os.getpid()
    Noting(told_deliveries(plan, files), ours=lambda: os.getpid() == process).install()
    loader = open_loader(launch.workload, launch.ctx, spec.config, worker_start_method=spec.worker_start_method)
    beats.enter(Phase.COMPILE)
    taken = 0
    for _ in range(plan.epochs):
        if log.is_over():
            break
        for _ in loader:
            taken += 1
            beats.step(taken)
            if beats.phase is Phase.COMPILE:
                beats.enter(Phase.MEASURE)
    return TrainCheck(losses=(), finite=True, changed=1.0, deliveries=log.found())
