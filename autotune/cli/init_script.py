"""``autotune init -- python train.py``: writes the file of a training script, from what its ``--help`` says."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import typer

from autotune.cli.help_text import options_in
from autotune.cli.known_flags import KnownFlag, known_flags
from autotune.cli.script_file import ENDING, quoted
from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.search.script import command_name
from autotune.search.study_folders import require_utf8

#: How long a script may take to say what its options are: it may import a lot first.
HELP_S = 60.0
#: More of a help text is not read.
_MOST = 2**18
_HEAD = """\
# How autotune runs {name}, and what its own options set. Read it through, then: autotune search --script {file}
# Options of the command line win. Lines behind # are guesses or examples, and not in force.

# The command as it stands, without these flags, run in the folder where autotune is started.
command: {command}

# What its own options set, as --map: "KNOB:VALUE" for one value, "KNOB" for any, with {{KNOB}} in its place.
# `autotune space --script {file}` lists knobs and values, and what the script does by itself.
map:
"""
_OUTPUT = """
# Its option for the folder that it writes to: each launch of a search gets one of its own, removed at its end.
{line}
# Or run each launch in an empty folder, if it writes to the current one.
# scratch: true

# The samples of one step of its optimizer, where its loader is not PyTorch's.
# samples_per_step: 256

# Of a program that is not PyTorch's: how it tells its rate. The map above is all that is searched then.
# rate: "(?P<rate>[0-9.]+) images/s"
# rate_file: metrics.jsonl
"""


def write_script_file(words: Sequence[str], file: Path | None) -> None:
    """Run a command with ``--help``, and write the file of its script.

    Raises:
        UsageError: the command cannot be run or written, or the file exists.
    """
    for word in words:
        require_utf8(Path(word))
    target = file or Path(f"{command_name(words)}{ENDING}")
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{target.name} is no YAML file", advice=f"give it a name that ends in {ENDING}.")
    if target.exists():
        raise UsageError(f"{target} exists already", advice="name another file, or move that one away.")
    text, lack = _help_of(words)
    flags = known_flags(options_in(text))
    if lack is None and not flags:
        lack = "tells no option that autotune knows"
    write_atomic(target, _text(words, target.name, flags))
    typer.echo(f"wrote {target}")
    for flag in flags:
        if flag.sure:
            typer.echo(f"  {flag.name or 'output folder'}: {flag.words}")
    guesses = [flag.name or "output folder" for flag in flags if not flag.sure]
    if guesses:
        typer.echo(f"  guesses, not in force: {', '.join(guesses)}")
    if lack is not None:
        typer.echo(f"  `{shlex.join(words)} --help` {lack}: write by hand what its options set")
    typer.echo(f"next: read it, then: autotune search --script {shlex.quote(str(target))}")


def _help_of(words: Sequence[str]) -> tuple[str, str | None]:
    """Return a command's help text, and why there is none, if so, as a predicate.

    Raises:
        UsageError: the program cannot be run.
    """
    # Wide, so that nothing is broken in two.
    env = {**os.environ, "COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    try:
        child = subprocess.Popen(
            [*words, "--help"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"{words[0]!r} cannot be run: {error.strerror}", advice="it is looked for as in a shell."
        ) from None
    try:
        said, _ = child.communicate(timeout=HELP_S)
    except subprocess.TimeoutExpired:
        return "", f"did not end within {HELP_S:.0f} s"
    finally:
        # What it may have started goes, too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    text = said[:_MOST].decode(errors="replace")
    if child.returncode:
        last = next((_plain(line.strip())[:120] for line in reversed(text.splitlines()) if line.strip()), "")
        return "", f"ended with exit code {child.returncode}{f' ({last})' if last else ''}"
    return text, None if text.strip() else "says nothing"


def _text(words: Sequence[str], file: str, flags: Sequence[KnownFlag]) -> str:
    name = next((word for word in words if word.endswith(".py")), words[0])
    maps = [flag for flag in flags if flag.name]
    lines = [line for flag in maps for line in _lines(flag)]
    if not maps:
        lines = ['  # "num_workers": "--workers {num_workers}"', '  # "precision:bf16": "--amp --amp-dtype bfloat16"']
    folder = next((flag for flag in flags if not flag.name), None)
    output = '# output_flag: "--output-dir"'
    if folder is not None:
        output = f"{'' if folder.sure else '# '}output_flag: {quoted(folder.words)}{_remark(folder)}"
    head = _HEAD.format(name=_plain(name), file=_plain(file), command=quoted(shlex.join(words)))
    return head + "".join(f"{line}\n" for line in lines) + _OUTPUT.format(line=output)


def _lines(flag: KnownFlag) -> list[str]:
    line = f"{quoted(flag.name)}: {quoted(flag.words)}{_remark(flag)}"
    if flag.sure:
        return [f"  {line}"]
    if flag.knob is not None and flag.knob.changes_maths and flag.knob.numeric:
        return ["  # Changes the training; the search tries several, once this line is in force:", f"  # {line}"]
    return [f"  # {line}"]


def _remark(flag: KnownFlag) -> str:
    return f"  # {_plain(flag.remark)[:80]}" if flag.remark else ""


def _plain(text: str) -> str:
    """Return text that cannot end a comment."""
    return "".join(c if c.isprintable() else " " for c in text)
