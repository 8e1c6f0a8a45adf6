"""The ``autotune`` console script: registers the commands and reports errors."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autotune.base.errors import KINDS, AutotuneError, InterruptedSearch, MachineError, ResumeRefusedError, UsageError
from autotune.base.version import __version__
from autotune.cli.help_text import CommandsInPanels, InPanels
from autotune.cli.output import flush_streams, prepare_streams, print_json_error, print_rich

_CODES = ["0 done", "1 a promise is not kept (verify)", *(f"{kind.exit_code} {kind.stands_for}" for kind in KINDS)]
_CODES.append("130 interrupted by Ctrl-C, 143 by SIGTERM (resume goes on)")
app = typer.Typer(
    name="autotune",
    cls=CommandsInPanels,
    help="Find the fastest way to run a PyTorch training on this machine.",
    epilog=f"Exit codes: {', '.join(_CODES)}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


#: Raised by a command line that cannot be parsed. Versions of Typer differ in which Click they take it from.
WRONGLY_TYPED: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


@cache
def _register() -> None:
    """Register the commands, once per process."""
    from autotune.cli import (
        daemon,
        doctor,
        export,
        init,
        jobs,
        profiles,
        rank,
        report,
        resume,
        run,
        search,
        show,
        space,
        storage,
        studies,
        submit,
        train,
        verify,
    )

    def add(
        name: str, command: Callable[..., None], says: str, cls: type[TyperCommand] | None = None, **more: Any
    ) -> None:
        app.command(name=name, cls=cls, short_help=says, **more)(command)

    add("search", search.search, "Find the fastest way to run a training on this machine.", InPanels)
    add("resume", resume.resume, "Go on with a study where it stands.")
    add("space", space.space, "What a search would try here, and why not the rest.", InPanels)
    add("init", init.command, "Write a workload, or a script's file, to start from.", init.TakesCommand)
    add("doctor", doctor.command, "What this machine can do, and what limits it.")
    add("report", report.command, "The answer of a study; with --full its whole story.")
    add("show", show.show, "The trials and heats of a study.")
    add("rank", rank.command, "A study ranked by another objective, nothing launched.")
    add("studies", studies.studies, "The studies of a folder.")
    add("export", export.export, "The profile for autotune, or for another trainer.")
    add("train", train.train, "Train with a profile; the rate against what it promises.")
    add("run", run.command, "Run a script with a profile, the script untouched.", context_settings=run.TAKES_COMMAND)
    add("verify", verify.command, "Whether a profile still keeps its promise.")
    usage, says = "[FILE.yaml] [OPTIONS]", "Leave a search to the daemon, or to Slurm."
    add("submit", submit.command, says, InPanels, options_metavar=usage)
    add("storage", storage.command, "A database in which several machines keep studies.")
    app.add_typer(jobs.app, name="jobs", short_help="The jobs of the daemon and of Slurm.")
    app.add_typer(profiles.app, name="profiles", short_help="The profiles in force, by training and hardware.")
    app.add_typer(daemon.app, name="daemon", short_help="Searches that wait for a quiet machine.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Declare the global options. `run` reads ``--debug`` itself, because an error may occur before this is called."""


def main() -> None:
    """Run ``sys.argv`` and exit with its exit code."""
    prepare_streams()
    code = run(sys.argv[1:])
    sys.exit(code or flush_streams())


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code.

    An error is reported on stderr in one sentence and, with ``--json``, also as an object on stdout.
    """
    from autotune.cli.completion import for_bash

    _register()
    own_words, command_words = _split(arguments)
    debug, as_json = "--debug" in own_words, "--json" in own_words
    # --debug is accepted after the command too, since users append it to the command line that just failed.
    arguments = [*(a for a in own_words if a != "--debug"), *command_words]
    try:
        with for_bash(), _named_files(arguments):
            code = app(arguments, prog_name="autotune", standalone_mode=not as_json)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except WRONGLY_TYPED as error:
        # Raised with --json only: without it, Typer shows such an error itself.
        error.show()
        code = int(error.exit_code)
        print_json_error(error.format_message(), code)
        return code
    except AutotuneError as error:
        if debug:
            traceback.print_exc()
        _explain(error)
        if as_json:
            print_json_error(str(error), error.exit_code, advice=error.advice, detail=error.detail)
        return error.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        fault, advice = f"a fault of autotune's own: {type(error).__name__}: {error}", "--debug shows where"
        typer.echo(f"autotune: {fault}", err=True)
        typer.echo(f"          {advice}; everything measured is kept.", err=True)
        if as_json:
            print_json_error(fault, AutotuneError.exit_code, advice=f"{advice}.")
        return AutotuneError.exit_code
    return code if isinstance(code, int) else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into autotune's part and what follows ``--`` or ``run``: a user's command, whose options
    are its own."""
    for i, word in enumerate(arguments):
        if word == "--" or (word == "run" and "--" not in arguments and all(a.startswith("-") for a in arguments[:i])):
            return arguments[:i], arguments[i:]
    return arguments, []


@contextlib.contextmanager
def _named_files(arguments: list[str]) -> Iterator[None]:
    """Turn an error about a name in the arguments that was not reported closer to its cause into one sentence."""
    try:
        yield
    except ValueError as error:
        undecodable = [a for a in arguments if not a.isascii() and a.encode(errors="ignore").decode() != a]
        if not undecodable:
            raise
        # Such a name may be valid for a file, but SQLite, YAML and JSON cannot store it.
        name = undecodable[0][:60].encode(errors="backslashreplace").decode()
        raise UsageError(f"{name!r} is not UTF-8 text", advice="rename what has this name, or use another.") from error
    except OSError as error:
        if error.filename is None:
            raise
        name, why = str(error.filename)[:60], error.strerror or error
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
            raise UsageError(f"{name!r} cannot be used: {why}", advice="name another file or folder.") from error
        raise MachineError(f"{name!r} cannot be used: {why}", advice="see to it, then try again.") from error


def _explain(error: AutotuneError) -> None:
    sentence = str(error)
    typer.echo(f"autotune: {sentence}{'' if sentence.endswith(('.', '!', '?')) else '.'}", err=True)
    if isinstance(error, ResumeRefusedError) and error.differences:
        from autotune.report.document import FittingTable

        table = FittingTable("what", "in the study", "now", box=None, pad_edge=True)
        for row in error.differences:
            table.add_row(*row)
        print_rich(table, stderr=True)
    if isinstance(error, InterruptedSearch) and error.so_far:
        typer.echo(f"          {error.so_far}", err=True)
    if error.advice:
        typer.echo(f"          {error.advice[:1].upper()}{error.advice[1:]}", err=True)
    if error.detail:
        typer.echo("\n" + "\n".join(f"  | {line}" for line in error.detail.splitlines()), err=True)
