"""``autotune train``: train with a profile, and compare the rate with the promised one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.catalog import find_workload
from autotune.cli.options import Args, Json, typer_option
from autotune.cli.output import print_json
from autotune.data import sets as data_sets
from autotune.errors import AutotuneError, UsageError, WorkloadError
from autotune.formatting import one_line
from autotune.machine.host import read_host
from autotune.profile import Profile, read, warnings_for
from autotune.records import SCHEMA_VERSION, DataRef
from autotune.search.recheck import refuse_behind_store
from autotune.search.request import model_of, resolve_device
from autotune.space import environment
from autotune.study.options import option

if TYPE_CHECKING:
    from autotune.short_training import TrainingRate


def train(
    profile: Annotated[Path, typer.Option("--profile", help="A profile.yaml.", metavar="FILE")],
    model: Annotated[
        str, typer_option(option("model"), help_="The model; the profile's, if its code is unchanged.")
    ] = "",
    arg: Args = None,
    data: Annotated[str, typer.Option("--data", help="A folder, generated, synthetic.  [default: as measured]")] = "",
    steps: Annotated[int, typer.Option("--steps", help="Train at least so many, until the rate settles.", min=3)] = 50,
    as_json: Json = False,
) -> None:
    """Train with a profile, and print the rate reached against the rate promised."""
    read_profile = read(profile)
    refuse_behind_store(read_profile)
    # The allocator reads these variables when torch is imported, which happens below.
    os.environ.update(environment(read_profile.configuration))
    device = resolve_device(read_profile.conditions.device)
    if device.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device.gpu.uuid
    chosen = model_of(read_profile, option("model").value(model))
    ref = find_workload(chosen, option("arg").value(arg) or read_profile.workload.args)
    kind = data or read_profile.conditions.data
    found = _data(kind)
    if read_profile.conditions.epoch_samples is None:
        found = found.model_copy(update={"epoch_samples": None})
    from autotune.applied import load_profile
    from autotune.short_training import train as run

    applied = load_profile(profile)
    differences = applied.differences()
    if ref.sha256 and ref.sha256 != read_profile.workload.sha256:
        differences.append(("workload_sha256", read_profile.workload.sha256[:12], ref.sha256[:12]))
    for sentence in warnings_for(differences):
        typer.echo(f"warning: {sentence}", err=True)

    def say(step: int, rate: float | None) -> None:
        ending = "\r" if sys.stderr.isatty() else "\n"
        shown = "warming up" if rate is None else f"{rate:.1f} samples/s"
        of = f"of {steps}" if step <= steps else "(until the rate settles)"
        typer.echo(f"step {step} {of}, {shown}      {ending}", err=True, nl=False)

    try:
        reached = run(applied, ref, found, steps=steps, on_step=say)
    except AutotuneError:
        raise
    except Exception as error:
        # The workload's code runs in this process.
        raise WorkloadError(
            f"{ref.name} fails in this training: {type(error).__name__}: {one_line(str(error))[:200]}",
            advice="--debug shows where.",
        ) from error
    # The promise does not cover a workload whose code has changed.
    same = not ref.sha256 or ref.sha256 == read_profile.workload.sha256
    incomparable = reached.unsettled if same else "what was trained is not what was measured"
    if as_json:
        _print_json(ref.name, reached, read_profile, incomparable)
    else:
        _print(reached, read_profile, incomparable)


def _ratio(reached: TrainingRate, profile: Profile, incomparable: str | None) -> float | None:
    """Return the rate reached over the rate promised; ``None`` if they cannot be compared."""
    if incomparable is not None or reached.samples_per_s is None:
        return None
    return reached.samples_per_s / profile.gives.samples_per_second


def _print_json(name: str, reached: TrainingRate, profile: Profile, incomparable: str | None) -> None:
    print_json(
        {
            "schema_version": SCHEMA_VERSION,
            "model": name,
            "steps": reached.steps,
            "counted_steps": reached.counted_steps,
            "samples_per_second": reached.samples_per_s,
            "ci95": reached.ci95_per_s and list(reached.ci95_per_s),
            "promised_samples_per_second": profile.gives.samples_per_second,
            "promised_ci95": list(profile.gives.ci95),
            "ratio": _ratio(reached, profile, incomparable),
            "incomparable": incomparable,
            "first_step_s": reached.first_step_s,
            "last_loss": reached.last_loss,
        }
    )


def _print(reached: TrainingRate, profile: Profile, incomparable: str | None) -> None:
    promised, (low, high) = profile.gives.samples_per_second, profile.gives.ci95
    rate, ratio = reached.samples_per_s, _ratio(reached, profile, incomparable)
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
    where = "below" if rate < low else "above" if rate > high else "within"
    typer.echo(f"ratio     {ratio:.3f}, {where} the promised interval")


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
