"""``autotune submit``: submit a search, or many, to the daemon or to Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.daemon_client import StateDir, client
from autotune.cli.job_file import read_jobs
from autotune.cli.job_request import error_prefix, parsed_request, repeatable_options, request_of, typed_words
from autotune.cli.matrix import matrix_named
from autotune.cli.options import Json
from autotune.cli.output import print_json
from autotune.cli.submit_matrix import submit_matrix
from autotune.cli.submit_slurm import submit_to_slurm
from autotune.cli.workload_check import unchecked_workloads
from autotune.base.errors import UsageError
from autotune.base.records import SCHEMA_VERSION


def command(
    ctx: typer.Context,
    priority: Annotated[int, typer.Option("--priority", help="The highest goes first.", min=-(10**6), max=10**6)] = 0,
    gpu: Annotated[str, typer.Option("--gpu", help="any, a part of a model's name, or a UUID.", metavar="GPU")] = "any",
    not_before: Annotated[
        str | None, typer.Option("--not-before", help="22:00, 2026-11-23T22:00, or +2h.", metavar="TIME")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Run only between these times of day.", metavar="22:00-07:00")
    ] = None,
    max_hours: Annotated[float | None, typer.Option("--max-hours", help="End it after running so long.")] = None,
    after: Annotated[
        int | None, typer.Option("--after", help="Wait until this job is done.", metavar="JOB", min=1)
    ] = None,
    on_reboot: Annotated[str, typer.Option("--on-reboot", help="resume or pause.", metavar="POLICY")] = "resume",
    on_done: Annotated[
        str | None, typer.Option("--on-done", help="A command or an http(s) address to tell.", metavar="COMMAND|URL")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Memory of the machine it may use.", metavar="16GiB")
    ] = None,
    cores: Annotated[int | None, typer.Option("--cores", help="Cores it may use.", min=1)] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="Give it a variable; may be repeated.", metavar="NAME[=VALUE]")
    ] = None,
    keep_fresh: Annotated[
        bool, typer.Option("--keep-fresh", help="Search again when driver, torch, GPU or workload have changed.")
    ] = False,
    to: Annotated[str, typer.Option("--to", help="Whose queue: daemon or slurm.", metavar="QUEUE")] = "daemon",
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm's.", metavar="NAME")] = None,
    gres: Annotated[str | None, typer.Option("--gres", help="Slurm's, such as gpu:h100:1.", metavar="GRES")] = None,
    time: Annotated[
        str | None, typer.Option("--time", help="Of one run of the job, for Slurm.", metavar="DURATION")
    ] = None,
    cpus: Annotated[int | None, typer.Option("--cpus", help="Cores, for Slurm.", min=1)] = None,
    mem: Annotated[str | None, typer.Option("--mem", help="Memory of the node, for Slurm.", metavar="16GiB")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm's.", metavar="NAME")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Slurm's.", metavar="NAME")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", help="A further option of sbatch; may be repeated.", metavar="KEY[=VALUE]"),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Several jobs, as YAML; see the documentation.", metavar="FILE.yaml")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Of a matrix: say what would be submitted; submit nothing.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Of a matrix: submit also what has a profile, or was searched.")
    ] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Leave a search to the daemon, or to Slurm; with MATRIX.yaml, many. Takes all that `autotune search` takes, and a
    command behind --."""
    try:
        Path.cwd()
    except OSError:
        raise UsageError("this folder is not there any more", advice="change to one that is.") from None
    matrix = None if file is not None else matrix_named(ctx.args, ctx.parent)
    if matrix is not None:
        given = [*typed_words(ctx), *(word for word in ctx.args if word != matrix)]
        submit_matrix(
            Path(matrix), ctx.parent, to, given, state_dir=state_dir, again=again, dry_run=dry_run, as_json=as_json
        )
        return
    if dry_run:
        raise UsageError("--dry-run submits nothing", advice="`autotune search --dry-run` says what would be tried.")
    if again:
        raise UsageError("--again is for a matrix", advice="without it, what is submitted twice is searched twice.")
    if file is not None:
        # Options on the command line are defaults for all jobs of the file.
        given = [*typed_words(ctx), *ctx.args]
        jobs_asked = []
        for number, words in enumerate(read_jobs(file, repeatable_options(ctx.parent)), 1):
            with error_prefix(f"{file}, job {number}"):
                jobs_asked.append(parsed_request(ctx.parent, to, [*given, *words]))
    else:
        jobs_asked = [request_of(ctx, to, ctx.args)]
    if to == "slurm":
        submit_to_slurm(state_dir, jobs_asked, as_json=as_json)
        return
    requests = [request for request, _ in jobs_asked]
    asked = client(state_dir)
    # Where no daemon runs, nothing is imported.
    asked.status()
    for sentence in unchecked_workloads(requests):
        typer.echo(f"autotune: {sentence}", err=True)
    jobs = asked.submit(*requests)
    if as_json:
        rows = [{"id": job.id, "study": job.request.spec.name, "state": job.state.value} for job in jobs]
        print_json({"schema_version": SCHEMA_VERSION, "jobs": rows})
        return
    for job in jobs:
        waits = asked.waits_for(job.id)
        typer.echo(f"job {job.id}: {job.request.spec.name}{'' if waits is None else f'; it waits: {waits}'}")
    one = f"`autotune jobs show {jobs[0].id}` says more, `autotune jobs wait {jobs[0].id}` waits for its end."
    typer.echo(one if len(jobs) == 1 else "`autotune jobs` lists them.")
