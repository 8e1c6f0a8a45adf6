"""The course of a whole training: its epochs, from the first step to the last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune.base.errors import InterruptedSearch, WorkloadError
from autotune.base.records import DataRef, WorkloadRef
from autotune.knobs.num_workers import workers_of
from autotune.knobs.persistent_workers import KNOB as PERSISTENT
from autotune.space.formatting import count
from autotune.training import step as training
from autotune.training.applied import Applied
from autotune.training.exchange import (
    fill,
    first_ranks_buffers,
    from_all,
    is_shared,
    largest,
    load_states,
    own_buffers,
    whole_states,
)
from autotune.training.feed import Collate, length_of, no_batch, workers_and_queue
from autotune.training.short_training import WorkloadTraining
from autotune.training.step import Step, move
from autotune.training.whole_training.checkpoints import (
    VERSION,
    Agreement,
    Checkpoint,
    Checkpoints,
    EpochHistory,
    EpochOrder,
    EpochRow,
    EpochSeeds,
    EpochTally,
    Head,
    check,
    check_plain,
    drawing_beside,
    finite,
    identity_of,
    load_checkpoint,
    refuse_another,
    restore,
    seed_of,
    seed_of_rank,
    seeded,
    sow,
    sow_with,
    states,
)
from autotune.workload import contract

# The evaluation after an epoch: `evaluate` over the workload's `validation` set, and its `metric`.

#: The name of what `evaluate` returns, if that is a number.
ONLY = "validation"


class Evaluation:
    """Evaluates a model as the workload says. Gradients, modes and random numbers of the training stay as they are.

    It runs under ``torch.inference_mode``, or under ``torch.no_grad`` if the model replays CUDA graphs: under any mode
    other than that of the graphs, they would be recorded once more.

    Several ranks divide a set that has a length, and use the weights and buffers of the first one. All of them call
    `metric`, and the result of the first counts.
    """

    def __init__(self, parts: WorkloadTraining, step: Step) -> None:
        self._parts = parts
        self._step = step
        self._plan = training.step_plan(parts.config)
        self._ctx = training.at_once(parts.ctx, parts.config)
        make = contract.optional(parts.workload, "validation")
        self._dataset: Dataset[Any] | None = make(parts.ctx) if make else None
        self._metric = contract.optional(parts.workload, "metric")
        self._is_shared = is_shared(step.model)

    @property
    def what(self) -> str | None:
        """What is evaluated, in words; ``None`` for nothing."""
        names = [name for name, there in (("validation", self._dataset), ("metric", self._metric)) if there is not None]
        return " and ".join(names) or None

    def run(self, epoch: int, between: Callable[[], None]) -> dict[str, float | None]:
        """Evaluate the model after an epoch; return its metrics by name, ``None`` for those that are not finite.

        Args:
            between: called after each batch. It may raise.

        Raises:
            WorkloadError: `validation` has no sample, or `evaluate` returned something other than numbers.
        """
        metrics: dict[str, float | None] = {}
        ctx, model = self._parts.ctx, self._step.model
        seed = seed_of(seed_of_rank(ctx.seed, ctx.rank), "evaluation", epoch)
        # A sharded model cannot train with what it has gathered in inference mode.
        without = torch.no_grad if self._plan.cudagraphs or self._is_shared else torch.inference_mode
        with first_ranks_buffers(model), _evaluating(model), drawing_beside(seed, self._step.device), without():
            if self._dataset is not None:
                metrics |= self._averages(self._dataset, between)
            if self._metric is not None:
                with training.autocast(self._step.device, self._plan):
                    metrics["metric"] = finite(float(self._metric(self._ctx, model)))
        return metrics

    def _averages(self, dataset: Dataset[Any], between: Callable[[], None]) -> dict[str, float | None]:
        sums: dict[str, Any] = {}
        samples = 0
        loader = self._loader(dataset)
        for batch, counts in _in_step(loader) if self._is_shared else ((batch, True) for batch in loader):
            size, values = self._samples_in(batch), self._of(batch)
            samples += size if counts else 0
            for name, value in values.items() if counts else ():
                # On the device, so that nothing waits for it.
                sums[name] = sums.get(name, 0.0) + torch.as_tensor(value).detach().double() * size
            between()
        by_rank = from_all((samples, {name: float(total) for name, total in sums.items()}))
        samples = sum(size for size, _ in by_rank)
        if not samples:
            raise WorkloadError("validation(ctx) has no sample", advice="look at what it reads.")
        names = dict.fromkeys(name for _, totals in by_rank for name in totals)
        return {name: finite(sum(totals.get(name, 0.0) for _, totals in by_rank) / samples) for name in names}

    def _of(self, batch: Any) -> Mapping[str, Any]:
        plan, workload = self._plan, self._parts.workload
        moved = move(batch, self._step.device, non_blocking=plan.non_blocking, channels_last=plan.channels_last)
        evaluate = contract.optional(workload, "evaluate") or workload.loss
        with training.autocast(self._step.device, plan):
            result = evaluate(self._ctx, self._step.model, moved)
        numbers = result if isinstance(result, Mapping) else {ONLY: result}
        for name, value in numbers.items():
            if not isinstance(value, int | float) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                raise WorkloadError(
                    f"evaluate(ctx, model, batch) returned a {type(value).__name__} as {name!r}, which is no number",
                    advice="let it return a number, or a dict of numbers by name.",
                )
        return numbers

    def _loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        options = training.loader_options(self._parts.config, worker_start_method=self._parts.worker_start_method)
        collate = training.collate_of(self._parts.workload, self._parts.ctx)
        options |= {"batch_size": self._ctx.batch_size, "collate_fn": collate}
        # Persistent workers would hold memory throughout the next epoch.
        options.pop(PERSISTENT.name, None)
        if isinstance(dataset, IterableDataset):
            return DataLoader(dataset, **options)
        indices = range(self._ctx.rank, len(dataset), self._ctx.ranks)  # type: ignore[arg-type]
        return DataLoader(dataset, sampler=indices, **options)

    def _samples_in(self, batch: Any) -> int:
        count = contract.optional(self._parts.workload, "samples")
        return int(count(self._ctx, batch)) if count else _samples_of(batch) or self._ctx.batch_size


def _in_step(loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield batches, and whether they count, equally often in each rank: a sharded model computes in all ranks at once.

    A rank without further batches repeats its last one, which then does not count.

    Raises:
        WorkloadError: the rank has had no batch.
    """
    batches, batch = iter(loader), None
    while True:
        new = next(batches, None)
        if not largest(int(new is not None))[0]:
            return
        batch = batch if new is None else new
        if batch is None:
            raise WorkloadError(
                "validation(ctx) has fewer samples than there are ranks", advice="a sharded model needs one for each."
            )
        yield batch, new is not None


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and afterwards restore the modes of all modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _samples_of(batch: Any) -> int | None:
    """Return how many samples a batch has: the first dimension of its tensors if it is the same for all, or else the
    length of its lists with one item per sample (images of different shapes); ``None`` if neither tells."""
    first_dimensions: set[int] = set()
    lengths: set[int] = set()

    def look(part: Any, depth: int) -> None:
        if isinstance(part, torch.Tensor):
            first_dimensions.update(part.shape[:1])
            return
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            inside = [getattr(part, field.name) for field in dataclasses.fields(part)]
        elif isinstance(part, Mapping):
            inside = list(part.values())
        elif isinstance(part, tuple | list):
            inside = list(part)
            if depth and isinstance(part, list):
                lengths.add(len(part))
        else:
            return
        for item in inside:
            look(item, depth + 1)

    look(batch, 0)
    candidates = first_dimensions if len(first_dimensions) == 1 else lengths
    return next(iter(candidates)) if len(candidates) == 1 else None


# A whole training.

# The batches of a whole training, epoch by epoch, from any step on.


_NO_BATCH = object()


class EpochBatches:
    """The batches of a training, epoch by epoch, from any step on.

    Attributes:
        epoch_steps: steps of an epoch; ``None`` if the loader does not know its length.
    """

    def __init__(self, parts: WorkloadTraining, data: tuple[Any, Collate]) -> None:
        dataset, collate = data
        ctx = parts.ctx
        self._seed = seed_of_rank(ctx.seed, ctx.rank)
        self._ranks = ctx.ranks
        self._size = int(parts.config["batch_size"])
        self._order = EpochOrder(ctx.seed, rank=ctx.rank, ranks=ctx.ranks)
        self._seeds = EpochSeeds(self._seed, shared=workers_of(parts.config) > 0)
        has_own_loader = contract.optional(parts.workload, "loader") is not None
        self._loader: Iterable[Any] = parts.open_loader(data=(seeded(dataset, self._seeds), collate), order=self._order)
        self.epoch_steps = length_of(self._loader)
        #: PyTorch's loader reads samples in our order, which can begin anywhere. Others start from the beginning.
        self._can_skip = not has_own_loader and not isinstance(dataset, IterableDataset)
        # Workers draw in their own processes.
        self._draws_here = has_own_loader or not workers_and_queue(self._loader)[0]

    def meet(self) -> None:
        """Make the shortest of the ranks' epochs that of all. Call this once they have met, before the first batch."""
        lengths = from_all(self.epoch_steps)
        known_lengths = [length for length in lengths if length is not None]
        self.epoch_steps = min(known_lengths) if len(known_lengths) == len(lengths) else None

    def begin(self, epoch: int, steps: int) -> Iterator[Any]:
        """Return the batches of an epoch, without the first ``steps``; its workers start now.

        All ranks get the same number of batches.
        """
        seed = seed_of(self._seed, epoch)
        self._seeds.begin(epoch)
        self._order.begin(epoch, steps * self._size if self._can_skip else 0)
        generator = getattr(self._loader, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        with drawing_beside(seed, torch.device("cpu")):
            batches = self._sown(iter(self._loader), epoch, steps if self._can_skip else 0)
            for _ in range(0 if self._can_skip else steps):
                next(batches, None)
        return batches if self._ranks == 1 else self._together(batches, steps)

    def _sown(self, batches: Iterator[Any], epoch: int, steps: int) -> Iterator[Any]:
        """If batches are made in this process, seed each batch and each step separately.

        Saving and restoring the generators' states instead would take longer than many a step.
        """
        for step in itertools.count(steps):
            if self._draws_here:
                sow(seed_of(self._seed, epoch, "batch", step))
            batch = next(batches, _NO_BATCH)
            if batch is _NO_BATCH:
                return
            if self._draws_here:
                sow(seed_of(self._seed, epoch, "step", step))
            yield batch

    def _together(self, batches: Iterator[Any], steps: int) -> Iterator[Any]:
        """End as soon as the epoch of any rank ends, as the others would wait for it forever."""
        for step in itertools.count(steps):
            if step == self.epoch_steps:
                return
            batch = next(batches, _NO_BATCH)
            over = batch is _NO_BATCH
            if self.epoch_steps is None:
                # Only streams of unknown length cost an exchange at each step.
                over = bool(largest(int(over))[0])
            elif over:
                raise WorkloadError(
                    f"the loader has told {self.epoch_steps} batches, and an epoch of it had {step}",
                    advice="with several ranks, let its length be that of an epoch, or leave it unknown.",
                )
            if over:
                return
            yield batch


# The rate of a training's steps, and the energy they take.
#
# `Meter` counts for the history, and is stopped during anything but steps; `Pace` looks at the last second.


class Meter:
    """Adds the seconds, samples and joules of steps to an `EpochTally`, while it runs.

    Args:
        now: monotonic seconds. energy_j: a counter of joules, of which only differences are meaningful; ``None`` if
            there is none. synchronize: waits for the device.
    """

    def __init__(
        self, now: Callable[[], float], energy_j: Callable[[], float | None], synchronize: Callable[[], None]
    ) -> None:
        self._now = now
        self._energy_j = energy_j
        self._synchronize = synchronize
        self._since: float | None = None
        self._from_j: float | None = None
        self._samples = 0

    @property
    def runs(self) -> bool:
        """Whether steps are counted."""
        return self._since is not None

    def start(self) -> None:
        """Start counting."""
        self._synchronize()
        self._since, self._from_j, self._samples = self._now(), self._energy_j(), 0

    def add(self, samples: int) -> None:
        """Count the samples of a step, if the meter runs."""
        self._samples += samples

    def note(self, tally: EpochTally) -> None:
        """Add what has been counted so far to a tally, and continue from zero."""
        if self._since is None:
            return
        self._synchronize()
        now, joules = self._now(), self._energy_j()
        tally.counted_samples += self._samples
        tally.counted_s += now - self._since
        if joules is None or self._from_j is None:
            tally.energy_lost = True
        else:
            tally.energy_j = (tally.energy_j or 0.0) + joules - self._from_j
        self._since, self._from_j, self._samples = now, joules, 0

    def stop(self, tally: EpochTally) -> None:
        """Add what has been counted to a tally, and stop."""
        self.note(tally)
        self._since = None


class Pace:
    """How fast a training goes, for reports only.

    Attributes:
        samples: those since the last report. evaluation_s: seconds of the last evaluation.
    """

    def __init__(self, now: Callable[[], float], evaluation_s: float) -> None:
        self._now = now
        self._since = self._began = now()
        self._first_step = 0
        self.samples = 0
        self.evaluation_s = evaluation_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last report."""
        return self._now() - self._since

    def start(self, steps: int) -> None:
        """Start measuring after so many steps: what came before was not spent on steps."""
        self._since = self._began = self._now()
        self._first_step, self.samples = steps, 0

    def per_s(self) -> float | None:
        """Return the samples per second since the last report."""
        elapsed_s, samples = self.elapsed_s, self.samples
        self._since, self.samples = self._now(), 0
        return samples / elapsed_s if samples and elapsed_s > 0 else None

    def left_s(self, steps: int, left: int | None, evaluations: int) -> float | None:
        """Return the expected seconds of the steps and evaluations that are left."""
        taken = steps - self._first_step
        if left is None or not taken:
            return None
        return left * (self._now() - self._began) / taken + evaluations * self.evaluation_s


# What a whole training reports while it runs, and what it gets from its surroundings.


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training is.

    Attributes:
        epoch: the current one, from 1 on, of `epochs`. step: the number of steps taken in it, of `epoch_steps`, which
            is ``None`` if the length of an epoch is not known. steps: the number taken in all.
        loss: that of the last step. learning_rate: that of the first parameter group.
        samples_per_s: the rate since the last report; ``None`` before the second step.
        left_s: expected seconds to the end, evaluations included; ``None`` if not known.
    """

    epoch: int
    epochs: int
    step: int
    epoch_steps: int | None
    steps: int
    loss: float
    learning_rate: float
    samples_per_s: float | None
    left_s: float | None


class TrainingWatcher(Protocol):
    """Receives reports on a training, in the training's process, between two steps. It does not raise."""

    def says(self, sentence: str) -> None:
        """Receive something that the user should know, once."""
        ...

    def begins(self, mark: str, steps: int) -> None:
        """The training begins, or resumes after so many steps. ``mark`` is the same each time, and unique to it."""
        ...

    def progress(self, progress: TrainingProgress) -> None:
        """Receive the progress, about once a second."""
        ...

    def evaluates(self, epoch: int) -> None:
        """The evaluation after an epoch begins."""
        ...

    def epoch_ends(self, row: EpochRow) -> None:
        """An epoch is over, evaluated, and in the history. It may be reported again after a process was killed."""
        ...


@dataclass(frozen=True)
class TrainingSurroundings:
    """What a training gets from its surroundings.

    Attributes:
        watcher: receives reports on it. mark: the mark of the training, if it is a new one.
        stop: returns the number of a signal that asks it to end, or ``None``.
        energy_j: a counter of joules; ``None`` if there is none. now: monotonic seconds.
    """

    watcher: TrainingWatcher
    mark: str
    stop: Callable[[], int | None] = lambda: None
    energy_j: Callable[[], float | None] = lambda: None
    now: Callable[[], float] = time.monotonic


# A whole training that has ended.


@dataclass(frozen=True)
class WholeTraining:
    """A finished training.

    Attributes:
        rows: one for each epoch. steps: those of all epochs.
        resumed_at: the step from which this process went on; ``None`` if it began at the first.
        first_step_s: duration of this process's first step in seconds; ``None`` if it took none.
        checkpoint: the newest, with the final weights under ``"model"``. history: the file with the rows.
        evaluated: what was evaluated after each epoch, in words; ``None`` for nothing.
    """

    rows: tuple[EpochRow, ...]
    steps: int
    resumed_at: int | None
    first_step_s: float | None
    checkpoint: Path
    history: Path
    evaluated: str | None

    @property
    def samples_per_s(self) -> float | None:
        """The rate over all epochs; ``None`` if nothing was counted."""
        seconds = sum(row.counted_s for row in self.rows)
        samples = sum(row.counted_samples for row in self.rows)
        return samples / seconds if samples and seconds > 0 else None

    @property
    def energy_j(self) -> float | None:
        """Joules that the steps of all epochs have taken; ``None`` if not known for every epoch."""
        joules = [row.energy_j for row in self.rows if row.energy_j is not None]
        return sum(joules) if joules and len(joules) == len(self.rows) else None


# The course of one whole training, from a checkpoint or the beginning to the end.
#
# Each of several ranks goes through it in its own process. The first one does what only one may do (checkpoints,
# history, reports); where they must not diverge, they agree (`autotune.training.whole_training.checkpoints`).

#: Seconds between two reports of progress.
REPORT_S = 1.0


class TrainingCourse:
    """One training, or one rank's part in it.

    Args:
        newest: the checkpoint to resume from; ``None`` to begin.
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
            # All ranks have built the same model, and each has a dropout of its own.
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
        watcher = self._around.watcher
        watcher.begins(self._mark, self._steps)
        if self._resumed_at is not None:
            watcher.says(
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
                # The turn of an epoch counts towards the rate.
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
        """Start the workers on the rest of the epoch; return its batches, or ``None`` if it is over."""
        return None if self._over else self._batches.begin(self._epoch, self._tally.steps)

    def _take_epoch(self) -> None:
        """Take the remaining steps of an epoch."""
        iterator = self._iterator
        assert iterator is not None
        while True:
            self._save_or_stop_if_asked()
            start = self._around.now()
            try:
                batch = next(iterator, None)
            except Exception:
                # The reason may be Ctrl-C, which reaches the workers, too.
                self._stop_if_asked()
                raise
            if batch is None:
                break
            self._take(batch)
            if self._first_step_s is None:
                self._synchronize()
                self._first_step_s = self._around.now() - start
                # Check this now, not when the first checkpoint is due, which may be much later.
                check_plain(self._own_parts())
                self._meter.start()
                self._pace.start(self._steps)
            self._report()
        # The workers end with the iterator, before those of the evaluation begin.
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
        """Evaluate the epoch and add it to the history, unless an earlier process has done so."""
        number = self._epoch + 1
        if self._rows and self._rows[-1].epoch == number:
            # The earlier process may not have got as far as reporting it.
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
        start = self._around.now()
        try:
            metrics = self._evaluation.run(row.epoch, self._stop_if_asked)
        except Exception:
            self._stop_if_asked()
            raise
        self._synchronize()
        self._pace.evaluation_s = self._around.now() - start
        return row.model_copy(update={"metrics": metrics, "evaluation_s": self._pace.evaluation_s})

    def _save_or_stop_if_asked(self) -> None:
        """Write a checkpoint if it is time, or if the training is to end; all ranks do so before the same step."""
        # The place where this process began has a checkpoint already, or needs none.
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
        """End the training, if it is to end, during an evaluation or after a worker has died of Ctrl-C.

        Several ranks need not be at the same place then, and end with the checkpoint that exists.
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
        """Write a checkpoint. All ranks call this, and go on when it is written."""
        self._tally.loss_sum = float(self._loss_sum)
        step = self._step
        weights, optimizer = whole_states(step.model, step.optimizer)
        # Those of the first rank are among the weights, except for what the model does not save.
        buffers = {n: b.cpu() for n, b in own_buffers(step.model).items() if self._rank or n not in weights}
        ranks = from_all({"tally": asdict(self._tally), "random": states(self._device), "buffers": buffers})
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
        # All ranks learn of it, and wait for it: one that ends before it is written ends the others, too.
        self._saved = from_all(None if self._rank else self._checkpoints.save(head, state))[0]
        self._saved_at_s, self._saved_at_step = self._around.now(), self._steps
        self._pace.start(self._steps)

    def _own_parts(self) -> dict[str, Any]:
        """Return the parts of a checkpoint that come from objects made by the workload, and may be anything."""
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
        """Restore the state of everything that takes part in the training.

        Raises:
            ResumeRefusedError: the learning rate was scheduled for another number of epochs.
        """
        step, load_state = self._step, contract.optional(self._parts.workload, "load_state")
        if self._scheduler is not None:
            # Only without a schedule may a training go on for longer than was planned.
            then, now = {"epochs": str(head.epochs)}, {"epochs": str(self._epochs)}
            refuse_another(then, now, str(self._checkpoints.folder))
        self._loss_sum.fill_(self._tally.loss_sum)
        of_rank = state["ranks"][self._rank]
        load_states(step.model, step.optimizer, state["model"], state["optimizer"])
        own, saved = own_buffers(step.model), of_rank.get("buffers", {})
        # Some are made in the forward pass, or grow there.
        fill(own, {n: b for n, b in saved.items() if n in own and own[n].shape == b.shape})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if step.scaler is not None:
            step.scaler.load_state_dict(state["scaler"])
        if load_state is not None:
            load_state(self._parts.ctx, step.model, state["workload"])
        elif state["workload"] is not None:
            raise WorkloadError(
                "the workload has state(ctx, model) and no load_state(ctx, model, state)", advice="define both."
            )
        restore(of_rank["random"], self._device)
