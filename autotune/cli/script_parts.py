"""The parts of a training script that a workload needs, told from its source. The script is never run.

The optimizer names the model, ``backward()`` the loss, ``DataLoader(…)`` the data set. Each part is the expression
found there, with the assignments before it that it depends on. Where that is not certain (a value decided by a
condition, an option without a default), the part is not told.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.cli.script_syntax import (
    PLACING,
    NotTold,
    Plain,
    argparse_defaults,
    bound,
    defined,
    dotted,
    keyword,
    names_in,
    own,
    statements,
    targets,
)

_OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "LBFGS")
_Scope = ast.Module | ast.FunctionDef


@dataclass(frozen=True)
class Part:
    """Statements that end with a ``return``, without indentation.

    Attributes:
        lines: the source. line: where it was found in the script. model: name of the model there.
    """

    lines: list[str]
    line: int
    model: str = "model"


class Script:
    """A training script as a syntax tree.

    Raises:
        SyntaxError: (from the constructor) the text is no Python.
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
        found = keyword(call, "collate_fn")
        return None if isinstance(found, ast.Constant) else self._part(scope, found, set())

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
        mine = next((n for n in sorted(used) if self._origin(scope, n) == (opt_scope, model)), None)
        if mine is None:
            raise NotTold("the model in the training loop is not certainly the optimizer's")
        end = ast.Name(name, ast.Load(), lineno=line, col_offset=0)
        found = self._part(scope, end, {mine, *bound(batch)}, mine, placed=True)
        unpacked = ast.unparse(batch)
        unpacked = unpacked[1:-1] if unpacked.startswith("(") else unpacked
        return Part([f"{unpacked} = batch", *found.lines], found.line, mine)

    def support(self) -> str:
        """Return the script's own imports, definitions and constants that the parts told so far use, in its order."""
        lines, text = self._text.splitlines(), ""
        for first, node in sorted(self._taken.items()):
            gap = "\n\n\n" if isinstance(node, ast.FunctionDef | ast.ClassDef) else "\n"
            text += gap + "\n".join(lines[first - 1 : node.end_lineno])
        return text.strip("\n")

    def _optimizer(self) -> tuple[_Scope, ast.Call, str]:
        for scope, call in self._calls():
            if _is_optimizer(dotted(call.func)):
                of = next((n for n in ast.walk(call) if getattr(n, "attr", "").endswith("parameters")), None)
                if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name):
                    return scope, call, of.value.id
        raise NotTold("no torch.optim optimizer over MODEL.parameters() is assigned")

    def _loader(self) -> tuple[_Scope, ast.Call]:
        found = [(s, c) for s, c in self._calls() if dotted(c.func).split(".")[-1] == "DataLoader"]
        if not found:
            raise NotTold("no DataLoader is assigned")
        # The training's one says so, or shuffles.
        lines = self._text.splitlines()
        return max(
            found,
            key=lambda one: (
                "train" in lines[one[1].lineno - 1].partition("=")[0],
                getattr(keyword(one[1], "shuffle"), "value", None) is True,
            ),
        )

    def _calls(self) -> Iterator[tuple[_Scope, ast.Call]]:
        """Yield the calls whose results are assigned, each with its scope."""
        for scope in self._scopes:
            for statement, _ in statements(scope.body):
                if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Call):
                    yield scope, statement.value

    def _backward(self) -> tuple[_Scope, ast.For, str, int]:
        """Return the innermost loop around ``backward()`` with its scope, and the loss's name and line."""
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
        """Follow a parameter to the variable that the function's only call gives for it."""
        if isinstance(scope, ast.FunctionDef):
            given = self._given(scope, name)
            if given is not None and isinstance(given[1], ast.Name):
                return self._origin(given[0], given[1].id)
            assigned = any(name in bound(t) for s, _ in statements(scope.body) for t in targets(s))
            if given is None and not assigned:
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
        found = call.args[place] if place < len(call.args) else by_name.get(name)
        return None if found is None else (caller, found)

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
        """Return the statements before ``result`` that it depends on, and its return.

        Args:
            given: names that the workload's function receives.
            calls: keep calls of methods, which may change the result.
            placed: keep what is moved to the device; otherwise autotune moves it.
        """
        chosen = self._slice(scope, result, given, calls)
        lines = [line for node in chosen for line in self._write(node, placed).splitlines()]
        lines.append(f"return {self._write(result, placed)}")
        if any(re.search(r"\bdevice\b", line) for line in lines):
            lines.insert(0, "device = ctx.device")
        # A name is only used at the end; what it stands for is assigned before.
        made = [s for s in chosen if isinstance(result, ast.Name) and result.id in map(_plain_name, targets(s))]
        return Part(lines, made[0].lineno if made else result.lineno, model)

    def _slice(self, scope: _Scope, result: ast.expr, given: set[str], calls: bool = False) -> list[ast.stmt]:
        chosen: list[ast.stmt] = []
        # Options of the command line are replaced by their defaults.
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
        """Provide for a name that a scope does not assign: a parameter, the script's own, or a built-in."""
        if isinstance(scope, ast.FunctionDef):
            found = self._given(scope, name)
            if found is not None:
                caller, value = found
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
        found = Plain(self._defaults, placed=placed).visit(copy.deepcopy(node))
        return "" if found is None else ast.unparse(ast.fix_missing_locations(found))


def _is_optimizer(called: str) -> bool:
    *before, last = called.split(".")
    return last in _OPTIMIZERS or ("optim" in before and last[:1].isupper())


def _plain_name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""
