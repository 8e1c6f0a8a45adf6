"""`autotune init`."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autotune.base.errors import UsageError
from autotune.base.files import write_atomic
from autotune.cli.help_text import options_in
from autotune.cli.options import ENDING, KnownFlag, known_flags, quoted
from autotune.search.study_folders import require_utf8
from autotune.search.subject import command_name
from autotune.workload.contract import DEFAULT_BATCH_SIZE

# ``autotune init -- python train.py``: writes a training script's file, based on its ``--help``.

#: How long a script may take to print its help: it may import a lot first.
HELP_S = 60.0
#: At most so much of a help text is read.
_MOST = 2**18
_SCRIPT_HEAD = """\
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
    """Run a command with ``--help``, and write its script's file.

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
    """Return a command's help text and, if there is none, the reason as a predicate."""
    # Wide, so that no line is wrapped.
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
        output, _ = child.communicate(timeout=HELP_S)
    except subprocess.TimeoutExpired:
        return "", f"did not end within {HELP_S:.0f} s"
    finally:
        # Also end whatever it has started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    text = output[:_MOST].decode(errors="replace")
    if child.returncode:
        last = next((_without_control(line.strip())[:120] for line in reversed(text.splitlines()) if line.strip()), "")
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
    head = _SCRIPT_HEAD.format(
        name=_without_control(name), file=_without_control(file), command=quoted(shlex.join(words))
    )
    return head + "".join(f"{line}\n" for line in lines) + _OUTPUT.format(line=output)


def _lines(flag: KnownFlag) -> list[str]:
    line = f"{quoted(flag.name)}: {quoted(flag.words)}{_remark(flag)}"
    if flag.sure:
        return [f"  {line}"]
    if flag.knob is not None and flag.knob.changes_maths and flag.knob.numeric:
        return ["  # Changes the training; the search tries several, once this line is in force:", f"  # {line}"]
    return [f"  # {line}"]


def _remark(flag: KnownFlag) -> str:
    return f"  # {_without_control(flag.remark)[:80]}" if flag.remark else ""


def _without_control(text: str) -> str:
    """Return the text without characters that could end a comment."""
    return "".join(c if c.isprintable() else " " for c in text)


#: Methods that move a model to a device or switch its mode, which autotune does itself.
PLACING = ("to", "cuda", "cpu", "train", "float")
#: Wrappers of a model that autotune applies itself, or that are for several processes.
_WRAPPERS = ("compile", "DataParallel", "DistributedDataParallel", "DDP")


class NotTold(Exception):
    """The source does not determine a part; the message is the reason, as a clause."""


def _is_dtype(node: ast.expr) -> bool:
    """Return whether an argument of ``to()`` is a type: ``torch.long``, ``other.dtype``, a name with "dtype" in it."""
    last = dotted(node).rpartition(".")[2]
    return "dtype" in ast.unparse(node) or (dotted(node).startswith("torch.") and last not in ("device", ""))


class Plain(ast.NodeTransformer):
    """Replaces command-line options by their defaults, and drops what autotune does itself."""

    def __init__(self, defaults: dict[str, str], *, placed: bool) -> None:
        self._defaults = defaults
        self._placed = placed

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == self._defaults.get(""):
            if node.attr not in self._defaults:
                raise NotTold(f"{ast.unparse(node)} has no default")
            return ast.parse(self._defaults[node.attr], mode="eval").body
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = dotted(node.func).split(".")[-1] or getattr(node.func, "attr", "")
        if name in _WRAPPERS and node.args and name != "compile":
            return node.args[0]
        if dotted(node.func) == "torch.compile" and node.args:
            return node.args[0]
        if self._placed or not isinstance(node.func, ast.Attribute) or name not in PLACING:
            return node
        if ast.unparse(node.func).startswith("torch."):
            return node
        # Of `x.to("cuda", torch.long)`, the device goes and the type stays.
        casts = [a for a in node.args if _is_dtype(a)]
        named = [k for k in node.keywords if k.arg == "dtype" or _is_dtype(k.value)]
        if name == "to" and (casts or named):
            return ast.copy_location(ast.Call(node.func, casts, named), node)
        return node if name == "float" else node.func.value

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        self.generic_visit(node)
        return None if ast.unparse(node.targets[0]).strip("()") == ast.unparse(node.value).strip("()") else node


def statements(body: list[ast.stmt], conditional: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements in order, including those inside blocks but not inside definitions, with whether each may be
    skipped."""
    for node in body:
        yield node, conditional
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        decides = isinstance(node, ast.If | ast.Try | ast.While) and "__name__" not in ast.unparse(node).split("\n")[0]
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, name, []), conditional or decides)


def targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.With):
        return [item.optional_vars for item in node.items if item.optional_vars is not None]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For) else []


def bound(target: ast.expr) -> set[str]:
    """Return the variables that an assignment to this target binds or changes."""
    if isinstance(target, ast.Tuple | ast.List):
        return {name for part in target.elts for name in bound(part)}
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        target = target.value
    return {target.id} if isinstance(target, ast.Name) else set()


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {name for target in targets(node) for name in bound(target)}


def dotted(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if text.replace(".", "").isidentifier() else ""


def keyword(call: ast.Call, name: str) -> ast.expr:
    """Return the value of a keyword argument, or the constant ``None``."""
    value = next((k.value for k in call.keywords if k.arg == name), None)
    return value or ast.Constant(None, lineno=call.lineno, col_offset=0)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, except those inside its functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from own(child)


def argparse_defaults(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield options with the source of their defaults, and, under the empty name, the variable that holds them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).endswith("parse_args()"):
            yield "", ast.unparse(node.targets[0])
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            dest = keyword(node, "dest")
            long = max(flags, key=lambda f: (f.startswith("--"), len(f)), default="").lstrip("-").replace("-", "_")
            name = str(dest.value) if isinstance(dest, ast.Constant) and dest.value else long
            action = getattr(keyword(node, "action"), "value", None)
            if action in ("store_true", "store_false"):
                yield name, repr(action == "store_false")
            elif any(k.arg == "default" for k in node.keywords):
                yield name, ast.unparse(keyword(node, "default"))


# The parts of a training script that a workload needs, extracted from its source. The script is never run.
#
# The optimizer names the model, ``backward()`` the loss, ``DataLoader(…)`` the data set. Each part is the expression
# there, with the earlier assignments that it depends on. Where that is uncertain (a value decided by a condition, an
# option without a default), the part is left out.


_OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "LBFGS")
_Scope = ast.Module | ast.FunctionDef


@dataclass(frozen=True)
class Part:
    """Statements that end with a ``return``, without indentation.

    Attributes:
        lines: the source. line: its line in the script. model: name of the model there.
    """

    lines: list[str]
    line: int
    model: str = "model"


class Script:
    """A training script as a syntax tree.

    Raises:
        SyntaxError: (from the constructor) the text is not valid Python.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tree = ast.parse(text)
        self._scopes: list[_Scope] = [self._tree, *(n for n in ast.walk(self._tree) if isinstance(n, ast.FunctionDef))]
        self._top = {name: node for node in self._tree.body for name in defined(node)}
        self._defaults = dict(argparse_defaults(self._tree))
        self._taken: dict[int, ast.stmt] = {}

    def optimizer(self) -> Part:
        scope, call, model = self._optimizer()
        return self._part(scope, call, {model}, model)

    def model(self) -> Part:
        scope, call, model = self._optimizer()
        return self._part(scope, ast.copy_location(ast.Name(model, ast.Load()), call), set(), model, calls=True)

    def dataset(self) -> Part:
        scope, call = self._loader()
        if not call.args and not any(k.arg == "dataset" for k in call.keywords):
            raise NotTold("the DataLoader names no data set")
        return self._part(scope, call.args[0] if call.args else keyword(call, "dataset"), set())

    def collate(self) -> Part | None:
        scope, call = self._loader()
        function = keyword(call, "collate_fn")
        return None if isinstance(function, ast.Constant) else self._part(scope, function, set())

    def batch_size(self) -> int:
        scope, call = self._loader()
        expression = call.args[1] if len(call.args) > 1 else keyword(call, "batch_size")
        *before, last = self._part(scope, expression, set()).lines
        value = last.removeprefix("return ")
        value = next((line.partition(" = ")[2] for line in before if line.startswith(f"{value} = ")), value)
        if not value.isdigit():
            raise NotTold("the batch size is no number there")
        return int(value)

    def loss(self) -> Part:
        scope, loop, name, line = self._backward()
        batch = loop.target
        if isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "enumerate" and isinstance(batch, ast.Tuple):
            batch = batch.elts[1]
        opt_scope, _, model = self._optimizer()
        used = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name)}
        model_name = next((n for n in sorted(used) if self._origin(scope, n) == (opt_scope, model)), None)
        if model_name is None:
            raise NotTold("the model in the training loop is not certainly the optimizer's")
        end = ast.Name(name, ast.Load(), lineno=line, col_offset=0)
        part = self._part(scope, end, {model_name, *bound(batch)}, model_name, placed=True)
        unpacked = ast.unparse(batch)
        unpacked = unpacked[1:-1] if unpacked.startswith("(") else unpacked
        return Part([f"{unpacked} = batch", *part.lines], part.line, model_name)

    def support(self) -> str:
        """Return the script's own imports, definitions and constants used by the parts read so far, in script order."""
        lines, text = self._text.splitlines(), ""
        for first, node in sorted(self._taken.items()):
            gap = "\n\n\n" if isinstance(node, ast.FunctionDef | ast.ClassDef) else "\n"
            text += gap + "\n".join(lines[first - 1 : node.end_lineno])
        return text.strip("\n")

    def _optimizer(self) -> tuple[_Scope, ast.Call, str]:
        for scope, call in self._calls():
            *before, last = dotted(call.func).split(".")
            if last in _OPTIMIZERS or ("optim" in before and last[:1].isupper()):
                of = next((n for n in ast.walk(call) if getattr(n, "attr", "").endswith("parameters")), None)
                if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name):
                    return scope, call, of.value.id
        raise NotTold("no torch.optim optimizer over MODEL.parameters() is assigned")

    def _loader(self) -> tuple[_Scope, ast.Call]:
        loaders = [(s, c) for s, c in self._calls() if dotted(c.func).split(".")[-1] == "DataLoader"]
        if not loaders:
            raise NotTold("no DataLoader is assigned")
        # The training loader has "train" in its name, or shuffles.
        lines = self._text.splitlines()
        return max(
            loaders,
            key=lambda loader: (
                "train" in lines[loader[1].lineno - 1].partition("=")[0],
                getattr(keyword(loader[1], "shuffle"), "value", None) is True,
            ),
        )

    def _calls(self) -> Iterator[tuple[_Scope, ast.Call]]:
        """Yield the calls whose results are assigned, each with its scope."""
        for scope in self._scopes:
            for statement, _ in statements(scope.body):
                if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Call):
                    yield scope, statement.value

    def _backward(self) -> tuple[_Scope, ast.For, str, int]:
        """Return the scope and the innermost loop around ``backward()``, and the name and line of the loss."""
        for scope in self._scopes:
            inside = [n for n, _ in statements(scope.body)]
            for node in inside:
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                    of = call.func.value
                    if isinstance(of, ast.Call) and dotted(of.func).endswith(".scale"):
                        of = of.args[0]
                    loops = [n for n in inside if isinstance(n, ast.For) and any(m is node for m in ast.walk(n))]
                    if loops and isinstance(of, ast.Name):
                        return scope, loops[-1], of.id, node.lineno
        raise NotTold("no LOSS.backward() in a loop over batches was found")

    def _origin(self, scope: _Scope, name: str) -> tuple[_Scope, str]:
        """Follow a parameter to the variable that the function's only call passes for it."""
        if isinstance(scope, ast.FunctionDef):
            argument = self._given(scope, name)
            if argument is not None and isinstance(argument[1], ast.Name):
                return self._origin(argument[0], argument[1].id)
            assigned = any(name in bound(t) for s, _ in statements(scope.body) for t in targets(s))
            if argument is None and not assigned:
                return self._tree, name
        return scope, name

    def _given(self, scope: ast.FunctionDef, name: str) -> tuple[_Scope, ast.expr] | None:
        names = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
        calls = [
            (s, n) for s in self._scopes for n in own(s) if isinstance(n, ast.Call) and dotted(n.func) == scope.name
        ]
        if name not in names or len(calls) != 1:
            return None
        caller, call = calls[0]
        by_name = {k.arg: k.value for k in call.keywords}
        place = names.index(name)
        argument = call.args[place] if place < len(call.args) else by_name.get(name)
        return None if argument is None else (caller, argument)

    def _part(
        self,
        scope: _Scope,
        result: ast.expr,
        given: set[str],
        model: str = "model",
        *,
        calls: bool = False,
        placed: bool = False,
    ) -> Part:
        """Return the statements before ``result`` that it depends on, followed by its return.

        Args:
            given: names that the workload's function receives.
            calls: keep method calls, which may change the result.
            placed: keep moves to the device; otherwise autotune does the moving.
        """
        chosen = self._slice(scope, result, given, calls)
        lines = [line for node in chosen for line in self._write(node, placed).splitlines()]
        lines.append(f"return {self._write(result, placed)}")
        if any(re.search(r"\bdevice\b", line) for line in lines):
            lines.insert(0, "device = ctx.device")
        # A bare name is only returned there; report the line that assigns it.
        name = result.id if isinstance(result, ast.Name) else None
        assignments = [s for s in chosen if any(isinstance(t, ast.Name) and t.id == name for t in targets(s))]
        return Part(lines, assignments[0].lineno if assignments else result.lineno, model)

    def _slice(self, scope: _Scope, result: ast.expr, given: set[str], calls: bool = False) -> list[ast.stmt]:
        chosen: list[ast.stmt] = []
        # Command-line options are replaced by their defaults.
        given = {*given, "device", self._defaults.get("", "")}
        needed = names_in(result) - given
        before = [(s, c) for s, c in statements(scope.body) if s.lineno < result.lineno]
        for statement, conditional in reversed(before):
            changed = {name for target in targets(statement) for name in bound(target)}
            if calls and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                root, _, method = dotted(statement.value.func).partition(".")
                changed = {root} if method and method not in PLACING else set()
            if not changed & needed:
                continue
            if conditional or not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
                raise NotTold(f"line {statement.lineno} decides it only when the script runs")
            chosen.append(statement)
            needed |= names_in(statement) - given
        local = {name for s in chosen for t in targets(s) for name in bound(t)}
        outside = [s for name in sorted(needed - local) for s in self._from_outside(scope, name)]
        return outside + chosen[::-1]

    def _from_outside(self, scope: _Scope, name: str) -> list[ast.stmt]:
        """Provide the definition of a name not assigned in a scope: a parameter, a top-level name, or a built-in."""
        if isinstance(scope, ast.FunctionDef):
            argument = self._given(scope, name)
            if argument is not None:
                caller, value = argument
                inside = self._slice(caller, value, set())
                same = isinstance(value, ast.Name) and value.id == name
                new = ast.Assign([ast.Name(name, ast.Store())], value, lineno=value.lineno, col_offset=0)
                return inside if same else [*inside, new]
            if name in {a.arg for a in ast.walk(scope.args) if isinstance(a, ast.arg)}:
                raise NotTold(f"what {scope.name}() gets for {name} is not certain")
        self._take(name)
        return []

    def _take(self, name: str) -> None:
        node = self._top.get(name)
        if node is None:
            if not hasattr(builtins, name):
                raise NotTold(f"where {name} comes from was not found")
            return
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        if first in self._taken:
            return
        if "parse_args" in ast.unparse(node):
            raise NotTold(f"{name} is known only when the script runs")
        self._taken[first] = node
        for used in sorted(names_in(node) & self._top.keys()):
            self._take(used)

    def _write(self, node: ast.AST, placed: bool) -> str:
        stripped = Plain(self._defaults, placed=placed).visit(copy.deepcopy(node))
        return "" if stripped is None else ast.unparse(ast.fix_missing_locations(stripped))


# ``autotune init``: write a commented workload (either a plain one that runs, or the parts of a training script), or
# the file of a script that is tuned as it stands.

#: Key under which a context keeps the command behind ``--``.
_WORDS = "autotune.words"
_WORKLOAD_HEAD = '''\
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
#: The functions of the plain workload: their arguments, docstrings and lines.
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
    """A command that separates its own arguments from a user's command behind ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        separator = args.index("--") if "--" in args else len(args)
        ctx.meta[_WORDS] = args[separator + 1 :]
        return super().parse_args(ctx, args[:separator])

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
        text = _plain_workload(target.name)
    else:
        text, missing = _from_script(target.name, from_)
    write_atomic(target, text)
    typer.echo(f"wrote {target}")
    for name, reason in missing:
        typer.echo(f"  {name}: not told by the script, because {reason}; write it where TODO stands")
    typer.echo(f"next: autotune search --model {target}" if not missing else f"then: autotune search --model {target}")


def _plain_workload(name: str) -> str:
    parts = [_WORKLOAD_HEAD.format(origin="", name=name), _PLAIN_IMPORTS, _CONSTANTS.format(size=64, note=""), _DATA]
    functions = [_function(n, a, t, lines) for n, (a, t, lines) in _FUNCTIONS.items() if lines]
    return "\n".join(parts) + "".join(functions)


def _function(name: str, arguments: str, title: str, lines: list[str], model: str = "model") -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f'\n\ndef {name}({arguments.format(model=model)}):\n    """{title}"""\n{body}'


def _from_script(name: str, script: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the workload's text, and the parts that the script does not determine, each with the reason."""
    try:
        source = Script(script.read_text())
    except (OSError, ValueError, SyntaxError) as error:
        raise UsageError(f"{script} cannot be read as Python: {error}") from error
    missing: list[tuple[str, str]] = []
    functions = []
    readers: dict[str, Callable[[], Part | None]] = {n: getattr(source, n) for n in _FUNCTIONS}
    for part_name, read in readers.items():
        arguments, title, _ = _FUNCTIONS[part_name]
        try:
            part = read()
        except NotTold as reason:
            missing.append((part_name, str(reason)))
            todo = f"{name}: {part_name}(…) is still to be written; {script.name} did not tell it."
            lines = [f"# TODO: {reason}.", f"raise NotImplementedError({todo!r})"]
            functions.append(_function(part_name, arguments, title, lines))
            continue
        if part is not None:
            where = f"# From line {part.line} of {script.name}."
            functions.append(_function(part_name, arguments, title, [where, *part.lines], part.model))
    size, note = DEFAULT_BATCH_SIZE, ""
    try:
        size = source.batch_size()
    except NotTold as reason:
        missing.append(("BATCH_SIZE", str(reason)))
        note = f"  # TODO: {reason}"
    parts = [
        _WORKLOAD_HEAD.format(origin=f", with the parts of {script.name}", name=name),
        source.support() + "\n",
        _CONSTANTS.format(size=size, note=note),
    ]
    return "\n".join(parts) + "".join(functions), missing
