"""``autotune train --epochs``: what it prints while it trains, and at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autotune.cli.output import print_json
from autotune.space.formatting import count, rate_text, seconds_text
from autotune.machine.gpu import CardWatch
from autotune.machine.rapl import Rapl
from autotune.profile import Profile
from autotune.base.records import SCHEMA_VERSION
from autotune.base.tracking import TrackedRun, Tracker, Tracking

if TYPE_CHECKING:
    from autotune.training.whole_training import EpochRow, TrainingProgress, TrainingWatcher, WholeTraining

#: Seconds between two lines of progress where they stay.
LINES_S = 30.0
_WIDTH = 100


class Lines:
    """Prints a training's progress on stderr: one line that is written anew, or now and then a line that stays.

    Args:
        promised_per_s: the rate that the profile promises; ``None`` if it does not hold for what is trained.
        live: stderr is a terminal.
    """

    def __init__(self, promised_per_s: float | None, *, live: bool) -> None:
        self._promised_per_s = promised_per_s
        self._live = live
        self._written = False
        self._due_s = 0.0

    def says(self, sentence: str) -> None:
        self._line(f"{sentence}.")

    def begins(self, mark: str, steps: int) -> None:
        """Nothing: `says` tells where it goes on."""

    def progress(self, progress: TrainingProgress) -> None:
        now = time.monotonic()
        if self._live:
            typer.echo(f"{self._text(progress):<{_WIDTH}}\r", err=True, nl=False)
            self._written = True
        elif now >= self._due_s:
            self._due_s = now + LINES_S
            self._line(self._text(progress))

    def evaluates(self, epoch: int) -> None:
        if self._live:
            typer.echo(f"{f'epoch {epoch}: evaluating':<{_WIDTH}}\r", err=True, nl=False)
            self._written = True

    def epoch_ends(self, row: EpochRow) -> None:
        self._line(epoch_line(row))

    def _line(self, text: str) -> None:
        if self._written:
            typer.echo(f"{'':<{_WIDTH}}\r", err=True, nl=False)
            self._written = False
        typer.echo(text, err=True)

    def _text(self, now: TrainingProgress) -> str:
        step = f"step {now.step}" if now.epoch_steps is None else f"step {now.step} of {now.epoch_steps}"
        parts = [f"epoch {now.epoch} of {now.epochs}", step, f"loss {now.loss:.4g}", f"lr {now.learning_rate:.3g}"]
        if now.samples_per_s is not None:
            of = f" ({now.samples_per_s / self._promised_per_s:.2f} of the promise)" if self._promised_per_s else ""
            parts.append(f"{rate_text(now.samples_per_s)} samples/s{of}")
        if now.left_s is not None:
            parts.append(f"{seconds_text(now.left_s)} left")
        return ", ".join(parts)


def epoch_line(row: EpochRow) -> str:
    """Return one epoch in one line."""
    parts = [f"epoch {row.epoch}", f"step {row.steps}", f"loss {_number(row.loss)}", f"lr {row.learning_rate:.3g}"]
    parts += [f"{name} {_number(value)}" for name, value in row.metrics.items()]
    if row.samples_per_s is not None:
        parts.append(f"{rate_text(row.samples_per_s)} samples/s")
    if row.energy_j is not None:
        parts.append(_joules(row.energy_j))
    return ", ".join(parts)


class Tracked:
    """Tells experiment trackers of a training.

    Args:
        profile: of the configuration that is trained. folder: of the checkpoints. say: called with what fails.
    """

    def __init__(
        self, trackers: Sequence[type[Tracker]], profile: Profile, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._profile = profile
        self._folder = folder
        self._mark, self._steps = "", 0
        self._tracking = Tracking(trackers, self._run, say)

    def says(self, sentence: str) -> None:
        """Nothing: it is for the user."""

    def begins(self, mark: str, steps: int) -> None:
        self._mark, self._steps = mark, steps

    def progress(self, progress: TrainingProgress) -> None:
        self._tracking.log(
            progress.steps,
            {
                "loss": progress.loss,
                "learning_rate": progress.learning_rate,
                "samples_per_second": progress.samples_per_s,
            },
        )

    def evaluates(self, epoch: int) -> None:
        """Nothing: its metrics come with the epoch's end."""

    def epoch_ends(self, row: EpochRow) -> None:
        of_epoch = {"loss": row.loss, "samples_per_second": row.samples_per_s, "energy_j": row.energy_j}
        named = {f"epoch/{name}": value for name, value in of_epoch.items()}
        self._tracking.log(row.steps, {"epoch": row.epoch, **named, **row.metrics})

    def end(self, *, failed: bool) -> None:
        """End the run in the trackers."""
        self._tracking.end(failed=failed)

    def _run(self) -> TrackedRun:
        profile = self._profile
        told: dict[str, str | float] = {
            "promised_samples_per_second": profile.gives.samples_per_second,
            "study": profile.provenance.study,
        }
        return TrackedRun(
            project=profile.workload.name,
            name=f"train-{profile.workload.name}",
            key=self._mark,
            parameters={**profile.configuration, **told, "seed": profile.conditions.seed},
            folder=self._folder,
            from_step=self._steps,
        )


class All:
    """Tells several watchers, in order."""

    def __init__(self, watchers: Sequence[TrainingWatcher]) -> None:
        self._watchers = watchers

    def says(self, sentence: str) -> None:
        for watcher in self._watchers:
            watcher.says(sentence)

    def begins(self, mark: str, steps: int) -> None:
        for watcher in self._watchers:
            watcher.begins(mark, steps)

    def progress(self, progress: TrainingProgress) -> None:
        for watcher in self._watchers:
            watcher.progress(progress)

    def evaluates(self, epoch: int) -> None:
        for watcher in self._watchers:
            watcher.evaluates(epoch)

    def epoch_ends(self, row: EpochRow) -> None:
        for watcher in self._watchers:
            watcher.epoch_ends(row)


@contextlib.contextmanager
def tracked(
    trackers: Sequence[type[Tracker]], profile: Profile, folder: Path, say: Callable[[str], None]
) -> Iterator[Tracked]:
    """Yield a watcher that tells trackers of a training, and end its run with the block."""
    watcher = Tracked(trackers, profile, folder, say)
    try:
        yield watcher
    except BaseException:
        watcher.end(failed=True)
        raise
    watcher.end(failed=False)


def energy_counter(cards: Sequence[str]) -> Callable[[], float | None]:
    """Return a counter of joules: of the cards with these UUIDs, or without a card of the processor."""
    counters = [CardWatch(uuid).energy_j for uuid in cards] or [Rapl().energy_j]

    def energy_j() -> float | None:
        known = [joules for counter in counters if (joules := counter()) is not None]
        return sum(known) if len(known) == len(counters) else None

    return energy_j


def default_folder(profile: Path) -> Path:
    """Return where the checkpoints of a training with this profile land by default."""
    return profile.with_name(f"{profile.stem}-checkpoints")


def print_whole(done: WholeTraining, name: str, profile: Profile, *, comparable: bool, as_json: bool) -> None:
    """Print a finished training.

    Args:
        comparable: what was trained is what was measured.
    """
    promised, reached = profile.gives.samples_per_second, done.samples_per_s
    ratio = reached / promised if comparable and reached is not None else None
    if as_json:
        print_json(_as_json(done, name, profile, ratio))
        return
    if not (sys.stderr.isatty() and sys.stdout.isatty()) or done.resumed_at is not None:
        # A terminal has them already.
        for row in done.rows:
            typer.echo(epoch_line(row))
    energy = "not known: no counter can be read" if done.energy_j is None else _joules(done.energy_j)
    typer.echo(f"trained     {count(len(done.rows), 'epoch')}, {count(done.steps, 'step')}")
    if done.evaluated is None:
        typer.echo("evaluated   nothing: the workload has no validation(ctx) and no metric(ctx, model)")
    typer.echo(f"reached     {'not known' if reached is None else f'{rate_text(reached)} samples/s'}")
    typer.echo(f"promised    {rate_text(promised, profile.gives.ci95)} samples/s")
    if ratio is not None:
        typer.echo(f"ratio       {ratio:.3f}, without evaluations, checkpoints, and the first step after each start")
    elif not comparable:
        typer.echo("ratio       none: what was trained is not what was measured")
    typer.echo(f"energy      {energy}")
    typer.echo(f"checkpoint  {done.checkpoint}")
    typer.echo(f"history     {done.history}")


def _as_json(done: WholeTraining, name: str, profile: Profile, ratio: float | None) -> dict[str, Any]:
    samples = sum(row.counted_samples for row in done.rows)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": name,
        "epochs": len(done.rows),
        "steps": done.steps,
        "history": [{**row.model_dump(mode="json"), "samples_per_second": row.samples_per_s} for row in done.rows],
        "samples_per_second": done.samples_per_s,
        "promised_samples_per_second": profile.gives.samples_per_second,
        "promised_ci95": list(profile.gives.ci95),
        "ratio": ratio,
        "energy_j": done.energy_j,
        "samples_per_joule": samples / done.energy_j if done.energy_j else None,
        "first_step_s": done.first_step_s,
        "resumed_at_step": done.resumed_at,
        "evaluated": done.evaluated,
        "checkpoint": str(done.checkpoint),
        "history_file": str(done.history),
    }


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _joules(joules: float) -> str:
    return f"{joules / 1000:.3g} kJ" if joules >= 1000 else f"{joules:.3g} J"
