"""Helpers to read a script's syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

#: Methods that put a model onto a device or into a mode, which autotune does itself.
PLACING = ("to", "cuda", "cpu", "train", "float")
#: Wrappers of a model that autotune applies itself, or that belong to several processes.
_WRAPPERS = ("compile", "DataParallel", "DistributedDataParallel", "DDP")


class NotTold(Exception):
    """A part that the source does not tell, with the reason as a clause."""


class Plain(ast.NodeTransformer):
    """Replaces options of the command line by their defaults, and leaves out what autotune does itself."""

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
        cast = "dtype" in ast.unparse(node) or ast.unparse(node.func).startswith("torch.")
        return node if cast else node.func.value

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        self.generic_visit(node)
        return None if ast.unparse(node.targets[0]).strip("()") == ast.unparse(node.value).strip("()") else node


def statements(body: list[ast.stmt], conditional: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements in order, with those inside blocks but not those inside definitions, and whether each may be
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
    """Return the variables that an assignment to a target binds or changes."""
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
    found = next((k.value for k in call.keywords if k.arg == name), None)
    return found or ast.Constant(None, lineno=call.lineno, col_offset=0)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of the functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from own(child)


def argparse_defaults(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield options with the source of their defaults, and under the empty name the variable that has them."""
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
