"""`autotune train`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.base import tracking
from autotune.base.errors import AutotuneError, UsageError, WorkloadError
from autotune.base.parsing import duration_s
from autotune.base.ranks import RANK_VARIABLES, own_rank
from autotune.base.records import SCHEMA_VERSION, DataRef
from autotune.base.tracking import TrackedRun, Tracker, Tracking
from autotune.cli.options import Args, ItsData, ItsModel, Json, ProfileFile, Track, was_typed
from autotune.cli.output import print_json, stop_signals
from autotune.launcher.rank_processes import in_each_rank, without_threads
from autotune.machine.cpu_load import Rapl
from autotune.machine.gpu import CardWatch
from autotune.machine.host import read_host
from autotune.profile import CODE, Profile, read, unlike, warnings_for
from autotune.search.recheck import refuse_behind_store
from autotune.search.request import cards_for, model_of, resolve_device
from autotune.space import environment
from autotune.space.formatting import count, one_line, rate_text, seconds_text
from autotune.study.request import option
from autotune.workload.catalog import find_workload
from autotune.workload.data import sets as data_sets

if TYPE_CHECKING:
    from autotune.training.short_training import TrainingRate
    from autotune.training.whole_training import EpochRow, TrainingProgress, WholeTraining

#: Seconds between two lines of progress that stay on screen.
LINES_S = 30.0
_WIDTH = 100


class TrainingReports:
    """Prints a training's progress on stderr (one line that is rewritten, or an occasional line that stays), and
    reports it to experiment trackers.

    Args:
        promised_per_s: the rate that the profile promises; ``None`` if it does not apply to this training.
        live: stderr is a terminal.
        profile: the profile trained with. folder: the checkpoints' folder.

    Attributes:
        tracking: the run in the trackers, which the caller ends.
        silent: reports nothing, because another rank does.
    """

    def __init__(
        self,
        promised_per_s: float | None,
        trackers: Sequence[type[Tracker]],
        profile: Profile,
        folder: Path,
        *,
        live: bool,
    ) -> None:
        self.tracking = Tracking(trackers, self._run, self.says)
        self.silent = False
        self._promised_per_s = promised_per_s
        self._profile = profile
        self._folder = folder
        self._live = live
        self._written = False
        self._due_s = 0.0
        self._mark, self._steps = "", 0

    def says(self, sentence: str) -> None:
        self._line(f"{sentence}.")

    def begins(self, mark: str, steps: int) -> None:
        self._mark, self._steps = mark, steps

    def progress(self, progress: TrainingProgress) -> None:
        now = time.monotonic()
        if self._live:
            self._rewrite(self._text(progress))
        elif now >= self._due_s:
            self._due_s = now + LINES_S
            self._line(self._text(progress))
        self._log(
            progress.steps,
            {
                "loss": progress.loss,
                "learning_rate": progress.learning_rate,
                "samples_per_second": progress.samples_per_s,
            },
        )

    def evaluates(self, epoch: int) -> None:
        if self._live:
            self._rewrite(f"epoch {epoch}: evaluating")

    def epoch_ends(self, row: EpochRow) -> None:
        self._line(epoch_line(row))
        of_epoch = {"loss": row.loss, "samples_per_second": row.samples_per_s, "energy_j": row.energy_j}
        metrics = {f"epoch/{name}": value for name, value in of_epoch.items()}
        self._log(row.steps, {"epoch": row.epoch, **metrics, **row.metrics})

    def _log(self, step: int, values: Mapping[str, float | None]) -> None:
        if not self.silent:
            self.tracking.log(step, values)

    def _run(self) -> TrackedRun:
        profile = self._profile
        origin: dict[str, str | float] = {
            "promised_samples_per_second": profile.gives.samples_per_second,
            "study": profile.provenance.study,
        }
        return TrackedRun(
            project=profile.workload.name,
            name=f"train-{profile.workload.name}",
            key=self._mark,
            parameters={**profile.configuration, **origin, "seed": profile.conditions.seed},
            folder=self._folder,
            from_step=self._steps,
        )

    def _line(self, text: str) -> None:
        if self._written:
            self._rewrite("")
            self._written = False
        if not self.silent:
            typer.echo(text, err=True)

    def _rewrite(self, text: str) -> None:
        if not self.silent:
            typer.echo(f"{text:<{_WIDTH}}\r", err=True, nl=False)
            self._written = True

    def _text(self, now: TrainingProgress) -> str:
        step = f"step {now.step}" if now.epoch_steps is None else f"step {now.step} of {now.epoch_steps}"
        parts = [f"epoch {now.epoch} of {now.epochs}", step, f"loss {now.loss:.4g}", f"lr {now.learning_rate:.3g}"]
        if now.samples_per_s is not None:
            share = f" ({now.samples_per_s / self._promised_per_s:.2f} of the promise)" if self._promised_per_s else ""
            parts.append(f"{rate_text(now.samples_per_s)} samples/s{share}")
        if now.left_s is not None:
            parts.append(f"{seconds_text(now.left_s)} left")
        return ", ".join(parts)


def epoch_line(row: EpochRow) -> str:
    """Return an epoch as one line."""
    parts = [f"epoch {row.epoch}", f"step {row.steps}", f"loss {_number(row.loss)}", f"lr {row.learning_rate:.3g}"]
    parts += [f"{name} {_number(value)}" for name, value in row.metrics.items()]
    if row.samples_per_s is not None:
        parts.append(f"{rate_text(row.samples_per_s)} samples/s")
    if row.energy_j is not None:
        parts.append(_joules(row.energy_j))
    return ", ".join(parts)


def energy_counter(cards: Sequence[str]) -> Callable[[], float | None]:
    """Return a counter of joules: of the cards with these UUIDs or, if there are none, of the processor."""
    counters = [CardWatch(uuid).energy_j for uuid in cards] or [Rapl().energy_j]

    def energy_j() -> float | None:
        readings = [joules for counter in counters if (joules := counter()) is not None]
        return sum(readings) if len(readings) == len(counters) else None

    return energy_j


def _print_whole(done: WholeTraining, name: str, profile: Profile, *, comparable: bool, as_json: bool) -> None:
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
        # A terminal shows them already.
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


#: Advice if a rank was killed.
AGAIN = "the same command goes on from the newest checkpoint, if one was written."


def train(
    ctx: typer.Context,
    profile: ProfileFile,
    model: ItsModel = "",
    arg: Args = None,
    data: ItsData = "",
    steps: Annotated[int, typer.Option("--steps", help="Train at least so many, until the rate settles.", min=3)] = 50,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", help="Train so many whole epochs, with evaluations and checkpoints.", min=1),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            "--checkpoints",
            help="With --epochs: their folder. If it has one of the same training, this goes on from there.  "
            "[default: beside the profile, PROFILE-checkpoints]",
            metavar="DIR",
        ),
    ] = None,
    every: Annotated[
        str,
        typer.Option(
            "--checkpoint-every", help="With --epochs: how often, beside each epoch's end.", metavar="DURATION"
        ),
    ] = "10m",
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train with a profile, and print the rate reached against the rate promised."""
    read_profile = read(profile)
    refuse_behind_store(read_profile)
    trackers = tracking.check(track or [])
    every_s = duration_s(every, "--checkpoint-every")
    _refuse_together(ctx, epochs)
    ranks = read_profile.conditions.ranks
    _refuse_torchrun(ranks)
    for name in RANK_VARIABLES:
        # It trains alone, or starts its ranks itself, regardless of what started it.
        os.environ.pop(name, None)
    # The allocator reads these variables when torch is imported, which happens below.
    os.environ.update(environment(read_profile.configuration))
    device = resolve_device(read_profile.conditions.device)
    cards = cards_for(device, ranks)
    if cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    chosen = model_of(read_profile, option("model").value(model))
    args = option("arg").value(arg) or read_profile.workload.args
    ref = find_workload(chosen, args)
    data_kind = data or read_profile.conditions.data
    data_ref = _data(data_kind)
    if read_profile.conditions.epoch_samples is None:
        data_ref = data_ref.model_copy(update={"epoch_samples": None})
    with without_threads() if ranks > 1 else contextlib.nullcontext():
        from autotune.training.applied import Applied
        from autotune.training.short_training import train as train_steps
        from autotune.training.whole_training import Checkpoints, TrainingSurroundings, train_epochs

    # The workload is compared separately, as it need not be the profile's own file. The ranks will match.
    differences = [row for row in Applied(read_profile).differences() if row[0] not in (CODE, "ranks")]
    workload_differences = unlike(read_profile, ref, chosen, args)
    for sentence in warnings_for([*differences, *workload_differences]):
        typer.echo(f"warning: {sentence}", err=True)
    # The promise does not cover any other training.
    same = not workload_differences
    if epochs is None:

        def short() -> TrainingRate:
            with _workloads_own_errors(ref.name):
                return train_steps(Applied(read_profile), ref, data_ref, steps=steps, on_step=partial(_say, steps))

        _print_short(in_each_rank(ranks, short, each_ends=False), ref.name, read_profile, same=same, as_json=as_json)
        return
    if data_ref.kind == "folder" and data_ref.path is not None:
        # A training must not resume with other files than it began with.
        data_ref = data_ref.model_copy(update={"identity": data_sets.tree(Path(data_ref.path)).identity})
    promised = read_profile.gives.samples_per_second if same else None
    folder = (checkpoints or profile.with_name(f"{profile.stem}-checkpoints")).expanduser().absolute()
    reports = TrainingReports(promised, trackers, read_profile, folder, live=sys.stderr.isatty())
    mark, store = uuid.uuid4().hex, Checkpoints(folder, reports.says)
    with stop_signals() as stop, store.held():
        newest = store.newest()

        def whole() -> WholeTraining:
            stop.join()
            first = own_rank().number == 0
            reports.silent = not first
            with reports.tracking, _workloads_own_errors(ref.name):
                energy_j = energy_counter(cards) if first else lambda: None
                return train_epochs(
                    Applied(read_profile),
                    ref,
                    data_ref,
                    epochs=epochs,
                    checkpoints=store,
                    newest=newest,
                    every_s=every_s,
                    around=TrainingSurroundings(reports, mark, stop, energy_j),
                )

        done = in_each_rank(ranks, whole, each_ends=True, advice=AGAIN)
    _print_whole(done, ref.name, read_profile, comparable=same, as_json=as_json)


def _refuse_together(ctx: typer.Context, epochs: int | None) -> None:
    """Refuse combinations of options that make no sense."""
    if epochs is not None and was_typed(ctx, "steps"):
        raise UsageError("--steps and --epochs are two trainings", advice="leave one of them out.")
    needing = {"checkpoints": "--checkpoints", "every": "--checkpoint-every", "track": "--track"}
    for name, flag in needing.items():
        if epochs is None and was_typed(ctx, name):
            raise UsageError(f"{flag} needs --epochs", advice="a training of some steps only shows the rate.")


def _refuse_torchrun(ranks: int) -> None:
    """Refuse to start a profile's ranks inside each rank of a launcher."""
    if ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            f"the profile is of {ranks} ranks, and torchrun has started this process already",
            advice="leave torchrun out: `autotune train` starts the ranks itself.",
        )


@contextlib.contextmanager
def _workloads_own_errors(name: str) -> Iterator[None]:
    """Attribute errors to the workload, whose code runs in this process."""
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{name} fails in this training: {type(error).__name__}: {one_line(str(error))[:200]}",
            advice="--debug shows where.",
        ) from error


def _say(steps: int, step: int, rate: float | None) -> None:
    ending = "\r" if sys.stderr.isatty() else "\n"
    shown = "warming up" if rate is None else f"{rate:.1f} samples/s"
    total = f"of {steps}" if step <= steps else "(until the rate settles)"
    typer.echo(f"step {step} {total}, {shown}      {ending}", err=True, nl=False)


def _print_short(reached: TrainingRate, name: str, profile: Profile, *, same: bool, as_json: bool) -> None:
    incomparable = reached.unsettled if same else "what was trained is not what was measured"
    promised, (low, high), rate = profile.gives.samples_per_second, profile.gives.ci95, reached.samples_per_s
    ratio = None if incomparable is not None or rate is None else rate / promised
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "model": name,
                "steps": reached.steps,
                "counted_steps": reached.counted_steps,
                "samples_per_second": rate,
                "ci95": reached.ci95_per_s and list(reached.ci95_per_s),
                "promised_samples_per_second": promised,
                "promised_ci95": [low, high],
                "ratio": ratio,
                "incomparable": incomparable,
                "first_step_s": reached.first_step_s,
                "last_loss": reached.last_loss,
            }
        )
        return
    if rate is None or reached.ci95_per_s is None:
        typer.echo(f"reached   not known after {reached.steps} steps")
    else:
        interval = "95 % interval {:.2f} to {:.2f}".format(*reached.ci95_per_s)
        typer.echo(f"reached   {rate:.2f} samples/s, {interval}, over {reached.counted_steps} of {reached.steps} steps")
    typer.echo(f"promised  {promised:.2f} samples/s, 95 % interval {low:.2f} to {high:.2f}")
    if rate is None or ratio is None:
        typer.echo(f"ratio     none: {incomparable}")
        if incomparable == reached.unsettled:
            typer.echo(f"          a larger --steps (such as {4 * reached.steps}) trains longer.")
        return
    position = "below" if rate < low else "above" if rate > high else "within"
    typer.echo(f"ratio     {ratio:.3f}, {position} the promised interval")


def _data(kind: str) -> DataRef:
    if kind == "generated":
        return data_sets.ensure_generated(processes=read_host().cores, on_progress=_progress)
    if kind == "synthetic":
        return data_sets.synthetic()
    if kind == "none":
        return DataRef(kind="none")
    if kind == "folder":
        raise UsageError("the profile was measured on a folder of yours", advice="name the folder with --data DIR.")
    folder = Path(kind).expanduser().absolute()
    if not folder.is_dir():
        raise WorkloadError(f"there is no folder {kind!r}", advice="--data takes a folder, generated, or synthetic.")
    # The workload itself checks the folder's content.
    return DataRef(kind="folder", path=str(folder))


def _progress(done: int, total: int) -> None:
    if done % 128 == 0 or done == total:
        typer.echo(f"making photographs: {done} of {total}", err=True)
