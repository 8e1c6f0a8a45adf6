"""The source of functions and classes: where it is found, and which names it uses."""

from __future__ import annotations

import ast
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from autotune.base.errors import UsageError

#: Scopes that run when the scope around them does, unlike functions.
_AT_ONCE = {"listcomp", "setcomp", "dictcomp", "genexpr"}


@dataclass(frozen=True)
class Definition:
    """One function or class as source.

    Attributes:
        text: its source, without indentation, with its decorators.
        names: the global names that it uses; early: those of them that are needed when it is defined.
        globals: the namespace in which it was defined.
        future: it was compiled with ``from __future__ import annotations``.
    """

    text: str
    names: frozenset[str]
    early: frozenset[str]
    globals: Mapping[str, Any]
    future: bool


def definition_of(value: FunctionType | type, called: str) -> Definition:
    """Find the source of a function or class.

    Args:
        called: its name in error messages.

    Raises:
        UsageError: it is a lambda, uses variables of a function around it, or its source cannot be found.
    """
    functions = [f for f in ([value] if isinstance(value, FunctionType) else vars(value).values()) if _is_function(f)]
    functions = [inspect.unwrap(function) for function in functions]
    for function in functions:
        outer = [name for name in function.__code__.co_freevars if name != "__class__"]
        if outer:
            raise UsageError(
                f"{called} uses {', '.join(outer)} of the function around it, which other processes do not have",
                advice="define it at the top level, and make what it needs inside it.",
            )
    if isinstance(value, FunctionType):
        text = _function_source(functions[0], called)
        namespace: Mapping[str, Any] = functions[0].__globals__
    else:
        text = _class_source(value, functions, called)
        namespace = vars(sys.modules[value.__module__])
    names, early = _names(text)
    future = any(f.__code__.co_flags & annotations.compiler_flag for f in functions)
    return Definition(text, frozenset(names), frozenset(early), namespace, future)


def attribute_chains(text: str) -> Iterator[str]:
    """Yield what the source says with dots, as in ``package.module.name``, and all beginnings of it with a dot."""
    for node in ast.walk(ast.parse(text)):
        parts: list[str] = []
        part: ast.AST = node
        while isinstance(part, ast.Attribute):
            parts.insert(0, part.attr)
            part = part.value
        if parts and isinstance(part, ast.Name):
            yield ".".join([part.id, *parts])


def _is_function(found: object) -> bool:
    return isinstance(inspect.unwrap(found), FunctionType) if callable(found) else False


def _function_source(function: FunctionType, called: str) -> str:
    if function.__name__ == "<lambda>":
        raise UsageError(f"{called} is a lambda, whose source cannot be told apart", advice="write it with def.")
    try:
        text = textwrap.dedent(inspect.getsource(function))
        codes = list(_codes(compile(text, "<workload>", "exec", dont_inherit=True)))
    except (OSError, TypeError, SyntaxError) as error:
        raise _no_source(called) from error
    if not any(_outline(code) == _outline(function.__code__) for code in codes):
        raise UsageError(f"the source of {called} has changed since it was defined", advice="define it again.")
    return text


def _class_source(value: type, functions: list[FunctionType], called: str) -> str:
    # A notebook's classes have no file that inspect could find, but their methods know the cell.
    for function in functions:
        lines = linecache.getlines(function.__code__.co_filename)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if first <= function.__code__.co_firstlineno <= (node.end_lineno or 0):
                    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    try:
        return _in_cells(value) or textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError) as error:
        raise _no_source(called) from error


def _in_cells(value: type) -> str | None:
    """Return the source of a class without methods of its own, such as a dataclass, from the last cell that defined it.

    IPython keeps the cells that have run in a list called ``In``.
    """
    cells = getattr(sys.modules[value.__module__], "In", []) if value.__module__ == "__main__" else []
    for cell in reversed(cells if isinstance(cells, list) else []):
        try:
            nodes = ast.parse(cell).body
        except (SyntaxError, TypeError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                return "\n".join(cell.split("\n")[first - 1 : node.end_lineno])
    return None


def _no_source(called: str) -> UsageError:
    return UsageError(
        f"the source of {called} cannot be found, so other processes cannot have it",
        advice="define it in a notebook's cell or in a file.",
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _outline(code: CodeType) -> tuple[Any, ...]:
    """Return what stays equal if a function is compiled alone. Its bytecode depends on the imports around it."""
    plain = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType | frozenset)]
    return code.co_name, code.co_names, code.co_varnames, plain


def _names(text: str) -> tuple[set[str], set[str]]:
    """Return the global names that a definition uses, and those that it needs when it is defined."""
    used: set[str] = set()
    early: set[str] = set()

    def walk(table: symtable.SymbolTable, at_once: bool) -> None:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                used.add(symbol.get_name())
                if at_once:
                    early.add(symbol.get_name())
        for inner in table.get_children():
            walk(inner, at_once and (inner.get_type() != "function" or inner.get_name() in _AT_ONCE))

    walk(symtable.symtable(text, "<workload>", "exec"), at_once=True)
    return used, early
