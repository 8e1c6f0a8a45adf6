"""TensorBoard: event files in the run's folder, by TensorBoard's own writer, which needs neither TensorFlow nor torch.

``tensorboard --logdir FOLDER`` shows them. https://github.com/tensorflow/tensorboard
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from autotune.base.tracking import TrackedRun, Tracker


class Tensorboard(Tracker):
    package = "tensorboard"
    pip = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if run.from_step:
            # TensorBoard then discards what an earlier process, killed since, had logged for later steps.
            self._write(run.from_step, session_log=SessionLog(status=SessionLog.START))
        self._write(run.from_step, summary=hparams_pb(dict(run.parameters), trial_id=run.key))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summaries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=summaries))

    def tell(self, step: int, name: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(step, summary=text_pb(name, text))

    def end(self, *, failed: bool) -> None:
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


TRACKER = Tensorboard
