"""The course of one whole training, from a checkpoint or the beginning to the end.

Each of several ranks goes through it in its own process. What only one may do (checkpoints, history, reports), the
first one does; where they must not part, they agree (`autotune.training.whole_training.agreement`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from autotune.training import step as training
from autotune.workload import contract
from autotune.training.applied import Applied
from autotune.base.errors import InterruptedSearch, WorkloadError
from autotune.training.exchange import fill, from_all, load_states, own_buffers, whole_states
from autotune.training.feed import length_of, no_batch
from autotune.space.formatting import count
from autotune.base.records import DataRef, WorkloadRef
from autotune.training.whole_training.agreement import Agreement
from autotune.training.whole_training.checkpoints import Checkpoint, Checkpoints, check_plain, load_checkpoint
from autotune.training.whole_training.epoch_batches import EpochBatches
from autotune.training.whole_training.evaluation import Evaluation
from autotune.training.whole_training.history import EpochHistory, EpochRow, EpochTally
from autotune.training.whole_training.identity import VERSION, Head, check, identity_of, refuse_another
from autotune.training.whole_training.meter import Meter, Pace
from autotune.training.whole_training.progress import TrainingProgress, TrainingSurroundings
from autotune.training.whole_training.randomness import restore, seed_of_rank, sow, sow_with, states
from autotune.training.whole_training.result import WholeTraining
from autotune.training.workload_training import WorkloadTraining

#: Seconds between two reports of progress.
REPORT_S = 1.0


class TrainingCourse:
    """One training, or one rank's part in it.

    Args:
        newest: the checkpoint to go on from; ``None`` to begin.
    """

    def __init__(
        self,
        applied: Applied,
        ref: WorkloadRef,
        data: DataRef,
        epochs: int,
        checkpoints: Checkpoints,
        newest: Checkpoint | None,
        every_s: float,
        around: TrainingSurroundings,
    ) -> None:
        self._epochs = epochs
        self._checkpoints = checkpoints
        self._every_s = every_s
        self._around = around
        self._parts = WorkloadTraining(applied, ref, data)
        workload, ctx, config = self._parts.workload, self._parts.ctx, self._parts.config
        # Data sets and models may draw when they are made.
        sow(ctx.seed)
        dataset, collate = training.data_of(workload, ctx)
        self._batches = EpochBatches(self._parts, (dataset, collate))
        self._identity = identity_of(ref, ctx, config, {"samples of an epoch": length_of(dataset)})
        self._rank = ctx.rank
        self._history = EpochHistory(checkpoints.folder, anew=newest is None and not ctx.rank)
        self._epoch = self._steps = 0
        self._over = False
        self._tally = EpochTally()
        self._rows: list[EpochRow] = []
        self._mark = around.mark
        self._resumed_at: int | None = None
        self._saved = None if newest is None else newest.path
        state: dict[str, Any] | None = None
        if newest is not None:
            check(newest.head, self._identity, epochs, checkpoints.folder, around.watcher.says)
            state = load_checkpoint(newest.path)
            self._take_up(newest.head, state)
        # The worker processes start here, before the model is on the device.
        self._iterator = self._begin_epoch()
        self._step = self._parts.build()
        self._batches.meet()
        self._device = self._step.device
        if ctx.rank:
            # All have built the same model, and each has a dropout of its own.
            sow_with(seed_of_rank(ctx.seed, ctx.rank), self._device)
        self._loss, self._loss_sum = torch.zeros(()), torch.zeros((), dtype=torch.float64, device=self._device)
        epoch_steps, schedule = self._batches.epoch_steps, contract.optional(workload, "schedule")
        steps = None if epoch_steps is None else epochs * epoch_steps
        self._scheduler = schedule(ctx, self._step.optimizer, steps) if schedule else None
        self._evaluation = Evaluation(self._parts, self._step)
        if newest is not None and state is not None:
            self._load(newest.head, state)
        self._meter = Meter(around.now, around.energy_j, self._synchronize)
        self._saved_at_s, self._saved_at_step = around.now(), None if state is None else self._steps
        self._agreement = Agreement(around.now)
        self._first_step_s: float | None = None
        self._pace = Pace(around.now, self._rows[-1].evaluation_s if self._rows else 0.0)

    def run(self) -> WholeTraining:
        """Train to the end."""
        told = self._around.watcher
        told.begins(self._mark, self._steps)
        if self._resumed_at is not None:
            told.says(
                f"the training goes on from {self._saved and self._saved.name}, "
                f"in epoch {self._epoch + 1} after {count(self._tally.steps, 'step')}"
            )
        while True:
            if not self._over:
                self._take_epoch()
                self._over = True
                self._meter.stop(self._tally)
                self._save()
            self._finish_epoch()
            if self._epoch + 1 >= self._epochs:
                break
            self._epoch, self._over, self._tally = self._epoch + 1, False, EpochTally()
            self._loss_sum.zero_()
            if self._first_step_s is not None:
                # The turn of an epoch belongs to the rate.
                self._meter.start()
                self._pace.start(self._steps)
            self._iterator = self._begin_epoch()
        assert self._saved is not None
        return WholeTraining(
            rows=tuple(self._rows),
            steps=self._steps,
            resumed_at=self._resumed_at,
            first_step_s=self._first_step_s,
            checkpoint=self._saved,
            history=self._history.path,
            evaluated=self._evaluation.what,
        )

    def _begin_epoch(self) -> Iterator[Any] | None:
        """Start the workers on what is left of the epoch; ``None`` if nothing is."""
        return None if self._over else self._batches.begin(self._epoch, self._tally.steps)

    def _take_epoch(self) -> None:
        """Take the steps of an epoch that are left."""
        iterator = self._iterator
        assert iterator is not None
        while True:
            self._save_or_stop_if_asked()
            began = self._around.now()
            try:
                batch = next(iterator, None)
            except Exception:
                # Ctrl-C reaches the workers, too.
                self._stop_if_asked()
                raise
            if batch is None:
                break
            self._take(batch)
            if self._first_step_s is None:
                self._synchronize()
                self._first_step_s = self._around.now() - began
                # Not only when the first checkpoint is due, which may be much later.
                check_plain(self._own_parts())
                self._meter.start()
                self._pace.start(self._steps)
            self._report()
        # Its workers end with it, before those of the evaluation begin.
        self._iterator = None
        if not self._tally.steps:
            raise no_batch()

    def _take(self, batch: Any) -> None:
        loss = self._step(batch)
        if self._scheduler is not None:
            self._scheduler.step()
        self._loss_sum += loss
        self._loss = loss
        samples = self._parts.samples_in(batch)
        self._meter.add(samples)
        self._pace.samples += samples
        self._tally.samples += samples
        self._tally.steps += 1
        self._steps += 1

    def _finish_epoch(self) -> None:
        """Evaluate the epoch and add it to the history, unless an earlier process came that far."""
        number = self._epoch + 1
        if self._rows and self._rows[-1].epoch == number:
            # The earlier process may not have come to telling it.
            self._around.watcher.epoch_ends(self._rows[-1])
            return
        losses = from_all(self._tally.loss_sum)
        tally = replace(self._tally, loss_sum=sum(losses) / len(losses))
        row = self._evaluated(tally.row(number, self._steps, self._learning_rate))
        if row.loss is None:
            self._around.watcher.says(f"the loss was not finite in epoch {number}")
        self._rows.append(row)
        if not self._rank:
            self._history.write(self._rows)
        self._around.watcher.epoch_ends(row)

    def _evaluated(self, row: EpochRow) -> EpochRow:
        if self._evaluation.what is None:
            return row
        self._around.watcher.evaluates(row.epoch)
        began = self._around.now()
        try:
            metrics = self._evaluation.run(row.epoch, self._stop_if_asked)
        except Exception:
            self._stop_if_asked()
            raise
        self._synchronize()
        self._pace.evaluation_s = self._around.now() - began
        return row.model_copy(update={"metrics": metrics, "evaluation_s": self._pace.evaluation_s})

    def _save_or_stop_if_asked(self) -> None:
        """Write a checkpoint if it is time, or the training is to end, which all ranks do before the same step."""
        # One of the place where this process has begun is there, or needs none.
        new = self._steps > (self._saved_at_step or 0)
        due = new and self._around.now() - self._saved_at_s >= self._every_s
        number, due = self._agreement.before(self._steps, self._around.stop(), due=due)
        if number is None and not due:
            return
        counting = self._meter.runs
        self._save_once()
        if number is not None:
            raise self._interrupted(number)
        if counting:
            self._meter.start()

    def _stop_if_asked(self) -> None:
        """End the training, if it is to end, in an evaluation or where a worker has died of Ctrl-C.

        Several ranks need not be at the same place there, and end with the checkpoint that there is.
        """
        number = self._around.stop()
        if number is None:
            return
        if self._parts.ctx.ranks == 1:
            self._save_once()
        raise self._interrupted(number)

    def _interrupted(self, number: int) -> InterruptedSearch:
        at = self._saved_at_step
        advice = "the same command begins anew" if at is None else f"the same command goes on from step {at}"
        return InterruptedSearch(number, advice=f"{advice}.")

    def _report(self) -> None:
        if self._pace.elapsed_s < REPORT_S:
            return
        self._meter.note(self._tally)
        epoch_steps = self._batches.epoch_steps
        left = None if epoch_steps is None else self._epochs * epoch_steps - self._steps
        per_s = self._pace.per_s()
        left_s = self._pace.left_s(self._steps, left, self._epochs - self._epoch)
        self._around.watcher.progress(
            TrainingProgress(
                epoch=self._epoch + 1,
                epochs=self._epochs,
                step=self._tally.steps,
                epoch_steps=epoch_steps,
                steps=self._steps,
                loss=float(self._loss),
                learning_rate=self._learning_rate,
                samples_per_s=per_s,
                left_s=left_s,
            )
        )

    @property
    def _learning_rate(self) -> float:
        return float(self._step.optimizer.param_groups[0]["lr"])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _save_once(self) -> None:
        self._meter.stop(self._tally)
        if self._saved_at_step != self._steps:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint. All ranks call it, and go on when it is written."""
        self._tally.loss_sum = float(self._loss_sum)
        step = self._step
        own = {"tally": asdict(self._tally), "random": states(self._device)}
        if self._rank:
            own["buffers"] = {name: buffer.cpu() for name, buffer in own_buffers(step.model).items()}
        ranks = from_all(own)
        weights, optimizer = whole_states(step.model, step.optimizer)
        state = {
            "rows": [row.model_dump() for row in self._rows],
            "ranks": ranks,
            "model": weights,
            "optimizer": optimizer,
            "scaler": None if step.scaler is None else step.scaler.state_dict(),
            **self._own_parts(),
        }
        head = Head(
            version=VERSION,
            torch=str(torch.__version__),
            identity=self._identity,
            mark=self._mark,
            epochs=self._epochs,
            epoch=self._epoch,
            steps=self._steps,
            over=self._over,
        )
        # All know of it, and wait for it: who ends before it is written ends the others, too.
        self._saved = from_all(None if self._rank else self._checkpoints.save(head, state))[0]
        self._saved_at_s, self._saved_at_step = self._around.now(), self._steps
        self._pace.start(self._steps)

    def _own_parts(self) -> dict[str, Any]:
        """Return what a checkpoint has of objects that the workload has made, and may be anything."""
        keep = contract.optional(self._parts.workload, "state")
        return {
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "workload": keep(self._parts.ctx, self._step.model) if keep else None,
        }

    def _take_up(self, head: Head, state: dict[str, Any]) -> None:
        """Go to the checkpoint's place in the training."""
        self._epoch, self._steps, self._over = head.epoch, head.steps, head.over
        self._mark, self._resumed_at = head.mark, self._steps
        self._tally = EpochTally(**state["ranks"][self._rank]["tally"])
        self._rows = [EpochRow.model_validate(row) for row in state["rows"]]
        if self._over:
            # A checkpoint is written before the evaluation, and the history after it.
            reached = (self._epoch + 1, self._steps)
            self._rows += [row for row in self._history.read() if (row.epoch, row.steps) == reached]

    def _load(self, head: Head, state: dict[str, Any]) -> None:
        """Set everything that trains to what it was.

        Raises:
            ResumeRefusedError: the learning rate was scheduled for another number of epochs.
        """
        step, put_back = self._step, contract.optional(self._parts.workload, "load_state")
        if self._scheduler is not None:
            # Without a schedule, a training may go on for longer than was planned.
            then, now = {"epochs": str(head.epochs)}, {"epochs": str(self._epochs)}
            refuse_another(then, now, str(self._checkpoints.folder))
        self._loss_sum.fill_(self._tally.loss_sum)
        own = state["ranks"][self._rank]
        load_states(step.model, step.optimizer, state["model"], state["optimizer"])
        fill(own_buffers(step.model), own.get("buffers", {}))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if step.scaler is not None:
            step.scaler.load_state_dict(state["scaler"])
        if put_back is not None:
            put_back(self._parts.ctx, step.model, state["workload"])
        elif state["workload"] is not None:
            raise WorkloadError(
                "the workload has state(ctx, model) and no load_state(ctx, model, state)", advice="define both."
            )
        restore(own["random"], self._device)
