"""``autotune init``: write a commented workload, either a plain one that runs or the parts of a training script, or the
file of a script that is tuned as it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autotune.cli.init_script import write_script_file
from autotune.cli.script_parts import Part, Script
from autotune.cli.script_syntax import NotTold
from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.workload.contract import DEFAULT_BATCH_SIZE

#: Where a context keeps the command behind ``--``.
_WORDS = "autotune.words"
_HEAD = '''\
"""A workload for autotune{origin}.

Search for its fastest configuration with: autotune search --model {name}
Every function takes a context first: ctx.device, ctx.batch_size, ctx.seed, ctx.data.path (--data DIR), ctx.arg("name").
"""
'''
_PLAIN_IMPORTS = """\
import torch
from torch import nn
from torch.utils.data import Dataset
"""
_CONSTANTS = """\
# The batch size that you train with today. The search tries others too, unless you add --fix batch_size={size}.
BATCH_SIZE = {size}{note}

# Settings of your own to search, read with ctx.knob("width"); the first value is what you use today.
# KNOBS = {{"width": (256, 512)}}
"""
_DATA = '''\

class RandomVectors(Dataset):
    """Made-up samples. Replace it by your data set, which decodes and augments in __getitem__ (in loader workers)."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(4096, 256, generator=generator)
        self.labels = torch.randint(0, 10, (4096,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]
'''
#: The functions of the plain workload: their arguments, what they are, and their lines.
_FUNCTIONS = {
    "model": (
        "ctx",
        "The model, on the CPU: autotune moves it to ctx.device.",
        ["return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))"],
    ),
    "dataset": (
        "ctx",
        "The training's data set, with a length and samples by index.",
        ["return RandomVectors(ctx.seed)"],
    ),
    "collate": ("ctx", "What makes a batch of a list of samples.", []),
    "optimizer": (
        "ctx, {model}",
        "The optimizer over the parameters of the model.",
        ["return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"],
    ),
    "loss": (
        "ctx, {model}, batch",
        "The loss of one batch, which is on the device: a scalar. Autocast is autotune's task.",
        ["inputs, labels = batch", "return nn.functional.cross_entropy(model(inputs), labels)"],
    ),
}


class TakesCommand(TyperCommand):
    """A command that tells its own arguments from a command of the user's behind ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_WORDS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND…]"]


def command(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="File to write.  [default: mine.py, SCRIPT_workload.py, SCRIPT.autotune.yaml]"),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="A training script to take the parts from; it is not run.", metavar="SCRIPT"),
    ] = None,
) -> None:
    """Write a workload to start from, or, with a command behind --, the file of a training script as it stands.

    The command is run with --help, and its options that set a knob are written to the file, for `autotune search
    --script FILE`.
    """
    words = ctx.meta[_WORDS]
    if words:
        if from_ is not None:
            raise UsageError("both --from and a command name a script", advice="leave one of them out.")
        write_script_file(words, file)
        return
    target = file or (Path("mine.py") if from_ is None else from_.with_name(f"{from_.stem}_workload.py"))
    if target.suffix != ".py" or not target.stem.isidentifier():
        raise UsageError(
            f"{target.name} cannot be imported", advice="give it a name of letters and digits that ends in .py."
        )
    if target.exists():
        raise UsageError(f"{target} exists already", advice="name another file, or move that one away.")
    missing: list[tuple[str, str]] = []
    if from_ is None:
        text = _plain(target.name)
    else:
        text, missing = _from_script(target.name, from_)
    write_atomic(target, text)
    typer.echo(f"wrote {target}")
    for name, reason in missing:
        typer.echo(f"  {name}: not told by the script, because {reason}; write it where TODO stands")
    typer.echo(f"next: autotune search --model {target}" if not missing else f"then: autotune search --model {target}")


def _plain(name: str) -> str:
    parts = [_HEAD.format(origin="", name=name), _PLAIN_IMPORTS, _CONSTANTS.format(size=64, note=""), _DATA]
    functions = [_function(n, a, t, lines) for n, (a, t, lines) in _FUNCTIONS.items() if lines]
    return "\n".join(parts) + "".join(functions)


def _function(name: str, arguments: str, title: str, lines: list[str], model: str = "model") -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f'\n\ndef {name}({arguments.format(model=model)}):\n    """{title}"""\n{body}'


def _from_script(name: str, script: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the workload's text, and the parts that the script does not tell, each with the reason."""
    try:
        found = Script(script.read_text())
    except (OSError, ValueError, SyntaxError) as error:
        raise UsageError(f"{script} cannot be read as Python: {error}") from error
    missing: list[tuple[str, str]] = []
    functions = []
    readers: dict[str, Callable[[], Part | None]] = {n: getattr(found, n) for n in _FUNCTIONS}
    for one, read in readers.items():
        arguments, title, _ = _FUNCTIONS[one]
        try:
            part = read()
        except NotTold as reason:
            missing.append((one, str(reason)))
            todo = f"{name}: {one}(…) is still to be written; {script.name} did not tell it."
            lines = [f"# TODO: {reason}.", f"raise NotImplementedError({todo!r})"]
            functions.append(_function(one, arguments, title, lines))
            continue
        if part is not None:
            where = f"# From line {part.line} of {script.name}."
            functions.append(_function(one, arguments, title, [where, *part.lines], part.model))
    size, note = DEFAULT_BATCH_SIZE, ""
    try:
        size = found.batch_size()
    except NotTold as reason:
        missing.append(("BATCH_SIZE", str(reason)))
        note = f"  # TODO: {reason}"
    parts = [
        _HEAD.format(origin=f", with the parts of {script.name}", name=name),
        found.support() + "\n",
        _CONSTANTS.format(size=size, note=note),
    ]
    return "\n".join(parts) + "".join(functions), missing
