"""``autotune run``: train with a profile by the user's own command, with its script unchanged, or tune it while it
trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.base.layout import DEFAULT_STUDIES, LaunchFiles
from autotune.base.parsing import duration_s
from autotune.base.records import CommandRef, LiveSpec
from autotune.cli.options import Map, ScriptFile, study_of, with_script
from autotune.cli.output import flush_streams
from autotune.knobs import KNOBS, spell
from autotune.launcher.script_entry import (
    agent_environment,
    agent_plan,
    check_flags,
    places,
    probe_plan,
    refuse_deaf,
    set_by,
    told_values,
    words_of,
)
from autotune.machine.host import read_host
from autotune.profile import Profile, read
from autotune.search import NEWEST, load_outcome
from autotune.search.ranking import profile_from
from autotune.search.request import require_linux
from autotune.search.study_folders import numbered_folder
from autotune.search.subject import command_name, command_ref, unlike_the_search
from autotune.space import too_large
from autotune.study.request import option

#: Everything after the first word of the command belongs to the command.
TAKES_COMMAND = {"allow_interspersed_args": False}


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND…", help="What to run, such as python train.py --epochs 90."),
    ] = None,
    profile: Annotated[Path | None, typer.Option("--profile", help="A profile.yaml.", metavar="FILE")] = None,
    trial: Annotated[
        int | None, typer.Option("--trial", help="Instead of a profile a trial of a study, proven or not.", min=0)
    ] = None,
    study: Annotated[str, typer.Option("--study", help="With --trial: of which.  [default: the newest]")] = NEWEST,
    script: ScriptFile = None,
    flags: Map = None,
    live: Annotated[
        bool, typer.Option("--live", help="Tune the training while it goes on, instead of using a profile.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="--live: precision may change the maths.", metavar="KNOB", show_default=False),
    ] = None,
    expect: Annotated[
        str, typer.Option("--expect", help="--live: how long the training is expected to take.", metavar="DURATION")
    ] = "10m",
    studies: Annotated[
        Path, typer.Option("--studies", help="--live, --trial: folder of all studies.", metavar="FOLDER")
    ] = DEFAULT_STUDIES,
) -> None:
    """Run a training script with a profile, the script untouched, or tune it while it trains.

    The command takes this one's place: its output, its exit code and its signals are its own. One line on stderr says
    what is set, after six steps. {batch_size} and the like in the command are replaced by the profile's values.

    With --live, the training begins at once. In its first minutes configurations take turns, each for some steps, and
    every step trains; the surest of those that are faster stays. Profile and report are left in a folder of their own.
    """
    typed, words = with_script({"map": flags}, words or (), script)
    if not words:
        raise UsageError("nothing says what to run", advice="the command stands behind --, or in a file: --script.")
    refuse_deaf(words)
    if live + (profile is not None) + (trial is not None) != 1:
        raise UsageError("one of --profile, --trial and --live is needed", advice="--live tunes without a profile.")
    if live:
        if typed["map"]:
            raise UsageError("--live sets nothing by words of a command", advice="leave --map out.")
        _become(words, _beside(words, tuple(allow or ()), duration_s(expect, "--expect"), studies))
        return
    promised, name = _promised(profile, study, studies, trial)
    config = promised.configuration
    excess = too_large(config, read_host())
    if excess is not None:
        raise UsageError(f"the profile cannot be applied here: {excess}", advice="search on this machine.")
    map_flags = option("map").value(typed["map"])
    ref = CommandRef(words=tuple(words), folder=os.getcwd(), flags=map_flags, own=promised.workload.own)
    check_flags(ref)
    _refuse_untold(ref, promised)
    in_command = set_by(ref)
    instructions = agent_plan(
        config,
        name,
        in_command=in_command,
        own=promised.baseline.configuration,
        compared=bool(promised.gives.same_data),
    )
    sentence = unlike_the_search(words, promised)
    if sentence is not None:
        typer.echo(f"autotune: {name}: {sentence}", err=True)
    _become(words_of(ref, config), agent_environment(os.environ, instructions, config, in_command=in_command))


def _promised(profile: Path | None, study: str, studies: Path, trial: int | None) -> tuple[Profile, str]:
    """Return the profile to run with, and its name."""
    if profile is not None:
        promised, name = read(profile), profile.name
    else:
        files = study_of(study, studies)
        promised, name = profile_from(files, load_outcome(files), trial), f"{files.name}, trial {trial}"
    if promised.gives.unproven is not None:
        typer.echo(f"autotune: {name}: {promised.gives.unproven}", err=True)
    return promised, name


def _refuse_untold(script: CommandRef, profile: Profile) -> None:
    """Refuse a profile with a value that the command would have to set, if ``--map`` does not say how."""
    own_values = {**profile.baseline.configuration, **script.own}
    for name, values in told_values(script).items():
        value = profile.configuration.get(name)
        if value is not None and value not in values and value != own_values.get(name):
            raise UsageError(
                f"the profile has {name}={spell(value)}, and --map says nothing of it",
                advice=f"give --map {name}:{spell(value)}='…', too.",
            )


def _beside(words: list[str], allow: tuple[str, ...], expect_s: float, studies: Path) -> dict[str, str]:
    """Start the process that tunes the training, beside this one; return the environment that loads the agent into it.

    Raises:
        UsageError: a placeholder in the command has no value yet, or --allow names anything but precision.
    """
    if places(words):
        raise UsageError(
            f"--live does not fill in {{{sorted(places(words))[0]}}}", advice="write the value into the command."
        )
    for name in allow:
        if name not in KNOBS or not KNOBS[name].changes_maths or not KNOBS[name].switchable or name == "batch_size":
            raise UsageError(f"--allow {name} is not possible", advice="--allow precision is.")
    ref = command_ref(CommandRef(words=tuple(words), folder=os.getcwd()), command_name(words))
    require_linux()
    files = numbered_folder(f"{ref.name}-live", studies)
    launch = LaunchFiles(files.folder)
    instructions = {
        **probe_plan(in_command=set()),
        "watch": str(launch.trail),
        "commands": str(launch.commands),
        "live": True,
    }
    env = agent_environment(os.environ, instructions, {})
    spec = LiveSpec(
        folder=str(files.folder), pid=os.getpid(), words=tuple(words), workload=ref, allow=allow, expect_s=expect_s
    )
    write_atomic(launch.spec, spec.model_dump_json(indent=2))
    os.mkfifo(launch.commands)
    # Held open from the start, or the agent would find nobody at the other end.
    pipe = os.open(launch.commands, os.O_RDWR | os.O_CLOEXEC)
    flush_streams()
    child = os.fork()
    if not child:
        # The script must not have a child that it does not know of, so this intermediate process exits at once.
        try:
            with open(launch.stdout, "ab") as log:
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "autotune.child.live", str(launch.spec), str(pipe)],
                    pass_fds=(pipe,),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return env


def _become(words: list[str], env: dict[str, str]) -> None:
    """Replace this process."""
    flush_streams()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these signals, and ignored signals stay ignored in the new program.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, env)
    except FileNotFoundError:
        raise UsageError(f"there is no program {words[0]!r}", advice="it is looked for as in a shell.") from None
    except OSError as error:
        raise UsageError(f"{words[0]!r} cannot be run: {error.strerror}") from None
